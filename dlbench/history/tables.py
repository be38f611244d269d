"""The report of a history (its runs, trends with their changes, hosts by month) as data and as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Literal, NamedTuple

from dlbench.analysis.metrics import FOLLOWED, METRICS
from dlbench.analysis.repeats import MIN_SESSIONS
from dlbench.analysis.slow_nodes import FALSE_SHARE, SLOW
from dlbench.history.change_points import (
    MAX_OUTLIERS,
    MIN_DRIFT,
    MIN_EFFECT,
    MIN_EVIDENCE,
    MIN_NIGHTS,
    MIN_SEGMENT,
    NAMED,
    SHAPE_FACTOR,
)
from dlbench.history.entry import HistoryEntry
from dlbench.history.history import Acknowledgement
from dlbench.history.series import (
    Change,
    LevelStretch,
    Night,
    Trend,
    amount_text,
    change_cell,
    day,
    level_text,
    ratio_cell,
)
from dlbench.history.slow_months import RECENT_DAYS, HostCourse, HostMonth, SlowMonths, slow_months
from dlbench.history.trends import damaged_runs, dated, trends
from dlbench.report.document import BaseReport, Document, Section, definitions
from dlbench.report.table import Cell, Column, Sheet, columns_of
from dlbench.report.wording import place_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import TREND
from dlbench.units import counted, first_of, format_seconds, plural

_IMPORT = "dlbench history import RUNS"
MAX_LISTED_HOSTS = 4
MAX_COMMIT = 8  # Characters of a commit that identify it; JSON and CSV have all.
MINUTE = len("2026-03-04T02:06")
COLUMNS: tuple[Column[HistoryEntry], ...] = (
    *columns_of(
        HistoryEntry,
        *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
        *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest"),
        *("why", "hosts", "tags"),
    ),
    *(Column(metric.name, "", methodcaller("figure", metric.name)) for metric in METRICS),
)
"""Columns of a run: hosts with blanks between, tags as JSON, figures in the units of their names."""

TableName = Literal["changes", "series", "nights", "hosts"]
MAX_ROWS = 50  # Hosts in a page and in the terminal; CSV and JSON have all.
MAX_MONTHS = 6  # Newest months that have a column; CSV and JSON have all.
_BASIS = (
    "levels are medians over nights, a night is the median of its runs; in brackets intervals over nights (order "
    "statistics)"
)


class ChangeOfSeries(NamedTuple):
    """A change, and the series that has it."""

    series: Trend
    change: Change

    @property
    def line(self) -> str:
        """The change and how to acknowledge it, in one line."""
        series, change = self
        return f"{day(change.time)}: {series.label}: {change_cell(change.ratio)}; {series.acknowledgement(change)}"


@dataclass(frozen=True, kw_only=True)
class TrendsReport(BaseReport):
    """The content of the JSON of `dlbench history trends`."""

    format: str = "dlbench.trends"
    title: str = "dlbench history: trends"
    num_runs: int  # Runs with figures.
    num_without: int
    series: tuple[Trend, ...]
    nodes: SlowMonths
    damaged: tuple[str, ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def changes(self) -> tuple[ChangeOfSeries, ...]:
        """All change points, newest first."""
        changes: list[ChangeOfSeries] = []
        for series in self.series:
            changes += [ChangeOfSeries(series, change) for change in series.changes]
        return tuple(sorted(changes, key=attrgetter("change.time"), reverse=True))

    @property
    def open_regressions(self) -> tuple[ChangeOfSeries, ...]:
        regressions: list[ChangeOfSeries] = []
        for series in self.series:
            regressions += [ChangeOfSeries(series, change) for change in series.open_regressions]
        return tuple(regressions)

    @property
    def by_newest_change(self) -> tuple[Trend, ...]:
        """Series with the newest change first, then those without changes, then those that are too short."""
        newest_first = sorted(
            self.series, key=lambda trend: trend.changes[-1].time if trend.changes else "", reverse=True
        )
        return tuple(sorted(newest_first, key=attrgetter("is_long_enough"), reverse=True))

    @property
    def finding(self) -> str:
        """The number of changes and the newest one, in a sentence or two; or why there is none."""
        if not self.series:
            return f"No run has figures. Import runs with {_IMPORT}."
        num_long_enough = sum(series.is_long_enough for series in self.series)
        if not num_long_enough:
            longest = max(len(series.nights) for series in self.series)
            return (
                f"{counted(len(self.series), 'trend')}, none long enough: a change point needs {MIN_NIGHTS} nights, "
                f"the longest has {longest}. Import further nights with {_IMPORT}."
            )
        sentences = [f"Nothing changed in {counted(num_long_enough, 'trend')}."]
        if self.changes:
            series, change = self.changes[0]
            sentences = [
                f"{self._counts()} in {counted(num_long_enough, 'trend')}.",
                f"Newest: {series.subject} {change_cell(change.ratio)} {change.since}, {series.point}.",
            ]
            if self.open_regressions:
                sentences.append(f"Not acknowledged: {len(self.open_regressions)}.")
        num_short = len(self.series) - num_long_enough
        if num_short:
            sentences.append(f"{num_short} more {plural('trend', num_short)}: fewer than {MIN_NIGHTS} nights.")
        return " ".join(sentences)

    def _counts(self) -> str:
        counts = Counter[str](row.change.kind for row in self.changes)
        kinds = (TREND["worse"].word, TREND["better"].word)
        return " and ".join(counted(counts[kind], kind) for kind in kinds if counts[kind])


def trends_of(
    entries: Iterable[HistoryEntry], metrics: Sequence[str] = FOLLOWED, acknowledged: Sequence[Acknowledgement] = ()
) -> TrendsReport:
    """Returns the report of a history; metrics are names of `dlbench.analysis.metrics.METRICS`."""
    entries = list(entries)
    runs, damaged = dated(entries), damaged_runs(entries)
    with_figures = [run for run in runs if run.group and run.figures]
    return TrendsReport(
        as_of=max((run.finished for run in with_figures), default=""),
        num_runs=len(with_figures),
        num_without=len(entries) - len(with_figures),
        series=tuple(trends(runs, [metric for metric in METRICS if metric.name in metrics], acknowledged)),
        nodes=slow_months(runs, damaged),
        damaged=damaged,
        methods=definitions(
            "history",
            min_evidence=MIN_EVIDENCE,
            min_effect=MIN_EFFECT,
            min_segment=MIN_SEGMENT,
            max_outliers=MAX_OUTLIERS,
            min_nights=MIN_NIGHTS,
            min_drift=MIN_DRIFT,
            shape_factor=SHAPE_FACTOR,
            usual_probability=1 - NAMED,
            min_sessions=MIN_SESSIONS,
            slow=SLOW,
            slow_excess=SLOW - 1,
            false_share=FALSE_SHARE,
            recent_days=RECENT_DAYS,
        ),
    )


def list_document(entries: Sequence[HistoryEntry]) -> Document:
    """Returns the runs by label, in the order in which labels first appear; its table is `runs`."""
    entries_by_label: dict[str, list[HistoryEntry]] = {}
    for entry in entries:
        entries_by_label.setdefault(entry.label, []).append(entry)
    sections = []
    for number, (label, labelled) in enumerate(entries_by_label.items()):
        lines = [f"- {entry.run_id}: {'; '.join(_facts(entry))}" for entry in labelled]
        sections.append(Section(id=f"label-{number}", title=label or "runs that cannot be read", brief=tuple(lines)))
    num_valid = sum(entry.state == "valid" for entry in entries)
    runs: Sheet[Any] = Sheet(name="runs", title="Runs", columns=COLUMNS, rows=entries, is_shown=lambda entry: False)
    total = f"{runs_text(len(entries))}, {num_valid} valid; step: median of the run"
    sections.append(Section(id="runs", title="In all", sheets=(runs,), brief=(total,)))
    return Document(title="dlbench history: runs", sections=tuple(sections), data=entries)


def to_json(entries: Sequence[HistoryEntry]) -> str:
    """Returns all fields of the index for each run; no text is changed."""
    content = {"format": "dlbench.history-list", "version": 1, "runs": [entry.to_dict() for entry in entries]}
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _facts(entry: HistoryEntry) -> Iterator[str]:
    moment = (entry.finished or entry.created)[:MINUTE].replace("T", " ")
    yield f"{moment} UTC" if moment else "date unknown"
    if "step_median_s" in entry.figures:
        yield f"step {format_seconds(entry.figures['step_median_s'])}"
    else:
        yield f"{entry.state}: {entry.why}"
    if entry.ranks:
        text = place_text(entry.ranks, entry.nodes)
        if entry.hosts:
            text += f" ({first_of([host.host for host in entry.hosts], MAX_LISTED_HOSTS)})"
        yield text
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"


class NightOfSeries(NamedTuple):
    """A night, the series that has it, and its level in words."""

    series: Trend
    night: Night
    level: str

    @property
    def median(self) -> str:
        return amount_text(self.night.value, self.series.unit)

    @property
    def num_runs(self) -> int:
        return len(self.night.values)

    @property
    def runs(self) -> str:
        return ", ".join(amount_text(value, self.series.unit) for value in self.night.values)


class HostInMonth(NamedTuple):
    """A host in one of its months."""

    host: HostCourse
    month: HostMonth


def _of_series(of: Callable[[Any], Trend] | None = None) -> tuple[Column[Any], ...]:
    names = ("group", "label", "system", "workload", "preset", "engine", "ranks", "nodes", "metric", "unit")
    return columns_of(Trend, "series_id=id", *names, of=of)


def _environment(row: ChangeOfSeries) -> str:
    return "; ".join(row.change.environment)


def _acknowledgement(row: ChangeOfSeries) -> str | None:
    return row.series.acknowledgement(row.change) or None


def changes_sheet(report: TrendsReport) -> Sheet[Any]:
    """Returns the change points with the differences at each, newest first."""
    return Sheet(
        name="changes",
        title="All change points",
        columns=(
            *_of_series(attrgetter("series")),
            Column("", "Change", attrgetter("change.words")),
            *columns_of(Change, "kind", "shape", "time", "last_before", "first_after", of=attrgetter("change")),
            Column("", "Between", attrgetter("change.days")),
            Column("", "Metric", attrgetter("series.subject")),
            *columns_of(
                Change,
                *("ratio", "before", "after", "nights_before=before.n", "nights_after=after.n", "evidence"),
                *("commits_before", "commits_after", Column("", "Code", attrgetter("commits")), "differences"),
                of=attrgetter("change"),
            ),
            Column("", "Also differs", _environment),
            *columns_of(Change, "new_hosts", "removed_hosts", "acknowledged", of=attrgetter("change")),
            Column("", "Acknowledged", _acknowledgement),
            Column("", "Trend", attrgetter("series.point")),
        ),
        rows=report.changes,
        caption=f"Newest first. Ratio: level after over level before; {_BASIS}. A difference is a hint, not a proven "
        "cause.",
        is_sortable=True,
    )


def _changes_cell(series: Trend) -> int | str:
    return len(series.changes) if series.is_long_enough else "too few nights"


def series_sheet(report: TrendsReport) -> Sheet[Any]:
    """Returns the series with their present level."""
    return Sheet(
        name="series",
        title="All trends",
        columns=(
            Column("", "Metric", attrgetter("subject")),
            Column("", "System", attrgetter("system")),
            *_of_series(),
            *columns_of(Trend, "nights", "num_runs"),
            *columns_of(LevelStretch, "first", of=lambda trend: trend.levels[0]),
            *columns_of(
                LevelStretch, "last", "value", "level_interval=basis", "level_nights=num_nights", of=attrgetter("level")
            ),
            Column("changes", "Changes", attrgetter("num_changes"), _changes_cell),
            Column("standing", "Standing", attrgetter("standing")),
            Column("newest_beyond", "", lambda trend: trend.newest.num_outside if trend.newest else 0),
            *columns_of(Trend, "newest_ratio=newest.ratio", "wait_for=newest.wait_for", "verdict"),
            Column("", "Trend", attrgetter("point")),
        ),
        rows=report.by_newest_change,
        caption=f"{_BASIS.capitalize()}.",
        is_sortable=True,
    )


def nights_sheet(series: Sequence[Trend], *, is_for_people: bool) -> Sheet[Any]:
    """Returns every night of some series; people see the table with the chart of a series."""
    rows: list[NightOfSeries] = []
    for trend in series:
        levels = [level_text(level.value) for level in trend.levels]
        rows += [NightOfSeries(trend, night, levels[night.level]) for night in trend.nights]
    return Sheet(
        name="nights",
        title="Nights",
        columns=(
            *_of_series(attrgetter("series")),
            *columns_of(Night, "time", "series", of=attrgetter("night")),
            Column("value", "Median", attrgetter("night.value"), attrgetter("median")),
            Column("runs", "Runs", attrgetter("num_runs"), attrgetter("runs")),
            Column("level_number", "Level", attrgetter("night.level"), attrgetter("level")),
            *columns_of(Night, "commits", "hosts", of=attrgetter("night")),
        ),
        rows=tuple(rows),
        is_shown=lambda row: is_for_people,
    )


def hosts_sheet(nodes: SlowMonths, hosts: Sequence[HostCourse], most_months: int | None = MAX_MONTHS) -> Sheet[Any]:
    """Returns the present state of hosts, with the newest months; for programs a row for each host and month."""
    rows: list[HostInMonth] = []
    for host in hosts:
        rows += [HostInMonth(host, month) for month in host.months]
    columns: tuple[Column[HostInMonth], ...] = (
        *columns_of(HostCourse, "host", of=attrgetter("host")),
        *columns_of(
            HostMonth,
            *("month", "ratio", "nights=ratio.n", "interval=ratio.kind", "later", "verdict"),
            of=attrgetter("month"),
        ),
        *columns_of(
            HostCourse,
            *("verdict", "current", Column("", "Interval", attrgetter("basis")), "later", "since", "num_nights"),
            of=attrgetter("host"),
        ),
        *(_month_column(month) for month in nodes.months[-(most_months or len(nodes.months)) :]),
    )
    return Sheet(
        name="hosts",
        title="Nodes over months",
        columns=columns,
        rows=tuple(rows),
        caption="Ratio: own work of a host's slowest rank over that of the other hosts' slowest ranks, means over "
        "nights; 1: as fast as the others. Leaves later: share of a step by which its exchanges end after the others'. "
        "In brackets: 95 % interval (Student t) over nights, or the range of fewer than five.",
        # The tables for people have one line for each host.
        is_shown=lambda row: row.month is row.host.months[-1],
        in_terminal=True,
        is_sortable=True,
        max_rows=MAX_ROWS,
    )


def _month_column(month: str) -> Column[HostInMonth]:
    def ratio(row: HostInMonth) -> Estimate | None:
        return next((host_month.ratio for host_month in row.host.months if host_month.month == month), None)

    def cell(row: HostInMonth) -> Cell | None:
        figure = ratio(row)
        return None if figure is None else ratio_cell(figure)

    return Column("", month, ratio, cell)
