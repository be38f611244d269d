"""Turns runs of the collective benchmark into measurements: medians over runs of medians over iterations. Rates are
those of nccl-tests (its doc/PERFORMANCE.md), with the bytes of each rank's whole buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from dlbench.analysis.comparability import Condition, digest_of, system_content
from dlbench.analysis.environments import Doubt
from dlbench.analysis.table import WithoutFigures, copy_problem
from dlbench.lazy import np
from dlbench.perfmodels.lines import fit_line
from dlbench.perfmodels.predictions import bus_factor
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import CommPoint, CommRun, CommScan
from dlbench.report.table import column
from dlbench.specs.base import Precision
from dlbench.specs.comm import ALGORITHMS, BACKENDS, LIBRARY, PAIRS, Collective
from dlbench.stats.estimates import Estimate, interval, median_estimate
from dlbench.stats.pairing import RunKey
from dlbench.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class SeriesName:
    """The name of a series: an algorithm over a carrier."""

    carrier: str
    algorithm: str

    @property
    def is_library(self) -> bool:
        """Returns whether the carrier's own collective was timed, as a reference."""
        return self.algorithm.startswith(LIBRARY)

    @property
    def title(self) -> str:
        """Returns e.g. `ring over mpi`, `library of torch-gloo`, `library of mpi (in place)`."""
        if not self.is_library:
            return f"{self.algorithm} over {self.carrier}"
        variant = self.algorithm.removeprefix(LIBRARY).replace("-", " ").strip()
        if not variant:
            return f"{LIBRARY} of {self.carrier}"
        return f"{LIBRARY} of {self.carrier} ({variant})"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One series at one size."""

    series: SeriesName = field(metadata={"json": False})
    num_bytes: int = field(metadata=column("Size", unit="bytes", is_brief=True))  # Bytes of each rank's whole buffer.
    time: Estimate = field(metadata=column("Time, median", "time_s", is_brief=True))
    """Median over runs of each run's median over iterations, seconds. For a single run the interval is the middle half
    of its iterations (`within-run`)."""
    minimum_s: float = field(metadata=column("Minimum", unit="s"))  # The fastest iteration of all.
    algbw: Estimate = field(metadata=column(name="algbw_gb_per_s"))  # 1e9 bytes per second.
    busbw: Estimate | None = field(metadata=column(name="busbw_gb_per_s"))
    """GB/s; None for one rank."""
    iterations: int  # Timed iterations of each run, at least.
    operations: int = 1  # Operations of an iteration, at least; its time is divided by them.
    timing: str = "host clock"  # The clock; see `CommPoint`.
    single_call_s: float | None = None
    """Median over all iterations of one operation alone by the host's clock, seconds; None if `time` is by it."""
    skew_s: float | None = None
    """Median over all iterations of the time between the first and the last rank's start, seconds."""
    chunks: int | None = field(default=None, metadata={"json": False})  # Chunks of the buffer.
    # Counters of the rank with the most; None for libraries.
    steps: int | None = None
    messages: int | None = None
    bytes_sent: int | None = None
    bytes_across: int | None = None  # Bytes sent to other groups.
    predicted_s: float | None = None  # Seconds by a fit without this point.
    predicted_over_measured: float | None = None
    is_best: bool = False
    by_run: dict[RunKey, float] = field(metadata={"json": False})
    """Seconds of each run; series measured in one run have equal keys, so ratios are paired."""

    @property
    def rate(self) -> Estimate:
        return self.busbw or self.algbw


