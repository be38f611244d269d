"""Tables and charts of a history: change points, series, nights, hosts by month; the scaling report has some, too."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
from dlbench.history.series import Change, Night, Trend
from dlbench.history.slow_months import HostCourse, HostMonth, SlowMonths
from dlbench.reading.metrics import METRICS
from dlbench.reading.slow_nodes import ACCUSED
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, MEASURED, MUTED, RANK_COLOURS
from dlbench.report.document import Document, Section
from dlbench.report.table import Column, Sheet, unit_cell
from dlbench.report.wording import basis_text, place_text, runs_text
from dlbench.units import format_seconds

MAX_LISTED_HOSTS = 4
MAX_COMMIT = 8
"""Characters of a commit that tell it from others; JSON and CSV hold all."""
MINUTE = len("2026-03-04T02:06")


def _plain(name: str) -> Column[HistoryEntry]:
    return Column(name, "", lambda entry: getattr(entry, name))


def _figure(name: str) -> Column[HistoryEntry]:
    return Column(name, "", lambda entry: entry.figures.get(name))


_NAMES = (
    *("run_id", "state", "finished", "created", "series", "repeat", "side", "variant", "group", "label", "system"),
    *("workload", "preset", "engine", "ranks", "nodes", "slurm_job_id", "commit", "folder", "content_digest", "why"),
)

COLUMNS: tuple[Column[HistoryEntry], ...] = (
    *map(_plain, _NAMES),
    Column("hosts", "", lambda entry: " ".join(host.host for host in entry.hosts)),
    Column("dropped", "", lambda entry: " ".join(entry.dropped)),
    Column("tags", "", lambda entry: json.dumps(dict(entry.tags), sort_keys=True)),
    *(_figure(metric.name) for metric in METRICS),
)
"""Hosts and dropped kinds with blanks between, tags as JSON, figures in the units of their names."""


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
                    brief=tuple(_line(entry) for entry in entries if entry.label == label),
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


def _line(entry: HistoryEntry) -> str:
    return f"- {entry.run_id}: {'; '.join(_facts(entry))}"


def _facts(entry: HistoryEntry) -> Iterator[str]:
    moment = (entry.finished or entry.created)[:MINUTE].replace("T", " ")
    yield f"{moment} UTC" if moment else "date unknown"
    if "step_median_s" in entry.figures:
        yield f"step {format_seconds(entry.figures['step_median_s'])}"
    else:
        yield f"{entry.state}: {entry.why}"
    if entry.ranks:
        hosts = [host.host for host in entry.hosts]
        named = ", ".join(hosts[:MAX_LISTED_HOSTS]) + (
            f" and {len(hosts) - MAX_LISTED_HOSTS} more" if hosts[MAX_LISTED_HOSTS:] else ""
        )
        yield place_text(entry.ranks, entry.nodes) + (f" ({named})" if named else "")
    if entry.slurm_job_id:
        yield f"Slurm job {entry.slurm_job_id}"
    if entry.commit:
        yield f"commit {entry.commit[:MAX_COMMIT]}"
    if entry.dropped:
        yield f"without {', '.join(entry.dropped)}"


R = TypeVar("R")

TableName = Literal["changes", "series", "nights", "hosts"]
"""Tables for programs."""

MAX_HOSTS = 50
"""Hosts that people see; the CSV holds all."""
MAX_MONTHS = 6
"""Newest months shown side by side; CSV and JSON hold all."""
MAX_NAMED_HOSTS = 4
HOST_LENGTH = 253
"""Characters of a name that DNS takes."""

_BASIS = (
    "levels are medians over nights, a night is the median of its runs; in brackets intervals over nights (order "
    "statistics)"
)


@dataclass(frozen=True)
class HostRow:
    """A host in one of its months."""

    host: HostCourse
    month: HostMonth

    @property
    def is_newest(self) -> bool:
        """Whether it is the host's newest month: people get one line for each host."""
        return self.month is self.host.months[-1]

    def ratio_in(self, month: str) -> HostMonth | None:
        """The same host in another month."""
        return next((one for one in self.host.months if one.month == month), None)


