"""Runs that differ in how they hold activations, and in their batch, beside each other.

Throughput, memory and bytes are those of the runs; what was predicted is compared with them:

* peak: what the simulator predicts a rank to hold, against the measured peak of the rank that held most, and against
  the capacity that the plan was made for;
* step: predicted pass x passes of a step + what the run's own warm-up spent beside forward and backward passes (input,
  exchange, optimiser), against the median measured step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dlbench.reading.comparability import averaged_id, planned_id
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.reading.warm_up import beside_passes_s
from dlbench.records.memory import MemoryResult
from dlbench.records.scan import Run
from dlbench.report.wording import place_text
from dlbench.specs.memory import MemorySpec, Recompute, Swap
from dlbench.specs.training import TrainSpec
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey
from dlbench.views.memory import ended_without_memory
from dlbench.views.out_of_core.passes import Passage, passage_of
from dlbench.views.view import engine_title

IN_CORE = ("none", "none")
PLANNED = ("planned", "planned")

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

OTHER_TITLE = "{recompute} recomputed, {swap} swapped"

COLOURS: Mapping[str, str] = {
    "in core": "#1f2328",
    "all recomputed": "#e69f00",
    "all offloaded": "#8a8f98",
    "all streamed": "#56b4e9",
    "recomputed, inputs streamed": "#cc79a7",
    "planned recompute": "#009e73",
    "planned swap": "#0072b2",
    "planned (KARMA)": "#d55e00",
}
"""Of the methods, wherever they are drawn."""
OTHER_COLOUR = "#6b5bb5"

METHOD_KEYS = ("recompute", "swap", "memory", "optimizer_state", "compile", "activation_budget")
"""Settings of `train` that belong to a method."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a run holds activations and optimiser state."""

    title: str
    """Of `TITLES`."""
    label: str
    """The same with all that tells methods of one title apart."""
    recompute: str
    swap: str
    capacity: str
    """As asked for; empty where none was."""

    @property
    def colour(self) -> str:
        """Of its title."""
        return COLOURS.get(self.title, OTHER_COLOUR)


def title_of(recompute: Recompute, swap: Swap) -> str:
    """What a method is called."""
    return TITLES.get((recompute, swap)) or OTHER_TITLE.format(recompute=recompute, swap=swap)


def _compiled(train: TrainSpec) -> str:
    if train.compile == "none":
        return ""
    mode = "" if train.compile == "default" else f" {train.compile}"
    budget = "" if train.activation_budget is None else f" keeping {train.activation_budget:g}"
    return f"torch.compile{mode}{budget}"


def method_of(train: TrainSpec) -> Method:
    """The method of a plan."""
    title = title_of(train.recompute, train.swap)
    capacity = train.memory.capacity if train.is_planned and train.memory.capacity is not None else ""
    more = (
        f"in {capacity}" if capacity else "",
        f"blocks from {', '.join(train.memory.blocks)}" if train.memory.blocks else "",
        "verified" if train.memory.verify else "",
        _compiled(train),
        "optimiser on the host" if train.optimizer_state == "host" else "",
        f"{train.gradient_accumulation} parts" if train.gradient_accumulation > 1 else "",
    )
    return Method(
        title=title,
        label=", ".join(filter(None, (title, *more))),
        recompute=train.recompute,
        swap=train.swap,
        capacity=capacity,
    )


def without_method(train: TrainSpec) -> TrainSpec:
    """The same training without a method and with batches of one sample: equal for runs to be compared here."""
    neutral = {key: TrainSpec.model_fields[key].default for key in METHOD_KEYS if key != "memory"}
    return train.model_copy(update={**neutral, "memory": MemorySpec(), "batch_per_rank": 1, "gradient_accumulation": 1})


def rank_of(method: Method) -> int:
    """Its place in the order of `TITLES`."""
    titles = list(TITLES.values())
    return titles.index(method.title) if method.title in titles else len(titles)


# Runs beside each other


