"""How long ranks wait for their samples, how steadily, and what disks did meanwhile.

Accelerator utilisation as MLPerf Storage has it (Balmau, "Characterizing I/O in Machine Learning with MLPerf Storage",
SIGMOD Record 51(3), 2022): the share of the time that is not spent on waiting for input. There the computing is
emulated; here it is measured, and a step without its input wait counts as computing, exchange included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.reading.attribution import about_means
from dlbench.reading.measures import PARTS
from dlbench.reading.samples.readings import MachineReading, machine_readings
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.report.wording import percent, place_text, value_text
from dlbench.stats.estimates import Estimate, mean_estimate
from dlbench.units import format_bytes
from dlbench.views.data_path.facts import facts, spread
from dlbench.views.reading import complement, storage_share

STALL_SHARE = 0.1
"""A step whose input wait is a larger share of it is a stall."""
MAX_RANKS = 16
"""Ranks of a run whose single steps are looked at, evenly spread."""
MAX_POINTS = 100
"""Points of a table whose single steps are looked at: those with most ranks."""

AT_REST = 1e6
"""Bytes per second of all disks together below which nothing worth words was read from them."""

_CACHE = "host.page_cache_bytes"

_FORMATS = {
    "images": "JPEG images",
    "jpeg-tree": "JPEG images",
    "text": "text",
    "density": "density volumes",
    "hdf5-density": "density volumes",
}


@dataclass(frozen=True, kw_only=True)
class _Stalls:
    """Single steps of one run."""

    num_steps: int = 0
    """Steps of ranks that were looked at."""
    num_ranks: int = 0
    stalled: float | None = None
    """Share of the steps that wait for input for more than `STALL_SHARE` of their time (1); None: not looked at."""
    longest_s: float | None = None
    """Longest wait."""


@dataclass(frozen=True, kw_only=True)
class DataPoint:
    """Input at one rank count."""

    ranks: int
    nodes: int
    wait: Estimate
    """Mean wait for input, seconds per step; as the parts of a step."""
    copy: Estimate
    """Host-to-device copy, likewise."""
    wait_share: Estimate
    """Wait over step (fraction)."""
    utilisation: Estimate
    """1 - wait_share: accelerator utilisation as MLPerf Storage has it."""
    stalled: float | None
    """Share of steps that wait for more than `STALL_SHARE` of their time (1), in the run in the middle; None: not
    looked at."""
    longest_wait_s: float | None
    stall_steps: int
    """Steps of ranks that were looked at."""
    stall_ranks: int
    disk_bytes_per_s: float | None
    """Read from the disks of all its nodes in the measured window; None where no sample holds it."""
    page_cache_bytes: float | None
    """Per node, mean."""


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """Where samples come from and how long the ranks wait for them."""

    source: str
    format: str
    is_synthetic: bool
    points: tuple[DataPoint, ...]
    facts: tuple[tuple[str, str], ...]
    """What is known of reading, order, coverage and staging: title and text."""
    verdict: str
    notes: tuple[str, ...]


def data_path(group: Group, table: RunTable) -> DataPath:
    """Where samples come from and how long ranks wait for them, by rank count.

    Args:
        group: comparable runs.
        table: where its runs are from.
    """
    readings = machine_readings(table)
    looked_at = set(list(readings.middle)[:MAX_POINTS])
    middle = {key: readings.middle[key] for point in group.points for key in [(group.id, point.ranks, point.nodes)]}
    points = tuple(
        _point(point, table, run, readings.by_run.get(run.plan.run_id), is_looked_at=key in looked_at)
        for point, (key, run) in zip(group.points, middle.items(), strict=True)
    )
    data = group.sample.plan.workload.data
    return DataPath(
        source=data.source,
        format=_FORMATS.get(data.format, data.format),
        is_synthetic=data.is_synthetic,
        points=points,
        facts=tuple(facts(group, list(middle.values()), _temperature(points, list(middle.values())))),
        verdict=_verdict(points, is_synthetic=data.is_synthetic),
        notes=(),
    )


def _point(
    point: Point, table: RunTable, middle: Run, reading: MachineReading | None, *, is_looked_at: bool
) -> DataPoint:
    rows = table.parts.loc[list(point.run_ids)][list(PARTS)]
    share = mean_estimate((rows["input"] / rows.sum(axis=1)).tolist(), "fraction")
    runs = about_means([{name: float(row[name]) for name in PARTS} for _, row in rows.iterrows()])
    stalls = _stalls(middle) if is_looked_at else _Stalls()
    return DataPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        wait=mean_estimate([parts["input"] for parts in runs], "s"),
        copy=mean_estimate([parts["h2d"] for parts in runs], "s"),
        wait_share=share,
        utilisation=complement(share),
        stalled=stalls.stalled,
        longest_wait_s=stalls.longest_s,
        stall_steps=stalls.num_steps,
        stall_ranks=stalls.num_ranks,
        disk_bytes_per_s=_read_rate(reading),
        page_cache_bytes=_page_cache(reading),
    )


def _stalls(run: Run) -> _Stalls:
    import numpy as np

    ranks = range(run.plan.layout.ranks)
    waits, steps = [], []
    chosen = spread(ranks, MAX_RANKS)
    for rank in chosen:
        try:
            measured = read_steps(run.folder.steps(rank)).measured
        except IncompleteDataError:
            return _Stalls()
        waits.append(measured["input_ns"].astype(np.float64))
        steps.append(measured["step_ns"].astype(np.float64))
    wait, step = np.concatenate(waits), np.concatenate(steps)
    return _Stalls(
        num_steps=len(step),
        num_ranks=len(chosen),
        stalled=float((wait > STALL_SHARE * step).mean()),
        longest_s=float(wait.max()) / 1e9,
    )


def _read_rate(reading: MachineReading | None) -> float | None:
    if reading is None or reading.left_out:
        return None
    known = [
        summary.mean
        for node in reading.nodes
        for name, summary in node.fields.items()
        if re.fullmatch(r"host\.disk\..+\.read_bytes", name)
    ]
    return sum(known) if known else None


def _page_cache(reading: MachineReading | None) -> float | None:
    nodes = reading.nodes if reading is not None else ()
    known = [node.fields[_CACHE].mean for node in nodes if _CACHE in node.fields]
    return sum(known) / len(known) if known else None


def _verdict(points: tuple[DataPoint, ...], *, is_synthetic: bool) -> str:
    worst = max(points, key=lambda point: point.wait_share.value)
    largest = ", the largest" if len(points) > 1 else ""
    text = (
        f"mean input wait {value_text(worst.wait_share)} of the step ({place_text(worst.ranks, worst.nodes)}{largest})"
    )
    if is_synthetic:
        return f"synthetic data, no storage involved; {text}"
    stalled = max((point.stalled for point in points if point.stalled is not None), default=0.0)
    return f"{text}; {percent(stalled)} of the steps stall" if stalled > 0 else text


def _temperature(points: tuple[DataPoint, ...], middle: Sequence[Run]) -> str:
    """From what the kernel counted for the readers; without that, from the disks."""
    if middle[-1].plan.workload.data.is_synthetic:
        return "no file is read"
    found = None if middle[-1].record is None else middle[-1].record.reading
    share = None if found is None else storage_share(found.epochs)
    if share is not None:
        return f"{percent(min(1.0, share))} of the bytes read came from storage, the rest from the page cache"
    known = [(point.disk_bytes_per_s, point) for point in points if point.disk_bytes_per_s is not None]
    if not known:
        return "unknown: no sample holds what disks read (needs watch.sampler, and disks that the kernel counts)"
    rate, point = max(known, key=lambda item: item[0])
    cache = f"; page cache {format_bytes(point.page_cache_bytes)} per node" if point.page_cache_bytes else ""
    where = place_text(point.ranks, point.nodes)
    if rate < AT_REST:
        return (
            f"warm, or over the network: local disks read less than {format_bytes(AT_REST)}/s in the measured "
            f"steps{cache}"
        )
    return f"cold at least in part: local disks read {format_bytes(rate)}/s in the measured steps at {where}{cache}"
