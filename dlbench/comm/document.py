"""The report of the collective benchmark, one fit, and predictions, each as a `Document` with its tables and charts."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from dlbench.comm.choice import STAY_WITHIN, Best, Crossover, Ratio
from dlbench.comm.costs import COST_WORDS, COSTS, Cost, sheet_of
from dlbench.comm.fits import Errors, Fit
from dlbench.comm.measurements import Measurement, Rejected, Series
from dlbench.comm.pairs import LEVEL_TITLES, PairFigure, PairsReport
from dlbench.comm.predictions import CABLES, PredictedSeries, Prediction, Predictions, Price
from dlbench.comm.report import (
    COLLECTIVE_TITLES,
    TITLE,
    CollectivesReport,
    GroupReport,
    RunRow,
    about,
    extrapolated_text,
    fit_caption,
    fusion_text,
    layout_text,
    per_byte_text,
    poor_text,
    predicted_fusion_text,
    prediction_advice,
    same_text,
)
from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, finish, tooltips
from dlbench.report.charts.shapes import Axis, figure_row, intervals, lines
from dlbench.report.charts.shapes import Series as Lines
from dlbench.report.charts.style import IDEAL, MUTED, NARROW, RANK_COLOURS, WIDE
from dlbench.report.document import (
    MAX_LISTED,
    Card,
    Document,
    Section,
    methods_section,
    remark,
    warnings_cell,
    without_figures,
)
from dlbench.report.table import (
    Cell,
    Column,
    NamedTable,
    Pivot,
    Sheet,
    cell_of,
    columns_of,
    drop_empty_columns,
    named_table,
    text_sheet,
    times_cell,
)
from dlbench.report.wording import basis_text, figure_text, interval_text, optional, percent, runs_text, value_text
from dlbench.specs.comm import PAIR_WAYS, LineCost, NetworkModel
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.units import format_bytes

# In front of every row of a group's, or a fit's, tables.
GROUP_COLUMNS = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")
FIT_COLUMNS = ("system", "carrier", "dtype")


class Point(NamedTuple):
    """One series at one size."""

    series: Series
    at: Measurement


def points_of(series: Series) -> list[Point]:
    """The points of a series, by size."""
    return [Point(series, row) for row in series.rows]


_POINTS: tuple[Column[Point], ...] = (
    *columns_of(Series, "carrier", "algorithm", of=lambda one: one.series),
    *columns_of(
        Measurement,
        *("num_bytes", "time", "minimum_s", "algbw", "busbw", "runs=time.n"),
        Column("interval", "Interval", lambda row: row.time.kind, lambda row: basis_text(row.time)),
        *("iterations", "operations", "timing", "single_call_s", "skew_s"),
        *("steps", "messages", "bytes_sent", "bytes_across"),
        *("predicted_s", "predicted_over_measured", "fastest=is_best"),
        of=lambda one: one.at,
    ),
)


def matrix_sheet(group: GroupReport) -> Sheet[Point]:
    """Every time: a line for each size, a column for each series; for programs all that is known of each point."""
    short = short_titles(group.series)
    return Sheet(
        name="points",
        title="Times by size and algorithm",
        columns=_POINTS,
        rows=[point for series in group.series for point in points_of(series)],
        order=lambda one: one.at.num_bytes,
        caption="* fastest.",
        pivot=Pivot(
            corner="Size",
            down=lambda one: format_bytes(one.at.num_bytes),
            across=lambda one: short[one.series.title],
            cell=_time_cell,
        ),
    )


def short_titles(all_series: Sequence[Series]) -> dict[str, str]:
    """What each series is called where all are of one group; algorithms without their carrier where all share it."""
    carriers = {series.carrier for series in all_series if not series.is_library}
    return {
        series.title: series.algorithm if len(carriers) == 1 and not series.is_library else series.title
        for series in all_series
    }


def _time_cell(one: Point) -> Cell:
    cell = cell_of(one.at.time)
    return dataclasses.replace(cell, text=f"{cell.text}{' *' * one.at.is_best}")


def series_sheet(series: Series) -> Sheet[Point]:
    """Everything known of one series, a line for each size; without columns that no size has."""
    rows = points_of(series)
    # Programs find them in the matrix.
    columns = tuple(
        dataclasses.replace(one, name="") for one in _POINTS if any(one.value(row) is not None for row in rows)
    )
    return Sheet(name="series", title=series.title, columns=columns, rows=rows, is_folded=True)


_REJECTED: tuple[Column[Rejected], ...] = (
    Column("algorithm", "Series", lambda one: one.title),
    Column("num_bytes", "Size", lambda one: one.num_bytes, unit="bytes"),
    Column("problem", "Why", lambda one: one.why),
    Column("runs", "Runs", lambda one: len(one.runs), lambda one: ", ".join(one.runs)),
)


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """The fastest series of each size; without the carrier where all algorithms have the same."""
    carriers = {series.carrier for series in group.series if not series.is_library}
    carrier = f" over {next(iter(carriers))}" if len(carriers) == 1 else ""
    columns: tuple[Column[Best], ...] = (
        Column("", "Size", lambda one: one.num_bytes, unit="bytes", is_brief=True),
        Column("", "Fastest", lambda one: one.title.removesuffix(carrier), is_brief=True),
        Column("", "Time, median", lambda one: one.time, is_brief=True),
        Column("", "busbw, GB/s" if group.ranks > 1 else "algbw, GB/s", lambda one: one.rate, is_brief=True),
        Column("", "Minimum", lambda one: one.minimum_s, unit="s"),
        Column("", "Next", lambda one: one.second.removesuffix(carrier) or None),
        Column("", "Lead", lambda one: one.lead, lambda one: times_cell(one.lead), is_brief=True),
        Column("", "Clear", lambda one: one.is_clear if one.lead else None, _clear, is_brief=True),
    )
    return Sheet(name="fastest", title="Fastest by size", columns=columns, rows=group.best, in_terminal=True)


def _clear(one: Best) -> str:
    """Returns whether the fastest is clearly so, and if too few runs forbid it, how many there are."""
    if one.lead is not None and one.lead.n < MIN_RUNS:
        return f"no: {runs_text(one.lead.n)}"
    return "yes" if one.is_clear else "no"


def crossovers_sheet(group: GroupReport) -> Sheet[Crossover]:
    """Where one series overtakes another, measured and by the model."""

    def between(one: Crossover) -> str | None:
        return None if one.low is None or one.high is None else f"{format_bytes(one.low)} and {format_bytes(one.high)}"

    columns: tuple[Column[Crossover], ...] = (
        Column("", "Source", lambda one: one.source),
        Column("", "From size", lambda one: about(one.num_bytes)),
        Column("", "Between", between),
        Column("", "Until then", lambda one: one.before),
        Column("", "From then on", lambda one: one.after),
    )
    return Sheet(name="crossovers", title="Where the lead changes", columns=columns, rows=group.crossovers)


_PAIRS = columns_of(
    PairFigure,
    *("pair", "level", "way"),
    *columns_of(Measurement, "num_bytes", "time", "minimum_s", of=lambda one: one.at),
    Column("gb_per_s", "Bandwidth, GB/s", lambda one: one.at.algbw, has_interval=True, is_brief=True),
    *("beside", "factor", "factor_p99", "operations=at.iterations"),
)
_RATIOS = columns_of(Ratio, "num_bytes", "own", "library", "speed", "runs=speed.n", "interval=speed.kind", "paired")


def ratio_sheet(group: GroupReport, own: str, *, is_shown: bool) -> Sheet[Ratio]:
    """Speed of one of dlbench's algorithms over the libraries."""
    return Sheet(
        name="ratios",
        title=f"Speed of {own} relative to",
        columns=_RATIOS,
        rows=[one for one in group.ratios if one.own == own],
        pivot=Pivot(
            corner="Size", down=lambda one: format_bytes(one.num_bytes), across=lambda one: one.library, cell=_speed
        ),
        order=lambda one: one.num_bytes,
        is_folded=not is_shown,
    )


