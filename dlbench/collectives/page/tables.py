"""Tables of the collective benchmark: points, choices, ratios to libraries, fitted costs, predictions, runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from dlbench.collectives.page.report import CollectivesReport, GroupReport, RunRow
from dlbench.collectives.page.words import about, fit_caption, per_byte_text, range_text
from dlbench.collectives.results.choice import Best, Crossover, Ratio, Recommended
from dlbench.collectives.results.fits import Errors, Fit, LevelCosts
from dlbench.collectives.results.measurements import Measurement, Rejected, Series
from dlbench.collectives.results.predictions import PredictedSeries, Prediction, Predictions
from dlbench.report.table import Cell, Column, NamedTable, Pivot, Sheet, times_cell
from dlbench.report.wording import DASH, basis_text, optional
from dlbench.specs.collectives.network import LineCost
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes

MAX_LISTED = 500
"""Runs listed in a page, so that it stays small."""

GROUP_COLUMNS = ("group", "system", "collective", "dtype", "ranks", "nodes", "group_size")
"""In front of every row of a group's tables."""
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
    Column("steps", "Steps", lambda one: one.at.steps, unit="count", is_brief=True),
    Column("messages", "Messages", lambda one: one.at.messages, unit="count"),
    Column("bytes_sent", "Bytes sent", lambda one: one.at.bytes_sent, unit="count", is_brief=True),
    Column("bytes_across", "Of it across", lambda one: one.at.bytes_across, unit="count"),
    Column("predicted_s", "Predicted", lambda one: one.at.predicted_s, unit="s", is_brief=True),
    Column(
        "predicted_over_measured",
        "Pred. / meas.",
        lambda one: one.at.predicted_over_measured,
        lambda one: _decimals(one.at.predicted_over_measured),
        is_brief=True,
    ),
    Column("fastest", "", lambda one: one.at.is_best),
)


def series_sheet(series: Series, caption: str) -> Sheet[Point]:
    """Everything known of one series, a line for each size; without columns that no size has."""
    rows = points_of(series)
    return Sheet(
        name="points",
        title=series.title,
        columns=tuple(one for one in _POINTS if any(one.value(row) is not None for row in rows)),
        rows=rows,
        caption=caption,
        in_terminal=True,
        is_folded=True,
    )


_REJECTED: tuple[Column[Rejected], ...] = (
    Column("algorithm", "Series", lambda one: one.title),
    Column("num_bytes", "Size", lambda one: one.num_bytes, unit="bytes"),
    Column("problem", "Why", lambda one: one.why),
    Column("runs", "Runs", lambda one: len(one.runs), lambda one: ", ".join(one.runs)),
)


def rejected_sheet(group: GroupReport) -> Sheet[Rejected]:
    """Points without a figure."""
    return Sheet(name="points", title="Points without figures", columns=_REJECTED, rows=group.rejected)


def recommended_sheet(group: GroupReport) -> Sheet[Recommended]:
    """A series for each range of sizes."""
    columns: tuple[Column[Recommended], ...] = (
        Column("", "Sizes", lambda one: range_text(one.low, one.high)),
        Column("", "Recommended", lambda one: one.title),
    )
    return Sheet(name="recommended", title="Recommended", columns=columns, rows=group.recommended, in_terminal=True)


def best_sheet(group: GroupReport) -> Sheet[Best]:
    """The fastest series of each size."""
    columns: tuple[Column[Best], ...] = (
        Column("", "Size", lambda one: one.num_bytes, unit="bytes", is_brief=True),
        Column("", "Fastest", lambda one: one.title, is_brief=True),
        Column("", "Time, median", lambda one: one.time, is_brief=True),
        Column("", "Next", lambda one: one.second or None),
        Column("", "Next / fastest", lambda one: one.lead, lambda one: times_cell(one.lead), is_brief=True),
        Column("", "Beyond scatter", lambda one: one.is_clear if one.lead else None),
    )
    return Sheet(
        name="fastest",
        title="Fastest by size",
        columns=columns,
        rows=group.best,
        caption=group.caption,
        in_terminal=True,
    )


def crossovers_sheet(group: GroupReport) -> Sheet[Crossover]:
    """Where one series overtakes another, measured and by the model."""
    columns: tuple[Column[Crossover], ...] = (
        Column("", "Source", lambda one: one.source),
        Column("", "From size", lambda one: about(one.num_bytes)),
        Column("", "Between", lambda one: _between(one.low, one.high)),
        Column("", "Until then", lambda one: one.before),
        Column("", "From then on", lambda one: one.after),
        Column("", "Beyond scatter", lambda one: one.is_clear),
    )
    return Sheet(
        name="crossovers",
        title="Where the lead changes",
        columns=columns,
        rows=group.crossovers,
        caption=group.caption,
    )


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


def ratio_sheets(group: GroupReport) -> list[Sheet[Ratio]]:
    """Speed of each of dlbench's algorithms over the libraries; ring, or else the first one, is there at a glance."""
    names = list(dict.fromkeys(one.own for one in group.ratios))
    shown = next((name for name in names if name.startswith("ring ")), names[0] if names else "")
    return [
        Sheet(
            name="ratios",
            title=f"Speed of {name} relative to",
            columns=_RATIOS,
            rows=[one for one in group.ratios if one.own == name],
            caption=group.caption,
            pivot=Pivot(
                corner="Size", down=lambda one: format_bytes(one.num_bytes), across=lambda one: one.library, cell=_speed
            ),
            order=lambda one: one.num_bytes,
            in_terminal=name == shown,
            is_folded=name != shown,
        )
        for name in names
    ]


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


