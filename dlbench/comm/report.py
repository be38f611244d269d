"""The report of the collective benchmark as plain data: measurements, fits, verdicts and their words, and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from dlbench.analysis.comparability import Condition, differing_settings, digest_of, unique_labels
from dlbench.analysis.environments import (
    LOAD_CODES,
    Doubt,
    Severity,
    environment_doubts,
    load_doubts,
    loads_of,
    merged,
    network_doubts,
    side_by_side,
)
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.comm.costs import COST_WORDS, Cost, cost
from dlbench.comm.fits import Fits, NetworkFit, fit_all
from dlbench.comm.measurements import (
    CollectiveGroup,
    MeasuredGroup,
    MeasuredSeries,
    Rejected,
    comparable,
    layout_of,
    name_of,
    tabulate,
    why_not,
)
from dlbench.comm.pairs import PairsReport, pairs_report
from dlbench.comm.wording import (
    STAY_WITHIN,
    Best,
    Recommended,
    advice,
    best,
    conditions_of,
    label_of,
    ranges_of,
    verdict,
)
from dlbench.lazy import np
from dlbench.perfmodels.algorithms import counts
from dlbench.records.comm import CommPoint, CommRecord, CommRun, CommScan
from dlbench.report.document import BaseReport, ListedRun, definitions, without_figure
from dlbench.report.table import column
from dlbench.report.wording import runs_text
from dlbench.specs.base import Precision
from dlbench.specs.comm import ELEMENT_BYTES, POOR_MEDIAN, POOR_WORST, Collective
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import counted, format_bytes, whole_seconds

GroupT = TypeVar("GroupT", bound=MeasuredGroup)
TITLE = "dlbench collective benchmark"
COUNTERS = {"messages": "messages", "bytes_sent": "bytes sent", "bytes_across": "bytes to other groups"}
NOISY = 0.5  # Share of the median that the middle half of iterations may span before a point is called noisy.


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
    best: tuple[Best, ...]
    recommended: tuple[Recommended, ...]
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
    settings = differing_settings([(digest_of(comparable(group.sample)), group.sample.plan) for group in all_groups])
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
        methods=definitions(
            "comm",
            poor_median=POOR_MEDIAN,
            poor_worst=POOR_WORST,
            stay_within=STAY_WITHIN,
            cost_words=COST_WORDS,
        ),
    )


def _with_unique_labels(groups: Sequence[GroupT]) -> tuple[GroupT, ...]:
    labels = unique_labels(groups)
    return tuple(replace(group, label=label) for group, label in zip(groups, labels, strict=True))


def _group(group: CollectiveGroup, fits: Fits, conditions: tuple[Condition, ...]) -> GroupReport:
    plan = group.sample.plan
    series = fits.with_predictions(group)
    label, fastest = label_of(group), best(group)
    ranges = ranges_of(fastest)
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
        verdict=verdict(recommendation, fastest[-1], rate_name),
        advice=recommendation,
        rate_name=rate_name,
        conditions=conditions,
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=series,
        costs=tuple(_costs(group, fits, series)),
        best=fastest,
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


def group_doubts(group: CollectiveGroup) -> list[Doubt]:
    """Returns all warnings of a group, serious ones first; equal texts once, with their runs."""
    doubts = [*_layout_doubts(group), *mixed_configurations({"": environments_of(group.runs)}), *_noise(group.runs)]
    # Noise and the load of cores are reported once for all runs.
    doubts += load_doubts(loads_of(group.runs))
    of_runs = chain.from_iterable(map(run_doubts, group.runs))
    doubts += merged([doubt for doubt in of_runs if doubt.code not in ("noisy-iterations", *LOAD_CODES)])
    return sorted(doubts, key=lambda doubt: doubt.severity != "serious")


def run_doubts(run: CommRun) -> list[Doubt]:
    """Returns the warnings of one run; none without a record."""
    if run.record is None:
        return []
    doubts = [
        Doubt(code=code, severity=severity, text=text, runs=(run.plan.run_id,))
        for code, severity, text in _record_doubts(run, run.record)
    ]
    return [*doubts, *load_doubts(loads_of([run])), *_noise([run])]


def _record_doubts(run: CommRun, record: CommRecord) -> Iterator[tuple[str, Severity, str]]:
    for warning in record.warnings:
        yield "recorded", "serious", warning
    if shared := shared_nodes(run.plan):
        yield "shared-nodes", "serious", shared
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=record.device.startswith("cuda")):
        yield code, "serious", text
    if record.nccl is not None:
        yield from network_doubts(record.nccl, record.environment)
    points = [point for point in record.points if not why_not(point)]
    for point in points:
        point_title = f"{name_of(point).title}, {format_bytes(point.num_bytes)}"
        for code, severity, text in _point_doubts(run, point):
            yield code, severity, f"{point_title}: {text}"
    unchecked = sum(point.correct is None for point in points)
    if unchecked:
        text = f"results of {unchecked} points were not checked, so a wrong sum would not have been noticed"
        yield "unchecked", "serious", text


def _point_doubts(run: CommRun, point: CommPoint) -> Iterator[tuple[str, Severity, str]]:
    if point.problem:
        yield "point", "serious", point.problem
    if point.launch_bound:
        text = (
            f"in {point.launch_bound} of {len(point.times_s)} iterations the GPU reached the operations before the "
            "host had queued all of them: the time may be that of the host's calls"
        )
        yield "launch-bound", "serious", text
    if point.is_cut:
        text = (
            f"samples of only {point.operations} operations, because the GPU reached larger samples before the host "
            "had queued them: the time may include differences between the starts of ranks"
        )
        yield "short-samples", "note", text
    problem = counter_problem(run, point)
    if problem:
        yield "counters", "serious", problem


def counter_problem(run: CommRun, point: CommPoint) -> str:
    """Returns how the counters of ranks differ from the formulas; empty if they agree, and for libraries."""
    if name_of(point).is_library or point.pair is not None:
        return ""
    width = ELEMENT_BYTES[point.dtype]
    ranks = counts(
        point.collective,
        point.algorithm,
        layout_of(run),
        point.num_bytes // width,
        width,
        shards=run.plan.comm.shards,
        chunks=point.chunks,
    )
    problems = []
    steps = max(rank.steps for rank in ranks)
    if point.steps != steps:
        problems.append(f"steps: {point.steps} counted, {steps} by the formula")
    for name, title in COUNTERS.items():
        counts_by_rank = getattr(point, name)
        if len(counts_by_rank) != len(ranks):
            problems.append(f"{title}: counted on {len(counts_by_rank)} of {len(ranks)} ranks")
            continue
        for rank, (count, formula) in enumerate(zip(counts_by_rank, map(attrgetter(name), ranks), strict=True)):
            if count != formula:
                problems.append(f"{title} of rank {rank}: {count:,} counted, {formula:,} by the formula")
                break
    if not problems:
        return ""
    return f"counters differ from the formulas: {'; '.join(problems)}"


def _layout_doubts(group: CollectiveGroup) -> Iterator[Doubt]:
    if len(group.runs) < MIN_RUNS:
        num_runs = counted(len(group.runs), "valid run")
        text = f"insufficient for a comparison: fewer than {MIN_RUNS} valid runs ({num_runs})"
        if len(group.runs) == 1:
            text += "; its intervals are those of iterations and do not show how runs differ"
        yield Doubt(code="few-repeats", severity="serious", text=text)
    hosts = set(chain.from_iterable(run.record.hosts for run in group.runs if run.record is not None))
    if group.layout.num_groups > 1 and (group.sample.plan.layout.nodes == 1 or len(hosts) == 1):
        text = "all groups are on one host: messages between groups cost the same as messages within a group"
        yield Doubt(code="pretended-groups", severity="note", text=text)


def environments_of(runs: Sequence[CommRun]) -> dict[str, Mapping[str, str]]:
    """Returns the environment of rank 0 by run id, of runs with a record."""
    return {run.plan.run_id: run.record.environment for run in runs if run.record is not None}


def _noise(runs: Sequence[CommRun]) -> Iterator[Doubt]:
    num_points = 0
    noisy = []
    for run in runs:
        if run.record is None:
            continue
        points = [point for point in run.record.points if not why_not(point)]
        num_points += len(points)
        for point in points:
            low, middle, high = np.percentile(point.times_s, [25, 50, 75])
            if high - low > NOISY * middle:
                noisy.append(run.plan.run_id)
    if noisy:
        text = (
            f"iterations scatter: at {len(noisy)} of {num_points} points their middle half spans more than "
            f"{NOISY:.0%} of the median"
        )
        yield Doubt(code="noisy-iterations", severity="serious", text=text, runs=tuple(dict.fromkeys(noisy)))
