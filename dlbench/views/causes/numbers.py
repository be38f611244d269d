"""The one account of the lost percent: what is lost to which part, who was waited for, how sure that is, what to try.

Everything that a report says of lost points, in tables, charts and sentences, is read from here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.analysis.attribution import Part, attribute, complement
from dlbench.analysis.causes import CAUSES, COMPUTE_PARTS, EXCHANGE_PHASE, INPUT_PARTS, WAIT_PARTS, Causes
from dlbench.analysis.late_ranks import Straggler, main_straggler, ranking
from dlbench.analysis.scaling import Group, Point
from dlbench.analysis.slow_nodes import SlowNodes, slow_nodes
from dlbench.analysis.table import RunTable
from dlbench.records.registry import describe
from dlbench.records.scan import Run
from dlbench.report.wording import lost_text, lost_value, percent, points, repeat_text, units_text
from dlbench.stats.estimates import Estimate, by_definition, ratio_estimate
from dlbench.stats.multiplicity import LEVEL, holm
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import judge
from dlbench.stats.verdict_words import CAUSE
from dlbench.views.causes.experiments import CAUSE_TITLES, RULES, Case, CauseShare, Experiment

WORTH_EXPLAINING = 0.01  # Fraction of efficiency below which a loss is not explained.
BOUND_SHARE = 1 / 3  # Share of all that is lost from which on a step is called bound by a cause.

LIKELY_RUNS = 4  # Runs or sessions per side for a likely cause: of three equal ones, one report in ten names one.
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


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a point."""

    line: str  # In one sentence, without the place and the last full stop.
    next: str  # What to do next, likewise; empty where nothing suggests itself.
    finding: Finding
    """`found`: the part that loses most stands out of the noise of enough runs, all causes counted. `partial`: only
    smaller parts stand out. `likely`: of four runs, every one lost, and to this cause, and a t test of the whole finds
    a loss. Otherwise why no cause is named."""
    name: str  # network-bound, input-bound, ...; empty unless found or likely, and `BOUND_SHARE` of the loss or more.
    cause: str
    """The cause that costs most; where only smaller ones are certain, the largest of these. At the baseline, the cause
    that takes most of the step apart from computing. Empty where none costs anything worth explaining."""
    bound: float | None  # Growth of the throughput if that cause took no time, a fraction: a limit, no forecast.
    experiments: tuple[Experiment, ...]  # In order; empty unless found or likely.


def adjusted_p(points: Sequence[Sequence[Part]], num_groups: int = 1) -> list[dict[str, float]]:
    """The p values of losses to causes, after Holm over all causes of all points and Bonferroni over groups.

    With nothing lost, the chance that any cause of a report is called found is at most 5 %. `points`: the causes of
    each rank count of a group that were measured, the baseline's too; `num_groups`: groups of the report with several
    rank counts. By cause for each point; nothing of the baseline, and of causes that took no time anywhere.
    """
    tested = [
        (place, part.name, part.p)
        for place, parts in enumerate(points)
        for part in parts
        if part.p is not None and (part.seconds.value or part.ideal_seconds)
    ]
    found: list[dict[str, float]] = [{} for _ in points]
    for (place, name, _), adjusted in zip(tested, holm([p for *_, p in tested]), strict=True):
        found[place][name] = min(1.0, num_groups * adjusted)
    return found


def stands_out(part: Part, adjusted: float) -> bool:
    """Whether a cause loses something for certain: after the correction (`adjusted_p`), and by its own interval."""
    return judge(part.lost, 0.0, adjusted_p=adjusted, higher_is_worse=True).outcome == "worse"


