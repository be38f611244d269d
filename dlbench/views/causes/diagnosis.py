"""One line for each scaling point: what costs most of the ideal, how sure that is, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.attribution import Part
from dlbench.records.scan import Run
from dlbench.specs.collectives.network import NetworkModel
from dlbench.stats.estimates import MIN_RUNS
from dlbench.views.causes.exchange_forecast import Forecast, forecast, upper_bound
from dlbench.views.causes.experiments import RULES, Case, Experiment, Rule
from dlbench.views.causes.numbers import CausePoint

WORTH_EXPLAINING = 0.01
"""Share of the ideal below which a loss is not explained."""

Finding = Literal["baseline", "no loss", "small loss", "above ideal", "too few runs", "within noise", "found"]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One experiment."""

    text: str
    forecast: Forecast | None
    why_not: str
    """Why there is no forecast; empty where there is one, or where none was asked for."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong at one scaling point."""

    finding: Finding
    """`found`: the largest cause stands out of the noise of enough runs. Otherwise why nothing does."""
    largest: Part | None
    """The cause that costs most of the ideal, found or not; at the baseline, that takes most of the step beside
    computing. None where none costs anything."""
    rule: Rule | None
    """What that cause is called and what helps."""
    told: str
    """Where the time goes, after `is lost in`; empty without a rule."""
    bound: float | None
    """Growth of the throughput if what is lost to that cause took no time (1)."""
    advice: tuple[Advice, ...]
    """Experiments in order; empty unless found."""


def diagnose(
    point: CausePoint, runs: Sequence[Run], *, exclude: tuple[str, ...], network: NetworkModel | None
) -> Diagnosis:
    """The diagnosis of a point.

    Args:
        point: with its causes.
        runs: its runs.
        exclude: hosts that the history shows to be slow.
        network: fitted costs, for forecasts; None: only bounds.
    """
    largest = _largest(point)
    finding = _finding(point, largest)
    if largest is None or finding in ("no loss", "small loss", "above ideal"):
        return Diagnosis(finding=finding, largest=None, rule=None, told="", bound=None, advice=())
    rule = RULES[largest.name]
    share = largest.seconds.value / point.whole.seconds.value if point.is_baseline else largest.lost.value
    advice: tuple[Advice, ...] = ()
    if finding == "found":
        case = Case(run=_telling(runs), point=point, exclude=exclude)
        advice = tuple(_advice(one, case, network) for one in rule.experiments if one.when(case))
    return Diagnosis(
        finding=finding,
        largest=largest,
        rule=rule,
        told=rule.told_of(runs[0]),
        bound=_bound(share),
        advice=_by_gain(advice),
    )


def _largest(point: CausePoint) -> Part | None:
    if point.is_baseline:
        beside = [part for part in point.parts if part.name != "compute"]
        found = max(beside, key=lambda part: part.seconds.value)
        return found if found.seconds.value > 0 else None
    found = max(point.parts, key=lambda part: part.lost.value)
    return found if found.lost.value > 0 else None


def _finding(point: CausePoint, largest: Part | None) -> Finding:
    if point.is_baseline:
        return "baseline"
    lost = point.whole.lost.value
    if lost <= -WORTH_EXPLAINING:
        return "above ideal"
    if lost <= 0 or largest is None:
        return "no loss"
    if lost < WORTH_EXPLAINING:
        return "small loss"
    if largest.lost.n < MIN_RUNS:
        return "too few runs"
    return "found" if largest.lost.low is not None and largest.lost.low > 0 else "within noise"


def _bound(share: float) -> float | None:
    return upper_bound(share) if 0 < share < 1 else None


def _telling(runs: Sequence[Run]) -> Run:
    """A run that tells of its exchange, if there is one."""
    return next((run for run in runs if run.record is not None and run.record.exchange is not None), runs[0])


def _advice(experiment: Experiment, case: Case, network: NetworkModel | None) -> Advice:
    text = experiment.text(case)
    if network is None or experiment.way is None:
        return Advice(text=text, forecast=None, why_not="")
    if case.exchange is None:
        return Advice(text=text, forecast=None, why_not="the runs do not tell of their messages")
    found = forecast(
        network,
        case.exchange,
        ranks=case.point.point.ranks,
        new=experiment.way(case),
        exchange_s=case.point.part("exchange").seconds.value,
        step_s=case.point.whole.seconds.value,
    )
    if isinstance(found, str):
        return Advice(text=text, forecast=None, why_not=found)
    return Advice(text=text, forecast=found, why_not="")


def _by_gain(advice: Sequence[Advice]) -> tuple[Advice, ...]:
    """In the order of the table, but what is forecast to gain comes first and what is forecast to lose last."""

    def key(one: Advice) -> float:
        return 0.0 if one.forecast is None else -one.forecast.gain

    return tuple(sorted(advice, key=key))
