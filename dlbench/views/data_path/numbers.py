"""How long ranks wait for their samples, how steadily, and what disks did meanwhile.

Accelerator utilisation as MLPerf Storage has it (Balmau, "Characterizing I/O in Machine Learning with MLPerf Storage",
SIGMOD Record 51(3), 2022): the share of the time that is not spent on waiting for input. There the computing is
emulated; here it is measured, and a step without its input wait counts as computing, exchange included.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.reading.measures import PARTS
from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.readings import MachineReading, MachineReadings, PointKey
from dlbench.reading.scaling import Group, Point
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, mean_estimate

STALL_SHARE = 0.1
"""A step whose input wait is a larger share of it is a stall."""
MAX_RANKS = 16
"""Ranks of a run whose single steps are looked at, evenly spread."""
MAX_POINTS = 100
"""Points of a table whose single steps are looked at: those with most ranks."""

_CACHE = "host.page_cache_bytes"


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Single steps of one run."""

    run_id: str
    num_steps: int
    """Steps of all ranks that were looked at."""
    num_ranks: int
    stalled: float
    """Share of the steps that wait for input for more than `STALL_SHARE` of their time (1)."""
    longest_s: float
    """Longest wait."""


@dataclass(frozen=True, kw_only=True)
class DataPoint:
    """One rank count."""

    ranks: int
    nodes: int
    wait_s: Estimate
    """Mean wait for input a step; means over runs, as the parts of a step."""
    copy_s: Estimate
    """Host-to-device copy, likewise."""
    wait_share: Estimate
    """Wait over step (1)."""
    utilisation: Estimate
    """1 - the share (1)."""
    stalls: Stalls | None
    """Of the run in the middle; None where its steps were not looked at."""
    disk_bytes_per_s: float | None
    """Read from the disks of all its nodes in the measured window; None where no sample tells."""
    page_cache_bytes: float | None
    """Of a node, mean."""


def data_points(group: Group, table: RunTable, readings: MachineReadings) -> tuple[DataPoint, ...]:
    """Each point of a group.

    Args:
        group: comparable runs.
        table: where its runs are from.
        readings: samples of some of them.
    """
    looked_at = set(list(readings.middle)[:MAX_POINTS])
    return tuple(
        _point((group.id, point.ranks, point.nodes), point, table, readings, looked_at) for point in group.points
    )


def _point(
    key: PointKey, point: Point, table: RunTable, readings: MachineReadings, looked_at: Collection[PointKey]
) -> DataPoint:
    rows = table.parts.loc[list(point.run_ids)]
    step = rows[list(PARTS)].sum(axis=1)
    share = mean_estimate((rows["input"] / step).tolist())
    middle = readings.middle[key]
    reading = readings.by_run.get(middle.plan.run_id)
    return DataPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        wait_s=mean_estimate(rows["input"].tolist()),
        copy_s=mean_estimate(rows["h2d"].tolist()),
        wait_share=share,
        utilisation=_rest(share),
        stalls=_stalls(middle) if key in looked_at else None,
        disk_bytes_per_s=_disks(reading),
        page_cache_bytes=_page_cache(reading),
    )


def _rest(share: Estimate) -> Estimate:
    """1 - share; its ends change places."""
    low = None if share.high is None else 1 - share.high
    high = None if share.low is None else 1 - share.low
    return Estimate(1 - share.value, low, high, share.n, share.kind)


def _stalls(run: Run) -> Stalls | None:
    import numpy as np

    ranks = range(run.plan.layout.ranks)
    waits, steps = [], []
    chosen = spread(ranks, MAX_RANKS)
    for rank in chosen:
        try:
            measured = read_steps(run.folder.steps(rank)).measured
        except IncompleteDataError:
            return None
        waits.append(measured["input_ns"].astype(np.float64))
        steps.append(measured["step_ns"].astype(np.float64))
    wait, step = np.concatenate(waits), np.concatenate(steps)
    return Stalls(
        run_id=run.plan.run_id,
        num_steps=len(step),
        num_ranks=len(chosen),
        stalled=float((wait > STALL_SHARE * step).mean()),
        longest_s=float(wait.max()) / 1e9,
    )


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most so many of some items, evenly spread, the first among them."""
    return list(items[:: -(-len(items) // most)]) if len(items) > most else list(items)


def _disks(reading: MachineReading | None) -> float | None:
    if reading is None or reading.left_out:
        return None
    told = [
        summary.mean
        for node in reading.nodes
        for name, summary in node.fields.items()
        if re.fullmatch(r"host\.disk\..+\.read_bytes", name)
    ]
    return sum(told) if told else None


def _page_cache(reading: MachineReading | None) -> float | None:
    nodes = reading.nodes if reading is not None else ()
    told = [node.fields[_CACHE].mean for node in nodes if _CACHE in node.fields]
    return sum(told) / len(told) if told else None
