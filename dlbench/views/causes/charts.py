"""The lost percent in charts: a waterfall of the largest rank count, and lost points over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, Rows, finish, short, tooltips
from dlbench.report.charts.shapes import Axis, Series, stacked
from dlbench.report.charts.style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.wording import figure_text, lost_text, lost_value, value_text
from dlbench.views.causes.experiments import CAUSE_TITLES, CauseShare
from dlbench.views.causes.numbers import CausePoint
from dlbench.views.causes.tables import lost_sheet
from dlbench.views.model import ReportGroup
from dlbench.views.view import place_of

CAUSE_COLOURS = {  # What a phase of the step shows as well has that phase's colour; the others go with them.
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "gather": "#332288",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "launch": "#6b4ea0",
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}

_IDEAL, _MEASURED = "#676d76", "#1769ab"
"""Of whole bars: dark enough for white words in either colour scheme, which leaves these two as they are."""

_ROW = 42  # Of a waterfall: a name and the bar below it, pixels.
_ALONE = 1060  # Plot width of a waterfall with no chart next to it, pixels: as wide as a page of 1400.
_STILL = 350  # Plot width of a waterfall without scripts, pixels: a telephone's.
_ROOM_FOR_WORDS = 45.0  # Percent: where a bar and its interval begin further left, its words stand at its right end.


def account_charts(group: ReportGroup, points: tuple[CausePoint, ...]) -> list[Chart]:
    """The waterfall of the largest rank count, and where there are more, lost points over all of them."""
    found = points[1:]
    if not found:
        return []
    if len(found) == 1:
        return [_waterfall(group, found[0], width=_ALONE)]
    return [_waterfall(group, found[-1], width=WIDE), _by_point(group, found)]


def _waterfall(group: ReportGroup, point: CausePoint, *, width: int) -> Chart:
    # Losses, the largest first, then gains, the largest last; nothing that is printed as 0.0.
    shares = (one for one in point.causes if one.is_measured and round(100 * one.lost.value, 1))
    drawn = sorted(shares, key=lambda one: (one.lost.value < 0, -abs(one.lost.value)))
    rows = _stairs(point, drawn)
    words = ", ".join(f"{CAUSE_TITLES[one.name]} {lost_text(one.lost)}" for one in drawn) or "nothing"
    return finish(
        alt.layer(*_waterfall_layers(rows)),
        group,
        name="waterfall",
        title=f"From 100 % to {value_text(point.efficiency)} at {place_of(point)}",
        alt=f"Efficiency at {place_of(point)}, {figure_text(point.efficiency)}: {lost_text(point.whole.lost)} lost. "
        f"{words}. Lines: intervals.",
        table=lost_sheet([point]),
        size=(width, _ROW * len(rows)),
        still_width=_STILL,
    )


def _stairs(point: CausePoint, drawn: Sequence[CauseShare]) -> Rows:
    """Bars from 100 % down to the efficiency, and up where something is gained; all ends in percent."""
    rows: Rows = [_bar("ideal", 0.0, 100.0, _IDEAL, "100 %", "100 %", None)]
    level = 100.0
    for one in drawn:
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
    label, shown = value_text(efficiency), figure_text(efficiency)
    return [*rows, _bar("measured", 0.0, 100 * efficiency.value, _MEASURED, label, shown, ends)]


def _bar(
    name: str, start: float, end: float, colour: str, label: str, shown: str, ends: tuple[float, float] | None
) -> dict[str, Any]:
    low, high = sorted((start, end))
    reach = (low, high) if ends is None else (min(low, ends[0]), max(high, ends[1]))
    at, side = (reach[1], "right") if reach[0] < _ROOM_FOR_WORDS else (reach[0], "left")
    if start == 0.0:
        at, side = 0.0, "in"
    return {
        "name": name,
        "from": round(low, 2),
        "to": round(high, 2),
        "low": None if ends is None else round(ends[0], 2),
        "high": None if ends is None else round(ends[1], 2),
        "colour": colour,
        "label": label,
        "shown": shown,
        "at": round(at, 2),
        "side": side,
    }


def _waterfall_layers(rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows), *(row["high"] or 0.0 for row in rows))
    start = min(0.0, *(row["low"] or 0.0 for row in rows))
    # Names stand above their bars, which so have the whole width of a narrow window.
    y = alt.Y("name:N", title=None, sort=names, axis=None)
    scale = alt.Scale(domain=[start, end], nice=False)
    axis = alt.Axis(labelExpr="datum.value + ' %'", tickCount=5)
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    tooltip = tooltips({"name:N": "part", "shown:N": "lost or left"})
    colour = alt.Color("name:N", legend=None).scale(domain=names, range=[row["colour"] for row in rows])
    x = alt.X("from:Q", title="scaling efficiency", scale=scale, axis=axis)
    name = base.mark_text(align="left", dy=-11, color=MUTED, fontSize=12).encode(x=alt.value(0), text="name:N")
    bar = base.mark_bar(height=18, yOffset=7).encode(x=x, x2="to:Q", color=colour, tooltip=tooltip)
    layers = [bar, name]
    if any(row["low"] is not None for row in rows):
        known = base.transform_filter("isValid(datum.low)")
        layers.append(known.mark_rule(color=INK, strokeWidth=1.5, yOffset=7).encode(x=alt.X("low:Q"), x2="high:Q"))
    sides: tuple[tuple[str, Any, int, str], ...] = (
        ("in", "left", 6, "#ffffff"),
        ("left", "right", -5, INK),
        ("right", "left", 5, INK),
    )
    for side, align, offset, ink in sides:
        text = base.transform_filter(f"datum.side == '{side}'")
        mark = text.mark_text(align=align, dx=offset, dy=7, color=ink, fontSize=12)
        layers.append(mark.encode(x=alt.X("at:Q"), text="label:N"))
    return layers


def _by_point(group: ReportGroup, points: Sequence[CausePoint]) -> Chart:
    rows: Rows = [
        {
            "place": place_of(point),
            "part": CAUSE_TITLES[share.name],
            "order": order,
            "value": short(share.lost.value * 100),
            "shown": lost_text(share.lost),
        }
        for point in points
        for order, share in enumerate(point.causes)
        if share.is_measured and short(share.lost.value * 100)
    ]
    places = [place_of(point) for point in points]
    axis = Axis("points of efficiency lost; gained left of 0")
    series = Series("part", {one: CAUSE_COLOURS[cause] for cause, one in CAUSE_TITLES.items()})
    bars = stacked(rows, axis, series, {"place": "at", "part": "part", "shown": "causes"}, names=places)
    marks: Rows = [
        {"place": place, "value": short(point.whole.lost.value * 100)}
        for place, point in zip(places, points, strict=True)
    ]
    ticks = alt.Chart(alt.InlineData(values=marks)).mark_tick(color=INK, thickness=2, size=34)
    zero = alt.Chart(alt.InlineData(values=[{"value": 0}])).mark_rule(color=MUTED)
    ticks = ticks.encode(x="value:Q", y=alt.Y("place:N", sort=places), tooltip=tooltips({"value:Q": "tick"}))
    words = "; ".join(f"{place_of(point)}: {lost_text(point.whole.lost)} lost" for point in points)
    return finish(
        alt.layer(*bars.layer, zero.encode(x="value:Q"), ticks),
        group,
        name="causes",
        title="Points lost by part (tick: net)",
        alt=f"By part and rank count. {words}.",
        table=lost_sheet(points),
        size=(WIDE, max(90, 44 * len(points))),
    )