@dataclass(frozen=True, kw_only=True)
class MethodPoint:
    """One method with one batch at one rank count."""

    ranks: int
    nodes: int
    method: str
    """Its title."""
    label: str
    """With what tells methods of one title apart."""
    recompute: str
    swap: str
    capacity: str
    """As asked for; empty where none was."""
    batch: int
    """Samples per rank and step."""
    parts: int
    """Passes of a step."""
    throughput: Estimate | None = None
    """Samples per second, all ranks; None where no run has figures."""
    step: Estimate | None = None
    """Median measured step, seconds."""
    process_peak: Estimate | None = None
    """Bytes of the rank that held most: allocated on its GPU, or resident in its process with all that it loaded."""
    device_peak: Estimate | None = None
    """Bytes that training took of it, as `RankMemory.device_peak_bytes`; None in core."""
    predicted_peak_bytes: int | None = None
    in_core_bytes: int | None = None
    """What a rank would hold in core, by the chain."""
    capacity_bytes: int | None = None
    """What it was planned for."""
    over_budget_bytes: int | None = None
    """By how much activations were more than the plan allowed, the most of any rank and run."""
    swapped_bytes: Estimate | None = None
    """Bytes that left the device, per rank and step, mean over ranks."""
    recompute_share: Estimate | None = None
    """Of the mean step, recomputing, mean over ranks."""
    room_wait_s: Estimate | None = None
    """Forward passes waited for room, seconds per step, mean over ranks."""
    swap_wait_s: Estimate | None = None
    """Backward passes waited for tensors, likewise."""
    predicted_step: Estimate | None = None
    """Seconds; None without a prediction or a warm-up of two steps."""
    step_error: float | None = None
    """Predicted over measured step - 1; None where one is missing."""
    peak_error: float | None = None
    """Predicted over measured peak - 1, likewise."""
    host_update_s: Estimate | None = None
    """Seconds per step in which rank 0's forward passes waited for parameters that the host updates."""
    host_update_bytes: Estimate | None = None
    """Gradients and parameters copied for that, per step."""
    checksum_share: float | None = None
    """Of the swapped bytes, the least of any run; None where nothing was verified."""
    tier: str = ""
    """Where swapped tensors were; empty where nothing was swapped."""
    num_runs: int = 0
    """Runs with figures."""
    num_without_memory: int = 0
    """Runs that ended because memory was used up, or that no plan fits."""
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The largest batch in core."""

    ranks: int
    nodes: int
    capacity_bytes: int
    """Of the plans."""
    batch: int
    """Samples of a pass that this holds in core, by the measured chains."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a plan gains over the methods that treat all blocks alike."""

    ranks: int
    nodes: int
    batch: int
    planned: str
    """Label of the fastest planned method."""
    over: str
    """Label of the fastest method that treats all blocks alike and is not in core."""
    ratio: Estimate
    """Throughput of the plan over that method's."""
    planned_peak_bytes: float | None
    """Measured; see `MethodPoint.device_peak`."""
    over_peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class OutOfCore:
    """Methods beside each other."""

    id: str
    label: str
    """What the runs have in common."""
    workload: str
    preset: str
    engine: str
    sample_unit: str
    points: tuple[MethodPoint, ...]
    """By rank count, method and batch."""
    limits: tuple[Limit, ...]
    """At each rank count whose plans were made for one capacity in bytes."""
    gains: tuple[Gain, ...]
    """At each rank count and batch that ran with a plan and with a method that treats all blocks alike."""
    median_step_error: float | None
    """Of the predicted step, the median of absolute errors over `points`; None without a prediction."""
    median_peak_error: float | None
    """The same of the predicted peak."""
    frees_at_once: bool
    """Whether memory that was freed went back to the system at once, which on a CPU makes peaks real and steps slow."""
    passages: tuple[Passage, ...]
    """A pass of one run of each method, with its largest batch at the largest rank count."""


def out_of_core(groups: Sequence[Group], table: RunTable) -> tuple[OutOfCore, ...]:
    """All sets of runs that differ in nothing but method and batch, where any has a method; in the order of the groups.

    Args:
        groups: comparable runs.
        table: of the same runs.
    """
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(averaged_id(_neutral(group.sample)), []).append(group)
    return tuple(
        _compared(digest, members, table) for digest, members in found.items() if any(map(_has_method, members))
    )


def _neutral(run: Run) -> Run:
    """A run as if it had no method and batches of one sample."""
    plan = run.plan
    workload = plan.workload.model_copy(update={"train": without_method(plan.workload.train)})
    # Which keys were swept tells nothing here that the workload does not.
    return dataclasses.replace(run, plan=plan.model_copy(update={"workload": workload}))


