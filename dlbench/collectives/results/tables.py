"""Runs of the collective benchmark become measurements: a time with an interval for each series and size.

A series is one algorithm (or one library's own collective) over one carrier. A run's time is the median over its
timed iterations; figures are medians over runs. Rates as nccl-tests defines them (its doc/PERFORMANCE.md): algbw =
bytes / time, busbw = algbw x a factor of the collective, where bytes are those of each rank's whole buffer: for
all-gather the gathered result, for reduce-scatter the input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.costs.collectives import Layout
from dlbench.costs.predictions import bus_factor
from dlbench.records.collectives import CommPoint
from dlbench.records.collectives_scan import CommRun, CommScan
from dlbench.specs.base import Precision
from dlbench.specs.collectives.plan import ALGORITHMS, BACKENDS, Collective
from dlbench.stats.estimates import Estimate, RunKey, interval, median_estimate
from dlbench.units import format_bytes

LIBRARY = "library"
"""What a point calls the algorithm of a library, which chooses it itself."""


@dataclass(frozen=True, kw_only=True)
class SeriesName:
    """What was timed: an algorithm over a carrier."""

    carrier: str
    algorithm: str

    @property
    def is_library(self) -> bool:
        """Whether the carrier's own collective was timed, as a reference."""
        return self.algorithm == LIBRARY

    @property
    def title(self) -> str:
        """`ring over mpi`, `library of mpi`."""
        return f"library of {self.carrier}" if self.is_library else f"{self.algorithm} over {self.carrier}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One series at one size."""

    num_bytes: int
    """Bytes of each rank's whole buffer."""
    seconds: Estimate
    """Median over runs of each run's median over iterations."""
    within: tuple[float, float] | None
    """For a single run, the middle half of its iterations, seconds; None for more runs."""
    algbw: Estimate
    """Bytes a second."""
    busbw: Estimate | None
    """Bytes a second; None for one rank, where nothing crosses a bus."""
    by_run: dict[RunKey, float]
    """Seconds of each run; series measured in one run have equal keys, so that ratios pair them."""
    iterations: int
    """Least number of timed iterations of a run."""
    point: CommPoint
    """One of its points, to read the counters from."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One series of a group."""

    name: SeriesName
    sizes: tuple[Measurement, ...]
    """By size, ascending; sizes without a figure are not here."""

    def at(self, num_bytes: int) -> Measurement | None:
        """The measurement of a size; None where there is none."""
        return next((one for one in self.sizes if one.num_bytes == num_bytes), None)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A point without a figure, and why."""

    run_id: str
    name: SeriesName
    num_bytes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class CommGroup:
    """Runs of one collective at one layout: their points may be compared."""

    id: str
    collective: Collective
    dtype: Precision
    runs: tuple[CommRun, ...]
    """Runs with figures."""
    series: tuple[Series, ...]
    """dlbench's own algorithms first, then libraries; each in the order of `dlbench comm`."""
    rejected: tuple[Rejected, ...]

    @property
    def sample(self) -> CommRun:
        """One of the runs, to read the common settings from."""
        return self.runs[0]

    @property
    def layout(self) -> Layout:
        """Ranks and groups, as costs count them."""
        return layout_of(self.sample)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes with a figure, ascending."""
        return tuple(sorted({one.num_bytes for series in self.series for one in series.sizes}))

    def find(self, name: SeriesName) -> Series | None:
        """The series of a name."""
        return next((series for series in self.series if series.name == name), None)


@dataclass(frozen=True, kw_only=True)
class WithoutFigures:
    """A run that yields no figure, and why."""

    run: CommRun
    state: str
    """invalid, failed, incomplete, damaged (a copy) or empty (a valid run in which no point has a figure)."""
    why: str


@dataclass(frozen=True, kw_only=True)
class CommTable:
    """All runs of a scan."""

    groups: tuple[CommGroup, ...]
    """By system, collective, type, ranks, nodes and group size."""
    without: tuple[WithoutFigures, ...]
    damaged: tuple[str, ...]


def tabulate(scan: CommScan) -> CommTable:
    """Measurements of every valid run, grouped; runs without figures with their reason.

    A run whose record is invalid held a wrong result somewhere, and yields no figure at all.
    """
    groups: dict[str, list[CommRun]] = {}
    without: list[WithoutFigures] = []
    damaged = list(scan.problems)
    seen: dict[str, CommRun] = {}
    for run in scan.runs:
        if run.plan.run_id in seen:
            why = (
                f"{run.folder.path}: holds run {run.plan.run_id} once more, like "
                f"{seen[run.plan.run_id].folder.path}; a copy is no repeat and is left out"
            )
            damaged.append(why)
            without.append(WithoutFigures(run=run, state="damaged", why=why))
            continue
        seen[run.plan.run_id] = run
        if run.record is None or run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.story))
        elif not any(why_not(point) == "" for point in run.record.points):
            reasons = dict.fromkeys([*map(_told, _rejected(run)), *run.record.not_measured])
            without.append(WithoutFigures(run=run, state="empty", why="; ".join(reasons) or "holds no point"))
        else:
            groups.setdefault(group_id(run), []).append(run)
    found = sorted((_group(key, runs) for key, runs in groups.items()), key=_order)
    return CommTable(groups=tuple(found), without=tuple(without), damaged=tuple(damaged))


def why_not(point: CommPoint) -> str:
    """Why a point has no figure; empty where it has one."""
    if point.correct is False:
        error = "" if point.max_error is None else f" (largest relative error {point.max_error:.2g})"
        return f"wrong result{error}" + (f": {point.problem}" if point.problem else "")
    if not point.times_s:
        return point.problem or "no time was recorded"
    if any(seconds <= 0 for seconds in point.times_s):
        return "a time of zero was recorded: the clock is too coarse, or the record was changed"
    return ""


def layout_of(run: CommRun) -> Layout:
    """The layout by which a run's points are counted: groups as its record says."""
    group = run.plan.group_size if run.record is None else run.record.group_size
    return Layout(ranks=run.plan.layout.ranks, group_size=group)