def _speed(one: Ratio) -> Cell:
    cell = times_cell(one.speed)
    return cell if one.paired else dataclasses.replace(cell, text=f"{cell.text} (not the same runs)")


class _Costs(NamedTuple):
    """What messages of some sizes cost on one level, or a byte of a reduction."""

    name: str
    messages: str
    up_to_bytes: int | None
    links: int | None
    alpha: Estimate | None
    beta: Estimate


_COSTS: tuple[Column[_Costs], ...] = (
    Column("name", "Level", lambda one: one.name, lambda one: LEVEL_TITLES.get(one.name, one.name)),
    Column("up_to_bytes", "Messages", lambda one: one.up_to_bytes, lambda one: one.messages),
    Column("links", "Links", lambda one: one.links, lambda one: _links_text(one)),
    Column("alpha_s", "alpha", lambda one: one.alpha, has_interval=True),
    Column("s_per_byte", "1/beta, GB/s", lambda one: one.beta, lambda one: _rate(one.beta), has_interval=True),
)


def costs_sheet(network: NetworkModel) -> Sheet[_Costs]:
    """Costs by level and size of a message, and of the reduction; a rate is a cost per byte turned over."""
    rows = []
    for name, level in network.levels.items():
        before = None
        for piece in level.pieces:
            messages = "all sizes" if before is None else f"above {format_bytes(before)}"
            if piece.up_to_bytes is not None:
                messages = f"up to {format_bytes(piece.up_to_bytes)}"
            alpha = _fitted(piece.alpha_s, piece.alpha_interval_s, "s")
            beta = _fitted(piece.beta_s_per_byte, piece.beta_interval_s_per_byte)
            rows.append(_Costs(name, messages, piece.up_to_bytes, level.links, alpha, beta))
            before = piece.up_to_bytes
    if rows:
        rows.append(_Costs("reduction", "all sizes", None, None, None, _fitted(network.gamma_s_per_byte, None)))
    caption = fit_caption(network)
    return Sheet(name="fits", title="Costs of a message", columns=_COSTS, rows=rows, caption=caption)


def _links_text(one: _Costs) -> str:
    block = {"inside": "group", "across": "group", "beyond": "leaf switch"}.get(one.name)
    return "" if block is None else "one per rank" if one.links is None else f"{one.links} per {block}"


