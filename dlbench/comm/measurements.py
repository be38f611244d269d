"""Runs of the collective benchmark become measurements: a time with an interval for each series and size.

A series is one algorithm (or one library's own collective) over one carrier. A run's time is the median over its
timed iterations; figures are medians over runs. Rates as nccl-tests defines them (its doc/PERFORMANCE.md): algbw =
bytes / time, busbw = algbw x a factor of the collective, where bytes are those of each rank's whole buffer: for
all-gather the gathered result, for reduce-scatter the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from dlbench.analysis.comparability import Condition, digest_of, system_content
from dlbench.analysis.doubts import Doubt
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
    """What was timed: an algorithm over a carrier."""

    carrier: str
    algorithm: str

    @property
    def is_library(self) -> bool:
        """Whether the carrier's own collective was timed, as a reference."""
        return self.algorithm.startswith(LIBRARY)

    @property
    def title(self) -> str:
        """`ring over mpi`, `library of torch-gloo`, `library of mpi (in place)`."""
        if not self.is_library:
            return f"{self.algorithm} over {self.carrier}"
        way = self.algorithm.removeprefix(LIBRARY).replace("-", " ").strip()
        return f"{LIBRARY} of {self.carrier}" + f" ({way})" * bool(way)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One series at one size."""

    series: SeriesName = field(metadata={"json": False})
    num_bytes: int = field(metadata=column("Size", unit="bytes", is_brief=True))  # Of each rank's whole buffer.
    time: Estimate = field(metadata=column("Time, median", "time_s", is_brief=True))
    """Seconds: the median over runs of each run's median over iterations. For a single run the interval is the middle
    half of its iterations (`within-run`)."""
    minimum_s: float = field(metadata=column("Minimum", unit="s"))  # The fastest iteration of all.
    algbw: Estimate = field(metadata=column(name="algbw_gb_per_s"))  # 1e9 bytes per second.
    busbw: Estimate | None = field(metadata=column(name="busbw_gb_per_s"))
    """GB/s; None for one rank, where nothing crosses a bus."""
    iterations: int  # Timed iterations of each run, at least.
    operations: int = 1  # Of an iteration, back to back, at least: its time is divided by them.
    timing: str = "host clock"  # What the time is by; see `CommPoint`.
    single_call_s: float | None = None
    """Median over all iterations of one operation alone by the host's clock, seconds; None where that is the time."""
    skew_s: float | None = None
    """Median over all iterations of how far apart ranks began, seconds; None: not recorded."""
    chunks: int | None = field(default=None, metadata={"json": False})  # `CommPoint.chunks_run`.
    # Counted, the most of any rank; None for libraries.
    steps: int | None = None
    messages: int | None = None
    bytes_sent: int | None = None
    bytes_across: int | None = None  # Of the bytes sent those that left the group.
    predicted_s: float | None = None  # Seconds that a fit without this point expects; None where there is none.
    predicted_over_measured: float | None = None
    is_best: bool = False
    by_run: dict[RunKey, float] = field(metadata={"json": False})
    """Seconds of each run; series measured in one run have equal keys, so that ratios pair them."""

    @property
    def rate(self) -> Estimate:
        """Returns busbw, GB/s, or algbw for one rank."""
        return self.busbw or self.algbw


@dataclass(frozen=True, kw_only=True)
class MeasuredSeries:
    """One algorithm over one carrier, or one library."""

    title: str  # Unique in its group.
    carrier: str
    algorithm: str
    is_library: bool
    rows: tuple[Measurement, ...]  # By size, ascending; sizes without a figure are not here.
    startup_s: float | None = None  # Of a line through all sizes; None with fewer than two sizes.
    per_byte_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """What a report says of a group of runs, whether they measured a collective or pairs of ranks."""

    id: str
    label: str
    conditions: tuple[Condition, ...]
    doubts: tuple[Doubt, ...]
    num_runs: int
    series: tuple[MeasuredSeries, ...]

    @property
    def points(self) -> tuple[Measurement, ...]:
        """Returns all measurements, by series and size."""
        return tuple(row for series in self.series for row in series.rows)

    @property
    def short_titles(self) -> dict[str, str]:
        """Returns by title what each series is called in the group's tables: without a carrier that all share."""
        carriers = {series.carrier for series in self.series if not series.is_library}
        return {
            series.title: series.algorithm if len(carriers) == 1 and not series.is_library else series.title
            for series in self.series
        }


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """Points without a figure, and why."""

    title: str = field(metadata=column("Series", "algorithm"))
    num_bytes: int = field(metadata=column("Size", unit="bytes"))
    why: str = field(metadata=column("Why", "problem"))
    runs: tuple[str, ...] = field(metadata=column("Runs", value=len, text=", ".join))


