"""Where the time of a step goes: its parts by rank count, and the points of the ideal lost to each."""

from __future__ import annotations

from typing import Any

from dlbench.reading.attribution import Part
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE, si_label
from dlbench.report.wording import PART_TITLES, figure_text, lost_text, place_text
from dlbench.views.model import Group
from dlbench.views.parts.tables import lost_sheet, parts_sheet


def part_charts(group: Group) -> list[Chart]:
    """The parts of a step, and, where there is more than the baseline, what is lost at the largest point."""
    return [_breakdown(group), *([_lost(group)] if len(group.points) > 1 else [])]


def _breakdown(group: Group) -> Chart:
    import altair as alt

    places = [place_text(point.ranks, point.nodes) for point in group.points]
    y = alt.Y("place:N", title=None, sort=places)
    words = [
        f"{place}: {figure_text(point.whole.seconds)}, most of it {_largest(point.parts)}"
        for place, point in zip(places, group.points, strict=True)
    ]
    return finish(
        alt.layer(_bars(alt, group, y), _ideal_ticks(alt, group, y)),
        group,
        name="parts",
        title="Parts of a step (tick: ideal step)",
        alt=f"Parts of the mean step by rank count; a tick marks the ideal step. {'; '.join(words)}.",
        table=parts_sheet(group.points),
        size=(WIDE, max(90, 44 * len(group.points))),
    )


def _largest(parts: tuple[Part, ...]) -> str:
    ordered = sorted(parts, key=lambda part: -part.seconds.value)
    return ", ".join(f"{PART_TITLES[part.name]} {figure_text(part.seconds)}" for part in ordered[:3])


def _bars(alt: Any, group: Group, y: Any) -> Any:
    rows: Rows = [
        {
            "place": place_text(point.ranks, point.nodes),
            "part": PART_TITLES[part.name],
            "order": index,
            "seconds": part.seconds.value,
            "shown": figure_text(part.seconds),
            "share": part.seconds.value / point.whole.seconds.value,
        }
        for point in group.points
        for index, part in enumerate(point.parts)
        if part.seconds.value
    ]
    present = {row["part"] for row in rows}
    names = [name for name, title in PART_TITLES.items() if title in present]
    colour = alt.Color("part:N", title=None).scale(
        domain=[PART_TITLES[name] for name in names], range=[PART_COLOURS[name] for name in names]
    )
    x = alt.X("seconds:Q", title="mean time per step").axis(labelExpr=si_label("s"), tickCount=5)
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("part:N", title="part"),
        alt.Tooltip("shown:N", title="mean per step"),
        alt.Tooltip("share:Q", title="share of the step", format=".1%"),
    ]
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=y, x=x.stack("zero"), color=colour.legend(orient="bottom", columns=2), order="order:Q", tooltip=tooltip
        )
    )


def _ideal_ticks(alt: Any, group: Group, y: Any) -> Any:
    rows: Rows = [
        {"place": place_text(point.ranks, point.nodes), "seconds": point.whole.ideal_seconds} for point in group.points
    ]
    tooltip = [alt.Tooltip("seconds:Q", title="ideal step, s", format=".4~g")]
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_tick(color=INK, thickness=2, size=36)
        .encode(y=y, x=alt.X("seconds:Q"), tooltip=tooltip)
    )


def _lost(group: Group) -> Chart:
    import altair as alt

    point = group.largest
    parts = sorted((part for part in point.parts if part.lost.value), key=lambda part: -part.lost.value)
    names = [PART_TITLES[part.name] for part in parts]
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
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=alt.Y("part:N", title=None, sort=names).axis(labelLimit=200))
    bars = base.mark_bar(height={"band": 0.72}).encode(
        x=alt.X("points:Q", title="points of the ideal").axis(tickCount=5, format=".4~g"),
        color=alt.Color("part:N", legend=None).scale(domain=names, range=[PART_COLOURS[part.name] for part in parts]),
        tooltip=[alt.Tooltip("part:N", title="part"), alt.Tooltip("shown:N", title="lost")],
    )
    layers = [bars]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    place = place_text(point.ranks, point.nodes)
    words = "; ".join(f"{row['part']} {row['shown']}" for row in rows) or "nothing"
    return finish(
        alt.layer(*layers),
        group,
        name="lost",
        title=f"Lost at {place}, mean: {lost_text(point.whole.lost)}",
        alt=f"Points of the ideal lost at {place}: {lost_text(point.whole.lost)} in all. {words}.",
        table=lost_sheet(group),
        size=(WIDE - 90, max(60, 30 * len(rows))),
    )