def _fitted(value: float, ends: tuple[float, float] | None, unit: str = "") -> Estimate:
    low, high = ends or (None, None)
    return Estimate(value, low, high, 1, "fit", unit, level=None if ends is None else 0.95)


def _rate(beta: Estimate) -> Cell:
    if beta.low is None or beta.high is None:
        return Cell(per_byte_text(beta.value))
    fastest = per_byte_text(beta.low) if beta.low > 0 else "∞"
    return Cell(per_byte_text(beta.value), f"[{per_byte_text(beta.high)}, {fastest}]")


_LINES: tuple[Column[LineCost], ...] = (
    Column("name", "Collective", lambda one: one.name),
    Column("ranks", "Ranks", lambda one: one.ranks),
    Column("alpha_s", "Start-up", lambda one: one.startup_s, unit="s"),
    Column(
        "s_per_byte", "Asymptotic algbw, GB/s", lambda one: one.per_byte_s, lambda one: per_byte_text(one.per_byte_s)
    ),
)


_SHOWN = ("state", "collective", "system", "ranks", "nodes", "repeat")
_RUNS: tuple[Column[RunRow], ...] = columns_of(
    RunRow,
    *("run_id", "group", "state", "collective", "dtype", "system", "ranks", "nodes", "repeat"),
    *("finished", "failure_reason"),
    Column("warnings", "Warnings", lambda run: " | ".join(run.warnings), lambda run: warnings_cell(run.warnings)),
    titles={"run_id": "Run"} | {name: name.capitalize() for name in _SHOWN},
)


def runs_sheet(report: CollectivesReport) -> Sheet[RunRow]:
    """All runs, one line each."""
    return Sheet(name="runs", title="All runs", columns=_RUNS, rows=report.runs, is_sortable=True, max_rows=MAX_LISTED)


def always() -> tuple[NamedTable, ...]:
    """Tables for programs that every report has, with all columns that any of its sheets may have."""
    return (
        named_table("points", "Measured points", (*_POINTS, *_REJECTED), GROUP_COLUMNS),
        named_table("pairs", "Pairs of ranks", _PAIRS, ("group",)),
        named_table("ratios", "Ratios to libraries", _RATIOS, GROUP_COLUMNS),
        named_table("costs", "Cost of each algorithm", COSTS, GROUP_COLUMNS),
        named_table("fits", "Fitted costs", (*_LINES[:2], *_COSTS), FIT_COLUMNS),
        named_table("runs", "All runs", _RUNS),
    )


@dataclass(frozen=True)
class _Predicted:
    """One predicted time: of a size, or of all gradients of a step as one message."""

    size: str
    name: str
    price: Price
    is_best: bool


def predictions_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """Predicted times: a line for each size, a column for each algorithm; the fastest of each line has a star."""
    rows = [
        row
        for place, size in enumerate(found.sizes)
        for row in _predicted(format_bytes(size), one, [_at(series, place) for series in one.series])
    ]
    if found.workload_bytes is not None:
        size = f"gradients, {about(found.workload_bytes)}"
        times = [
            Price(each.workload_s or 0.0, each.workload_low_s, each.workload_high_s, each.phi[-1] if each.phi else None)
            for each in one.series
        ]
        rows += _predicted(size, one, times)
    has_ends = any(row.price.low is not None for row in rows)
    return Sheet(
        name="predictions",
        title="Predicted times",
        columns=(),
        rows=rows,
        caption="* fastest"
        + "; in brackets 95 % over runs and wider by the fit's own error, if the model goes on" * has_ends
        + _phi_text(rows)
        + "; (line): through sizes measured at this rank count" * any(s.is_line for s in one.series),
        pivot=Pivot(corner="Size", down=lambda row: row.size, across=lambda row: row.name, cell=_predicted_cell),
    )


def _phi_text(rows: Sequence[_Predicted]) -> str:
    return "; phi: flows that a link carries at once, where more than one" * any(
        (row.price.phi or 0) > 1 for row in rows
    )


def fastest_predicted_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """The fastest of each size alone, for the terminal."""
    series = {series.name: series for series in one.series}
    rows = [
        _Predicted(format_bytes(size), name, _at(series[name], place), False)
        for place, (size, name) in enumerate(zip(found.sizes, one.best, strict=True))
    ]
    columns: tuple[Column[_Predicted], ...] = (
        Column("", "Size", lambda row: row.size),
        Column("", "Predicted fastest", lambda row: row.name),
        Column("", "Time", lambda row: row.price.seconds, _predicted_cell),
    )
    caption = _phi_text(rows).removeprefix("; ")
    return Sheet(
        name="fastest", title="Predicted fastest", columns=columns, rows=rows, caption=caption, in_terminal=True
    )


def _at(series: PredictedSeries, place: int) -> Price:
    low, high = (None if ends is None else ends[place] for ends in (series.low, series.high))
    return Price(series.seconds[place], low, high, series.phi[place] if series.phi else None)


def _predicted(size: str, one: Prediction, prices: list[Price]) -> list[_Predicted]:
    is_usable = [series.poor_error is None for series in one.series]
    best = min(value for (value, *_), usable in zip(prices, is_usable, strict=True) if usable or not any(is_usable))
    return [
        _Predicted(
            size,
            series.name + " (line)" * series.is_line + " (poor fit)" * (series.poor_error is not None),
            price,
            price.seconds == best and (series.poor_error is None or not any(is_usable)),
        )
        for series, price in zip(one.series, prices, strict=True)
    ]


