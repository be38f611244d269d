"""Charts of a history: a metric over time with its levels and changes, and slow hosts by month."""

from __future__ import annotations

from typing import Any

from dlbench.history.page.sheets import hosts_sheet, nights_sheet
from dlbench.history.page.words import (
    amount_text,
    change_text,
    commits_text,
    day,
    level_text,
    percent_change,
    ratio_cell,
)
from dlbench.history.trends.series import Trend
from dlbench.history.trends.slow_months import HostCourse, SlowMonths
from dlbench.reading.hosts.slow_nodes import ACCUSED
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, MEASURED, MUTED, RANK_COLOURS
from dlbench.report.wording import basis_text

WIDTH = 1000
"""Plot width of a series over time, pixels."""

MAX_HOSTS = 6
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

    drawn = [host for host in nodes.hosts if host.verdict in (*ACCUSED, "suspected")][:MAX_HOSTS]
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
