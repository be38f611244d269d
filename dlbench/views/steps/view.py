"""Steps and ranks: words, charts, tables and the sections of a group."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

from dlbench.reading.digest import OutlierStep
from dlbench.report.charts.chart import Chart, Rows, Subject, finish, short, tooltips
from dlbench.report.charts.style import PART_COLOURS, RANK_COLOURS, WIDE, si_label
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Pivot, Sheet
from dlbench.report.wording import DASH, PART_TITLES, figure_text, percent, place_text, shown, value_text
from dlbench.units import format_seconds
from dlbench.views.model import Group
from dlbench.views.next_step import second_rank
from dlbench.views.steps.numbers import MapRow, RankMap, StepPoint, StepQuantile, StepTimes, step_times
from dlbench.views.view import GroupSource, GroupView

CORRELATED = 0.2
"""From this autocorrelation of successive steps on, a warning is given: such steps are not independent."""


def place(point: StepPoint | RankMap) -> str:
    """``4 ranks on 2 nodes``."""
    return place_text(point.ranks, point.nodes)


def step_headline(found: StepTimes) -> str:
    """Median, tail and outliers at the largest rank count."""
    last = found.points[-1]
    tail = f"95 % within {value_text(last.p95)}" if supports(last, 95) else f"longest {value_text(last.longest)}"
    count = f"{last.num_outliers or 'no'} outlier{'s' * (last.num_outliers != 1)} in {last.num_steps:,} steps"
    return f"{place(last)}: median step {value_text(last.p50)}, {tail}; {count}"


def supports(point: StepPoint, percent_of_steps: int) -> bool:
    """Whether the runs are long enough for a quantile: a step at least lies beyond it."""
    beyond = min(percent_of_steps, 100 - percent_of_steps)
    return not beyond or beyond * point.num_steps >= 100 * len(point.run_ids)


def step_notes(found: StepTimes) -> tuple[str, ...]:
    """The slowest step; and where steps are no independent measurements, in one sentence."""
    correlated = [
        f"{' '.join(filter(None, shown(point.autocorrelation, 2)))} at {place(point)}"
        for point in found.points
        if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED
    ]
    warning = (f"Successive steps are correlated ({'; '.join(correlated)}): count runs, not steps.",)
    return (*_longest_step_text(found.points[-1]), *(warning if correlated else ()))


def outliers_text(point: StepPoint) -> str:
    """``12 (0.04 %)``: outliers of all runs."""
    return f"{point.num_outliers:,} ({percent(point.pooled_outlier_share, 2)})"


def _longest_step_text(point: StepPoint) -> tuple[str, ...]:
    if not point.outliers:
        return ()
    worst = point.outliers[0]
    return (
        f"Slowest step relative to its run at {place(point)}: step {worst.step} of {worst.run_id} ({worst.ratio:.2f}x "
        f"the median), mostly {PART_TITLES[worst.phase]}, rank {worst.rank} on {worst.host}.",
    )


# Ranks by steps


def map_text(found: RankMap) -> str:
    """What a cell of the map is, and of which run."""
    columns = found.last_step - found.step_starts[0] + 1
    joined = ["the largest of the ranks of a row"] if len(found.rows) < found.ranks else []
    joined += ["means over neighbouring steps"] if len(found.step_starts) < columns else []
    how = f" ({', '.join(joined)})" if joined else ""
    return (
        f"Own work: the step without exchange, over the median of all ranks and steps{how}; {found.run_id}, the "
        f"median run at {place(found)}."
    )


def row_title(row: MapRow) -> str:
    """``rank 5``, ``ranks 16 to 31``."""
    if row.first_rank == row.last_rank:
        return f"rank {row.first_rank}"
    return f"ranks {row.first_rank} to {row.last_rank}"


DRAWN = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)
"""Percents of the quantiles that are drawn."""

LISTED = (0, 5, 25, 50, 75, 95, 100)
"""Percents of the quantiles that stand in tables for people, where the runs have steps enough for them."""

FEW_OUTLIERS = 3
"""With fewer outliers there is a sentence, and neither a table nor a chart."""

MAX_OUTLIERS = 20
"""Steps in a table for people; the ones with the largest ratio."""

MAX_ROWS = 16
"""Rows of a map in a table for people; the slowest ones."""


def _ratio(value: float, decimals: int) -> Cell:
    return Cell(f"{value:.{decimals}f}x", number=value)


def steps_sheet(found: StepTimes) -> Sheet[StepPoint]:
    """Step times, a line per rank count; people see the quantiles that all points have steps enough for."""
    has_outliers = any(point.num_outliers for point in found.points)

    def tail(percent: int, title: str) -> str:
        return title if all(supports(point, percent) for point in found.points) else ""

    columns: tuple[Column[StepPoint], ...] = (
        Column("", "At", place),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("is_baseline", "", lambda point: point.is_baseline),
        Column("runs", "", lambda point: len(point.run_ids)),
        Column("steps", "Steps", lambda point: point.num_steps, lambda point: f"{point.num_steps:,}"),
        Column("warmup_steps_left_out", "", lambda point: point.num_warmup),
        Column("p50_s", "Median", lambda point: point.p50, has_interval=True),
        Column("p95_s", tail(95, "p95"), lambda point: point.p95, has_interval=True),
        Column("p99_s", tail(99, "p99"), lambda point: point.p99, has_interval=True),
        Column("longest_s", "Longest", lambda point: point.longest, has_interval=True),
        Column("fence_s", "Outlier limit" if has_outliers else "", lambda point: point.fence, has_interval=True),
        Column("outlier_share_fraction", "", lambda point: point.outlier_share, has_interval=True),
        Column("outlier_steps", "Outliers" if has_outliers else "", lambda point: point.num_outliers, outliers_text),
        Column("autocorrelation", "", lambda point: point.autocorrelation, has_interval=True),
        Column("interval", "", lambda point: point.p50.kind),
    )
    return Sheet(
        name="steps",
        title="Step times by rank count",
        columns=columns,
        rows=found.points,
        caption="Outlier limit: third quartile + 3 x interquartile range of the run (Tukey)." if has_outliers else "",
    )


Outlier = tuple[StepPoint, OutlierStep]


def outlier_sheet(points: Sequence[StepPoint], most: int = MAX_OUTLIERS) -> Sheet[Outlier]:
    """The longest steps, for people the `most` with the largest ratio to their run's median step, largest first."""
    rows = tuple((point, step) for point in points for step in point.outliers)
    shown = {id(step) for _, step in sorted(rows, key=lambda row: -row[1].ratio)[:most]}
    columns: tuple[Column[Outlier], ...] = (
        Column("", "At", lambda row: place(row[0])),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("is_baseline", "", lambda row: row[0].is_baseline),
        Column("step", "Step", lambda row: row[1].step),
        Column("seconds", "Took", lambda row: row[1].seconds, unit="s"),
        Column("ratio_to_median", "Over the median", lambda row: row[1].ratio, lambda row: _ratio(row[1].ratio, 2)),
        Column("rank", "Rank", lambda row: row[1].rank),
        Column("host", "Host", lambda row: row[1].host, limit=64),
        Column("phase", "Grew most", lambda row: row[1].phase, lambda row: PART_TITLES[row[1].phase]),
        Column("run_id", "Run", lambda row: row[1].run_id),
        Column("outlier_steps_of_all_runs", "", lambda row: row[0].num_outliers),
    )
    return Sheet(
        name="outlier-steps",
        title="Outlier steps",
        columns=columns,
        rows=rows,
        is_shown=lambda row: len(rows) >= FEW_OUTLIERS and id(row[1]) in shown,
        order=lambda row: -row[1].ratio,
        is_folded=True,
    )


