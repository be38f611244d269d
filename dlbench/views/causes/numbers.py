"""The account of lost efficiency: the loss of each part, late ranks, the diagnosis with its certainty, experiments."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Literal

from dlbench.analysis.attribution import Part, attribute, complement
from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, EXCHANGE_PHASE, INPUT_PARTS, WAIT_PARTS
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.slow_nodes import SlowNodes, Straggler, main_straggler, ranking, slow_nodes
from dlbench.analysis.table import RunTable
from dlbench.lazy import Deferred
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.report.table import Cell, column
from dlbench.report.wording import lost_text, lost_value, percent, points, repeat_text, units_text
from dlbench.stats.estimates import Estimate, by_definition, mean_estimate, ratio_estimate
from dlbench.stats.multiplicity import LEVEL, holm
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import judge
from dlbench.stats.verdict_words import CAUSE
from dlbench.views.causes.experiments import CAUSE_TITLES, RULES, Case, CauseShare, Experiment
from dlbench.views.model import AtPlace

WORTH_EXPLAINING = 0.01  # Fraction of efficiency below which a loss is not explained.
BOUND_SHARE = 1 / 3  # Share of the whole loss from which a step is called bound by a cause.

LIKELY_RUNS = 4  # Runs or sessions per side for a likely cause: with three equal ones, one report in ten names one.
_PRINTED = 0.0005  # Fraction of efficiency that is printed as 0.1 points.
MOST_NAMED = 3  # Causes that are named in a line.

Finding = Literal[
    "baseline", "no loss", "small loss", "above ideal", "too few runs", "within noise", "partial", "likely", "found"
]

_LATE_TITLES = {
    "input": "by {} input",
    "compute": "by {} computing",
    "host": "between {} steps",
    "unexplained": "not by {} own work",
}


def _bound_cell(bound: float) -> Cell:
    return Cell(f"at most +{percent(bound, 0)}", number=bound)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a point."""

    line: str  # The diagnosis in one sentence, without the place and the last full stop.
    next: str  # What to do next, in a sentence without the full stop; empty if there is no suggestion.
    finding: Finding
    """`found`: the part that loses most exceeds the noise of enough runs, all causes counted. `partial`: only smaller
    parts do. `likely`: each of four runs lost, and to this cause, and a t test of the whole finds a loss. Otherwise why
    no cause is named."""
    name: str  # network-bound, input-bound, ...; empty unless found or likely, and `BOUND_SHARE` of the loss or more.
    cause: str
    """The cause that costs most; if only smaller ones are certain, the largest of these. At the baseline, the cause
    that takes most of the step besides computing. Empty if none costs anything worth explaining."""
    bound: float | None = field(metadata=column("Upper bound", "limit_throughput_gain_fraction", text=_bound_cell))
    """Growth of the throughput if that cause took no time, a fraction: a limit, not a forecast."""
    experiments: tuple[Experiment, ...]  # In order; empty unless found or likely.


def adjusted_p(points: Sequence[Sequence[Part]], num_groups: int = 1) -> list[dict[str, Deferred[float]]]:
    """Returns p values of losses by cause for each point, after Holm over all points and Bonferroni over groups."""
    tested = []
    for index, parts in enumerate(points):
        tested += [(index, part) for part in parts if part.p is not None and (part.seconds.value or part.ideal_seconds)]
    p_values = Deferred(lambda: holm([part.p.value for _, part in tested if part.p is not None]))
    adjusted: list[dict[str, Deferred[float]]] = [{} for _ in points]
    for number, (index, part) in enumerate(tested):
        adjusted[index][part.name] = Deferred(partial(_in_groups, p_values, number, num_groups))
    return adjusted


def _in_groups(p_values: Deferred[list[float]], number: int, num_groups: int) -> float:
    return min(1.0, num_groups * p_values.value[number])


def stands_out(part: Part, adjusted: Deferred[float]) -> bool:
    """Returns whether a cause loses something for certain: by its interval, and after the correction (`adjusted_p`)."""
    is_worse = judge(part.lost, 0.0, higher_is_worse=True).outcome == "worse"
    return is_worse and adjusted.value < LEVEL


