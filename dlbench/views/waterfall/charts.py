"""The chart of the factors of efficiency: a waterfall."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, WIDE
from dlbench.report.wording import figure_text, percent, place_text
from dlbench.views.causes.charts import CAUSE_COLOURS, short
from dlbench.views.model import Group
from dlbench.views.waterfall.numbers import FactoredPoint
from dlbench.views.waterfall.tables import FACTOR_TITLES, change_text, stairs_sheet

_FACTOR_COLOURS = {
    "late_ranks": CAUSE_COLOURS["straggler"],
    "communication": CAUSE_COLOURS["exchange"],
    "input": CAUSE_COLOURS["input"],
    "compute": CAUSE_COLOURS["compute"],
    "host": CAUSE_COLOURS["host"],
}

_IDEAL, _MEASURED = "#676d76", "#1769ab"
"""Of whole bars: dark enough for white words in either colour scheme, which leaves these two as they are."""

_ROW = 30
_ROOM_FOR_WORDS = 0.45
"""Where a bar begins further left, its words stand at its right end."""


def waterfall_charts(group: Group, largest: FactoredPoint) -> list[Chart]:
    """The point with most ranks, if it is not the baseline."""
    return [] if largest.is_baseline or not largest.factors else [_waterfall(group, largest)]


def _waterfall(group: Group, point: FactoredPoint) -> Chart:
    import altair as alt

    rows = _stairs(point)
    at = place_text(point.ranks, point.nodes)
    words = ", ".join(
        f"{FACTOR_TITLES[factor.name]} {figure_text(factor.relative)} ({change_text(factor.step)})"
        for factor in point.factors
    )
    return finish(
        alt.layer(*_waterfall_layers(alt, rows)),
        group,
        name="waterfall",
        title=f"From 100 % to {percent(point.efficiency.value)} at {at}",
        alt=f"Efficiency at {at} as a product of factors against the baseline: {words}. Their product is the "
        f"efficiency of means, {figure_text(point.efficiency)}.",
        table=stairs_sheet(point),
        size=(WIDE, _ROW * len(rows)),
    )


def _stairs(point: FactoredPoint) -> Rows:
    """Bars from the ideal down to the efficiency; all ends in percent."""
    rows: Rows = [_bar("ideal", 0.0, 1.0, _IDEAL, "100 %", "")]
    for factor in point.factors:
        before = factor.level + factor.step
        label = f"x {factor.relative.value:.3f} ({change_text(factor.step)})"
        colour = _FACTOR_COLOURS[factor.name]
        rows.append(_bar(FACTOR_TITLES[factor.name], before, factor.level, colour, label, figure_text(factor.relative)))
    whole = figure_text(point.efficiency)
    return [*rows, _bar("efficiency (of means)", 0.0, point.efficiency.value, _MEASURED, whole, whole)]


def _bar(name: str, start: float, end: float, colour: str, label: str, shown: str) -> dict[str, Any]:
    low, high = min(start, end), max(start, end)
    whole = low == 0.0
    right = not whole and low < _ROOM_FOR_WORDS
    return {
        "name": name,
        "from": short(low * 100),
        "to": short(high * 100),
        "colour": colour,
        "label": label,
        "shown": shown or label,
        "left": short((high if right else 0.0 if whole else low) * 100),
        "side": "in" if whole else "right" if right else "left",
    }


def _waterfall_layers(alt: Any, rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows))
    y = alt.Y("name:N", title=None, sort=names).axis(labelLimit=200, ticks=False, domain=False)

    def x_of(channel: Any) -> Any:
        axis = channel.scale(domain=[0, end], nice=False).axis(labelExpr="datum.value + ' %'", tickCount=5)
        return axis.title("share of the ideal throughput")

    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    tooltip = [alt.Tooltip("name:N", title="factor"), alt.Tooltip("shown:N", title="value")]
    colour = alt.Color("name:N", legend=None).scale(domain=names, range=[row["colour"] for row in rows])
    bars = base.mark_bar(height={"band": 0.66}).encode(
        x=x_of(alt.X("from:Q")), x2="to:Q", color=colour, tooltip=tooltip
    )
    layers = [bars]
    for side, align, offset, colour in (
        ("in", "left", 6, "#ffffff"),
        ("left", "right", -5, INK),
        ("right", "left", 5, INK),
    ):
        text = base.transform_filter(f"datum.side == '{side}'")
        mark = text.mark_text(align=align, dx=offset, color=colour, fontSize=12)
        layers.append(mark.encode(x=x_of(alt.X("left:Q")), text="label:N"))
    return layers
