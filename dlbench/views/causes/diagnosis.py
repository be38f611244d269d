"""A sentence for each scaling point: what costs most efficiency, and how sure that is; and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.attribution import Part
from dlbench.report.wording import figure_text, lost_text, lost_value, percent, points, repeat_text, units_text
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.multiplicity import LEVEL, holm
from dlbench.stats.verdicts import placed
from dlbench.views.causes.exchange_forecast import forecast, upper_bound
from dlbench.views.causes.experiments import CAUSE_TITLES, RULES, Case, Experiment

WORTH_EXPLAINING = 0.01
"""Fraction of efficiency below which a loss is not explained."""

LIKELY_RUNS = 4
"""Runs or sessions from which a cause may be likely: of three equal ones a side one report in ten would name one."""
_PRINTED = 0.0005
"""Fraction of efficiency that is printed as 0.1 points."""
MOST_NAMED = 3
"""Causes that are named in a line."""

Finding = Literal["baseline", "no loss", "small loss", "above ideal", "too few runs", "within noise", "likely", "found"]

_LATE_TITLES = {
    "input": "by {} input",
    "compute": "by {} computing",
    "host": "between {} steps",
    "unexplained": "not by {} own work",
}


@dataclass(frozen=True, kw_only=True)
class NextExperiment:
    """Something to try."""

    text: str
    forecast_gain: float | None
    """Forecast growth of the throughput, a fraction."""
    forecast_low: float | None
    """Ends of its 95 % interval; None: too few runs of the network's fit or of the point."""
    forecast_high: float | None
    basis: str
    """What the forecast was computed from, or why there is none; empty where none was asked for."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The diagnosis of a point."""

    line: str
    """In one sentence, without the place and the last full stop."""
    next: str
    """What to do next, likewise; empty where nothing suggests itself."""
    finding: Finding
    """`found`: a cause stands out of the noise of enough runs, all causes counted. `likely`: of four runs, every one
    lost, and to this cause, and a t test of the whole finds a loss. Otherwise why nothing does."""
    name: str
    """network-bound, straggler-bound, input-bound, ...; empty unless found or likely."""
    cause: str
    """The cause that costs most, of those that stand out if any does; at the baseline, that takes most of the step
    beside computing. Empty where none costs anything worth explaining."""
    bound: float | None
    """Growth of the throughput if what is lost to that cause took no time, a fraction: a limit, no forecast."""
    experiments: tuple[NextExperiment, ...]
    """In order; empty unless found or likely."""


