"""Charts of the account: from 100 % down to the measured efficiency, and lost points over rank counts."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.wording import figure_text, lost_text, lost_value, value_text
from dlbench.views.causes.numbers import CausePoint, CauseShare
from dlbench.views.causes.tables import lost_sheet
from dlbench.views.causes.titles import CAUSE_TITLES
from dlbench.views.causes.words import place
from dlbench.views.model import Group

CAUSE_COLOURS = {
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "launch": "#6b4ea0",
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}
"""What a phase of the step shows as well has that phase's colour; the others go with them."""

_IDEAL, _MEASURED = "#676d76", "#1769ab"
"""Of whole bars: dark enough for white words in either colour scheme, which leaves these two as they are."""

_ROW = 30
_ALONE = 700
"""Plot width of a waterfall with no chart beside it, pixels."""
_ROOM_FOR_WORDS = 45.0
"""Percent: where a bar and its interval begin further left, its words stand at its right end."""


def short(value: float | None) -> float | None:
    """A number as a chart needs it: four digits."""
    return None if value is None else float(f"{value:.4g}")


def account_charts(group: Group, points: tuple[CausePoint, ...]) -> list[Chart]:
    """The waterfall of the largest rank count, and where there are more, lost points over all of them."""
    found = points[1:]
    if not found:
        return []
    if len(found) == 1:
        return [_waterfall(group, found[0], width=_ALONE)]
    return [_waterfall(group, found[-1], width=WIDE), _lost_by_point(group, found)]


def _drawn(point: CausePoint) -> list[CauseShare]:
    """What is drawn: losses, the largest first, then gains, the largest last; nothing that is printed as 0.0."""
    shares = (one for one in point.causes if one.is_measured and round(100 * one.lost.value, 1))
    return sorted(shares, key=lambda one: (one.lost.value < 0, -abs(one.lost.value)))


# The waterfall


def _waterfall(group: Group, point: CausePoint, *, width: int) -> Chart:
    import altair as alt

    rows = _stairs(point)
    words = ", ".join(f"{CAUSE_TITLES[one.name]} {lost_text(one.lost)}" for one in _drawn(point)) or "nothing"
    return finish(
        alt.layer(*_waterfall_layers(alt, rows)),
        group,
        name="waterfall",
        title=f"From 100 % to {value_text(point.efficiency)} at {place(point)}",
        alt=f"Efficiency at {place(point)}, {figure_text(point.efficiency)}: {lost_text(point.whole.lost)} lost. "
        f"{words}. Lines: intervals.",
        table=lost_sheet([point]),
        size=(width, _ROW * len(rows)),
    )


def _stairs(point: CausePoint) -> Rows:
    """Bars from 100 % down to the efficiency, and up where something is gained; all ends in percent."""
    rows: Rows = [_bar("ideal", 0.0, 100.0, _IDEAL, "100 %", "100 %", None)]
    level = 100.0
    for one in _drawn(point):
        lost = 100 * one.lost.value
        ends = None
        if one.lost.low is not None and one.lost.high is not None:
            ends = level - 100 * one.lost.high, level - 100 * one.lost.low
        label = f"{'-' if lost > 0 else '+'}{lost_value(one.lost).removeprefix('-').removesuffix(' points')}"
        colour, shown = CAUSE_COLOURS[one.name], lost_text(one.lost)
        rows.append(_bar(CAUSE_TITLES[one.name], level, level - lost, colour, label, shown, ends))
        level -= lost
    efficiency = point.efficiency
    ends = None if efficiency.low is None or efficiency.high is None else (100 * efficiency.low, 100 * efficiency.high)
    shown = figure_text(efficiency)
    return [*rows, _bar("measured", 0.0, 100 * efficiency.value, _MEASURED, value_text(efficiency), shown, ends)]


