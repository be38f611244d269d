"""The table of a comparison of precisions."""

from __future__ import annotations

from dlbench.report.table import Cell, Column, Sheet, times_cell
from dlbench.report.wording import (
    figure_text,
    interval_text,
    number_text,
    optional_figure,
    place_text,
    runs_text,
    value_text,
)
from dlbench.views.precision.numbers import PrecisionComparison, PrecisionRow


def precision_sheet(found: PrecisionComparison) -> Sheet[PrecisionRow]:
    """A line per rank count and precision."""
    has_energy = any(row.energy_per_sample for row in found.rows)
    has_quality = any(row.quality or row.num_reached is not None for row in found.rows)
    over = f"Over {found.reference}"
    columns: tuple[Column[PrecisionRow], ...] = (
        Column("comparison", "", lambda row: found.id),
        Column("reference", "", lambda row: found.reference),
        Column("ranks", "", lambda row: row.ranks),
        Column("nodes", "", lambda row: row.nodes),
        Column("", "At", lambda row: place_text(row.ranks, row.nodes), is_brief=True),
        Column("precision", "Precision", lambda row: row.precision, is_brief=True),
        Column("in_force", "", lambda row: row.in_force),
        Column(
            "throughput",
            f"Throughput, {found.sample_unit}/s",
            lambda row: row.throughput,
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "throughput_ratio",
            over,
            lambda row: row.ratio,
            lambda row: times_cell(row.ratio),
            has_interval=True,
            is_brief=True,
        ),
        Column("runs", "", lambda row: row.num_runs),
        Column("interleaved", "", lambda row: row.is_paired),
        Column("peak_bytes", "Peak memory per rank", lambda row: row.peak, has_interval=True),
        Column(
            "peak_ratio",
            over,
            lambda row: row.memory_ratio,
            lambda row: times_cell(row.memory_ratio),
            has_interval=True,
        ),
        Column(
            "energy_per_sample_j",
            "J per sample" if has_energy else "",
            lambda row: row.energy_per_sample,
            _energy,
            has_interval=True,
        ),
        Column("energy_of", "", lambda row: row.energy_of),
        Column(
            "energy_ratio",
            over if has_energy else "",
            lambda row: row.energy_ratio,
            lambda row: times_cell(row.energy_ratio),
            has_interval=True,
        ),
        Column("last_loss", "Loss of the last step", lambda row: row.loss, _loss, has_interval=True),
        Column("runs_not_finite", "", lambda row: row.num_not_finite),
        Column(
            "last_quality",
            "Accuracy at the end" if has_quality else "",
            lambda row: row.quality,
            _quality,
            has_interval=True,
        ),
        Column("runs_reached", "", lambda row: row.num_reached),
    )
    return Sheet(
        name="precision",
        title=found.label,
        columns=columns,
        rows=found.rows,
        caption=found.caption,
        in_terminal=True,
    )


def _energy(row: PrecisionRow) -> Cell:
    joules = row.energy_per_sample
    if joules is None:
        return Cell("not measured")
    return Cell(f"{value_text(joules)} ({row.energy_of})", interval_text(joules), number=joules.value)


def _loss(row: PrecisionRow) -> str:
    bad = f"not finite in {runs_text(row.num_not_finite)}" if row.num_not_finite else ""
    overflow = ""
    if row.overflow_steps is not None and row.overflow_steps.value > 0:
        overflow = f"{number_text(row.overflow_steps.value, 'messages')} steps skipped for overflow"
    known = figure_text(row.loss) if row.loss is not None else ""
    return "; ".join(filter(None, [known, bad, overflow])) or "unknown"


def _quality(row: PrecisionRow) -> str:
    reached = "" if row.num_reached is None else f"; {row.num_reached} of {runs_text(row.num_runs)} reached"
    return optional_figure(row.quality) + reached
