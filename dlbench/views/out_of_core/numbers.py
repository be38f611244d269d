"""Runs that differ only in the method for activations, and in their batch, side by side, with predictions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import median

from dlbench.analysis.comparability import averaged_id, planned_id
from dlbench.analysis.scaling import Comparison, Group, Point, Side, compared, group_by, with_train
from dlbench.analysis.table import RunTable
from dlbench.errors import IncompleteDataError
from dlbench.lazy import np
from dlbench.projection.gathering import without_strategy
from dlbench.records.out_of_core import MemoryResult
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.report.table import Cell, column, times_cell
from dlbench.report.wording import percent
from dlbench.specs.out_of_core import MemorySpec, Recompute, Swap
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.views.model import AtPlace, optional_text
from dlbench.views.peak_memory import ended_without_memory, runs_or_none

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

COLOURS: Mapping[str, str] = {  # Colours of the methods by title.
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

METHOD_KEYS = ("recompute", "swap", "optimizer_state", "compile", "activation_budget")  # Settings of `train`, too.


def signed_percent(error: float) -> Cell:
    """Returns an error with its sign, e.g. ``+3.1 %``, ``-0.4 %``."""
    sign = "+" if error > 0 else ""
    return Cell(f"{sign}{percent(error)}", number=error)


@dataclass(frozen=True, kw_only=True)
class MethodPoint(AtPlace):
    """The speed and memory of one method with one batch at one rank count."""

    method: str
    label: str = field(metadata=column("Activations", is_brief=True))  # The method's title with its settings.
    recompute: str
    swap: str
    capacity: str
    batch: int = field(metadata=column("Batch", "batch_per_rank", is_brief=True))  # Samples per rank and step.
    parts: int
    throughput: Estimate | None = None  # Samples per second, all ranks; None if no run has figures.
    step: Estimate | None = field(default=None, metadata=column("Step, measured", "step_s", is_brief=True))
    process_peak: Estimate | None = field(default=None, metadata=column("Whole process", "process_peak_bytes"))
    device_peak: Estimate | None = field(default=None, metadata=column("Peak", "peak_bytes", is_brief=True))
    """Highest bytes of training alone, as `RankMemory.device_peak_bytes`; None in core."""
    predicted_peak_bytes: int | None = field(
        default=None, metadata=column("Peak, predicted", unit="bytes", is_brief=True)
    )
    in_core_bytes: int | None = field(default=None, metadata=column("In core", unit="bytes"))  # By the measured chain.
    capacity_bytes: int | None = field(default=None, metadata=column("Capacity", unit="bytes"))
    over_budget_bytes: int | None = field(
        default=None, metadata=column("Over the plan", text=lambda excess: excess or Cell("no"), unit="bytes")
    )
    swapped_bytes: Estimate | None = field(default=None, metadata=column("Moved out"))
    recompute_share: Estimate | None = field(default=None, metadata=column("Recomputing", "recompute_fraction"))
    room_wait_s: Estimate | None = field(default=None, metadata=column("Waited for memory"))
    swap_wait_s: Estimate | None = field(default=None, metadata=column("Waited for tensors"))
    predicted_step: Estimate | None = field(
        default=None, metadata=column("Step, predicted", "predicted_step_s", is_brief=True)
    )
    step_error: float | None = field(
        default=None, metadata=column("Error", "step_error_fraction", text=signed_percent, is_brief=True)
    )
    """Predicted over measured step - 1; None if one of them is missing."""
    peak_error: float | None = field(default=None, metadata=column("Error", "peak_error_fraction", text=signed_percent))
    host_update_s: Estimate | None = field(
        default=None, metadata=column("Waited for the host's update", "host_update_wait_s")
    )
    host_update_bytes: Estimate | None = field(default=None, metadata=column("Copied for the host's update"))
    checksum_share: float | None = field(default=None, metadata=column("Verified", "checksum_fraction", text=percent))
    tier: str = field(default="", metadata=column("To", text=optional_text))  # The memory or disk of swapped tensors.
    num_runs: int = field(default=0, metadata=column("Runs", "runs"))
    num_without_memory: int = field(default=0, metadata=column("Did not fit", "runs_without_memory", text=runs_or_none))
    run_ids: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        return self.ranks, self.nodes

    @property
    def key(self) -> tuple[int, int, str, int]:
        """Ranks, nodes, label and batch: points with equal keys are one."""
        return self.ranks, self.nodes, self.label, self.batch

    @property
    def excess_bytes(self) -> float:
        """Bytes of the measured peak above the capacity; 0 if one of them is not known."""
        if self.device_peak is None or self.capacity_bytes is None:
            return 0.0
        return self.device_peak.value - self.capacity_bytes

    @property
    def is_in_core(self) -> bool:
        return (self.recompute, self.swap) == IN_CORE

    @property
    def is_planned(self) -> bool:
        """True if a plan decides for each block."""
        return "planned" in (self.recompute, self.swap)


@dataclass(frozen=True, kw_only=True)
class Limit(AtPlace):
    """The largest batch in core at one rank count."""

    capacity_bytes: int
    batch: int  # Samples of a pass that fit the capacity in core, by the measured chains.


@dataclass(frozen=True, kw_only=True)
class Gain(AtPlace):
    """The gain of a plan over the methods that treat all blocks equally."""

    batch: int
    planned: str  # Label of the fastest planned method.
    over: str  # Label of the fastest method that treats all blocks equally and is not in core.
    ratio: Estimate  # Throughput of the plan over that method's.
    planned_peak_bytes: float | None  # Measured peak of the plan; see `MethodPoint.device_peak`.
    over_peak_bytes: float | None  # Measured peak of the other method.


@dataclass(frozen=True, kw_only=True)
class AtLimit(AtPlace):
    """A method, with one batch and rank count, at a memory limit for which a plan was made; it may shard its state."""

    batch: int = field(metadata=column("Batch", "batch_per_rank", is_brief=True))
    limit: int = field(metadata=column("Limit", "limit_bytes", unit="bytes", is_brief=True))
    method: str = field(metadata=column("Method", is_brief=True))
    peak: Estimate | None = field(metadata=column("Peak", "peak_bytes", is_brief=True))  # See `_tensor_bytes`.
    fits: bool | None = field(metadata=column("Fits", is_brief=True))  # None: not known.
    throughput: Estimate = field(metadata=column("Samples/s", "throughput_per_s", is_brief=True))
    ratio: Estimate | None = field(
        metadata=column("Over best", "over_fastest_that_fits", text=times_cell, is_brief=True)
    )


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Methods side by side, from runs that differ only in the method and the batch."""

    id: str
    label: str
    workload: str
    preset: str
    engine: str
    sample_unit: str
    points: tuple[MethodPoint, ...]  # By rank count, method and batch.
    limits: tuple[Limit, ...]  # At each rank count whose plans were made for one capacity in bytes.
    at_limit: tuple[AtLimit, ...]  # By place, batch and limit, fastest first; also methods that shard state.
    gains: tuple[Gain, ...]  # By rank count and batch with a plan and a method that treats all blocks equally.
    median_step_error: float | None  # Median of absolute errors of predicted steps over `points`; None without one.
    median_peak_error: float | None  # Median of absolute errors of predicted peaks over `points`; None without one.


