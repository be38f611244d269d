"""The view `memory`: peak memory of ranks and nodes by rank count and by batch, and the largest batch that fits."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point, local_sgd_settings
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.records.record import HeldMemory
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Sheet, column, columns_of, constant, drop_empty_columns
from dlbench.report.wording import runs_text
from dlbench.report.wording import value_text as figure_value
from dlbench.specs.plan import value_text
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns, place_of, ranks_of

MAX_BATCHES = 40
_FP32_BYTES = 4
_BATCH = "train.batch_per_rank"

# Letters before or after OOM make other words of it: bloom, room, zoom.
_NO_MEMORY = re.compile(
    r"out of memory|cannot allocate memory|MemoryError|(?<![a-z])oom(?:[-_ ]?kill|(?![a-z]))", re.IGNORECASE
)


def runs_or_none(count: int) -> str:
    """Returns ``3 runs``, or ``none``."""
    return runs_text(count) if count else "none"


def ended_without_memory(why: str) -> bool:
    """Returns whether a run ended because memory was used up, by its error message."""
    return _NO_MEMORY.search(why) is not None


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(AtPlace):
    """The memory of ranks and nodes at one rank count."""

    peak: Estimate = field(metadata=column("Resident in a rank at most", "peak_bytes", is_brief=True))
    reserved: Estimate | None = field(
        metadata=column("With torch's cache", "reserved_bytes", missing="not recorded", has_interval=False)
    )
    resident: Estimate | None = field(
        metadata=column("Resident in its process", "resident_bytes", missing="not recorded", has_interval=False)
    )
    startup: Estimate | None = field(
        metadata=column("Before measured steps", "startup_peak_bytes", missing="not recorded", has_interval=False)
    )
    gpu_used_bytes: float | None = field(metadata=column("Used on a GPU", missing="not sampled", unit="bytes"))
    host_used_bytes: float | None = field(metadata=column("Used per node", missing="not sampled", unit="bytes"))


@dataclass(frozen=True, kw_only=True)
class HeldPoint(AtPlace):
    """The tensors at the peak of a step on the rank with the highest peak of all runs at one rank count."""

    weights: int = field(metadata=column("Weights", "weights_bytes", unit="bytes"))
    gradients: int = field(metadata=column("Gradients", "gradients_bytes", unit="bytes"))
    optimizer: int = field(metadata=column("Optimizer state", "optimizer_bytes", unit="bytes"))
    buffers: int = field(metadata=column("Buffers", "buffers_bytes", unit="bytes"))
    activations: int = field(metadata=column("Activations and other tensors", "activations_bytes", unit="bytes"))
    peak: int = field(metadata=column("Peak", "held_peak_bytes", unit="bytes"))
    copies: Mapping[str, int] | None = field(
        metadata=column("Redundant copies", "redundant_bytes", value=lambda kinds: sum(kinds.values()), unit="bytes")
    )
    """Bytes beyond this rank's share of one copy, by kind; None: not all were watched, or they train separately."""
    host: int | None = field(metadata=column("On the host", "held_on_host_bytes", unit="bytes"))
    retries: int | None = field(metadata=column("Allocator retries", "allocator_retries"))  # The most of any rank.


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """The memory of all runs of one workload, preset and device with one batch and precision, at any rank count."""

    batch: int = field(metadata=column("Batch per rank", "batch_per_rank", unit="samples"))
    parts: int = field(metadata=column("Parts"))  # Parts in which a batch is computed.
    precision: str = field(metadata=column("Precision"))
    peak_bytes: int | None = field(metadata=column("Peak of a rank", unit="bytes"))  # Of all runs with figures.
    num_runs: int = field(metadata=column("Runs", "runs", text=runs_text))  # Runs with figures.
    num_without_memory: int = field(metadata=column("Out of memory", "runs_without_memory", text=runs_or_none))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of ranks, and what limits the batch."""

    on_gpu: bool  # Whether ranks computed on GPUs.
    points: tuple[MemoryPoint, ...]
    kinds: tuple[HeldPoint, ...]  # Memory by kind, of the rank counts where it was recorded.
    model_bytes: int  # Parameters in fp32.
    gradient_bytes: int
    host_bytes: int | None  # Memory of rank 0's node; None if it is not recorded.
    batches: tuple[BatchMemory, ...]
    limit: str  # The largest batch that is known to fit, in a sentence.
    notes: tuple[str, ...]


def memory(group: scaling.Group, table: RunTable) -> Memory | None:
    """Returns the memory of ranks by rank count and by batch; None without a record."""
    record = group.sample.record
    if record is None:
        return None
    runs = {run.plan.run_id: run for run in group.runs}
    on_gpu = any(rank.device.startswith("cuda") for rank in ranks_of(runs[group.points[0].run_ids[0]]))
    points, kinds = [], []
    for point in group.points:
        by_key = {table.keys[run_id]: runs[run_id] for run_id in point.run_ids}
        points.append(_point(group.id, point, by_key, table, on_gpu=on_gpu))
        held_point = _held_point(point, list(by_key.values()))
        if held_point is not None:
            kinds.append(held_point)
    recorded = record.environment.get("memory.bytes", "")
    is_number = recorded.isascii() and recorded.isdecimal() and len(recorded) < 20
    batches = batch_memory(group, table)
    return Memory(
        on_gpu=on_gpu,
        points=tuple(points),
        kinds=tuple(kinds),
        model_bytes=record.num_parameters * _FP32_BYTES,
        gradient_bytes=record.gradient_bytes,
        host_bytes=int(recorded) if is_number else None,
        batches=batches[:MAX_BATCHES],
        limit=_limit(group, batches),
        notes=tuple(_notes(group.sample, kinds)),
    )


def _notes(run: Run, kinds: Sequence[HeldPoint]) -> Iterator[str]:
    for point in kinds:
        if point.retries:
            yield (
                f"At {place_of(point)} torch's allocator freed its cache and tried again up to {point.retries} times "
                "in a run, which stalls the GPU each time: a smaller train.batch_per_rank, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, avoids it."
            )
    if not kinds:
        reason = "the profiled step updated nothing, or torch was built without its profiler"
        if run.record is not None and run.record.memory is not None:
            reason = "these runs trained out of core; the section on it has their measurements"
        elif run.plan.measure.warmup_steps == 0:
            reason = "there was no warm-up step to profile (measure.warmup_steps)"
        yield f"Memory by kind is not known: {reason}."


def _point(group_id: str, point: Point, runs: Mapping[RunKey, Run], table: RunTable, *, on_gpu: bool) -> MemoryPoint:
    def estimate(name: str) -> Estimate | None:
        return of_known(
            median_estimate, {key: _highest_of_ranks(run, name) or None for key, run in runs.items()}, "bytes"
        )

    peak = estimate("peak_memory_bytes")
    assert peak is not None
    reading = table.readings.get(table.points[group_id, point.ranks, point.nodes][0].plan.run_id)
    resident = startup = gpu_used_bytes = None
    if on_gpu:
        resident, startup = estimate("peak_resident_bytes"), estimate("startup_peak_bytes")
        gpu_used_bytes = _highest_sample(reading, r"gpu\.\d+\.memory_used_bytes")
    return MemoryPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        peak=peak,
        reserved=estimate("peak_reserved_bytes"),
        resident=resident,
        startup=startup,
        gpu_used_bytes=gpu_used_bytes,
        host_used_bytes=_highest_sample(reading, r"host\.memory_used_bytes"),
    )


def _held_point(point: Point, runs: Sequence[Run]) -> HeldPoint | None:
    held_by_ranks = [(rank.held, run) for run in runs for rank in ranks_of(run) if rank.held is not None]
    if not held_by_ranks:
        return None
    tensors, run = max(held_by_ranks, key=lambda pair: pair[0].peak)
    retries = max((of_rank.retries for of_rank, _ in held_by_ranks if of_rank.retries is not None), default=None)
    names = ("weights", "gradients", "optimizer", "buffers", "activations", "peak", "host")
    return HeldPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        copies=_copies(run, tensors),
        retries=retries,
        **{name: getattr(tensors, name) for name in names},
    )


def _copies(run: Run, tensors: HeldMemory) -> Mapping[str, int] | None:
    """Returns the redundant bytes of a rank by kind, from the bytes that all ranks hold beyond one copy. In ZeRO-1 each
    rank has the optimizer state of its share of the weights, so none of it is redundant.
    """
    record, of_ranks = run.record, [rank.held for rank in ranks_of(run) if rank.held is not None]
    if record is None or len(of_ranks) < len(record.ranks) or local_sgd_settings(run.plan):
        return None
    weights = _redundant_share(record.num_parameters * _FP32_BYTES, sum(rank.weights for rank in of_ranks))
    gradients = _redundant_share(record.gradient_bytes, sum(rank.gradients for rank in of_ranks))
    optimizer = 0.0 if run.plan.strategy == "zero-1" else weights
    return {
        "weights": round(tensors.weights * weights),
        "gradients": round(tensors.gradients * gradients),
        "optimizer": round(tensors.optimizer * optimizer),
    }


def _redundant_share(copy_bytes: int, all_ranks_bytes: int) -> float:
    return max(0.0, 1 - copy_bytes / (all_ranks_bytes or copy_bytes))


def _highest_of_ranks(run: Run, name: str) -> int | None:
    values = [getattr(rank, name) for rank in ranks_of(run)]
    return max((value for value in values if value is not None), default=None)


def _highest_sample(reading: MachineReading | None, pattern: str) -> float | None:
    if reading is None:
        return None
    samples: list[float] = []
    for node in reading.nodes:
        samples += [summary.highest for name, summary in node.fields.items() if re.fullmatch(pattern, name)]
    return max(samples, default=None)


def batch_memory(group: scaling.Group, table: RunTable) -> tuple[BatchMemory, ...]:
    """Returns the batches and precisions of all runs of the group's network, preset and engine, ascending."""
    subject = _subject(group.sample)
    peaks: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    num_failed: Counter[tuple[str, int, int]] = Counter()
    for run in table.runs.values():
        if _subject(run) == subject:
            peaks[_batch_key(run)].append(_highest_of_ranks(run, "peak_memory_bytes") or 0)
    for item in table.without:
        if ended_without_memory(item.why) and _subject(item.run) == subject:
            num_failed[_batch_key(item.run)] += 1
    return tuple(
        BatchMemory(
            batch=batch,
            parts=parts,
            precision=precision,
            peak_bytes=max(peaks[precision, batch, parts], default=None),
            num_runs=len(peaks[precision, batch, parts]),
            num_without_memory=num_failed[precision, batch, parts],
        )
        for precision, batch, parts in sorted(peaks.keys() | num_failed.keys())
    )


