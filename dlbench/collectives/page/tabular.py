"""Tables of the collective benchmark as rows of text, header first; see `tabular`."""

from __future__ import annotations

from collections.abc import Callable

from dlbench.collectives.page.model import CommGroup, CommReport, FitTable, PieceRow, RatioRow, SeriesTable, SizeRow
from dlbench.collectives.page.wording import (
    about,
    basis_text,
    count_text,
    per_byte_text,
    range_text,
    rate_figure_text,
    ratio_text,
    seconds_text,
    size_text,
    time_text,
)
from dlbench.report.tabular import Table
from dlbench.report.wording import DASH, percent, times_text
from dlbench.stats.estimates import Estimate

_Cell = Callable[[SizeRow], str]

FASTEST = " *"
"""Behind the fastest time of a size."""


def series(found: SeriesTable) -> Table:
    """Everything known of one series, a line a size."""
    rows: Table = [
        (
            *("Size", "Time, median", "algbw, GB/s", "busbw, GB/s", "Steps", "Messages", "Bytes sent", "Of it across"),
            *("Predicted", "Predicted / measured", "Interval"),
        )
    ]
    rows += [
        (
            size_text(row.num_bytes),
            time_text(row.time),
            rate_figure_text(row.algbw),
            rate_figure_text(row.busbw),
            count_text(row.steps),
            count_text(row.messages),
            count_text(row.bytes_sent),
            count_text(row.bytes_across),
            seconds_text(row.predicted_s),
            ratio_text(row.predicted_over_measured),
            basis_text(row.time),
        )
        for row in found.rows
    ]
    return rows


def times(group: CommGroup) -> Table:
    """Median times: a line a size, a column a series; the fastest of each size is marked."""
    return _matrix(group, lambda row: time_text(row.time) + (FASTEST if row.is_best else ""))


def bus_rates(group: CommGroup) -> Table:
    """The same for busbw, GB/s."""
    return _matrix(group, lambda row: rate_figure_text(row.busbw))


def predictions(group: CommGroup) -> Table:
    """Predicted over measured, with the predicted time."""
    return _matrix(
        group,
        lambda row: (
            DASH
            if row.predicted_s is None
            else f"{ratio_text(row.predicted_over_measured)} ({seconds_text(row.predicted_s)})"
        ),
        only=[found for found in group.series if any(row.predicted_s is not None for row in found.rows)],
    )


def _matrix(group: CommGroup, cell: _Cell, only: list[SeriesTable] | None = None) -> Table:
    shown = list(group.series) if only is None else only
    rows: Table = [("Size", *(found.title for found in shown))]
    if not shown:
        return rows
    by_size = [{row.num_bytes: row for row in found.rows} for found in shown]
    for size in group.sizes:
        cells = (cell(rows_of[size]) if size in rows_of else DASH for rows_of in by_size)
        rows.append((size_text(size), *cells))
    return rows


def best(group: CommGroup) -> Table:
    """The fastest series of each size."""
    rows: Table = [("Size", "Fastest", "Time, median", "Next", "Next / fastest", "Beyond scatter")]
    rows += [
        (
            size_text(row.num_bytes),
            row.title,
            time_text(row.time),
            row.second or DASH,
            times_text(row.lead) if row.lead else DASH,
            DASH if row.lead is None else "yes" if row.is_clear else "no",
        )
        for row in group.best
    ]
    return rows


def crossovers(group: CommGroup) -> Table:
    """Where one series overtakes another, measured and by the model."""
    rows: Table = [("Source", "From size", "Between", "Until then", "From then on", "Beyond scatter")]
    rows += [
        (
            row.source,
            about(row.num_bytes),
            DASH if row.low is None or row.high is None else f"{size_text(row.low)} and {size_text(row.high)}",
            row.before,
            row.after,
            DASH if row.is_clear is None else "yes" if row.is_clear else "no",
        )
        for row in group.crossovers
    ]
    return rows


def recommended(group: CommGroup) -> Table:
    """A series for each range of sizes."""
    rows: Table = [("Sizes", "Recommended")]
    rows += [(range_text(row.low, row.high), row.title) for row in group.recommended]
    return rows


def libraries(group: CommGroup) -> list[str]:
    """Libraries that dlbench's algorithms are set against."""
    return list(dict.fromkeys(row.library for row in group.ratios))


def ratios(group: CommGroup, library: str) -> Table:
    """Speed of dlbench's algorithms over one library: a line an algorithm, a column a size."""
    found = {(row.own, row.num_bytes): row for row in group.ratios if row.library == library}
    sizes = sorted({size for _, size in found})
    rows: Table = [("Algorithm", *map(size_text, sizes))]
    for own in dict.fromkeys(own for own, _ in found):
        rows.append((own, *(_speed_text(found.get((own, size))) for size in sizes)))
    return rows


