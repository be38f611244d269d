"""Repeats, lost runs and sessions of a group; other load on the cores of the ranks is a warning."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dlbench.analysis.comparability import NOT_SHAPING_OPTIONS, averaged_id, group_id, is_shaping, planned_id
from dlbench.analysis.environments import load_doubts, loads_of
from dlbench.analysis.repeats import (
    LONGEST_S,
    PAUSE_S,
    Circumstances,
    allocations_of,
    mixed_configurations,
    sessions_of,
)
from dlbench.analysis.scaling import groups
from dlbench.analysis.table import RunTable, tabulate
from dlbench.cli import cli as dlbench
from dlbench.records.folder import RunFolder
from dlbench.records.scan import Run, read_run, scan
from dlbench.specs.plan import RunPlan
from dlbench.specs.system import SystemSpec
from dlbench.stats.estimates import Estimate
from dlbench.stats.pairing import session_of
from dlbench.views.causes.numbers import CausePoint, lost_percent
from dlbench.views.doubts import group_doubts
from dlbench.views.scaling_report import assemble
from tests.support.run_factory import NOW, Story, constant, plans, write_run

PHASES = (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)
SLURM = {"system.scheduler": "slurm", "system.launch.launcher": "srun-gloo", "system.node.cores": 8}

ASKED = {
    "system.modules": "openmpi/5.0",
    "system.slurm.partition": "other",
    "system.slurm.exclusive": False,
    "system.python": "/opt/python/bin/python3",
}


def write_every_second(out: Path, change: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Path:
    """Six runs on a cluster, of which every second was asked for, or met, something else."""
    asked = {**SLURM, **change}
    for plan, other in zip(
        plans(points=(1,), repeats=6, overrides=SLURM), plans(points=(1,), repeats=6, overrides=asked), strict=True
    ):
        odd = plan.series.repeat % 2 == 1
        story = Story(environment={"host": "n0", **(environment or {})} if odd and environment else {"host": "n0"})
        write_run(out, other if odd else plan, constant(PHASES), story)
    return out


@pytest.mark.parametrize("key", ASKED)
def test_what_was_asked_of_the_system_unlike_is_reported_apart(tmp_path: Path, key: str) -> None:
    report = assemble(scan(write_every_second(tmp_path, {key: ASKED[key]})))
    assert [[len(point.run_ids) for point in group.points] for group in report.groups] == [[3], [3]]
    assert len({group.label for group in report.groups}) == 2
    assert {one.value for group in report.groups for one in group.conditions if one.name == key} >= {str(ASKED[key])}


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    out = tmp_path_factory.mktemp("six")
    for plan in plans(points=(1,), repeats=6):
        write_run(out, plan, constant(PHASES))
    return scan(out).runs


def with_attempts(runs: Sequence[Run], attempts: Sequence[tuple[int, int]]) -> list[Run]:
    found = []
    for run, (attempt, first_step) in zip(runs, attempts, strict=True):
        record = run.record.model_copy(update={"attempt": attempt, "first_step": first_step})
        found.append(dataclasses.replace(run, record=record))
    return found


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 5])), min_size=6, max_size=6))
@settings(max_examples=8)  # each makes some thirty digests
def test_runs_that_went_on_after_an_interruption_are_averaged_with_no_clean_one(
    six: list[Run], attempts: list[tuple[int, int]]
) -> None:
    """Those that began anew are clean: nothing of an earlier attempt is in their figures."""
    runs = with_attempts(six, attempts)
    went_on = [attempt > 1 and first_step > 0 for attempt, first_step in attempts]
    assert {(averaged_id(run), gone) for run, gone in zip(runs, went_on, strict=True)} == {
        (averaged_id(with_attempts(six[:1], [(2, 5) if gone else (1, 0)])[0]), gone) for gone in set(went_on)
    }
    assert len({averaged_id(run) for run in runs}) == len(set(went_on))
    assert len({group_id(run) for run in runs}) == len(set(went_on))
    # A run that died is looked for in both.
    assert len({planned_id(run) for run in runs}) == 1


def test_runs_that_went_on_after_an_interruption_are_reported_apart(tmp_path: Path) -> None:
    for plan in plans(points=(1,), repeats=6):
        went_on = {"attempt": 2, "first_step": 7} if plan.series.repeat % 2 else {}
        write_run(tmp_path, plan, constant(PHASES), Story(record=went_on))
    report = assemble(scan(tmp_path))
    assert [[len(point.run_ids) for point in group.points] for group in report.groups] == [[3], [3]]
    assert sorted("after an interruption" in group.label for group in report.groups) == [False, True]
    one, other = scan(tmp_path).runs[:2]
    assert group_id(one) != group_id(other)
    # Begun anew it is a run like any other.
    anew = other.record
    assert group_id(dataclasses.replace(other, record=anew.model_copy(update={"first_step": 0}))) == group_id(one)


def test_doubts_say_whether_runs_are_averaged_or_compared(tmp_path: Path) -> None:
    old, new = {"kernel": "6.1", "host": "n0"}, {"kernel": "6.2", "host": "n1"}
    assert mixed_configurations({"1 rank": {"a": old, "b": old}, "2 ranks": {"c": {**old, "host": "n7"}}}) == []
    (compared,) = mixed_configurations({"1 rank": {"a": old}, "2 ranks": {"b": new}})
    assert compared.text.startswith("compared figures are of different configurations: kernel: 6.1 in 1, 6.2 in 1")
    (averaged,) = mixed_configurations({"1 rank": {"a": old, "b": new}, "2 ranks": {"c": old}})
    assert averaged.text == "runs that are averaged (at 1 rank) are not repeats: kernel: 6.1 in 2, 6.2 in 1"


OWN_VARIABLES = {
    "1 rank": {"HOROVOD_AUTOTUNE": "0", "HOROVOD_CYCLE_TIME": "1.0", "HOROVOD_GLOO_IFACE": "lo"},
    "2 ranks": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3", "HOROVOD_GLOO_IFACE": "lo"},
    "16 ranks": {"HOROVOD_AUTOTUNE": "1", "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "HOROVOD_GLOO_IFACE": "eth0"},
}


def test_what_dlbench_sets_itself_by_the_rank_count_is_no_difference() -> None:
    places = {
        at: {at: {f"variable.{name}": value for name, value in found.items()}} for at, found in OWN_VARIABLES.items()
    }
    assert mixed_configurations(places) == []
    places["16 ranks"]["other"] = {**places["16 ranks"]["16 ranks"], "variable.HOROVOD_GLOO_IFACE": "ib0"}
    (doubt,) = mixed_configurations(places)
    assert doubt.text == (
        "runs that are averaged (at 16 ranks) are not repeats: variable.HOROVOD_GLOO_IFACE: not set in 2, eth0 in 1, "
        "ib0 in 1"
    )


FACTS = st.dictionaries(st.sampled_from(["kernel", "package.torch", "variable.NCCL_ALGO"]), st.sampled_from("ab"))


@given(st.lists(st.lists(FACTS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_unequal_facts_are_named_and_equal_ones_are_not(cells: list[list[dict[str, str]]]) -> None:
    places = {str(i): {f"{i}.{j}": run for j, run in enumerate(runs)} for i, runs in enumerate(cells)}
    texts = " ".join(doubt.text for doubt in mixed_configurations(places))
    for key in ("kernel", "package.torch", "variable.NCCL_ALGO"):
        values = {run.get(key) for runs in cells for run in runs}
        assert (f"{key}:" in texts) is (len(values) > 1)
    is_averaged = any(len({json.dumps(run, sort_keys=True) for run in runs}) > 1 for runs in cells)
    assert ("averaged" in texts) is is_averaged


# The gate


@pytest.mark.parametrize("key", ASKED)
@pytest.mark.parametrize("command", ["compare", "check"])
def test_a_side_of_unlike_runs_is_refused_and_can_be_chosen(tmp_path: Path, key: str, command: str) -> None:
    old = write_every_second(tmp_path / "old", {key: ASKED[key]})
    new = tmp_path / "new"
    for plan in plans(points=(1,), repeats=5, overrides=SLURM):
        write_run(new, plan, constant(PHASES))
    sides = [str(old), str(new)] if command == "compare" else ["--baseline", str(old), "--candidate", str(new)]
    result = CliRunner().invoke(dlbench, [command, *sides])
    assert "are not repeats of each other" in str(result.exception)
    assert f"{key}: " in str(result.exception)
    # Other software between the sides is what a gate is for.
    chosen = CliRunner().invoke(dlbench, ["compare", *map(str, (old, new)), "--where-a", f"{key}={_said(key)}"])
    assert "insufficient" in chosen.output


def _said(key: str) -> str:
    return str(ASKED[key])


def test_a_side_that_met_unlike_software_says_so(tmp_path: Path) -> None:
    old = write_every_second(tmp_path / "old", {}, {"package.torch": "2.9.1"})
    baseline = tmp_path / "baseline.json"
    assert CliRunner().invoke(dlbench, ["baseline", str(old), "--output", str(baseline)]).exit_code == 0
    new = tmp_path / "new"
    for plan in plans(points=(1,), repeats=6, overrides=SLURM, series="new"):
        write_run(new, plan, constant(PHASES))
    for side in (old, baseline):
        words = " ".join(CliRunner().invoke(dlbench, ["compare", str(side), str(new)]).output.split())
        assert "A: runs that are averaged are not repeats: package.torch: 2.9.1 in 3, not set in 3" in words


# Complete by construction


def _leaves(spec: type[BaseModel], path: str) -> Iterator[tuple[str, Any]]:
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{path}.{name}")
        else:
            yield f"{path}.{name}", field.annotation


LEAVES = dict(_leaves(SystemSpec, "system"))

# Keys whose values cannot be made from their type alone.
OTHER_VALUES: Mapping[str, Any] = {
    "system.scheduler": "none",
    **dict.fromkeys(("system.slurm.time_limit", "system.slurm.max_time"), "01:00:00"),
    "system.slurm.extra": ["switches=2"],
    "system.slurm.srun_args": ["cpu-freq=high"],
    "system.slurm.export": ["NCCL_ALGO"],
    "system.slurm.mem": "8G",
    "system.slurm.mem_per_gpu": "8G",
    "system.node.peak_tflops": {"fp32": 60.0},
    "system.launch.environment": {"NCCL_ALGO": "Ring"},
    "system.device": {"source": "a data sheet"},
    "system.network": {"across": {"alpha_s": 1e-6, "gb_per_s": 10.0, "source": "a data sheet"}},
    "system.storage.local.path": "/scratch",
    "system.storage.memory.path": "/mnt/ram",
    "system.modules": ["gcc/13"],
    "system.modules_init": [". /etc/profile"],
    "system.setup": ["ulimit -l unlimited"],
    "system.container.kind": "podman",
    "system.container.image": "/other.sif",
    "system.container.sha256": "1" * 64,
    "system.container.as_planned": "1 2",
    "system.container.mounts": ["/data"],
    "system.container.pass_in": ["FI_PROVIDER"],
    "system.container.withhold": ["FI_PROVIDER"],
    "system.container.args": ["--containall"],
}


def _other(key: str, annotation: Any, value: Any) -> Any:
    """Another value than the one that stands there; a new key of a new type needs a line in `OTHER_VALUES`."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    options = [annotation]
    while options:
        one = options.pop()
        origin = get_origin(one)
        if origin is Annotated:
            options.append(get_args(one)[0])
        elif origin in (Union, UnionType):
            options += get_args(one)
        elif origin is Literal:
            return next(each for each in get_args(one) if each != value and each not in ("none", "local"))
        elif one is bool:
            return not value
        elif one is int:
            return (value or 1) + 1
        elif one is str:
            return f"{value or ''}x"
    raise AssertionError(f"{key}: give it another value in OTHER_VALUES")