Quantile = tuple[StepPoint, int, StepQuantile]


def quantile_sheet(found: StepTimes) -> Sheet[Quantile]:
    """The distribution of step times; for people a column per rank count."""
    columns: tuple[Column[Quantile], ...] = (
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("is_baseline", "", lambda row: row[0].is_baseline),
        Column("share_of_steps_fraction", "", lambda row: row[2].share),
        Column("seconds", "", lambda row: row[2].seconds, has_interval=True),
        Column("runs", "", lambda row: row[2].seconds.n),
        Column("interval", "", lambda row: row[2].seconds.kind),
    )
    return Sheet(
        name="step-quantiles",
        title="Distribution of step times",
        columns=columns,
        rows=tuple((point, index, one) for point in found.points for index, one in enumerate(point.quantiles)),
        pivot=Pivot(
            corner="Share of steps",
            down=lambda row: f"{row[1]} %",
            across=lambda row: place(row[0]),
            cell=lambda row: row[2].seconds,
        ),
        is_shown=lambda row: row[1] in LISTED and supports(row[0], row[1]),
        is_drawn=True,
        caption="Geometric means over runs; in parentheses the range of runs.",
    )


# Ranks by steps


def rank_sheet(found: RankMap, most: int = MAX_ROWS) -> Sheet[MapRow]:
    """Mean and largest value of each row of the map, for people of the `most` slowest, slowest first."""
    slowest = sorted(found.rows, key=lambda row: -row.mean)[:most]
    columns: tuple[Column[MapRow], ...] = (
        Column("", "Ranks", row_title),
        Column("run_id", "", lambda row: found.run_id),
        Column("ranks", "", lambda row: found.ranks),
        Column("nodes", "", lambda row: found.nodes),
        Column("first_rank", "", lambda row: row.first_rank),
        Column("last_rank", "", lambda row: row.last_rank),
        Column("hosts", "Hosts", lambda row: row.hosts, lambda row: row.hosts or DASH, limit=140),
        Column("mean_ratio", "Mean", lambda row: row.mean, lambda row: _ratio(row.mean, 3)),
        Column("largest_ratio", "Largest", lambda row: row.largest, lambda row: _ratio(row.largest, 3)),
        Column("", "In steps", _steps_of_largest),
        Column("largest_first_step", "", lambda row: row.largest_first_step),
        Column("largest_last_step", "", lambda row: row.largest_last_step),
    )
    return Sheet(
        name="ranks",
        title="Own work by rank, slowest first",
        columns=columns,
        rows=found.rows,
        is_shown=lambda row: row in slowest,
        order=lambda row: -row.mean,
        is_drawn=True,
    )


