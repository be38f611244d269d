"""Tables of a history: change points, series, nights, hosts by month."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from dlbench.history.report import ChangeOfSeries, TrendsReport
from dlbench.history.series import Change, LevelStretch, Night, Trend
from dlbench.history.slow_months import HostCourse, HostMonth, SlowMonths
from dlbench.history.words import amount_text, level_text, ratio_cell
from dlbench.report.table import Cell, Column, Sheet, columns_of
from dlbench.stats.estimates import Estimate

TableName = Literal["changes", "series", "nights", "hosts"]

MAX_ROWS = 50  # Hosts in a page and in the terminal; CSV and JSON have all.
MAX_MONTHS = 6  # Newest months that have a column; CSV and JSON have all.
_BASIS = (
    "levels are medians over nights, a night is the median of its runs; in brackets intervals over nights (order "
    "statistics)"
)


class NightOfSeries(NamedTuple):
    """A night, and the series that has it."""

    series: Trend
    night: Night

    @property
    def median(self) -> str:
        return amount_text(self.night.value, self.series.unit)

    @property
    def num_runs(self) -> int:
        return len(self.night.values)

    @property
    def runs(self) -> str:
        return ", ".join(amount_text(value, self.series.unit) for value in self.night.values)

    @property
    def level(self) -> str:
        return level_text(self.series.levels[self.night.level].value)


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
            *columns_of(LevelStretch, "first", of=attrgetter("first_level")),
            *columns_of(
                LevelStretch, "last", "value", "level_interval=basis", "level_nights=num_nights", of=attrgetter("level")
            ),
            Column("changes", "Changes", attrgetter("num_changes"), _changes_cell),
            Column("standing", "Standing", attrgetter("standing")),
            Column("newest_beyond", "", attrgetter("num_newest_outside")),
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
        rows += [NightOfSeries(trend, night) for night in trend.nights]
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
        return row.host.ratio_of(month)

    def cell(row: HostInMonth) -> Cell | None:
        figure = ratio(row)
        return None if figure is None else ratio_cell(figure)

    return Column("", month, ratio, cell)
