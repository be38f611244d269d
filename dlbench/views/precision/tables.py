"""Tables of compared precisions."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    number_text,
    optional_figure,
    place_text,
    runs_text,
    times_text,
)
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.precision.numbers import PrecisionComparison, PrecisionRow


def precision_sheets(report: Report) -> list[Sheet]:
    """A table per comparison; for programs they are one."""
    return [_sheet(found) for found in report.precisions]


def _sheet(found: PrecisionComparison) -> Sheet:
    rows = tuple(_precision_row(found, row) for row in found.rows)
    return Sheet(
        name="precision",
        title=found.label,
        text=_precision(found),
        caption=found.caption,
        columns=tuple(rows[0]),
        rows=rows,
        in_terminal=True,
    )


def _precision(found: PrecisionComparison) -> Table:
    with_joules = any(row.energy_per_sample for row in found.rows)
    with_quality = any(row.quality or row.num_reached is not None for row in found.rows)
    header = ["At", "Precision", f"Throughput, {found.sample_unit}/s", f"Over {found.reference}", "Interval"]
    header += ["Peak memory of a rank", f"Over {found.reference}"]
    header += ["J per sample", f"Over {found.reference}"] * with_joules
    header += ["Loss of the last step"] + ["Quality at the end"] * with_quality
    rows: Table = [tuple(header)]
    for row in found.rows:
        cells = [
            place_text(row.ranks, row.nodes),
            row.precision,
            figure_text(row.throughput),
            DASH if row.ratio is None else times_text(row.ratio),
            (basis_text(row.ratio) + (", interleaved" if row.is_paired else ""))
            if row.ratio is not None
            else f"reference, {runs_text(row.num_runs)}",
            figure_text(row.peak),
            DASH if row.memory_ratio is None else times_text(row.memory_ratio),
        ]
        if with_joules:
            joules = row.energy_per_sample
            cells.append("not measured" if joules is None else f"{figure_text(joules)} ({row.energy_of})")
            cells.append(DASH if row.energy_ratio is None else times_text(row.energy_ratio))
        cells.append(_loss(row))
        if with_quality:
            reached = "" if row.num_reached is None else f"; {row.num_reached} of {runs_text(row.num_runs)} reached"
            cells.append(optional_figure(row.quality) + reached)
        rows.append(tuple(cells))
    return rows


def _loss(row: PrecisionRow) -> str:
    bad = f"not finite in {runs_text(row.num_not_finite)}" if row.num_not_finite else ""
    overflow = ""
    if row.overflow_steps is not None and row.overflow_steps.value > 0:
        overflow = f"{number_text(row.overflow_steps.value, 'messages')} steps left out for overflow"
    told = figure_text(row.loss) if row.loss is not None else ""
    return "; ".join(filter(None, [told, bad, overflow])) or "not known"


def _precision_row(found: PrecisionComparison, row: PrecisionRow) -> dict[str, Cell]:
    return {
        "comparison": found.id,
        "reference": found.reference,
        "precision": row.precision,
        "in_force": row.in_force,
        "ranks": row.ranks,
        "nodes": row.nodes,
        **figure_columns("throughput", row.throughput),
        **figure_columns("throughput_ratio", row.ratio),
        "runs": row.num_runs,
        "interleaved": row.is_paired,
        **figure_columns("peak_bytes", row.peak),
        **figure_columns("peak_ratio", row.memory_ratio),
        **figure_columns("energy_per_sample_j", row.energy_per_sample),
        "energy_of": row.energy_of,
        **figure_columns("energy_ratio", row.energy_ratio),
        **figure_columns("last_loss", row.loss),
        "runs_not_finite": row.num_not_finite,
        **figure_columns("last_quality", row.quality),
        "runs_reached": row.num_reached,
    }