def _predicted_cell(row: _Predicted) -> Cell:
    seconds, low, high, phi = row.price
    many = f" (phi {phi:.3g})" if phi is not None and phi > 1 else ""
    text = f"{optional(seconds, 's')}{' *' * row.is_best}{many}"
    return Cell(text, "" if low is None else f"[{optional(low, 's')}, {optional(high, 's')}]", number=seconds)


HEIGHT = 260
MOST_DRAWN = 32  # Series of pairs in one chart, or ranks: those that are hit most.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
"""As many as can be distinguished; one more than there are colours, so that pairs repeat late."""
TOLERANCE = 0.1  # Half the width of the band around a perfect prediction (fraction).


class _Quantity(NamedTuple):
    name: str
    title: str
    axis: str
    value: Callable[[Measurement], Estimate | float | None]
    """None where a measurement has none; a number is predicted over measured."""
    unit: str = ""  # Behind the value where no header names it.

    def cell(self, row: Measurement) -> Estimate | Cell | None:
        """What people read."""
        value = self.value(row)
        if not isinstance(value, float):
            return value
        return Cell(f"{value:.2f} ({optional(row.predicted_s, 's')} predicted)")


_TIME = _Quantity("time", "Time over size", "time", lambda row: row.time)
_PREDICTION = _Quantity(
    "prediction", "Predicted over measured time", "predicted / measured", lambda row: row.predicted_over_measured
)
_QUANTITIES = (
    _Quantity("busbw", "Bus bandwidth over size", "busbw, GB/s", lambda row: row.busbw, " GB/s"),
    _TIME,
    _PREDICTION,
)


def group_charts(group: GroupReport | PairsReport) -> list[Chart]:
    """The charts of a group of two sizes or more; none of predictions where there are none."""
    charts = []
    of_pairs = _QUANTITIES[0]._replace(title="Bandwidth of a message over size", axis="GB/s"), _TIME
    for quantity in of_pairs if isinstance(group, PairsReport) else _QUANTITIES:
        points = [one for series in group.series for one in points_of(series) if quantity.value(one.at) is not None]
        if not points:
            continue
        rows = _rows(group, quantity, points)
        # At the largest size of each series: enough to hear what the chart shows; the table holds all.
        last = {row["series"]: row for row in rows}
        found = "; ".join(f"{name} at {row['size']}: {row['shown']}" for name, row in last.items())
        charts.append(
            finish(
                alt.layer(*_layers(alt, group, rows, quantity)),
                group,
                name=quantity.name,
                title=quantity.title,
                alt=f"{quantity.title} of {group.label}. {found}.",
                table=_sheet(quantity, points),
                size=(WIDE, HEIGHT),
            )
        )
    return charts


def _sheet(quantity: _Quantity, points: list[Point]) -> Sheet[Point]:
    pivot: Pivot[Point] = Pivot(
        corner="Size",
        down=lambda point: format_bytes(point.at.num_bytes),
        across=lambda point: point.series.title,
        cell=lambda point: quantity.cell(point.at),
    )
    order = operator.attrgetter("at.num_bytes")
    return Sheet(name=quantity.name, title=quantity.axis, columns=(), rows=points, pivot=pivot, order=order)


def _rows(group: GroupReport | PairsReport, quantity: _Quantity, points: list[Point]) -> Rows:
    titles = short_titles(group.series)
    rows: Rows = []
    for series, row in ((point.series, point.at) for point in points):
        value = quantity.value(row)
        figure = value if isinstance(value, Estimate) else None
        rows.append(
            {
                "series": titles[series.title],
                "kind": "library" if series.is_library else "dlbench",
                "bytes": row.num_bytes,
                "size": format_bytes(row.num_bytes),
                "value": figure.value if figure else value,
                "low": figure.low if figure else None,
                "high": figure.high if figure else None,
                "shown": f"{cell_of(quantity.cell(row))}{quantity.unit}",
                "basis": basis_text(row.time),
            }
        )
    return rows


def _layers(alt: Any, group: GroupReport | PairsReport, rows: Rows, quantity: _Quantity) -> list[Any]:
    drawn = {row["series"] for row in rows}
    # Numbered over all series, so that one keeps its colour and shape in every chart.
    looks = [(index, name) for index, name in enumerate(short_titles(group.series).values()) if name in drawn]
    names = [name for _, name in looks]
    legend = {"orient": "bottom", "columns": 2, "symbolStrokeWidth": 2, "symbolSize": 60}
    colours = [RANK_COLOURS[index % len(RANK_COLOURS)] for index, _ in looks]
    shapes = [SHAPES[index % len(SHAPES)] for index, _ in looks]
    colour = alt.Color("series:N", title=None, sort=names).scale(domain=names, range=colours).legend(**legend)
    shape = alt.Shape("series:N", title=None, sort=names).scale(domain=names, range=shapes).legend(**legend)
    dash = alt.StrokeDash("kind:N", legend=None).scale(domain=["dlbench", "library"], range=[[1, 0], [6, 4]])
    shown = quantity.axis.partition(",")[0]
    tooltip = tooltips({"series:N": "series", "size:N": "size", "shown:N": shown, "basis:N": "interval"})
    sizes = _size_axis(alt, rows)
    x = sizes.title("bytes of a message") if isinstance(group, PairsReport) else sizes
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
    line = base.mark_line(strokeWidth=1.5, opacity=0.85)
    rule = base.mark_rule(strokeWidth=3, opacity=0.35).encode(y=alt.Y("low:Q"), y2="high:Q", color=colour)
    point = base.mark_point(filled=True, size=42, opacity=1)
    return [
        *(_perfect(alt, rows) if quantity is _PREDICTION else []),
        line.encode(y=_value_axis(alt, rows, quantity), color=colour, strokeDash=dash),
        *([rule] if any(row["low"] is not None for row in rows) else []),
        point.encode(y=alt.Y("value:Q"), color=colour, shape=shape, tooltip=tooltip),
    ]


