"""Tables and charts of a history: change points, series, nights, hosts by month; the scaling report has some, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

from dlbench.analysis.metrics import METRICS
from dlbench.analysis.slow_nodes import ACCUSED
from dlbench.history.entry import HistoryEntry
from dlbench.history.report import (
    TrendsReport,
    acknowledged_text,
    amount_text,
    change_cell,
    change_text,
    commits_text,
    day,
    differences_text,
    evidence_text,
    kind_text,
    level_text,
    percent_change,
    point_text,
    ratio_cell,
)
from dlbench.history.series import Change, Level, Night, Trend
from dlbench.history.slow_months import HostCourse, HostMonth, SlowMonths
from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, finish, inline, tooltips
from dlbench.report.charts.style import HEIGHT, MEASURED, MUTED, RANK_COLOURS
from dlbench.report.document import Document, Section
from dlbench.report.table import Column, Sheet, columns_of, unit_cell
from dlbench.report.wording import basis_text, place_text, runs_text
from dlbench.units import format_seconds

MAX_LISTED_HOSTS = 4
MAX_COMMIT = 8  # Characters of a commit that are enough to know it; JSON and CSV hold all.
MINUTE = len("2026-03-04T02:06")


def _figure(name: str) -> Column[HistoryEntry]:
    return Column(name, "", lambda entry: entry.figures.get(name))


COLUMNS: tuple[Column[HistoryEntry], ...] = (
    *columns_of(
        HistoryEntry,
        *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
        *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest"),
        "why",
    ),
    Column("hosts", "", lambda entry: " ".join(host.host for host in entry.hosts)),
    Column("tags", "", lambda entry: json.dumps(dict(entry.tags), sort_keys=True)),
    *(_figure(metric.name) for metric in METRICS),
)
"""Hosts with blanks between, tags as JSON, figures in the units of their names."""


def list_document(entries: Sequence[HistoryEntry]) -> Document:
    """Each run under what is compared; its table is `runs`."""
    # Labels in the order in which they first come, not anew at every change between workloads.
    labels = list(dict.fromkeys(entry.label for entry in entries))
    valid = sum(entry.state == "valid" for entry in entries)
    runs: Sheet[Any] = Sheet(name="runs", title="Runs", columns=COLUMNS, rows=entries, is_shown=lambda entry: False)
    return Document(
        title="dlbench history: runs",
        sections=(
            *(
                Section(
                    id=f"label-{number}",
                    title=label or "runs that cannot be read",
                    brief=tuple(f"- {one.run_id}: {'; '.join(_facts(one))}" for one in entries if one.label == label),
                )
                for number, label in enumerate(labels)
            ),
            Section(
                id="runs",
                title="In all",
                sheets=(runs,),
                brief=(f"{runs_text(len(entries))}, {valid} valid; step: median of the run",),
            ),
        ),
        data=entries,
    )


def to_json(entries: Sequence[HistoryEntry]) -> str:
    """All that the index knows of each run; no text is changed."""
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
        hosts = [host.host for host in entry.hosts]
        more = f" and {len(hosts) - MAX_LISTED_HOSTS} more" if hosts[MAX_LISTED_HOSTS:] else ""
        named = ", ".join(hosts[:MAX_LISTED_HOSTS]) + more
        yield place_text(entry.ranks, entry.nodes) + (f" ({named})" if named else "")
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"


R = TypeVar("R")

TableName = Literal["changes", "series", "nights", "hosts"]

MAX_HOSTS = 50
MAX_MONTHS = 6  # Newest months shown side by side; CSV and JSON hold all.
MAX_NAMED_HOSTS = 4
HOST_LENGTH = 253  # Characters of a name that DNS takes.
_BASIS = (
    "levels are medians over nights, a night is the median of its runs; in brackets intervals over nights (order "
    "statistics)"
)


class HostRow(NamedTuple):
    """A host in one of its months."""

    host: HostCourse
    month: HostMonth


def _of_series(of: Callable[[R], Trend] | None = None) -> tuple[Column[R], ...]:
    """What every row says of its series, for programs."""
    names = ("group", "label", "system", "workload", "preset", "engine", "ranks", "nodes", "metric", "unit")
    return columns_of(Trend, "series_id=id", *(f"{name}={name}" for name in names), of=of)


CHANGE_COLUMNS: tuple[Column[tuple[Trend, Change]], ...] = (
    *_of_series(lambda row: row[0]),
    Column("kind", "Change", lambda row: row[1].kind, lambda row: kind_text(row[1])),
    *columns_of(Change, "shape=shape", of=lambda row: row[1]),
    Column("time", "First night after", lambda row: row[1].time, lambda row: day(row[1].time)),
    *columns_of(Change, "last_before=last_before", "first_after=first_after", of=lambda row: row[1]),
    Column("", "Between", lambda row: f"{day(row[1].last_before)}, {day(row[1].first_after)}"),
    Column("", "Metric", lambda row: row[0].title.lower()),
    Column("ratio", "Ratio", lambda row: row[1].ratio, lambda row: change_cell(row[1].ratio), has_interval=True),
    Column("before", "From", lambda row: row[1].before, lambda row: unit_cell(row[1].before), has_interval=True),
    Column("after", "To", lambda row: row[1].after, lambda row: unit_cell(row[1].after), has_interval=True),
    *columns_of(Change, "nights_before=before.n", "nights_after=after.n", of=lambda row: row[1]),
    Column("evidence", "Evidence", lambda row: row[1].evidence, lambda row: evidence_text(row[1].evidence)),
    Column("commits_before", "", lambda row: " ".join(row[1].commits_before)),
    Column("commits_after", "", lambda row: " ".join(row[1].commits_after)),
    Column("", "Code", lambda row: commits_text(row[1])),
    Column(
        "differences",
        "Also differs",
        lambda row: " | ".join(f"{one.key}: {one.before} -> {one.after}" for one in row[1].differences),
        lambda row: "; ".join(differences_text(row[1])),
    ),
    Column("new_hosts", "", lambda row: " ".join(row[1].new_hosts)),
    Column("gone_hosts", "", lambda row: " ".join(row[1].gone_hosts)),
    Column(
        "acknowledged",
        "Acknowledged",
        lambda row: row[1].acknowledged.reason if row[1].acknowledged else "",
        lambda row: acknowledged_text(*row) or None,
    ),
    Column("", "Series", lambda row: point_text(row[0])),
)

SERIES_COLUMNS: tuple[Column[Trend], ...] = (
    Column("", "Metric", lambda series: series.title.lower()),
    Column("", "System", lambda series: series.system),
    *_of_series(),
    Column("num_nights", "Nights", lambda series: len(series.nights)),
    Column("num_runs", "Runs", lambda series: series.num_runs),
    Column("first", "From", lambda series: series.nights[0].time, lambda series: day(series.nights[0].time)),
    Column("last", "To", lambda series: series.nights[-1].time, lambda series: day(series.nights[-1].time)),
    Column(
        "level",
        "Level now",
        lambda series: series.levels[-1].value,
        lambda series: unit_cell(series.levels[-1].value),
        has_interval=True,
    ),
    Column("level_interval", "", lambda series: basis_text(series.levels[-1].value, "night")),
    Column("level_nights", "", lambda series: series.levels[-1].num_nights),
    Column(
        "changes",
        "Changes",
        lambda series: len(series.changes) if series.is_long_enough else None,
        lambda series: len(series.changes) if series.is_long_enough else "too few nights",
    ),
    Column("standing", "Standing", lambda series: series.standing),
    Column("newest_beyond", "", lambda series: series.newest.num_beyond if series.newest else 0),
    *columns_of(Trend, "newest_ratio=newest.ratio", "wait_for=newest.wait_for", "verdict=verdict"),
    Column("", "Series", point_text),
)

NIGHT_COLUMNS: tuple[Column[tuple[Trend, Night]], ...] = (
    *_of_series(lambda row: row[0]),
    Column("time", "Night", lambda row: row[1].time),
    Column("series", "", lambda row: row[1].series),
    Column("value", "Median", lambda row: row[1].value, lambda row: amount_text(row[1].value, row[0].unit)),
    Column(
        "runs",
        "Runs",
        lambda row: len(row[1].values),
        lambda row: ", ".join(amount_text(value, row[0].unit) for value in row[1].values),
    ),
    Column(
        "level_number", "Level", lambda row: row[1].level, lambda row: level_text(row[0].levels[row[1].level].value)
    ),
    Column("commits", "Commit", lambda row: " ".join(row[1].commits), lambda row: ", ".join(row[1].commits) or None),
    Column("hosts", "Hosts", lambda row: " ".join(row[1].hosts), lambda row: _hosts(row[1])),
)


def changes_sheet(report: TrendsReport) -> Sheet[Any]:
    """Change points with what differs at each, newest first."""
    return Sheet(
        name="changes",
        title="All change points",
        columns=CHANGE_COLUMNS,
        rows=report.changes,
        caption=f"Newest first. Ratio: level after over level before; {_BASIS}. What differs is a place to look, not a "
        "proven cause.",
        is_sortable=True,
    )


def series_sheet(report: TrendsReport) -> Sheet[Any]:
    """Series as they stand now."""
    return Sheet(
        name="series",
        title="All series",
        columns=SERIES_COLUMNS,
        rows=report.by_newest_change,
        caption=f"{_BASIS.capitalize()}.",
        is_sortable=True,
    )


def nights_sheet(series: Sequence[Trend], *, is_for_people: bool) -> Sheet[Any]:
    """Every night of some series; people see them with the chart of a series."""
    return Sheet(
        name="nights",
        title="Nights",
        columns=NIGHT_COLUMNS,
        rows=tuple((one, night) for one in series for night in one.nights),
        is_shown=lambda row: is_for_people,
    )


def hosts_sheet(nodes: SlowMonths, hosts: Sequence[HostCourse], most_months: int | None = MAX_MONTHS) -> Sheet[Any]:
    """Hosts as they are now, slow ones first, with the newest months; for programs a row for each host and month."""
    columns: tuple[Column[HostRow], ...] = (
        Column("host", "Host", lambda row: row.host.host, is_brief=True, limit=HOST_LENGTH),
        *columns_of(
            HostMonth,
            *("month", "ratio", "nights=ratio.n", "interval=ratio.kind", "later", "verdict"),
            of=lambda row: row.month,
        ),
        Column("now", "Now", lambda row: row.host.verdict, is_brief=True),
        Column(
            "current",
            "Ratio",
            lambda row: row.host.current,
            lambda row: ratio_cell(row.host.current),
            has_interval=True,
            is_brief=True,
        ),
        Column("", "Interval", lambda row: None if row.host.current is None else basis_text(row.host.current, "night")),
        Column(
            "current_later",
            "Leaves later",
            lambda row: row.host.later,
            lambda row: None if row.host.later is None else unit_cell(row.host.later),
            has_interval=True,
        ),
        Column("since", "Since", lambda row: row.host.since, lambda row: day(row.host.since) or None, is_brief=True),
        Column("", "Nights", lambda row: row.host.num_nights, is_brief=True),
        *(_month_column(month) for month in nodes.months[-(most_months or len(nodes.months)) :]),
    )
    return Sheet(
        name="hosts",
        title="Nodes over months",
        columns=columns,
        rows=tuple(HostRow(host, one) for host in hosts for one in host.months),
        caption="Ratio: own work of a host's slowest rank over that of the other hosts' slowest ranks, means over "
        "nights; 1: as fast as the others. Leaves later: share of a step by which its exchanges end after the others'. "
        "In brackets 95 % (Student t) over nights, or ranges of fewer than five.",
        # People get one line for each host.
        is_shown=lambda row: row.month is row.host.months[-1],
        in_terminal=True,
        is_sortable=True,
        max_rows=MAX_HOSTS,
    )


def _month_column(month: str) -> Column[HostRow]:
    def ratio(row: HostRow) -> Any:
        return next((ratio_cell(one.ratio) for one in row.host.months if one.month == month), None)

    return Column("", month, ratio)


def _hosts(night: Night) -> str | None:
    names = night.hosts
    return str(len(names)) if len(names) > MAX_NAMED_HOSTS else ", ".join(names) or None


WIDTH = 1000  # Plot width of a series over time, pixels.
MAX_DRAWN_HOSTS = 6

MAX_POINTS = 1_500  # Runs drawn one by one; of a longer series the nights are drawn.
MAX_NIGHTS = 600
"""Nights in a chart and its table; of a longer series the one with the lowest and the one with the highest value of
each of equally many stretches, so that none that is far off is missing."""
_KINDS = {"regression": ("#d55e00", "triangle-up"), "improvement": ("#009e73", "triangle-down")}
"""Colour and shape of each kind of change."""
_LEVEL_COLOUR = "#e69f00"


def series_chart(series: Trend) -> Chart:
    """Runs over time, levels as lines with their intervals, changes as labelled vertical rules."""
    series = dataclasses.replace(series, nights=_drawn(series))
    factor, unit = 1.0, series.unit
    largest = max(night.value for night in series.nights)
    if unit == "s" and largest < 1:
        factor, unit = (1e3, "ms") if largest >= 1e-3 else (1e6, "µs")
    points, levels = _points(series, factor), [_level(level, factor) for level in series.levels]
    values = [row["value"] for row in points] + [row[end] for row in levels for end in ("low", "high", "at_first")]
    room = (max(values) - min(values)) * 0.12 or max(values) * 0.05
    domain = [min(values) - room, max(values) + 2 * room]
    changes = [
        {
            "time": change.time,
            "kind": change.kind,
            "label": percent_change(change.ratio.value),
            "shown": change_text(change.ratio),
            "commit": commits_text(change),
            "top": domain[1],
        }
        for change in series.changes
    ]
    y = alt.Y("value:Q", title=f"{series.title.lower()}, {unit}").scale(domain=domain, nice=False, zero=False)
    base = alt.Chart(alt.InlineData(values=levels)).encode(x=_time(alt, "first"), x2="last")
    rule = base.mark_rule(color=_LEVEL_COLOUR, strokeWidth=3).encode(y=alt.Y("at_first:Q"), y2="value:Q")
    mark = alt.Chart(inline(points)).mark_point(filled=True, size=18, opacity=0.75, color=MEASURED)
    tooltip = {"run:N": "run", "shown:N": "value", "time:N": "finished", "commit:N": "commit", "hosts:N": "hosts"}
    layers = [
        base.mark_rect(color=_LEVEL_COLOUR, opacity=0.3).encode(y=alt.Y("low:Q"), y2="high:Q"),
        rule.encode(tooltip=tooltips({"shown:N": "level", "basis:N": "interval"})),
        mark.encode(x=_time(alt), y=y, tooltip=tooltips(tooltip)),
        *(_change_layers(alt, changes) if changes else []),
    ]
    return finish(
        alt.layer(*layers),
        series,
        name="trend",
        title=f"{series.title} over time",
        alt=f"{series.label}. {series.verdict}",
        table=nights_sheet((series,), is_for_people=True),
        size=(WIDTH, HEIGHT),
    )


def _drawn(series: Trend) -> tuple[Night, ...]:
    nights, changed = series.nights, {change.time for change in series.changes}
    if len(nights) <= MAX_NIGHTS:
        return nights
    edges = [round(2 * len(nights) * place / MAX_NIGHTS) for place in range(MAX_NIGHTS // 2 + 1)]
    places = {
        end(range(*between), key=lambda at: nights[at].value) for between in pairwise(edges) for end in (min, max)
    }
    places |= {at for at, night in enumerate(nights) if night.time in changed} | {len(nights) - 1}
    return tuple(nights[place] for place in sorted(places))


def _time(alt: Any, name: str = "time") -> Any:
    # UTC, so that the page says the same in every country.
    x = alt.X(f"{name}:T", title="end of the night's last run, UTC")
    return x.scale(type="utc").axis(format="%d %b %Y", grid=False)


def _points(series: Trend, factor: float) -> Rows:
    by_run = series.num_runs <= MAX_POINTS
    rows: Rows = []
    for night in series.nights:
        common = {
            "time": night.time,
            "commit": ", ".join(night.commits) or "not known",
            "hosts": ", ".join(night.hosts[:4]) + (" ..." if len(night.hosts) > 4 else ""),
        }
        pairs = zip(night.run_ids, night.values, strict=True) if by_run else [(night.series, night.value)]
        rows += [
            {**common, "run": name, "value": value * factor, "shown": amount_text(value, series.unit)}
            for name, value in pairs
        ]
    return rows


def _level(level: Level, factor: float) -> dict[str, Any]:
    value = level.value.value
    # The interval of a drift is that of its last night: no band.
    low, high = (value, value) if level.is_drift else (level.value.low, level.value.high)
    return {
        "first": level.first,
        "last": level.last,
        "value": value * factor,
        "at_first": level.at_first * factor,
        "low": factor * (value if low is None else low),
        "high": factor * (value if high is None else high),
        "shown": level_text(level.value) + " at its end" * level.is_drift,
        "basis": basis_text(level.value, "night"),
    }


def _change_layers(alt: Any, changes: Rows) -> list[Any]:
    base = alt.Chart(alt.InlineData(values=changes)).encode(x=_time(alt))
    kinds = list(_KINDS)
    colours, shapes = map(list, zip(*_KINDS.values(), strict=True))
    legend: dict[str, Any] = {"orient": "bottom", "symbolSize": 90}
    colour = alt.Color("kind:N", title=None).scale(domain=kinds, range=colours).legend(**legend)
    shape = alt.Shape("kind:N", title=None).scale(domain=kinds, range=shapes).legend(**legend)
    tooltip = tooltips({"kind:N": "change", "shown:N": "by", "time:N": "first night after", "commit:N": "code"})
    point = base.mark_point(filled=True, size=110, opacity=1, yOffset=7)
    text = base.mark_text(align="left", baseline="top", dx=9, dy=1, fontSize=12, color=MUTED)
    return [
        base.mark_rule(strokeDash=[4, 3], color=MUTED),
        point.encode(y=alt.Y("top:Q"), color=colour, shape=shape, tooltip=tooltip),
        text.encode(y=alt.Y("top:Q"), text="label:N"),
    ]


def host_charts(nodes: SlowMonths) -> list[Chart]:
    """Work ratios of the slowest hosts by month; none where fewer than two months are known."""
    drawn = [host for host in nodes.hosts if host.verdict in (*ACCUSED, "suspected")][:MAX_DRAWN_HOSTS]
    if not drawn or len(nodes.months) < 2:
        return []
    rows = [_host_point(host.host, month) for host in drawn for month in host.months]
    names = [host.host for host in drawn]
    shapes = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
    legend: dict[str, Any] = {"orient": "bottom", "symbolSize": 70}
    colours = list(RANK_COLOURS[: len(names)])
    colour = alt.Color("host:N", title=None).scale(domain=names, range=colours).legend(**legend)
    shape = alt.Shape("host:N", title=None).scale(domain=names, range=shapes[: len(names)]).legend(**legend)
    x = alt.X("month:O", title="month (UTC)", sort=list(nodes.months)).scale(domain=list(nodes.months))
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x.axis(labelAngle=0), color=colour)
    y = alt.Y("value:Q", title="own work, other hosts = 1").scale(zero=False)
    equal = alt.Chart(alt.InlineData(values=[{"one": 1.0}])).mark_rule(color=MUTED, strokeDash=[5, 4])
    tooltip = tooltips({"host:N": "host", "month:N": "month", "shown:N": "ratio", "basis:N": "interval"})
    layers = [
        equal.encode(y=alt.Y("one:Q")),
        base.mark_line(strokeWidth=1.5).encode(y=y),
        base.mark_rule(strokeWidth=3, opacity=0.4).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_point(filled=True, size=60, opacity=1).encode(y=y, shape=shape, tooltip=tooltip),
    ]
    words = "; ".join(f"{host.host}: {ratio_cell(host.current)}" for host in drawn if host.current)
    chart = finish(
        alt.layer(*layers),
        ReportSubject("nodes", "Mean over the nights of a month; 1: as fast as the others; bars: intervals"),
        name="hosts",
        title="Own work of slow hosts by month",
        alt=f"Own work relative to the other hosts of the same runs, now: {words}; since {day(drawn[0].since)} for "
        f"{drawn[0].host}.",
        table=hosts_sheet(nodes, drawn, most_months=None),
        size=(WIDTH, HEIGHT),
    )
    return [chart]


def _host_point(host: str, month: HostMonth) -> dict[str, Any]:
    ratio = month.ratio
    return {
        "host": host,
        "month": month.month,
        "value": ratio.value,
        "low": ratio.value if ratio.low is None else ratio.low,
        "high": ratio.value if ratio.high is None else ratio.high,
        "shown": str(ratio_cell(ratio)),
        "basis": basis_text(ratio, "night"),
    }