@dataclass(frozen=True, kw_only=True)
class CollectiveGroup:
    """Runs of one collective at one layout: their points may be compared."""

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
        """Ranks, groups and leaf switches, as costs count them; no leaf switches where runs differ in them."""
        layouts = {layout_of(run) for run in self.runs}
        return layouts.pop() if len(layouts) == 1 else replace(layouts.pop(), leaf_size=None)

    @property
    def has_uneven_leaves(self) -> bool:
        """Whether ranks were below several leaf switches of which costs take no notice: not in equal blocks."""
        switches = (run.record.switches for run in self.runs if run.record)
        return self.layout.leaf_size is None and any(len(set(names)) > 1 for names in switches)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({one.num_bytes for series in self.series for one in series.rows}))


@dataclass(frozen=True, kw_only=True)
class CollectiveTable:
    """All runs of a scan."""

    groups: tuple[CollectiveGroup, ...]  # By system, collective, type, ranks, nodes and group size.
    pairs: tuple[CollectiveGroup, ...] = ()  # Of pairs of ranks, without series: see `dlbench.comm.pairs`.
    without: tuple[WithoutFigures[CommRun], ...]
    damaged: tuple[str, ...]


def tabulate(scan: CommScan) -> CollectiveTable:
    """Measurements of every valid run, grouped; runs without figures with their reason.

    A run whose record is invalid held a wrong result somewhere, and yields no figure at all.
    """
    groups: dict[str, list[CommRun]] = {}
    without: list[WithoutFigures[CommRun]] = []
    damaged = list(scan.problems)
    seen: dict[str, CommRun] = {}
    for run in scan.runs:
        if run.plan.run_id in seen:
            why = copy_problem(run, seen[run.plan.run_id])
            damaged.append(why)
            without.append(WithoutFigures(run=run, state="damaged", why=why))
            continue
        seen[run.plan.run_id] = run
        if run.record is None or run.state != "valid":
            without.append(WithoutFigures(run=run, state=run.state, why=run.detail))
        elif not any(why_not(point) == "" for point in run.record.points):
            rejected = (f"{point.title}, {format_bytes(point.num_bytes)}: {point.why}" for point in _rejected([run]))
            reasons = dict.fromkeys([*rejected, *run.record.not_measured])
            without.append(WithoutFigures(run=run, state="empty", why="; ".join(reasons) or "holds no point"))
        else:
            groups.setdefault(group_id(run), []).append(run)

    def order(group: CollectiveGroup) -> tuple[str | int, ...]:
        plan, layout = group.sample.plan, group.layout
        of_plan = plan.layout.ranks, plan.layout.nodes, layout.group_size, plan.system.launch.launcher
        return plan.system.name, group.collective, group.dtype, *of_plan, group.id

    measured_groups = sorted((_group(key, runs) for key, runs in groups.items()), key=order)
    return CollectiveTable(
        groups=tuple(group for group in measured_groups if group.collective != PAIRS),
        pairs=tuple(group for group in measured_groups if group.collective == PAIRS),
        without=tuple(without),
        damaged=tuple(damaged),
    )


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
    """The layout by which a run's points are counted: groups and leaf switches as its record says. Switches count where
    each has equally many ranks, whole groups and one after the other.
    """
    if run.record is None:
        return Layout(ranks=run.plan.layout.ranks, group_size=run.plan.group_size)
    group, switches = run.record.group_size, run.record.switches
    blocks = [len(list(ranks)) for _, ranks in groupby(switches)]
    is_even = len(blocks) == len(set(switches)) > 1 and len(set(blocks)) == 1 and blocks[0] % group == 0
    return Layout(ranks=run.plan.layout.ranks, group_size=group, leaf_size=blocks[0] if is_even else None)


def group_id(run: CommRun) -> str:
    """A digest equal for exactly those runs whose points may be averaged; stable over time and machines.

    Runs that were asked for unlike of the system are apart, and those whose levels overlap; what else only their
    records show is a doubt.
    """
    content = {**_comparable(run), "asked": system_content(run.plan)}
    points = run.record.points if run.record else ()
    if any(point.algorithm == "hierarchical" and (point.chunks or 1) > 1 for point in points):
        content["levels"] = True
    return digest_of(content)


def comparable_id(run: CommRun) -> str:
    """The same for runs that may be compared: what was asked of the system may differ."""
    return digest_of(_comparable(run))