def _of_series(series: Callable[[R], Trend]) -> tuple[Column[R], ...]:
    """What every row says of its series, for programs."""

    def column(name: str, attribute: str) -> Column[R]:
        return Column(name, "", lambda row: getattr(series(row), attribute))

    names = ("group", "label", "system", "workload", "preset", "engine", "ranks", "nodes", "metric", "unit")
    return (column("series_id", "id"), *(column(name, name) for name in names))


CHANGE_COLUMNS: tuple[Column[tuple[Trend, Change]], ...] = (
    *_of_series(lambda row: row[0]),
    Column("kind", "Change", lambda row: row[1].kind, lambda row: kind_text(row[1])),
    Column("shape", "", lambda row: row[1].shape),
    Column("time", "First night after", lambda row: row[1].time, lambda row: day(row[1].time)),
    Column("last_before", "", lambda row: row[1].last_before),
    Column("first_after", "", lambda row: row[1].first_after),
    Column("", "Between", lambda row: f"{day(row[1].last_before)}, {day(row[1].first_after)}"),
    Column("", "Metric", lambda row: row[0].title.lower()),
    Column("ratio", "Ratio", lambda row: row[1].ratio, lambda row: change_cell(row[1].ratio), has_interval=True),
    Column("before", "From", lambda row: row[1].before, lambda row: unit_cell(row[1].before), has_interval=True),
    Column("after", "To", lambda row: row[1].after, lambda row: unit_cell(row[1].after), has_interval=True),
    Column("nights_before", "", lambda row: row[1].before.n),
    Column("nights_after", "", lambda row: row[1].after.n),
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
    *_of_series(lambda series: series),
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
    Column("newest_ratio", "", lambda series: series.newest.ratio if series.newest else None),
    Column("wait_for", "", lambda series: series.newest.wait_for if series.newest else None),
    Column("verdict", "", lambda series: series.verdict),
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
    Column("level_number", "Level", lambda row: row[1].level, lambda row: _level(*row)),
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
    """Every night of some series; people see them beside the chart of a series."""
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
        Column("month", "", lambda row: row.month.month),
        Column("ratio", "", lambda row: row.month.ratio, has_interval=True),
        Column("nights", "", lambda row: row.month.ratio.n),
        Column("interval", "", lambda row: row.month.ratio.kind),
        Column("later", "", lambda row: row.month.later, has_interval=True),
        Column("verdict", "", lambda row: row.month.verdict),
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
        rows=tuple(itertools.chain.from_iterable((HostRow(host, one) for one in host.months) for host in hosts)),
        caption="Ratio: own work of a host's slowest rank over that of the other hosts' slowest ranks, means over "
        "nights; 1: as fast as the others. Leaves later: share of a step by which its exchanges end after the others'. "
        "In brackets 95 % (Student t) over nights, or ranges of fewer than five.",
        is_shown=lambda row: row.is_newest,
        in_terminal=True,
        is_sortable=True,
        max_rows=MAX_HOSTS,
    )


def _month_column(month: str) -> Column[HostRow]:
    def ratio(row: HostRow) -> Any:
        found = row.ratio_in(month)
        return None if found is None else ratio_cell(found.ratio)

    return Column("", month, ratio)


def _level(series: Trend, night: Night) -> str:
    return level_text(series.levels[night.level].value)


def _hosts(night: Night) -> str | None:
    names = night.hosts
    return str(len(names)) if len(names) > MAX_NAMED_HOSTS else ", ".join(names) or None


WIDTH = 1000
"""Plot width of a series over time, pixels."""

MAX_DRAWN_HOSTS = 6
"""Hosts drawn; all stand in the table."""

MAX_POINTS = 1_500
"""Runs drawn one by one; of a longer series the nights are drawn."""

