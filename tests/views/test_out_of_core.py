"""Methods to hold activations beside each other: kept apart, compared with what was predicted, the limit marked."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.scaling import groups
from dlbench.analysis.table import tabulate
from dlbench.perfmodels.out_of_core.blocks import Operation
from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.record import HeldMemory
from dlbench.records.scan import scan
from dlbench.report.charts import ReportSubject
from dlbench.views.out_of_core import OutOfCoreView
from dlbench.views.out_of_core.numbers import MethodComparison, MethodPoint, out_of_core
from dlbench.views.out_of_core.plan import lanes_chart
from dlbench.views.out_of_core.view import method_charts
from dlbench.views.peak_memory import HeldPoint, Memory
from dlbench.views.scaling_report import assemble
from dlbench.views.sweep.numbers import sweeps
from tests.support.out_of_core_factory import (
    METHODS,
    MIB,
    OTHER_MS,
    a_chain,
    in_core_bytes,
    method_plans,
    write_memory_run,
)
from tests.support.run_factory import Story, constant, plans, write_run, write_unfinished

SLOWER = 1.1
"""Measured passes over predicted ones."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs of every method with two batches; in core the larger one does not fit, nor does any plan in 8 MiB."""
    out = tmp_path_factory.mktemp("methods")
    for plan in method_plans(batches=(8, 32)):
        train = plan.workload.train
        if train.is_in_core and train.batch_per_rank == 32:
            write_unfinished(out, plan, "failed", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
        else:
            write_memory_run(out, plan, SLOWER * (1 + plan.series.repeat / 1000))
    (small,) = method_plans([("planned", "planned")], batches=(64,), capacity="20 MiB", repeats=1, series="more")
    write_unfinished(out, small, "failed", "does not fit even so: needs at least 30 MiB (31457280 B)")
    return out


@pytest.fixture(scope="module")
def found(runs: Path) -> MethodComparison:
    table = tabulate(scan(runs), with_causes=True)
    (found,) = out_of_core(groups(table), table)
    return found


def point(found: MethodComparison, method: str, batch: int) -> MethodPoint:
    (one,) = [one for one in found.points if one.method == method and one.batch == batch and one.num_runs]
    return one


def test_every_method_and_batch_is_a_point_of_its_own(runs: Path, found: MethodComparison) -> None:
    with_figures = [one for one in found.points if one.num_runs]
    assert len(with_figures) == 2 * len(METHODS) - 1
    assert {one.num_runs for one in with_figures} == {5}
    # No method is averaged with another.
    assert len(groups(tabulate(scan(runs)))) == len(with_figures)


def test_peaks_and_steps_stand_beside_what_was_predicted(found: MethodComparison) -> None:
    one = point(found, "planned (KARMA)", 32)
    assert one.capacity_bytes == 20 * MIB
    assert one.predicted_peak_bytes <= one.capacity_bytes
    assert one.device_peak.value == one.predicted_peak_bytes + MIB
    assert one.in_core_bytes == 41 * MIB
    beside = sum(OTHER_MS.values()) / 1e3
    measured = one.step.value - beside
    # All that is beside the passes is known exactly, so the error is that of the passes, diluted by it.
    assert (one.predicted_step.value - beside) * SLOWER == pytest.approx(measured, rel=5e-3)
    assert one.step_error == pytest.approx(one.predicted_step.value / one.step.value - 1)
    assert found.median_step_error == pytest.approx(1 - 1 / SLOWER, abs=0.03)
    # Peaks are judged as steps are: every rank held a MiB more than was predicted.
    assert one.peak_error == pytest.approx(one.predicted_peak_bytes / one.device_peak.value - 1)
    errors = [abs(each.peak_error) for each in found.points if each.peak_error is not None]
    assert found.median_peak_error == pytest.approx(statistics.median(errors))
    assert all(error > 0 for error in errors)


def test_a_method_that_saves_nothing_says_so(tmp_path: Path) -> None:
    """All of the peak is in a moment that recomputing does not change: the update."""
    plain = a_chain(8)
    chain = plain.model_copy(update={"update_bytes": 100 * MIB})
    (plan,) = method_plans([("blocks", "none")], batches=(8,), repeats=1)
    train = plan.workload.train
    made = fixed_plan(chain, None, train.recompute, train.swap)
    assert made.predicted.peak_bytes == in_core_bytes(chain)
    write_memory_run(
        tmp_path,
        plan,
        change=lambda told: told.model_copy(
            update={"chain": chain, "plan": made, "in_core_bytes": in_core_bytes(chain)}
        ),
    )
    (section,) = OutOfCoreView().sections(assemble(scan(tmp_path)))
    words = "\n".join(section.words)
    assert "All recomputed saves no memory with batch 8 at 1 rank: 105 MiB predicted, 105 MiB in core." in words
    assert "Predicted peaks are off by" in words


def test_waits_and_bytes_are_per_step_and_rank(found: MethodComparison) -> None:
    recomputed = point(found, "all recomputed", 32)
    assert recomputed.recompute_share.value == pytest.approx(0.032 / recomputed.step.value, rel=0.02)
    streamed = point(found, "all streamed", 32)
    # Seven of eight units of 4 MiB, and their six inputs of an eighth of that: the last one does not leave.
    assert streamed.swapped_bytes.value == pytest.approx((7 * 4 + 6 * 0.5) * MIB)
    assert streamed.tier == "a file on node-local disk"
    assert point(found, "in core", 8).swapped_bytes is None


def test_the_limit_in_core_comes_from_the_chain_and_from_runs_that_ended(found: MethodComparison) -> None:
    (limit,) = found.limits
    assert (limit.capacity_bytes, limit.batch) == (20 * MIB, 13)
    failed = next(one for one in found.points if one.method == "in core" and one.batch == 32)
    assert failed.num_without_memory == 5
    assert failed.throughput is None
    # What the other methods' chains say of it.
    assert failed.predicted_peak_bytes == 41 * MIB
    refused = next(one for one in found.points if one.batch == 64)
    assert refused.num_without_memory == 1


def test_the_plan_is_compared_with_the_fastest_that_treats_all_blocks_alike(found: MethodComparison) -> None:
    gain = next(one for one in found.gains if one.batch == 32)
    assert gain.planned.startswith("planned (KARMA)")
    rates = {one.label: one.throughput.value for one in found.points if one.batch == 32 and one.throughput}
    others = {label: rate for label, rate in rates.items() if not label.startswith("planned")}
    assert gain.over == max(others, key=lambda label: others[label])
    assert gain.ratio.value == pytest.approx(rates[gain.planned] / others[gain.over])


def test_throughput_is_drawn_with_the_largest_batch_in_core(found: MethodComparison) -> None:
    (throughput,) = method_charts(found, 1)
    assert "in core up to 13" in json.dumps(throughput.spec)


def test_at_one_limit_recomputing_and_sharding_stand_beside_replicas(tmp_path: Path) -> None:
    zero = {"engine": "ddp", "overrides": {"engine.ddp.shard_optimizer": True}}
    apart = {"engine": "ddp", "overrides": {"sync.average_every": 2}}  # other updates: no alternative
    shares: dict[str, tuple[dict[str, object], float, int]] = {
        "ddp": ({"engine": "ddp"}, 1.0, 30),
        "fsdp": ({"engine": "fsdp"}, 1.3, 15),
        "zero-1": (zero, 1.1, 19),
        "local": (apart, 0.5, 10),
    }
    for series, (asked, slower, mebibytes) in shares.items():
        peak = mebibytes * MIB
        held = {**dict.fromkeys(HeldMemory.model_fields, 0), "activations": peak, "peak": peak, "evidence": "counted"}
        for plan in plans(points=(2,), series=series, **asked):
            times = [part * slower * (1 + 0.002 * plan.series.repeat) for part in (5.0, 0.0, 30.0, 45.0, 10.0, 10.0)]
            write_run(tmp_path, plan, constant(times), Story(of_rank=lambda rank, held=held: {"held": held}))
    alone = assemble(scan(tmp_path))
    assert OutOfCoreView().sections(alone) == ()  # no limit, nothing new
    batch = plans(points=(2,))[0].workload.train.batch_per_rank
    for plan in method_plans([("planned", "none")], batches=(batch,), points=(2,), engine="ddp"):
        write_memory_run(tmp_path, plan)
    report = assemble(scan(tmp_path))
    (found,) = report.all_of(MethodComparison)
    zero_1, fsdp = "DDP, optimizer state sharded (ZeRO-1)", "FSDP, parameters sharded over all ranks"
    fits = {one.method: one.fits for one in found.at_limit}
    assert len(fits) == 4
    assert (fits["replicas, in core"], fits[zero_1], fits[fsdp]) == (False, True, True)
    best = max((one for one in found.at_limit if one.fits), key=lambda one: one.throughput.value)
    ratios = {one.method: one.ratio.value for one in found.at_limit if one.ratio is not None}
    assert ratios[best.method] == 1
    assert ratios[fsdp] / ratios[zero_1] == pytest.approx(1.1 / 1.3)
    (section,) = OutOfCoreView().sections(report)
    assert section.words[0].startswith(f"Within 20 MiB a rank, 2 ranks, batch {batch}: use {best.method}, the fastest")
    assert section.words[0].endswith("would not fit.")


def test_the_lanes_say_how_long_computing_stands_still() -> None:
    operations = [
        Operation(lane="compute", kind="forward", block=0, start_s=0.0, end_s=0.004),
        Operation(lane="in", kind="swap in", block=0, start_s=0.004, end_s=0.01),
        Operation(lane="compute", kind="wait", block=0, start_s=0.004, end_s=0.006),
    ]
    chart = lanes_chart(operations, (), ReportSubject("plan", "a plan"))
    assert "predicted: 10 ms, of it waiting 2 ms" in chart.alt


def test_more_than_the_plan_allowed_and_what_was_verified_are_said(tmp_path: Path) -> None:
    (plan,) = method_plans([("planned", "planned")], batches=(32,), repeats=1)

    def change(told: MemoryResult) -> MemoryResult:
        ranks = tuple(one.model_copy(update={"over_budget_bytes": 3 * MIB}) for one in told.ranks)
        ranks = tuple(one.model_copy(update={"device_peak_bytes": 24 * MIB}) for one in ranks)
        return told.model_copy(update={"ranks": ranks, "checksum_share": 0.75, "timeline": ()})

    write_memory_run(tmp_path, plan, change=change)
    report = assemble(scan(tmp_path))
    (found,) = report.all_of(MethodComparison)
    assert found.points[0].checksum_share == 0.75
    (section,) = OutOfCoreView().sections(report)
    assert any("exceeded the plan by up to 3 MiB" in text for text in section.words)
    assert any("The measured peak exceeds the capacity by up to 4 MiB" in text for text in section.words)
    assert any("No run of this set trained in core" in text for text in section.notes)


def test_a_sweep_over_methods_compares_equal_arithmetic(tmp_path: Path) -> None:
    for plan in plans(points=(1,), sweep={"train.swap": ("none", "streamed"), "train.recompute": ("none", "blocks")}):
        write_memory_run(tmp_path, plan)
    (sweep,) = sweeps(tabulate(scan(tmp_path)))
    (cell,) = sweep.cells
    assert [setting.label for setting in cell.settings] == [
        "none, none",
        "blocks, none",
        "none, streamed",
        "blocks, streamed",
    ]
    assert cell.baseline == "the default (none, none)"
    # Bit by bit the same numbers: nothing to warn of.
    assert {setting.changes for setting in cell.settings} == {()}


PARAMETERS = 1200
WHOLE = {"weights": 4 * PARAMETERS, "gradients": 4 * PARAMETERS, "optimizer": 8 * PARAMETERS}
STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {"engine": "ddp"},
    "zero-1": {"engine": "ddp", "overrides": {"engine.ddp.shard_optimizer": True}},
    "fsdp": {"engine": "fsdp"},
    "local-sgd": {"engine": "ddp", "overrides": {"sync.average_every": 4}},
}
SHARED = {"data": (), "zero-1": ("optimizer",), "fsdp": tuple(WHOLE), "local-sgd": ()}


