"""The view `memory`: peak memory of ranks and nodes by rank count and by batch, and which batches fitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.side_by_side import trains_apart
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.records.record import HeldMemory, RankResult
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet, column, columns_of, drop_empty_columns
from dlbench.report.wording import runs_text
from dlbench.report.wording import value_text as figure_value
from dlbench.specs.plan import value_text
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes
from dlbench.views.model import ReportGroup
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

MAX_BATCHES = 40
_FP32_BYTES = 4
_BATCH = "train.batch_per_rank"

# Letters before or after OOM make other words of it: bloom, room, zoom.
_NO_MEMORY = re.compile(
    r"out of memory|cannot allocate memory|MemoryError|(?<![a-z])oom(?:[-_ ]?kill|(?![a-z]))", re.IGNORECASE
)


def ended_without_memory(why: str) -> bool:
    """Whether a run ended because memory was used up, by its own words."""
    return _NO_MEMORY.search(why) is not None


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """One rank count."""

    ranks: int
    nodes: int
    peak: Estimate = field(metadata=column("Resident in a rank at most", "peak_bytes", is_brief=True))
    """Bytes of the rank that held most, median over runs: allocated on its GPU, or resident on a CPU."""
    reserved: Estimate | None = field(
        metadata=column("With torch's cache", "reserved_bytes", missing="not recorded", has_interval=False)
    )
    """Most that torch held of a GPU's memory, its cache included, where ranks compute on GPUs."""
    resident: Estimate | None = field(
        metadata=column("Resident in its process", "resident_bytes", missing="not recorded", has_interval=False)
    )
    """Peak resident bytes of a rank's process, where ranks compute on GPUs and records hold it."""
    startup: Estimate | None = field(
        metadata=column("Before measured steps", "startup_peak_bytes", missing="not recorded", has_interval=False)
    )
    """Peak before the measured steps, cuDNN's search and compiling included, where ranks compute on GPUs."""
    gpu_used_bytes: float | None = field(metadata=column("Used on a GPU", missing="not sampled", unit="bytes"))
    """Highest sample of a GPU's used memory in the measured window, with what else was on it."""
    host_used_bytes: float | None = field(metadata=column("Used per node", missing="not sampled", unit="bytes"))
    """Highest sample of a node's used memory, whatever used it."""