def _subject(run: Run) -> tuple[str, ...]:
    plan = run.plan
    return plan.workload.name, plan.workload.preset, plan.engine.name, plan.system.name


def _batch_key(run: Run) -> tuple[str, int, int]:
    train = run.plan.workload.train
    return train.precision, train.batch_per_rank, train.gradient_accumulation


def _limit(group: scaling.Group, batches: tuple[BatchMemory, ...]) -> str:
    """Returns a sentence on the largest batch that fits, from runs of the group's precision and parts."""
    train = group.sample.plan.workload.train
    candidates = [
        row for row in batches if row.precision == train.precision and row.parts == train.gradient_accumulation
    ]
    largest = max((row for row in candidates if row.num_runs), key=attrgetter("batch"))
    clauses = [f"{largest.batch} samples per rank fitted in {train.precision}"]
    if largest.peak_bytes:
        clauses[0] += f" ({format_bytes(largest.peak_bytes)})"
    failed_above = [row.batch for row in candidates if row.num_without_memory and row.batch > largest.batch]
    for row in candidates:
        if row.num_without_memory and row.batch <= largest.batch:
            fitted = f" and fitted in {row.num_runs}" if row.num_runs else ", though larger batches fitted"
            clauses.append(f"{row.batch} samples ran out of memory in {runs_text(row.num_without_memory)}{fitted}")
    if failed_above:
        clauses.append(f"{min(failed_above)} samples ran out of memory")
        return f"{'; '.join(clauses)}."
    return (
        f"Maximum batch unknown: {'; '.join(clauses)}; no larger batch ran out of memory. Try larger ones: "
        f"{_larger_batches(group, largest.batch)}"
    )