def _bar(
    name: str, start: float, end: float, colour: str, label: str, shown: str, ends: tuple[float, float] | None
) -> dict[str, Any]:
    low, high = sorted((start, end))
    reach = (low, high) if ends is None else (min(low, ends[0]), max(high, ends[1]))
    is_whole = start == 0.0
    is_right = not is_whole and reach[0] < _ROOM_FOR_WORDS
    return {
        "name": name,
        "from": _hundredths(low),
        "to": _hundredths(high),
        "low": None if ends is None else _hundredths(ends[0]),
        "high": None if ends is None else _hundredths(ends[1]),
        "colour": colour,
        "label": label,
        "shown": shown,
        "at": _hundredths(0.0 if is_whole else reach[1] if is_right else reach[0]),
        "side": "in" if is_whole else "right" if is_right else "left",
    }


def _waterfall_layers(alt: Any, rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows), *(row["high"] or 0.0 for row in rows))
    start = min(0.0, *(row["low"] or 0.0 for row in rows))
    y = alt.Y("name:N", title=None, sort=names).axis(labelLimit=200, ticks=False, domain=False)
    scale = alt.Scale(domain=[start, end], nice=False)
    axis = alt.Axis(labelExpr="datum.value + ' %'", tickCount=5)
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    tooltip = [alt.Tooltip("name:N", title="part"), alt.Tooltip("shown:N", title="lost or left")]
    colour = alt.Color("name:N", legend=None).scale(domain=names, range=[row["colour"] for row in rows])
    x = alt.X("from:Q", title="scaling efficiency", scale=scale, axis=axis)
    layers = [base.mark_bar(height={"band": 0.66}).encode(x=x, x2="to:Q", color=colour, tooltip=tooltip)]
    if any(row["low"] is not None for row in rows):
        known = base.transform_filter("isValid(datum.low)")
        layers.append(known.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    for side, align, offset, ink in (
        ("in", "left", 6, "#ffffff"),
        ("left", "right", -5, INK),
        ("right", "left", 5, INK),
    ):
        text = base.transform_filter(f"datum.side == '{side}'")
        mark = text.mark_text(align=align, dx=offset, color=ink, fontSize=12)
        layers.append(mark.encode(x=alt.X("at:Q"), text="label:N"))
    return layers


def _hundredths(value: float) -> float:
    return round(value, 2)


# Over rank counts


def _lost_by_point(group: Group, found: tuple[CausePoint, ...]) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "place": place(point),
            "part": CAUSE_TITLES[share.name],
            "order": order,
            "points": short(share.lost.value * 100),
            "shown": lost_text(share.lost),
        }
        for point in found
        for order, share in enumerate(point.causes)
        if share.is_measured and share.lost.value != 0
    ]
    sums: Rows = [{"place": place(point), "points": short(point.whole.lost.value * 100)} for point in found]
    y = alt.Y("place:N", title=None, sort=[place(point) for point in found])
    names = [name for name, title in CAUSE_TITLES.items() if any(row["part"] == title for row in rows)]
    colour = alt.Color("part:N", title=None).scale(
        domain=[CAUSE_TITLES[name] for name in names], range=[CAUSE_COLOURS[name] for name in names]
    )
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("part:N", title="part"),
        alt.Tooltip("shown:N", title="lost"),
    ]
    x = alt.X("points:Q", title="points of efficiency lost; gained left of 0").axis(tickCount=5, format=".4~g")
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar(height={"band": 0.72})
    tick = alt.Chart(alt.InlineData(values=sums)).mark_tick(color=INK, thickness=2, size=34)
    zero = alt.Chart(alt.InlineData(values=[{"points": 0}])).mark_rule(color=MUTED)
    words = "; ".join(f"{place(point)}: {lost_text(point.whole.lost)} lost" for point in found)
    return finish(
        alt.layer(
            bars.encode(
                y=y,
                x=x.stack("zero"),
                color=colour.legend(orient="bottom", columns=2),
                order="order:Q",
                tooltip=tooltip,
            ),
            zero.encode(x=alt.X("points:Q")),
            tick.encode(y=y, x=alt.X("points:Q"), tooltip=[alt.Tooltip("points:Q", title="net, points")]),
        ),
        group,
        name="causes",
        title="Points lost by part (tick: net)",
        alt=f"Points of efficiency lost to each part by rank count; what was gained stands left of 0. {words}.",
        table=lost_sheet(found),
        size=(WIDE, max(90, 44 * len(found))),
    )
