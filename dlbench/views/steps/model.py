"""The report's plain data on single steps: distribution, outliers, ranks by steps; see `model`."""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.stats.estimates import Estimate


@dataclass(frozen=True, kw_only=True)
class StepQuantile:
    """One quantile of the step times of a rank count."""

    share: float
    """Of the steps that are no longer than this (1): 0, 0.01, ..., 1."""
    seconds: Estimate
    """Median over runs, with their range: a bootstrap of every quantile would take long and tell little more."""


@dataclass(frozen=True, kw_only=True)
class LongStep:
    """A step that took far longer than its run's median step."""

    run_id: str
    step: int
    """Warm-up steps counted."""
    seconds: float
    """Of its slowest rank."""
    ratio: float
    """Over the run's median step (1)."""
    rank: int
    """Whose own work was longest."""
    host: str
    phase: str
    """What grew most, one of `dlbench.reading.measures.PARTS`."""


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Step times at one rank count: the slowest rank's time in each measured step."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...]
    num_steps: int
    """Measured steps of all runs together."""
    num_warmup: int
    """Steps before them that are left out, of all runs together."""
    quantiles: tuple[StepQuantile, ...]
    p50: Estimate
    """Quantiles of single runs, median over runs."""
    p95: Estimate
    p99: Estimate
    longest: Estimate
    num_outliers: int
    """Steps beyond their run's fence, of all runs together."""
    outlier_share: Estimate
    """Of the steps of a run, median over runs (fraction)."""
    fence: Estimate
    """Third quartile + 3 x the interquartile range (Tukey's far-out fence), median over runs."""
    outliers: tuple[LongStep, ...]
    """The longest of each run, the largest ratio first."""
    autocorrelation: Estimate | None
    """Of successive step times, median over the runs in which it is known; None where it is in none."""


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """One row of a map: neighbouring ranks."""

    first_rank: int
    last_rank: int
    hosts: str
    cells: tuple[float, ...]
    """Own work relative to the median of all ranks and steps (1), four digits; the largest mean of any of the ranks
    over the steps of the column."""
    mean: float
    largest: float
    largest_first_step: int
    """Steps of the cell with the largest value."""
    largest_last_step: int


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """Ranks by steps of one run: the one in the middle, by its median step, of the largest rank count."""

    run_id: str
    ranks: int
    nodes: int
    num_runs: int
    """Runs among which it is the one in the middle."""
    step_starts: tuple[int, ...]
    """First step of each column, warm-up steps counted."""
    last_step: int
    rows: tuple[MapRow, ...]
    finding: str
    """Which ranks stand out and when, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times of a group by rank count."""

    points: tuple[StepPoint, ...]
    map: RankMap