def _comparable(run: CommRun) -> dict[str, object]:
    plan = run.plan
    assert run.record is not None
    return {
        "system": plan.system.name,
        "launch": plan.system.launch.model_dump(mode="json"),
        "layout": plan.layout.model_dump(mode="json"),
        "group_size": run.record.group_size,
        "shards": plan.comm.shards,
        "collective": plan.comm.collective,
        "dtype": plan.comm.dtype,
        "device": run.record.device,
        **({"pairs": plan.comm.pairs, "congestors": plan.comm.congestors} if plan.comm.pairs else {}),
        **({"timing": "in-stream"} if any(point.timing == "in-stream" for point in run.record.points) else {}),
    }


def series_order(name: SeriesName, collective: Collective) -> tuple[bool, int, str, str]:
    """Own algorithms as `dlbench comm` lists them, then libraries."""
    names = BACKENDS if name.is_library else ALGORITHMS.get(collective, ())
    position = names.index(name.algorithm) if name.algorithm in names else len(names)
    return name.is_library, position, name.algorithm, name.carrier


def _rejected(runs: Iterable[CommRun]) -> tuple[Rejected, ...]:
    run_ids: dict[tuple[str, int, str], list[str]] = {}
    for run in runs:
        for point in run.record.points if run.record else ():
            why = why_not(point)
            if why:
                run_ids.setdefault((name_of(point).title, point.num_bytes, why), []).append(run.plan.run_id)
    return tuple(
        Rejected(title=title, num_bytes=size, why=why, runs=tuple(ids)) for (title, size, why), ids in run_ids.items()
    )


def name_of(point: CommPoint) -> SeriesName:
    """The series that a point belongs to."""
    pair = "" if point.pair is None else f" {point.pair[0]}:{point.pair[1]}"
    meanwhile = " beside congestors" if point.congestors else ""
    return SeriesName(carrier=point.carrier, algorithm=f"{point.algorithm}{pair}{meanwhile}")


def _group(key: str, runs: Sequence[CommRun]) -> CollectiveGroup:
    plan = runs[0].plan
    cells: dict[SeriesName, dict[int, list[tuple[RunKey, CommPoint]]]] = {}
    for run in runs:
        for point in run.record.points if run.record else ():
            if not why_not(point):
                sizes = cells.setdefault(name_of(point), {})
                sizes.setdefault(point.num_bytes, []).append(((run.plan.run_id, 0), point))
    factor = bus_factor(plan.comm.collective, plan.layout.ranks)
    measured = {
        name: [measurement(cells[name][size], factor) for size in sorted(cells[name])]
        for name in sorted(cells, key=lambda name: series_order(name, plan.comm.collective))
    }
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
        if len(rows) > 1:
            num_bytes, seconds = [row.num_bytes for row in rows], [row.time.value for row in rows]
            line = fit_line(name.title, plan.layout.ranks, num_bytes, seconds)
            series = replace(series, startup_s=line.startup_s, per_byte_s=line.per_byte_s)
        all_series.append(series)
    return CollectiveGroup(
        id=key,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        runs=tuple(runs),
        series=tuple(all_series),
        rejected=_rejected(runs),
    )


def measurement(points: Sequence[tuple[RunKey, CommPoint]], factor: float) -> Measurement:
    """Points of one series and size; `factor`: busbw over algbw, 0 where there is no bus."""
    times: dict[RunKey, list[float]] = {}
    for key, point in points:
        times.setdefault(key, []).extend(point.times_s)
    by_run = {key: float(np.median(values)) for key, values in times.items()}
    time = median_estimate(list(by_run.values()), "s")
    if len(times) == 1:
        low, high = np.percentile(next(iter(times.values())), [25, 75])
        time = interval(time.value, low, high, 1, "within-run", "s")
    first = points[0][1]
    single_calls = [seconds for _, point in points for seconds in point.single_call_s]
    skews = [seconds for _, point in points for seconds in point.skew_s]
    return Measurement(
        series=name_of(first),
        num_bytes=first.num_bytes,
        time=time,
        minimum_s=min(map(min, times.values())),
        algbw=rate(time, first.num_bytes),
        busbw=rate(time, first.num_bytes * factor) if factor > 0 else None,
        iterations=min(map(len, times.values())),
        operations=min(point.operations for _, point in points),
        timing=first.timing,
        single_call_s=float(np.median(single_calls)) if single_calls else None,
        skew_s=float(np.median(skews)) if skews else None,
        chunks=first.chunks_run,
        steps=first.steps,
        messages=max(first.messages, default=None),
        bytes_sent=max(first.bytes_sent, default=None),
        bytes_across=max(first.bytes_across, default=None),
        by_run=by_run,
    )


def rate(time: Estimate, num_bytes: float) -> Estimate:
    """GB/s of an estimate of seconds; the ends of the interval change places."""
    return time.mapped(lambda seconds: num_bytes / seconds * 1e-9, "GB/s")
