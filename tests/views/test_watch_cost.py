"""`dlbench run --watch-cost`: unwatched twins, what watching cost by them, and where that is told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.cli import cli
from dlbench.errors import ExitCode, UserError
from dlbench.jobs import local
from dlbench.jobs.local import Outcome
from dlbench.records.folder import RunFolder
from dlbench.records.registry import describe
from dlbench.records.scan import read_run, scan
from dlbench.records.watch import WatchCost, WatchOverhead, write_watch_cost
from dlbench.specs.plan import RunPlan
from dlbench.views.decomposition import MeasuredCost, watch_cost_lines, watch_costs
from tests.support.run_differences import differences
from tests.support.run_factory import WORKLOAD, Story, constant, edit_json, plans, write_run, write_unfinished
from tests.support.watch_factory import watch_result

MEASURED = WatchOverhead(value=0.02, low=0.01, high=0.03, num_pairs=5, method="measured", evidence="by hand")


def twins(**request: object) -> list[RunPlan]:
    return plans(**{"watch_cost": True, "points": (2,), **request})


def write_twin(out: Path, plan: RunPlan, factor: float) -> None:
    """A run of 100 ms per step, which drifts from repeat to repeat; a watched one is slower by `factor`."""
    drift = 1 + plan.series.repeat / 10
    slower = factor if plan.series.variant == "plain" else 1.0
    milliseconds = [part * drift * slower for part in (5.0, 0.0, 30.0, 50.0, 10.0, 5.0)]
    write_run(out, plan, constant(milliseconds))


def only_cost(out: Path) -> MeasuredCost:
    (cost,) = watch_costs(scan(out).runs)
    return cost


# --- plans ------------------------------------------------------------------------------------------------------------


def test_each_run_has_an_unwatched_twin_and_every_second_repeat_goes_backwards() -> None:
    made = twins(points=(1, 2), repeats=2)
    there = [(ranks, variant) for ranks in (1, 2) for variant in ("plain", "unwatched")]
    assert [(p.layout.ranks, p.series.variant) for p in made] == [*there, *reversed(there)]
    assert len({p.run_id for p in made}) == 8
    watched, unwatched = made[:2]
    assert (unwatched.watch.sampler, unwatched.watch.window_steps, unwatched.watch.is_on) == (False, 0, False)
    assert watched.watch.is_on
    changed = {"run_id", "series", "watch"}
    assert unwatched.model_dump(exclude=changed) == watched.model_dump(exclude=changed)
    assert unwatched.run_id == f"{watched.run_id}-unwatched"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"repeats": 1}, "use --repeats 2 or more"),
        ({"overrides": {"watch.sampler": False, "watch.window_steps": 0}}, "nothing is watched"),
        ({"sweep": {"train.batch_per_rank": (2, 4)}}, "does not go with --sweep"),
        ({"to_accuracy": True}, "leave out --to-accuracy"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_one_line(request_: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        twins(**{"repeats": 2, **request_})
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [2, 5])
def test_the_cost_is_what_watched_runs_take_longer_pair_by_pair(tmp_path: Path, repeats: int) -> None:
    for plan in twins(repeats=repeats):
        write_twin(tmp_path, plan, 1.02)
    cost = only_cost(tmp_path)
    # The drift of 10 % a repeat falls on both of a pair.
    assert cost.overhead.value == pytest.approx(0.02)
    assert (cost.overhead.low, cost.overhead.high) == (pytest.approx(0.02), pytest.approx(0.02))
    assert (cost.overhead.num_pairs, cost.overhead.method) == (repeats, "measured")
    assert f"{repeats} pairs, all equal" in cost.overhead.evidence
    assert [run.plan.series.repeat for run in cost.watched] == list(range(repeats))
    assert {run.plan.series.variant for run in cost.watched} == {"plain"}


def test_a_disturbance_of_few_steps_counts(tmp_path: Path) -> None:
    """A sampler wakes once a second: the median step does not know of it."""
    for plan in twins(repeats=2):
        slow = 200_000_000 if plan.series.variant == "plain" else 0
        write_run(
            tmp_path,
            plan,
            lambda rank, step, slow=slow: ([0, 0, 50_000_000, 50_000_000, 0, 0], slow if step == 7 else 0),
        )
    assert only_cost(tmp_path).overhead.value == pytest.approx(200 / (12 * 100))


@settings(max_examples=20)
@given(factors=st.lists(st.floats(min_value=0.5, max_value=2), min_size=2, max_size=4))
def test_the_interval_of_few_pairs_is_their_range(
    tmp_path_factory: pytest.TempPathFactory, factors: list[float]
) -> None:
    out = tmp_path_factory.mktemp("runs")
    for plan in twins(repeats=len(factors), points=(1,)):
        factor = factors[plan.series.repeat] if plan.series.variant == "plain" else 1.0
        write_run(out, plan, constant([0.0, 0.0, 40.0 * factor, 60.0 * factor, 0.0, 0.0]))
    overhead = only_cost(out).overhead
    assert (overhead.low, overhead.high) == pytest.approx((min(factors) - 1, max(factors) - 1), abs=1e-6)
    assert overhead.low <= overhead.value <= overhead.high


def test_points_stand_alone_and_series_without_twins_have_none(tmp_path: Path) -> None:
    for plan in twins(points=(1, 2), repeats=2):
        write_twin(tmp_path, plan, 1.01 * plan.layout.ranks)
    for plan in plans(series="s2", repeats=2):
        write_twin(tmp_path, plan, 1.0)
    costs = watch_costs(scan(tmp_path).runs)
    assert [(cost.series, cost.ranks) for cost in costs] == [("s1", 1), ("s1", 2)]
    assert [cost.overhead.value for cost in costs if cost.overhead] == [pytest.approx(0.01), pytest.approx(1.02)]


def test_fewer_than_two_pairs_with_figures_tell_no_cost_and_why(tmp_path: Path) -> None:
    for plan in twins(repeats=3):
        if plan.series.variant == "unwatched" and plan.series.repeat > 0:
            write_unfinished(tmp_path, plan, "failed", "out of memory")
        else:
            write_twin(tmp_path, plan, 1.02)
    cost = only_cost(tmp_path)
    assert cost.overhead is None
    (line,) = watch_cost_lines([cost])
    assert "1 of 2 pairs" in line
    assert "out of memory" in line


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_measured_cost_stands_before_what_the_run_accounts_for(tmp_path: Path) -> None:
    accounted = {**watch_result(), "overhead": {**MEASURED.model_dump(), "method": "accounted", "value": 0.001}}
    plain, *_ = twins(repeats=2)
    folder = write_run(tmp_path, plain, constant([1.0] * 6), Story(record={"watch": accounted}))
    found = read_run(folder.path).watch_overhead
    assert (found.method, found.value) == ("accounted", 0.001)
    write_watch_cost(folder, plain.run_id, MEASURED)
    assert read_run(folder.path).watch_overhead == MEASURED
    assert WatchCost.model_validate(json.loads(folder.watch_cost.read_text())).overhead == MEASURED


def test_a_run_that_nobody_watched_has_no_cost(tmp_path: Path) -> None:
    _, unwatched, *_ = twins(repeats=2)
    assert read_run(write_run(tmp_path, unwatched, constant([1.0] * 6)).path).watch_overhead is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"version": 2}, "version"), ({"run_id": "another"}, "belongs to run another"), ({"overhead": 1}, "overhead")],
)
def test_a_damaged_file_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    plain, *_ = twins(repeats=2)
    folder = write_run(tmp_path, plain, constant([1.0] * 6))
    write_watch_cost(folder, plain.run_id, MEASURED)
    edit_json(folder.watch_cost, **changes)
    (problem,) = scan(tmp_path).problems
    assert "watch-cost.json" in problem
    assert words in problem


def test_watched_and_unwatched_runs_are_never_put_into_one_ratio(tmp_path: Path) -> None:
    for plan in twins(repeats=2):
        write_twin(tmp_path, plan, 1.02)
    found = scan(tmp_path)
    made = groups(tabulate(found))
    assert sorted({run.plan.series.variant for run in group.runs}.pop() for group in made) == ["plain", "unwatched"]
    watched, unwatched = found.runs[:2]
    assert (describe(watched)["watching"], describe(unwatched)["watching"]) == ("default", "none")
    assert differences(watched, unwatched) == ["Monitoring: default against none"]


# --- the command ------------------------------------------------------------------------------------------------------


def run_stubbed(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str, dead: tuple[int, ...] = ()) -> Result:
    """The command with runs that are written instead of trained; those at the positions `dead` fail."""

    def trained(plan: RunPlan, folder: RunFolder, on_progress: object) -> Outcome:
        shutil.rmtree(folder.path)
        if plan.series.position in dead:
            write_unfinished(folder.path.parent, plan, "failed", "out of memory")
            return Outcome(exit_code=ExitCode.RUN_FAILED, detail="out of memory")
        write_twin(folder.path.parent, plan, 1.05)
        return Outcome(exit_code=ExitCode.OK, detail="")

    monkeypatch.setattr(local, "run", trained)
    words = ["run", str(WORKLOAD), "--ranks", "2", "--engine", "ddp", "--out", str(out), *options]
    return CliRunner().invoke(cli, words)


@pytest.mark.usefixtures("signals_as_before")
def test_the_command_tells_the_cost_and_keeps_it_with_every_watched_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_stubbed(tmp_path, monkeypatch, "--watch-cost", "--repeats", "3")
    assert done.exit_code == 0, done.output
    assert "monitoring at 2 ranks: 5.0 % of a step;" in done.stdout
    for run in scan(tmp_path).runs:
        assert run.folder.watch_cost.exists() is (run.plan.series.variant == "plain")
        if run.plan.series.variant == "plain":
            assert run.watch_overhead.num_pairs == 3
            assert run.watch_overhead.value == pytest.approx(0.05)


@pytest.mark.usefixtures("signals_as_before")
def test_too_few_valid_pairs_leave_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_stubbed(tmp_path, monkeypatch, "--watch-cost", "--repeats", "2", dead=(1,))
    assert done.exit_code == int(ExitCode.RUN_FAILED)
    assert "cost unknown: 1 of 2 pairs" in done.stdout
    assert [run.folder.path.name for run in scan(tmp_path).runs if run.folder.watch_cost.exists()] == []


@pytest.mark.usefixtures("signals_as_before")
def test_a_machine_without_numpy_runs_and_says_that_it_does_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "numpy" else real(name, *more))
    done = run_stubbed(tmp_path, monkeypatch, "--watch-cost", "--repeats", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert "numpy is not installed" in done.stderr
    assert len(scan(tmp_path).runs) == 4


def test_a_dry_run_names_the_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_stubbed(tmp_path / "runs", monkeypatch, "--watch-cost", "--repeats", "2", "--dry-run")
    assert done.exit_code == 0, done.output
    assert re.search(r", unwatched +2 ", done.stdout)
    assert not (tmp_path / "runs").exists()