@dataclass(frozen=True, kw_only=True)
class MeasuredSeries:
    """One algorithm over one carrier, or one library."""

    title: str  # Unique in its group.
    carrier: str
    algorithm: str
    is_library: bool
    rows: tuple[Measurement, ...]  # By size, ascending.
    startup_s: float | None = None  # By a line through all sizes; None with fewer than two.
    per_byte_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """A group of runs in a report, of a collective or of pairs of ranks."""

    id: str
    label: str
    conditions: tuple[Condition, ...]
    doubts: tuple[Doubt, ...]
    num_runs: int
    series: tuple[MeasuredSeries, ...]

    @property
    def points(self) -> tuple[Measurement, ...]:
        return tuple(chain.from_iterable(series.rows for series in self.series))

    @property
    def short_titles(self) -> dict[str, str]:
        """Returns the names of series in the group's tables, by title: without the carrier if all have the same."""
        names = {series.title: series.title for series in self.series}
        algorithms = [series for series in self.series if not series.is_library]
        if len({series.carrier for series in algorithms}) == 1:
            names |= {series.title: series.algorithm for series in algorithms}
        return names


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Points of one series and size without a figure, with the reason."""

    title: str = field(metadata=column("Series", "algorithm"))
    num_bytes: int = field(metadata=column("Size", unit="bytes"))
    why: str = field(metadata=column("Why", "problem"))
    runs: tuple[str, ...] = field(metadata=column("Runs", value=len, text=", ".join))


@dataclass(frozen=True, kw_only=True)
class CollectiveGroup:
    """Runs of one collective at one layout, whose points may be compared."""

    id: str
    collective: Collective
    dtype: Precision
    runs: tuple[CommRun, ...]
    series: tuple[MeasuredSeries, ...]  # dlbench's own algorithms first, then libraries; in the order of `ALGORITHMS`.
    rejected: tuple[Rejected, ...]

    @property
    def sample(self) -> CommRun:
        return self.runs[0]

    @property
    def layout(self) -> Layout:
        """Returns ranks, groups and leaf switches for cost models; without leaf switches if runs differ in them."""
        layouts = {layout_of(run) for run in self.runs}
        layout = layouts.pop()
        return replace(layout, leaf_size=None) if layouts else layout

    @property
    def has_uneven_leaves(self) -> bool:
        """Returns whether ranks are in unequal blocks below several leaf switches, which cost models ignore."""
        switches = (run.record.switches for run in self.runs if run.record)
        return self.layout.leaf_size is None and any(len(set(names)) > 1 for names in switches)

    @property
    def points(self) -> Iterable[Measurement]:
        return chain.from_iterable(series.rows for series in self.series)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({point.num_bytes for point in self.points}))


@dataclass(frozen=True, kw_only=True)
class CollectiveTable:
    """All runs of a scan."""

    groups: tuple[CollectiveGroup, ...]  # By system, collective, type, ranks, nodes and group size.
    pairs: tuple[CollectiveGroup, ...] = ()  # Groups of pairs of ranks; see `dlbench.comm.pairs`.
    without: tuple[WithoutFigures[CommRun], ...]
    damaged: tuple[str, ...]


def tabulate(scan: CommScan) -> CollectiveTable:
    """Returns the measurements of every valid run by group, and runs without figures with the reason."""
    groups: dict[str, list[CommRun]] = {}
    without: list[WithoutFigures[CommRun]] = []
    damaged = list(scan.problems)
    run_by_id: dict[str, CommRun] = {}
    for run in scan.runs:
        if run.plan.run_id in run_by_id:
            why = copy_problem(run, run_by_id[run.plan.run_id])
            damaged.append(why)
            without.append(WithoutFigures(run=run, state="damaged", why=why))
            continue
        run_by_id[run.plan.run_id] = run
        if run.record is None or run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.detail))
        elif not any(why_not(point) == "" for point in run.record.points):
            rejected = (f"{point.title}, {format_bytes(point.num_bytes)}: {point.why}" for point in _rejected([run]))
            reasons = dict.fromkeys([*rejected, *run.record.not_measured])
            without.append(WithoutFigures(run=run, state="empty", why="; ".join(reasons) or "has no point"))
        else:
            groups.setdefault(group_id(run), []).append(run)

    def order(group: CollectiveGroup) -> tuple[str | int, ...]:
        plan, layout = group.sample.plan, group.layout
        place = plan.layout.ranks, plan.layout.nodes, layout.group_size, plan.system.launch.launcher
        return plan.system.name, group.collective, group.dtype, *place, group.id

    measured_groups = sorted((_group(key, runs) for key, runs in groups.items()), key=order)
    return CollectiveTable(
        groups=tuple(group for group in measured_groups if group.collective != PAIRS),
        pairs=tuple(group for group in measured_groups if group.collective == PAIRS),
        without=tuple(without),
        damaged=tuple(damaged),
    )


def why_not(point: CommPoint) -> str:
    """Returns why a point has no figure; empty if it has one."""
    if point.correct is False:
        text = "wrong result"
        if point.max_error is not None:
            text += f" (largest relative error {point.max_error:.2g})"
        if point.problem:
            text += f": {point.problem}"
        return text
    if not point.times_s:
        return point.problem or "no time was recorded"
    if any(seconds <= 0 for seconds in point.times_s):
        return "a time of zero was recorded: the clock is too coarse, or the record was changed"
    return ""


def layout_of(run: CommRun) -> Layout:
    """Returns a run's layout with its groups and leaf switches, which are ignored if their blocks are unequal."""
    if run.record is None:
        return Layout(ranks=run.plan.layout.ranks, group_size=run.plan.group_size)
    group, switches = run.record.group_size, run.record.switches
    blocks = [len(list(ranks)) for _, ranks in groupby(switches)]
    is_even = len(blocks) == len(set(switches)) > 1 and len(set(blocks)) == 1 and blocks[0] % group == 0
    layout = Layout(ranks=run.plan.layout.ranks, group_size=group)
    return replace(layout, leaf_size=blocks[0]) if is_even else layout


