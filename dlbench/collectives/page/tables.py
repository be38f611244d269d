"""Tables of the collective benchmark: points, choices, ratios to libraries, fitted costs, predictions, runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.collectives.page.report import CollectivesReport, GroupReport, RunRow
from dlbench.collectives.page.words import about, fit_caption, per_byte_text
from dlbench.collectives.results.choice import Best, Crossover, Ratio
from dlbench.collectives.results.fits import Errors, Fit, LevelCosts
from dlbench.collectives.results.measurements import Measurement, Rejected, Series
from dlbench.collectives.results.predictions import PredictedSeries, Prediction, Predictions
from dlbench.report.runs import MAX_LISTED, warnings_cell
from dlbench.report.table import Cell, Column, NamedTable, Pivot, Sheet, cell_of, named_table, times_cell
from dlbench.report.wording import DASH, basis_text, optional
from dlbench.specs.collectives.network import LineCost
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes

GROUP_COLUMNS = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")
"""In front of every row of a group's tables."""
LEVEL_TITLES = {"inside": "within a group", "across": "between groups"}
"""What the levels of a network are called."""
FIT_COLUMNS = ("system", "carrier", "dtype")
"""In front of every row of a fit's tables."""


@dataclass(frozen=True)
class Point:
    """One series at one size."""

    series: Series
    at: Measurement


def points_of(series: Series) -> list[Point]:
    """The points of a series, by size."""
    return [Point(series, row) for row in series.rows]


def _decimals(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f}"


