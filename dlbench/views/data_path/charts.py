"""Chart on the data path: input wait and copy as shares of the step."""

from __future__ import annotations

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import PART_COLOURS, WIDE
from dlbench.report.wording import PART_TITLES, figure_text, place_text
from dlbench.views.data_path.numbers import DataPath
from dlbench.views.data_path.tables import input_sheet
from dlbench.views.model import Group


def data_charts(group: Group, found: DataPath) -> list[Chart]:
    """Input wait, and on GPUs the copy, as shares of the step; none where ranks never wait."""
    import altair as alt

    steps = {(point.ranks, point.nodes): point.mean_step.value for point in group.points}
    rows: Rows = [
        {
            "place": place_text(point.ranks, point.nodes),
            "part": PART_TITLES[part],
            "order": number,
            "share": figure.value / steps[point.ranks, point.nodes],
            "shown": figure_text(figure),
        }
        for point in found.points
        for number, (part, figure) in enumerate((("input", point.wait), ("h2d", point.copy)))
        if figure.value > 0 and (part == "input" or group.on_gpu)
    ]
    if not rows:
        return []
    places = [place_text(point.ranks, point.nodes) for point in found.points]
    present = [part for part in ("input", "h2d") if any(row["part"] == PART_TITLES[part] for row in rows)]
    colour = alt.Color("part:N", title=None).scale(
        domain=[PART_TITLES[part] for part in present], range=[PART_COLOURS[part] for part in present]
    )
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=alt.Y("place:N", title=None, sort=places),
            x=alt.X("share:Q", title="share of the mean step").stack("zero").axis(format="~%", tickCount=5),
            color=colour.legend(orient="bottom", columns=2),
            order="order:Q",
            tooltip=[
                alt.Tooltip("place:N", title="at"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("shown:N", title="per step"),
                alt.Tooltip("share:Q", title="of the step", format=".1%"),
            ],
        )
    )
    words = "; ".join(
        f"{place}: {figure_text(point.wait)}, {figure_text(point.wait_share)} of the step"
        for place, point in zip(places, found.points, strict=True)
    )
    return [
        finish(
            alt.layer(bars),
            group,
            name="data-path",
            title="Waiting for samples",
            alt=f"Input wait and copy as shares of the mean step by rank count. {words}.",
            table=input_sheet(found.points, on_gpu=group.on_gpu).people(),
            size=(WIDE - 60, max(60, 34 * len(places))),
        )
    ]