def _has_method(group: Group) -> bool:
    train = group.sample.plan.workload.train
    return not train.is_in_core or train.optimizer_state == "host" or train.activation_budget is not None


Key = tuple[int, int, str, int]
"""Ranks, nodes, label of the method, batch."""


def _compared(digest: str, groups: Sequence[Group], table: RunTable) -> OutOfCore:
    plan = groups[0].sample.plan
    subject = planned_id(_neutral(groups[0].sample))
    points: dict[Key, MethodPoint] = {}
    methods: dict[str, Method] = {}
    for group in groups:
        for point in group.points:
            made = _point(point, {table.keys[run_id]: table.runs[run_id] for run_id in point.run_ids})
            points[made.ranks, made.nodes, made.label, made.batch] = made
            methods[made.label] = method_of(group.sample.plan.workload.train)
    for item in table.without:
        if (ended_without_memory(item.why) or "does not fit" in item.why) and planned_id(_neutral(item.run)) == subject:
            method = method_of(item.run.plan.workload.train)
            methods[method.label] = method
            key = _key(item.run, method)
            before = points.get(key) or _empty(item.run, method)
            points[key] = dataclasses.replace(before, num_without_memory=before.num_without_memory + 1)
    in_core = {(one.batch, one.parts): one.in_core_bytes for one in points.values() if one.in_core_bytes is not None}
    ordered = sorted(
        (_with_in_core(one, in_core.get((one.batch, one.parts))) for one in points.values()),
        key=lambda one: (one.ranks, one.nodes, rank_of(methods[one.label]), one.label, one.batch),
    )
    errors = [abs(one.step_error) for one in ordered if one.step_error is not None]
    peak_errors = [abs(one.peak_error) for one in ordered if one.peak_error is not None]
    return OutOfCore(
        id=digest,
        label=f"{plan.workload.title} ({plan.workload.preset}, {engine_title(plan)}, {plan.workload.train.precision})",
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        sample_unit=plan.workload.sample_unit,
        points=tuple(ordered),
        limits=tuple(_limits(groups, table)),
        gains=tuple(_gains(ordered, table)),
        median_step_error=median(errors) if errors else None,
        median_peak_error=median(peak_errors) if peak_errors else None,
        frees_at_once=any(
            setting.key == "memory.allocator"
            for one in ordered
            for run_id in one.run_ids
            for record in [table.runs[run_id].record]
            if record is not None
            for setting in record.settings
        ),
        passages=tuple(_passages(ordered, table)),
    )


def _with_in_core(point: MethodPoint, in_core_bytes: int | None) -> MethodPoint:
    """What the chain of runs with a method says of those in core with the same batch."""
    if point.in_core_bytes is not None or (point.recompute, point.swap) != IN_CORE:
        return point
    return dataclasses.replace(point, in_core_bytes=in_core_bytes, predicted_peak_bytes=in_core_bytes)


def _key(run: Run, method: Method) -> Key:
    layout = run.plan.layout
    return layout.ranks, layout.nodes, method.label, run.plan.workload.train.batch_per_rank


def _memory(run: Run) -> MemoryResult | None:
    return None if run.record is None else run.record.memory


def _empty(run: Run, method: Method) -> MethodPoint:
    """A method and batch without any figure."""
    train, layout = run.plan.workload.train, run.plan.layout
    return MethodPoint(
        ranks=layout.ranks,
        nodes=layout.nodes,
        method=method.title,
        label=method.label,
        recompute=method.recompute,
        swap=method.swap,
        capacity=method.capacity,
        batch=train.batch_per_rank,
        parts=train.gradient_accumulation,
    )