def group_id(run: CommRun) -> str:
    """A digest equal for exactly those runs whose points may be compared; stable over time and machines."""
    plan = run.plan
    assert run.record is not None
    content = {
        "system": plan.system.name,
        "launch": plan.system.launch.model_dump(mode="json"),
        "layout": plan.layout.model_dump(mode="json"),
        "group_size": run.record.group_size,
        "shards": plan.comm.shards,
        "collective": plan.comm.collective,
        "dtype": plan.comm.dtype,
        "device": run.record.device,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def series_order(name: SeriesName, collective: Collective) -> tuple[bool, int, str, str]:
    """Own algorithms as `dlbench comm` lists them, then libraries."""
    known = BACKENDS if name.is_library else ALGORITHMS[collective]
    place = known.index(name.algorithm) if name.algorithm in known else len(known)
    return name.is_library, place, name.algorithm, name.carrier


def _told(one: Rejected) -> str:
    return f"{one.name.title}, {format_bytes(one.num_bytes)}: {one.why}"


def _rejected(run: CommRun) -> Iterator[Rejected]:
    assert run.record is not None
    for point in run.record.points:
        why = why_not(point)
        if why:
            yield Rejected(run_id=run.plan.run_id, name=name_of(point), num_bytes=point.num_bytes, why=why)


def name_of(point: CommPoint) -> SeriesName:
    """The series that a point belongs to."""
    return SeriesName(carrier=point.carrier, algorithm=point.algorithm)


def _order(group: CommGroup) -> tuple[str, str, str, int, int, int, str]:
    plan = group.sample.plan
    layout = plan.layout
    return (
        *(plan.system.name, group.collective, group.dtype),
        *(layout.ranks, layout.nodes, group.layout.group_size, group.id),
    )


def _group(key: str, runs: Sequence[CommRun]) -> CommGroup:
    plan = runs[0].plan
    cells: dict[tuple[SeriesName, int], list[tuple[RunKey, CommPoint]]] = {}
    for run in runs:
        assert run.record is not None
        for point in run.record.points:
            if not why_not(point):
                cells.setdefault((name_of(point), point.num_bytes), []).append(((run.plan.run_id, 0), point))
    names = sorted({name for name, _ in cells}, key=lambda name: series_order(name, plan.comm.collective))
    factor = bus_factor(plan.comm.collective, plan.layout.ranks)
    return CommGroup(
        id=key,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        runs=tuple(runs),
        series=tuple(
            Series(
                name=name,
                sizes=tuple(
                    _measurement(cells[name, size], factor) for one, size in sorted(cells, key=_by_size) if one == name
                ),
            )
            for name in names
        ),
        rejected=tuple(one for run in runs for one in _rejected(run)),
    )


def _by_size(cell: tuple[SeriesName, int]) -> int:
    return cell[1]


def _measurement(points: Iterable[tuple[RunKey, CommPoint]], factor: float) -> Measurement:
    import numpy as np

    times: dict[RunKey, list[float]] = {}
    found = list(points)
    for key, point in found:
        times.setdefault(key, []).extend(point.times_s)
    by_run = {key: float(np.median(values)) for key, values in times.items()}
    seconds = median_estimate(list(by_run.values()))
    within = None
    if len(times) == 1:
        low, high = np.percentile(next(iter(times.values())), [25, 75])
        within = (min(float(low), seconds.value), max(float(high), seconds.value))
    num_bytes = found[0][1].num_bytes
    return Measurement(
        num_bytes=num_bytes,
        seconds=seconds,
        within=within,
        algbw=rate(seconds, num_bytes),
        busbw=rate(seconds, num_bytes * factor) if factor > 0 else None,
        by_run=by_run,
        iterations=min(map(len, times.values())),
        point=found[0][1],
    )


def rate(seconds: Estimate, num_bytes: float) -> Estimate:
    """Bytes a second of an estimate of seconds; the ends of the interval change places."""
    value = num_bytes / seconds.value
    if seconds.low is None or seconds.high is None:
        return Estimate(value, None, None, seconds.n, seconds.kind)
    return interval(value, num_bytes / seconds.high, num_bytes / seconds.low, seconds.n, seconds.kind)