def group_id(run: CommRun) -> str:
    """Returns a digest, stable over time and machines, that is equal for runs whose points may be averaged."""
    content = {**comparable(run), "asked": system_content(run.plan)}
    assert run.record is not None
    points = run.record.points
    if any(point.algorithm == "hierarchical" and (point.chunks or 1) > 1 for point in points):
        content["levels"] = True
    return digest_of(content)


def comparable(run: CommRun) -> dict[str, object]:
    """Returns what is equal for runs that may be compared; their system settings may differ."""
    plan = run.plan
    assert run.record is not None
    content: dict[str, object] = {
        "system": plan.system.name,
        "launch": plan.system.launch.model_dump(mode="json"),
        "layout": plan.layout.model_dump(mode="json"),
        "group_size": run.record.group_size,
        "shards": plan.comm.shards,
        "collective": plan.comm.collective,
        "dtype": plan.comm.dtype,
        "device": run.record.device,
    }
    if plan.comm.pairs:
        content |= {"pairs": plan.comm.pairs, "congestors": plan.comm.congestors}
    if any(point.timing == "in-stream" for point in run.record.points):
        content["timing"] = "in-stream"
    return content


def series_order(name: SeriesName, collective: Collective) -> tuple[bool, int, str, str]:
    """Returns a sort key: dlbench's algorithms as `dlbench comm` lists them, then libraries."""
    names: Sequence[str] = BACKENDS if name.is_library else ALGORITHMS.get(collective, ())
    position = names.index(name.algorithm) if name.algorithm in names else len(names)
    return name.is_library, position, name.algorithm, name.carrier


def _rejected(runs: Iterable[CommRun]) -> tuple[Rejected, ...]:
    run_ids: dict[tuple[str, int, str], list[str]] = {}
    for run in runs:
        assert run.record is not None
        for point in run.record.points:
            if why := why_not(point):
                run_ids.setdefault((name_of(point).title, point.num_bytes, why), []).append(run.plan.run_id)
    return tuple(
        Rejected(title=title, num_bytes=size, why=why, runs=tuple(ids)) for (title, size, why), ids in run_ids.items()
    )


def name_of(point: CommPoint) -> SeriesName:
    """Returns the name of the series of a point."""
    algorithm = point.algorithm
    if point.pair is not None:
        algorithm += f" {point.pair[0]}:{point.pair[1]}"
    if point.congestors:
        algorithm += " with congestors"
    return SeriesName(carrier=point.carrier, algorithm=algorithm)