def adjusted_p(points: Sequence[Sequence[Part]], num_groups: int = 1) -> list[dict[str, float]]:
    """The p values of losses to causes, after Holm over all causes of all points and Bonferroni over groups.

    With nothing lost, the chance that any cause of a report is called found is at most 5 %.

    Args:
        points: the causes of each rank count of a group that were measured, the baseline's too.
        num_groups: groups of the report with several rank counts.

    Returns:
        For each point, by cause; nothing of the baseline, and of causes that took no time anywhere.
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
    """Whether a cause loses something for certain: after the correction, and by its own interval.

    Args:
        part: the cause.
        adjusted: its p by `adjusted_p`.
    """
    return adjusted < LEVEL and placed(part.lost, 0, 0) == "above"


def diagnose(case: Case, network: NetworkModel | None) -> Verdict:
    """The diagnosis of a point.

    Args:
        case: the point with its causes.
        network: fitted costs, for forecasts; None: only bounds.
    """
    largest = _largest(case)
    finding = _finding(case, largest)
    is_named = finding in ("found", "likely")
    if largest is None or finding in ("no loss", "small loss", "above ideal"):
        rule, cause, bound = None, "", None
    else:
        rule, cause = RULES[largest.name], largest.name
        share = largest.seconds.value / case.whole.seconds.value if case.is_baseline else largest.lost.value
        bound = upper_bound(share) if 0 < share < 1 else None
    experiments: tuple[NextExperiment, ...] = ()
    if is_named and rule is not None:
        experiments = _by_gain([_next(one, case, network) for one in rule.experiments if one.when(case)])
    return Verdict(
        line=_line(case, finding, largest),
        next=_next_text(case, finding, largest, experiments),
        finding=finding,
        name=rule.name if is_named and rule is not None else "",
        cause=cause,
        bound=bound,
        experiments=experiments,
    )


def _largest(case: Case) -> Part | None:
    if case.is_baseline:
        beside = [part for part in case.parts if part.name != "compute"]
        found = max(beside, key=lambda part: part.seconds.value)
        return found if found.seconds.value > 0 else None
    found = max(case.parts, key=lambda part: (_stands_out(case, part), part.lost.value))
    return found if found.lost.value > 0 else None


def _stands_out(case: Case, part: Part) -> bool:
    return stands_out(part, case.adjusted_p.get(part.name, 1.0))


def _finding(case: Case, largest: Part | None) -> Finding:
    if case.is_baseline:
        return "baseline"
    lost = case.whole.lost
    where = placed(lost, -WORTH_EXPLAINING, WORTH_EXPLAINING)
    if where == "insufficient":
        return "likely" if largest is not None and _is_likely(case.whole, largest) else "too few runs"
    if where == "below":
        return "above ideal"
    if where == "within":
        return "small loss" if lost.value >= _PRINTED else "no loss"
    is_found = lost.value >= WORTH_EXPLAINING and largest is not None and _stands_out(case, largest)
    return "found" if is_found else "within noise"


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


# Experiments


def _next(experiment: Experiment, case: Case, network: NetworkModel | None) -> NextExperiment:
    text = experiment.text(case)
    if network is None or experiment.way is None:
        return _without_forecast(text, "")
    if case.exchange is None:
        return _without_forecast(text, "the runs do not report their messages")
    found = forecast(
        network,
        case.exchange,
        ranks=case.point.ranks,
        new=experiment.way(case),
        exchange=case.part("exchange").seconds,
        step=case.whole.seconds,
    )
    if isinstance(found, str):
        return _without_forecast(text, found)
    return NextExperiment(
        text=text, forecast_gain=found.gain, forecast_low=found.low, forecast_high=found.high, basis=found.basis
    )


def _without_forecast(text: str, why: str) -> NextExperiment:
    return NextExperiment(text=text, forecast_gain=None, forecast_low=None, forecast_high=None, basis=why)


def _by_gain(experiments: Sequence[NextExperiment]) -> tuple[NextExperiment, ...]:
    """In the order of the rule, but what is forecast to gain comes first and what is forecast to lose last."""
    return tuple(sorted(experiments, key=lambda one: -(one.forecast_gain or 0.0)))


def _next_text(case: Case, finding: Finding, largest: Part | None, experiments: Sequence[NextExperiment]) -> str:
    if finding == "too few runs":
        return repeat_text(case.whole.lost)
    if finding == "within noise":
        return repeat_text(case.whole.lost, 2 * max(MIN_RUNS, case.whole.lost.units))
    if finding == "baseline":
        # Against waiting for launches alone, which no other rank is needed to see.
        if largest is None or largest.name != "launch" or _share(case, largest) < WORTH_EXPLAINING:
            return ""
        return next((one.text(case) for one in RULES["launch"].experiments if one.when(case)), "")
    advised = [one for one in experiments if one.forecast_gain is None or one.forecast_gain > 0]
    gain = f", forecast {experiment_gain(advised[0])}" if advised and advised[0].forecast_gain is not None else ""
    confirm = repeat_text(case.whole.lost) if finding == "likely" else ""
    return "; then ".join(filter(None, (confirm, f"{advised[0].text}{gain}" if advised else "")))


# The line


def _line(case: Case, finding: Finding, largest: Part | None) -> str:
    if finding == "baseline":
        text = f"baseline: {percent(_share(case, case.part('compute')))} of a step is compute"
        if largest is None:
            return text
        return f"{text}, {percent(_share(case, largest))} {CAUSE_TITLES[largest.name]}{_late(case, largest)}"
    if finding in ("found", "likely"):
        assert largest is not None
        return _named_line(case, largest, finding)
    lost = case.whole.lost
    if finding == "above ideal":
        return f"{_gain(lost)} above 100 %: the baseline ran with a handicap, or its runs drifted"
    if finding == "no loss" and not _gained(case):
        return "nothing is lost"
    if finding in ("no loss", "small loss"):
        return f"no loss worth explaining ({_lost(case)})"
    in_runs, is_loss = units_text(lost), lost.value >= 0
    amount = f"loss of {lost_text(lost)}" if is_loss else f"gain of {_gain(lost)}"
    if lost.low is None or lost.high is None:
        why = f"a {amount} in single runs, which have no interval"
    elif finding == "too few runs":
        if lost.low <= 0 <= lost.high:
            why = f"{in_runs} cannot tell the {amount} from noise"
        else:
            why = f"a {amount} in {in_runs}, too few to say what from"
    elif lost.low > 0:
        why = f"{_lost(case)} for certain, but no single part of it is certain in {in_runs}"
    elif lost.high < 0:
        why = f"whether the {amount} is of {percent(WORTH_EXPLAINING, 0)} or more is undecided"
    else:
        why = f"the {amount} is within the noise of {in_runs}"
    most = max(case.parts, key=lambda part: part.lost.value)
    if most.lost.value <= 0:
        return why
    return f"{why}; the largest part is {CAUSE_TITLES[most.name]}, {lost_value(most.lost)}{_late(case, most)}"


def _share(case: Case, part: Part) -> float:
    return part.seconds.value / case.whole.seconds.value


def _gain(lost: Estimate) -> str:
    """A negative loss the other way round, with its interval."""
    return lost_text(lost.mapped(lambda value: -value, lost.unit))


def _gained(case: Case) -> float:
    """What parts gain together, where that is worth a word beside the loss, which is what the others lose less it."""
    gained = -sum(part.lost.value for part in case.parts if part.lost.value < 0)
    return gained if gained >= WORTH_EXPLAINING else 0.0


def _lost(case: Case) -> str:
    """What is lost in all, 1 - efficiency: ``20.0 points lost``, ``4.8 points lost in all, as others gain 19.0``."""
    gained = _gained(case)
    text = f"{lost_value(case.whole.lost)} lost"
    return f"{text} in all, as other parts gain {points(gained)}" if gained else text


def _named_line(case: Case, cause: Part, finding: Finding) -> str:
    joint = "; " if _gained(case) or cause.lost.value > case.whole.lost.value + _PRINTED else " of "
    others = sorted(case.parts, key=lambda part: -part.lost.value)
    sure = [part for part in others if part is not cause and part.lost.value >= WORTH_EXPLAINING]
    sure = [part for part in sure if _stands_out(case, part)][: MOST_NAMED - 1]
    also = "".join(f"; also {CAUSE_TITLES[part.name]}, {lost_text(part.lost)}" for part in sure)
    # A part that is larger than the one that is named, and not certain.
    beyond = ""
    if others[0] is not cause and others[0] not in sure:
        beyond = f"; {CAUSE_TITLES[others[0].name]}, {lost_value(others[0].lost)}, is within the noise"
    late = _late(case, cause)
    lost = f"{late}{joint}{_lost(case)}" if joint == "; " else f"{joint}{_lost(case)}{late}"
    return (
        f"{'main' if finding == 'found' else 'likely'} cause: {CAUSE_TITLES[cause.name]}, {lost_text(cause.lost)}"
        f"{lost}{also}{beyond}" + (f"; only {units_text(cause.lost)}" if finding == "likely" else "")
    )


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


def gain_text(gain: float) -> str:
    """``+18 % throughput``; a loss with its sign."""
    return f"{'+' if gain >= 0 else ''}{percent(gain, 0)} throughput"


def experiment_gain(one: NextExperiment) -> str:
    """The forecast gain with its interval; `+18 % [12, 25] throughput`."""
    if one.forecast_gain is None:
        return ""
    if one.forecast_low is None or one.forecast_high is None:
        return gain_text(one.forecast_gain)
    figure = Estimate(one.forecast_gain, one.forecast_low, one.forecast_high, MIN_RUNS, "fit", "fraction")
    return f"{'+' if one.forecast_gain >= 0 else ''}{figure_text(figure)} throughput"


def bound_text(bound: float) -> str:
    """What it would be if all of it were gone: a limit, no forecast."""
    return f"at most +{percent(bound, 0)}"