def out_of_core(groups: Sequence[Group], table: RunTable) -> tuple[MethodComparison, ...]:
    """Returns all sets of runs that differ only in method and batch, if one has a method; ordered as the groups."""
    sets = group_by(groups, lambda group: averaged_id(_without_method(group.sample)))
    return tuple(
        _compared(digest, members, groups, table)
        for digest, members in sets.items()
        if any(member.sample.plan.workload.train.saves_memory for member in members)
    )


def _without_method(run: Run) -> Run:
    """Returns a run as if it trained in core with batches of one sample."""
    neutral = {key: TrainSpec.model_fields[key].default for key in METHOD_KEYS}
    return with_train(run, {**neutral, "memory": MemorySpec(), "batch_per_rank": 1, "gradient_accumulation": 1})


def _compared(digest: str, groups: Sequence[Group], others: Sequence[Group], table: RunTable) -> MethodComparison:
    plan = groups[0].sample.plan
    points = _points(groups, table)
    return MethodComparison(
        id=digest,
        label=f"{plan.workload.title} ({plan.workload.preset}, {plan.engine_title}, {plan.workload.train.precision})",
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        sample_unit=plan.workload.sample_unit,
        points=tuple(points),
        limits=tuple(_limits(groups, table)),
        at_limit=tuple(_at_limit(groups, others, table)),
        gains=tuple(_gains(points, table)),
        median_step_error=_median_error(point.step_error for point in points),
        median_peak_error=_median_error(point.peak_error for point in points),
    )


def _median_error(errors: Iterable[float | None]) -> float | None:
    absolute = [abs(error) for error in errors if error is not None]
    return median(absolute) if absolute else None


