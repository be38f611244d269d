"""The cause `memory`: what ranks measured of recomputing and waiting leaves compute, and sums stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.causes import Causes, causes_of
from dlbench.analysis.measures import load_steps, measure
from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.scan import read_run, scan
from dlbench.units import bytes_option
from dlbench.views.causes.numbers import lost_percent
from tests.support.out_of_core_factory import OTHER_MS, memory_result, method_plans, pass_times, write_memory_run
from tests.support.run_factory import MS, Story, write_run


def one(out: Path, told: dict[str, Any] | None = None, **request: Any) -> Causes:
    """The causes of a run with a plan; `told` changes what it says of its activations."""
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1, **request)
    write_memory_run(out, plan, change=lambda result: result.model_copy(update=told or {}))
    return causes_of(read_run(out / plan.run_id))


def waits(result: MemoryResult, recompute: float, swap: float, room: float) -> dict[str, Any]:
    """As if every rank had recomputed and waited so many seconds in all its steps."""
    times = {"recompute_s": recompute, "swap_wait_s": swap, "room_wait_s": room}
    return {"ranks": tuple(rank.model_copy(update=times) for rank in result.ranks)}


def test_recomputing_and_waiting_are_memory_and_no_longer_compute(tmp_path: Path) -> None:
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)
    result = memory_result(plan)
    steps = plan.measure.measured_steps
    found = one(tmp_path, waits(result, 0.010 * steps, 0.005 * steps, 0.002 * steps))
    assert found.seconds["memory"] == pytest.approx(0.017)
    passes = result.plan.predicted.pass_s
    assert found.seconds["compute"] == pytest.approx(passes + OTHER_MS["optimizer"] / 1e3 - 0.017, rel=1e-6)
    assert "memory" not in found.not_measured
    run = read_run(tmp_path / plan.run_id)
    # To the nanosecond.
    longest = int(load_steps(run).step_ns.sum(axis=1).max())
    assert sum(found.sums_ns.values()) == found.ranks * longest
    assert sum(found.seconds.values()) == pytest.approx(sum(measure(run).parts.values()), rel=1e-12)


def test_more_than_was_computed_cannot_be_memory(tmp_path: Path) -> None:
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)
    found = one(tmp_path, waits(memory_result(plan), 1e6, 0.0, 0.0))
    assert found.sums_ns["compute"] == 0
    assert min(found.sums_ns.values()) >= 0


def test_in_core_it_is_nothing_and_that_is_known(tmp_path: Path) -> None:
    (plan,) = method_plans([("none", "none")], batches=(8,), repeats=1)
    write_memory_run(tmp_path, plan)
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.seconds["memory"] == 0
    assert "memory" not in found.not_measured
    assert found.evidence["memory"] == "nothing recomputes or swaps in these runs"


@pytest.mark.parametrize(
    ("methods", "overrides", "why"),
    [
        (("planned", "planned"), {}, "the record has no times"),
        (("none", "none"), {"train.compile": "default", "train.activation_budget": 0.5}, "torch.compile recomputes"),
    ],
)
def test_where_a_run_says_nothing_it_is_not_measured(
    tmp_path: Path, methods: Any, overrides: dict[str, Any], why: str
) -> None:
    (plan,) = method_plans([methods], batches=(32,), repeats=1, overrides=overrides)
    write_run(tmp_path, plan, pass_times(memory_result(plan)), Story())
    found = causes_of(read_run(tmp_path / plan.run_id))
    assert found.sums_ns["memory"] == 0
    assert why in found.not_measured["memory"]


def test_memory_that_grows_with_ranks_is_found_and_answered_with_commands(tmp_path: Path) -> None:
    """Two ranks share the disk: each waits 20 ms longer for its tensors."""
    for plan in method_plans([("none", "streamed")], batches=(32,), points=(1, 2)):
        result = memory_result(plan)
        steps, wait = plan.measure.measured_steps, 0.020 * (plan.layout.ranks - 1)
        wait *= 1 + plan.series.repeat / 1000

        def times(rank: int, step: int, result: MemoryResult = result, wait: float = wait) -> tuple[list[int], int]:
            phases, other = pass_times(result)(rank, step)
            return [ns + round(wait * 1e3 * MS) * (place == 3) for place, ns in enumerate(phases)], other

        told = result.model_copy(update=waits(result, 0.0, wait * steps, 0.0))
        write_run(tmp_path, plan, times, Story(record={"memory": told.model_dump(mode="json")}))
    table = tabulate(scan(tmp_path), with_causes=True)
    (group,) = groups(table)
    (_, last) = lost_percent(group, table).diagnosed.points
    assert last.verdict.name == "memory-bound"
    assert last.cause("memory").lost.value == pytest.approx(last.whole.lost.value, rel=0.01)
    texts = [experiment.text for experiment in last.verdict.experiments]
    capacity = bytes_option(result.plan.predicted.peak_bytes)
    assert f"--set train.swap=planned --set train.memory.capacity={capacity}" in texts[0]
    assert "--set train.gradient_accumulation=2" in texts[-1]
