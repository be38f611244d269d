"""Memory of ranks and nodes, and which batches fitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.samples.readings import MachineReading, MachineReadings, machine_readings
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.record import RankResult
from dlbench.records.scan import Run
from dlbench.report.wording import runs_text
from dlbench.specs.plan import value_text
from dlbench.stats.estimates import Estimate, median_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes

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


_GPU_USED = re.compile(r"gpu\.\d+\.memory_used_bytes")


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """One rank count."""

    ranks: int
    nodes: int
    peak: Estimate
    """Bytes of the rank that held most, median over runs: allocated on its GPU, or resident on a CPU."""
    reserved: Estimate | None
    """Most that torch held of a GPU's memory, its cache included, where ranks compute on GPUs."""
    resident: Estimate | None
    """Peak resident bytes of a rank's process, where ranks compute on GPUs and records hold it."""
    gpu_used_bytes: float | None
    """Highest sample of a GPU's used memory in the measured window, with what else was on it."""
    host_used_bytes: float | None
    """Highest sample of a node's used memory, whatever used it."""


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """All runs of one workload, preset and device with one batch and precision, at any rank count."""

    batch: int
    """Samples per rank and step."""
    parts: int
    """Parts in which a batch is computed."""
    precision: str
    peak_bytes: int | None
    """Of the rank that held most, over all runs with figures; None where none has any."""
    num_runs: int
    """Runs with figures."""
    num_without_memory: int
    """Runs that ended because memory was used up, by their own words."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of ranks, and what limits the batch."""

    on_gpu: bool
    """Whether ranks computed on GPUs."""
    points: tuple[MemoryPoint, ...]
    model_bytes: int
    """Parameters in fp32."""
    gradient_bytes: int
    host_bytes: int | None
    """Memory of rank 0's node; None where not recorded."""
    batches: tuple[BatchMemory, ...]
    limit: str
    """What is known of the largest batch, in a sentence."""
    notes: tuple[str, ...]


def memory(group: Group, table: RunTable) -> Memory | None:
    """Memory of the ranks by rank count, and by batch; None without a record."""
    record = group.sample.record
    if record is None:
        return None
    readings = machine_readings(table)
    runs = {run.plan.run_id: run for run in group.runs}
    on_gpu = any(rank.device.startswith("cuda") for rank in _ranks(runs[group.points[0].run_ids[0]]))
    batches = batch_memory(group, table)
    recorded = record.environment.get("memory.bytes", "")
    return Memory(
        on_gpu=on_gpu,
        points=tuple(
            _point(group.id, point, {table.keys[one]: runs[one] for one in point.run_ids}, readings, on_gpu=on_gpu)
            for point in group.points
        ),
        model_bytes=record.num_parameters * _FP32_BYTES,
        gradient_bytes=record.gradient_bytes,
        host_bytes=int(recorded) if recorded.isascii() and recorded.isdecimal() and len(recorded) < 20 else None,
        batches=batches[:MAX_BATCHES],
        limit=_limit(group, batches),
        notes=(),
    )


def _point(
    group_id: str, point: Point, runs: Mapping[RunKey, Run], readings: MachineReadings, *, on_gpu: bool
) -> MemoryPoint:
    def estimate(of: Callable[[RankResult], int | None]) -> Estimate | None:
        peaks = {key: float(value) for key, run in runs.items() if (value := _most(_ranks(run), of))}
        return median_estimate(peaks, "bytes") if peaks else None

    peak = estimate(lambda rank: rank.peak_memory_bytes)
    assert peak is not None
    reading = readings.by_run.get(readings.middle[group_id, point.ranks, point.nodes].plan.run_id)
    return MemoryPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        peak=peak,
        reserved=estimate(lambda rank: rank.peak_reserved_bytes or None),
        resident=estimate(lambda rank: rank.peak_resident_bytes) if on_gpu else None,
        gpu_used_bytes=_highest(reading, lambda name: _GPU_USED.fullmatch(name) is not None) if on_gpu else None,
        host_used_bytes=_highest(reading, lambda name: name == "host.memory_used_bytes"),
    )


def _ranks(run: Run) -> Sequence[RankResult]:
    assert run.record is not None
    return run.record.ranks


def _most(ranks: Iterable[RankResult], of: Callable[[RankResult], int | None]) -> int | None:
    return max((value for rank in ranks if (value := of(rank)) is not None), default=None)


def _highest(reading: MachineReading | None, wanted: Callable[[str], bool]) -> float | None:
    nodes = () if reading is None else reading.nodes
    return max(
        (summary.highest for node in nodes for name, summary in node.fields.items() if wanted(name)), default=None
    )


def batch_memory(group: Group, table: RunTable) -> tuple[BatchMemory, ...]:
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


def _limit(group: Group, batches: tuple[BatchMemory, ...]) -> str:
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


def _larger_batches(group: Group, batch: int) -> str:
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
