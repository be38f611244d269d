"""The report of the collective benchmark as plain data: measurements, what follows from them, and the words on both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dlbench.analysis.comparability import Condition, differing_settings, unique_labels
from dlbench.analysis.core_load import LOAD_CODES, load_doubts
from dlbench.analysis.doubts import Doubt, merged
from dlbench.analysis.environments import environment_doubts, network_doubts, side_by_side
from dlbench.analysis.repeats import mixed_configurations, shared_nodes
from dlbench.comm import choice
from dlbench.comm.choice import RATE_SHARE, STAY_WITHIN, Best, Recommended
from dlbench.comm.costs import Cost, cost
from dlbench.comm.fits import Fit, Fits, fit_all
from dlbench.comm.measurements import (
    CollectiveGroup,
    Rejected,
    Series,
    comparable_id,
    layout_of,
    name_of,
    tabulate,
    why_not,
)
from dlbench.comm.pairs import PairsReport, pairs_report
from dlbench.comm.predictions import Prediction, Predictions
from dlbench.lazy import np
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.extrapolation import PRIOR_SCALE
from dlbench.records.comm import CommPoint, CommRun, CommScan
from dlbench.records.watch import NodeLoad
from dlbench.report.document import BaseReport, ListedRun
from dlbench.report.wording import INTERVALS, figure_text, optional, percent, place_text, runs_text
from dlbench.specs.base import Precision
from dlbench.specs.comm import (
    ALGORITHMS,
    ELEMENT_BYTES,
    POOR_MEDIAN,
    POOR_WORST,
    Collective,
    LargestHeldOut,
    Level,
    NetworkModel,
)
from dlbench.stats.estimates import MIN_RUNS
from dlbench.units import format_bytes, format_number, whole_seconds

TITLE = "dlbench collective benchmark"

_LAUNCH_BOUND = (
    "in {} of {} iterations the GPU came to the operations before the host had queued all of them: their time may be "
    "the host's rate of calls"
)
_CUT = (
    "samples of {} operations, fewer than usual, as the GPU came to more of them before the host had queued all: their "
    "time may hold what ranks began apart"
)

NOISY = 0.5  # Where the middle half of iterations spans more than this share of the median, none is typical.


def group_doubts(group: CollectiveGroup) -> list[Doubt]:
    """All reasons to doubt the figures of a group, serious ones first; equal texts once, with their runs."""
    found = [*_of_layout(group), *mixed_configurations({"": _environments(group.runs)}), *_noise(group.runs)]
    # Noise and the load of cores are reported once for all runs.
    found += load_doubts(_loads(group.runs))
    found += merged(
        doubt for run in group.runs for doubt in run_doubts(run) if doubt.code not in ("noisy-iterations", *LOAD_CODES)
    )
    return sorted(found, key=lambda doubt: doubt.severity != "serious")


def run_doubts(run: CommRun) -> list[Doubt]:
    """What one run with a record gives reason to doubt, by itself."""
    record = run.record
    if record is None:
        return []
    ids = (run.plan.run_id,)
    found = [Doubt(code="recorded", severity="serious", text=text, runs=ids) for text in record.warnings]
    if shared := shared_nodes(run.plan):
        found.append(Doubt(code="shared-nodes", severity="serious", text=shared, runs=ids))
    for code, text in environment_doubts(run.plan, record.environment, on_gpu=record.device.startswith("cuda")):
        found.append(Doubt(code=code, severity="serious", text=text, runs=ids))
    if record.nccl is not None:
        for code, severity, text in network_doubts(record.nccl, record.environment):
            found.append(Doubt(code=code, severity=severity, text=text, runs=ids))
    for point in record.points:
        if why_not(point):
            continue
        what = f"{name_of(point).title}, {format_bytes(point.num_bytes)}"
        if point.problem:
            found.append(Doubt(code="point", severity="serious", text=f"{what}: {point.problem}", runs=ids))
        if point.launch_bound:
            text = f"{what}: {_LAUNCH_BOUND.format(point.launch_bound, len(point.times_s))}"
            found.append(Doubt(code="launch-bound", severity="serious", text=text, runs=ids))
        if point.is_cut:
            text = f"{what}: {_CUT.format(point.operations)}"
            found.append(Doubt(code="short-samples", severity="note", text=text, runs=ids))
        problem = counter_problem(run, point)
        if problem:
            found.append(Doubt(code="counters", severity="serious", text=f"{what}: {problem}", runs=ids))
    unchecked = sum(point.correct is None for point in record.points if not why_not(point))
    if unchecked:
        text = f"results of {unchecked} points were not checked: a wrong sum would have gone unseen"
        found.append(Doubt(code="unchecked", severity="serious", text=text, runs=ids))
    return [*found, *load_doubts(_loads([run])), *_noise([run])]


def _loads(runs: Sequence[CommRun]) -> dict[str, tuple[NodeLoad, ...]]:
    return {run.plan.run_id: run.record.load for run in runs if run.record is not None}


def counter_problem(run: CommRun, point: CommPoint) -> str:
    """How what a rank counted differs from what the formulas say; empty where it does not, and for libraries."""
    if name_of(point).is_library or point.pair is not None:
        return ""
    layout, shards = layout_of(run), run.plan.comm.shards
    width = ELEMENT_BYTES[point.dtype]
    what = point.collective, point.algorithm, layout, point.num_bytes // width, width
    expected = counts(*what, shards=shards, chunks=point.chunks_run)
    found = []
    steps = max(rank.steps for rank in expected)
    if point.steps != steps:
        found.append(f"steps: {point.steps} counted, {steps} by the formula")
    for name, counted, wanted in (
        ("messages", point.messages, tuple(rank.messages for rank in expected)),
        ("bytes sent", point.bytes_sent, tuple(rank.bytes_sent for rank in expected)),
        ("bytes to other groups", point.bytes_across, tuple(rank.bytes_across for rank in expected)),
    ):
        if counted == wanted:
            continue
        if len(counted) != len(wanted):
            found.append(f"{name}: counted on {len(counted)} of {len(wanted)} ranks")
            continue
        rank = next(rank for rank, pair in enumerate(zip(counted, wanted, strict=True)) if pair[0] != pair[1])
        found.append(f"{name} of rank {rank}: {counted[rank]:,} counted, {wanted[rank]:,} by the formula")
    return f"counters differ from the formulas: {'; '.join(found)}" if found else ""


def _of_layout(group: CollectiveGroup) -> Iterator[Doubt]:
    if len(group.runs) < MIN_RUNS:
        count = f"{len(group.runs)} valid run{'s' * (len(group.runs) > 1)}"
        how = "; intervals are those of its iterations and say nothing on how runs differ" * (len(group.runs) == 1)
        yield Doubt(
            code="few-repeats",
            severity="serious",
            text=f"insufficient for a comparison: fewer than {MIN_RUNS} valid runs ({count}){how}",
        )
    plan = group.sample.plan
    hosts = {host for run in group.runs if run.record for host in run.record.hosts}
    if group.layout.num_groups > 1 and (plan.layout.nodes == 1 or len(hosts) == 1):
        yield Doubt(
            code="pretended-groups",
            severity="note",
            text="all groups are on one host: messages across groups cost what those inside cost",
        )


def _environments(runs: Sequence[CommRun]) -> dict[str, Mapping[str, str]]:
    """Of rank 0, by run id; runs without a record are passed over."""
    return {run.plan.run_id: run.record.environment for run in runs if run.record is not None}


def _noise(runs: Sequence[CommRun]) -> Iterator[Doubt]:
    known = [
        (run.plan.run_id, point) for run in runs if run.record for point in run.record.points if not why_not(point)
    ]
    noisy = []
    for run_id, point in known:
        low, middle, high = np.percentile(point.times_s, [25, 50, 75])
        if high - low > NOISY * middle:
            noisy.append(run_id)
    if noisy:
        yield Doubt(
            code="noisy-iterations",
            severity="serious",
            text=f"iterations scatter: at {len(noisy)} of {len(known)} points their middle half spans more than "
            f"{NOISY:.0%} of the median",
            runs=tuple(dict.fromkeys(noisy)),
        )


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One collective at one layout."""

    id: str
    label: str
    collective: Collective
    dtype: Precision
    system: str
    ranks: int
    nodes: int
    group_size: int
    verdict: str
    advice: str
    conditions: tuple[Condition, ...]
    caption: str
    num_runs: int
    series: tuple[Series, ...]
    costs: tuple[Cost, ...]  # Of its algorithms, by size.
    best: tuple[choice.Best, ...]
    recommended: tuple[choice.Recommended, ...]
    rejected: tuple[Rejected, ...]
    not_measured: tuple[str, ...]
    doubts: tuple[Doubt, ...]


