"""Learning under different ways of shuffling: the metric over epochs, a line a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, RANK_COLOURS, WIDE
from dlbench.report.wording import figure_text, place_text
from dlbench.views.quality.numbers import METRIC_TITLES
from dlbench.views.shuffling.numbers import ShuffleComparison, ShuffleRow
from dlbench.views.shuffling.tables import compared_sheet

MAX_CHARTS = 4


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A chart of the whole report; see `dlbench.report.charts.chart.Subject`."""

    id: str
    label: str


def way_text(row: ShuffleRow) -> str:
    """``local, contiguous parts``."""
    return f"{row.shuffle}, {row.partition} parts" if row.partition else row.shuffle


def learning_charts(found: Sequence[ShuffleComparison]) -> list[Chart]:
    """The metric over epochs at the largest rank count with curves; none where nothing was trained to a quality."""
    drawn = []
    for comparison in found[:MAX_CHARTS]:
        places = [(row.ranks, row.nodes) for row in comparison.rows if row.curves]
        if places:
            drawn.append(_chart(comparison, [row for row in comparison.rows if (row.ranks, row.nodes) == max(places)]))
    return drawn


def _chart(found: ShuffleComparison, rows: Sequence[ShuffleRow]) -> Chart:
    import altair as alt

    values: Rows = [
        {"way": way_text(row), "run": curve.run_id, "epoch": epoch, "value": value}
        for row in rows
        for curve in row.curves
        for epoch, value in zip(curve.epochs, curve.values, strict=True)
    ]
    ways = list(dict.fromkeys(way_text(row) for row in rows if row.curves))
    metric = next(row.metric for row in rows if row.curves)
    title = METRIC_TITLES[metric]
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=alt.X("epoch:Q", title="epoch").axis(tickCount=6),
        y=alt.Y("value:Q", title=title).axis(format="~g" if metric == "mae" else ".0%", tickCount=6),
        color=alt.Color("way:N", title=None, sort=ways)
        .scale(domain=ways, range=[RANK_COLOURS[place % len(RANK_COLOURS)] for place in range(len(ways))])
        .legend(orient="bottom", columns=2),
        detail="run:N",
        tooltip=[
            alt.Tooltip("way:N", title="shuffling"),
            alt.Tooltip("epoch:Q", title="epoch"),
            alt.Tooltip("value:Q", title=title, format=".4~g"),
            alt.Tooltip("run:N", title="run"),
        ],
    )
    shape = alt.Shape("way:N", title=None, sort=ways).scale(domain=ways).legend(orient="bottom", columns=2)
    last = "; ".join(f"{way_text(row)}: {figure_text(row.final)}" for row in rows if row.final is not None)
    return finish(
        alt.layer(base.mark_line(strokeWidth=1.5), base.mark_point(filled=True, size=30).encode(shape=shape)),
        _Subject(id=found.id, label=f"{found.label}, {place_text(rows[0].ranks, rows[0].nodes)}"),
        name="learning",
        title=f"{title[:1].upper()}{title[1:]} by way of shuffling",
        alt=f"{title} over epochs, a line for each run, a colour for each way of shuffling. Last values: {last}.",
        table=compared_sheet(found).people(),
        size=(WIDE, HEIGHT),
    )
