"""Runs of two sides become a verdict: regressed, improved, equivalent, inconclusive or insufficient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.gate.difference import Difference, difference_of
from dlbench.gate.estimates import interval_of, ratio_of
from dlbench.gate.evidence import Evidence, Sample, evidence_of, num_sessions
from dlbench.gate.power import Power, power_of
from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate
from dlbench.stats.multiplicity import holm

Verdict = Literal["regressed", "improved", "equivalent", "inconclusive", "insufficient"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as a change."""

    tolerance: float = 0.02
    """B may be slower by this fraction."""
    level: float = 0.01
    """Chance that any comparison of a command is called regressed though B is not slower than tolerated; likewise for
    improved."""
    wanted: float = 0.03
    """The slowdown for which the number of repeats is told (fraction)."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the runs of both sides say."""

    verdict: Verdict
    reason: str
    """Why, in a sentence without its full stop."""
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse; None where a side has no run. Its interval is over units where a
    test was made, else over runs."""
    equivalence: tuple[float, float] | None
    """90 % interval of the ratio; None where no test was made."""
    difference: Difference | None
    p_worse: float | None
    """Of "no worse than tolerated", adjusted by Holm for all comparisons of the family; None where none was made."""
    p_better: float | None
    power: Power | None


def judge(samples: Sequence[Sample], rule: Rule) -> list[Judgement]:
    """Verdicts of one family of comparisons, in the order given.

    regressed: the one-sided test of "no worse than tolerated" rejects at `rule.level` after Holm's correction over the
    family. improved: the mirror image. equivalent: the 90 % interval of the ratio lies within the tolerance (TOST at
    5 %). inconclusive: none of these, or too few sessions for a test. insufficient: fewer than five runs on a side.

    Equivalence needs no correction: that all comparisons of a family are called equivalent though one is not is at
    most as likely as that one is (intersection-union: Berger, Technometrics 24, 1982).
    """
    evidence = [evidence_of(sample) if sample.has_runs else None for sample in samples]
    tested = [one for one in evidence if one is not None]
    # What the strictest comparison of the family must reach.
    strictest = rule.level / max(1, len(tested))
    margin = math.log1p(rule.tolerance)
    found = [difference_of(one, margin=margin, level=strictest) for one in tested]
    worse = holm([one.p_worse for one in found])
    better = holm([one.p_better for one in found])
    judged = iter(
        [
            _judged(one, rule, strictest, difference, p_worse, p_better)
            for one, difference, p_worse, p_better in zip(tested, found, worse, better, strict=True)
        ]
    )
    return [_untested(sample) if one is None else next(judged) for sample, one in zip(samples, evidence, strict=True)]


def _judged(
    evidence: Evidence, rule: Rule, strictest: float, difference: Difference, p_worse: float, p_better: float
) -> Judgement:
    interval = interval_of(evidence, 0.9)
    verdict, reason = _decide(rule, interval, p_worse, p_better)
    return Judgement(
        verdict=verdict,
        reason=reason,
        ratio=ratio_of(evidence),
        equivalence=interval,
        difference=difference,
        p_worse=p_worse,
        p_better=p_better,
        power=power_of(evidence, level=strictest, tolerance=rule.tolerance, wanted=rule.wanted),
    )


def _decide(rule: Rule, interval: tuple[float, float], p_worse: float, p_better: float) -> tuple[Verdict, str]:
    edge = 1 + rule.tolerance
    if p_worse <= rule.level:
        return "regressed", "worse by more than the tolerance, beyond chance"
    if p_better <= rule.level:
        return "improved", "better by more than the tolerance, beyond chance"
    is_changed = interval[0] > 1 or interval[1] < 1
    if 1 / edge <= interval[0] and interval[1] <= edge:
        changed = " and leaves out 1: a small change is likely" if is_changed else ""
        return "equivalent", f"the 90 % interval of the ratio lies within the tolerance{changed}"
    if is_changed:
        return "inconclusive", "likely changed, but not shown to be within the tolerance or beyond it"
    return "inconclusive", "neither a change nor its absence is shown: too noisy for so few runs"


def _untested(sample: Sample) -> Judgement:
    verdict: Verdict
    if sample.has_runs:
        verdict, reason = "inconclusive", _few_sessions(sample)
    else:
        counts = len(sample.a), len(sample.b)
        unit = "pairs" if sample.paired else "runs per side"
        told = f"{counts[0]}" if sample.paired else f"{counts[0]} and {counts[1]}"
        verdict, reason = "insufficient", f"{told} of the {MIN_RUNS} {unit} that a verdict needs"
    return Judgement(
        verdict=verdict,
        reason=reason,
        ratio=_ratio_of_runs(sample) if min(len(sample.a), len(sample.b)) > 0 else None,
        equivalence=None,
        difference=None,
        p_worse=None,
        p_better=None,
        power=None,
    )


def _few_sessions(sample: Sample) -> str:
    """Why sides of few sessions get no verdict, and what helps."""
    a, b = num_sessions(sample)
    told = "one session a side" if a == b == 1 else f"{a} and {b} sessions"
    return (
        f"{told}: drift between sessions counts as a difference; interleave (--ab), or give a baseline or a history "
        f"of {MIN_SESSIONS} sessions"
    )


def _ratio_of_runs(sample: Sample) -> Estimate:
    names = ("pair", "pair") if sample.paired else ("a", "b")
    a, b = (
        {(name, i): value for i, value in enumerate(side)}
        for name, side in zip(names, (sample.a, sample.b), strict=True)
    )
    return ratio_estimate(b, a)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of many: the first that is there of regressed, insufficient, inconclusive, improved, equivalent."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("regressed", "insufficient", "inconclusive", "improved", "equivalent")
    return next((verdict for verdict in order if verdict in found), "insufficient")
