"""The report of the collective benchmark as plain data: measurements, fits, verdicts and their words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from dlbench.analysis.comparability import Condition, differing_settings, unique_labels
from dlbench.analysis.environments import side_by_side
from dlbench.comm import choice
from dlbench.comm.choice import STAY_WITHIN
from dlbench.comm.costs import COST_WORDS, Cost, cost
from dlbench.comm.doubts import environments_of, group_doubts, run_doubts
from dlbench.comm.fits import Fits, NetworkFit, fit_all
from dlbench.comm.measurements import CollectiveGroup, MeasuredGroup, MeasuredSeries, Rejected, comparable_id, tabulate
from dlbench.comm.pairs import PairsReport, pairs_report
from dlbench.comm.wording import advice, conditions_of, label_of, verdict
from dlbench.records.comm import CommRun, CommScan
from dlbench.report.document import BaseReport, ListedRun, without_figure
from dlbench.report.table import column
from dlbench.report.wording import INTERVALS, runs_text
from dlbench.specs.base import Precision
from dlbench.specs.comm import POOR_MEDIAN, POOR_WORST, Collective
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import whole_seconds

GroupT = TypeVar("GroupT", bound=MeasuredGroup)

TITLE = "dlbench collective benchmark"
METHODS: dict[str, str] = {
    "Points that count": "Only points with a correct result on every rank, of runs with a valid record. All others are "
    "listed with the reason. Warm-up iterations are not recorded.",
    "Time": "An iteration is one operation, or several back to back if one is shorter than 2 ms; its time is divided "
    "by their number. Ranks first wait at the carrier's own barrier. On one host the time is from the last rank's "
    "start to the last end, otherwise it is that of the slowest rank. On GPUs ranks synchronize by a tiny all-reduce "
    "in the stream, and the time is that of the slowest rank between events. A run's time is the median over its "
    "iterations. MPI's all-reduce is timed in place, and out of place as osu_allreduce does; those of other libraries "
    "in place.",
    "Medians and intervals": "The run is the experimental unit, not the iteration. Figures are medians over runs. "
    f"{INTERVALS} With fewer runs the range is printed, with its level. For a single run it is the middle half of its "
    "iterations, labelled within-run, which does not show how runs differ.",
    "algbw and busbw": "Formulas of nccl-tests: algbw = bytes / time; busbw = algbw x 2 (p - 1) / p for "
    "all-reduce, (p - 1) / p for reduce-scatter, all-gather, scatter, gather and all-to-all, and 1 for broadcast and "
    "reduce, with p ranks. Bytes are the size of each rank's whole buffer: for all-gather the gathered result, for "
    "reduce-scatter the input. GB/s is 1e9 bytes per second.",
    "Counters": "Steps, messages and bytes are counted by the transport while an algorithm runs, and must equal the "
    "formulas exactly; a difference is a warning. Libraries do not report counters.",
    "Fitted costs": "A message costs alpha + bytes x beta, by level (within a group, between groups, between leaf "
    "switches) and by size; a byte reduced costs gamma. One fit for each system, carrier and type of element, with "
    "relative errors and robust against outliers. Shared links are those that predict held-out points best. "
    "Intervals: the fit is repeated for resampled runs (stretched to Student's t).",
    "Predictions": "The prediction next to a measurement is by a fit without this point. The error at the largest rank "
    "count is that of a fit to the smaller ones. Libraries choose their algorithms themselves and are not predicted. "
    f"Algorithms with large errors (median error above {POOR_MEDIAN:.0%}, or worst above "
    f"{POOR_WORST:.0%}) are not recommended.",
    "Recommended": f"An algorithm is recommended if every other one is slower by more than {STAY_WITHIN:.0%}, beyond "
    f"the scatter of {MIN_RUNS} runs or more (interval of the ratio of times). Otherwise there is no winner.",
    "Cost of each algorithm": COST_WORDS,
}


@dataclass(frozen=True, kw_only=True)
class GroupReport(MeasuredGroup):
    """One collective at one layout."""

    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    group_size: int
    verdict: str
    advice: str
    caption: str
    costs: tuple[Cost, ...]  # One per algorithm and size.
    best: tuple[choice.Best, ...]
    recommended: tuple[choice.Recommended, ...]
    rejected: tuple[Rejected, ...]
    not_measured: tuple[str, ...]
    rate_name: str = field(metadata={"json": False})  # busbw or algbw.


@dataclass(frozen=True, kw_only=True)
class RunRow(ListedRun):
    """One run of the collective benchmark."""

    collective: Collective = field(metadata=column("Collective"))
    dtype: Precision
    system: str = field(metadata=column("System"))


@dataclass(frozen=True, kw_only=True)
class CollectivesReport(BaseReport):
    """The whole report."""

    format: str = "dlbench.comm-report"
    title: str = TITLE
    groups: tuple[GroupReport, ...]
    pairs: tuple[PairsReport, ...] = ()
    fits: tuple[NetworkFit, ...]
    unfitted: tuple[str, ...]
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        return without_figure(self.runs)


def assemble(scan: CommScan) -> CollectivesReport:
    """Returns the report of all runs of a scan; equal runs give equal reports."""
    table = tabulate(scan)
    all_groups = (*table.groups, *table.pairs)
    measured: list[CommRun] = []
    group_ids: dict[int, str] = {}
    for group in all_groups:
        measured += group.runs
        group_ids |= dict.fromkeys(map(id, group.runs), group.id)
    fits = fit_all(table)
    reasons = {id(item.run): (item.state, item.why) for item in table.without}
    settings = differing_settings([(comparable_id(group.sample), group.sample.plan) for group in all_groups])
    conditions = {
        group.id: (*conditions_of(group), *differing) for group, differing in zip(all_groups, settings, strict=True)
    }
    pairs = [
        pairs_report(group, fits, label_of(group), conditions[group.id], group_doubts(group)) for group in table.pairs
    ]
    return CollectivesReport(
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        groups=_with_unique_labels([_group(group, fits, conditions[group.id]) for group in table.groups]),
        pairs=_with_unique_labels(pairs),
        fits=fits.fits,
        unfitted=fits.unfitted,
        runs=tuple(_run(run, group_ids.get(id(run), ""), *reasons.get(id(run), ("valid", ""))) for run in scan.runs),
        damaged=table.damaged,
        environment=tuple(side_by_side(environments_of(measured)).common.items()),
        methods=tuple(METHODS.items()),
    )


def _with_unique_labels(groups: Sequence[GroupT]) -> tuple[GroupT, ...]:
    labels = unique_labels(groups)
    return tuple(replace(group, label=label) for group, label in zip(groups, labels, strict=True))


def _group(group: CollectiveGroup, fits: Fits, conditions: tuple[Condition, ...]) -> GroupReport:
    plan = group.sample.plan
    series = fits.with_predictions(group)
    label, best = label_of(group), choice.best(group)
    ranges = choice.ranges_of(best)
    recommendation = advice(group, ranges)
    records = (run.record for run in group.runs if run.record is not None)
    not_measured = dict.fromkeys(chain.from_iterable(record.not_measured for record in records))
    # Nothing crosses a bus with one rank.
    rate_name = "busbw" if plan.layout.ranks > 1 else "algbw"
    return GroupReport(
        id=group.id,
        label=label,
        collective=group.collective,
        dtype=group.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        group_size=group.layout.group_size,
        verdict=verdict(recommendation, best[-1], rate_name),
        advice=recommendation,
        rate_name=rate_name,
        conditions=conditions,
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=series,
        costs=tuple(_costs(group, fits, series)),
        best=best,
        recommended=ranges,
        rejected=group.rejected,
        not_measured=tuple(not_measured),
        doubts=tuple(group_doubts(group)),
    )


def _costs(group: CollectiveGroup, fits: Fits, all_series: Sequence[MeasuredSeries]) -> Iterator[Cost]:
    for series in all_series:
        if series.is_library:
            continue
        fit = fits.of(group, series.carrier)
        network = None if fit is None else fit.network
        for row in series.rows:
            operation = group.collective, series.algorithm, group.layout, row.num_bytes, group.dtype
            yield cost(*operation, network, group.sample.plan.comm.shards, row)


def _run(run: CommRun, group: str, state: str, failure_reason: str) -> RunRow:
    plan, finished = run.plan, ""
    if run.record is not None:
        finished = run.record.finished
    return RunRow(
        run_id=plan.run_id,
        group=group,
        state=state,
        failure_reason=failure_reason,
        collective=plan.comm.collective,
        dtype=plan.comm.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        repeat=plan.series.repeat,
        finished=finished,
        warnings=tuple(doubt.text for doubt in run_doubts(run)),
    )
