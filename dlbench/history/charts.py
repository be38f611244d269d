"""Charts of a history: a series over time with its changes, own work of slow hosts by month."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from dlbench.analysis.slow_nodes import ACCUSED
from dlbench.history.series import Change, LevelStretch, Night, Trend
from dlbench.history.slow_months import SlowMonths
from dlbench.history.tables import hosts_sheet, nights_sheet
from dlbench.history.words import amount_text, change_cell, day, level_text, percent_change, ratio_cell
from dlbench.lazy import alt
from dlbench.report.chart_style import HEIGHT, MEASURED, MUTED, RANK_COLOURS, TONE_COLOURS
from dlbench.report.charts import Chart, ReportSubject, Rows, figure_row, finish, inline, tooltips
from dlbench.report.wording import basis_text
from dlbench.stats.verdict_words import TREND
from dlbench.units import first_of

WIDTH = 1000  # Plot width of a series over time, pixels.
MAX_DRAWN_HOSTS = 6
MAX_NAMED = 4  # Hosts of a night that the tooltip names.

MAX_POINTS = 1_500  # Maximum runs that are drawn as points; of a longer series the nights are drawn.
MAX_NIGHTS = 600
"""Maximum nights in a chart and its table. A longer series is divided into stretches, and the nights with the lowest
and the highest value of each are drawn, so that no outlier is missing."""
_SHAPES = {"worse": "triangle-up", "better": "triangle-down"}
_KINDS = {TREND[outcome].word: (TONE_COLOURS[TREND[outcome].tone], shape) for outcome, shape in _SHAPES.items()}
"""Colour and shape of each kind of change."""
_LEVEL_COLOUR = "#e69f00"


def series_chart(series: Trend) -> Chart:
    """Draws runs over time, levels as lines with their intervals, changes as labelled vertical rules."""
    series = dataclasses.replace(series, nights=_drawn(series))
    factor, unit = _scale(series)
    points, levels = _points(series, factor), [_level_row(level, factor) for level in series.levels]
    values = [row["value"] for row in points]
    for row in levels:
        values += [row[name] for name in ("low", "high", "at_first") if row[name] is not None]
    margin = (max(values) - min(values)) * 0.12 or max(values) * 0.05
    domain = [min(values) - margin, max(values) + 2 * margin]
    y = alt.Y("value:Q", title=f"{series.subject}, {unit}").scale(domain=domain, nice=False, zero=False)
    base = alt.Chart(alt.InlineData(values=levels)).encode(x=_time("first"), x2="last")
    rule = base.mark_rule(color=_LEVEL_COLOUR, strokeWidth=3).encode(y=alt.Y("at_first:Q"), y2="value:Q")
    mark = alt.Chart(inline(points)).mark_point(filled=True, size=18, opacity=0.75, color=MEASURED)
    tooltip = {"run:N": "run", "shown:N": "value", "time:N": "finished", "commit:N": "commit", "hosts:N": "hosts"}
    layers = [
        base.mark_rect(color=_LEVEL_COLOUR, opacity=0.3).encode(y=alt.Y("low:Q"), y2="high:Q"),
        rule.encode(tooltip=tooltips({"shown:N": "level", "basis:N": "interval"})),
        mark.encode(x=_time(), y=y, tooltip=tooltips(tooltip)),
    ]
    if series.changes:
        layers += _change_layers([_change_row(change, domain[1]) for change in series.changes])
    return finish(
        alt.layer(*layers),
        series,
        name="trend",
        title=f"{series.title} over time",
        alt=f"{series.label}. {series.verdict}",
        table=nights_sheet((series,), is_for_people=True),
        size=(WIDTH, HEIGHT),
    )


def _scale(series: Trend) -> tuple[float, str]:
    largest = max(night.value for night in series.nights)
    if series.unit != "s" or largest >= 1:
        return 1.0, series.unit
    if largest >= 1e-3:
        return 1e3, "ms"
    return 1e6, "µs"


def _drawn(series: Trend) -> tuple[Night, ...]:
    nights, changed = series.nights, {change.time for change in series.changes}
    if len(nights) <= MAX_NIGHTS:
        return nights
    num_stretches = MAX_NIGHTS // 2
    edges = [round(len(nights) * i / num_stretches) for i in range(num_stretches + 1)]
    values = [night.value for night in nights]
    indices = {i for i, night in enumerate(nights) if night.time in changed} | {len(nights) - 1}
    for start, end in pairwise(edges):
        indices.add(min(range(start, end), key=values.__getitem__))
        indices.add(max(range(start, end), key=values.__getitem__))
    return tuple(nights[i] for i in sorted(indices))


def _time(name: str = "time") -> Any:
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
            "hosts": first_of(night.hosts, MAX_NAMED),
        }
        value_by_name = {night.series: night.value}
        if by_run:
            value_by_name = dict(zip(night.run_ids, night.values, strict=True))
        for name, value in value_by_name.items():
            rows.append({**common, "run": name, "value": value * factor, "shown": amount_text(value, series.unit)})
    return rows


def _level_row(level: LevelStretch, factor: float) -> dict[str, Any]:
    row = figure_row(level.value, factor) | {"basis": level.basis, "shown": level_text(level.value)}
    if level.is_drift:
        # The interval of a drift is valid only at its last night: no band.
        row |= {"low": None, "high": None, "shown": f"{level_text(level.value)} at its end"}
    return row | {"first": level.first, "last": level.last, "at_first": level.at_first * factor}


def _change_row(change: Change, top: float) -> dict[str, Any]:
    return {
        "time": change.time,
        "kind": change.kind,
        "label": percent_change(change.ratio.value),
        "shown": str(change_cell(change.ratio)),
        "commit": change.commits,
        "top": top,
    }


def _change_layers(changes: Rows) -> list[Any]:
    base = alt.Chart(alt.InlineData(values=changes)).encode(x=_time())
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
    """Draws the work ratios of the slowest hosts by month; nothing for fewer than two months."""
    drawn = [host for host in nodes.hosts if host.verdict in (*ACCUSED, "suspected")][:MAX_DRAWN_HOSTS]
    if not drawn or len(nodes.months) < 2:
        return []
    rows = []
    for host in drawn:
        for month in host.months:
            basis = basis_text(month.ratio, "night")
            rows.append({**figure_row(month.ratio), "host": host.host, "month": month.month, "basis": basis})
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
