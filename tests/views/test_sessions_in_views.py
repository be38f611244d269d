"""Runs of several sessions: every estimate over runs that these views show counts sessions, not runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from dlbench.analysis.scaling import Group, groups
from dlbench.analysis.table import RunTable, tabulate
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.numbers import lost_percent
from dlbench.views.exchange import exchange_points
from dlbench.views.quality.numbers import group_quality
from dlbench.views.shuffling import audit, comparisons
from dlbench.views.steps import StepQuantile, step_times
from dlbench.views.sweep.numbers import sweeps
from tests.support.data_path_factory import shuffle_result
from tests.support.run_factory import (
    Story,
    Training,
    constant,
    exchange_result,
    plans,
    quality_plans,
    write_run,
    write_sweep,
)

REPEATS = 6
WIRES = ("fp32", "fp16")
GRADIENTS = ((40_000, 0.004), (2_000_000, 0.012), (400_000, 0.018), (8_000_000, 0.03))


def job(plan: RunPlan) -> str:
    """Two jobs, one after the other."""
    return str(plan.series.repeat // 3 % 2)


def estimates(found: object, where: str = "") -> Iterator[tuple[str, Estimate]]:
    """All of them that have an interval over runs."""
    if isinstance(found, Estimate):
        if found.low is not None:
            yield where, found
    elif isinstance(found, StepQuantile):
        return  # its band is the range of the runs, of however many sessions
    elif is_dataclass(found):
        for one in fields(found):
            yield from estimates(getattr(found, one.name), f"{where}.{one.name}")
    elif isinstance(found, tuple | list):
        for one in found:
            yield from estimates(one, where)


def assert_of_two_sessions(found: object) -> None:
    seen = dict(estimates(found))
    assert seen
    assert {where: (one.kind, one.sessions) for where, one in seen.items()} == dict.fromkeys(seen, ("range", 2))


@pytest.fixture(scope="module")
def speed(tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    out = tmp_path_factory.mktemp("speed")
    for plan in plans(repeats=REPEATS):
        slow = 1 + 0.01 * plan.series.repeat
        exchange = None
        if plan.layout.ranks > 1:
            gradients = [(size, ready * slow) for size, ready in GRADIENTS]
            exchange = exchange_result(plan, gradients=gradients, alpha_s=1e-3 * slow, beta_s_per_byte=2e-9 * slow)
        phases = (5, 0, 30, 45, 20 if exchange else 0, 10)
        write_run(out, plan, constant([part * slow for part in phases]), Story(job=job(plan), exchange=exchange))
    return tabulate(scan(out), with_causes=True, with_digests=True)


@pytest.mark.parametrize("numbers", [step_times, exchange_points, lost_percent])
def test_intervals_of_a_group_are_made_of_its_sessions(
    speed: RunTable, numbers: Callable[[Group, RunTable], object]
) -> None:
    (group,) = groups(speed)
    assert_of_two_sessions(numbers(group, speed))


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    """Ways of shuffling, trained to a quality; the second job needs an evaluation more."""
    out = tmp_path_factory.mktemp("learning")
    for shuffle in ("global", "local"):
        made = quality_plans(
            points=(1, 2), repeats=REPEATS, series=shuffle, overrides={"data.shuffle": shuffle, "data.staging": "none"}
        )
        for plan in made:
            slow = 1 + 0.01 * plan.series.repeat
            values = (0.2, *([0.3] if plan.series.repeat % 2 else []), 0.5 + 0.01 * slow)
            told = Story(
                job=job(plan),
                training=Training(values=values, eval_s=0.1 * slow, wait_s=0.2 * slow),
                data={"kind": "jpeg-tree", "num_samples": 160},
                record={"shuffle": shuffle_result(audit_s=0.1 * slow)},
            )
            write_run(out, plan, constant([part * slow for part in (5.0, 0.0, 30.0, 50.0, 10.0, 5.0)]), told)
    return tabulate(scan(out))


@pytest.mark.parametrize("numbers", [group_quality, audit])
def test_intervals_of_trainings_are_made_of_sessions(
    learning: RunTable, numbers: Callable[[Group, RunTable], object]
) -> None:
    assert_of_two_sessions([numbers(group, learning) for group in groups(learning)])


def test_intervals_of_ways_of_shuffling_are_made_of_sessions(learning: RunTable) -> None:
    assert_of_two_sessions(comparisons(groups(learning), learning))


def test_two_sessions_of_a_sweep_decide_nothing(tmp_path: Path) -> None:
    """Ten repeats of two jobs: however alike they are within a job, of how jobs differ there are two cases."""

    def faster(plan: RunPlan) -> float:
        wobble = 1 + 0.002 * (plan.series.repeat % 3)
        return wobble * (1.2 if plan.sync.fusion == "own:single" else 1.0)

    axes = {"sync.fusion": ("own:none", "own:single"), "sync.wire": WIRES}

    def story(plan: RunPlan) -> Story:
        return Story(job=job(plan), last_loss=1.9 + 0.01 * plan.series.repeat)

    write_sweep(tmp_path, faster, engine="ddp", sweep=axes, repeats=10, story=story)
    (found,) = sweeps(tabulate(scan(tmp_path)))
    assert_of_two_sessions(found)
    (cell,) = found.cells
    assert {axis.verdict for axis in cell.axes} == {"insufficient"}
    assert {setting.verdict for setting in cell.settings} == {"baseline", "insufficient"}
    assert cell.best == ""