def diagnose(case: Case) -> Diagnosis:
    """Returns the diagnosis of a point."""
    largest = _largest(case)
    certain = [part for part in case.by_loss if part.adjusted_p is not None and stands_out(part, part.adjusted_p)]
    finding = _finding(case, largest, certain)
    cause_part = certain[0] if finding == "partial" else largest
    name, cause, bound = "", "", None
    experiments: tuple[Experiment, ...] = ()
    if cause_part is not None and finding not in ("no loss", "small loss", "above ideal"):
        cause = cause_part.name
        share = _share(case, cause_part) if case.point.is_baseline else cause_part.lost.value
        if 0 < share < 1:
            bound = 1 / (1 - share) - 1
        if finding in ("found", "likely"):
            bound_by, make_experiments = RULES[cause]
            experiments = tuple(map(Experiment, make_experiments(case)))
            if cause_part.lost.value >= BOUND_SHARE * case.whole.lost.value:
                name = bound_by
    return Diagnosis(
        line=_line(case, finding, cause_part, certain),
        next=_next_text(case, finding, cause_part, experiments),
        finding=finding,
        name=name,
        cause=cause,
        bound=bound,
        experiments=experiments,
    )


def _largest(case: Case) -> Part | None:
    """Returns the part that loses most, at the baseline the part besides computing that takes longest; None for 0."""
    if case.point.is_baseline:
        others = [part for part in case.parts if part.name != "compute" and part.seconds.value > 0]
        return max(others, key=attrgetter("seconds.value"), default=None)
    return next((part for part in case.by_loss if part.lost.value > 0), None)


def _finding(case: Case, largest: Part | None, certain: Sequence[Part]) -> Finding:
    if case.point.is_baseline:
        return "baseline"
    lost = case.whole.lost
    outcome = judge(lost, WORTH_EXPLAINING, higher_is_worse=True).outcome
    if outcome == "insufficient":
        if largest is not None and _is_likely(case.whole, largest):
            return "likely"
        return "too few runs"
    if outcome == "better":
        return "above ideal"
    if outcome == "equal":
        return "small loss" if lost.value >= _PRINTED else "no loss"
    if lost.value < WORTH_EXPLAINING or not certain:
        return "within noise"
    return "found" if certain[0] is largest else "partial"


def _is_likely(whole: Part, largest: Part) -> bool:
    """Returns whether each of these few runs lost, and to this part, and their mean loss exceeds their scatter."""
    lows = (whole.lost.low, largest.lost.low)
    return (
        whole.lost.units >= LIKELY_RUNS
        and whole.lost.value >= WORTH_EXPLAINING
        and all(low is not None and low > 0 for low in lows)
        and whole.p is not None
        and whole.p.value < LEVEL
    )


def _next_text(case: Case, finding: Finding, largest: Part | None, experiments: Sequence[Experiment]) -> str:
    if finding in ("too few runs", "within noise", "partial"):
        return repeat_text(case.whole.lost, judge(case.whole.lost, WORTH_EXPLAINING).units_wanted)
    if finding == "baseline":
        # Only waiting for kernel launches shows without other ranks.
        if largest is None or largest.name != "launch" or _share(case, largest) < WORTH_EXPLAINING:
            return ""
        _, make_experiments = RULES["launch"]
        return next(make_experiments(case), "")
    steps = [experiment.text for experiment in experiments[:1]]
    if finding == "likely":
        steps.insert(0, repeat_text(case.whole.lost))
    return "; then ".join(steps)


def _line(case: Case, finding: Finding, largest: Part | None, certain: Sequence[Part]) -> str:
    if finding == "baseline":
        text = f"baseline: {percent(_share(case, case.part('compute')))} of a step is compute"
        if largest is None:
            return text
        return f"{text}, {percent(_share(case, largest))} {CAUSE_TITLES[largest.name]}{_late(case, largest)}"
    if CAUSE[finding].tone == "bad":
        assert largest is not None
        return _named_line(case, largest, finding, certain)
    if finding == "above ideal":
        return f"{_gain(case.whole.lost)} above 100 %: the baseline ran with a handicap, or its runs drifted"
    if finding == "no loss" and not _gained(case):
        return "nothing is lost"
    if finding in ("no loss", "small loss"):
        return f"no loss worth explaining ({_lost(case)})"
    why = _undecided_text(case, finding)
    if largest is None:
        return why
    return f"{why}; the largest part is {CAUSE_TITLES[largest.name]}, {lost_value(largest.lost)}{_late(case, largest)}"


