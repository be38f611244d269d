"""Step times of a group by rank count: quantiles, outliers, and a map of ranks by steps.

The time of a step is that of its slowest rank. Each run is reduced to a digest when it is read
(`dlbench.reading.digest`); here the digests of one rank count become means over runs, because the experimental unit
is the run (`dlbench.stats.estimates`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.digest import QUANTILES, OutlierStep, RankStepMap, StepDigest
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.wording import percent
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate

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


@dataclass(frozen=True, kw_only=True)
class StepQuantile:
    """One quantile of the step times at a rank count."""

    share: float
    """Share of steps that take no longer (fraction): 0, 0.01, ..., 1."""
    seconds: Estimate
    """Median over runs, with their range, whatever their number: a band of 101 quantiles is no 101 claims."""


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Step times at one rank count: the slowest rank's time in each measured step, seconds."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...]
    num_steps: int
    """Measured steps of all runs together."""
    num_warmup: int
    """Warm-up steps of all runs together; they are left out."""
    quantiles: tuple[StepQuantile, ...]
    p50: Estimate
    """Quantiles of each run, geometric mean over runs."""
    p95: Estimate
    p99: Estimate
    longest: Estimate
    num_outliers: int
    """Steps beyond their run's fence, of all runs together."""
    outlier_share: Estimate
    """Share of a run's steps that are outliers (fraction), median over runs."""
    fence: Estimate
    """Third quartile + 3 x the interquartile range (Tukey's far-out fence), median over runs."""
    outliers: tuple[OutlierStep, ...]
    """The longest of each run, the largest ratio first."""
    autocorrelation: Estimate | None
    """Correlation of successive step times (ratio), median over the runs in which it is known; None: known in none."""

    @property
    def pooled_outlier_share(self) -> float:
        """Outliers of all runs over steps of all runs (fraction)."""
        return self.num_outliers / self.num_steps


@dataclass(frozen=True, kw_only=True)
class MapRow:
    """One row of a map: neighbouring ranks."""

    first_rank: int
    last_rank: int
    hosts: str
    cells: tuple[float, ...]
    """Own work relative to the median of all ranks and steps (ratio), four digits; the largest mean of any of the ranks
    over the steps of the column."""
    mean: float
    largest: float
    largest_first_step: int
    """Steps of the cell with the largest value."""
    largest_last_step: int


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """Ranks by steps of one run: the run with the middle median step, at the largest rank count."""

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


def step_times(group: Group, table: RunTable) -> StepTimes | None:
    """Distribution, outliers and map of a group's steps; None where the table was made without digests."""
    if not table.digests:
        return None
    runs = {run.plan.run_id: run for run in group.runs}
    return StepTimes(
        points=tuple(_point(point, runs, table, is_baseline=point is group.baseline) for point in group.points),
        map=_map(group.points[-1], table),
    )


def _point(point: Point, runs: dict[str, Run], table: RunTable, *, is_baseline: bool) -> StepPoint:
    by_run = {table.keys[run_id]: table.digests[run_id] for run_id in point.run_ids}
    digests = list(by_run.values())
    correlations = {key: one.autocorrelation for key, one in by_run.items() if one.autocorrelation is not None}
    outliers = [step for one in digests for step in one.outliers]
    records = [runs[run_id].record for run_id in point.run_ids]

    def quantile_s(percent: int) -> Estimate:
        return geometric_mean_estimate({key: one.quantiles_s[percent] for key, one in by_run.items()}, "s")

    return StepPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        run_ids=point.run_ids,
        num_steps=sum(one.num_steps for one in digests),
        num_warmup=sum(one.steps for one in records if one is not None) - sum(one.num_steps for one in digests),
        quantiles=tuple(_quantile(digests, index) for index in range(QUANTILES)),
        p50=quantile_s(50),
        p95=quantile_s(95),
        p99=quantile_s(99),
        longest=quantile_s(100),
        num_outliers=sum(one.num_outliers for one in digests),
        outlier_share=median_estimate(
            {key: one.num_outliers / one.num_steps for key, one in by_run.items()}, "fraction"
        ),
        fence=median_estimate({key: one.fence_s for key, one in by_run.items()}, "s"),
        outliers=tuple(sorted(outliers, key=lambda one: (-one.ratio, one.run_id, one.step))),
        autocorrelation=median_estimate(correlations, "ratio") if correlations else None,
    )


def _quantile(digests: Sequence[StepDigest], index: int) -> StepQuantile:
    values = [one.quantiles_s[index] for one in digests]
    several = len(values) > 1
    return StepQuantile(
        share=index / (QUANTILES - 1),
        seconds=Estimate(
            value=geometric_mean_estimate(values).value,
            low=min(values) if several else None,
            high=max(values) if several else None,
            n=len(values),
            kind="range" if several else "single run",
            unit="s",
        ),
    )


def _map(point: Point, table: RunTable) -> RankMap:
    """The map of the run in the middle, by its median step; of two in the middle the faster one."""
    ordered = sorted(point.run_ids, key=lambda run_id: (table.digests[run_id].quantiles_s[50], run_id))
    run_id = ordered[(len(ordered) - 1) // 2]
    found = table.digests[run_id].map
    ends = (*found.rank_starts[1:], found.num_ranks)
    rows = zip(found.rank_starts, ends, found.row_hosts, found.cells, strict=True)
    return RankMap(
        run_id=run_id,
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(ordered),
        step_starts=found.step_starts,
        last_step=found.last_step,
        rows=tuple(_row(found, first, end - 1, hosts, cells) for first, end, hosts, cells in rows),
        finding=map_finding(found),
    )


def _row(found: RankStepMap, first: int, last: int, hosts: str, cells: Sequence[float]) -> MapRow:
    column = max(range(len(cells)), key=lambda index: cells[index])
    ends = (*(start - 1 for start in found.step_starts[1:]), found.last_step)
    return MapRow(
        first_rank=first,
        last_rank=last,
        hosts=hosts,
        cells=tuple(float(f"{value:.4g}") for value in cells),
        mean=statistics.fmean(cells),
        largest=cells[column],
        largest_first_step=found.step_starts[column],
        largest_last_step=ends[column],
    )
