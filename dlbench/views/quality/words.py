"""Training to a quality in one or two sentences that a person can repeat."""

from __future__ import annotations

from dlbench.report.wording import (
    basis_text,
    figure_text,
    number_text,
    place_text,
    reached_text,
    runs_text,
    times_text,
    value_text,
)
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdicts import placed
from dlbench.views.quality.numbers import Factors, Quality, QualityPoint

WORTH_SAYING = 0.01
"""Factors nearer to 1 are called none."""


def quality_verdict(subject: str, quality: Quality) -> str:
    """How many runs reached the target, how soon, and why; no speed-up unless all did.

    Args:
        subject: the workload in words, with preset, engine, precision, batch and data source.
        quality: what the runs say.
    """
    goal = goal_text(quality)
    base, last = quality.points[0], quality.points[-1]
    reached, runs = (sum(p.num_reached for p in quality.points), sum(p.num_runs for p in quality.points))
    if reached < runs:
        return f"{subject}: {_not_reached(quality, goal, reached, runs)}"
    best = "" if last.best is None else f", best value {number_text(last.best.value, quality.unit)}"
    sooner = f"{_time_at(last)} ({reached_text(last.num_reached, last.num_runs)}{best})"
    if last.factors is None or len(quality.points) == 1:
        basis = f"; {_basis(last.time)}" if last.num_reached > 1 else ""
        return f"{subject}: target {goal} met in {sooner}{basis}."
    return (
        f"{subject}: all {runs_text(runs)} met the target {goal}. {place_text(last.ranks, last.nodes)} "
        f"{_needs(last)} {_sooner(last.factors.speedup)} {place_text(base.ranks, base.nodes)} "
        f"({_basis(last.factors.speedup)}): {_why(last.factors)}. Time to accuracy: {_time_at(base)}, {sooner}."
    )


def goal_text(quality: Quality) -> str:
    """``mean absolute error of at most 0.3000``."""
    bound = "at least" if quality.higher_is_better else "at most"
    return f"{quality.metric_title} of {bound} {number_text(quality.target, quality.unit)}"


def quality_headline(quality: Quality) -> str:
    """How many runs met the target, or how soon, in at most 100 characters."""
    sign = ">=" if quality.higher_is_better else "<="
    goal = f"{quality.metric_title} {sign} {number_text(quality.target, quality.unit)}"
    last = quality.points[-1]
    reached, runs = (sum(p.num_reached for p in quality.points), sum(p.num_runs for p in quality.points))
    if reached < runs or last.time is None:
        return f"{reached_text(reached, runs)} met {goal}"
    return f"{goal} in {value_text(last.time)} at {place_text(last.ranks, last.nodes)} ({runs_text(last.num_runs)})"


def _not_reached(quality: Quality, goal: str, reached: int, runs: int) -> str:
    counts = ", ".join(
        f"{point.num_reached} of {point.num_runs} at {place_text(point.ranks, point.nodes)}" for point in quality.points
    )
    if reached == 0:
        known = [point for point in quality.points if point.best]
        pick = max if quality.higher_is_better else min
        best = pick(known, key=lambda point: point.best.value if point.best else 0.0) if known else None
        found = (
            f" The best median is {figure_text(best.best)} at {place_text(best.ranks, best.nodes)}."
            if best and best.best
            else ""
        )
        return f"none of {runs_text(runs)} met the target {goal} within {quality.limit}.{found}"
    times = "; ".join(f"{_time_at(point)} ({point.num_reached} of {point.num_runs})" for point in quality.points)
    return (
        f"{reached_text(reached, runs)} met the target {goal} within {quality.limit} ({counts}): no speed-up of the "
        f"time to accuracy{_without_speedup(quality)}. Median time of those that did: {times}."
    )


def _without_speedup(quality: Quality) -> str:
    """Where it is missing; no words where the baseline did not get there, because then it is missing everywhere."""
    base, *others = quality.points
    if base.num_reached < base.num_runs or not others:
        return ""
    return f" at {', '.join(place_text(point.ranks, point.nodes) for point in others if point.factors is None)}"


def _time_at(point: QualityPoint) -> str:
    time = "none" if point.time is None else figure_text(point.time)
    return f"{time} at {place_text(point.ranks, point.nodes)}"


def _basis(figure: Estimate | None) -> str:
    return "" if figure is None else basis_text(figure)


def _needs(point: QualityPoint) -> str:
    assert point.factors is not None
    verb = "needs" if point.ranks == 1 else "need"
    gets = "gets" if point.ranks == 1 else "get"
    return f"{gets} there" if point.factors.speedup.value >= 1 else verb


def _sooner(factor: Estimate) -> str:
    return (
        f"{times_text(factor)} sooner than"
        if factor.value >= 1
        else f"{times_text(factor.inverted('ratio'))} as long as"
    )


def _why(factors: Factors) -> str:
    """The three factors in words; what favours and what does not is joined by `but`."""
    faster = factors.throughput.value >= 1
    first = f"throughput is {times_text(factors.throughput)}" + ("" if faster else " only")
    samples = factors.samples
    if abs(samples.value - 1) < WORTH_SAYING and placed(samples, 1 - WORTH_SAYING, 1 + WORTH_SAYING) != "undecided":
        second = "as many samples were needed"
    elif samples.value < 1:
        second = f"{times_text(samples.inverted('ratio'))} as many samples were needed{_noise(samples)}"
    else:
        second = f"only {times_text(samples.inverted('ratio'))} as many samples were needed{_noise(samples)}"
    joint = ", and " if (samples.value < 1 - WORTH_SAYING) is not faster else ", but "
    rest = factors.rest
    verb = "cost" if rest.value < 1 else "gain"
    third = (
        ""
        if abs(rest.value - 1) < WORTH_SAYING
        else f"; evaluation, checkpoints and waits {verb} a factor of {times_text(rest).replace('x', '')}{_noise(rest)}"
    )
    return f"{first}{joint}{second}{third}"


def _noise(factor: Estimate) -> str:
    within = factor.low is not None and factor.high is not None and factor.low <= 1 <= factor.high
    return " (perhaps by chance)" if within else ""