def _undecided_text(case: Case, finding: Finding) -> str:
    lost = case.whole.lost
    in_runs = units_text(lost)
    amount = f"loss of {lost_text(lost)}" if lost.value >= 0 else f"gain of {_gain(lost)}"
    if lost.low is None or lost.high is None:
        return f"a {amount} in single runs, which have no interval"
    if finding == "too few runs":
        if lost.low <= 0 <= lost.high:
            return f"{in_runs} cannot distinguish the {amount} from noise"
        return f"a {amount} in {in_runs}, too few to find its causes"
    if lost.low > 0:
        return f"{_lost(case)} for certain, but no single part of it is certain in {in_runs}"
    if lost.high < 0:
        return f"whether the {amount} is of {percent(WORTH_EXPLAINING, 0)} or more is undecided"
    return f"the {amount} is within the noise of {in_runs}"


def _share(case: Case, part: Part) -> float:
    return part.seconds.value / case.whole.seconds.value


def _gain(lost: Estimate) -> str:
    return lost_text(lost.mapped(lambda value: -value, lost.unit))


def _gained(case: Case) -> float:
    """Returns the gain of all parts that gain, a fraction; 0 if it is not worth mentioning next to the loss."""
    gained = -sum(part.lost.value for part in case.parts if part.lost.value < 0)
    return gained if gained >= WORTH_EXPLAINING else 0.0


def _lost(case: Case) -> str:
    """Returns 1 - efficiency: ``20.0 points lost``, ``4.8 points lost in all, as other parts gain 19.0 points``."""
    text = f"{lost_value(case.whole.lost)} lost"
    gained = _gained(case)
    if gained:
        text += f" in all, as other parts gain {points(gained)}"
    return text


def _named_line(case: Case, cause: Part, finding: Finding, certain: Sequence[Part]) -> str:
    others = [part for part in case.by_loss if part is not cause and part.lost.value >= WORTH_EXPLAINING]
    late = _late(case, cause)
    if _gained(case) or cause.lost.value > case.whole.lost.value + _PRINTED:
        lost = f"{late}; {_lost(case)}"
    else:
        lost = f" of {_lost(case)}{late}"
    text = f"{CAUSE[finding].in_sentence}: {CAUSE_TITLES[cause.name]}, {lost_text(cause.lost)}{lost}"
    for part in [part for part in others if part in certain][: MOST_NAMED - 1]:
        text += f"; also {CAUSE_TITLES[part.name]}, {lost_text(part.lost)}"
    if finding == "likely":
        return f"{text}; only {units_text(cause.lost)}"
    doubtful = [part for part in others if part not in certain][: MOST_NAMED - 1]
    if not doubtful:
        return text
    losses = ", ".join(f"{CAUSE_TITLES[part.name]} {lost_value(part.lost)}" for part in doubtful)
    return f"{text}; the rest ({losses}) is too uncertain in {units_text(cause.lost)} to name"


def loss_in_brief(point: CausePoint | None) -> str:
    """Returns the beginning of `Diagnosis.line` for a card, with its certainty; empty if it names no part."""
    if point is None or point.is_baseline or not point.verdict.cause:
        return ""
    verdict = point.verdict
    lost = point.cause(verdict.cause).lost
    doubts = {
        "within noise": ", within the noise",
        "partial": f" of {lost_value(point.whole.lost)}; larger parts are too uncertain to name",
        "too few runs": f", in {units_text(lost)} only",
    }
    title = CAUSE[verdict.finding].text or "largest part"
    return f"{title}: {CAUSE_TITLES[verdict.cause]}, {lost_value(lost)}{doubts.get(verdict.finding, '')}"


def _late(case: Case, largest: Part) -> str:
    if largest.name != "straggler" or not case.hosts:
        return ""
    late = case.main_straggler
    if late is None:
        return ", for ranks in turns"
    subject, whose = f"rank {late.rank} on {late.host}", "its"
    if late.rank is None:
        subject, whose = f"the ranks of {late.host}", "their"
    return f", {percent(late.waited_share, 0)} for {subject}, late {_LATE_TITLES[late.late_by].format(whose)}"


Account = tuple[tuple[CauseShare, ...], Part, CauseShare]  # Causes, exchange phase, sum.


