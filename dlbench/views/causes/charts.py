"""Charts of lost efficiency: a waterfall of the largest rank count, and lost points of all rank counts."""

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

CAUSE_COLOURS = {  # A cause that is also a phase of the step has that phase's colour.
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "gather": "#332288",
    "bubble": "#999933",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "launch": "#6b4ea0",
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}

_IDEAL, _MEASURED = "#676d76", "#1769ab"  # Dark enough for white words in both colour schemes.

_ROW = 42  # Height of a row of a waterfall, a name and the bar below it, pixels.
_ALONE = 1060  # Plot width of a waterfall without a chart next to it, pixels: as wide as a page of 1400.
_STILL = 350  # Plot width of a waterfall without scripts, pixels: a telephone's.
_ROOM_FOR_WORDS = 45.0  # Percent: the words of a bar that begins further left, with its interval, are at its right end.


def account_charts(group: ReportGroup, points: tuple[CausePoint, ...]) -> list[Chart]:
    """Returns the waterfall of the largest rank count, and if there are more, lost points of all of them."""
    _, *compared = points
    if not compared:
        return []
    if len(compared) == 1:
        return [_waterfall(group, compared[0], width=_ALONE)]
    return [_waterfall(group, compared[-1], width=WIDE), _by_point(group, compared)]


def _waterfall(group: ReportGroup, point: CausePoint, *, width: int) -> Chart:
    # Losses, the largest first, then gains, the largest last; nothing that is printed as 0.0.
    shares = [share for share in point.causes if share.is_measured and round(100 * share.lost.value, 1)]
    shares.sort(key=lambda share: (share.lost.value < 0, -abs(share.lost.value)))
    rows = _stairs(point, shares)
    words = ", ".join(f"{CAUSE_TITLES[share.name]} {lost_text(share.lost)}" for share in shares) or "nothing"
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


def _stairs(point: CausePoint, shares: Sequence[CauseShare]) -> Rows:
    rows: Rows = [_bar("ideal", 0.0, 100.0, _IDEAL, ("100 %", "100 %"), None)]
    level = 100.0
    for share in shares:
        lost = 100 * share.lost.value
        interval_ends = None
        if share.lost.low is not None and share.lost.high is not None:
            interval_ends = level - 100 * share.lost.high, level - 100 * share.lost.low
        sign = "-" if lost > 0 else "+"
        label = sign + lost_value(share.lost).removeprefix("-").removesuffix(" points")
        colour, texts = CAUSE_COLOURS[share.name], (label, lost_text(share.lost))
        rows.append(_bar(CAUSE_TITLES[share.name], level, level - lost, colour, texts, interval_ends))
        level -= lost
    efficiency = point.efficiency
    interval_ends = None
    if efficiency.low is not None and efficiency.high is not None:
        interval_ends = 100 * efficiency.low, 100 * efficiency.high
    texts = value_text(efficiency), figure_text(efficiency)
    return [*rows, _bar("measured", 0.0, 100 * efficiency.value, _MEASURED, texts, interval_ends)]


def _bar(
    name: str, start: float, end: float, colour: str, texts: tuple[str, str], interval_ends: tuple[float, float] | None
) -> dict[str, Any]:
    low, high = sorted((start, end))
    bar_left, bar_right = low, high  # Of the bar with its interval.
    interval: dict[str, float | None] = {"low": None, "high": None}
    if interval_ends is not None:
        bar_left, bar_right = min(low, interval_ends[0]), max(high, interval_ends[1])
        interval = {"low": round(interval_ends[0], 2), "high": round(interval_ends[1], 2)}
    label_x, side = bar_left, "left"
    if start == 0.0:
        label_x, side = 0.0, "in"
    elif bar_left < _ROOM_FOR_WORDS:
        label_x, side = bar_right, "right"
    label, tooltip = texts
    return {
        "name": name,
        "from": round(low, 2),
        "to": round(high, 2),
        **interval,
        "colour": colour,
        "label": label,
        "shown": tooltip,
        "at": round(label_x, 2),
        "side": side,
    }


def _waterfall_layers(rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows), *(row["high"] or 0.0 for row in rows))
    start = min(0.0, *(row["low"] or 0.0 for row in rows))
    # Names are above their bars, which so have the whole width of a narrow window.
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
        with_interval = base.transform_filter("isValid(datum.low)")
        rule = with_interval.mark_rule(color=INK, strokeWidth=1.5, yOffset=7)
        layers.append(rule.encode(x=alt.X("low:Q"), x2="high:Q"))
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
    rows: Rows = []
    marks: Rows = []
    for point in points:
        place = place_of(point)
        marks.append({"place": place, "value": short(point.whole.lost.value * 100)})
        for order, share in enumerate(point.causes):
            value = short(share.lost.value * 100)
            if share.is_measured and value:
                part, text = CAUSE_TITLES[share.name], lost_text(share.lost)
                rows.append({"place": place, "part": part, "order": order, "value": value, "shown": text})
    places = [row["place"] for row in marks]
    axis = Axis("points of efficiency lost; gained left of 0")
    series = Series("part", {title: CAUSE_COLOURS[cause] for cause, title in CAUSE_TITLES.items()})
    bars = stacked(rows, axis, series, {"place": "at", "part": "part", "shown": "causes"}, names=places)
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