def _steps_of_largest(row: MapRow) -> str:
    first, last = row.largest_first_step, row.largest_last_step
    return str(first) if first == last else f"{first} to {last}"


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
            "seconds": short(figure.value),
            "low": short(figure.value if figure.low is None else figure.low),
            "high": short(figure.value if figure.high is None else figure.high),
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
    tooltip = tooltips({"place:N": "at", "share:Q": "share of the steps, %", "shown:N": "take no longer than"})
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
            "ratio": short(one.ratio),
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
    tooltip = tooltips(
        {
            "step:Q": "step",
            "shown:N": "took",
            "ratio:Q": "over the median",
            "who:N": "longest own work",
            "phase:N": "grew most",
            "run:N": "run",
        }
    )
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
    tooltip = tooltips({"who:N": "ranks", "when:N": "steps", "shown:N": "own work over the median"})
    cells = alt.Chart(alt.InlineData(values=rows)).mark_rect(strokeWidth=0)
    legend = colour.legend(orient="bottom", columns=4, titleOrient="top", titleLimit=WIDE)
    layers.append(cells.encode(x=x, x2="x2:Q", y=y, y2="y2:Q", color=legend, tooltip=tooltip))
    return layers


NO_STEPS = "this report was made without the single steps of its runs."


class StepsView(GroupView):
    """How long steps take, and which take far longer."""

    id = "steps"
    title = "Step times"
    key = "step_times"

    def numbers(self, source: GroupSource) -> StepTimes | None:
        return step_times(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        found = group.of(StepTimes)
        if found is None:
            return None
        outliers = outlier_sheet(found.points)
        return Section(
            id=self.id,
            title=self.title,
            headline=step_headline(found),
            notes=step_notes(found),
            charts=lambda: step_charts(group, found),
            sheets=(steps_sheet(found), *((outliers,) if outliers.rows else ()), quantile_sheet(found)),
        )

    def remedy(self, group: Group) -> str:
        return NO_STEPS


class RanksView(GroupView):
    """Which ranks take longer than the others, and when."""

    id = "ranks"
    title = "Ranks and steps"

    def section(self, group: Group) -> Section | None:
        found = group.of(StepTimes)
        if found is None or len(found.map.rows) < 2:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=f"{found.map.finding[:1].lower()}{found.map.finding[1:].rstrip('.')}",
            notes=(map_text(found.map),),
            charts=lambda: rank_charts(group, found.map),
            sheets=(rank_sheet(found.map),),
        )

    def remedy(self, group: Group) -> str:
        if group.of(StepTimes) is None:
            return NO_STEPS
        return second_rank(group, "one rank has none beside it")
