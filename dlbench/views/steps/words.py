"""Sentences on step times and on the map of ranks by steps."""

from __future__ import annotations

from dlbench.report.table import Cell
from dlbench.report.wording import PART_TITLES, percent, place_text, shown, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.steps.numbers import MapRow, RankMap, StepPoint, StepTimes

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
        f"{_correlation(point.autocorrelation)} at {place(point)}"
        for point in found.points
        if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED
    ]
    warning = (f"Successive steps are correlated ({'; '.join(correlated)}): count runs, not steps.",)
    return (*_longest_step_text(found.points[-1]), *(warning if correlated else ()))


def outliers_text(point: StepPoint) -> str:
    """``12 (0.04 %)``: outliers of all runs."""
    return f"{point.num_outliers:,} ({percent(point.pooled_outlier_share, 2)})"


def _correlation(correlation: Estimate) -> Cell:
    """With its interval."""
    number, interval, _ = shown(correlation, 2)
    return Cell(number, interval, number=correlation.value)


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