def _group(key: str, runs: Sequence[CommRun]) -> CollectiveGroup:
    plan = runs[0].plan
    cells: dict[SeriesName, dict[int, list[tuple[RunKey, CommPoint]]]] = {}
    for run in runs:
        assert run.record is not None
        for point in run.record.points:
            if not why_not(point):
                sizes = cells.setdefault(name_of(point), {})
                sizes.setdefault(point.num_bytes, []).append(((run.plan.run_id, 0), point))
    factor = bus_factor(plan.comm.collective, plan.layout.ranks)
    measured: dict[SeriesName, list[Measurement]] = {}
    for name in sorted(cells, key=lambda name: series_order(name, plan.comm.collective)):
        measured[name] = [measurement(points, factor) for _, points in sorted(cells[name].items())]
    fastest: dict[int, float] = {}
    for row in chain.from_iterable(measured.values()):
        fastest[row.num_bytes] = min(row.time.value, fastest.get(row.num_bytes, row.time.value))
    all_series = []
    for name, rows in measured.items():
        series = MeasuredSeries(
            title=name.title,
            carrier=name.carrier,
            algorithm=name.algorithm,
            is_library=name.is_library,
            rows=tuple(replace(row, is_best=row.time.value == fastest[row.num_bytes]) for row in rows),
        )
        all_series.append(_with_line(series, plan.layout.ranks))
    return CollectiveGroup(
        id=key,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        runs=tuple(runs),
        series=tuple(all_series),
        rejected=_rejected(runs),
    )


def _with_line(series: MeasuredSeries, ranks: int) -> MeasuredSeries:
    if len(series.rows) == 1:
        return series
    num_bytes, seconds = [row.num_bytes for row in series.rows], [row.time.value for row in series.rows]
    line = fit_line(series.title, ranks, num_bytes, seconds)
    return replace(series, startup_s=line.startup_s, per_byte_s=line.per_byte_s)


def at_minimum(table: CollectiveTable) -> CollectiveTable:
    """Returns the table with the fastest iteration of each point as its time, which leaves out congestion. A minimum
    has no interval over runs.
    """
    groups = []
    for group in table.groups:
        all_series = []
        for series in group.series:
            rows = [
                replace(row, time=median_estimate([row.minimum_s], "s"), by_run={next(iter(row.by_run)): row.minimum_s})
                for row in series.rows
            ]
            all_series.append(_with_line(replace(series, rows=tuple(rows)), group.layout.ranks))
        groups.append(replace(group, series=tuple(all_series)))
    return replace(table, groups=tuple(groups))


def measurement(points: Sequence[tuple[RunKey, CommPoint]], factor: float) -> Measurement:
    """Returns the measurement of one series and size. `factor`: busbw / algbw, 0 if there is no bus."""
    times: dict[RunKey, list[float]] = {}
    for key, point in points:
        times.setdefault(key, []).extend(point.times_s)
    by_run = {key: float(np.median(values)) for key, values in times.items()}
    time = median_estimate(list(by_run.values()), "s")
    if len(times) == 1:
        low, high = np.percentile(next(iter(times.values())), [25, 75])
        time = interval(time.value, low, high, 1, "within-run", "s")
    first = points[0][1]
    busbw = rate(time, first.num_bytes * factor) if factor > 0 else None
    return Measurement(
        series=name_of(first),
        num_bytes=first.num_bytes,
        time=time,
        minimum_s=min(map(min, times.values())),
        algbw=rate(time, first.num_bytes),
        busbw=busbw,
        iterations=min(map(len, times.values())),
        operations=min(point.operations for _, point in points),
        timing=first.timing,
        single_call_s=_median(chain.from_iterable(point.single_call_s for _, point in points)),
        skew_s=_median(chain.from_iterable(point.skew_s for _, point in points)),
        chunks=first.chunks,
        steps=first.steps,
        messages=max(first.messages, default=None),
        bytes_sent=max(first.bytes_sent, default=None),
        bytes_across=max(first.bytes_across, default=None),
        by_run=by_run,
    )


def _median(seconds: Iterable[float]) -> float | None:
    values = list(seconds)
    return float(np.median(values)) if values else None


def rate(time: Estimate, num_bytes: float) -> Estimate:
    """Returns the rate in GB/s by a time in seconds; the ends of the interval change places."""
    return time.mapped(lambda seconds: num_bytes / seconds * 1e-9, "GB/s")