_POINTS: tuple[Column[Point], ...] = (
    Column("carrier", "", lambda one: one.series.carrier),
    Column("algorithm", "", lambda one: one.series.algorithm),
    Column("num_bytes", "Size", lambda one: one.at.num_bytes, unit="bytes", is_brief=True),
    Column("time_s", "Time, median", lambda one: one.at.time, has_interval=True, is_brief=True),
    Column("algbw_gb_per_s", "algbw, GB/s", lambda one: one.at.algbw, has_interval=True),
    Column("busbw_gb_per_s", "busbw, GB/s", lambda one: one.at.busbw, has_interval=True, is_brief=True),
    Column("runs", "", lambda one: one.at.time.n),
    Column("interval", "Interval", lambda one: one.at.time.kind, lambda one: basis_text(one.at.time)),
    Column("iterations", "", lambda one: one.at.iterations),
    Column("operations", "Operations", lambda one: one.at.operations, unit="count"),
    Column("timing", "", lambda one: one.at.timing),
    Column("single_call_s", "Single call", lambda one: one.at.single_call_s, unit="s", is_brief=True),
    Column("skew_s", "Start skew", lambda one: one.at.skew_s, unit="s", is_brief=True),
    Column("steps", "Steps", lambda one: one.at.steps, unit="count"),
    Column("messages", "Messages", lambda one: one.at.messages, unit="count"),
    Column("bytes_sent", "Bytes sent", lambda one: one.at.bytes_sent, unit="count", is_brief=True),
    Column("bytes_across", "Of it between groups", lambda one: one.at.bytes_across, unit="count"),
    Column("predicted_s", "Predicted", lambda one: one.at.predicted_s, unit="s", is_brief=True),
    Column(
        "predicted_over_measured",
        "Pred/meas",
        lambda one: one.at.predicted_over_measured,
        lambda one: _decimals(one.at.predicted_over_measured),
        is_brief=True,
    ),
    Column("fastest", "", lambda one: one.at.is_best),
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


def rejected_sheet(group: GroupReport) -> Sheet[Rejected]:
    """Points without a figure."""
    return Sheet(name="points", title="Points without figures", columns=_REJECTED, rows=group.rejected)


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """The fastest series of each size; without the carrier where all algorithms have the same."""
    carriers = {series.carrier for series in group.series if not series.is_library}
    carrier = f" over {next(iter(carriers))}" if len(carriers) == 1 else ""
    columns: tuple[Column[Best], ...] = (
        Column("", "Size", lambda one: one.num_bytes, unit="bytes", is_brief=True),
        Column("", "Fastest", lambda one: one.title.removesuffix(carrier), is_brief=True),
        Column("", "Time, median", lambda one: one.time, is_brief=True),
        Column("", "Next", lambda one: one.second.removesuffix(carrier) or None),
        Column("", "Lead", lambda one: one.lead, lambda one: times_cell(one.lead), is_brief=True),
        Column("", "Clear", lambda one: one.is_clear if one.lead else None, is_brief=True),
    )
    return Sheet(name="fastest", title="Fastest by size", columns=columns, rows=group.best, in_terminal=True)


def crossovers_sheet(group: GroupReport) -> Sheet[Crossover]:
    """Where one series overtakes another, measured and by the model."""
    columns: tuple[Column[Crossover], ...] = (
        Column("", "Source", lambda one: one.source),
        Column("", "From size", lambda one: about(one.num_bytes)),
        Column("", "Between", lambda one: _between(one.low, one.high)),
        Column("", "Until then", lambda one: one.before),
        Column("", "From then on", lambda one: one.after),
    )
    return Sheet(name="crossovers", title="Where the lead changes", columns=columns, rows=group.crossovers)


def _between(low: int | None, high: int | None) -> str | None:
    return None if low is None or high is None else f"{format_bytes(low)} and {format_bytes(high)}"


_RATIOS: tuple[Column[Ratio], ...] = (
    Column("num_bytes", "", lambda one: one.num_bytes),
    Column("own", "", lambda one: one.own),
    Column("library", "", lambda one: one.library),
    Column("speed", "", lambda one: one.speed, has_interval=True),
    Column("runs", "", lambda one: one.speed.n),
    Column("interval", "", lambda one: one.speed.kind),
    Column("paired", "", lambda one: one.paired),
)


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


@dataclass(frozen=True)
class _Costs:
    """What messages of some sizes cost on one level, or a byte of a reduction."""

    name: str
    messages: str
    up_to_bytes: int | None
    alpha: Estimate | None
    """Seconds."""
    beta: Estimate
    """Seconds per byte."""


_COSTS: tuple[Column[_Costs], ...] = (
    Column("name", "Level", lambda one: one.name, lambda one: LEVEL_TITLES.get(one.name, one.name)),
    Column("up_to_bytes", "Messages", lambda one: one.up_to_bytes, lambda one: one.messages),
    Column("alpha_s", "alpha", lambda one: one.alpha, has_interval=True),
    Column("s_per_byte", "1/beta, GB/s", lambda one: one.beta, lambda one: _rate(one.beta), has_interval=True),
)


def costs_sheet(fit: Fit) -> Sheet[_Costs]:
    """Costs by level and size of a message, and of the reduction; a rate is a cost per byte turned over."""
    rows = [_costs(piece, before) for piece, before in zip(fit.pieces, (None, *fit.pieces), strict=False)]
    if rows:
        rows.append(_Costs("reduction", "all sizes", None, None, _fitted(fit.gamma_s_per_byte, None, None)))
    caption = fit_caption(fit)
    return Sheet(name="fits", title="Costs of a message", columns=_COSTS, rows=rows, caption=caption)


def _costs(piece: LevelCosts, before: LevelCosts | None) -> _Costs:
    messages = "all sizes"
    if piece.up_to_bytes is not None:
        messages = f"up to {format_bytes(piece.up_to_bytes)}"
    elif before is not None and before.level == piece.level and before.up_to_bytes is not None:
        messages = f"above {format_bytes(before.up_to_bytes)}"
    alpha = _fitted(piece.alpha_s, piece.alpha_low_s, piece.alpha_high_s, "s")
    beta = _fitted(piece.beta_s_per_byte, piece.beta_low_s_per_byte, piece.beta_high_s_per_byte)
    return _Costs(piece.level, messages, piece.up_to_bytes, alpha, beta)


def _fitted(value: float, low: float | None, high: float | None, unit: str = "") -> Estimate:
    return Estimate(value, low, high, 1, "fit", unit, level=None if low is None else 0.95)


def _rate(beta: Estimate) -> Cell:
    if beta.low is None or beta.high is None:
        return Cell(per_byte_text(beta.value))
    fastest = per_byte_text(beta.low) if beta.low > 0 else "∞"
    return Cell(per_byte_text(beta.value), f"[{per_byte_text(beta.high)}, {fastest}]")


def errors_sheet(fit: Fit) -> Sheet[Errors]:
    """How far predictions of points that the fit did not see were off."""
    columns: tuple[Column[Errors], ...] = (
        Column("", "Points", lambda one: one.scope),
        Column("", "Count", lambda one: one.num_points),
        Column("", "Median error", lambda one: one.median, unit="fraction"),
        Column("", "Worst", lambda one: one.worst, unit="fraction"),
        Column("", "Advice", lambda one: "none: the fit misses it" if one.is_poor else None),
    )
    return Sheet(name="errors", title="Errors of predictions", columns=columns, rows=fit.errors)


_LINES: tuple[Column[LineCost], ...] = (
    Column("name", "Collective", lambda one: one.name),
    Column("ranks", "Ranks", lambda one: one.ranks),
    Column("alpha_s", "Start-up", lambda one: one.startup_s, unit="s"),
    Column(
        "s_per_byte", "Asymptotic algbw, GB/s", lambda one: one.per_byte_s, lambda one: per_byte_text(one.per_byte_s)
    ),
)


def lines_sheet(fit: Fit) -> Sheet[LineCost]:
    """Each series at each rank count as a line."""
    title = "Each collective as a line"
    is_folded = bool(fit.pieces)
    return Sheet(name="fits", title=title, columns=_LINES, rows=fit.lines, is_folded=is_folded)


_RUNS: tuple[Column[RunRow], ...] = (
    Column("run_id", "Run", lambda run: run.run_id),
    Column("group", "", lambda run: run.group),
    Column("state", "State", lambda run: run.state),
    Column("collective", "Collective", lambda run: run.collective),
    Column("dtype", "", lambda run: run.dtype),
    Column("system", "System", lambda run: run.system),
    Column("ranks", "Ranks", lambda run: run.ranks),
    Column("nodes", "Nodes", lambda run: run.nodes),
    Column("repeat", "Repeat", lambda run: run.repeat),
    Column("finished", "", lambda run: run.finished),
    Column("story", "", lambda run: run.story),
    Column("warnings", "Warnings", lambda run: " | ".join(run.warnings), lambda run: warnings_cell(run.warnings)),
)


def runs_sheet(report: CollectivesReport) -> Sheet[RunRow]:
    """All runs, one line each."""
    return Sheet(name="runs", title="All runs", columns=_RUNS, rows=report.runs, is_sortable=True, max_rows=MAX_LISTED)


def always() -> tuple[NamedTable, ...]:
    """Tables for programs that every report has, with all columns that any of its sheets may have."""
    return (
        named_table("points", "Measured points", (*_POINTS, *_REJECTED), GROUP_COLUMNS),
        named_table("ratios", "Ratios to libraries", _RATIOS, GROUP_COLUMNS),
        named_table("fits", "Fitted costs", (*_LINES[:2], *_COSTS), FIT_COLUMNS),
        named_table("runs", "All runs", _RUNS),
    )


@dataclass(frozen=True)
class _Predicted:
    """One predicted time: of a size, or of all gradients of a step as one message."""

    size: str
    name: str
    seconds: float
    low: float | None
    high: float | None
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
        rows += _predicted(size, one, list(map(_workload, one.series)))
    has_ends = any(row.low is not None for row in rows)
    return Sheet(
        name="predictions",
        title="Predicted times",
        columns=(),
        rows=rows,
        caption="* fastest"
        + "; in brackets 95 % over runs and wider by the fit's own error, if the model goes on" * has_ends
        + "; (line): through sizes measured at this rank count" * any(s.is_line for s in one.series),
        pivot=Pivot(corner="Size", down=lambda row: row.size, across=lambda row: row.name, cell=_predicted_cell),
    )


def fastest_predicted_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """The fastest of each size alone, for the terminal."""
    series = {series.name: series for series in one.series}
    rows = [
        _Predicted(format_bytes(size), name, *_at(series[name], place), False)
        for place, (size, name) in enumerate(zip(found.sizes, one.best, strict=True))
    ]
    columns: tuple[Column[_Predicted], ...] = (
        Column("", "Size", lambda row: row.size),
        Column("", "Predicted fastest", lambda row: row.name),
        Column(
            "", "Time", lambda row: row.seconds, lambda row: _predicted_cell(dataclasses.replace(row, is_best=False))
        ),
    )
    return Sheet(name="fastest", title="Predicted fastest", columns=columns, rows=rows, in_terminal=True)


_Time = tuple[float, float | None, float | None]


def _at(series: PredictedSeries, place: int) -> _Time:
    return (
        series.seconds[place],
        None if series.low is None else series.low[place],
        None if series.high is None else series.high[place],
    )


def _workload(series: PredictedSeries) -> _Time:
    return series.workload_s or 0.0, series.workload_low_s, series.workload_high_s


def _predicted(size: str, one: Prediction, times: list[_Time]) -> list[_Predicted]:
    is_usable = [series.poor_error is None for series in one.series]
    best = min(value for (value, _, _), usable in zip(times, is_usable, strict=True) if usable or not any(is_usable))
    return [
        _Predicted(
            size,
            series.name + " (line)" * series.is_line + " (poor fit)" * (series.poor_error is not None),
            value,
            low,
            high,
            value == best and (series.poor_error is None or not any(is_usable)),
        )
        for series, (value, low, high) in zip(one.series, times, strict=True)
    ]


def _predicted_cell(row: _Predicted) -> Cell:
    text = f"{optional(row.seconds, 's')}{' *' * row.is_best}"
    if row.low is None or row.high is None:
        return Cell(text, number=row.seconds)
    return Cell(text, f"[{optional(row.low, 's')}, {optional(row.high, 's')}]", number=row.seconds)
