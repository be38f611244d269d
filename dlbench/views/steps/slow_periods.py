"""Slow periods in a map of ranks by steps: a row of ranks takes longer than the others, for some time or to the end.

The excess of a cell is its value over the median of the other rows in the same column, less 1: what slows all ranks in
the same steps cancels. The slow period of a map is the row and the span of columns with the largest sum of
(excess - `MIN_EXCESS`), which is Kadane's maximal segment sum (Bentley, CACM 27(9), 1984), row by row. The largest of
many sums is above zero in noise too, so a period is reported only if it lasts (`min_columns`), if half of its columns
stand out by themselves, and if its mean excess is `SIGMAS` standard errors above zero.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.digest import RankStepMap
from dlbench.report.wording import percent

MIN_EXCESS = 0.05
"""Smallest mean excess of a slow period (fraction)."""
MIN_SHARE = 0.05
"""Smallest share of the map's columns that a slow period covers."""
MIN_COLUMNS = 3
"""Fewest columns that a slow period covers."""
SIGMAS = 8.0
"""Smallest mean excess in standard errors. There are up to 64 x 5,000 spans to choose from, excess is skewed, and the
error is estimated from few cells where a run is short."""


@dataclass(frozen=True, kw_only=True)
class SlowPeriod:
    """A row of ranks that took longer than the others."""

    row: int
    first_rank: int
    last_rank: int
    hosts: str
    first_step: int
    last_step: int
    """Warm-up steps counted, like the first."""
    ratio: float
    """The row over the median of the other rows, mean over the period's columns."""
    from_start: bool
    """Whether it begins with the first step of the map."""
    to_end: bool


def min_columns(columns: int) -> int:
    """Fewest columns of a slow period in a map of `columns` columns."""
    return max(MIN_COLUMNS, math.ceil(MIN_SHARE * columns))


def find_slow_period(found: RankStepMap) -> SlowPeriod | None:
    """The slow period of a map; None where nothing stands out, or where there is one row only."""
    if len(found.cells) < 2:
        return None
    excess = _excess(found.cells)
    best = max((_heaviest(row), -number) for number, row in enumerate(excess))
    (weight, start, end), row = best[0], -best[1]
    columns = len(found.step_starts)
    if weight <= 0 or end - start < min_columns(columns):
        return None
    mean = statistics.fmean(excess[row][start:end])
    # One very long step would carry a whole span: half of its columns have to stand out by themselves.
    if statistics.median(excess[row][start:end]) < MIN_EXCESS or mean < SIGMAS * _noise(excess) / math.sqrt(
        end - start
    ):
        return None
    ends = (*found.rank_starts[1:], found.num_ranks)
    return SlowPeriod(
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
    """Excess of every cell, by row and column; 0 where the other rows took no time."""
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
    """Sum of (excess - `MIN_EXCESS`) over the heaviest span, and where it begins and ends; of equal ones the first."""
    best = (0.0, 0, 0)
    total, start = 0.0, 0
    for column, value in enumerate(row):
        if total <= 0:
            total, start = 0.0, column
        total += value - MIN_EXCESS
        if total > best[0]:
            best = (total, start, column + 1)
    return best


def _noise(excess: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a cell, from the median difference of neighbours, which jumps and peaks hardly change."""
    jumps = [abs(after - before) for row in excess for before, after in itertools.pairwise(row)]
    return 1.4826 * statistics.median(jumps) / math.sqrt(2) if jumps else 0.0


# In words


def map_finding(found: RankStepMap) -> str:
    """Which ranks were slow, by how much and when; or what was searched for and not found."""
    if len(found.cells) < 2:
        return "One rank: there is no other rank to compare it with."
    slow = find_slow_period(found)
    if slow is None:
        return _nothing_found(found)
    took = f"{slow.ratio:.2f}x the time of the others"
    return f"{_who(slow)} on {slow.hosts} took {took} {_when(slow, found)}."


def _nothing_found(found: RankStepMap) -> str:
    columns = len(found.step_starts)
    if columns < MIN_COLUMNS:
        return "Too few steps to look for slow ranks."
    least = min_columns(columns)
    edges = (*found.step_starts, found.last_step + 1)
    steps = max(end - start for start, end in zip(edges, edges[least:], strict=False))
    rows = "rank" if len(found.cells) == found.num_ranks else "row of ranks"
    return f"No {rows} takes {percent(MIN_EXCESS, 0)} longer than the others for {steps} steps or more, beyond noise."


def _who(slow: SlowPeriod) -> str:
    if slow.first_rank == slow.last_rank:
        return f"Rank {slow.first_rank}"
    return f"The slowest of ranks {slow.first_rank} to {slow.last_rank}"


def _when(slow: SlowPeriod, whole: RankStepMap) -> str:
    if slow.from_start and slow.to_end:
        return f"in all measured steps ({slow.first_step} to {slow.last_step})"
    if slow.to_end:
        return f"from step {slow.first_step} on (to the last, {slow.last_step})"
    if slow.from_start:
        return f"from the first measured step ({slow.first_step}) to step {slow.last_step} of {whole.last_step}"
    return f"from step {slow.first_step} to {slow.last_step} of {whole.last_step}"
