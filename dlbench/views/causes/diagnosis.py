"""Two sentences for each scaling point: what costs most efficiency, how sure that is, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.attribution import Part
from dlbench.report.wording import POINTS, interval_text, percent, points, runs_text
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.verdicts import placed
from dlbench.views.causes.balance import balance
from dlbench.views.causes.certainty import stands_out
from dlbench.views.causes.exchange_forecast import forecast, upper_bound
from dlbench.views.causes.experiments import RULES, Case, Experiment
from dlbench.views.causes.titles import CAUSE_TITLES

WORTH_EXPLAINING = 0.01
"""Fraction of efficiency below which a loss is not explained."""

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
    """In one sentence or two, without the place and the last full stop."""
    finding: Finding
    """`found`: a cause stands out of the noise of enough runs, all causes counted. `likely`: of fewer runs, every one
    lost, and to this cause. Otherwise why nothing does."""
    name: str
    """network-bound, straggler-bound, input-bound, ...; empty unless found or likely."""
    cause: str
    """The cause that costs most, of those that stand out if any does; at the baseline, that takes most of the step
    beside computing. Empty where none costs anything worth explaining."""
    bound: float | None
    """Growth of the throughput if what is lost to that cause took no time, a fraction: a limit, no forecast."""
    experiments: tuple[NextExperiment, ...]
    """In order; empty unless found or likely."""


def diagnose(case: Case, network: NetworkModel | None) -> Verdict:
    """The diagnosis of a point.

    Args:
        case: the point with its causes.
        network: fitted costs, for forecasts; None: only bounds.
    """
    largest = _largest(case)
    finding = _finding(case, largest)
    if largest is None or finding in ("no loss", "small loss", "above ideal"):
        line = _line_without_cause(case, finding)
        return Verdict(line=line, finding=finding, name="", cause="", bound=None, experiments=())
    rule = RULES[largest.name]
    share = largest.seconds.value / case.whole.seconds.value if case.is_baseline else largest.lost.value
    bound = upper_bound(share) if 0 < share < 1 else None
    is_named = finding in ("found", "likely")
    experiments: tuple[NextExperiment, ...] = ()
    if is_named:
        experiments = _by_gain([_next(one, case, network) for one in rule.experiments if one.when(case)])
        line = _named_line(case, largest, finding, experiments)
    else:
        line = _line(case, finding, largest)
    return Verdict(
        line=line,
        finding=finding,
        name=rule.name if is_named else "",
        cause=largest.name,
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
    lost = case.whole.lost.value
    if largest is not None and placed(case.whole.lost, -WORTH_EXPLAINING, WORTH_EXPLAINING) == "undecided":
        return "found" if lost >= WORTH_EXPLAINING and _stands_out(case, largest) else "within noise"
    if lost <= -WORTH_EXPLAINING:
        return "above ideal"
    if lost <= 0 or largest is None:
        return "no loss"
    if lost < WORTH_EXPLAINING:
        return "small loss"
    if largest.lost.n < MIN_RUNS:
        both = (case.whole.lost.low, largest.lost.low)
        return "likely" if all(low is not None and low > 0 for low in both) else "too few runs"
    return "found" if _stands_out(case, largest) else "within noise"


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


# The line


def _line_without_cause(case: Case, finding: Finding) -> str:
    if finding == "baseline":
        return _baseline_line(case)
    if finding == "above ideal":
        gain = points(-case.whole.lost.value)
        return f"{gain} above 100 %: the baseline ran with a handicap, or its runs drifted"
    if balance(case.parts, case.whole).has_gains:
        return f"no loss worth explaining: {balance(case.parts, case.whole).text}"
    return (
        f"no loss worth explaining ({points(case.whole.lost.value)})" if finding == "small loss" else "nothing is lost"
    )


def _baseline_line(case: Case) -> str:
    share = case.part("compute").seconds.value / case.whole.seconds.value
    return f"baseline: {percent(share)} of a step is compute"


def _line(case: Case, finding: Finding, largest: Part) -> str:
    """Where no cause is named, and at the baseline."""
    if finding == "baseline":
        share = largest.seconds.value / case.whole.seconds.value
        text = f"{_baseline_line(case)}, {percent(share)} {CAUSE_TITLES[largest.name]}{_late(case, largest)}"
        return f"{text}{_advice(case, largest, share)}"
    in_runs, in_all = runs_text(largest.lost.n), balance(case.parts, case.whole).text
    most = _largest_text(case)
    if finding == "too few runs":
        if case.whole.lost.low is None:
            why = f"{in_all}, of single runs without an interval"
        elif case.whole.lost.low <= 0:
            why = f"{in_runs} cannot tell the loss of {_with_interval(case.whole)} from noise"
        else:
            why = f"{in_all} in {in_runs}, no part of it in all of them"
        return f"{why}; {most}. Repeat with --repeats {MIN_RUNS}"
    if placed(case.whole.lost, 0, 0) == "above":
        why = f"{in_all} for certain, but no single part of it is certain in {in_runs}"
    else:
        kind = "gain" if case.whole.lost.value < 0 else "loss"
        why = f"the {kind} of {points(abs(case.whole.lost.value))} is within the noise of {in_runs}"
    return f"{why}; {most}. Repeat with --repeats {2 * MIN_RUNS}"


def _advice(case: Case, largest: Part, share: float) -> str:
    """What to try at the baseline: against waiting for launches alone, which no other rank is needed to see."""
    if largest.name != "launch" or share < WORTH_EXPLAINING:
        return ""
    tried = [one.text(case) for one in RULES["launch"].experiments if one.when(case)]
    return f". Next: {tried[0]}" if tried else ""


def _largest_text(case: Case) -> str:
    largest = max(case.parts, key=lambda part: part.lost.value)
    return f"the largest part is {CAUSE_TITLES[largest.name]}, {points(largest.lost.value)}{_late(case, largest)}"


def _with_interval(part: Part) -> str:
    return f"{points(part.lost.value)} {interval_text(part.lost.in_unit(POINTS))}".rstrip()


def _named_line(case: Case, cause: Part, finding: Finding, experiments: Sequence[NextExperiment]) -> str:
    whole = balance(case.parts, case.whole)
    gains = f" ({whole.gains_text.removeprefix(', ')})" if whole.has_gains else ""
    text = (
        f"{'main' if finding == 'found' else 'likely'} cause: {CAUSE_TITLES[cause.name]}, {_with_interval(cause)} of "
        f"{whole.lost_text} lost{gains}{_late(case, cause)}{_beyond(case, cause)}"
    )
    if finding == "likely":
        text += f"; only {runs_text(cause.lost.n)}: confirm with --repeats {MIN_RUNS}"
    advised = [one for one in experiments if one.forecast_gain is None or one.forecast_gain > 0]
    if not advised:
        return text
    gain = f", forecast {experiment_gain(advised[0])}" if advised[0].forecast_gain is not None else ""
    return f"{text}. Next: {advised[0].text}{gain}"


def _beyond(case: Case, cause: Part) -> str:
    """A part that is larger than the one that is named, and not certain."""
    largest = max(case.parts, key=lambda part: part.lost.value)
    if largest.name == cause.name:
        return ""
    return f"; {CAUSE_TITLES[largest.name]}, {points(largest.lost.value)}, is within the noise"


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
    ends = ", ".join(percent(end, 0).removesuffix(" %") for end in (one.forecast_low, one.forecast_high))
    return gain_text(one.forecast_gain).replace(" throughput", f" [{ends}] throughput")


def bound_text(bound: float) -> str:
    """What it would be if all of it were gone: a limit, no forecast."""
    return f"at most +{percent(bound, 0)}"
