"""Efficiency, throughput and speed-up over rank counts, each with its intervals and the ideal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlbench.reading.scaling import Point
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, IDEAL, MEASURED, MUTED, NARROW
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import basis_text, figure_text, place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Group

_LINEAR = 100
"""Times as many ranks, two decades, up to which axes are linear unless a reader asks."""
_EXTENT = 40
"""Room for the labels of a vertical axis, pixels: seven characters."""


@dataclass(frozen=True, kw_only=True)
class _Quantity:
    """What a chart shows over ranks."""

    name: str
    title: str
    axis: str
    figure: Callable[[Point], Estimate]
    ideal: Callable[[Point], float]


def scaling_charts(group: Group) -> list[Chart]:
    """The three charts of a group; none for a single point."""
    if len(group.points) == 1:
        return []
    base = group.baseline
    quantities = (
        _Quantity(
            name="efficiency",
            title="Efficiency",
            axis="share of the ideal",
            figure=lambda point: point.efficiency,
            ideal=lambda point: 1.0,
        ),
        _Quantity(
            name="throughput",
            title="Throughput",
            axis=f"{group.sample_unit}/s",
            figure=lambda point: point.throughput,
            ideal=lambda point: base.throughput.value * point.ideal_speedup,
        ),
        _Quantity(
            name="speedup",
            title="Speed-up",
            axis=f"over {place_text(base.ranks, base.nodes)}",
            figure=lambda point: point.speedup,
            ideal=lambda point: point.ideal_speedup,
        ),
    )
    return [_chart(group, quantity) for quantity in quantities]


def _chart(group: Group, quantity: _Quantity) -> Chart:
    import altair as alt

    rows = [_row(point, quantity) for point in group.points]
    words = "; ".join(f"{row['place']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*_layers(alt, rows, quantity)),
        group,
        name=quantity.name,
        title=quantity.title,
        alt=f"{quantity.title} ({quantity.axis}) over ranks, with the ideal as a dashed line. {words}.",
        table=_sheet(group, quantity),
        size=(NARROW, HEIGHT),
        axes="" if quantity.name == "efficiency" else "xy",
    )


def _row(point: Point, quantity: _Quantity) -> dict[str, Any]:
    figure = quantity.figure(point)
    return {
        "ranks": point.ranks,
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "ideal": quantity.ideal(point),
        "shown": figure_text(figure),
        "label": value_text(figure),
        "place": place_text(point.ranks, point.nodes),
        "basis": basis_text(figure),
    }


def _sheet(group: Group, quantity: _Quantity) -> Sheet[Point]:
    columns: tuple[Column[Point], ...] = (
        Column("", "At", lambda point: place_text(point.ranks, point.nodes)),
        Column("", f"{quantity.title}, {quantity.axis}", quantity.figure),
        Column("", "Ideal", quantity.ideal, unit=quantity.figure(group.baseline).unit),
        Column("", "Interval", lambda point: basis_text(quantity.figure(point))),
    )
    return Sheet(name=quantity.name, title=quantity.title, columns=columns, rows=group.points)


def _layers(alt: Any, rows: Rows, quantity: _Quantity) -> list[Any]:
    counts = sorted({row["ranks"] for row in rows})
    # Room on the right for the labels at the ends of the lines.
    is_long = counts[-1] > _LINEAR * counts[0]
    # Arguments instead of methods, here and below: altair's methods make their help text anew at every use.
    if is_long:
        scale = alt.Scale(type="log", base=2, domain=[counts[0] / 1.2, counts[-1] * 4], nice=False)
    else:
        scale = alt.Scale(domain=[0, counts[-1] * 1.28], nice=False)
    axis = alt.Axis(values=counts, grid=False, format="d", labelOverlap="greedy")
    x = alt.X("ranks:Q", title="ranks", scale=scale, axis=axis)
    y = _axis(alt, quantity, rows, is_long=is_long and quantity.name != "efficiency")
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("shown:N", title=quantity.title),
        alt.Tooltip("basis:N", title="interval"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
    last = alt.Chart(alt.InlineData(values=rows[-1:])).encode(x=alt.X("ranks:Q"))
    rule = base.mark_rule(color=MEASURED, strokeWidth=3, opacity=0.5).encode(y=alt.Y("low:Q"), y2="high:Q")
    return [
        base.mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("ideal:Q")),
        base.mark_line(color=MEASURED, strokeWidth=2).encode(y=y),
        *([rule] if any(row["low"] is not None for row in rows) else []),
        base.mark_point(color=MEASURED, filled=True, size=60, opacity=1).encode(y=alt.Y("value:Q"), tooltip=tooltip),
        # Labels at the lines make a legend needless.
        last.mark_text(color=MUTED, align="left", dx=8, dy=-7, fontSize=12, text="ideal").encode(y=alt.Y("ideal:Q")),
        last.mark_text(color=MEASURED, align="left", dx=8, dy=7, fontSize=12).encode(
            y=alt.Y("value:Q"), text=alt.Text("label:N")
        ),
    ]


def _axis(alt: Any, quantity: _Quantity, rows: Rows, *, is_long: bool) -> Any:
    """From zero, because a share read off a cut axis misleads; of equal width, so that the charts stand aligned.

    Over more than two decades logarithmic like the ranks, which keeps the ideal a straight line.
    """
    values = [value for row in rows for value in (row["value"], row["ideal"], row["low"], row["high"]) if value]
    if is_long:
        scale = alt.Scale(type="log", base=2, domain=[min(values) * 0.85, max(values) * 1.25], nice=False)
    else:
        scale = alt.Scale(domain=[0, max(values) * 1.12], nice=False)
    form = ".0%" if quantity.name == "efficiency" else ",.4~r"
    axis = alt.Axis(format=form, tickCount=6, minExtent=_EXTENT, maxExtent=_EXTENT)
    return alt.Y("value:Q", title=quantity.axis, scale=scale, axis=axis)