def ratios_of(group: CommGroup, own: str) -> Table:
    """The same for one algorithm: a line a size, a column a library."""
    found = {(row.library, row.num_bytes): row for row in group.ratios if row.own == own}
    names = [name for name in libraries(group) if any(library == name for library, _ in found)]
    rows: Table = [("size", *names)]
    for size in sorted({size for _, size in found}):
        rows.append((size_text(size), *(_speed_text(found.get((name, size))) for name in names)))
    return rows


def _speed_text(row: RatioRow | None) -> str:
    return DASH if row is None else times_text(row.speed) + _unpaired(row.paired)


def _unpaired(paired: bool) -> str:
    return "" if paired else " (not the same runs)"


def rejected(group: CommGroup) -> Table:
    """Points without a figure."""
    rows: Table = [("Series", "Size", "Why", "Runs")]
    rows += [(row.title, size_text(row.num_bytes), row.why, ", ".join(row.runs)) for row in group.rejected]
    return rows


def pieces(fit: FitTable) -> Table:
    """Costs by level and message size; in brackets 95 % intervals."""
    rows: Table = [("Level", "Messages", "alpha", "1/beta, GB/s")]
    for index, row in enumerate(fit.pieces):
        messages = "all sizes" if row.up_to_bytes is None else f"up to {size_text(row.up_to_bytes)}"
        before = fit.pieces[index - 1] if index else None
        if row.up_to_bytes is None and before is not None and before.level == row.level:
            messages = f"above {size_text(before.up_to_bytes)}"
        alpha = Estimate(value=row.alpha_s, unit="s", low=row.alpha_low_s, high=row.alpha_high_s, n=1, kind="fit 95 %")
        rows.append((row.level, messages, time_text(alpha), _per_byte(row)))
    if fit.pieces:
        rows.append(("reduction", "all sizes", DASH, per_byte_text(fit.gamma_s_per_byte)))
    return rows


def fit_caption(fit: FitTable) -> str:
    """What stands behind a fit, in a few sentences."""
    ranks = " and ".join(", ".join(map(str, fit.ranks)).rsplit(", ", 1))
    told = f"Fitted to {fit.num_points} points at {ranks} ranks; in brackets 95 % intervals."
    if any(row.level == "across" for row in fit.pieces):
        link = "share one link" if fit.shared_link else "have a link each"
        told += f" In the model, ranks of a group {link} to other groups."
    if fit.shared_memory:
        told += " Inside a group the bytes of all its ranks add up: they share memory or processors."
    return f"{told} Held out: {fit.held_out_by}."


def _per_byte(row: PieceRow) -> str:
    value = per_byte_text(row.beta_s_per_byte)
    if row.beta_low_s_per_byte is None or row.beta_high_s_per_byte is None:
        return value
    fastest = per_byte_text(row.beta_low_s_per_byte) if row.beta_low_s_per_byte > 0 else "∞"
    return f"{value} [{per_byte_text(row.beta_high_s_per_byte)}, {fastest}]"


def errors(fit: FitTable) -> Table:
    """How far predictions of points that the fit did not see were off."""
    rows: Table = [("Points", "Count", "Median error", "Worst")]
    rows += [(row.scope, str(row.num_points), percent(row.median), percent(row.worst)) for row in fit.errors]
    return rows


def lines(fit: FitTable) -> Table:
    """Each series at each rank count as a line."""
    rows: Table = [("Collective", "Ranks", "Start-up", "Asymptotic algbw, GB/s")]
    rows += [
        (row.name, str(row.ranks), seconds_text(row.startup_s), per_byte_text(row.per_byte_s)) for row in fit.lines
    ]
    return rows


def runs(report: CommReport) -> Table:
    """All runs, one line each."""
    rows: Table = [("Run", "State", "Collective", "Ranks", "Nodes", "System", "Repeat", "Doubts")]
    rows += [
        (
            *(run.run_id, run.state, run.collective, str(run.ranks), str(run.nodes), run.system, str(run.repeat)),
            str(len(run.warnings)) if run.warnings else "none",
        )
        for run in report.runs
    ]
    return rows


def without_figures(report: CommReport) -> Table:
    """Runs that yield no figure, and why."""
    rows: Table = [("Run", "State", "Ranks", "Why")]
    rows += [(run.run_id, run.state, str(run.ranks), run.story) for run in report.without_figures]
    return rows


def fusion_text(group: CommGroup) -> str:
    """The recommended fusion size with its rule, in one sentence; empty where there is none."""
    found = group.fusion
    if found is None:
        return ""
    rule = f"{percent(found.share, 0)} of the asymptotic rate of {found.title}"
    if found.num_bytes is None:
        return f"No fusion size: {found.title} costs no more for larger messages as far as it was measured."
    beyond = " That is beyond the largest size measured: an extrapolation." if found.beyond_measured else ""
    return (
        f"Recommended fusion size: {about(found.num_bytes)}, the smallest message that reaches {rule} "
        f"(9 x start-up / time per byte of a line through its sizes).{beyond}"
    )
