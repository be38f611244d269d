"""Groups become charts: a Vega-Lite specification for the interactive form and a static SVG of the same.

Every chart has a text that carries its finding, and is drawn only from the numbers of the report.
Nothing is loaded from anywhere: data stand inside the specification.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlbench.publish import tabular
from dlbench.publish.chart_style import CONFIG, GRID, HEIGHT, IDEAL, INK, MEASURED, NARROW, PART_COLOURS, WIDE
from dlbench.publish.model import Figure, Group, Point
from dlbench.publish.tabular import Table
from dlbench.publish.wording import PART_TITLES, basis_text, figure_text, lost_text, number_text, place_text

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, not yet drawn."""

    id: str
    title: str
    alt: str
    """What the chart shows, in words and numbers."""
    spec: dict[str, Any]
    """Vega-Lite."""
    table: Table
    """The numbers it is drawn from, header first."""


def scaling_charts(group: Group) -> list[Chart]:
    """Efficiency, throughput and speed-up over ranks, with intervals and the ideal; none for a single point."""
    if len(group.points) == 1:
        return []
    unit = f"{group.sample_unit}/s"
    base = group.baseline
    return [
        _over_ranks(group, "efficiency", "Efficiency", "share of the ideal", lambda p: p.efficiency, lambda p: 1.0),
        _over_ranks(
            group,
            "throughput",
            "Throughput",
            unit,
            lambda p: p.throughput,
            lambda p: base.throughput.value * p.ideal_speedup,
        ),
        _over_ranks(
            group,
            "speedup",
            "Speed-up",
            f"over {place_text(base.ranks, base.nodes)}",
            lambda p: p.speedup,
            lambda p: p.ideal_speedup,
        ),
    ]


def part_charts(group: Group) -> list[Chart]:
    """The parts of a step by rank count, and the points lost to each at the largest one."""
    charts = [_breakdown(group)]
    if len(group.points) > 1:
        charts.append(_lost(group))
    return charts


def _over_ranks(
    group: Group,
    name: str,
    title: str,
    axis: str,
    figure: Callable[[Point], Figure],
    ideal: Callable[[Point], float],
) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "ranks": point.ranks,
            "value": figure(point).value,
            "low": figure(point).low,
            "high": figure(point).high,
            "ideal": ideal(point),
            "shown": figure_text(figure(point)),
            "place": place_text(point.ranks, point.nodes),
            "runs": len(point.run_ids),
            "kind": figure(point).kind,
        }
        for point in group.points
    ]
    counts = sorted({point.ranks for point in group.points})
    x = (
        alt.X("ranks:Q", title="ranks")
        .scale(type="log", base=2, padding=14)
        .axis(values=counts, grid=False, format="d")
    )
    y = _share_axis(alt, axis, rows) if name == "efficiency" else _log_axis(alt, axis, rows)
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("shown:N", title=title),
        alt.Tooltip("runs:Q", title="runs"),
        alt.Tooltip("kind:N", title="interval"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
    layers = [
        base.mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("ideal:Q")),
        base.mark_line(color=MEASURED, strokeWidth=2).encode(y=y),
        base.mark_rule(color=MEASURED, strokeWidth=2.5, opacity=0.55).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_point(color=MEASURED, filled=True, size=60, opacity=1).encode(y=alt.Y("value:Q"), tooltip=tooltip),
        _end_label(alt, rows[-1], "ideal", "ideal", IDEAL, above=True),
        _end_label(alt, rows[-1], "value", "shown_short", MEASURED, above=False),
    ]
    alt_text = f"{title} over ranks. " + "; ".join(f"{row['place']}: {row['shown']}" for row in rows) + "."
    table: Table = [("At", f"{title}, {axis}", "Ideal", "Interval")]
    for point in group.points:
        shown = number_text(ideal(point), figure(point).unit)
        table.append(
            (place_text(point.ranks, point.nodes), figure_text(figure(point)), shown, basis_text(figure(point)))
        )
    return _chart(alt.layer(*layers), group, name, title, alt_text, table, NARROW)


def _end_label(alt: Any, row: dict[str, Any], field: str, text: str, colour: str, *, above: bool) -> Any:
    """A direct label at the last point, so that no legend is needed."""
    data = [{"ranks": row["ranks"], field: row[field], "shown_short": row["shown"].partition(" [")[0]}]
    label = alt.Text("shown_short:N") if text == "shown_short" else alt.value(text)
    return (
        alt.Chart(alt.InlineData(values=data))
        .mark_text(color=colour, align="left", dx=8, dy=-7 if above else 7, fontSize=12)
        .encode(x=alt.X("ranks:Q"), y=alt.Y(f"{field}:Q"), text=label)
    )


def _share_axis(alt: Any, axis: str, rows: Rows) -> Any:
    """From zero, because a share read off a cut axis misleads."""
    top = max(1.0, *(row["high"] or row["value"] for row in rows))
    return alt.Y("value:Q", title=axis).scale(domain=[0, top * 1.12], nice=False).axis(format=".0%", tickCount=6)