def _points(groups: Sequence[Group], table: RunTable) -> list[MethodPoint]:
    """Returns the points in the order of tables; those in core get the bytes of the chain of other methods."""
    merged: dict[tuple[int, int, str, int], MethodPoint] = {}
    for scaling_point in chain.from_iterable(group.points for group in groups):
        runs = {table.keys[run_id]: table.runs[run_id] for run_id in scaling_point.run_ids}
        point = _point(scaling_point, runs)
        merged[point.key] = point
    subject = planned_id(_without_method(groups[0].sample))
    for item in table.without:
        is_too_large = ended_without_memory(item.why) or "does not fit" in item.why
        if is_too_large and planned_id(_without_method(item.run)) == subject:
            point = _empty(item.run)
            point = merged.get(point.key, point)
            merged[point.key] = dataclasses.replace(point, num_without_memory=point.num_without_memory + 1)
    chains = [point for point in merged.values() if point.in_core_bytes is not None]
    in_core = {(point.batch, point.parts): point.in_core_bytes for point in chains}
    for key, point in merged.items():
        if point.in_core_bytes is None and point.is_in_core:
            in_core_bytes = in_core.get((point.batch, point.parts))
            merged[key] = dataclasses.replace(point, in_core_bytes=in_core_bytes, predicted_peak_bytes=in_core_bytes)
    order = {title: number for number, title in enumerate(TITLES.values())}
    return sorted(
        merged.values(), key=lambda point: (*point.place, order.get(point.method, len(order)), point.label, point.batch)
    )


def _capacity(train: TrainSpec) -> str:
    return train.memory.capacity if train.is_planned and train.memory.capacity is not None else ""


def _empty(run: Run) -> MethodPoint:
    train, layout = run.plan.workload.train, run.plan.layout
    title = TITLES.get((train.recompute, train.swap), f"{train.recompute} recomputed, {train.swap} swapped")
    capacity = _capacity(train)
    compiled = "torch.compile"
    if train.compile != "default":
        compiled += f" {train.compile}"
    if train.activation_budget is not None:
        compiled += f" keeping {train.activation_budget:g}"
    parts = [title]
    for is_set, text in (
        (capacity, f"in {capacity}"),
        (train.memory.blocks, f"blocks from {', '.join(train.memory.blocks)}"),
        (train.memory.verify, "verified"),
        (train.compile != "none", compiled),
        (train.optimizer_state == "host", "optimizer on the host"),
        (train.gradient_accumulation > 1, f"{train.gradient_accumulation} parts"),
    ):
        if is_set:
            parts.append(text)
    return MethodPoint(
        ranks=layout.ranks,
        nodes=layout.nodes,
        method=title,
        label=", ".join(parts),
        recompute=train.recompute,
        swap=train.swap,
        capacity=capacity,
        batch=train.batch_per_rank,
        parts=train.gradient_accumulation,
    )


def _memory(run: Run) -> MemoryResult | None:
    return None if run.record is None else run.record.memory


def _point(point: Point, runs: Mapping[RunKey, Run]) -> MethodPoint:
    memories = {key: _memory(run) for key, run in runs.items()}
    results = {key: result for key, result in memories.items() if result is not None}

    def over_runs(figure: Callable[..., float | None], *arguments: str) -> dict[RunKey, float | None]:
        return {key: figure(run, *arguments) for key, run in runs.items()}

    def per_step(name: str) -> dict[RunKey, float | None]:
        """Returns a sum over the measured steps, per step, mean over ranks; without runs whose ranks counted none."""
        return {key: _per_step(result, name) for key, result in results.items()}

    method_point = dataclasses.replace(
        _empty(next(iter(runs.values()))),
        throughput=point.throughput,
        step=point.step,
        process_peak=of_known(median_estimate, over_runs(_process_peak), "bytes"),
        device_peak=of_known(median_estimate, {key: _device_peak(result) for key, result in results.items()}, "bytes"),
        swapped_bytes=of_known(median_estimate, per_step("swapped_out_bytes"), "bytes"),
        room_wait_s=of_known(mean_estimate, per_step("room_wait_s"), "s"),
        swap_wait_s=of_known(mean_estimate, per_step("swap_wait_s"), "s"),
        predicted_step=of_known(median_estimate, over_runs(_predicted_step_s), "s"),
        host_update_s=of_known(mean_estimate, over_runs(_host_update, "wait_s"), "s"),
        host_update_bytes=of_known(median_estimate, over_runs(_host_update, "copied_bytes"), "bytes"),
        num_runs=len(runs),
        run_ids=point.run_ids,
    )
    recompute_s, step_s = of_known(mean_estimate, per_step("recompute_s"), "s"), point.mean_step.value
    if recompute_s is not None and step_s > 0:
        recompute_share = recompute_s.scaled(1 / step_s, "fraction")
        method_point = dataclasses.replace(method_point, recompute_share=recompute_share)
    if method_point.predicted_step is not None:
        step_error = method_point.predicted_step.value / point.step.value - 1
        method_point = dataclasses.replace(method_point, step_error=step_error)
    if not results:
        return method_point
    return _with_plan(method_point, list(results.values()))