def costs_sheet(fit: Fit) -> Sheet[_Costs]:
    """Costs by level and size of a message, and of the reduction; a rate is a cost per byte turned over."""
    rows = [_costs(piece, before) for piece, before in zip(fit.pieces, (None, *fit.pieces), strict=False)]
    if rows:
        rows.append(_Costs("reduction", "all sizes", None, None, _fitted(fit.gamma_s_per_byte, None, None)))
    columns: tuple[Column[_Costs], ...] = (
        Column("name", "Level", lambda one: one.name),
        Column("up_to_bytes", "Messages", lambda one: one.up_to_bytes, lambda one: one.messages),
        Column("alpha_s", "alpha", lambda one: one.alpha, has_interval=True),
        Column("s_per_byte", "1/beta, GB/s", lambda one: one.beta, lambda one: _rate(one.beta), has_interval=True),
    )
    return Sheet(
        name="fits",
        title="Costs of a message",
        columns=columns,
        rows=rows,
        caption=fit_caption(fit),
        in_terminal=True,
    )


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
    return Estimate(value, low, high, 1, "fit 95 %", unit)


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
    )
    return Sheet(name="errors", title="Errors of predictions", columns=columns, rows=fit.errors, in_terminal=True)


def lines_sheet(fit: Fit) -> Sheet[LineCost]:
    """Each series at each rank count as a line."""
    columns: tuple[Column[LineCost], ...] = (
        Column("name", "Collective", lambda one: one.name),
        Column("ranks", "Ranks", lambda one: one.ranks),
        Column("alpha_s", "Start-up", lambda one: one.startup_s, unit="s"),
        Column(
            "s_per_byte",
            "Asymptotic algbw, GB/s",
            lambda one: one.per_byte_s,
            lambda one: per_byte_text(one.per_byte_s),
        ),
    )
    return Sheet(
        name="fits",
        title="Each collective as a line",
        columns=columns,
        rows=fit.lines,
        in_terminal=True,
        is_folded=bool(fit.pieces),
    )


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
    Column(
        "warnings",
        "Warnings",
        lambda run: " | ".join(run.warnings),
        lambda run: Cell(str(len(run.warnings) or "none"), items=run.warnings, number=len(run.warnings)),
    ),
)


def runs_sheet(report: CollectivesReport) -> Sheet[RunRow]:
    """All runs, one line each."""
    return Sheet(name="runs", title="All runs", columns=_RUNS, rows=report.runs, is_sortable=True, max_rows=MAX_LISTED)


def without_sheet(report: CollectivesReport) -> Sheet[RunRow]:
    """Runs that yield no figure, and why."""
    columns: tuple[Column[RunRow], ...] = (
        Column("", "Run", lambda run: run.run_id),
        Column("", "State", lambda run: run.state),
        Column("", "Ranks", lambda run: run.ranks),
        Column("", "Why", lambda run: run.story),
    )
    return Sheet(
        name="without-figures",
        title="Runs without figures",
        columns=columns,
        rows=report.without_figures,
        max_rows=MAX_LISTED,
    )


def environment_sheet(report: CollectivesReport) -> Sheet[tuple[str, str]]:
    """What the environments of all runs with figures share."""
    columns: tuple[Column[tuple[str, str]], ...] = (
        Column("", "Key", lambda one: one[0]),
        Column("", "Value", lambda one: one[1]),
    )
    title = "Environment that all runs with figures share"
    return Sheet(name="environment", title=title, columns=columns, rows=report.environment, is_folded=True)


def always() -> tuple[NamedTable, ...]:
    """Tables for programs that every report has, with all columns that any of its sheets may have."""
    fit_names = ("name", "ranks", "up_to_bytes", *_with_interval("alpha_s"), *_with_interval("s_per_byte"))
    return (
        _named("points", "Measured points", (*GROUP_COLUMNS, *_names(_POINTS), *_names(_REJECTED))),
        _named("ratios", "Ratios to libraries", (*GROUP_COLUMNS, *_names(_RATIOS))),
        _named("fits", "Fitted costs", (*FIT_COLUMNS, *fit_names)),
        _named("runs", "Runs", _names(_RUNS)),
    )


def _named(name: str, title: str, columns: tuple[str, ...]) -> NamedTable:
    return NamedTable(name=name, title=title, columns=tuple(dict.fromkeys(columns)))


def _names(columns: tuple[Column[Any], ...]) -> tuple[str, ...]:
    return tuple(name for column in columns for name in column.names)


def _with_interval(name: str) -> tuple[str, ...]:
    return (name, f"{name}_low", f"{name}_high")


@dataclass(frozen=True)
class _Predicted:
    """One predicted time; or of all gradients of a step, as one message."""

    size: str
    name: str
    seconds: float | None
    is_best: bool


def predictions_sheet(found: Predictions, one: Prediction) -> Sheet[_Predicted]:
    """Predicted times: a line for each size, a column for each algorithm; the fastest of each line has a star."""
    rows = [
        _Predicted(format_bytes(size), _shown_name(series), series.seconds[place], series.name == one.best[place])
        for place, size in enumerate(found.sizes)
        for series in one.series
    ]
    if found.workload_bytes is not None:
        size = f"gradients, {about(found.workload_bytes)}"
        fastest = min(series.workload_s or 0.0 for series in one.series)
        rows += [
            _Predicted(size, _shown_name(series), series.workload_s, series.workload_s == fastest)
            for series in one.series
        ]
    return Sheet(
        name="predictions",
        title="Predicted times",
        columns=(),
        rows=rows,
        pivot=Pivot(corner="Size", down=lambda one: one.size, across=lambda one: one.name, cell=_predicted_text),
    )


def _shown_name(series: PredictedSeries) -> str:
    return series.name + " (line)" * series.is_line


def _predicted_text(one: _Predicted) -> str:
    return optional(one.seconds, "s") + " *" * one.is_best
