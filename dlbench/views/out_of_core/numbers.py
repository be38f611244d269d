"""Runs that differ in how they hold activations, and in their batch, side by side.

Throughput, memory and bytes are those of the runs; what was predicted is compared with them:

* peak: what the simulator predicts a rank to hold, against the measured peak of the rank that held most, and against
  the capacity that the plan was made for;
* step: predicted pass x passes per step + what the run's own warm-up spent next to forward and backward passes (input,
  exchange, optimiser), against the median measured step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dlbench.analysis.comparability import averaged_id, planned_id
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.side_by_side import Comparison, alike, compared, with_train
from dlbench.analysis.table import RunTable
from dlbench.errors import IncompleteDataError
from dlbench.lazy import np
from dlbench.projection.gathering import without_strategy
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.rows.steps import StepReader
from dlbench.records.scan import Run
from dlbench.report.table import Cell, column, times_cell
from dlbench.report.wording import percent, runs_text
from dlbench.specs.out_of_core import MemorySpec, Recompute, Swap
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.views.peak_memory import ended_without_memory

IN_CORE = ("none", "none")

TITLES: Mapping[tuple[Recompute, Swap], str] = {
    ("none", "none"): "in core",
    ("blocks", "none"): "all recomputed",
    ("none", "offload"): "all offloaded",
    ("none", "streamed"): "all streamed",
    ("blocks", "streamed"): "recomputed, inputs streamed",
    ("planned", "none"): "planned recompute",
    ("none", "planned"): "planned swap",
    ("planned", "planned"): "planned (KARMA)",
}
"""By `train.recompute` and `train.swap`, in the order in which they are shown."""

COLOURS: Mapping[str, str] = {  # Of the methods, wherever they are drawn.
    "in core": "#1f2328",
    "all recomputed": "#e69f00",
    "all offloaded": "#8a8f98",
    "all streamed": "#56b4e9",
    "recomputed, inputs streamed": "#cc79a7",
    "planned recompute": "#009e73",
    "planned swap": "#0072b2",
    "planned (KARMA)": "#d55e00",
}
OTHER_COLOUR = "#6b5bb5"

METHOD_KEYS = ("recompute", "swap", "optimizer_state", "compile", "activation_budget")
"""Settings of `train` that belong to a method, as `memory` does."""


def signed_percent(error: float) -> Cell:
    """``+3.1 %``, ``-0.4 %``."""
    return Cell(f"{'+' if error > 0 else ''}{percent(error)}", number=error)


@dataclass(frozen=True, kw_only=True)
class MethodPoint:
    """One method with one batch at one rank count."""

    ranks: int
    nodes: int
    method: str
    label: str = field(metadata=column("Activations", is_brief=True))  # With what distinguishes methods of one title.
    recompute: str
    swap: str
    capacity: str
    batch: int = field(metadata=column("Batch", "batch_per_rank", is_brief=True))  # Samples per rank and step.
    parts: int
    throughput: Estimate | None = None  # Samples per second, all ranks; None where no run has figures.
    step: Estimate | None = field(default=None, metadata=column("Step, measured", "step_s", is_brief=True))
    process_peak: Estimate | None = field(default=None, metadata=column("Whole process", "process_peak_bytes"))
    """Bytes of the rank that held most: allocated on its GPU, or resident in its process with all that it loaded."""
    device_peak: Estimate | None = field(default=None, metadata=column("Peak", "peak_bytes", is_brief=True))
    """Bytes that training took of it, as `RankMemory.device_peak_bytes`; None in core."""
    predicted_peak_bytes: int | None = field(
        default=None, metadata=column("Peak, predicted", unit="bytes", is_brief=True)
    )
    in_core_bytes: int | None = field(default=None, metadata=column("In core", unit="bytes"))
    """Bytes per rank in core, by the chain."""
    capacity_bytes: int | None = field(default=None, metadata=column("Capacity", unit="bytes"))
    over_budget_bytes: int | None = field(
        default=None, metadata=column("Over the plan", text=lambda found: found or Cell("no"), unit="bytes")
    )
    """By how much activations were more than the plan allowed, the most of any rank and run."""
    swapped_bytes: Estimate | None = field(default=None, metadata=column("Moved out"))
    """Bytes that left the device, per rank and step, mean over ranks."""
    recompute_share: Estimate | None = field(default=None, metadata=column("Recomputing", "recompute_fraction"))
    """Of the mean step, recomputing, mean over ranks."""
    room_wait_s: Estimate | None = field(default=None, metadata=column("Waited for room"))
    """Forward passes waited for room, seconds per step, mean over ranks."""
    swap_wait_s: Estimate | None = field(default=None, metadata=column("Waited for tensors"))
    predicted_step: Estimate | None = field(  # Seconds; None without a prediction or a warm-up of two steps.
        default=None, metadata=column("Step, predicted", "predicted_step_s", is_brief=True)
    )
    step_error: float | None = field(  # Predicted over measured step - 1; None where one is missing.
        default=None, metadata=column("Error", "step_error_fraction", text=signed_percent, is_brief=True)
    )
    peak_error: float | None = field(default=None, metadata=column("Error", "peak_error_fraction", text=signed_percent))
    host_update_s: Estimate | None = field(
        default=None, metadata=column("Waited for the host's update", "host_update_wait_s")
    )
    """Seconds per step in which rank 0's forward passes waited for parameters that the host updates."""
    host_update_bytes: Estimate | None = field(default=None, metadata=column("Copied for it"))
    """Gradients and parameters copied for that, per step."""
    checksum_share: float | None = field(default=None, metadata=column("Verified", "checksum_fraction", text=percent))
    """Of the swapped bytes, the least of any run; None where nothing was verified."""
    tier: str = field(default="", metadata=column("To", text=lambda found: found or None))
    num_runs: int = field(default=0, metadata=column("Runs", "runs"))
    num_without_memory: int = field(  # Runs that ended because memory was used up, or that no plan fits.
        default=0,
        metadata=column("Did not fit", "runs_without_memory", text=lambda count: runs_text(count) if count else "none"),
    )
    run_ids: tuple[str, ...] = ()

    @property
    def is_in_core(self) -> bool:
        """Whether nothing is recomputed or swapped."""
        return (self.recompute, self.swap) == IN_CORE

    @property
    def is_planned(self) -> bool:
        """Whether a plan decides for every block."""
        return "planned" in (self.recompute, self.swap)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest batch in core."""

    ranks: int
    nodes: int
    capacity_bytes: int
    batch: int  # Samples of a pass that this holds in core, by the measured chains.


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a plan gains over the methods that treat all blocks alike."""

    ranks: int
    nodes: int
    batch: int
    planned: str  # Label of the fastest planned method.
    over: str  # Label of the fastest method that treats all blocks alike and is not in core.
    ratio: Estimate  # Throughput of the plan over that method's.
    planned_peak_bytes: float | None  # Measured; see `MethodPoint.device_peak`.
    over_peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class AtLimit:
    """One way to train the same batch on so many ranks, whatever it shares or holds, under what a plan was made for."""

    ranks: int
    nodes: int
    batch: int = field(metadata=column("Batch", "batch_per_rank", is_brief=True))
    limit: int = field(metadata=column("Limit", "limit_bytes", unit="bytes", is_brief=True))
    method: str = field(metadata=column("Method", is_brief=True))
    peak: Estimate | None = field(metadata=column("Peak", "peak_bytes", is_brief=True))  # As `_held`.
    fits: bool | None = field(metadata=column("Fits", is_brief=True))
    throughput: Estimate = field(metadata=column("Samples/s", "throughput_per_s", is_brief=True))
    ratio: Estimate | None = field(  # Throughput over the fastest that fits; None: none does.
        metadata=column("Over best", "over_fastest_that_fits", text=times_cell, is_brief=True)
    )


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Methods side by side."""

    id: str
    label: str
    workload: str
    preset: str
    engine: str
    sample_unit: str
    points: tuple[MethodPoint, ...]  # By rank count, method and batch.
    limits: tuple[Limit, ...]  # At each rank count whose plans were made for one capacity in bytes.
    at_limit: tuple[AtLimit, ...]  # By place, batch and limit, fastest first; of what shares state as well.
    gains: tuple[Gain, ...]  # Where a plan and a method that treats all blocks alike ran, by rank count and batch.
    median_step_error: float | None  # Of absolute errors of the prediction over `points`; None without one.
    median_peak_error: float | None


def out_of_core(groups: Sequence[Group], table: RunTable) -> tuple[MethodComparison, ...]:
    """All sets of runs that differ in nothing but method and batch, where any has a method; ordered as the groups."""
    sets = alike(groups, lambda group: averaged_id(_without_method(group.sample)))
    return tuple(
        _compared(digest, members, groups, table) for digest, members in sets.items() if any(map(_has_method, members))
    )


def _without_method(run: Run) -> Run:
    """A run as if it had no method and batches of one sample."""
    neutral = {key: TrainSpec.model_fields[key].default for key in METHOD_KEYS}
    return with_train(run, {**neutral, "memory": MemorySpec(), "batch_per_rank": 1, "gradient_accumulation": 1})


def _has_method(group: Group) -> bool:
    train = group.sample.plan.workload.train
    return not train.is_in_core or train.optimizer_state == "host" or train.activation_budget is not None


def _compared(digest: str, groups: Sequence[Group], others: Sequence[Group], table: RunTable) -> MethodComparison:
    plan = groups[0].sample.plan
    subject = planned_id(_without_method(groups[0].sample))
    made = [
        _point(point, {table.keys[run_id]: table.runs[run_id] for run_id in point.run_ids})
        for group in groups
        for point in group.points
    ]
    points = {(one.ranks, one.nodes, one.label, one.batch): one for one in made}
    for item in table.without:
        fits_not = ended_without_memory(item.why) or "does not fit" in item.why
        if fits_not and planned_id(_without_method(item.run)) == subject:
            one = _empty(item.run)
            key = one.ranks, one.nodes, one.label, one.batch
            before = points.get(key, one)
            points[key] = dataclasses.replace(before, num_without_memory=before.num_without_memory + 1)
    in_core = {(one.batch, one.parts): one.in_core_bytes for one in points.values() if one.in_core_bytes is not None}
    for key, one in points.items():
        # What the chain of runs with a method says of those in core with the same batch.
        if one.in_core_bytes is None and one.is_in_core:
            held = in_core.get((one.batch, one.parts))
            points[key] = dataclasses.replace(one, in_core_bytes=held, predicted_peak_bytes=held)
    titles = list(TITLES.values())
    ordered = sorted(
        points.values(),
        key=lambda one: (
            one.ranks,
            one.nodes,
            titles.index(one.method) if one.method in titles else len(titles),
            one.label,
            one.batch,
        ),
    )
    step_errors = [abs(one.step_error) for one in ordered if one.step_error is not None]
    peak_errors = [abs(one.peak_error) for one in ordered if one.peak_error is not None]
    return MethodComparison(
        id=digest,
        label=f"{plan.workload.title} ({plan.workload.preset}, {plan.engine_title}, {plan.workload.train.precision})",
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        sample_unit=plan.workload.sample_unit,
        points=tuple(ordered),
        limits=tuple(_limits(groups, table)),
        at_limit=tuple(_at_limit(groups, others, table)),
        gains=tuple(_gains(ordered, table)),
        median_step_error=median(step_errors) if step_errors else None,
        median_peak_error=median(peak_errors) if peak_errors else None,
    )


def _capacity(train: TrainSpec) -> str:
    return train.memory.capacity if train.is_planned and train.memory.capacity is not None else ""


def _empty(run: Run) -> MethodPoint:
    train, layout = run.plan.workload.train, run.plan.layout
    title = TITLES.get((train.recompute, train.swap), f"{train.recompute} recomputed, {train.swap} swapped")
    capacity = _capacity(train)
    compiled = ""
    if train.compile != "none":
        mode = "" if train.compile == "default" else f" {train.compile}"
        budget = "" if train.activation_budget is None else f" keeping {train.activation_budget:g}"
        compiled = f"torch.compile{mode}{budget}"
    more = (
        f"in {capacity}" if capacity else "",
        f"blocks from {', '.join(train.memory.blocks)}" if train.memory.blocks else "",
        "verified" if train.memory.verify else "",
        compiled,
        "optimiser on the host" if train.optimizer_state == "host" else "",
        f"{train.gradient_accumulation} parts" if train.gradient_accumulation > 1 else "",
    )
    return MethodPoint(
        ranks=layout.ranks,
        nodes=layout.nodes,
        method=title,
        label=", ".join(filter(None, (title, *more))),
        recompute=train.recompute,
        swap=train.swap,
        capacity=capacity,
        batch=train.batch_per_rank,
        parts=train.gradient_accumulation,
    )


def _memory(run: Run) -> MemoryResult | None:
    return None if run.record is None else run.record.memory


def _point(point: Point, runs: Mapping[RunKey, Run]) -> MethodPoint:
    results = {key: found for key, run in runs.items() if (found := _memory(run)) is not None}
    first = next(iter(results.values()), None)

    def over_runs(figure: Callable[[Run], float | None]) -> dict[RunKey, float | None]:
        return {key: figure(run) for key, run in runs.items()}

    def per_step(name: str) -> dict[RunKey, float | None]:
        """A sum over the measured steps, per step, mean over ranks; left out where a rank counted none."""
        return {
            key: math.fsum(getattr(one, name) / one.steps for one in result.ranks) / len(result.ranks)
            for key, result in results.items()
            if all(one.steps for one in result.ranks)
        }

    predicted = of_known(median_estimate, over_runs(_predicted_step_s), "s")
    peak = of_known(median_estimate, {key: _device_peak(result) for key, result in results.items()}, "bytes")
    recompute_s, whole_s = of_known(mean_estimate, per_step("recompute_s"), "s"), point.mean_step.value
    shares = [one.checksum_share for one in results.values() if one.checksum_share is not None]
    return dataclasses.replace(
        _empty(next(iter(runs.values()))),
        throughput=point.throughput,
        step=point.step,
        process_peak=of_known(median_estimate, over_runs(_process_peak), "bytes"),
        device_peak=peak,
        predicted_peak_bytes=None if first is None else first.plan.predicted.peak_bytes,
        in_core_bytes=None if first is None else first.in_core_bytes,
        capacity_bytes=None if first is None else first.plan.capacity_bytes,
        over_budget_bytes=max((r.over_budget_bytes for one in results.values() for r in one.ranks), default=None),
        swapped_bytes=of_known(median_estimate, per_step("swapped_out_bytes"), "bytes"),
        recompute_share=recompute_s.scaled(1 / whole_s, "fraction") if recompute_s and whole_s > 0 else None,
        room_wait_s=of_known(mean_estimate, per_step("room_wait_s"), "s"),
        swap_wait_s=of_known(mean_estimate, per_step("swap_wait_s"), "s"),
        predicted_step=predicted,
        step_error=None if predicted is None else predicted.value / point.step.value - 1,
        peak_error=None if first is None or not peak else first.plan.predicted.peak_bytes / peak.value - 1,
        host_update_s=of_known(mean_estimate, over_runs(lambda run: _host_update(run, "wait_s")), "s"),
        host_update_bytes=of_known(median_estimate, over_runs(lambda run: _host_update(run, "copied_bytes")), "bytes"),
        checksum_share=min(shares, default=None),
        tier="" if first is None or first.tier is None else first.tier,
        num_runs=len(runs),
        run_ids=point.run_ids,
    )


def _process_peak(run: Run) -> float | None:
    assert run.record is not None
    peaks = [rank.peak_memory_bytes for rank in run.record.ranks if rank.peak_memory_bytes is not None]
    return float(max(peaks)) if peaks else None


def _device_peak(result: MemoryResult) -> float | None:
    """Of the rank that held most; None unless all have one."""
    peaks = [rank.device_peak_bytes for rank in result.ranks]
    return None if None in peaks else float(max(peak for peak in peaks if peak is not None))


def _beside_passes_s(run: Run) -> float | None:
    """Seconds per step that are neither forward nor backward pass, the median over the warm-up steps of rank 0 but the
    first, in which much happens for the first time; None for fewer than two, and where the file cannot be read.
    """
    try:
        reader = StepReader(run.folder.steps(0), run_id=run.plan.run_id)
        steps: dict[str, Any] = reader.read(("warmup", "step_ns", "forward_ns", "backward_ns"))
    except IncompleteDataError:
        return None
    others = (steps["step_ns"] - steps["forward_ns"] - steps["backward_ns"])[steps["warmup"] != 0][1:]
    return float(np.median(others)) / 1e9 if len(others) else None


def _predicted_step_s(run: Run) -> float | None:
    """The step as the plan and the run's own warm-up have it."""
    result = _memory(run)
    others_s = None if result is None else _beside_passes_s(run)
    return None if result is None or others_s is None else result.plan.predicted.pass_s * result.parts + others_s


