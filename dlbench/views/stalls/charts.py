"""The step by what it waits for: without input, preparing, fetching, by rank count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import PART_COLOURS, WIDE, si_label
from dlbench.report.wording import ENGINE_TITLES, figure_text
from dlbench.views.stalls.numbers import Stalls
from dlbench.views.stalls.tables import PART_TITLES, parts_sheet, place

MAX_CHARTS = 4

COLOURS = {"ingestion": PART_COLOURS["other"], "preparation": PART_COLOURS["input"], "fetch": "#a35200"}
"""Both stalls are of the colour of input wait, light and dark."""


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A chart of the whole report; see `dlbench.report.charts.chart.Subject`."""

    id: str
    label: str


def stall_charts(found: Sequence[Stalls]) -> list[Chart]:
    """A chart for each of the first series; a stall below zero is none and is not drawn."""
    series: dict[str, list[Stalls]] = {}
    for point in found:
        if any(part.seconds is not None for part in point.parts):
            series.setdefault(point.series, []).append(point)
    return [_chart(number, points) for number, points in enumerate(list(series.values())[:MAX_CHARTS], 1)]


def _chart(number: int, points: Sequence[Stalls]) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "place": place(point),
            "part": PART_TITLES[part.name],
            "order": order,
            "seconds": part.seconds.value,
            "shown": figure_text(part.seconds),
        }
        for point in points
        for order, part in enumerate(point.parts)
        if part.seconds is not None and part.seconds.value > 0
    ]
    present = [name for name, title in PART_TITLES.items() if any(row["part"] == title for row in rows)]
    colour = alt.Color("part:N", title=None).scale(
        domain=[PART_TITLES[name] for name in present], range=[COLOURS[name] for name in present]
    )
    x = alt.X("seconds:Q", title="mean time per step").axis(labelExpr=si_label("s"), tickCount=5)
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=alt.Y("place:N", title=None, sort=[place(point) for point in points]),
            x=x.stack("zero"),
            color=colour.legend(orient="bottom", columns=1, labelLimit=300),
            order="order:Q",
            tooltip=[
                alt.Tooltip("place:N", title="at"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("shown:N", title="mean per step"),
            ],
        )
    )
    words = "; ".join(f"{row['place']}, {row['part']}: {row['shown']}" for row in rows)
    first = points[0]
    label = f"{first.workload}, {first.preset} preset, {ENGINE_TITLES[first.engine]}, series {first.series}"
    return finish(
        alt.layer(bars),
        _Subject(id=f"stalls-{number}", label=label),
        name="stalls",
        title="What a step waits for",
        alt=f"Parts of the mean step by rank count, found by difference. {words}.",
        table=parts_sheet(points).people(brief=True),
        size=(WIDE - 60, max(60, 34 * len(points))),
    )
