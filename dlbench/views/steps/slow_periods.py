"""Spells in a map of ranks by steps: a row of ranks that takes longer than the others for some time, or from a step on.

The value of a cell relative to the median of the other rows' cells in the same column is called its excess, less 1:
what slows all ranks in the same steps cancels. The spell of a map is the row and the span of columns with the largest
sum of (excess - `LEAST`); this is Kadane's maximal sum of a segment (Bentley, CACM 27(9), 1984), row by row. It is told
only if it lasts and stands out of the noise, by the rules below; the largest of many sums is not zero in noise either.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.digest import RankStepMap

LEAST = 0.05
"""Mean excess that a spell has at least (1)."""
LEAST_SHARE = 0.05
"""Share of the columns that a spell covers at least."""
LEAST_COLUMNS = 3
"""And never fewer columns than these."""
SIGMAS = 8.0
"""How far the mean excess must be beyond 0, in standard errors. There are up to 64 x 5,000 spans to choose from, excess
is skewed, and the error is known from few cells where a run is short."""


@dataclass(frozen=True, kw_only=True)
class Spell:
    """A row of ranks that took longer than the others."""

    row: int
    first_rank: int
    last_rank: int
    hosts: str
    first_step: int
    last_step: int
    """Warm-up steps counted, like the first."""
    ratio: float
    """Mean over its columns of the row relative to the median of the other rows (1)."""
    from_start: bool
    """Whether it begins with the first step of the map."""
    to_end: bool


def least_columns(columns: int) -> int:
    """Columns that a spell covers at least in a map of so many."""
    return max(LEAST_COLUMNS, math.ceil(LEAST_SHARE * columns))


def spell(found: RankStepMap) -> Spell | None:
    """The spell of a map; None where nothing stands out, or where there is one row only."""
    if len(found.cells) < 2:
        return None
    excess = _excess(found.cells)
    best = max((_heaviest(row), -number) for number, row in enumerate(excess))
    (weight, start, end), row = best[0], -best[1]
    columns = len(found.step_starts)
    if weight <= 0 or end - start < least_columns(columns):
        return None
    mean = statistics.fmean(excess[row][start:end])
    # One very long step would carry a whole span: half of its columns have to stand out by themselves.
    if statistics.median(excess[row][start:end]) < LEAST or mean < SIGMAS * _noise(excess) / math.sqrt(end - start):
        return None
    ends = (*found.rank_starts[1:], found.num_ranks)
    return Spell(
        row=row,
        first_rank=found.rank_starts[row],
        last_rank=ends[row] - 1,
        hosts=found.row_hosts[row],
        first_step=found.step_starts[start],
        last_step=found.step_starts[end] - 1 if end < columns else found.last_step,
        ratio=1 + mean,
        from_start=start == 0,
        to_end=end == columns,
    )


def _excess(cells: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of every cell over the median of the other rows in its column, less 1; 0 where the others took no time."""
    import numpy as np

    values = np.asarray(cells, dtype=float)
    found = np.zeros_like(values)
    for row in range(len(values)):
        others = np.median(np.delete(values, row, axis=0), axis=0)
        np.divide(values[row], others, out=found[row], where=others > 0)
        found[row][others > 0] -= 1
    rows: list[list[float]] = found.tolist()
    return rows


def _heaviest(row: Sequence[float]) -> tuple[float, int, int]:
    """Sum of (excess - `LEAST`) over the heaviest span, and where it begins and ends; of equal ones the first."""
    best = (0.0, 0, 0)
    total, start = 0.0, 0
    for column, value in enumerate(row):
        if total <= 0:
            total, start = 0.0, column
        total += value - LEAST
        if total > best[0]:
            best = (total, start, column + 1)
    return best


def _noise(excess: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a cell, from the median of successive differences, which steps and single peaks leave."""
    jumps = [abs(after - before) for row in excess for before, after in itertools.pairwise(row)]
    return 1.4826 * statistics.median(jumps) / math.sqrt(2) if jumps else 0.0
