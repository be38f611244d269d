"""Sentences on step times and on the map of ranks by steps."""

from __future__ import annotations

from dlbench.report.table import Cell
from dlbench.report.wording import PART_TITLES, figure_text, percent, place_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.views.steps.numbers import MapRow, RankMap, StepPoint, StepTimes

CORRELATED = 0.2
"""From this autocorrelation of successive steps on, a warning is given: such steps are not independent."""


def place(point: StepPoint | RankMap) -> str:
    """``4 ranks on 2 nodes``."""
    return place_text(point.ranks, point.nodes)


def step_words(found: StepTimes) -> tuple[str, ...]:
    """A sentence per rank count, the largest first, and one on the longest step."""
    return (*(_point_text(point) for point in reversed(found.points)), *_longest_step_text(found.points[-1]))


def _point_text(point: StepPoint) -> str:
    text = (
        f"{place(point)}: {point.num_steps:,} measured steps of {runs_text(len(point.run_ids))} ({point.num_warmup:,} "
        f"warm-up steps are left out); half of them within {figure_text(point.p50)}, 95 % within "
        f"{figure_text(point.p95)}; {outliers_text(point)} beyond the fence."
    )
    if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED:
        text += (
            f" Successive steps are correlated (autocorrelation {correlation_cell(point.autocorrelation)}), so steps "
            "are not independent measurements; runs are."
        )
    return text


def outliers_text(point: StepPoint) -> str:
    """``12 (0.04 %)``: outliers of all runs."""
    return f"{point.num_outliers:,} ({percent(point.pooled_outlier_share, 2)})"


def correlation_cell(correlation: Estimate | None) -> Cell:
    """A correlation with its interval, to the hundredth."""
    if correlation is None:
        return Cell("not known")
    known = correlation.low is not None and correlation.high is not None
    interval = f"[{correlation.low:.2f}, {correlation.high:.2f}]" if known else ""
    return Cell(f"{correlation.value:.2f}", interval, number=correlation.value)


def _longest_step_text(point: StepPoint) -> tuple[str, ...]:
    if not point.outliers:
        return ()
    worst = point.outliers[0]
    return (
        f"The longest against its run's median at {place(point)}: step {worst.step} of run {worst.run_id}, "
        f"{worst.ratio:.2f} times as long; rank {worst.rank} on {worst.host} had the longest own work, and most of the "
        f"growth is in {PART_TITLES[worst.phase]}.",
    )


# Ranks by steps


def map_text(found: RankMap) -> str:
    """What a cell of the map is, and of which run."""
    columns = found.last_step - found.step_starts[0] + 1
    joined = ["the largest of the ranks of a row"] if len(found.rows) < found.ranks else []
    joined += ["means over neighbouring steps"] if len(found.step_starts) < columns else []
    how = f" ({', '.join(joined)})" if joined else ""
    return (
        f"Own work: the step without exchange, relative to the median over all ranks and steps{how}. The run in the "
        f"middle, by its median step, of {found.num_runs} at {place(found)}; steps {found.step_starts[0]} to "
        f"{found.last_step}, those before are warm-up."
    )


def row_title(row: MapRow) -> str:
    """``rank 5``, ``ranks 16 to 31``."""
    if row.first_rank == row.last_rank:
        return f"rank {row.first_rank}"
    return f"ranks {row.first_rank} to {row.last_rank}"
