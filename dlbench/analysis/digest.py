"""What is kept of the single steps of a run once the steps themselves are let go.

A run of 1,024 ranks and 1,000 steps is a million step times; a report shows their distribution, the outliers and a map
of ranks by steps, which are made here, once, while the steps are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTILES = 101
"""Quantiles kept of a run's step times: 0 %, 1 %, ..., 100 %."""
MAX_MAP_ROWS = 64
MAX_MAP_COLUMNS = 100
MAX_OUTLIERS = 20


@dataclass(frozen=True, kw_only=True)
class OutlierStep:
    """A step that took far longer than the run's median step."""

    step: int
    """Number of the step, warm-up steps counted."""
    seconds: float
    """Of its slowest rank."""
    ratio: float
    """Over the run's median step (1)."""
    rank: int
    """Rank whose own work (step without exchange) was longest."""
    host: str
    phase: str
    """What grew most against that rank's median, one of `dlbench.analysis.measures.PARTS` but `imbalance`."""


@dataclass(frozen=True, kw_only=True)
class RankStepMap:
    """Own work (step without exchange) of ranks by steps, relative to the median over all ranks and steps.

    A cell holds the largest mean of any of its ranks over its steps, so that one slow rank among many stays visible.
    """

    rank_starts: tuple[int, ...]
    """First rank of each row; the last row ends with the last rank."""
    num_ranks: int
    step_starts: tuple[int, ...]
    """Number of the first step of each column, warm-up steps counted."""
    last_step: int
    cells: tuple[tuple[float, ...], ...]
    """By row, then column (1)."""
    row_hosts: tuple[str, ...]
    """Hosts of each row's ranks, `n0` or `n0 to n3`."""


@dataclass(frozen=True, kw_only=True)
class StepDigest:
    """The steps of one run."""

    quantiles_s: tuple[float, ...]
    """`QUANTILES` quantiles of the slowest rank's time in each measured step, seconds, linear interpolation."""
    num_steps: int
    num_outliers: int
    """Steps beyond the third quartile + 3 times the interquartile range (Tukey's far-out fence)."""
    fence_s: float
    outliers: tuple[OutlierStep, ...]
    """The longest of them, longest first, at most `MAX_OUTLIERS`."""
    autocorrelation: float | None
    """Of successive step times (lag 1); None for fewer than 10 steps or equal times."""
    map: RankStepMap
