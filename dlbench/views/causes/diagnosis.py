"""One line for each scaling point: what costs most of the ideal, how sure that is, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.attribution import Part
from dlbench.report.wording import figure_text, others_gain, percent, runs_text
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.verdicts import placed
from dlbench.views.causes.certainty import stands_out
from dlbench.views.causes.exchange_forecast import forecast, upper_bound
from dlbench.views.causes.experiments import RULES, Case, Experiment, Rule

WORTH_EXPLAINING = 0.01
"""Fraction of the ideal below which a loss is not explained."""

Finding = Literal["baseline", "no loss", "small loss", "above ideal", "too few runs", "within noise", "found"]

_LATE_TITLES = {
    "input": "late by {} input",
    "compute": "late by {} computing",
    "host": "late between {} steps",
    "unexplained": "late by nothing of {} own",
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
    """In one sentence, without the place."""
    finding: Finding
    """`found`: a cause stands out of the noise of enough runs, all causes counted. Otherwise why nothing does."""
    name: str
    """network-bound, straggler-bound, input-bound, ...; empty where nothing stands out."""
    cause: str
    """The cause that costs most of the ideal, of those that stand out if any does; at the baseline, that takes most of
    the step beside computing. Empty where none costs anything worth explaining."""
    bound: float | None
    """Growth of the throughput if what is lost to that cause took no time, a fraction: a limit, no forecast."""
    experiments: tuple[NextExperiment, ...]
    """In order; empty unless found."""


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
    experiments: tuple[NextExperiment, ...] = ()
    if finding == "found":
        experiments = _by_gain([_next(one, case, network) for one in rule.experiments if one.when(case)])
        line = _found_line(case, largest, rule, experiments, bound)
    else:
        line = _line(case, finding, largest, rule)
    return Verdict(
        line=line,
        finding=finding,
        name=rule.name if finding == "found" else "",
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
        return "too few runs"
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
    lost = case.whole.lost.value
    if finding == "baseline":
        return _baseline_line(case)
    if finding == "above ideal":
        return f"{percent(-lost)} above the ideal: the baseline ran with a handicap, or its runs drifted"
    return f"no loss worth explaining ({percent(lost)})" if finding == "small loss" else "nothing is lost"


def _baseline_line(case: Case) -> str:
    share = case.part("compute").seconds.value / case.whole.seconds.value
    return f"baseline: {percent(share)} of a step is compute"


def _line(case: Case, finding: Finding, largest: Part, rule: Rule) -> str:
    """Where nothing stands out of the noise, and at the baseline."""
    where = rule.where(case)
    if finding == "baseline":
        share = largest.seconds.value / case.whole.seconds.value
        return f"{_baseline_line(case)}, {percent(share)} {where}{_late(case, largest)}"
    lost, in_runs = percent(case.whole.lost.value), runs_text(largest.lost.n)
    most = f"the largest part is {where}"
    if finding == "too few runs":
        why = f"{in_runs}, fewer than {MIN_RUNS}, cannot tell the loss of {lost} from noise"
        return f"nothing stands out: {why}; {most}{_late(case, largest)}; repeat with --repeats {MIN_RUNS}"
    loss, gain = f"the loss of {lost}", f"the gain of {percent(-case.whole.lost.value)}"
    why = f"{gain if case.whole.lost.value < 0 else loss} is within the noise of {in_runs}"
    if placed(case.whole.lost, 0, 0) == "above":
        why = f"{loss} is certain, but no single cause of it is in {in_runs}"
    return f"nothing stands out: {why}; {most}; repeat with --repeats {2 * MIN_RUNS}"


def _found_line(
    case: Case, largest: Part, rule: Rule, experiments: Sequence[NextExperiment], bound: float | None
) -> str:
    where = rule.where(case)
    text = f"{rule.name}: {figure_text(largest.lost)} of the ideal is lost in {where}{_late(case, largest)}"
    if gain := others_gain(largest.lost.value, case.whole.lost.value):
        text += f" ({gain} points)"
    advised = [one for one in experiments if one.forecast_gain is None or one.forecast_gain > 0]
    if advised:
        text += f"; try {advised[0].text}"
        if advised[0].forecast_gain is not None:
            return f"{text}, forecast {experiment_gain(advised[0])}"
    return text if bound is None else f"{text}; {bound_text(bound)}"


def _late(case: Case, largest: Part) -> str:
    """For whom ranks wait, where it is mostly one, or the ranks of one host."""
    if largest.name != "straggler" or not case.hosts:
        return ""
    late = case.main_straggler
    if late is None:
        return ", now for one, now for another"
    whose = "their" if late.rank is None else "its"
    who = f"the ranks of {late.host}" if late.rank is None else f"rank {late.rank} on {late.host}"
    why = _LATE_TITLES[late.late_by].format(whose)
    return f": {percent(late.waited_share, 0)} of the wait is for {who}, {why}"


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
    """What it would be if all of it were hidden: a limit, no forecast."""
    return f"at most +{percent(bound, 0)} throughput (if all of it were hidden)"