KINDS = ("regression", "improvement")
_KIND_COLOURS = ["#d55e00", "#009e73"]
_KIND_SHAPES = ["triangle-up", "triangle-down"]
_LEVEL_COLOUR = "#e69f00"


def series_chart(series: Trend) -> Chart:
    """Runs over time, levels as lines with their intervals, changes as labelled vertical rules."""
    import altair as alt

    factor, unit = _scale(series)
    points, levels, changes = _points(series, factor), _levels(series, factor), _changes(series)
    values = [row["value"] for row in points] + [row[end] for row in levels for end in ("low", "high", "at_first")]
    room = (max(values) - min(values)) * 0.12 or max(values) * 0.05
    domain = [min(values) - room, max(values) + 2 * room]
    for row in changes:
        row["top"] = domain[1]
    y = alt.Y("value:Q", title=f"{series.title.lower()}, {unit}").scale(domain=domain, nice=False, zero=False)
    layers = [
        *_level_layers(alt, levels),
        _point_layer(alt, points, y),
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


def _x(alt: Any, name: str = "time") -> Any:
    # UTC, so that the page says the same in every country.
    return (
        alt.X(f"{name}:T", title="end of the night's last run, UTC")
        .scale(type="utc")
        .axis(format="%d %b %Y", grid=False)
    )


def _scale(series: Trend) -> tuple[float, str]:
    """What the axis multiplies values by, and its unit."""
    largest = max(night.value for night in series.nights)
    if series.unit != "s" or largest >= 1:
        return 1.0, series.unit
    return (1e3, "ms") if largest >= 1e-3 else (1e6, "µs")


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


def _levels(series: Trend, factor: float) -> Rows:
    return [
        {
            "first": level.first,
            "last": level.last,
            "value": level.value.value * factor,
            "at_first": level.at_first * factor,
            # The interval of a drift is that of its last night: no band.
            "low": factor * (level.value.value if level.value.low is None or level.is_drift else level.value.low),
            "high": factor * (level.value.value if level.value.high is None or level.is_drift else level.value.high),
            "shown": level_text(level.value) + " at its end" * level.is_drift,
            "basis": basis_text(level.value, "night"),
        }
        for level in series.levels
    ]


def _changes(series: Trend) -> Rows:
    return [
        {
            "time": change.time,
            "kind": change.kind,
            "label": percent_change(change.ratio.value),
            "shown": change_text(change.ratio),
            "commit": commits_text(change),
        }
        for change in series.changes
    ]


def _level_layers(alt: Any, levels: Rows) -> list[Any]:
    base = alt.Chart(alt.InlineData(values=levels)).encode(x=_x(alt, "first"), x2="last")
    return [
        base.mark_rect(color=_LEVEL_COLOUR, opacity=0.3).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_rule(color=_LEVEL_COLOUR, strokeWidth=3).encode(
            y=alt.Y("at_first:Q"),
            y2="value:Q",
            tooltip=[alt.Tooltip("shown:N", title="level"), alt.Tooltip("basis:N", title="interval")],
        ),
    ]


def _point_layer(alt: Any, points: Rows, y: Any) -> Any:
    return (
        alt.Chart(alt.InlineData(values=points))
        .mark_point(filled=True, size=18, opacity=0.75, color=MEASURED)
        .encode(
            x=_x(alt),
            y=y,
            tooltip=[
                alt.Tooltip("run:N", title="run"),
                alt.Tooltip("shown:N", title="value"),
                alt.Tooltip("time:N", title="finished"),
                alt.Tooltip("commit:N", title="commit"),
                alt.Tooltip("hosts:N", title="hosts"),
            ],
        )
    )


def _change_layers(alt: Any, changes: Rows) -> list[Any]:
    base = alt.Chart(alt.InlineData(values=changes)).encode(x=_x(alt))
    kinds = list(KINDS)
    legend: dict[str, Any] = {"orient": "bottom", "symbolSize": 90}
    colour = alt.Color("kind:N", title=None).scale(domain=kinds, range=_KIND_COLOURS).legend(**legend)
    shape = alt.Shape("kind:N", title=None).scale(domain=kinds, range=_KIND_SHAPES).legend(**legend)
    tooltip = [
        alt.Tooltip("kind:N", title="change"),
        alt.Tooltip("shown:N", title="by"),
        alt.Tooltip("time:N", title="first night after"),
        alt.Tooltip("commit:N", title="code"),
    ]
    return [
        base.mark_rule(strokeDash=[4, 3], color=MUTED),
        base.mark_point(filled=True, size=110, opacity=1, yOffset=7).encode(
            y=alt.Y("top:Q"), color=colour, shape=shape, tooltip=tooltip
        ),
        base.mark_text(align="left", baseline="top", dx=9, dy=1, fontSize=12, color=MUTED).encode(
            y=alt.Y("top:Q"), text="label:N"
        ),
    ]


def host_charts(nodes: SlowMonths) -> list[Chart]:
    """Work ratios of the slowest hosts by month; none where fewer than two months are known."""
    import altair as alt

    drawn = [host for host in nodes.hosts if host.verdict in (*ACCUSED, "suspected")][:MAX_DRAWN_HOSTS]
    if not drawn or len(nodes.months) < 2:
        return []
    rows = [_host_point(host, index) for host in drawn for index in range(len(host.months))]
    names = [host.host for host in drawn]
    shapes = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"]
    legend: dict[str, Any] = {"orient": "bottom", "symbolSize": 70}
    colour = (
        alt.Color("host:N", title=None).scale(domain=names, range=list(RANK_COLOURS[: len(names)])).legend(**legend)
    )
    shape = alt.Shape("host:N", title=None).scale(domain=names, range=shapes[: len(names)]).legend(**legend)
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("month:O", title="month (UTC)", sort=list(nodes.months))
        .scale(domain=list(nodes.months))
        .axis(labelAngle=0),
        color=colour,
    )
    y = alt.Y("value:Q", title="own work, other hosts = 1").scale(zero=False)
    equal = alt.Chart(alt.InlineData(values=[{"one": 1.0}])).mark_rule(color=MUTED, strokeDash=[5, 4])
    layers = [
        equal.encode(y=alt.Y("one:Q")),
        base.mark_line(strokeWidth=1.5).encode(y=y),
        base.mark_rule(strokeWidth=3, opacity=0.4).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_point(filled=True, size=60, opacity=1).encode(
            y=y,
            shape=shape,
            tooltip=[
                alt.Tooltip("host:N", title="host"),
                alt.Tooltip("month:N", title="month"),
                alt.Tooltip("shown:N", title="ratio"),
                alt.Tooltip("basis:N", title="interval"),
            ],
        ),
    ]
    words = "; ".join(f"{host.host}: {ratio_cell(host.current)}" for host in drawn if host.current)
    chart = finish(
        alt.layer(*layers),
        _Nodes(),
        name="hosts",
        title="Own work of slow hosts by month",
        alt=f"Own work relative to the other hosts of the same runs, now: {words}; since {day(drawn[0].since)} for "
        f"{drawn[0].host}.",
        table=hosts_sheet(nodes, drawn, most_months=None),
        size=(WIDTH, HEIGHT),
    )
    return [chart]


class _Nodes:
    id = "nodes"
    label = "Mean over the nights of a month; 1: as fast as the others; bars: intervals"


def _host_point(host: HostCourse, index: int) -> dict[str, Any]:
    month = host.months[index]
    return {
        "host": host.host,
        "month": month.month,
        "value": month.ratio.value,
        "low": month.ratio.low if month.ratio.low is not None else month.ratio.value,
        "high": month.ratio.high if month.ratio.high is not None else month.ratio.value,
        "shown": str(ratio_cell(month.ratio)),
        "basis": basis_text(month.ratio, "night"),
    }