@dataclass(frozen=True, kw_only=True)
class CausePoint(AtPlace):
    """The account of a rank count of a group."""

    is_baseline: bool
    run_ids: tuple[str, ...]
    verdict: Diagnosis
    efficiency: Estimate  # A fraction, as in the view `scaling`.
    causes: tuple[CauseShare, ...]  # By `CAUSES`; seconds sum to the mean step, lost shares to 1 - efficiency.
    exchange_phase: Part  # All exposed exchange: `exchange` (on the wire) and `straggler` (waiting).
    whole: CauseShare  # The mean step; its lost share is 1 - efficiency, with the interval of the efficiency.
    waiting_ranks: tuple[Straggler, ...]  # Ranks that were waited for, longest first.
    waiting_hosts: tuple[Straggler, ...]  # Hosts that were waited for, longest first.
    saved_without_slowest: Estimate | None
    """Fraction of the step that would be saved if its slowest 5 % of ranks were not waited for; None for one rank."""
    planted: tuple[tuple[int, float], ...]  # Ranks slowed on purpose, and the added seconds per step, mean over runs.

    def cause(self, name: str) -> CauseShare:
        return self.causes[CAUSES.index(name)]


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """The cost of monitoring in the runs of a group, fractions of the step time."""

    value: float  # Median over runs.
    low: float  # Least low end of any run.
    high: float  # Largest high end of any run.
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """The causes of all rank counts of a group."""

    watching: str
    fault: str  # A fault injected on purpose; empty for none.
    watch_cost: WatchCost | None
    limits: tuple[str, ...]  # Reasons why the causes of these runs are inexact, each a sentence.
    points: tuple[CausePoint, ...]  # The baseline first.


@dataclass(frozen=True, kw_only=True)
class LostPercent:
    """The account of every rank count, and slow nodes."""

    diagnosed: Diagnosed
    nodes: SlowNodes  # Of this group's hosts only, over all runs of the folder.

    def at(self, point: Point) -> CausePoint | None:
        by_place = {(cause_point.ranks, cause_point.nodes): cause_point for cause_point in self.diagnosed.points}
        return by_place.get((point.ranks, point.nodes))


def lost_percent(group: Group, table: RunTable) -> LostPercent | None:
    """Returns the account of a group; None without causes, and for runs with something taken away on purpose."""
    if not table.causes or group.sample.plan.series.variant != "plain":
        return None
    history = slow_nodes(table)
    accounts = [_account(point, group.baseline, table) for point in group.points]
    measured = [list(filter(attrgetter("is_measured"), shares)) for shares, *_ in accounts]
    places = {(row["group"], row["ranks"], row["nodes"]) for row in table.figures.values()}
    num_points = Counter(group_id for group_id, *_ in places)
    adjusted = adjusted_p(measured, sum(count > 1 for count in num_points.values()))
    hosts: set[str] = set()
    costs = []
    for run in group.runs:
        hosts.update(table.causes[run.plan.run_id].hosts)
        if run.record is not None and run.record.watch is not None and run.record.watch.overhead is not None:
            costs.append(run.record.watch.overhead)
    watch_cost = None
    if costs:
        watch_cost = WatchCost(
            value=statistics.median(cost.value for cost in costs),
            low=min(cost.low for cost in costs),
            high=max(cost.high for cost in costs),
            num_runs=len(costs),
        )
    accounted = zip(group.points, accounts, adjusted, strict=True)
    points = [_point(point, account, by_name, table, history.exclude) for point, account, by_name in accounted]
    described = describe(group.sample)
    return LostPercent(
        diagnosed=Diagnosed(
            watching=described["watching"],
            fault=described["fault"],
            watch_cost=watch_cost,
            limits=tuple(_limits(table.runs[group.points[-1].run_ids[0]])),
            points=tuple(points),
        ),
        nodes=dataclasses.replace(history, hosts=tuple(node for node in history.hosts if node.host in hosts)),
    )


def _point(
    point: Point, account: Account, adjusted: Mapping[str, Deferred[float]], table: RunTable, exclude: tuple[str, ...]
) -> CausePoint:
    shares, exchange_phase, whole = account
    causes = tuple(dataclasses.replace(share, adjusted_p=adjusted.get(share.name)) for share in shares)
    run_causes = [table.causes[run_id] for run_id in point.run_ids]
    runs = tuple(table.runs[run_id] for run_id in point.run_ids)
    ranks, hosts = ranking(run_causes)
    case = Case(
        runs=runs,
        point=point,
        parts=causes,
        whole=whole,
        hosts=hosts,
        main_straggler=main_straggler(ranks, hosts, run_causes),
        exclude=exclude,
    )
    saved_without_slowest = None
    if point.ranks > 1:
        saved_shares = {}
        for run_id, run_cause in zip(point.run_ids, run_causes, strict=True):
            saved_shares[table.keys[run_id]] = run_cause.saved_ns * run_cause.ranks / sum(run_cause.sums_ns.values())
        saved_without_slowest = mean_estimate(saved_shares, "fraction")
    planted_s: dict[int, float] = {}
    for run, run_cause in zip(runs, run_causes, strict=True):
        assert run.record is not None
        for rank in run.record.ranks:
            if rank.planted_s:
                step_s = rank.planted_s / run_cause.steps / len(runs)
                planted_s[rank.rank] = planted_s.get(rank.rank, 0.0) + step_s
    return CausePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=point.is_baseline,
        run_ids=point.run_ids,
        verdict=diagnose(case),
        efficiency=point.efficiency,
        causes=causes,
        exchange_phase=exchange_phase,
        whole=whole,
        waiting_ranks=ranks,
        waiting_hosts=hosts,
        saved_without_slowest=saved_without_slowest,
        planted=tuple(sorted(planted_s.items())),
    )