def _larger_batches(group: scaling.Group, batch: int) -> str:
    plan = group.sample.plan
    series = plan.series
    chosen = {**plan.overrides, **series.axes}
    if series.side:
        chosen |= series.sides.get(series.side, {})
    words = ["dlbench", "run", plan.workload.name, "--preset", plan.workload.preset]
    words += ["--engine", plan.engine.name, "--data", plan.workload.data.source]
    words += ["--ranks", str(group.points[0].ranks)]
    if plan.measure.until == "quality" and "measure.until" not in chosen:
        words.append("--to-accuracy")
    for key, value in sorted(chosen.items()):
        if key not in (_BATCH, "engine.name", "data.source"):
            words += ["--set", f"{key}={value_text(key, value)}"]
    words += ["--sweep", f"{_BATCH}={','.join(str(batch * factor) for factor in (2, 4, 8))}"]
    return shlex.join(words)


def points_sheet(memory: Memory) -> Sheet[MemoryPoint]:
    """Returns the table of the memory of ranks, and of their nodes, by rank count."""
    caption, peak_of, titles = "In the measured steps.", "process", {}
    if memory.on_gpu:
        caption += " Allocated: by torch's allocator, without its cache and the CUDA context."
        peak_of = "GPU"
        titles["peak_bytes"] = "Allocated on a GPU at most"
    columns = (
        *place_columns(),
        *columns_of(
            MemoryPoint,
            *("peak", "runs=peak.n", constant("peak_of", peak_of), "reserved", "resident", "startup"),
            *("gpu_used_bytes", "host_used_bytes"),
            titles=titles,
        ),
        constant("model_bytes", memory.model_bytes),
        constant("gradient_bytes", memory.gradient_bytes),
    )
    return Sheet(
        name="memory",
        title="Memory by rank count",
        columns=drop_empty_columns(columns, memory.points),
        rows=memory.points,
        caption=caption,
    )


