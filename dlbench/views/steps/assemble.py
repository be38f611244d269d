"""Digests of single steps become part of the `Report`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dlbench.reading.digest import QUANTILES, RankStepMap, StepDigest
from dlbench.reading.run_table import RunTable
from dlbench.reading.scaling import Group, Point
from dlbench.records.scan import Run
from dlbench.report.wording import clean, percent
from dlbench.stats.estimates import Estimate, median_estimate
from dlbench.stats.figure import figure_of
from dlbench.views.steps.model import LongStep, MapRow, RankMap, StepPoint, StepQuantile, StepTimes
from dlbench.views.steps.slow_periods import LEAST, LEAST_COLUMNS, Spell, least_columns, spell


def step_times(group: Group, table: RunTable) -> StepTimes | None:
    """Distribution, outliers and maps of a group's steps; None where the table was made without digests."""
    if not table.digests:
        return None
    runs = {run.plan.run_id: run for run in group.runs}
    return StepTimes(
        points=tuple(_point(point, runs, table, is_baseline=point is group.baseline) for point in group.points),
        map=_map(group.points[-1], table),
    )


def _point(point: Point, runs: dict[str, Run], table: RunTable, *, is_baseline: bool) -> StepPoint:
    found = [table.digests[run_id] for run_id in point.run_ids]
    known = [one.autocorrelation for one in found if one.autocorrelation is not None]
    return StepPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        run_ids=tuple(map(clean, point.run_ids)),
        num_steps=sum(one.num_steps for one in found),
        num_warmup=sum(runs[run_id].plan.measure.warmup_steps for run_id in point.run_ids),
        quantiles=tuple(_quantile(found, index) for index in range(QUANTILES)),
        p50=_over_runs([one.quantiles_s[50] for one in found], "s"),
        p95=_over_runs([one.quantiles_s[95] for one in found], "s"),
        p99=_over_runs([one.quantiles_s[99] for one in found], "s"),
        longest=_over_runs([one.quantiles_s[100] for one in found], "s"),
        num_outliers=sum(one.num_outliers for one in found),
        outlier_share=_over_runs([one.num_outliers / one.num_steps for one in found], "fraction"),
        fence=_over_runs([one.fence_s for one in found], "s"),
        outliers=_outliers(point, table),
        autocorrelation=_over_runs(known, "ratio") if known else None,
    )


def _over_runs(values: Sequence[float], unit: str) -> Estimate:
    return figure_of(median_estimate(values), unit)


def _quantile(found: Sequence[StepDigest], index: int) -> StepQuantile:
    values = [one.quantiles_s[index] for one in found]
    several = len(values) > 1
    return StepQuantile(
        share=index / (QUANTILES - 1),
        seconds=Estimate(
            value=statistics.median(values),
            unit="s",
            low=min(values) if several else None,
            high=max(values) if several else None,
            n=len(values),
            kind="range" if several else "single run",
        ),
    )


def _outliers(point: Point, table: RunTable) -> tuple[LongStep, ...]:
    made = [
        LongStep(
            run_id=clean(run_id),
            step=one.step,
            seconds=one.seconds,
            ratio=one.ratio,
            rank=one.rank,
            host=clean(one.host, 64),
            phase=one.phase,
        )
        for run_id in point.run_ids
        for one in table.digests[run_id].outliers
    ]
    return tuple(sorted(made, key=lambda one: (-one.ratio, one.run_id, one.step)))


def _map(point: Point, table: RunTable) -> RankMap:
    ordered = sorted(point.run_ids, key=lambda run_id: (table.digests[run_id].quantiles_s[50], run_id))
    run_id = ordered[(len(ordered) - 1) // 2]
    found = table.digests[run_id].map
    ends = (*found.rank_starts[1:], found.num_ranks)
    rows = zip(found.rank_starts, ends, found.row_hosts, found.cells, strict=True)
    return RankMap(
        run_id=clean(run_id),
        ranks=point.ranks,
        nodes=point.nodes,
        num_runs=len(ordered),
        step_starts=found.step_starts,
        last_step=found.last_step,
        rows=tuple(_row(found, first, end - 1, hosts, cells) for first, end, hosts, cells in rows),
        finding=_finding(found),
    )


def _row(found: RankStepMap, first: int, last: int, hosts: str, cells: Sequence[float]) -> MapRow:
    column = max(range(len(cells)), key=lambda index: cells[index])
    ends = (*(start - 1 for start in found.step_starts[1:]), found.last_step)
    return MapRow(
        first_rank=first,
        last_rank=last,
        hosts=clean(hosts, 140),
        cells=tuple(float(f"{value:.4g}") for value in cells),
        mean=statistics.fmean(cells),
        largest=cells[column],
        largest_first_step=found.step_starts[column],
        largest_last_step=ends[column],
    )


def _finding(found: RankStepMap) -> str:
    if len(found.cells) < 2:
        return "One rank: there is no other one to compare it with."
    spelled = spell(found)
    if spelled is None:
        return _nothing_found(found)
    took = f"{spelled.ratio:.2f} times the own work of the others"
    return f"{_who(spelled)} on {clean(spelled.hosts, 140)} took {took} {_when(spelled, found)}."


def _nothing_found(found: RankStepMap) -> str:
    """What the search for a spell would have found, and no more than that."""
    columns = len(found.step_starts)
    if columns < LEAST_COLUMNS:
        return "Too few steps to tell."
    least = least_columns(columns)
    edges = (*found.step_starts, found.last_step + 1)
    steps = max(end - start for start, end in zip(edges, edges[least:], strict=False))
    return (
        f"No {_rows_text(found)} takes {percent(LEAST, 0)} or more longer than the others, beyond noise, for {least} "
        f"columns ({steps} steps) or longer; single long steps stand under Step times."
    )


def _rows_text(found: RankStepMap) -> str:
    return "rank" if len(found.cells) == found.num_ranks else "row of ranks"


def _who(found: Spell) -> str:
    if found.first_rank == found.last_rank:
        return f"Rank {found.first_rank}"
    return f"The slowest of ranks {found.first_rank} to {found.last_rank}"


def _when(found: Spell, whole: RankStepMap) -> str:
    if found.from_start and found.to_end:
        return f"in all measured steps ({found.first_step} to {found.last_step})"
    if found.to_end:
        return f"from step {found.first_step} on (to the last, {found.last_step})"
    if found.from_start:
        return f"from the first measured step ({found.first_step}) to step {found.last_step} of {whole.last_step}"
    return f"from step {found.first_step} to {found.last_step} of {whole.last_step}"