@dataclass(frozen=True, kw_only=True)
class RunRow(ListedRun):
    """One run of the collective benchmark."""

    collective: Collective
    dtype: Precision
    system: str


@dataclass(frozen=True, kw_only=True)
class CollectivesReport(BaseReport):
    """Everything."""

    format: str = "dlbench.comm-report"
    title: str = TITLE
    groups: tuple[GroupReport, ...]
    pairs: tuple[PairsReport, ...] = ()
    fits: tuple[Fit, ...]
    unfitted: tuple[str, ...]
    runs: tuple[RunRow, ...]
    damaged: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    methods: tuple[tuple[str, str], ...]

    @property
    def without_figures(self) -> tuple[RunRow, ...]:
        return tuple(run for run in self.runs if not run.group)


def assemble(scan: CommScan) -> CollectivesReport:
    """The report of everything found under one folder; equal folders give equal reports."""
    table = tabulate(scan)
    everything = (*table.groups, *table.pairs)
    measured = [run for group in everything for run in group.runs]
    fits = fit_all(table)
    of_run = {id(run): group.id for group in everything for run in group.runs}
    without = {id(one.run): (one.state, one.why) for one in table.without}
    asked = differing_settings([(comparable_id(group.sample), group.sample.plan) for group in everything])
    groups = tuple(_group(group, fits, apart) for group, apart in zip(table.groups, asked, strict=False))
    pairs = tuple(
        pairs_report(group, fits, label_of(group), (*conditions_of(group), *apart), group_doubts(group))
        for group, apart in zip(table.pairs, asked[len(groups) :], strict=True)
    )
    return CollectivesReport(
        as_of=whole_seconds(max((run.record.finished for run in measured if run.record), default="")),
        groups=tuple(replace(group, label=label) for group, label in zip(groups, unique_labels(groups), strict=True)),
        pairs=tuple(replace(one, label=label) for one, label in zip(pairs, unique_labels(pairs), strict=True)),
        fits=fits.fits,
        unfitted=fits.unfitted,
        runs=tuple(_run(run, of_run.get(id(run), ""), *without.get(id(run), ("valid", ""))) for run in scan.runs),
        damaged=table.damaged,
        environment=tuple(side_by_side(_environments(measured)).common.items()),
        methods=METHODS,
    )