def _size_axis(alt: Any, rows: Rows) -> Any:
    sizes = sorted({row["bytes"] for row in rows})
    domain = [sizes[0] / 1.15, sizes[-1] * 1.15]
    x = alt.X("bytes:Q", title="bytes of each rank's buffer").scale(type="log", base=2, domain=domain, nice=False)
    powers = [2**k for k in range(50) if sizes[0] <= 2**k <= sizes[-1]]
    # At most seven labels, at powers of two that are evenly apart.
    step = max(1, -(-len(powers) // 7))
    label = _label(("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    return x.axis(values=powers[::step] or sizes[:1], grid=False, labelExpr=label)


def _label(*units: tuple[str, float]) -> str:
    """Vega's expression for a label in the largest unit that is not above the value; units descend."""
    *larger, (smallest, size) = units
    cases = "".join(f"datum.value >= {0.9 * s} ? format(datum.value / {s}, '~r') + ' {name}' : " for name, s in larger)
    return f"{cases}format(datum.value / {size}, '~r') + ' {smallest}'"


def _value_axis(alt: Any, rows: Rows, quantity: _Quantity) -> Any:
    values = [end for row in rows for end in (row["value"], row["low"], row["high"]) if end]
    y = alt.Y("value:Q", title=quantity.axis)
    if quantity is _PREDICTION:
        edge = max(1.3, *(value * 1.05 for value in values), *(1.05 / value for value in values))
        steps = [tick for tick in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10) if 1 / edge <= tick <= edge]
        return y.scale(type="log", domain=[1 / edge, edge], nice=False).axis(values=steps, format="~r")
    if quantity is not _TIME:
        return y.scale(domain=[0, max(values) * 1.08], nice=False).axis(format=".4~g", tickCount=6)
    low, high = min(values) / 1.3, max(values) * 1.3
    # Powers of ten within, and 2 and 5 times these where there are few.
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]
    tens = [tick for tick in ticks if math.isclose(tick, 10.0 ** round(math.log10(tick)))]
    label = _label(("s", 1), ("ms", 1e-3), ("µs", 1e-6))
    axis = {"values": tens if len(tens) > 2 else ticks, "labelExpr": label}
    return y.scale(type="log", domain=[low, high], nice=False).axis(**axis)


def _perfect(alt: Any, rows: Rows) -> list[Any]:
    """A band and a line where a prediction is right; drawn first, so that points lie above."""
    sizes = sorted({row["bytes"] for row in rows})
    ends = [{"bytes": size, "low": 1 - TOLERANCE, "high": 1 + TOLERANCE, "one": 1.0} for size in (sizes[0], sizes[-1])]
    data, label = (alt.Chart(alt.InlineData(values=one)).encode(x=alt.X("bytes:Q")) for one in (ends, ends[:1]))
    text = label.mark_text(color=MUTED, align="left", baseline="bottom", dx=2, dy=-2, fontSize=11, text="± 10 %")
    return [
        data.mark_area(color=IDEAL, opacity=0.18).encode(y=alt.Y("low:Q"), y2="high:Q"),
        data.mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("one:Q")),
        text.encode(y=alt.Y("high:Q")),
    ]


def _over_ranks(report: CollectivesReport) -> Iterator[Section]:
    """Time over ranks where a collective was measured at several counts; of layouts of one count that of most nodes."""
    found: dict[tuple[str, str, str], dict[int, GroupReport]] = {}
    for group in sorted(report.groups, key=lambda one: (one.ranks, one.nodes)):
        found.setdefault((group.system, group.collective, group.dtype), {})[group.ranks] = group
    for number, by_ranks in enumerate(found.values()):
        groups = tuple(by_ranks.values())
        sizes = set.intersection(*({row.num_bytes for one in group.series for row in one.rows} for group in groups))
        if len(groups) > 1 and sizes:
            ends = sorted({*sorted(sizes)[:: max(1, len(sizes) // 2)][:2], max(sizes)})
            one = groups[-1]
            label = f"{one.system}: {COLLECTIVE_TITLES[one.collective]} {one.dtype}"
            yield Section(
                id=f"ranks-{number}",
                title=f"{label}, over ranks",
                caption=f"The {len(RANK_COLOURS)} fastest at {one.ranks} ranks. Dotted: predicted without the point.",
                charts=partial(_ranks_charts, groups, ends, ReportSubject(f"ranks-{number}", label)),
                brief=(),
            )


def _ranks_charts(groups: Sequence[GroupReport], sizes: Sequence[int], about: ReportSubject) -> list[Chart]:
    charts = []
    for size in sizes:
        rows: Rows = [
            {
                "ranks": group.ranks,
                "series": short_titles(group.series)[series.title],
                **figure_row(row.time),
                "predicted": row.predicted_s,
                "expected": optional(row.predicted_s, "s"),
            }
            for group in groups
            for series in group.series
            if (row := series.at(size)) is not None
        ]
        last = {row["series"]: row["value"] for row in rows if row["ranks"] == groups[-1].ranks}
        colours = dict(zip(sorted(last, key=last.__getitem__), RANK_COLOURS, strict=False))
        rows = [row for row in rows if row["series"] in colours]
        by, tooltip = Lines("series", colours), {"series": "series", "shown": "measured", "expected": "predicted"}
        y = Axis("time", unit="s", scale={"type": "log"})
        layers = [*lines(rows, y, by, tooltip).layer]
        if foretold := [row | {"low": None} for row in rows if row["predicted"] is not None]:
            layers += lines(foretold, y._replace(field="predicted"), by, tooltip, is_forecast=True).layer
        said = "; ".join(f"{row['series']} at {row['ranks']} ranks: {row['shown']}" for row in rows)
        title = f"Time over ranks, {format_bytes(size)}"
        charts.append(
            finish(
                alt.layer(*layers),
                about,
                name=f"time-{size}",
                title=title,
                alt=f"{title}. {said}.",
                table=[
                    ("Ranks", "Series", "Measured", "Predicted"),
                    *([str(row[name]) for name in ("ranks", "series", "shown", "expected")] for row in rows),
                ],
                size=(NARROW, HEIGHT),
            )
        )
    return charts


def document_of(report: CollectivesReport) -> Document:
    """The whole report."""
    empty: tuple[str, ...] = ()
    if not report.groups and not report.pairs:
        more = "Below, each run with the reason." if report.runs else "There are no runs here."
        empty = (f"No run has figures. {more}",)
    cards = (*map(_card, report.groups), *map(_card, report.pairs))
    return report.document(
        Section(id="summary", title="Summary", level="answer", words=empty, cards=cards, brief=empty),
        *map(_group, report.groups),
        *_over_ranks(report),
        *map(_pairs, report.pairs),
        *(_fit(fit, number) for number, fit in enumerate(report.fits)),
        *_runs(report),
        *methods_section(report.methods),
        meta=(f"{runs_text(len(report.runs))}, {len(report.without_figures)} without figures.",),
        always=always(),
        file_prefix="comm-",
        command="dlbench comm report RUNS",
    )


def fit_document(fit: Fit, left_out: Sequence[str] = ()) -> Document:
    """Returns one fit alone, with what was left out of it."""
    section = replace(_fit(fit, 0), marks=tuple(remark("note", f"left out: {text}") for text in left_out))
    return Document(title=TITLE, sections=(section,), data=fit)


def costs_document(title: str, tables: Mapping[str, Sequence[Cost]], num_bytes: int | None) -> Document:
    """The cost of each algorithm, by layout, at one size; None: the largest."""
    return Document(
        title=title,
        sections=tuple(
            Section(
                id=f"costs-{number}",
                title=where,
                level="answer",
                sheets=(sheet_of(rows, num_bytes or max(one.num_bytes for one in rows)),),
                brief=(
                    *dict.fromkeys(f"{one.algorithm}: {one.form}" for one in rows),
                    *[COST_WORDS] * (number == len(tables)),
                ),
            )
            for number, (where, rows) in enumerate(tables.items(), 1)
        ),
        data=tuple(tables.items()),
        command="dlbench comm table",
    )


def predictions_document(found: Predictions) -> Document:
    """What a network expects at each layout."""
    network = found.network
    basis = "intervals over runs" if network.draws else "too few runs for intervals"
    title = f"by the fitted costs of {network.system}, {network.transport} ({network.num_points} points; {basis})"
    if network.transport == CABLES:
        title = f"by the cables of {network.system}; nothing here is measured"
    return Document(
        title=f"Predicted {title}",
        sections=tuple(_prediction(found, one) for one in found.predictions),
        data=found,
        command="dlbench comm predict NETWORK --ranks N",
    )


def _pairs(found: PairsReport) -> Section:
    """Pairs of ranks: what was found, who is hit, over size, the numbers, and what a message costs by them."""
    costs = [_Costs(one.level, "pairs, ping-pong", None, None, one.alpha, one.beta) for one in found.costs]
    fitted = costs_sheet(found.fit.network).rows if found.fit else ()
    costs += (one._replace(messages=f"collectives, {one.messages}") for one in fitted)
    of_costs = tuple(replace(one, name="") for one in (*_COSTS[:2], *_COSTS[3:]))
    figures = drop_empty_columns(_PAIRS, found.figures)
    return Section(
        id=f"group-{found.id}",
        title=found.label,
        level="answer",
        caption=f"Medians over {runs_text(found.num_runs)} of single operations. Ping-pong: half of there and back. "
        "Window: one of several messages under way at once, with the answer to all. Congestors send 1 MiB after the "
        "other, first rank to second; factors are of the same runs, percentiles of 100 operations or more.",
        facts=tuple((one.title, one.value) for one in found.conditions),
        marks=tuple(remark(one.severity, one.text, len(one.runs)) for one in found.doubts),
        words=found.words,
        charts=lambda: [*_hit(found), *(group_charts(found) if len(found.series) <= MOST_DRAWN else ())],
        sheets=(
            Sheet(name="pairs", title="Pairs of ranks", columns=figures, rows=found.figures, max_rows=MAX_LISTED),
            Sheet(name="fits", title="Costs of a message", columns=of_costs, rows=costs, in_terminal=True),
        ),
        brief=(f"{runs_text(found.num_runs)}.", *found.words),
        is_group=True,
        where={"group": found.id},
    )


def _hit(found: PairsReport) -> list[Chart]:
    """How much longer the shortest ping-pong and the longest window take for the ranks of each pair."""
    rows = [
        {"at": f"{found.hosts[rank]}, rank {rank}", "way": one.way, "of": one.pair, **figure_row(one.factor)}
        for one in found.ends
        for rank in one.ranks
        if one.factor is not None
    ]
    rows.sort(key=lambda row: -row["value"])
    names = list(dict.fromkeys(row["at"] for row in rows))[:MOST_DRAWN]
    if not rows:
        return []
    titles = {"at": "rank", "way": "measured by", "of": "pair", "shown": "times as long"}
    axis, by = (
        Axis(titles["shown"], scale={"domainMin": 0}),
        Lines("way", dict(zip(PAIR_WAYS, RANK_COLOURS, strict=False))),
    )
    drawn = intervals([row for row in rows if row["at"] in names], axis, by, titles, mark="dot", reference=1)
    table = [tuple(titles.values()), *(tuple(row[name] for name in titles) for row in rows)]
    title = "Who is hit: mean time beside congestors, over alone"
    alt = "; ".join(" ".join(row) for row in table[1:])
    return [finish(drawn, found, name="hit", title=title, alt=alt, table=table, size=(WIDE, 24 * len(names)))]


def _card(group: GroupReport | PairsReport) -> Card:
    if isinstance(group, PairsReport):
        one = max(group.ends, key=lambda one: (one.level, one.way))
        rate, words = one.at.algbw, group.words
        what = f"by {one.way} of {format_bytes(one.at.num_bytes)}, {LEVEL_TITLES[one.level]}"
    else:
        last = group.best[-1]
        rate, words = last.rate, (group.verdict,)
        what = f"{'busbw' if group.ranks > 1 else 'algbw'} at {format_bytes(last.num_bytes)}, {last.title}"
    return Card(
        title=group.label,
        link=f"group-{group.id}",
        big=value_text(rate),
        small=(f"GB/s {what}", *filter(None, (interval_text(rate), basis_text(rate)))),
        words=words,
        warnings=tuple(doubt.text for doubt in group.doubts if doubt.severity == "serious"),
        warnings_link=f"marks-group-{group.id}",
        is_clear=True,
    )


def _group(group: GroupReport) -> Section:
    last = group.best[-1]
    shown = {one.name: one.value for one in group.conditions}
    cores = f"{shown['cores']} core{'' if shown['cores'] == '1' else 's'} per rank"
    conditions = (shown["device"], cores, shown["launcher"], f"hosts {shown['hosts']}", runs_text(group.num_runs))
    return Section(
        id=f"group-{group.id}",
        title=group.label,
        level="answer",
        caption=f"{group.caption}.",
        facts=tuple((one.title, one.value) for one in group.conditions),
        marks=(
            *(remark(one.severity, one.text, len(one.runs)) for one in group.doubts),
            *(remark("note", f"not measured: {text}") for text in group.not_measured),
        ),
        sections=tuple(_of_group(group)),
        # What the label does not say.
        brief=(", ".join(conditions), group.verdict),
        is_group=True,
        overview=(
            ("At", format_bytes(last.num_bytes)),
            ("Fastest", last.title),
            ("Time, median", figure_text(last.time)),
            ("Rate, GB/s", figure_text(last.rate)),
            ("Interval", basis_text(last.time)),
        ),
        where={name: getattr(group, "id" if name == "group" else name) for name in GROUP_COLUMNS},
    )


def _of_group(group: GroupReport) -> Iterator[Section]:
    fusion = fusion_text(group.fusion)
    same = tuple(map(same_text, group.same_messages))
    least = percent(STAY_WITHIN, 0)
    lead = (
        f"Lead: time of the next over that of the fastest. Clear: more than {least}, and beyond the scatter of "
        f"{MIN_RUNS} runs or more; fewer are too few, whatever the lead."
    )
    yield Section(
        id=f"choice-{group.id}",
        title="Which algorithm",
        level="answer",
        words=(group.advice, fusion),
        caption=lead,
        sheets=(best_sheet(group), *((crossovers_sheet(group),) if group.crossovers else ())),
        notes=same,
        brief=(fusion, *same),
    )
    is_drawn = len(group.best) > 1
    yield Section(
        id=f"sizes-{group.id}",
        title="Over size",
        level="answer",
        caption="In brackets: the interval. Libraries are dashed.",
        words=() if is_drawn else ("One size only: two or more (--sizes 1KiB:64MiB) are drawn over size.",),
        charts=lambda: group_charts(group) if is_drawn else [],
        brief=(),
    )
    kinds = dict.fromkeys(basis_text(row.time) for series in group.series for row in series.rows)
    last = group.best[-1]
    yield Section(
        id=f"times-{group.id}",
        title="Times",
        headline=f"{last.title}: {value_text(last.time)} at {format_bytes(last.num_bytes)}",
        caption=f"Intervals: {', '.join(kinds)}.",
        sheets=(matrix_sheet(group), *((sheet_of(group.costs, last.num_bytes),) if group.costs else ())),
        brief=(),
    )
    yield from _ratios(group)
    yield Section(
        id=f"series-{group.id}",
        title="Every series",
        level="appendix",
        headline=f"{len(group.series)} series: rates, skew, messages, bytes, predictions",
        about=(
            "Rates in GB/s (1e9 bytes per second). Bytes sent: the most of any rank, counted. Predicted: by a fit "
            "without the point.",
        ),
        sheets=tuple(map(series_sheet, group.series)),
        brief=(),
    )
    if group.rejected:
        yield Section(
            id=f"rejected-{group.id}",
            title="Points without figures",
            headline=f"{len(group.rejected)} points",
            sheets=(Sheet(name="points", title="Points without figures", columns=_REJECTED, rows=group.rejected),),
            brief=(),
        )


def _ratios(group: GroupReport) -> Iterator[Section]:
    own = list(dict.fromkeys(one.own for one in group.ratios))
    if own:
        # Unfolded is ring, or else the first one.
        shown = next((name for name in own if name.startswith("ring ")), own[0])
        libraries = {series.title for series in group.series if series.is_library}
        won = sum(one.title in libraries for one in group.best)
        yield Section(
            id=f"ratios-{group.id}",
            title="dlbench's algorithms against libraries",
            headline=f"a library is the fastest at {won} of {len(group.best)} sizes",
            caption="Above 1, the algorithm is faster: time of the library over its own.",
            sheets=tuple(ratio_sheet(group, name, is_shown=name == shown) for name in own),
            brief=(),
        )


def _fit(fit: Fit, number: int) -> Section:
    headline = "lines of libraries"
    if fit.errors:
        poor = sum(one.is_poor for one in fit.errors)
        more = f"; {poor} algorithms missed, no advice from them" * bool(poor)
        headline = f"median error {percent(fit.errors[0].median)}, worst {percent(fit.errors[0].worst)}{more}"
    columns: tuple[Column[Errors], ...] = (
        Column("", "Points", lambda one: one.scope),
        Column("", "Count", lambda one: one.num_points),
        Column("", "Median error", lambda one: one.median, unit="fraction"),
        Column("", "Worst", lambda one: one.worst, unit="fraction"),
        Column("", "Advice", lambda one: "none: the fit misses it" if one.is_poor else None),
    )
    title, lines = "Each collective as a line", fit.network.collectives
    return Section(
        id=f"fit-{number}",
        title=f"Fitted costs of {fit.title}",
        headline=headline,
        sheets=(
            costs_sheet(fit.network),
            Sheet(name="errors", title="Errors of predictions", columns=columns, rows=fit.errors),
            Sheet(name="fits", title=title, columns=_LINES, rows=lines, is_folded=bool(fit.network.levels)),
        ),
        brief=(),
        where={name: getattr(fit, name) for name in FIT_COLUMNS},
    )


def _runs(report: CollectivesReport) -> Iterator[Section]:
    """What was not fitted, all runs, those without figures, and what they ran in."""
    if report.unfitted:
        marks = tuple(remark("note", text) for text in report.unfitted)
        yield Section(id="not-fitted", title="Not fitted", marks=marks)
    if report.runs:
        yield Section(id="runs", title="Runs", level="appendix", sheets=(runs_sheet(report),))
    yield from without_figures(report.without_figures, report.damaged)
    if report.environment:
        title = "Environment that all runs with figures share"
        sheet = text_sheet("environment", title, ("Key", "Value"), report.environment)
        yield Section(
            id="environment",
            title="Environment",
            level="appendix",
            sheets=(dataclasses.replace(sheet, is_folded=True),),
        )


def _prediction(found: Predictions, one: Prediction) -> Section:
    extrapolated = extrapolated_text(found, one)
    advice, fusion = prediction_advice(found, one), predicted_fusion_text(found, one)
    changes = (f"From {about(size)}: {after} instead of {before}." for size, before, after in one.crossovers)
    return Section(
        id=f"ranks-{one.ranks}",
        title=layout_text(found, one),
        level="answer",
        about=extrapolated,
        words=(advice, fusion),
        sheets=(fastest_predicted_sheet(found, one),) if one.series else (),
        sections=()
        if not one.series
        else (
            Section(
                id=f"all-{one.ranks}",
                title="Every algorithm",
                sheets=(predictions_sheet(found, one),),
                notes=(*changes, poor_text(one)),
            ),
        ),
        brief=(advice, *extrapolated, poor_text(one), fusion),
        is_group=True,
    )