@dataclass(frozen=True, kw_only=True)
class HeldPoint:
    """What the rank with most of all runs at one rank count held at the peak of a step, tensors alone."""

    ranks: int
    nodes: int
    weights: int = field(metadata=column("Weights", "weights_bytes", unit="bytes"))
    gradients: int = field(metadata=column("Gradients", "gradients_bytes", unit="bytes"))
    optimizer: int = field(metadata=column("Optimizer state", "optimizer_bytes", unit="bytes"))
    buffers: int = field(metadata=column("Buffers", "buffers_bytes", unit="bytes"))
    activations: int = field(metadata=column("Activations and the rest", "activations_bytes", unit="bytes"))
    peak: int = field(metadata=column("Peak", "held_peak_bytes", unit="bytes"))
    copies: Mapping[str, int] | None = field(
        metadata=column("Redundant copies", "redundant_bytes", value=lambda kinds: sum(kinds.values()), unit="bytes")
    )
    """Of weights, gradients and optimizer state: what is beyond this rank's part of one copy, bytes by kind. None: not
    every rank was watched, or ranks train apart."""
    host: int | None = field(metadata=column("On the host", "held_on_host_bytes", unit="bytes"))
    retries: int | None = field(metadata=column("Allocator retried", "allocator_retries"))  # The most of any rank.


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """All runs of one workload, preset and device with one batch and precision, at any rank count."""

    batch: int = field(metadata=column("Batch per rank", "batch_per_rank", unit="samples"))
    """Samples per rank and step."""
    parts: int = field(metadata=column("Parts"))  # Parts in which a batch is computed.
    precision: str = field(metadata=column("Precision"))
    peak_bytes: int | None = field(metadata=column("Peak of a rank", unit="bytes"))
    """Of the rank that held most, over all runs with figures; None where none has any."""
    num_runs: int = field(metadata=column("Runs", "runs", text=runs_text))  # Runs with figures.
    num_without_memory: int = field(  # Runs that ended because memory was used up, by their own words.
        metadata=column(
            "Ended without memory", "runs_without_memory", text=lambda count: runs_text(count) if count else "none"
        )
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of ranks, and what limits the batch."""

    on_gpu: bool  # Whether ranks computed on GPUs.
    points: tuple[MemoryPoint, ...]
    kinds: tuple[HeldPoint, ...]  # Of the rank counts whose runs were watched for it.
    model_bytes: int  # Parameters in fp32.
    gradient_bytes: int
    host_bytes: int | None  # Memory of rank 0's node; None where not recorded.
    batches: tuple[BatchMemory, ...]
    limit: str  # What is known of the largest batch, in a sentence.
    notes: tuple[str, ...]


def memory(group: scaling.Group, table: RunTable) -> Memory | None:
    """Memory of the ranks by rank count, and by batch; None without a record."""
    record = group.sample.record
    if record is None:
        return None
    runs = {run.plan.run_id: run for run in group.runs}
    on_gpu = any(rank.device.startswith("cuda") for rank in _ranks(runs[group.points[0].run_ids[0]]))
    kinds = tuple(found for point in group.points if (found := _held_point(point, runs)) is not None)
    batches = batch_memory(group, table)
    why_no_kinds = "the watched step updated nothing, or torch was built without its profiler"
    if record.memory is not None:
        why_no_kinds = "these runs trained out of core, and their own section says what was measured"
    elif group.sample.plan.measure.warmup_steps == 0:
        why_no_kinds = "there was no warm-up step to watch (measure.warmup_steps)"
    recorded = record.environment.get("memory.bytes", "")
    return Memory(
        on_gpu=on_gpu,
        points=tuple(
            _point(group.id, point, {table.keys[one]: runs[one] for one in point.run_ids}, table, on_gpu=on_gpu)
            for point in group.points
        ),
        kinds=kinds,
        model_bytes=record.num_parameters * _FP32_BYTES,
        gradient_bytes=record.gradient_bytes,
        host_bytes=int(recorded) if recorded.isascii() and recorded.isdecimal() and len(recorded) < 20 else None,
        batches=batches[:MAX_BATCHES],
        limit=_limit(group, batches),
        notes=(
            *(
                f"At {place_of(one)} torch's allocator gave back its cache and tried again up to {one.retries} times "
                "in a run, which stops the GPU each time: a smaller train.batch_per_rank, or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, avoids it."
                for one in kinds
                if one.retries
            ),
            *([] if kinds else [f"Memory by kind is not known: {why_no_kinds}."]),
        ),
    )


def _point(group_id: str, point: Point, runs: Mapping[RunKey, Run], table: RunTable, *, on_gpu: bool) -> MemoryPoint:
    def estimate(of: Callable[[RankResult], int | None]) -> Estimate | None:
        return of_known(median_estimate, {key: _most(_ranks(run), of) or None for key, run in runs.items()}, "bytes")

    peak = estimate(lambda rank: rank.peak_memory_bytes)
    assert peak is not None
    reading = table.readings.get(table.points[group_id, point.ranks, point.nodes][0].plan.run_id)
    return MemoryPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        peak=peak,
        reserved=estimate(lambda rank: rank.peak_reserved_bytes or None),
        resident=estimate(lambda rank: rank.peak_resident_bytes) if on_gpu else None,
        startup=estimate(lambda rank: rank.startup_peak_bytes) if on_gpu else None,
        gpu_used_bytes=_highest(reading, r"gpu\.\d+\.memory_used_bytes") if on_gpu else None,
        host_used_bytes=_highest(reading, r"host\.memory_used_bytes"),
    )


def _held_point(point: Point, runs: Mapping[str, Run]) -> HeldPoint | None:
    of_runs = (runs[run_id] for run_id in point.run_ids)
    every = [(rank.held, run) for run in of_runs for rank in _ranks(run) if rank.held is not None]
    if not every:
        return None
    most, run = max(every, key=lambda one: one[0].peak)
    shown = most.model_dump(include={"weights", "gradients", "optimizer", "buffers", "activations", "peak", "host"})
    retries = max((one.retries for one, _ in every if one.retries is not None), default=None)
    return HeldPoint(ranks=point.ranks, nodes=point.nodes, **shown, copies=_copies(run, most), retries=retries)


def _copies(run: Run, most: HeldMemory) -> Mapping[str, int] | None:
    """By what all ranks hold beyond one copy; but in ZeRO-1 the optimizer's state lies where its weights do."""
    record, held = run.record, [rank.held for rank in _ranks(run) if rank.held is not None]
    if record is None or len(held) < len(record.ranks) or trains_apart(run.plan):
        return None
    whole = {"weights": record.num_parameters * _FP32_BYTES, "gradients": record.gradient_bytes}
    shares = {
        kind: max(0.0, 1 - size / (sum(getattr(one, kind) for one in held) or size)) for kind, size in whole.items()
    }
    shares["optimizer"] = 0.0 if run.plan.strategy == "zero-1" else shares["weights"]
    return {kind: round(getattr(most, kind) * share) for kind, share in shares.items()}


def _ranks(run: Run) -> Sequence[RankResult]:
    assert run.record is not None
    return run.record.ranks


def _most(ranks: Iterable[RankResult], of: Callable[[RankResult], int | None]) -> int | None:
    return max((value for rank in ranks if (value := of(rank)) is not None), default=None)


def _highest(reading: MachineReading | None, name: str) -> float | None:
    """`name`: a pattern."""
    fields = [field for node in (reading.nodes if reading else ()) for field in node.fields.items()]
    return max((summary.highest for field, summary in fields if re.fullmatch(name, field)), default=None)


def batch_memory(group: scaling.Group, table: RunTable) -> tuple[BatchMemory, ...]:
    """Batches and precisions of all runs of the group's network, preset and engine, ascending."""
    wanted = _subject(group.sample)
    peaks: dict[tuple[str, int, int], list[int]] = {}
    failed: dict[tuple[str, int, int], int] = {}
    for run in table.runs.values():
        if _subject(run) == wanted:
            peak = _most(_ranks(run), lambda rank: rank.peak_memory_bytes)
            peaks.setdefault(_key(run), []).append(peak or 0)
    for item in table.without:
        if ended_without_memory(item.why) and _subject(item.run) == wanted:
            failed[_key(item.run)] = failed.get(_key(item.run), 0) + 1
    return tuple(
        BatchMemory(
            batch=key[1],
            parts=key[2],
            precision=key[0],
            peak_bytes=max(peaks[key]) if key in peaks else None,
            num_runs=len(peaks.get(key, ())),
            num_without_memory=failed.get(key, 0),
        )
        for key in sorted(peaks.keys() | failed.keys())
    )


def _subject(run: Run) -> tuple[str, ...]:
    plan = run.plan
    return plan.workload.name, plan.workload.preset, plan.engine.name, plan.system.name


def _key(run: Run) -> tuple[str, int, int]:
    train = run.plan.workload.train
    return train.precision, train.batch_per_rank, train.gradient_accumulation


def _limit(group: scaling.Group, batches: tuple[BatchMemory, ...]) -> str:
    """What is known of the largest batch from the runs of the group's precision and parts."""
    train = group.sample.plan.workload.train
    own = [b for b in batches if b.precision == train.precision and b.parts == train.gradient_accumulation]
    largest = max((b for b in own if b.num_runs), key=lambda b: b.batch)
    known = [f"{largest.batch} samples per rank fitted in {train.precision}"]
    if largest.peak_bytes:
        known[0] += f" ({format_bytes(largest.peak_bytes)})"
    ended = [b for b in own if b.num_without_memory]
    for b in ended:
        if b.batch <= largest.batch:
            fits = f" and fitted in {b.num_runs}" if b.num_runs else ", though more fitted in others"
            known.append(f"{b.batch} samples ran out of memory in {runs_text(b.num_without_memory)}{fits}")
    above = [b.batch for b in ended if b.batch > largest.batch]
    if above:
        return f"{'; '.join([*known, f'{min(above)} samples ran out of memory'])}."
    return (
        f"Maximum batch unknown: {'; '.join(known)}; no larger batch ran out of memory. Try larger ones: "
        f"{_larger_batches(group, largest.batch)}"
    )


def _larger_batches(group: scaling.Group, batch: int) -> str:
    """The command that tries larger batches with what else the group's runs were asked for."""
    plan = group.sample.plan
    series = plan.series
    chosen = {**plan.overrides, **series.axes, **(series.sides.get(series.side, {}) if series.side else {})}
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


def points_sheet(found: Memory) -> Sheet[MemoryPoint]:
    """Memory of the ranks, and of their nodes, by rank count."""
    on_gpu = found.on_gpu
    columns = (
        *place_columns(),
        *columns_of(
            MemoryPoint,
            "peak",
            "runs=peak.n",
            Column("peak_of", "", lambda point: "GPU" if on_gpu else "process"),
            "reserved",
            "resident",
            "startup",
            "gpu_used_bytes",
            "host_used_bytes",
            titles={"peak_bytes": "Allocated on a GPU at most"} if on_gpu else {},
        ),
        *columns_of(Memory, "model_bytes", "gradient_bytes", of=lambda point: found),
    )
    allocator = "Allocated: by torch's allocator, without its cache and the CUDA context."
    return Sheet(
        name="memory",
        title="Memory by rank count",
        columns=drop_empty_columns(columns, found.points),
        rows=found.points,
        caption=f"In the measured steps. {allocator if on_gpu else ''}".rstrip(),
    )


class MemoryView(GroupView):
    """Memory of ranks and nodes."""

    id = "memory"
    title = "Memory"
    key = "memory"
    after = "shuffle-audit"

    def numbers(self, source: GroupSource) -> Memory | None:
        return memory(source.group, source.table)

    def shown(self, group: ReportGroup, found: Memory) -> Section:
        sheets: list[Sheet[Any]] = [points_sheet(found)]
        if found.kinds:
            sheets.append(
                Sheet(
                    name="memory-kinds",
                    title="Memory by kind",
                    columns=drop_empty_columns((*place_columns(), *columns_of(HeldPoint)), found.kinds),
                    rows=found.kinds,
                    caption="Tensors of the rank that held most at the peak of a step; gradients as the update finds "
                    "them. Redundant copies: of weights, gradients and optimizer state what is beyond this rank's part "
                    "of one copy.",
                )
            )
        if len(found.batches) > 1:
            sheets.append(
                Sheet(
                    name="memory-batches",
                    title="Memory by batch and precision",
                    columns=columns_of(BatchMemory),
                    rows=found.batches,
                    caption="All runs of this network, preset, engine and system; the highest peak of any rank.",
                )
            )
        last = found.points[-1]
        on = "allocated on the fullest GPU" if found.on_gpu else "resident in the largest rank"
        of = f", of {format_bytes(found.host_bytes)} of the node" if found.host_bytes and not found.on_gpu else ""
        return Section(
            headline=f"{place_of(last)}: {figure_value(last.peak)} {on}{of}",
            notes=(found.limit, *found.notes),
            sheets=tuple(sheets),
        )