def _host_update(run: Run, name: str) -> float | None:
    """A sum over the measured steps of rank 0, per step."""
    if run.record is None or run.record.host_update is None:
        return None
    steps = max(1, run.record.ranks[0].samples // run.plan.workload.train.batch_per_rank)
    return float(getattr(run.record.host_update, name)) / steps


def _limits(groups: Sequence[Group], table: RunTable) -> Iterator[Limit]:
    """Where all plans of a rank count were made for one capacity in bytes: the largest batch that it holds in core."""
    asked = [(group, _capacity(group.sample.plan.workload.train)) for group in groups]
    points = [point for group, text in asked if text and not text.endswith("%") for point in group.points]
    for (ranks, nodes), members in sorted(alike(points, lambda point: (point.ranks, point.nodes)).items()):
        runs = [table.runs[run_id] for point in members for run_id in point.run_ids]
        results = [result for run in runs if (result := _memory(run)) is not None]
        capacities = {one.plan.capacity_bytes for one in results}
        capacity = capacities.pop() if len(capacities) == 1 else None
        if capacity is not None:
            batch = _in_core_batch(results, capacity)
            yield Limit(ranks=ranks, nodes=nodes, capacity_bytes=capacity, batch=batch)


def _in_core_batch(results: Sequence[MemoryResult], capacity: int) -> int:
    """Samples of a pass that a capacity holds in core: on the line through the two measured batches that are nearest.

    With one batch what is no state is taken as proportional to it.
    """
    by_batch = alike(results, lambda one: one.chain.batch)
    sizes = {batch: median(one.in_core_bytes for one in same) for batch, same in by_batch.items()}
    known = sorted(sizes.items(), key=lambda at: abs(at[1] - capacity))
    (batch, held), chain = known[0], results[0].chain
    other, less = known[1] if len(known) > 1 else (0, chain.state_bytes + chain.exchange_bytes)
    per_sample = (held - less) / (batch - other)
    return max(0, math.floor(batch + (capacity - held) / per_sample)) if per_sample > 0 else batch


def _gains(points: Sequence[MethodPoint], table: RunTable) -> Iterator[Gain]:
    with_figures = [point for point in points if point.throughput is not None and point.num_runs]
    rates = table.rates

    def speed(point: MethodPoint) -> float:
        return 0.0 if point.throughput is None else point.throughput.value

    for cell in alike(with_figures, lambda one: (one.ranks, one.nodes, one.batch, one.parts)).values():
        planned = [one for one in cell if one.is_planned]
        uniform = [one for one in cell if not one.is_planned and not one.is_in_core]
        if not planned or not uniform:
            continue
        best, over = max(planned, key=speed), max(uniform, key=speed)
        sides = [{table.keys[run_id]: float(rates[run_id]) for run_id in one.run_ids} for one in (best, over)]
        ratio, _ = compared(sides[0], sides[1])
        assert ratio is not None
        yield Gain(
            ranks=best.ranks,
            nodes=best.nodes,
            batch=best.batch,
            planned=best.label,
            over=over.label,
            ratio=ratio,
            planned_peak_bytes=None if best.device_peak is None else best.device_peak.value,
            over_peak_bytes=None if over.device_peak is None else over.device_peak.value,
        )


def _at_limit(groups: Sequence[Group], others: Sequence[Group], table: RunTable) -> Iterator[AtLimit]:
    """`others`: all groups, of which those take part that train as one of `groups` does, on replicas or not. Local SGD
    makes other updates and does not.
    """
    rates = table.rates
    comparison = Comparison(differ_in=lambda run: averaged_id(without_strategy(run)), kind=_method)
    for found in comparison.of(one for one in others if one.sample.plan.strategy != "local-sgd"):
        if not any(one in groups for one in found.groups):
            continue
        for (ranks, nodes), sides in found.places.items():
            runs = [{table.keys[one]: table.runs[one] for one in side.point.run_ids} for side in sides]
            peaks = [of_known(median_estimate, {key: _held(run) for key, run in of.items()}, "bytes") for of in runs]
            # Of tensors; else what is resident, which on a CPU holds pages of freed ones as well.
            counted = [all(run.record and run.record.held_bytes is not None for run in of.values()) for of in runs]
            paces = [{key: float(rates[run.plan.run_id]) for key, run in of_side.items()} for of_side in runs]
            limits = {one.plan.capacity_bytes for of in runs for run in of.values() if (one := _memory(run))} - {None}
            for limit in sorted(filter(None, limits)):
                fits = [
                    None if peak is None or (peak.value > limit and not is_counted) else peak.value <= limit
                    for peak, is_counted in zip(peaks, counted, strict=True)
                ]
                able = [number for number, one in enumerate(fits) if one]
                best = max(able, key=lambda number: sides[number].point.throughput.value, default=None)
                for number in sorted(range(len(sides)), key=lambda one: -sides[one].point.throughput.value):
                    yield AtLimit(
                        ranks=ranks,
                        nodes=nodes,
                        batch=sides[number].group.sample.plan.workload.train.batch_per_rank,
                        limit=limit,
                        method=_method(sides[number].group),
                        peak=peaks[number],
                        fits=fits[number],
                        throughput=sides[number].point.throughput,
                        ratio=None if best is None else compared(paces[number], paces[best])[0],
                    )


def _method(group: Group) -> str:
    plan = group.sample.plan
    if plan.strategy in ("data", "serial", "out-of-core"):
        return f"replicas, {_empty(group.sample).label}"
    return plan.engine_title.removeprefix("PyTorch ")


def _held(run: Run) -> float | None:
    """Bytes of tensors of the rank that held most: as counted, else as those that swap on a CPU have them."""
    result = _memory(run)
    assert run.record is not None
    return run.record.held_bytes or (None if result is None else _device_peak(result))
