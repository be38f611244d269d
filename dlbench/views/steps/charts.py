"""Charts of single steps: distribution by rank count, outliers over a run, ranks by steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from dlbench.report.charts.chart import Chart, Rows, Subject, finish
from dlbench.report.charts.style import PART_COLOURS, RANK_COLOURS, WIDE, si_label
from dlbench.report.wording import PART_TITLES, figure_text, percent
from dlbench.units import format_seconds
from dlbench.views.steps.numbers import RankMap, StepPoint, StepTimes
from dlbench.views.steps.tables import DRAWN, FEW_OUTLIERS, outlier_sheet, quantile_sheet, rank_sheet
from dlbench.views.steps.words import place, row_title

MAX_MARKS = 60
"""Outlier steps in a chart; the ones with the largest ratio."""

MAX_RECTANGLES = 800
"""Of a map; a page of ten maps stays well below five megabytes."""

_HEIGHT = 220
_OUTLIERS_HEIGHT = 180

EDGES = (0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)
"""Where the colours of a map change; between 0.97 and 1.03 a cell is left blank."""
_BLANK = 2
_BIN_COLOURS = ("#2166ac", "#92c5de", "", "#fee08b", "#fdae61", "#f46d43", "#b2182b", "#4a0a2b")
_PLATE = "#eceff3"
"""Behind the map, in either colour scheme: its colours are made for it."""


def step_charts(group: Subject, found: StepTimes) -> list[Chart]:
    """The distribution of step times, and where in the run the outliers are, if there are several."""
    largest = found.points[-1]
    return [
        _distribution(group, found),
        *([_outliers(group, largest)] if len(largest.outliers) >= FEW_OUTLIERS else []),
    ]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _chosen(points: Sequence[StepPoint]) -> list[StepPoint]:
    """As many rank counts as there are colours, the first, the last, and evenly between."""
    most = len(RANK_COLOURS)
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _distribution(group: Subject, found: StepTimes) -> Chart:
    import altair as alt

    points = _chosen(found.points)
    rows: Rows = [
        {
            "place": place(point),
            "share": index,
            "seconds": _short(figure.value),
            "low": _short(figure.value if figure.low is None else figure.low),
            "high": _short(figure.value if figure.high is None else figure.high),
            "shown": figure_text(figure),
        }
        for point in points
        for index in DRAWN
        for figure in (point.quantiles[index].seconds,)
    ]
    left_out = (
        f" {len(points)} of {len(found.points)} rank counts are drawn." if len(points) < len(found.points) else ""
    )
    words = "; ".join(
        f"{place(point)}: half of the steps within {figure_text(point.p50)}, 95 % within {figure_text(point.p95)}, the "
        f"longest {figure_text(point.longest)}"
        for point in points
    )
    return finish(
        alt.layer(*_curves(alt, rows, [place(point) for point in points])),
        group,
        name="steps",
        title="Share of steps that take no longer (band: range of runs)",
        alt=f"Distribution of step times by rank count, geometric means over runs.{left_out} {words}.",
        table=quantile_sheet(found),
        size=(WIDE, _HEIGHT),
        axes="x",
    )


def _curves(alt: Any, rows: Rows, places: list[str]) -> list[Any]:
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    kind = "log" if low > 0 and high > 8 * low else "linear"

    def x_of(field: str) -> Any:
        x = alt.X(f"{field}:Q", title="step time").scale(type=kind, zero=False, nice=False)
        return x.axis(labelExpr=si_label("s"), tickCount=5)

    y = alt.Y("share:Q", title="share of the steps").scale(domain=[0, 100]).axis(labelExpr="datum.value + ' %'")
    colour = alt.Color("place:N", title=None, sort=places).scale(domain=places, range=list(RANK_COLOURS[: len(places)]))
    legend = colour.legend(orient="bottom", columns=3, symbolStrokeWidth=3, symbolOpacity=1)
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("share:Q", title="share of the steps, %"),
        alt.Tooltip("shown:N", title="take no longer than"),
    ]
    base = alt.Chart(alt.InlineData(values=rows))
    layers = []
    if any(row["low"] != row["high"] for row in rows):
        band = base.mark_area(opacity=0.2, orient="horizontal")
        layers.append(band.encode(y=y, x=x_of("low"), x2="high:Q", color=legend))
    line = base.mark_line(strokeWidth=2)
    return [*layers, line.encode(x=x_of("seconds"), y=y, order="share:Q", color=legend, tooltip=tooltip)]


def _outliers(group: Subject, point: StepPoint) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "step": one.step,
            "ratio": _short(one.ratio),
            "phase": PART_TITLES[one.phase],
            "who": f"rank {one.rank} on {one.host}",
            "shown": format_seconds(one.seconds),
            "run": one.run_id,
        }
        for one in point.outliers[:MAX_MARKS]
    ]
    titles = [title for title in PART_TITLES.values() if any(row["phase"] == title for row in rows)]
    colours = {PART_TITLES[name]: colour for name, colour in PART_COLOURS.items()}
    colour = alt.Color("phase:N", title="grew most").scale(domain=titles, range=[colours[title] for title in titles])
    shape = alt.Shape("phase:N", title="grew most").scale(domain=titles)
    tooltip = [
        alt.Tooltip("step:Q", title="step"),
        alt.Tooltip("shown:N", title="took"),
        alt.Tooltip("ratio:Q", title="over the median"),
        alt.Tooltip("who:N", title="longest own work"),
        alt.Tooltip("phase:N", title="grew most"),
        alt.Tooltip("run:N", title="run"),
    ]
    chart = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_point(filled=True, size=60, opacity=0.85)
        .encode(
            x=alt.X("step:Q", title="step, warm-up steps counted").axis(format="d", tickCount=6, tickMinStep=1),
            y=alt.Y("ratio:Q", title="over the run's median step").scale(zero=False).axis(format=".4~g", tickCount=5),
            color=colour.legend(orient="bottom", columns=2),
            shape=shape.legend(orient="bottom", columns=2),
            tooltip=tooltip,
        )
    )
    words = "; ".join(
        f"step {row['step']}: {row['shown']}, {row['ratio']:g} times the median, {row['who']}, {row['phase']}"
        for row in rows[:5]
    )
    more = f" (the {len(rows)} longest are drawn)" if len(rows) < point.num_outliers else ""
    return finish(
        chart,
        group,
        name="outlier-steps",
        title=f"Outlier steps at {place(point)}",
        alt=f"{point.num_outliers} of {point.num_steps} steps ({percent(point.pooled_outlier_share, 2)}) at "
        f"{place(point)} are far longer than the others{more}. {words}.",
        table=outlier_sheet((point,), MAX_MARKS),
        size=(WIDE, _OUTLIERS_HEIGHT),
    )


# Ranks by steps


def rank_charts(group: Subject, found: RankMap) -> list[Chart]:
    """The map of the largest rank count."""
    import altair as alt

    rows, joined = _rectangles(found)
    height = min(320, max(70, 22 * len(found.rows)))
    note = f" {joined} neighbouring columns are drawn as one, with the larger value." if joined > 1 else ""
    slowest = max(found.rows, key=lambda row: row.mean)
    drawn = finish(
        alt.layer(*_map_layers(alt, found, rows)),
        group,
        name="ranks",
        title=f"Own work by rank and step at {place(found)}",
        alt=f"{found.finding} {row_title(slowest).capitalize()} is slowest on the whole: {slowest.mean:.3f} times the "
        f"median.{note}",
        table=rank_sheet(found, len(found.rows)),
        size=(WIDE, height),
    )
    return [drawn]


def _rectangles(found: RankMap) -> tuple[Rows, int]:
    """Neighbouring cells of one colour as one rectangle; columns are joined until there are few enough of them.

    Returns:
        The rectangles, and how many columns are drawn as one.
    """
    joined = 1
    while True:
        made = list(_merged(found, joined))
        if len(made) <= MAX_RECTANGLES or joined >= len(found.step_starts):
            return made, joined
        joined *= 2


def _merged(found: RankMap, joined: int) -> Iterator[dict[str, Any]]:
    starts = found.step_starts[::joined]
    ends = (*starts[1:], found.last_step + 1)
    for row in found.rows:
        cells = [max(row.cells[first : first + joined]) for first in range(0, len(row.cells), joined)]
        bins = [bisect.bisect_right(EDGES, cell) for cell in cells]
        first = 0
        for column in range(1, len(bins) + 1):
            if column < len(bins) and bins[column] == bins[first]:
                continue
            if bins[first] != _BLANK:
                span = cells[first:column]
                yield {
                    "x": starts[first] - 0.5,
                    "x2": ends[column - 1] - 0.5,
                    "y": row.first_rank - 0.5,
                    "y2": row.last_rank + 0.5,
                    "bin": bin_title(bins[first]),
                    "shown": _ratios(span),
                    "who": f"{row_title(row)} on {row.hosts}",
                    "when": f"{starts[first]} to {ends[column - 1] - 1}",
                }
            first = column


def _ratios(span: Sequence[float]) -> str:
    low, high = f"{min(span):.3g}x", f"{max(span):.3g}x"
    return low if low == high else f"{low} to {high}"


def bin_title(number: int) -> str:
    """What a colour of the map means."""
    if number == 0:
        return f"below {EDGES[0]:g}x"
    if number == len(EDGES):
        return f"{EDGES[-1]:g}x and more"
    return f"{EDGES[number - 1]:g}x to {EDGES[number]:g}x"


def _map_layers(alt: Any, found: RankMap, rows: Rows) -> list[Any]:
    start, end = found.step_starts[0] - 0.5, found.last_step + 0.5
    plate = {"x": start, "x2": end, "y": -0.5, "y2": found.ranks - 0.5}
    x_scale = alt.Scale(domain=[start, end], nice=False, zero=False)
    y_scale = alt.Scale(domain=[-0.5, found.ranks - 0.5], reverse=True, nice=False, zero=False)
    x = alt.X("x:Q", scale=x_scale, title="step, warm-up steps counted").axis(
        format="d", tickCount=6, tickMinStep=1, grid=False
    )
    y = alt.Y("y:Q", scale=y_scale, title="rank").axis(
        format="d", tickCount=min(8, found.ranks), tickMinStep=1, grid=False
    )
    layers = [alt.Chart(alt.InlineData(values=[plate])).mark_rect(color=_PLATE).encode(x=x, x2="x2:Q", y=y, y2="y2:Q")]
    if not rows:
        return layers
    numbers = [number for number in range(len(EDGES) + 1) if number != _BLANK]
    present = [number for number in numbers if any(row["bin"] == bin_title(number) for row in rows)]
    colour = alt.Color("bin:N", title=f"own work over the median (blank: {bin_title(_BLANK)})").scale(
        domain=[bin_title(number) for number in present], range=[_BIN_COLOURS[number] for number in present]
    )
    tooltip = [
        alt.Tooltip("who:N", title="ranks"),
        alt.Tooltip("when:N", title="steps"),
        alt.Tooltip("shown:N", title="own work over the median"),
    ]
    cells = alt.Chart(alt.InlineData(values=rows)).mark_rect(strokeWidth=0)
    legend = colour.legend(orient="bottom", columns=4, titleOrient="top", titleLimit=WIDE)
    layers.append(cells.encode(x=x, x2="x2:Q", y=y, y2="y2:Q", color=legend, tooltip=tooltip))
    return layers
