"""The report of the collective benchmark as plain data: measurements, what follows from them, and the words on both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import dlbench
from dlbench.collectives.page import words
from dlbench.collectives.results import choice
from dlbench.collectives.results.fits import Fit, Fits, fit_all
from dlbench.collectives.results.measurements import (
    CollectiveGroup,
    CollectiveTable,
    Measurement,
    Rejected,
    Series,
    comparable_id,
    layout_of,
    name_of,
    rate,
    tabulate,
    why_not,
)
from dlbench.costs.collectives import Layout, RankCounts, counts
from dlbench.costs.predictions import bus_factor
from dlbench.reading.comparability import Condition, asked_apart, unique_labels
from dlbench.reading.doubts import Doubt, merged
from dlbench.reading.environments import Environments, environment_doubts, side_by_side
from dlbench.reading.hosts.core_load import LOAD_CODES, load_doubts
from dlbench.reading.repeats import shared_nodes, unlike_runs
from dlbench.records.collectives import CommPoint
from dlbench.records.collectives_scan import CommRun, CommScan
from dlbench.records.watch import NodeLoad
from dlbench.report.wording import runs_text
from dlbench.specs.base import Precision
from dlbench.specs.collectives.plan import ELEMENT_BYTES, Collective
from dlbench.stats.estimates import MIN_RUNS, median_estimate
from dlbench.units import format_bytes, whole_seconds

NOISY = 0.5
"""Where the middle half of the iterations spans more than this share of the median, there is hardly a typical time."""


def group_doubts(group: CollectiveGroup) -> list[Doubt]:
    """All reasons to doubt the figures of a group, serious ones first; equal texts once, with their runs."""
    found = [*_few_repeats(group), *_unlike(group.runs), *_one_hosts_layout(group), *_noise(group.runs)]
    # Noise and the load of cores are told once for all runs.
    found += load_doubts(_loads(group.runs))
    found += merged(
        doubt for run in group.runs for doubt in run_doubts(run) if doubt.code not in ("noisy-iterations", *LOAD_CODES)
    )
    return sorted(found, key=lambda doubt: doubt.severity != "serious")


def run_doubts(run: CommRun) -> list[Doubt]:
    """What one run with a record gives reason to doubt, by itself."""
    record = run.record
    if record is None:
        return []
    ids = (run.plan.run_id,)
    found = [Doubt(code="recorded", severity="serious", text=text, runs=ids) for text in record.warnings]
    if shared := shared_nodes(run.plan):
        found.append(Doubt(code="shared-nodes", severity="serious", text=shared, runs=ids))
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=record.device.startswith("cuda")):
        found.append(Doubt(code=code, severity="serious", text=text, runs=ids))
    for point in record.points:
        if why_not(point):
            continue
        what = f"{name_of(point).title}, {format_bytes(point.num_bytes)}"
        if point.problem:
            found.append(Doubt(code="point", severity="serious", text=f"{what}: {point.problem}", runs=ids))
        problem = counter_problem(run, point)
        if problem:
            found.append(Doubt(code="counters", severity="serious", text=f"{what}: {problem}", runs=ids))
    unchecked = sum(point.correct is None for point in record.points if not why_not(point))
    if unchecked:
        text = f"results of {unchecked} points were not checked: a wrong sum would have gone unseen"
        found.append(Doubt(code="unchecked", severity="serious", text=text, runs=ids))
    return [*found, *load_doubts(_loads([run])), *_noise([run])]


def _loads(runs: Sequence[CommRun]) -> dict[str, tuple[NodeLoad, ...]]:
    return {run.plan.run_id: run.record.load for run in runs if run.record is not None}


def counter_problem(run: CommRun, point: CommPoint) -> str:
    """How what a rank counted differs from what the formulas say; empty where it does not, and for libraries."""
    if name_of(point).is_library:
        return ""
    layout, shards = layout_of(run), run.plan.comm.shards
    expected = _expected(point.collective, point.algorithm, layout, point.num_bytes, ELEMENT_BYTES[point.dtype], shards)
    found = []
    steps = max(rank.steps for rank in expected)
    if point.steps != steps:
        found.append(f"steps: {point.steps} counted, {steps} by the formula")
    for name, counted, wanted in (
        ("messages", point.messages, tuple(rank.messages for rank in expected)),
        ("bytes sent", point.bytes_sent, tuple(rank.bytes_sent for rank in expected)),
        ("bytes to other groups", point.bytes_across, tuple(rank.bytes_across for rank in expected)),
    ):
        if counted == wanted:
            continue
        if len(counted) != len(wanted):
            found.append(f"{name}: counted on {len(counted)} of {len(wanted)} ranks")
            continue
        rank = next(rank for rank, pair in enumerate(zip(counted, wanted, strict=True)) if pair[0] != pair[1])
        found.append(f"{name} of rank {rank}: {counted[rank]:,} counted, {wanted[rank]:,} by the formula")
    return f"counters differ from the formulas: {'; '.join(found)}" if found else ""


@lru_cache(maxsize=4096)
def _expected(
    collective: Collective, algorithm: str, layout: Layout, num_bytes: int, element_bytes: int, shards: int | None
) -> tuple[RankCounts, ...]:
    return counts(collective, algorithm, layout, num_bytes // element_bytes, element_bytes, shards=shards)


def _few_repeats(group: CollectiveGroup) -> Iterator[Doubt]:
    if len(group.runs) < MIN_RUNS:
        count = f"{len(group.runs)} valid run{'s' * (len(group.runs) > 1)}"
        how = "; intervals are those of its iterations and say nothing on how runs differ" * (len(group.runs) == 1)
        yield Doubt(
            code="few-repeats",
            severity="serious",
            text=f"insufficient for a comparison: fewer than {MIN_RUNS} valid runs ({count}){how}",
        )


def _unlike(runs: Sequence[CommRun]) -> list[Doubt]:
    return unlike_runs({"": {run.plan.run_id: run.record.environment for run in runs if run.record is not None}})


def environment(runs: Sequence[CommRun]) -> Environments:
    """The environments (of rank 0) of runs side by side; those without a record are passed over."""
    return side_by_side({run.plan.run_id: run.record.environment for run in runs if run.record is not None})


def _one_hosts_layout(group: CollectiveGroup) -> Iterator[Doubt]:
    plan = group.sample.plan
    hosts = {host for run in group.runs if run.record for host in run.record.hosts}
    if group.layout.num_groups > 1 and (plan.layout.nodes == 1 or len(hosts) == 1):
        yield Doubt(
            code="pretended-groups",
            severity="note",
            text="all groups are on one host: messages across groups cost what those inside cost",
        )


def _noise(runs: Sequence[CommRun]) -> Iterator[Doubt]:
    known = [
        (run.plan.run_id, point)
        for run in runs
        if run.record is not None
        for point in run.record.points
        if not why_not(point)
    ]
    noisy = [run_id for run_id, point in known if _is_noisy(point)]
    if noisy:
        yield Doubt(
            code="noisy-iterations",
            severity="serious",
            text=f"iterations scatter: at {len(noisy)} of {len(known)} points their middle half spans more than "
            f"{NOISY:.0%} of the median",
            runs=tuple(dict.fromkeys(noisy)),
        )


def _is_noisy(point: CommPoint) -> bool:
    import numpy as np

    low, middle, high = np.percentile(point.times_s, [25, 50, 75])
    return bool(high - low > NOISY * middle)


Counters = tuple[tuple[int, int | None, int | None, int | None], ...]


def contenders(group: CollectiveGroup) -> tuple[Series, ...]:
    """The series of a group, those that send the same messages merged into one with the times of all of them.

    Two ranks that exchange equal parts in an equal number of steps send the same messages, whatever the algorithm is
    called: the fastest of several such series is fastest by chance.
    """
    classes: dict[tuple[str, Counters], list[Series]] = {}
    is_pair = bool(group.runs) and group.layout.ranks == 2
    for series in group.series:
        counters = tuple((row.num_bytes, row.steps, row.messages, row.bytes_sent) for row in series.rows)
        is_counted = is_pair and not series.is_library and all(row.steps is not None for row in series.rows)
        classes.setdefault((series.carrier, counters) if is_counted else (series.title, ()), []).append(series)
    return tuple(_merged(group, members) for members in classes.values())


def same_messages(group: CollectiveGroup) -> tuple[tuple[str, ...], ...]:
    """Algorithms that are one among the contenders, the first of each by the name of which it is one."""
    known = {series.title for series in group.series}
    merged = [series for series in contenders(group) if series.title not in known]
    return tuple(
        tuple(one.algorithm for one in group.series if one.carrier == series.carrier and _is_in(one, series))
        for series in merged
    )


def _is_in(one: Series, merged: Series) -> bool:
    mine, other = one.rows[0], merged.rows[0]
    own = (mine.num_bytes, mine.steps, mine.messages, mine.bytes_sent)
    return not one.is_library and own == (other.num_bytes, other.steps, other.messages, other.bytes_sent)


def _merged(group: CollectiveGroup, members: Sequence[Series]) -> Series:
    first, *others = members
    if not others:
        return first
    title = f"{first.algorithm} (or {len(others)} equal) over {first.carrier}"
    rows = tuple(_row(group, [one.rows[place] for one in members]) for place in range(len(first.rows)))
    return replace(first, title=title, rows=rows)


def _row(group: CollectiveGroup, rows: Sequence[Measurement]) -> Measurement:
    """One size: of each run the median over the series."""
    import numpy as np

    first = rows[0]
    keys = dict.fromkeys(key for row in rows for key in row.by_run)
    by_run = {key: float(np.median([row.by_run[key] for row in rows if key in row.by_run])) for key in keys}
    time = median_estimate(list(by_run.values()), "s")
    factor = bus_factor(group.collective, group.layout.ranks)
    return replace(
        first,
        time=time,
        algbw=rate(time, first.num_bytes),
        busbw=rate(time, first.num_bytes * factor) if factor > 0 else None,
        by_run=by_run,
    )


FORMAT = "dlbench.comm-report"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One collective at one layout."""

    id: str
    label: str
    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    group_size: int
    verdict: str
    advice: str
    """What to use at which size."""
    same_messages: tuple[tuple[str, ...], ...]
    """Algorithms that count as one, because at two ranks they send the same messages."""
    conditions: tuple[Condition, ...]
    caption: str
    """The conditions in one line, under every table and chart."""
    num_runs: int
    series: tuple[Series, ...]
    best: tuple[choice.Best, ...]
    crossovers: tuple[choice.Crossover, ...]
    recommended: tuple[choice.Recommended, ...]
    fusion: choice.Fusion | None
    ratios: tuple[choice.Ratio, ...]
    rejected: tuple[Rejected, ...]
    not_measured: tuple[str, ...]
    doubts: tuple[Doubt, ...]


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run, whatever became of it."""

    run_id: str
    group: str
    """Id of its group; empty for runs without figures."""
    state: str
    story: str
    """Why it has no figures; empty where it has some."""
    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    repeat: int
    finished: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CollectivesReport:
    """Everything."""

    format: str = FORMAT
    version: int = VERSION
    title: str
    as_of: str
    """When the newest run finished, UTC; empty if none did."""
    dlbench_version: str
    groups: tuple[GroupReport, ...]
    fits: tuple[Fit, ...]
    unfitted: tuple[str, ...]
    """Systems and carriers without a fit, and why."""
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """What the environments of all runs with figures share."""
    methods: tuple[tuple[str, str], ...]

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        """Runs that yield no figure."""
        return tuple(run for run in self.runs if not run.group)


def assemble(scan: CommScan) -> CollectivesReport:
    """The report of everything found under one folder; equal folders give equal reports."""
    table = tabulate(scan)
    measured = [run for group in table.groups for run in group.runs]
    fits = fit_all(table)
    asked = asked_apart([(comparable_id(group.sample), group.sample.plan) for group in table.groups])
    groups = tuple(_group(group, fits, apart) for group, apart in zip(table.groups, asked, strict=True))
    return CollectivesReport(
        title=words.TITLE,
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        dlbench_version=dlbench.__version__,
        groups=tuple(
            dataclasses.replace(group, label=label) for group, label in zip(groups, unique_labels(groups), strict=True)
        ),
        fits=fits.fits,
        unfitted=fits.unfitted,
        runs=_runs(scan, table),
        damaged=table.damaged,
        environment=tuple(environment(measured).common.items()),
        methods=words.METHODS,
    )


def _group(group: CollectiveGroup, fits: Fits, apart: tuple[Condition, ...]) -> GroupReport:
    plan = group.sample.plan
    among = dataclasses.replace(group, series=contenders(group))
    label, best, ranges = words.label_of(group), choice.best(among), choice.recommended(among)
    return GroupReport(
        id=group.id,
        label=label,
        collective=group.collective,
        dtype=group.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        group_size=group.layout.group_size,
        verdict=words.verdict(among, best, ranges),
        advice=words.advice(among, ranges),
        same_messages=same_messages(group),
        conditions=(*words.conditions_of(group), *apart),
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=fits.beside(group).series,
        best=best,
        crossovers=(*choice.crossovers(among), *choice.model_crossovers(among, fits)),
        recommended=ranges,
        fusion=choice.fusion(group),
        ratios=tuple(choice.ratios(group)),
        rejected=group.rejected,
        not_measured=tuple(dict.fromkeys(text for run in group.runs if run.record for text in run.record.not_measured)),
        doubts=tuple(group_doubts(group)),
    )


def _runs(scan: CommScan, table: CollectiveTable) -> tuple[RunRow, ...]:
    groups = {id(run): group.id for group in table.groups for run in group.runs}
    without = {id(one.run): (one.state, one.why) for one in table.without}
    return tuple(_run(run, groups.get(id(run), ""), *without.get(id(run), ("valid", ""))) for run in scan.runs)


def _run(run: CommRun, group: str, state: str, story: str) -> RunRow:
    plan = run.plan
    return RunRow(
        run_id=plan.run_id,
        group=group,
        state=state,
        story=story,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        repeat=plan.series.repeat,
        finished="" if run.record is None else run.record.finished,
        warnings=tuple(one.text for one in run_doubts(run)),
    )
