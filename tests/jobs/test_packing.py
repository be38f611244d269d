"""Which runs share a job, how long it may take, and what it costs: properties over any series, and earlier runs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.cli import cli as command_line
from dlbench.errors import UserError
from dlbench.jobs.campaign.campaign import (
    MARGIN,
    START_S,
    Packing,
    campaign_of,
    estimates,
    idle_nodes,
    job_of,
    jobs_of,
    on_node_sets,
    refuse_above,
)
from dlbench.jobs.scripts.job import Job, limit_seconds, time_text
from dlbench.records.folder import RunFolder, create
from dlbench.specs.expand import expand
from dlbench.specs.launch import expanded
from dlbench.specs.plan import LaunchPlan, LayoutSpec, RunPlan
from dlbench.specs.requests import Request
from tests.support.run_factory import edit_json, plans, quality_plans

ASKED: dict[str, Any] = {"workload": "cosmoflow", "preset": "ci", "points_are": "nodes", "system": "box", "series": "s"}


def plans_of(**request: Any) -> list[RunPlan]:
    return expand(Request(**{**ASKED, **request}), machine_cores=4)


(PLAN,) = plans_of(points=(1,))


def run_of(number: int, nodes: int, per_node: int, partition: str) -> RunPlan:
    """A run without a side, without validation, which takes most of the time."""
    slurm = PLAN.system.slurm.model_copy(update={"partition": partition, "max_time": "01:00:00"})
    return PLAN.model_copy(
        update={
            "run_id": f"r{number}",
            "layout": LayoutSpec(nodes=nodes, ranks=nodes * per_node, cores_per_rank=1),
            "system": PLAN.system.model_copy(update={"slurm": slurm}),
        }
    )


SERIES = st.lists(
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from("ab"), st.integers(1, 5000)),
    min_size=1,
    max_size=14,
)


@given(series=SERIES, packing=st.sampled_from(["points", "all", "runs"]), chain=st.booleans())
def test_any_series_is_packed(series: list[tuple[int, int, str, int]], packing: Packing, chain: bool) -> None:
    plans = [run_of(number, *size) for number, (*size, _) in enumerate(series)]
    seconds = {plan.run_id: float(took) for plan, (*_, took) in zip(plans, series, strict=True)}
    jobs = jobs_of(plans, seconds, packing=packing, chain=chain)
    # Every run once, in the order of the series inside its job, and jobs by their first runs.
    assert Counter(run_id for job in jobs for run_id in job.run_ids) == Counter(plan.run_id for plan in plans)
    order = {plan.run_id: number for number, plan in enumerate(plans)}
    for job in jobs:
        assert [order[run_id] for run_id in job.run_ids] == sorted(order[run_id] for run_id in job.run_ids)
        _one_request(job, packing)
        _its_time(job, seconds, packing, chain)
    # As few jobs as there are requests and hours: two neighbours that ask for the same do not fit into one.
    for one, other in pairwise(jobs):
        if packing != "runs" and _asked(one.plans[0], packing) == _asked(other.plans[0], packing) and _even(plans):
            assert sum(seconds[run_id] for run_id in (*one.run_ids, other.run_ids[0])) > 3600
    # Nodes that a job holds are used or idle.
    for job in jobs:
        used = sum((plan.layout.nodes + idle_nodes(job, plan)) * seconds[plan.run_id] for plan in job.plans) / 3600
        assert job.node_hours is not None
        assert job.node_hours >= used - 1e-9
        if not job.is_array:
            assert job.node_hours - used < job.shape.layout.nodes * 60 / 3600 + 1e-9


def _asked(plan: LaunchPlan, packing: Packing) -> tuple[object, ...]:
    size = () if packing == "all" else (plan.layout.nodes, plan.layout.ranks)
    return (*size, plan.system.slurm.partition)


def _even(plans: list[RunPlan]) -> bool:
    return len({plan.layout.ranks_per_node for plan in plans}) == 1


def _one_request(job: Job, packing: Packing) -> None:
    assert len({_asked(plan, packing) for plan in job.plans}) == 1
    for plan in job.plans:
        assert plan.layout.nodes <= job.shape.layout.nodes
        assert plan.layout.ranks_per_node <= job.shape.layout.ranks_per_node


def _its_time(job: Job, seconds: dict[str, float], packing: Packing, chain: bool) -> None:
    every = [seconds[run_id] for run_id in job.run_ids]
    needed = max(every) if packing == "runs" else sum(every)
    assert needed <= limit_seconds(job.time_limit) < needed + 60
    assert job.array_limit == ((1 if chain else 0) if packing == "runs" and len(every) > 1 else None)
    assert packing == "runs" or len(every) == 1 or sum(every) <= 3600


def test_repeats_stay_interleaved_over_swept_values() -> None:
    plans = plans_of(points=(1, 2), repeats=2, sweep={"train.seed": (1, 2)})
    one, two = jobs_of(plans)
    for job, nodes in ((one, 1), (two, 2)):
        assert [(p.series.repeat, p.series.axes["train.seed"]) for p in job.plans if isinstance(p, RunPlan)] == [
            (0, 1),
            (0, 2),
            (1, 2),
            (1, 1),
        ]
        assert {plan.layout.nodes for plan in job.plans} == {nodes}
        assert job.time_limit == "00:40:00"
    assert [job.name for job in (one, two)] == ["cosmoflow-1node-1rank-4runs", "cosmoflow-2nodes-2ranks-4runs"]


def test_runs_that_ask_slurm_for_different_things_are_apart() -> None:
    plans = plans_of(points=(1,), repeats=2, sweep={"system.slurm.partition": ("box", "other")})
    assert [{plan.system.slurm.partition for plan in job.plans} for job in jobs_of(plans)] == [{"box"}, {"other"}]


@pytest.mark.parametrize("packing", ["points", "all"])
def test_pairs_of_a_comparison_are_never_torn(packing: Packing) -> None:
    given = {"system.slurm.max_time": "50"}
    plans = plans_of(points=(1, 2), repeats=3, sides={"a": {}, "b": {"train.seed": 7}}, overrides=given)
    jobs = jobs_of(plans, packing=packing)
    assert [len(job.plans) for job in jobs] == [4, 2, 4, 2] if packing == "points" else [4, 4, 4]
    for job in jobs:
        pairs = zip(job.plans[::2], job.plans[1::2], strict=True)
        assert all(one.run_id[:-1] == other.run_id[:-1] for one, other in pairs)


@pytest.mark.parametrize(
    ("limit", "runs", "expected"),
    [
        ("00:10:00", 1, "00:10:00"),
        ("00:10:00", 10, "01:40:00"),
        ("10", 6, "01:00:00"),
        ("10:30", 2, "00:21:00"),
        ("12:00:00", 20, "10-00:00:00"),
        ("1-12", 2, "3-00:00:00"),
        ("1-0:30", 2, "2-01:00:00"),
        ("1-02:03:04", 3, "3-06:10:00"),  # Slurm counts minutes, and would round up itself
        ("0", 10, "00:00:00"),
        ("90:00", 1, "01:30:00"),
    ],
)
def test_the_time_of_a_job_is_that_of_all_its_runs(limit: str, runs: int, expected: str) -> None:
    plans = plans_of(points=(1,), repeats=runs, overrides={"system.slurm.time_limit": limit})
    job = job_of(plans)
    assert job.time_limit == expected
    assert (job.node_hours is None) == (limit == "0")
    assert limit_seconds(time_text(limit_seconds(limit))) == limit_seconds(limit)


# Times by earlier runs


def earlier(out: Path, plan: LaunchPlan, took_s: float, *, startup_s: float = 5.0) -> None:
    """The folder of a run that took so long, in equal steps but for its start and 3 s at its end."""
    assert isinstance(plan, RunPlan)
    steps = plan.measure.warmup_steps + plan.measure.measured_steps
    step_s = (took_s - startup_s - 3.0) / steps
    minutes, seconds = divmod(took_s, 60)
    record = {
        "started": "2026-03-01T12:00:00.000000Z",
        "finished": f"2026-03-01T12:{int(minutes):02d}:{seconds:09.6f}Z",
        "steps": steps,
        "ranks": [{"measured_s": step_s * plan.measure.measured_steps}],
    }
    create(out, plan).record.write_text(json.dumps(record))


def test_times_come_from_earlier_runs_of_the_same_configuration(tmp_path: Path) -> None:
    for plan, took_s in zip(plans_of(points=(1, 2), repeats=3, series="then"), (40, 50, 52, 44, 42, 60), strict=True):
        earlier(tmp_path, plan, took_s)
    plans = plans_of(points=(1, 2, 4), repeats=1)
    found = estimates(plans, tmp_path)
    one, two, four = (found[plan.run_id] for plan in plans)
    assert (one.earlier, one.longest_s, one.expected_s) == (3, 44.0, 42.0)
    assert one.seconds == MARGIN * 44 + START_S
    assert one.text == "estimated from 3 earlier runs: the longest 44 s per run, margin 1.5, and 60 s for its start"
    assert (two.earlier, two.longest_s, two.expected_s) == (3, 60.0, 52.0)
    assert (four.earlier, four.seconds, four.expected_s) == (0, 600.0, None)
    assert four.text == "time limit of 10 min 00 s per run"
    campaign = campaign_of(plans, tmp_path)
    assert [job.time_limit for job in campaign.jobs] == ["00:03:00", "00:03:00", "00:10:00"]
    assert campaign.expected is None
    assert campaign.bound == pytest.approx((3 + 2 * 3 + 4 * 10) / 60)
    known = campaign_of(plans[:2], tmp_path, packing="all")
    assert known.expected == pytest.approx(2 * (42 + 52) / 3600)
    assert known.idle_bound == pytest.approx((MARGIN * 44 + START_S) / 3600)


def test_times_scale_with_the_steps_alone(tmp_path: Path) -> None:
    """8 s of a run are its start and its end, whatever it measures."""
    base = {"measure.warmup_steps": 2, "measure.measured_steps": 8}
    (before,) = plans_of(points=(1,), overrides=base, series="then")
    earlier(tmp_path, before, 28.0)
    for steps, expected_s in ((8, 28.0), (98, 208.0), (1, 14.0)):
        (plan,) = plans_of(points=(1,), overrides={**base, "measure.measured_steps": steps})
        assert estimates([plan], tmp_path)[plan.run_id].expected_s == pytest.approx(expected_s)
    # Not below what is measured in seconds.
    (plan,) = plans_of(points=(1,), overrides={**base, "measure.measured_s": 300.0})
    assert estimates([plan], tmp_path)[plan.run_id].expected_s == pytest.approx(308.0)


@pytest.mark.parametrize(
    ("max_time", "seconds"), [("00:06:00", 360.0), ("00:05:00", 300.0), ("00:04:00", 420.0), ("0", 420.0)]
)
def test_a_margin_does_not_make_a_run_too_long_for_its_site(tmp_path: Path, max_time: str, seconds: float) -> None:
    """Earlier runs took 4 minutes: with their start they fit into 6 and into 5, and not into 4."""
    overrides = {"system.slurm.max_time": max_time}
    (before,) = plans_of(points=(1,), series="then", overrides=overrides)
    earlier(tmp_path, before, 240.0)
    plans = plans_of(points=(1,), overrides=overrides)
    found = estimates(plans, tmp_path)[plans[0].run_id]
    assert found.seconds == seconds
    assert found.text.endswith("within system.slurm.max_time") == (seconds < 420)
    (job,) = campaign_of(plans, tmp_path).jobs
    assert limit_seconds(job.time_limit) == seconds


@pytest.mark.parametrize(
    ("max_time", "limits"), [("0", ["00:10:00", "00:06:00"]), ("00:07:00", ["00:07:00", "00:06:00"])]
)
def test_the_warning_before_an_estimated_limit_comes_after_the_runs(
    tmp_path: Path, max_time: str, limits: list[str]
) -> None:
    """It may come 180 s before the limit; two runs of 100 s with their margins take 420 s, one of 62 s 153 s."""
    overrides = {"system.slurm.requeue": True, "system.slurm.max_time": max_time}
    before = plans_of(points=(1, 2), series="then", overrides=overrides)
    for plan, took_s in zip(before, (100.0, 62.0), strict=True):
        earlier(tmp_path, plan, took_s)
    made = plans_of(points=(1, 2), repeats=2, overrides=overrides)
    plans = [*(plan for plan in made if plan.layout.nodes == 1), made[1]]
    campaign = campaign_of(plans, tmp_path)
    assert [job.time_limit for job in campaign.jobs] == limits
    said = campaign.estimates[plans[0].run_id].text
    assert said.endswith("; a job gets 180 s more, because Slurm may warn that long before the limit")


def test_a_limit_that_ends_with_the_warning_is_refused(tmp_path: Path) -> None:
    """The warning is asked for 120 s before the end, and may come 60 s earlier."""

    def refused(**settings: Any) -> str:
        plans = plans_of(points=(1,), overrides={"system.slurm.requeue": True, **settings})
        try:
            campaign_of(plans, tmp_path, time="00:03:00")
        except UserError as error:
            return str(error)
        return ""

    assert "leaves 0 s: attempts may be stopped before they end; give more than 00:03:00 (--time," in refused()
    assert refused(**{"system.slurm.warn_before_s": 30}) == ""
    assert refused(**{"system.slurm.warn_before_s": 0}) == ""
    long = {"system.slurm.warn_before_s": 30, "measure.measured_s": 90.0}
    assert "leaves 90 s, and a run needs 1 min 30 s or more: attempts may be stopped before they end; give" in refused(
        **long
    )
    assert refused(**long, **{"checkpoint.every_steps": 5}) == ""  # it goes on
    overrides = {"system.slurm.requeue": True, "system.slurm.max_time": "4"}
    (before,) = plans_of(points=(1,), series="then", overrides=overrides)
    earlier(tmp_path, before, 100.0)
    with pytest.raises(UserError, match="leaves 60 s, and a run needs 1 min 40 s or more"):
        campaign_of(plans_of(points=(1,), overrides=overrides), tmp_path)


def test_the_last_part_of_a_run_to_a_quality_is_no_history(tmp_path: Path) -> None:
    """What was resumed after an interruption has a record of the time since then alone; runs of speed measure anew."""
    made = (plans_of(points=(1,), series="then"), quality_plans(points=(1,), repeats=1, series="then"))
    for (before,), is_known in zip(made, (True, False), strict=True):
        earlier(tmp_path, before, 30.0)
        folder = RunFolder(tmp_path / before.run_id)
        edit_json(folder.record, attempt=2, first_step=7)
        wanted = before.model_copy(update={"run_id": "now"})
        assert estimates([wanted], tmp_path)["now"].earlier == is_known
        edit_json(folder.record, attempt=1, first_step=0)
        assert estimates([wanted], tmp_path)["now"].earlier == 1


def test_what_was_asked_for_wins_over_earlier_runs(tmp_path: Path) -> None:
    (before,) = plans_of(points=(1,), series="then")
    earlier(tmp_path, before, 30.0)
    (plan,) = plans_of(points=(1,))
    assert estimates([plan], tmp_path)[plan.run_id].earlier == 1
    assert estimates([plan], tmp_path, asked="20")[plan.run_id].seconds == 1200
    (said,) = plans_of(points=(1,), overrides={"system.slurm.time_limit": "15"})
    found = estimates([said], tmp_path)[said.run_id]
    assert (found.seconds, found.earlier) == (900, 0)


def test_other_configurations_and_damage_are_no_history(tmp_path: Path) -> None:
    (one, two, three) = plans_of(points=(1,), repeats=3, series="then")
    earlier(tmp_path, one.model_copy(update={"workload": one.workload.model_copy(update={"notice": "x"})}), 30.0)
    earlier(tmp_path, two, 30.0)
    (tmp_path / two.run_id / "record.json").write_text('{"started": 5')
    create(tmp_path, three)
    (tmp_path / "a file").write_text("x")
    (plan,) = plans_of(points=(1,))
    assert estimates([plan], tmp_path)[plan.run_id].earlier == 0
    assert estimates([plan], tmp_path / "nowhere")[plan.run_id].earlier == 0


# Cost


@pytest.mark.parametrize(
    ("most", "packing", "told"),
    [
        (2.0, "points", None),
        (1.99, "points", "8 runs may take 2 node-hours (nodes x time limit); raise it"),
        (2.5, "all", "8 runs may take 2.667 node-hours (nodes x time limit); raise it"),
    ],
)
def test_a_campaign_that_costs_too_much_is_refused(
    most: float, packing: Packing, told: str | None, tmp_path: Path
) -> None:
    campaign = campaign_of(plans_of(points=(1, 2), repeats=4), tmp_path, packing=packing)
    if told is None:
        refuse_above(campaign, most)
        return
    with pytest.raises(UserError) as caught:
        refuse_above(campaign, most)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def series(repeats: int, nodes: tuple[int, ...] = (1, 2), **request: Any) -> list[RunPlan]:
    return plans(points=nodes, points_are="nodes", repeats=repeats, system="box", **request)


def hosts_of(plan: RunPlan) -> list[str]:
    return list(expanded(plan.system.slurm.nodelist or ""))


def test_the_same_nodes_for_every_repeat() -> None:
    found = on_node_sets(series(3), "same", "n[1-4]", share_one_job=False)
    assert {(plan.layout.nodes, plan.system.slurm.nodelist) for plan in found} == {(1, "n1"), (2, "n[1-2]")}
    assert len(jobs_of(found)) == 2


@settings(max_examples=20)
@given(pool=st.integers(3, 9), size=st.integers(1, 2), turns=st.integers(1, 2))
def test_in_turn_every_node_is_used_alike(pool: int, size: int, turns: int) -> None:
    found = on_node_sets(series(pool * turns, (size,)), "rotate", f"n[1-{pool}]", share_one_job=False)
    used = Counter(host for plan in found for host in hosts_of(plan))
    assert set(used.values()) == {size * turns}
    assert len(used) == pool
    assert all(len(set(hosts_of(plan))) == size for plan in found)
    # Neighbouring repeats never run on the same nodes, and so not in one job.
    assert all(hosts_of(one) != hosts_of(other) for one, other in pairwise(found))


def test_brackets_anywhere_in_a_name_are_counted() -> None:
    (first, second) = on_node_sets(series(2, (2,)), "rotate", "rack[0-1]n[1-2]", share_one_job=False)
    assert hosts_of(first) == ["rack0n1", "rack0n2"]
    assert hosts_of(second) == ["rack1n1", "rack1n2"]
    (one,) = on_node_sets(series(1, (2,)), "same", "n[09-10]-ib", share_one_job=False)
    assert one.system.slurm.nodelist == "n09-ib,n10-ib"


def test_points_that_share_a_job_share_its_nodes() -> None:
    found = on_node_sets(series(2), "rotate", "n[1-3]", share_one_job=True)
    assert {(plan.series.repeat, plan.system.slurm.nodelist) for plan in found} == {(0, "n[1-2]"), (1, "n[1,3]")}
    assert len(jobs_of(found, packing="all")) == 2


@pytest.mark.parametrize(
    ("mode", "hosts", "words"),
    [
        ("same", "n1", "names 1 nodes, and a run takes 2"),
        ("rotate", "n[1-2]", "no other node to rotate to; 3 or more"),
        ("same", "n[3-1]", "--same-nodes n[3-1]: 'n[3-1]': '3-1' is neither a number nor a range"),
        ("same", "n[1-2-3]", "'1-2-3' is neither a number"),
        ("same", "n[,]", "is neither a number"),
        ("same", "n[1-2", "has an unmatched bracket"),
        ("same", "n[1-999999999]", "stands for more than 65,536 hosts"),
        ("same", "r[1-999]n[1-999]", "stands for more than 65,536 hosts"),
    ],
)
def test_too_few_nodes_are_refused(mode: Any, hosts: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        on_node_sets(series(2), mode, hosts, share_one_job=False)


def test_nodes_that_the_system_names_are_not_overruled() -> None:
    named = series(2, overrides={"system.slurm.nodelist": "n7"})
    with pytest.raises(UserError, match=r"slurm\.nodelist is n7"):
        on_node_sets(named, "same", "n[1-2]", share_one_job=False)


def test_submit_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1", "--repeats", "2", "--dry-run")
    told = CliRunner().invoke(command_line, [*words, "--rotate-nodes", "n[1-2]", "--all-scripts"])
    assert told.exit_code == 0, told.output
    assert [f"--nodelist=n{number}" in told.stdout for number in (1, 2, 3)] == [True, True, False]
    refused = CliRunner().invoke(command_line, [*words, "--rotate-nodes", "n[1-2]", "--same-nodes", "n1"])
    assert "exclude each other" in str(refused.exception)