def _point(point: Point, runs: Mapping[RunKey, Run]) -> MethodPoint:
    """All runs of one method, batch and rank count."""
    sample = next(iter(runs.values()))
    method = method_of(sample.plan.workload.train)
    told = [found for run in runs.values() if (found := _memory(run)) is not None]
    first = told[0] if told else None
    predicted = _estimate(runs, _predicted_step_s, "s")
    step = point.step
    peak = _estimate(runs, _of_memory(_device_peak), "bytes")
    shares = [one.checksum_share for one in told if one.checksum_share is not None]
    return dataclasses.replace(
        _empty(sample, method),
        throughput=point.throughput,
        step=step,
        process_peak=_estimate(runs, _process_peak, "bytes"),
        device_peak=peak,
        predicted_peak_bytes=None if first is None else first.plan.predicted.peak_bytes,
        in_core_bytes=None if first is None else first.in_core_bytes,
        capacity_bytes=None if first is None else first.plan.capacity_bytes,
        over_budget_bytes=max((r.over_budget_bytes for one in told for r in one.ranks), default=None),
        swapped_bytes=_estimate(runs, _of_memory(lambda one: _per_step(one, "swapped_out_bytes")), "bytes"),
        recompute_share=_recompute_share(runs, point),
        room_wait_s=_mean(runs, _of_memory(lambda one: _per_step(one, "room_wait_s"))),
        swap_wait_s=_mean(runs, _of_memory(lambda one: _per_step(one, "swap_wait_s"))),
        predicted_step=predicted,
        step_error=None if predicted is None else predicted.value / step.value - 1,
        peak_error=None if first is None or not peak else first.plan.predicted.peak_bytes / peak.value - 1,
        host_update_s=_mean(runs, _host_wait_s),
        host_update_bytes=_estimate(runs, _host_bytes, "bytes"),
        checksum_share=min(shares, default=None),
        tier="" if first is None or first.tier is None else first.tier,
        num_runs=len(runs),
        run_ids=point.run_ids,
    )


Figure = Callable[[Run], float | None]


def _values(runs: Mapping[RunKey, Run], figure: Figure) -> dict[RunKey, float]:
    return {key: value for key, run in runs.items() if (value := figure(run)) is not None}


def _estimate(runs: Mapping[RunKey, Run], figure: Figure, unit: str) -> Estimate | None:
    values = _values(runs, figure)
    return median_estimate(values, unit) if values else None


def _mean(runs: Mapping[RunKey, Run], figure: Figure) -> Estimate | None:
    values = _values(runs, figure)
    return mean_estimate(values, "s") if values else None


def _of_memory(figure: Callable[[MemoryResult], float | None]) -> Figure:
    def of(run: Run) -> float | None:
        told = _memory(run)
        return None if told is None else figure(told)

    return of


def _per_step(told: MemoryResult, name: str) -> float | None:
    """A sum over the measured steps, per step, mean over ranks; None where a rank counted none."""
    if any(not one.steps for one in told.ranks):
        return None
    return math.fsum(getattr(one, name) / one.steps for one in told.ranks) / len(told.ranks)


def _recompute_share(runs: Mapping[RunKey, Run], point: Point) -> Estimate | None:
    seconds = _mean(runs, _of_memory(lambda one: _per_step(one, "recompute_s")))
    whole = point.mean_step.value
    return None if seconds is None or whole <= 0 else seconds.scaled(1 / whole, "fraction")


def _process_peak(run: Run) -> float | None:
    assert run.record is not None
    peaks = [rank.peak_memory_bytes for rank in run.record.ranks if rank.peak_memory_bytes is not None]
    return float(max(peaks)) if peaks else None


def _predicted_step_s(run: Run) -> float | None:
    """The step as the plan and the run's own warm-up have it."""
    told = _memory(run)
    beside = None if told is None else beside_passes_s(run)
    return None if told is None or beside is None else told.plan.predicted.pass_s * told.parts + beside


def _host_wait_s(run: Run) -> float | None:
    record = run.record
    if record is None or record.host_update is None:
        return None
    return record.host_update.wait_s / _measured_steps(run)


def _host_bytes(run: Run) -> float | None:
    record = run.record
    if record is None or record.host_update is None:
        return None
    return record.host_update.copied_bytes / _measured_steps(run)