def _log_axis(alt: Any, axis: str, rows: Rows) -> Any:
    """Logarithmic like the ranks, so that the ideal is a straight line."""
    values = [v for row in rows for v in (row["value"], row["ideal"], row["low"], row["high"]) if v]
    return (
        alt.Y("value:Q", title=axis)
        .scale(type="log", base=2, domain=[min(values) * 0.85, max(values) * 1.25], nice=False)
        .axis(format="~s", tickCount=5)
    )


def _breakdown(group: Group) -> Chart:
    import altair as alt

    places = [place_text(point.ranks, point.nodes) for point in group.points]
    rows: Rows = [
        {
            "place": place,
            "part": PART_TITLES[part.name],
            "order": index,
            "seconds": part.seconds.value,
            "shown": figure_text(part.seconds),
            "share": part.seconds.value / point.whole.seconds.value,
        }
        for place, point in zip(places, group.points, strict=True)
        for index, part in enumerate(point.parts)
    ]
    ideals: Rows = [
        {"place": place, "seconds": point.whole.ideal_seconds}
        for place, point in zip(places, group.points, strict=True)
    ]
    shown = [name for name in PART_TITLES if any(row["part"] == PART_TITLES[name] and row["seconds"] for row in rows)]
    colour = alt.Color("part:N", title=None).scale(
        domain=[PART_TITLES[name] for name in shown], range=[PART_COLOURS[name] for name in shown]
    )
    y = alt.Y("place:N", title=None, sort=places)
    x = alt.X("seconds:Q", title="mean seconds a step").axis(labelExpr="format(datum.value, '~s') + 's'", tickCount=5)
    bars = (
        alt.Chart(alt.InlineData(values=[row for row in rows if row["seconds"]]))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=y,
            x=x.stack("zero"),
            color=colour.legend(orient="bottom", columns=2),
            order="order:Q",
            tooltip=[
                alt.Tooltip("place:N", title="at"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("shown:N", title="mean a step"),
                alt.Tooltip("share:Q", title="share of the step", format=".1%"),
            ],
        )
    )
    ticks = (
        alt.Chart(alt.InlineData(values=ideals))
        .mark_tick(color=INK, thickness=2, size=30)
        .encode(y=y, x=alt.X("seconds:Q"), tooltip=[alt.Tooltip("seconds:Q", title="ideal step, s", format=".4~g")])
    )
    words = "; ".join(
        f"{place}: {figure_text(point.whole.seconds)}, most of it "
        + ", ".join(
            f"{PART_TITLES[part.name]} {figure_text(part.seconds)}"
            for part in sorted(point.parts, key=lambda part: -part.seconds.value)[:3]
        )
        for place, point in zip(places, group.points, strict=True)
    )
    height = max(90, 44 * len(group.points))
    alt_text = f"Parts of the mean step by rank count; the tick marks the ideal step. {words}."
    return _chart(
        alt.layer(bars, ticks),
        group,
        "parts",
        "Parts of a step (tick: ideal step)",
        alt_text,
        tabular.parts(group),
        WIDE,
        height=height,
    )


def _lost(group: Group) -> Chart:
    import altair as alt

    point = group.largest
    parts = sorted((part for part in point.parts if part.lost.value), key=lambda part: -part.lost.value)
    rows: Rows = [
        {
            "part": PART_TITLES[part.name],
            "points": part.lost.value * 100,
            "low": None if part.lost.low is None else part.lost.low * 100,
            "high": None if part.lost.high is None else part.lost.high * 100,
            "shown": lost_text(part.lost),
        }
        for part in parts
    ]
    names = [PART_TITLES[part.name] for part in parts]
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=alt.Y("part:N", title=None, sort=names).axis(labelLimit=200))
    bars = base.mark_bar(height={"band": 0.72}).encode(
        x=alt.X("points:Q", title="points of the ideal").axis(tickCount=5, format="~g"),
        color=alt.Color("part:N", legend=None).scale(domain=names, range=[PART_COLOURS[part.name] for part in parts]),
        tooltip=[alt.Tooltip("part:N", title="part"), alt.Tooltip("shown:N", title="lost")],
    )
    spread = base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q")
    zero = alt.Chart(alt.InlineData(values=[{"points": 0}])).mark_rule(color=GRID).encode(x=alt.X("points:Q"))
    place = place_text(point.ranks, point.nodes)
    words = "; ".join(f"{row['part']} {row['shown']}" for row in rows) or "nothing"
    text = f"Points of the ideal lost at {place}: {lost_text(point.whole.lost)} in all. {words}."
    return _chart(
        alt.layer(zero, bars, spread),
        group,
        "lost",
        f"Lost at {place}: {lost_text(point.whole.lost)}",
        text,
        tabular.lost(group),
        WIDE - 90,
        height=max(60, 30 * len(rows)),
    )


def _chart(chart: Any, group: Group, name: str, title: str, alt_text: str, width: int, height: int = HEIGHT) -> Chart:
    """The finished specification; its subtitle says what the chart is about even where it is cut out of the page."""
    spec: dict[str, Any] = chart.properties(width=width, height=height, description=alt_text).to_dict()
    spec["config"] = CONFIG
    # About 6.5 pixels a character; a longer line would widen the whole chart.
    spec["title"] = {"text": title, "subtitle": textwrap.wrap(group.label, int((width + 60) / 6.5), max_lines=3)}
    return Chart(id=f"chart-{group.id}-{name}", title=title, alt=alt_text, spec=spec, table=table)