def _with_plan(point: MethodPoint, results: Sequence[MemoryResult]) -> MethodPoint:
    first = results[0]
    peak_error = None
    if point.device_peak:
        peak_error = first.plan.predicted.peak_bytes / point.device_peak.value - 1
    ranks = chain.from_iterable(result.ranks for result in results)
    checksum_shares = [result.checksum_share for result in results if result.checksum_share is not None]
    return dataclasses.replace(
        point,
        predicted_peak_bytes=first.plan.predicted.peak_bytes,
        in_core_bytes=first.in_core_bytes,
        capacity_bytes=first.plan.capacity_bytes,
        over_budget_bytes=max((rank.over_budget_bytes for rank in ranks), default=None),
        peak_error=peak_error,
        checksum_share=min(checksum_shares, default=None),
        tier=first.tier or "",
    )


def _per_step(result: MemoryResult, name: str) -> float | None:
    if not all(rank.steps for rank in result.ranks):
        return None
    return math.fsum(getattr(rank, name) / rank.steps for rank in result.ranks) / len(result.ranks)


def _process_peak(run: Run) -> float | None:
    assert run.record is not None
    peaks = (rank.peak_memory_bytes for rank in run.record.ranks)
    return max((float(peak) for peak in peaks if peak is not None), default=None)


def _device_peak(result: MemoryResult) -> float | None:
    """Returns the highest peak of any rank in bytes; None unless all ranks have one."""
    peaks = [rank.device_peak_bytes for rank in result.ranks if rank.device_peak_bytes is not None]
    return None if len(peaks) < len(result.ranks) else float(max(peaks))


def _outside_passes_s(run: Run) -> float | None:
    """Returns the seconds per step outside both passes, median over rank 0's warm-up steps after the first; None: not
    known.
    """
    try:
        steps = read_steps(run.folder.steps(0), run.plan.run_id).steps
    except IncompleteDataError:
        return None
    outside_ns = (steps["step_ns"] - steps["forward_ns"] - steps["backward_ns"])[steps["warmup"] != 0][1:]
    if not len(outside_ns):
        return None
    return float(np.median(outside_ns)) / 1e9


def _predicted_step_s(run: Run) -> float | None:
    result = _memory(run)
    if result is None:
        return None
    outside_s = _outside_passes_s(run)
    return None if outside_s is None else result.plan.predicted.pass_s * result.parts + outside_s


