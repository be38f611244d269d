"""Step times of a group by rank count: quantiles, outliers, and a map of ranks by steps.

The time of a step is that of its slowest rank. Each run is reduced to a digest when it is read
(`dlbench.reading.digest`); here the digests of one rank count become means over runs, because the experimental unit
is the run (`dlbench.stats.estimates`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.reading.digest import QUANTILES, OutlierStep, RankStepMap, StepDigest
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate
from dlbench.views.steps.slow_periods import map_finding


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


def _steps(run: Run) -> int:
    """Of the warm-up, too."""
    return 0 if run.record is None else run.record.steps


def _point(point: Point, runs: dict[str, Run], table: RunTable, *, is_baseline: bool) -> StepPoint:
    by_run = {table.keys[run_id]: table.digests[run_id] for run_id in point.run_ids}
    digests = list(by_run.values())
    correlations = {key: one.autocorrelation for key, one in by_run.items() if one.autocorrelation is not None}
    outliers = [step for one in digests for step in one.outliers]

    def quantile_s(percent: int) -> Estimate:
        return geometric_mean_estimate({key: one.quantiles_s[percent] for key, one in by_run.items()}, "s")

    return StepPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        run_ids=point.run_ids,
        num_steps=sum(one.num_steps for one in digests),
        num_warmup=sum(_steps(runs[run_id]) for run_id in point.run_ids) - sum(one.num_steps for one in digests),
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