def diagnose(case: Case) -> Diagnosis:
    """Returns the diagnosis of a point."""
    largest = _largest(case)
    # The parts whose loss is certain, the largest first.
    certain = [part for part in case.parts if stands_out(part, 1.0 if part.adjusted_p is None else part.adjusted_p)]
    certain.sort(key=lambda part: -part.lost.value)
    finding = _finding(case, largest, certain)
    named = certain[0] if finding == "partial" else largest
    name, cause, bound = "", "", None
    experiments: tuple[Experiment, ...] = ()
    if named is not None and finding not in ("no loss", "small loss", "above ideal"):
        cause = named.name
        share = _share(case, named) if case.point.is_baseline else named.lost.value
        bound = 1 / (1 - share) - 1 if 0 < share < 1 else None
        if finding in ("found", "likely"):
            bound_by, tries = RULES[cause]
            name = bound_by if named.lost.value >= BOUND_SHARE * case.whole.lost.value else ""
            experiments = tuple(tries(case))
    return Diagnosis(
        line=_line(case, finding, named, certain),
        next=_next_text(case, finding, named, experiments),
        finding=finding,
        name=name,
        cause=cause,
        bound=bound,
        experiments=experiments,
    )


def _largest(case: Case) -> Part | None:
    if case.point.is_baseline:
        others = [part for part in case.parts if part.name != "compute"]
        found = max(others, key=lambda part: part.seconds.value)
        return found if found.seconds.value > 0 else None
    found = max(case.parts, key=lambda part: part.lost.value)
    return found if found.lost.value > 0 else None


def _finding(case: Case, largest: Part | None, certain: Sequence[Part]) -> Finding:
    if case.point.is_baseline:
        return "baseline"
    lost = case.whole.lost
    outcome = judge(lost, WORTH_EXPLAINING, higher_is_worse=True).outcome
    if outcome == "insufficient":
        return "likely" if largest is not None and _is_likely(case.whole, largest) else "too few runs"
    if outcome == "better":
        return "above ideal"
    if outcome == "equal":
        return "small loss" if lost.value >= _PRINTED else "no loss"
    if lost.value < WORTH_EXPLAINING or not certain:
        return "within noise"
    return "found" if certain[0] is largest else "partial"


def _is_likely(whole: Part, largest: Part) -> bool:
    """Whether every one of these few runs lost, and to this part, and their mean loss stands out of their scatter."""
    lows = (whole.lost.low, largest.lost.low)
    return (
        whole.lost.units >= LIKELY_RUNS
        and whole.lost.value >= WORTH_EXPLAINING
        and all(low is not None and low > 0 for low in lows)
        and whole.p is not None
        and whole.p < LEVEL
    )


def _next_text(case: Case, finding: Finding, largest: Part | None, experiments: Sequence[Experiment]) -> str:
    if finding in ("too few runs", "within noise", "partial"):
        return repeat_text(case.whole.lost, judge(case.whole.lost, WORTH_EXPLAINING).units_wanted)
    if finding == "baseline":
        # Against waiting for launches alone, which no other rank is needed to see.
        if largest is None or largest.name != "launch" or _share(case, largest) < WORTH_EXPLAINING:
            return ""
        return next((one.text for one in RULES["launch"][1](case)), "")
    confirm = repeat_text(case.whole.lost) if finding == "likely" else ""
    return "; then ".join(filter(None, (confirm, *(one.text for one in experiments[:1]))))


# The line


def _line(case: Case, finding: Finding, largest: Part | None, certain: Sequence[Part]) -> str:
    if finding == "baseline":
        text = f"baseline: {percent(_share(case, case.part('compute')))} of a step is compute"
        if largest is None:
            return text
        return f"{text}, {percent(_share(case, largest))} {CAUSE_TITLES[largest.name]}{_late(case, largest)}"
    if CAUSE[finding].tone == "bad":
        assert largest is not None
        return _named_line(case, largest, finding, certain)
    lost = case.whole.lost
    if finding == "above ideal":
        return f"{_gain(lost)} above 100 %: the baseline ran with a handicap, or its runs drifted"
    if finding in ("no loss", "small loss"):
        is_nothing = finding == "no loss" and not _gained(case)
        return "nothing is lost" if is_nothing else f"no loss worth explaining ({_lost(case)})"
    in_runs, is_loss = units_text(lost), lost.value >= 0
    amount = f"loss of {lost_text(lost)}" if is_loss else f"gain of {_gain(lost)}"
    if lost.low is None or lost.high is None:
        why = f"a {amount} in single runs, which have no interval"
    elif finding == "too few runs":
        if lost.low <= 0 <= lost.high:
            why = f"{in_runs} cannot distinguish the {amount} from noise"
        else:
            why = f"a {amount} in {in_runs}, too few to say what from"
    elif lost.low > 0:
        why = f"{_lost(case)} for certain, but no single part of it is certain in {in_runs}"
    elif lost.high < 0:
        why = f"whether the {amount} is of {percent(WORTH_EXPLAINING, 0)} or more is undecided"
    else:
        why = f"the {amount} is within the noise of {in_runs}"
    if largest is None:
        return why
    return f"{why}; the largest part is {CAUSE_TITLES[largest.name]}, {lost_value(largest.lost)}{_late(case, largest)}"