def _measured_steps(run: Run) -> int:
    """Of rank 0."""
    assert run.record is not None
    return max(1, run.record.ranks[0].samples // run.plan.workload.train.batch_per_rank)


def _limits(groups: Sequence[Group], table: RunTable) -> list[Limit]:
    """Where all plans of a rank count were made for one capacity in bytes: the largest batch that it holds in core."""
    told: dict[tuple[int, int], list[MemoryResult]] = {}
    for group in groups:
        asked = method_of(group.sample.plan.workload.train).capacity
        if not asked or asked.endswith("%"):
            continue
        for point in group.points:
            found = (_memory(table.runs[run_id]) for run_id in point.run_ids)
            told.setdefault((point.ranks, point.nodes), []).extend(one for one in found if one is not None)
    limits = []
    for (ranks, nodes), results in sorted(told.items()):
        capacities = {one.plan.capacity_bytes for one in results}
        capacity = capacities.pop() if len(capacities) == 1 else None
        if capacity is None:
            continue
        batch = _in_core_batch(results, capacity)
        limits.append(Limit(ranks=ranks, nodes=nodes, capacity_bytes=capacity, batch=batch))
    return limits


def _in_core_batch(results: Sequence[MemoryResult], capacity: int) -> int:
    """Samples of a pass that a capacity holds in core: on the line through the two measured batches that are nearest.

    With one batch what is no state is taken as proportional to it.
    """
    by_batch: dict[int, list[int]] = {}
    for one in results:
        by_batch.setdefault(one.chain.batch, []).append(one.in_core_bytes)
    known = sorted(((batch, median(sizes)) for batch, sizes in by_batch.items()), key=lambda at: abs(at[1] - capacity))
    batch, held = known[0]
    other, less = known[1] if len(known) > 1 else (0, results[0].chain.state_bytes)
    per_sample = (held - less) / (batch - other)
    return max(0, math.floor(batch + (capacity - held) / per_sample)) if per_sample > 0 else batch


def _gains(points: Sequence[MethodPoint], table: RunTable) -> list[Gain]:
    """By rank count and batch."""
    cells: dict[tuple[int, int, int, int], list[MethodPoint]] = {}
    for point in points:
        if point.throughput is not None and point.num_runs:
            cells.setdefault((point.ranks, point.nodes, point.batch, point.parts), []).append(point)
    found = []
    for cell in cells.values():
        planned = [one for one in cell if "planned" in (one.recompute, one.swap)]
        alike = [one for one in cell if one not in planned and (one.recompute, one.swap) != IN_CORE]
        if not planned or not alike:
            continue
        best, over = (max(some, key=_speed) for some in (planned, alike))
        found.append(
            Gain(
                ranks=best.ranks,
                nodes=best.nodes,
                batch=best.batch,
                planned=best.label,
                over=over.label,
                ratio=ratio_estimate(_throughputs(best, table), _throughputs(over, table)),
                planned_peak_bytes=None if best.device_peak is None else best.device_peak.value,
                over_peak_bytes=None if over.device_peak is None else over.device_peak.value,
            )
        )
    return found


def _speed(point: MethodPoint) -> float:
    return 0.0 if point.throughput is None else point.throughput.value


def _throughputs(point: MethodPoint, table: RunTable) -> dict[RunKey, float]:
    """Samples per second of its runs."""
    keys = table.keys
    rows = table.figures.set_index("run_id")["throughput"]
    return {keys[run_id]: float(rows[run_id]) for run_id in point.run_ids}


def _passages(points: Sequence[MethodPoint], table: RunTable) -> list[Passage]:
    """One of each method: its largest batch at the largest rank count; the one that shows most is the first."""
    chosen: dict[str, MethodPoint] = {}
    for point in points:
        if point.run_ids and _memory(table.runs[point.run_ids[0]]) is not None:
            chosen[point.label] = point
    found = []
    for label, point in chosen.items():
        runs = [table.runs[run_id] for run_id in point.run_ids]
        # One with a measured pass, if there is one.
        run = next((run for run in runs if (one := _memory(run)) is not None and one.timeline), runs[0])
        told = _memory(run)
        assert told is not None
        where = f"{label}, batch {point.batch}, {place_text(point.ranks, point.nodes)}"
        found.append(passage_of(told, run_id=run.plan.run_id, label=where))
    return sorted(found, key=lambda one: one.order)


def _device_peak(told: MemoryResult) -> float | None:
    """Of the rank that held most; None unless all tell."""
    peaks = [rank.device_peak_bytes for rank in told.ranks]
    return None if None in peaks else float(max(peak for peak in peaks if peak is not None))