def planted(out: Path, strategy: str, watched: int = 4) -> Memory:
    """Three rank counts of a strategy; ranks below `watched` know what they held, rank 0 of most."""
    for plan in plans(points=(1, 2, 4), points_are="ranks", repeats=1, **STRATEGIES[strategy]):
        ranks = plan.layout.ranks
        parts = {kind: size // (ranks if kind in SHARED[strategy] else 1) for kind, size in WHOLE.items()}

        def of_rank(rank: int, parts: dict[str, int] = parts) -> dict[str, Any]:
            kinds = {**parts, "buffers": 100, "activations": 1000 - rank}
            held = {**dict.fromkeys(HeldMemory.model_fields, 0), **kinds, "peak": sum(kinds.values()), "retries": rank}
            return {"held": {**held, "evidence": "planted"}} if rank < watched else {}

        record = {"num_parameters": PARAMETERS, "gradient_bytes": 4 * PARAMETERS}
        write_run(out, plan, constant((5.0, 0.0, 30.0, 45.0, 10.0, 10.0)), Story(of_rank=of_rank, record=record))
    (group,) = assemble(scan(out)).groups
    found = group.of(Memory)
    assert found is not None
    return found


def copies(point: HeldPoint) -> int | None:
    return None if point.copies is None else sum(point.copies.values())


@pytest.mark.parametrize("strategy", ["data", "zero-1", "fsdp"])
def test_copies_of_all_ranks_are_what_they_hold_beyond_one(tmp_path: Path, strategy: str) -> None:
    found = planted(tmp_path, strategy)
    for point in found.kinds:
        every = point.ranks * (point.weights + point.gradients + point.optimizer)
        assert point.ranks * (copies(point) or 0) == every - sum(WHOLE.values())
        assert point.weights + point.gradients + point.optimizer + point.buffers + point.activations == point.peak


def test_ranks_that_train_apart_hold_no_copies(tmp_path: Path) -> None:
    assert [copies(point) for point in planted(tmp_path, "local-sgd").kinds] == [0, None, None]


def test_copies_are_not_known_where_a_rank_was_not_watched(tmp_path: Path) -> None:
    found = planted(tmp_path, "data", watched=3).kinds
    assert [copies(point) for point in found] == [0, sum(WHOLE.values()) // 2, None]
    assert found[-1].retries == 2