def _share(case: Case, part: Part) -> float:
    return part.seconds.value / case.whole.seconds.value


def _gain(lost: Estimate) -> str:
    return lost_text(lost.mapped(lambda value: -value, lost.unit))


def _gained(case: Case) -> float:
    """What parts gain together, where that is worth a word next to the loss, which is what the others lose less it."""
    gained = -sum(part.lost.value for part in case.parts if part.lost.value < 0)
    return gained if gained >= WORTH_EXPLAINING else 0.0


def _lost(case: Case) -> str:
    """What is lost in all, 1 - efficiency: ``20.0 points lost``, ``4.8 points lost in all, as others gain 19.0``."""
    gained = _gained(case)
    text = f"{lost_value(case.whole.lost)} lost"
    return f"{text} in all, as other parts gain {points(gained)}" if gained else text


def _named_line(case: Case, cause: Part, finding: Finding, certain: Sequence[Part]) -> str:
    large = sorted(case.parts, key=lambda part: -part.lost.value)
    others = [part for part in large if part is not cause and part.lost.value >= WORTH_EXPLAINING]
    also = [part for part in others if part in certain][: MOST_NAMED - 1]
    late = _late(case, cause)
    if _gained(case) or cause.lost.value > case.whole.lost.value + _PRINTED:
        lost = f"{late}; {_lost(case)}"
    else:
        lost = f" of {_lost(case)}{late}"
    text = f"{CAUSE[finding].in_sentence}: {CAUSE_TITLES[cause.name]}, {lost_text(cause.lost)}{lost}"
    text += "".join(f"; also {CAUSE_TITLES[part.name]}, {lost_text(part.lost)}" for part in also)
    if finding == "likely":
        return f"{text}; only {units_text(cause.lost)}"
    doubtful = [part for part in others if part not in certain][: MOST_NAMED - 1]
    if not doubtful:
        return text
    losses = ", ".join(f"{CAUSE_TITLES[part.name]} {lost_value(part.lost)}" for part in doubtful)
    return f"{text}; the rest ({losses}) is too uncertain in {units_text(cause.lost)} to name"


def loss_in_brief(point: CausePoint) -> str:
    """Returns the beginning of `Diagnosis.line` for a card, with how sure it is; empty where it names no part."""
    verdict = point.verdict
    if point.is_baseline or not verdict.cause:
        return ""
    lost = point.cause(verdict.cause).lost
    doubts = {
        "within noise": ", within the noise",
        "partial": f" of {lost_value(point.whole.lost)}; larger parts are too uncertain to name",
        "too few runs": f", in {units_text(lost)} only",
    }
    title = CAUSE[verdict.finding].text or "largest part"
    return f"{title}: {CAUSE_TITLES[verdict.cause]}, {lost_value(lost)}{doubts.get(verdict.finding, '')}"


def _late(case: Case, largest: Part) -> str:
    """For whom ranks wait, where it is mostly one, or the ranks of one host."""
    if largest.name != "straggler" or not case.hosts:
        return ""
    late = case.main_straggler
    if late is None:
        return ", for ranks in turns"
    whose = "their" if late.rank is None else "its"
    who = f"the ranks of {late.host}" if late.rank is None else f"rank {late.rank} on {late.host}"
    return f", {percent(late.waited_share, 0)} for {who}, late {_LATE_TITLES[late.late_by].format(whose)}"


def bound_text(bound: float) -> str:
    """What it would be if all of it were gone: a limit, no forecast."""
    return f"at most +{percent(bound, 0)}"