def _host_update(run: Run, name: str) -> float | None:
    """Returns a sum over the measured steps of rank 0, per step."""
    if run.record is None or run.record.host_update is None:
        return None
    steps = max(1, run.record.ranks[0].samples // run.plan.workload.train.batch_per_rank)
    return float(getattr(run.record.host_update, name)) / steps


def _limits(groups: Sequence[Group], table: RunTable) -> Iterator[Limit]:
    """Yields the largest batch in core of each rank count whose plans were all made for one capacity in bytes."""
    points: list[Point] = []
    for group in groups:
        capacity = _capacity(group.sample.plan.workload.train)
        if capacity and not capacity.endswith("%"):
            points += group.points
    for (ranks, nodes), members in sorted(group_by(points, attrgetter("ranks", "nodes")).items()):
        run_ids = chain.from_iterable(point.run_ids for point in members)
        memories = [_memory(table.runs[run_id]) for run_id in run_ids]
        results = [result for result in memories if result is not None]
        capacities = {result.plan.capacity_bytes for result in results}
        capacity_bytes = capacities.pop() if len(capacities) == 1 else None
        if capacity_bytes is not None:
            batch = _in_core_batch(results, capacity_bytes)
            yield Limit(ranks=ranks, nodes=nodes, capacity_bytes=capacity_bytes, batch=batch)


def _in_core_batch(results: Sequence[MemoryResult], capacity: int) -> int:
    """Returns the samples that fit a capacity in core, by the line through the two nearest measured batches. With one
    batch, all bytes but the state are assumed proportional to it.
    """
    by_batch = group_by(results, lambda result: result.chain.batch)
    sizes = {batch: median(result.in_core_bytes for result in same) for batch, same in by_batch.items()}
    nearest = sorted(sizes, key=lambda batch: abs(sizes[batch] - capacity))
    batch, chain_spec = nearest[0], results[0].chain
    second, second_bytes = 0, float(chain_spec.state_bytes + chain_spec.exchange_bytes)
    if len(nearest) > 1:
        second, second_bytes = nearest[1], sizes[nearest[1]]
    per_sample = (sizes[batch] - second_bytes) / (batch - second)
    if per_sample <= 0:
        return batch
    return max(0, math.floor(batch + (capacity - sizes[batch]) / per_sample))


def _gains(points: Sequence[MethodPoint], table: RunTable) -> Iterator[Gain]:
    with_figures = [point for point in points if point.throughput is not None and point.num_runs]
    for cell in group_by(with_figures, attrgetter("ranks", "nodes", "batch", "parts")).values():
        planned = [point for point in cell if point.is_planned]
        fixed = [point for point in cell if not point.is_planned and not point.is_in_core]
        if not planned or not fixed:
            continue
        best, over = max(planned, key=_throughput), max(fixed, key=_throughput)
        ratio, _ = compared(table.rates_of(best.run_ids), table.rates_of(over.run_ids))
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


def _throughput(point: MethodPoint) -> float:
    return 0.0 if point.throughput is None else point.throughput.value


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The runs of one method at one rank count."""

    group: Group
    throughput: Estimate
    peak: Estimate | None  # See `_tensor_bytes`.
    is_counted: bool  # Whether the peak is of tensors; otherwise on a CPU it includes freed pages.
    rates: Mapping[RunKey, float]  # Samples per second of each run.
    capacities: frozenset[int]  # Capacities of plans in bytes.

    def fits(self, limit: int) -> bool | None:
        if self.peak is None:
            return None
        if self.peak.value <= limit:
            return True
        return False if self.is_counted else None


def _side(side: Side, table: RunTable) -> _Side:
    runs = {table.keys[run_id]: table.runs[run_id] for run_id in side.point.run_ids}
    memories = [_memory(run) for run in runs.values()]
    capacities = {result.plan.capacity_bytes for result in memories if result is not None}
    return _Side(
        group=side.group,
        throughput=side.point.throughput,
        peak=of_known(median_estimate, {key: _tensor_bytes(run) for key, run in runs.items()}, "bytes"),
        is_counted=all(run.record and run.record.held_bytes is not None for run in runs.values()),
        rates={key: float(table.rates[run.plan.run_id]) for key, run in runs.items()},
        capacities=frozenset(capacity for capacity in capacities if capacity),
    )


def _at_limit(groups: Sequence[Group], others: Sequence[Group], table: RunTable) -> Iterator[AtLimit]:
    """Yields the methods at each memory limit, fastest first, of all groups (`others`) that train the same as one of
    `groups`.
    """
    comparison = Comparison(common_digest=lambda run: averaged_id(without_strategy(run)), kind=_method)
    for comparable in comparison.of(group for group in others if group.sample.plan.strategy != "local-sgd"):
        if not any(group in groups for group in comparable.groups):
            continue
        for (ranks, nodes), sides_at_place in comparable.places.items():
            sides = [_side(side, table) for side in sides_at_place]
            sides.sort(key=attrgetter("throughput.value"), reverse=True)
            for limit in sorted(frozenset().union(*(side.capacities for side in sides))):
                best = next((side for side in sides if side.fits(limit)), None)
                for side in sides:
                    yield AtLimit(
                        ranks=ranks,
                        nodes=nodes,
                        batch=side.group.sample.plan.workload.train.batch_per_rank,
                        limit=limit,
                        method=_method(side.group),
                        peak=side.peak,
                        fits=side.fits(limit),
                        throughput=side.throughput,
                        ratio=None if best is None else compared(side.rates, best.rates)[0],
                    )


def _method(group: Group) -> str:
    plan = group.sample.plan
    if plan.strategy in ("data", "serial", "out-of-core"):
        return f"replicas, {_empty(group.sample).label}"
    return plan.engine_title.removeprefix("PyTorch ")


def _tensor_bytes(run: Run) -> float | None:
    """Returns the highest bytes of tensors of any rank: as counted, else the peak of ranks that swap on a CPU."""
    assert run.record is not None
    if run.record.held_bytes:
        return run.record.held_bytes
    result = _memory(run)
    return None if result is None else _device_peak(result)