def _run(plan: RunPlan, change: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Run:
    content = plan.model_dump(mode="json")
    for key, value in change.items():
        *path, name = key.split(".")
        place = content
        for part in path:
            place = place[part]
        place[name] = value
    return Run(folder=RunFolder(Path("x")), plan=RunPlan.model_validate(content), statuses=[], record=None)


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_of_a_system_shapes_repeats_or_is_listed(key: str) -> None:
    tier = "memory" if key.startswith("system.storage.memory") else "local"
    (plan,) = plans(
        points=(1,),
        repeats=1,
        data="/data/pictures",
        overrides={
            **SLURM,
            "data.staging": "replicate",
            "data.staging_tier": tier,
            "system.slurm.partition": "p",
            "system.slurm.gpu_request": "gres",
        },
    )
    # With a source for peak rates, so that only one key changes below.
    others = {"system.node.peak_source": "data sheet"}
    if key.startswith("system.container."):
        others |= {"system.container.kind": "apptainer", "system.container.image": "/a.sif"}
    before = _run(plan, others)
    place = before.plan.model_dump(mode="json")
    for part in key.split("."):
        place = place[part]
    value = _other(key, LEAVES[key], place)
    after = _run(before.plan, {key: value})
    assert (averaged_id(after) != averaged_id(before)) is is_shaping(key)
    if key != "system.name" and not key.startswith("system.launch."):
        assert group_id(after) == group_id(before)


@pytest.mark.parametrize(("option", "apart"), [("switches=1", True), ("comment=x", False), ("mail-user=me", False)])
def test_further_options_of_slurm_count_where_they_shape_speed(option: str, apart: bool) -> None:
    (plan,) = plans(points=(1,), repeats=1, overrides=SLURM)
    other = _run(plan, {"system.slurm.extra": [option]})
    assert (averaged_id(other) != averaged_id(_run(plan, {}))) is apart
    assert (option.partition("=")[0] in NOT_SHAPING_OPTIONS) is not apart


# Products of their own


DRIFT = 0.2
"""The machine slows down by so much over the ten repeats, by far more than runs of one repeat differ."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    """Ten interleaved repeats at two rank counts."""
    out = tmp_path_factory.mktemp("scaled")
    noise = np.random.default_rng(0)
    for plan in plans(points=(1, 2), repeats=10):
        slow = (1 + DRIFT * plan.series.repeat / 9) * noise.lognormal(0, 0.005)
        phases = [5.0, 0.0, 30.0, 50.0, 25.0 * (plan.layout.ranks > 1), 10.0]
        write_run(out, plan, constant([part * slow for part in phases], other=5.0 * slow))
    return tabulate(scan(out), with_causes=True)


def without(table: RunTable, run_id: str) -> RunTable:
    """As if this run had failed."""
    return replace(
        table,
        figures={name: row for name, row in table.figures.items() if name != run_id},
        parts={name: row for name, row in table.parts.items() if name != run_id},
        runs={name: run for name, run in table.runs.items() if name != run_id},
    )


def figures(table: RunTable) -> Iterator[tuple[tuple[int, str], Estimate]]:
    """Every figure of every point that is held against the baseline: what laws and forecasts take, too."""
    (group,) = groups(table)
    for point in group.points[1:]:
        yield (point.ranks, "speed-up"), point.speedup
        yield (point.ranks, "efficiency"), point.efficiency
    for account in accounts(table)[1:]:
        for part in (*account.causes, account.exchange_phase, account.whole):
            yield (account.ranks, f"lost in {part.name}"), part.lost


def accounts(table: RunTable) -> tuple[CausePoint, ...]:
    (group,) = groups(table)
    return lost_percent(group, table).diagnosed.points


def holds(whole: Estimate, found: Estimate) -> bool:
    # Figures without any scatter (a part that no run has) are rounding.
    return whole.low - 1e-9 <= found.value <= whole.high + 1e-9


def test_losing_any_run_moves_no_figure_of_a_point_by_more_than_its_interval(scaled: RunTable) -> None:
    whole = dict(figures(scaled))
    assert {estimate.unpaired for estimate in whole.values()} == {0}
    for run_id, run in scaled.runs.items():
        lost = run.plan.layout.ranks
        for (ranks, name), found in figures(without(scaled, run_id)):
            assert holds(whole[ranks, name], found), (run_id, ranks, name)
            is_missing = lost in (1, ranks)
            assert (found.n, found.unpaired) == ((9, 1) if is_missing else (10, 0)), (run_id, ranks, name)


def test_parts_still_sum_to_the_headline(scaled: RunTable) -> None:
    table = without(scaled, next(iter(scaled.runs)))
    (group,) = groups(table)
    for point, account in zip(group.points, accounts(table), strict=True):
        assert sum(part.lost.value for part in account.causes) == pytest.approx(1 - point.efficiency.value, abs=1e-9)
        whole = account.whole
        if not point.is_baseline:
            assert whole.lost.value == pytest.approx(1 - whole.ideal_seconds / whole.seconds.value)
    assert "not-interleaved" not in {doubt.code for doubt in group_doubts(group, table)}


def runs(*hours: float, jobs: str = "", boots: str = "") -> dict[str, Circumstances]:
    """A run at each hour, with a letter for its job (`0`: none) and for the boot of its host."""
    return {
        f"r{i:02d}": Circumstances(
            finished=(datetime(2026, 3, 1) + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            job="" if jobs[i : i + 1] in ("", "0") else f"cluster/{jobs[i]}",
            boot=f"host {boots[i]}" if boots else "",
        )
        for i, hour in enumerate(hours)
    }


def order(found: dict[str, str]) -> tuple[int, ...]:
    names = list(dict.fromkeys(found[run] for run in sorted(found)))
    return tuple(names.index(found[run]) for run in sorted(found))


@pytest.mark.parametrize(
    ("given", "together"),
    [
        # Five commands of a working day, and the morning after.
        (runs(9, 10, 12, 14, 17, 33), (0, 0, 0, 0, 0, 1)),
        # Five nights.
        (runs(2, 26, 50.5, 73, 98), (0, 1, 2, 3, 4)),
        # Five Slurm jobs of one afternoon are one state of the machine.
        (runs(13, 14, 15, 16, 17, jobs="12345"), (0, 0, 0, 0, 0)),
        # A job of three days is one allocation.
        (runs(0, 20, 40, 60, jobs="1111"), (0, 0, 0, 0)),
        # The host was started anew in between; another host has another boot, which says nothing.
        (runs(9, 10, 11, boots="aab"), (0, 0, 1)),
        # A machine that never rests: a session a day.
        (runs(0, 6, 12, 18, 24, 30, 36, 42, 48, 54), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)),
    ],
)
def test_sessions_over_time(given: dict[str, Circumstances], together: Sequence[int]) -> None:
    found = sessions_of(given)
    assert order(found) == tuple(together)
    assert found == sessions_of(dict(reversed(given.items())))


def test_other_hosts_are_no_other_boots_and_unknown_times_are_one_session() -> None:
    found = runs(9, 10, 11)
    hosts = {run: Circumstances(one.finished, "", f"{run} boot-{run}") for run, one in found.items()}
    assert len(set(sessions_of(hosts).values())) == 1
    assert len(set(sessions_of({run: Circumstances("when?", "", "") for run in found}).values())) == 1


@given(st.lists(st.floats(0, 300), min_size=1, max_size=30))
def test_no_session_is_longer_than_a_day_or_holds_a_pause(hours: list[float]) -> None:
    given_runs = runs(*hours)
    found = sessions_of(given_runs)
    by_session: dict[str, list[float]] = {}
    for run, one in sorted(given_runs.items(), key=lambda item: item[1].moment):
        by_session.setdefault(found[run], []).append(one.moment)
    for moments in by_session.values():
        assert moments[-1] - moments[0] <= LONGEST_S
        assert all(b - a <= PAUSE_S for a, b in itertools.pairwise(moments))
    firsts = sorted(moments[0] for moments in by_session.values())
    assert all(b - a > PAUSE_S for a, b in itertools.pairwise(firsts))


def test_within_a_report_jobs_are_apart_and_commands_of_a_day_are_not(tmp_path: Path) -> None:
    story = [("1", 0), ("1", 0), ("2", 0), ("", 0), ("", 1), ("", 30)]
    for planned, (job, hours) in zip(plans(points=(1,), repeats=len(story), series="s"), story, strict=True):
        plan = planned.model_copy(update={"created": f"2026-03-0{planned.series.repeat + 1}T12:00:00Z"})
        told = Story(job=job, finished=NOW + timedelta(hours=hours), environment={"host": "n0", "boot_id": "b"})
        write_run(tmp_path, plan, constant((5.0, 0.0, 30.0, 45.0, 10.0, 10.0)), told)
    table = tabulate(scan(tmp_path))
    found = allocations_of(table.runs.values())
    by_repeat = [found[run] for run in sorted(found, key=lambda run: table.runs[run].plan.series.repeat)]
    names = list(dict.fromkeys(by_repeat))
    assert [names.index(name) for name in by_repeat] == [0, 0, 1, 2, 2, 3]
    assert {session_of(key) for key in table.keys.values()} == set(found.values())


TIMES = constant([5.0, 0.0, 30.0, 45.0, 10.0, 10.0])


def node_load(**changes: Any) -> dict[str, Any]:
    """Two cores that the ranks had for themselves, for 10 s."""
    quiet = {"node_rank": 0, "host": "n0", "cores": [0, 1], "window_s": 10.0, "busy_s": 19.5, "own_s": 19.0}
    return {**quiet, "steal_s": 0.1, "pressure_s": None, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"busy_s": None, "steal_s": None}, None),
        ({"busy_s": 18.0}, None),  # ticks of the kernel may lie below what processes used
        ({"busy_s": 20.0, "own_s": 7.2}, "other processes used 1.3 of the 2 cores of node n0 (64 %): repeat on an "),
        ({"cores": [3], "busy_s": 9.0, "own_s": 8.0}, "other processes used 0.1 of the core of node n0 (10 %): "),
        ({"steal_s": 5.0}, "the hypervisor took 0.5 of the 2 cores of node n0 away (25 %, steal time): repeat on an "),
        ({"window_s": 0.2, "busy_s": 0.09, "own_s": 0.04, "steal_s": 0.0}, None),  # less than the kernel's ticks tell
    ],
)
def test_load_of_others_is_a_warning(changes: dict[str, Any], text: str | None, tmp_path: Path) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    run = read_run(write_run(tmp_path, plan, TIMES, Story(record={"load": [node_load(**changes)]})).path)
    found = list(load_doubts(loads_of([run])))
    assert len(found) == (text is not None)
    if text is not None:
        assert found[0].text.startswith(text)
        assert found[0].runs == (plan.run_id,)


def test_a_node_is_named_once_for_all_runs_with_the_worst(tmp_path: Path) -> None:
    runs = []
    for plan, busy_s in zip(plans(points=(1,), repeats=3), (19.2, 22.0, 25.0), strict=True):
        story = Story(record={"load": [node_load(busy_s=busy_s)]})
        runs.append(read_run(write_run(tmp_path, plan, TIMES, story).path))
    (doubt,) = load_doubts(loads_of(runs))
    assert doubt.text.startswith("other processes used up to 0.6 of the 2 cores of node n0 (30 %)")
    assert doubt.runs == tuple(run.plan.run_id for run in runs[1:])