# The account


Account = tuple[tuple[CauseShare, ...], Part, CauseShare]
"""The causes of a point, what two of them are part of (the exchange after the backward pass), and their sum."""


@dataclass(frozen=True, kw_only=True)
class CausePoint:
    """One rank count of a group."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...]
    verdict: Diagnosis
    efficiency: Estimate  # A fraction, as in the view `scaling`.
    causes: tuple[CauseShare, ...]  # By `CAUSES`; seconds sum to the mean step, lost shares to 1 - efficiency.
    exchange_phase: Part  # All exchange that shows: `exchange`, on the wire, and `straggler`, waiting.
    whole: CauseShare  # The mean step; its lost share is 1 - efficiency, with the interval of the efficiency.
    waiting_ranks: tuple[Straggler, ...]  # Ranks that were waited for, longest first.
    waiting_hosts: tuple[Straggler, ...]  # The same by host.
    planted: tuple[tuple[int, float], ...]
    """Ranks slowed on purpose, and what that added, seconds per step, mean over runs."""

    def cause(self, name: str) -> CauseShare:
        return self.causes[CAUSES.index(name)]


@dataclass(frozen=True, kw_only=True)
class WatchCost:
    """What monitoring cost in the runs of a group, fractions of the step time."""

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
    limits: tuple[str, ...]  # What blurs the causes of these runs, each a sentence.
    points: tuple[CausePoint, ...]  # The baseline first.


@dataclass(frozen=True, kw_only=True)
class LostPercent:
    """The account of every rank count, and who was waited for."""

    diagnosed: Diagnosed
    nodes: SlowNodes  # Of this group's hosts only, over all runs of the folder.

    def at(self, point: Point) -> CausePoint | None:
        """The account of one rank and node count; None where it has none."""
        place = point.ranks, point.nodes
        return next((one for one in self.diagnosed.points if (one.ranks, one.nodes) == place), None)


def lost_percent(group: Group, table: RunTable) -> LostPercent | None:
    """Where the lost percent goes.

    None where the table was made without causes, and for runs with something taken away on purpose: a run without
    exchange has no exchange to blame, and is read next to the plain runs.
    """
    if not table.causes or group.sample.plan.series.variant != "plain":
        return None
    history = slow_nodes(table)
    accounts = [_account(point, group.baseline, table) for point in group.points]
    measured = [[share for share in shares if share.is_measured] for shares, *_ in accounts]
    places = {(row["group"], row["ranks"], row["nodes"]) for row in table.figures.values()}
    cells = Counter(group for group, *_ in places)
    adjusted = adjusted_p(measured, sum(count > 1 for count in cells.values()))
    own = {host for run in group.runs for host in table.causes[run.plan.run_id].hosts}
    described = describe(group.sample)
    watched = [run.record.watch for run in group.runs if run.record is not None and run.record.watch is not None]
    costs = [watch.overhead for watch in watched if watch.overhead is not None]
    watch_cost = None
    if costs:
        watch_cost = WatchCost(
            value=statistics.median(cost.value for cost in costs),
            low=min(cost.low for cost in costs),
            high=max(cost.high for cost in costs),
            num_runs=len(costs),
        )
    return LostPercent(
        diagnosed=Diagnosed(
            watching=described["watching"],
            fault=described["fault"],
            watch_cost=watch_cost,
            limits=_limits(table.runs[group.points[-1].run_ids[0]]),
            points=tuple(
                _point(point, found, by_name, table, history.exclude)
                for point, found, by_name in zip(group.points, accounts, adjusted, strict=True)
            ),
        ),
        nodes=dataclasses.replace(history, hosts=tuple(one for one in history.hosts if one.host in own)),
    )


def _point(
    point: Point, account: Account, adjusted: Mapping[str, float], table: RunTable, exclude: tuple[str, ...]
) -> CausePoint:
    shares, exchange_phase, whole = account
    causes = tuple(dataclasses.replace(share, adjusted_p=adjusted.get(share.name)) for share in shares)
    own = [table.causes[run_id] for run_id in point.run_ids]
    runs = tuple(table.runs[run_id] for run_id in point.run_ids)
    ranks, hosts = ranking(own)
    case = Case(
        runs=runs,
        point=point,
        parts=causes,
        whole=whole,
        hosts=hosts,
        main_straggler=main_straggler(ranks, hosts, own),
        exclude=exclude,
    )
    planted_s: dict[int, float] = {}
    for run, run_causes in zip(runs, own, strict=True):
        assert run.record is not None
        for rank in run.record.ranks:
            if rank.planted_s:
                step_s = rank.planted_s / run_causes.steps / len(runs)
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
        planted=tuple(sorted(planted_s.items())),
    )


def _account(point: Point, baseline: Point, table: RunTable) -> Account:
    own, base = ([table.causes[run_id] for run_id in one.run_ids] for one in (point, baseline))
    both = (*own, *base)
    # Causes of which some of these runs say nothing, and why, each reason once.
    unknown = {
        name: reasons
        for name in CAUSES
        if (reasons := tuple(dict.fromkeys(one.not_measured[name] for one in both if name in one.not_measured)))
    }
    inputs = INPUT_PARTS if all(one.knows_readers for one in both) else WAIT_PARTS

    def seconds(of: Point) -> dict[RunKey, dict[str, float]]:
        return {table.keys[run_id]: table.causes[run_id].seconds_without(unknown) for run_id in of.run_ids}

    # Samples per rank and step of the point over those of the baseline, over the runs that the efficiency is made of.
    samples = {run_id: row["samples"] / (row["ranks"] * row["steps"]) for run_id, row in table.figures.items()}
    work = {table.keys[run_id]: float(samples[run_id]) for run_id in point.run_ids}
    base_work = {table.keys[run_id]: float(samples[run_id]) for run_id in baseline.run_ids}
    found = attribute(
        seconds(point),
        seconds(baseline),
        work=ratio_estimate(work, base_work).value,
        names=CAUSES,
        more=(EXCHANGE_PHASE, *COMPUTE_PARTS, *inputs),
        is_baseline=point.is_baseline,
    )
    consists = {"compute": COMPUTE_PARTS, "input": inputs}

    def share(part: Part) -> CauseShare:
        return CauseShare(
            **vars(part),
            parts=tuple(found.more[name] for name in consists.get(part.name, ())),
            is_measured=part.name not in unknown,
            not_measured=unknown.get(part.name, ()),
            notes=_notes(part.name, own),
        )

    # To the last bit what the efficiency is printed from.
    lost = by_definition(0.0, len(own), "fraction") if point.is_baseline else complement(point.efficiency)
    whole = dataclasses.replace(share(found.whole), lost=lost)
    return tuple(map(share, found.parts)), found.more[EXCHANGE_PHASE], whole


def _notes(name: str, runs: Sequence[Causes]) -> tuple[str, ...]:
    if name == "input" and any(one.knows_readers for one in runs):
        return ("fetching and preparing share the wait for batches as they share the readers' time",)
    return tuple(dict.fromkeys(filter(None, (one.evidence.get(name) for one in runs))))


def _limits(sample: Run) -> tuple[str, ...]:
    record, found = sample.record, []
    result = None if record is None else record.exchange
    how = sample.plan.sync.exchange if result is None else result.exchange
    if how == "none":
        found.append("Nothing is exchanged: ranks drift apart and nobody waits; that is imbalance between ranks.")
    elif how != "flat":
        found.append(f"In exchange {how} ranks leave at different times, which blurs waiting for stragglers.")
    if record is not None and record.clock == "cuda-events":
        found.append("Phases are times of the training stream: what overlaps on other streams is not charged.")
    elif record is not None and len(record.ranks) > 1:
        shared = "what it takes from the backward pass is part of compute"
        found.append(f"On a CPU the exchange shares the ranks' cores: {shared}.")
    if record is not None and any(one.waits is not None for one in record.ranks):
        even = "a rank whose computing takes longer now and then is not found"
        found.append(f"Of collectives within passes and update only sums over the steps are known: {even}.")
    if record is not None and record.phases == "synchronised":
        found.append("Phases are synchronised: the device is waited for after each, so exchange hides less than usual.")
    return tuple(found)