def _account(point: Point, baseline: Point, table: RunTable) -> Account:
    run_causes = [table.causes[run_id] for run_id in point.run_ids]
    all_causes = [*run_causes, *(table.causes[run_id] for run_id in baseline.run_ids)]
    unmeasured: dict[str, dict[str, None]] = {}  # Reasons, each once, by cause that some of these runs do not report.
    for causes in all_causes:
        for name, reason in causes.not_measured.items():
            unmeasured.setdefault(name, {})[reason] = None
    inputs = INPUT_PARTS if all(causes.knows_readers for causes in all_causes) else WAIT_PARTS

    def seconds(run_ids: Sequence[str]) -> dict[RunKey, dict[str, float]]:
        return {table.keys[run_id]: table.causes[run_id].seconds_without(unmeasured) for run_id in run_ids}

    def samples(run_ids: Sequence[str]) -> dict[RunKey, float]:
        rows = {table.keys[run_id]: table.figures[run_id] for run_id in run_ids}
        return {key: float(row["samples"] / (row["ranks"] * row["steps"])) for key, row in rows.items()}

    attribution = attribute(
        seconds(point.run_ids),
        seconds(baseline.run_ids),
        # Over the runs that the efficiency is made of.
        work=ratio_estimate(samples(point.run_ids), samples(baseline.run_ids)).value,
        names=CAUSES,
        more=(EXCHANGE_PHASE, *COMPUTE_PARTS, *inputs),
        is_baseline=point.is_baseline,
    )
    part_names = {"compute": COMPUTE_PARTS, "input": inputs}

    def share(part: Part) -> CauseShare:
        notes = [causes.evidence[part.name] for causes in run_causes if causes.evidence.get(part.name)]
        if part.name == "input" and any(causes.knows_readers for causes in run_causes):
            notes = ["fetching and preparing share the wait for batches as they share the readers' time"]
        return CauseShare(
            **vars(part),
            parts=tuple(attribution.more[name] for name in part_names.get(part.name, ())),
            is_measured=part.name not in unmeasured,
            not_measured=tuple(unmeasured.get(part.name, ())),
            notes=tuple(dict.fromkeys(notes)),
        )

    # To the last bit the loss of the printed efficiency.
    lost = complement(point.efficiency)
    if point.is_baseline:
        lost = by_definition(0.0, len(run_causes), "fraction")
    whole = dataclasses.replace(share(attribution.whole), lost=lost)
    return tuple(map(share, attribution.parts)), attribution.more[EXCHANGE_PHASE], whole


def _limits(sample: Run) -> Iterator[str]:
    record = sample.record
    exchange: str = sample.plan.sync.exchange
    if record is not None and record.exchange is not None:
        exchange = record.exchange.exchange
    if exchange == "none":
        yield "Nothing is exchanged: ranks drift apart and nobody waits; that is imbalance between ranks."
    elif exchange != "flat":
        yield f"In exchange {exchange} ranks leave at different times, which blurs waiting for stragglers."
    if record is None:
        return
    if record.clock == "cuda-events":
        yield "Phases are times of the training stream: work that overlaps on other streams is not charged."
    elif len(record.ranks) > 1:
        yield "On a CPU the exchange shares the ranks' cores: its slowing of the backward pass counts as compute."
    if any(rank.waits is not None for rank in record.ranks):
        yield (
            "Of collectives within passes and update only sums over the steps are known: a rank whose computing "
            "takes longer in some steps is not found."
        )
    if record.phases == "synchronised":
        yield "Phases are synchronised: the device is waited for after each, so exchange hides less than usual."