class MemoryView(GroupView):
    """The memory of ranks and nodes."""

    id = "memory"
    title = "Memory"
    key = "memory"
    after = "shuffle-audit"

    def numbers(self, source: GroupSource) -> Memory | None:
        return memory(source.group, source.table)

    def shown(self, group: ReportGroup, memory: Memory) -> Section:
        sheets: list[Sheet[Any]] = [points_sheet(memory)]
        if memory.kinds:
            sheets.append(
                Sheet(
                    name="memory-kinds",
                    title="Memory by kind",
                    columns=drop_empty_columns((*place_columns(), *columns_of(HeldPoint)), memory.kinds),
                    rows=memory.kinds,
                    caption="Tensors at the peak of a step on the rank with the highest peak; gradients when the "
                    "update starts. Redundant copies: bytes of weights, gradients and optimizer state beyond this "
                    "rank's share of one copy.",
                )
            )
        if len(memory.batches) > 1:
            sheets.append(
                Sheet(
                    name="memory-batches",
                    title="Memory by batch and precision",
                    columns=columns_of(BatchMemory),
                    rows=memory.batches,
                    caption="All runs of this network, preset, engine and system; the highest peak of any rank.",
                )
            )
        last = memory.points[-1]
        headline = f"{place_of(last)}: {figure_value(last.peak)} resident in the largest rank"
        if memory.on_gpu:
            headline = f"{place_of(last)}: {figure_value(last.peak)} allocated on the fullest GPU"
        elif memory.host_bytes:
            headline += f", of {format_bytes(memory.host_bytes)} of the node"
        return Section(headline=headline, notes=(memory.limit, *memory.notes), sheets=tuple(sheets))
