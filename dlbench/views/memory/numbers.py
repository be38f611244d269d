"""Memory of ranks and nodes, and which batches fitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.readings import MachineReading, MachineReadings
from dlbench.reading.scaling import Group, Point
from dlbench.records.record import RankResult
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, median_estimate

# Letters before or after OOM make other words of it: bloom, room, zoom.
_NO_MEMORY = re.compile(
    r"out of memory|cannot allocate memory|MemoryError|(?<![a-z])oom(?:[-_ ]?kill|(?![a-z]))", re.IGNORECASE
)

_GPU_USED = re.compile(r"gpu\.\d+\.memory_used_bytes")


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """One rank count."""

    ranks: int
    nodes: int
    on_gpu: bool
    peak: Estimate
    """Bytes of the rank that held most, median over runs: allocated on its GPU, or resident on a CPU."""
    resident: Estimate | None
    """Peak resident bytes of a rank's process, where ranks compute on GPUs and records tell."""
    gpu_used: float | None
    """Highest sample of a GPU's used memory in the measured window, bytes, with what else was on it."""
    host_used: float | None
    """Highest sample of a node's used memory, bytes, whatever used it."""


@dataclass(frozen=True, kw_only=True)
class BatchMemory:
    """All runs of one workload, preset and device with one batch and precision, at any rank count."""

    batch: int
    """Samples a rank and step."""
    parts: int
    """Parts in which a batch is computed."""
    precision: str
    peak_bytes: int | None
    """Of the rank that held most, over all runs with figures; None where none has any."""
    num_runs: int
    """Runs with figures."""
    num_without_memory: int
    """Runs that ended because memory was used up, by their own words."""


def memory_points(group: Group, readings: MachineReadings) -> tuple[MemoryPoint, ...]:
    """Each point of a group."""
    runs = {run.plan.run_id: run for run in group.runs}
    return tuple(
        _point(group.id, point, [runs[run_id] for run_id in point.run_ids], readings) for point in group.points
    )


def _point(group_id: str, point: Point, runs: Sequence[Run], readings: MachineReadings) -> MemoryPoint:
    peaks = [_most(_ranks(run), lambda rank: rank.peak_memory_bytes) for run in runs]
    on_gpu = any(rank.device.startswith("cuda") for rank in _ranks(runs[0]))
    resident = [_most(_ranks(run), lambda rank: rank.peak_resident_bytes) for run in runs] if on_gpu else []
    told = [float(value) for value in resident if value is not None]
    reading = readings.by_run.get(readings.middle[group_id, point.ranks, point.nodes].plan.run_id)
    return MemoryPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        on_gpu=on_gpu,
        peak=median_estimate([float(peak) for peak in peaks if peak is not None]),
        resident=median_estimate(told) if told else None,
        gpu_used=_highest(reading, lambda name: _GPU_USED.fullmatch(name) is not None) if on_gpu else None,
        host_used=_highest(reading, lambda name: name == "host.memory_used_bytes"),
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
        if _NO_MEMORY.search(item.why) and _subject(item.run) == wanted:
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