def _group(group: CollectiveGroup, fits: Fits, apart: tuple[Condition, ...]) -> GroupReport:
    plan = group.sample.plan
    predicted = fits.with_predictions(group).series
    label, best = label_of(group), choice.best(group)
    ranges = choice.ranges_of(best)
    costs = []
    for series in predicted:
        fit = fits.of(group, series.carrier)
        for row in () if series.is_library else series.rows:
            asked = group.collective, series.algorithm, group.layout, row.num_bytes, group.dtype
            costs.append(cost(*asked, fit.network if fit else None, plan.comm.shards, row))
    return GroupReport(
        id=group.id,
        label=label,
        collective=group.collective,
        dtype=group.dtype,
        system=plan.system.name,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        group_size=group.layout.group_size,
        verdict=verdict(group, best, ranges),
        advice=advice(group, ranges),
        conditions=(*conditions_of(group), *apart),
        caption=f"{label}; medians over {runs_text(len(group.runs))}",
        num_runs=len(group.runs),
        series=predicted,
        costs=tuple(costs),
        best=best,
        recommended=ranges,
        rejected=group.rejected,
        not_measured=tuple(dict.fromkeys(text for run in group.runs if run.record for text in run.record.not_measured)),
        doubts=tuple(group_doubts(group)),
    )


def _run(run: CommRun, group: str, state: str, failure_reason: str) -> RunRow:
    plan = run.plan
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
        finished="" if run.record is None else run.record.finished,
        warnings=tuple(one.text for one in run_doubts(run)),
    )


MAX_TIED = 3
COLLECTIVE_TITLES: dict[str, str] = {name: name for name in ALGORITHMS} | {
    "allreduce": "all-reduce",
    "p2p": "pairs of ranks",
}


def about(num_bytes: float) -> str:
    """Bytes that are computed, not chosen: three digits."""
    if not math.isfinite(num_bytes):
        return "no size"
    value, unit = format_bytes(num_bytes).split(" ")
    return f"{float(f'{float(value):.3g}'):g} {unit}"


def per_byte_text(seconds_per_byte: float) -> str:
    """Seconds per byte as the rate that they are, GB/s; `free` where bytes cost nothing."""
    return "free" if seconds_per_byte <= 0 else format_number(1e-9 / seconds_per_byte, 3)


def label_of(group: CollectiveGroup) -> str:
    """A group in one line: system, collective, type, layout, carriers."""
    plan, layout = group.sample.plan, group.layout
    groups = f" in {layout.num_groups} groups of {layout.group_size}" if layout.num_groups > 1 else ""
    nodes = f" on {plan.layout.nodes} nodes" if plan.layout.nodes > 1 else ""
    carriers = ", ".join(dict.fromkeys(series.carrier for series in group.series))
    what = f"{COLLECTIVE_TITLES[group.collective]} {group.dtype}"
    return f"{plan.system.name}: {what}, {plan.layout.ranks} ranks{groups}{nodes}, over {carriers}"


def conditions_of(group: CollectiveGroup) -> tuple[Condition, ...]:
    """What all runs of a group share."""
    plan, record = group.sample.plan, group.sample.record
    assert record is not None
    iterations = sorted({row.iterations for series in group.series for row in series.rows})
    hosts = sorted({host for run in group.runs if run.record for host in run.record.hosts})
    timings = {row.timing for series in group.series for row in series.rows}
    has_servers = any(series.algorithm == "parameter-server" for series in group.series)
    pairs, layout = plan.comm.pairs, group.layout
    values = (
        ("system", "System", plan.system.name),
        ("launcher", "Launcher", plan.system.launch.launcher),
        ("layout", "Ranks", place_text(plan.layout.ranks, plan.layout.nodes)),
        ("groups", "Groups", "" if pairs and layout.num_groups == 1 else f"{layout.num_groups} of {layout.group_size}"),
        ("cores", "Cores per rank", str(plan.layout.cores_per_rank)),
        ("device", "Device", record.device),
        ("collective", "Collective", "" if pairs else COLLECTIVE_TITLES[group.collective]),
        ("congestors", "Congestors", ", ".join(f"{first}:{second}" for first, second in plan.comm.congestors)),
        ("dtype", "Type", group.dtype),
        ("timing", "Timing", "in the GPU's stream" if "in-stream" in timings else ""),
        ("shards", "Servers", str(plan.comm.shards or "every rank") if has_servers else ""),
        ("iterations", f"Timed {'operations' if pairs else 'iterations'}", " or ".join(map(str, iterations))),
        ("hosts", "Hosts", ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")),
    )
    return tuple(Condition(name=name, title=title, value=value) for name, title, value in values if value)


def verdict(group: CollectiveGroup, best: Sequence[Best], ranges: Sequence[Recommended]) -> str:
    """What to use at which size, or that nothing is clearly faster; then the rate at the largest size."""
    last = best[-1]
    rate_name = "busbw" if group.layout.ranks > 1 else "algbw"
    return (
        f"{advice(group, ranges)} Fastest measured at {format_bytes(last.num_bytes)}: {last.title}, "
        f"{figure_text(last.time)}, {figure_text(last.rate)} GB/s {rate_name}."
    )


def advice(group: CollectiveGroup, ranges: Sequence[Recommended]) -> str:
    """What to use at which size, in a sentence."""
    what = COLLECTIVE_TITLES[group.collective]
    if len({series.title for series in group.series}) == 1:
        return f"Nothing to choose from: only {group.series[0].title} was measured."
    has_library = any(series.is_library for series in group.series)
    library = "keep the library's choice" if has_library else "any of them will do"
    if len(group.runs) < MIN_RUNS:
        return (
            f"No advice from {runs_text(len(group.runs))}: an algorithm is recommended from {MIN_RUNS} runs on "
            f"(--repeats {MIN_RUNS}); until then {library}."
        )
    if not any(one.title for one in ranges):
        (worst, *_) = sorted(ranges, key=lambda one: -one.spread)
        return f"No winner for {what}: {tied_text(worst, len(group.series))}; {library}."
    parts = [_range(one, len(group.series)) for one in ranges]
    keep = f"; where none is clear, {library}" if not all(one.title for one in ranges) else ""
    return f"For {what} use: {'; '.join(parts)}{keep}."


def _range(one: Recommended, count: int) -> str:
    sizes = " to ".join(dict.fromkeys(map(format_bytes, (one.low, one.high))))
    return f"{sizes}: {one.title or f'no winner ({tied_text(one, count)})'}"


def prediction_advice(found: Predictions, one: Prediction) -> str:
    """What is predicted to be fastest at which size."""
    if len(one.series) == 1:
        return ""
    parts = [_range(each, len(one.series)) for each in one.ranges]
    return f"Predicted fastest {COLLECTIVE_TITLES[found.collective]}: {'; '.join(parts)}."


def tied_text(found: Recommended, count: int) -> str:
    """Returns in words which of `count` algorithms cannot be told apart."""
    names = list(found.tied)
    if len(names) == 1:
        return f"{names[0]} is clearly slower at none of these sizes"
    if len(names) > MAX_TIED:
        names = [*names[:MAX_TIED], f"{len(names) - MAX_TIED} more"]
    who = f"{', '.join(names[:-1])} and {names[-1]}"
    if len(found.tied) == count > MAX_TIED:
        who = f"all {count} algorithms"
    return f"the intervals of {who} overlap, or they are within {percent(STAY_WITHIN, 0)}"


def fit_caption(network: NetworkModel) -> str:
    """What stands behind a fit, in a few sentences."""
    over, levels = network.fitted_over, network.levels
    if over is None:
        return "Only libraries were measured: each is a line through its sizes, at the rank counts measured."
    basis = (
        f"in brackets 95 % intervals over {over.runs} runs a point" if network.draws else "too few runs for intervals"
    )
    text = f"Fitted to {network.num_points} points at {_and(over.ranks)} ranks; {basis}."
    if "across" in levels:
        text += f" In the model, ranks of a group {_shared(levels['across'])} to other groups."
    if "beyond" in levels:
        text += f" Ranks below one leaf switch {_shared(levels['beyond'])} to other leaf switches."
    if "inside" in levels and levels["inside"].links is not None:
        text += " Inside a group the bytes of all its ranks add up: they share memory or processors."
    each, points = "each size and rank count", "points of other sizes and other rank counts"
    if len(over.ranks) == 1:
        each, points = "each size", f"points of other sizes, all at {over.ranks[0]} ranks, the only rank count"
    return (
        f"{text} {largest_text(network.largest_held_out)} Held out: {each} is predicted from {points}; "
        "which costs there are and what ranks share is taken from all points, which flatters these errors a little."
    )


def _and(ranks: Sequence[int]) -> str:
    return " and ".join(", ".join(map(str, ranks)).rsplit(", ", 1))


def _shared(level: Level) -> str:
    many = "one link" if level.links == 1 else f"{level.links} links"
    return "have a link each" if level.links is None else f"share {many}"


def largest_text(largest: LargestHeldOut | None) -> str:
    """The error at the largest rank count, in a sentence."""
    if largest is None:
        return "Error at the largest rank count: not known, the smaller ones do not determine it."
    bias = largest.ratio - 1
    way = "too long" if bias > 0 else "too short"
    return (
        f"Error at the largest rank count, held out ({largest.ranks} ranks from {_and(largest.fitted_ranks)}): "
        f"{percent(largest.median_error)} (median; {percent(abs(bias))} {way})."
    )


def layout_text(found: Predictions, one: Prediction) -> str:
    """What is predicted of which layout."""
    groups = one.ranks // one.group_size
    where = f" in {groups} groups of {one.group_size}" if groups > 1 else ""
    if one.leaf_size is not None and one.leaf_size < one.ranks:
        where += f" below {one.ranks // one.leaf_size} leaf switches"
    return f"{COLLECTIVE_TITLES[found.collective]} {found.dtype}, {one.ranks} ranks{where}"


def extrapolated_text(found: Predictions, one: Prediction) -> tuple[str, ...]:
    """What lies beyond the measured points, and how far the fit was off one step beyond its own."""
    lines = [f"{series.name}: {series.beyond}" for series in one.series if series.beyond]
    if not one.extrapolated and not lines:
        return ()
    beyond = [f"Extrapolated: {'; '.join([*one.extrapolated, *lines])}."]
    if one.extrapolated and any(not series.is_line for series in one.series):
        beyond.append(largest_text(one.largest_held_out))
    if one.model_error is not None:
        held = "what the fit without the largest rank count missed there"
        if one.largest_held_out is None:
            held = f"experience alone ({percent(PRIOR_SCALE, 0)} a doubling), as nothing was held out"
        beyond.append(
            f"At {one.ranks:,} ranks the model itself may be off by a factor of {one.model_error:.2f} either way "
            f"(95 %), by {held}; "
            f"{'the intervals hold it' if found.network.draws else 'single runs have no intervals'}."
        )
    return tuple(beyond)


def poor_text(one: Prediction) -> str:
    """Algorithms that the fit misses too far for advice; empty where there is none."""
    poor = [f"{series.name} (by up to {percent(series.poor_error, 0)})" for series in one.series if series.poor_error]
    return f"No advice on {', '.join(poor)}: the fit misses it." if poor else ""


def predicted_fusion_text(found: Predictions, one: Prediction) -> str:
    """The fusion size, and what it makes of all gradients, or why none is recommended; empty where there is none."""
    if one.fusion_bytes is None:
        return ""
    size = about(one.fusion_bytes)
    if not (one.ranges and one.ranges[-1].title):
        return f"No fusion size: no algorithm is clearly the fastest at {format_bytes(found.sizes[-1])}."
    if one.fusion_limit is not None:
        return (
            f"No fusion size: {size} would be beyond {format_bytes(one.fusion_limit)}, the largest size measured; "
            "measure larger ones."
        )
    basis = "measured" if one.fusion_is_measured else "predicted"
    text = (
        f"Recommended fusion size: {size}, the smallest message that reaches {percent(RATE_SHARE, 0)} of the "
        f"asymptotic rate of {one.fusion_of} (9 x start-up / time per byte of a line through its {basis} times)"
    )
    if one.fusion_messages is None or one.fusion_workload_s is None:
        return text + "."
    return (
        f"{text}: {one.fusion_messages:,} messages for {about(found.workload_bytes or 0)} of gradients, together "
        f"{optional(one.fusion_workload_s, 's')} without overlap."
    )


METHODS: tuple[tuple[str, str], ...] = (
    (
        "Which points count",
        "Only points whose result was right on every rank, of runs whose record is valid. All others are listed with "
        "the reason. Warm-up iterations are not recorded.",
    ),
    (
        "Time",
        "An iteration is one operation, or several back to back where one is shorter than 2 ms; its time is divided by "
        "them. Ranks meet at the carrier's own barrier first. On one host the time runs from the last rank's start to "
        "the last end, otherwise it is the slowest rank's. On GPUs ranks meet by a tiny all-reduce in the stream, and "
        "the time is the slowest rank's between events. A run's time is the median over its iterations. MPI's "
        "all-reduce is timed in place, and out of place as osu_allreduce does; other libraries' in place.",
    ),
    (
        "Medians and intervals",
        f"The run is the experimental unit, not the iteration. Figures are medians over runs. {INTERVALS} With fewer "
        "runs the range is printed, with its level. For a single run it is the middle half of its iterations, labelled "
        "within-run, which says nothing on how runs differ.",
    ),
    (
        "algbw and busbw",
        "By the formulas of nccl-tests: algbw = bytes / time; busbw = algbw x 2 (p - 1) / p for all-reduce, "
        "(p - 1) / p for reduce-scatter, all-gather, scatter, gather and all-to-all, and 1 for broadcast and reduce, "
        "with p ranks. Bytes are those of each rank's whole buffer: for all-gather the gathered result, for "
        "reduce-scatter the input. GB/s is 1e9 bytes per second.",
    ),
    (
        "Counters",
        "Steps, messages and bytes are counted by the transport while an algorithm runs, and must equal the formulas "
        "exactly; a difference is a warning. Libraries do not report theirs.",
    ),
    (
        "Fitted costs",
        "A message costs alpha + bytes x beta, by level (within a group, between groups, between leaf switches) and by "
        "size; a byte reduced costs gamma. One fit for each system, carrier and type of element, with relative errors "
        "and robust against outliers. Which ranks share links is what predicts held-out points better. Intervals: the "
        "fit redone for resampled runs (stretched to Student's t).",
    ),
    (
        "Predictions",
        "The prediction next to a measurement is made by a fit that did not see the point. The error at the largest "
        "rank count is of a fit to the smaller ones alone. Libraries choose their algorithms themselves and are not "
        f"predicted. Algorithms that the fit misses (median error above {POOR_MEDIAN:.0%}, or worst above "
        f"{POOR_WORST:.0%}) are not recommended.",
    ),
    (
        "Recommended",
        f"An algorithm is recommended where every other one is slower by more than {STAY_WITHIN:.0%} and beyond the "
        f"scatter of {MIN_RUNS} runs or more (interval of the ratio of times). Elsewhere there is no winner.",
    ),
)
