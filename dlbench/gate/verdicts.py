"""Runs of two sides become a verdict: regressed, improved, equivalent, inconclusive or insufficient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.gate.evidence import Evidence, Sample, Unit, evidence_of, num_sessions
from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.stats.estimates import MIN_RUNS, Estimate, ratio_estimate
from dlbench.stats.pairing import KnownKey

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
class TTest:
    """What the test of one comparison says."""

    method: str
    """The test in words."""
    p_worse: float
    """Chance of a B that looks as much worse as this or more, if it is worse by the tolerance and no more."""
    p_better: float
    """The mirror image."""
    level_worse: float
    """What `p_worse` must not exceed: the level that Holm's correction over the family leaves this comparison."""
    level_better: float
    equivalence: tuple[float, float]
    """90 % interval of the ratio."""
    unit: Unit
    scatter: float
    """Standard deviation over units of the logarithms of one side; where paired, of the logarithms of the ratios."""
    detectable: float
    """Smallest slowdown that is called one with 80 % probability (fraction)."""
    wanted: float
    """The slowdown that is asked for (fraction)."""
    repeats: int | None
    """Units of each side that show it with 80 % probability; None: not with 1,000, or it is tolerated."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the runs of both sides say."""

    verdict: Verdict
    reason: str
    """Why, in a sentence without its full stop."""
    ratio: Estimate | None
    """B / A of geometric means, above 1 is worse; None where a side has no run. Where a test was made, over units, and
    its interval is the one that decides: regressed where it lies above the tolerance, improved where it lies below."""
    tested: TTest | None
    """None where no test was made."""


def judge(samples: Sequence[Sample], rule: Rule) -> list[Judgement]:
    """Verdicts of one family of comparisons, in the order given.

    regressed: the one-sided test of "no worse than tolerated" rejects at `rule.level` after Holm's correction over the
    family. improved: the mirror image. equivalent: the 90 % interval of the ratio lies within the tolerance (TOST at
    5 %: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987). inconclusive: none of these, or too few
    sessions for a test. insufficient: fewer than five runs on a side.

    Equivalence needs no correction: that all comparisons of a family are called equivalent though one is not is at
    most as likely as that one is (intersection-union: Berger, Technometrics 24, 1982).
    """
    evidence = [evidence_of(sample) if sample.has_runs else None for sample in samples]
    known = [one for one in evidence if one is not None]
    margin = math.log1p(rule.tolerance)
    worse, better = zip(*(one.p_values(margin) for one in known), strict=True) if known else ((), ())
    levels = zip(_levels(worse, rule.level), _levels(better, rule.level), strict=True)
    judged = iter(
        [
            _judged(one, rule, p, level, strictest=rule.level / len(known))
            for one, p, level in zip(known, zip(worse, better, strict=True), levels, strict=True)
        ]
    )
    return [_untested(sample) if one is None else next(judged) for sample, one in zip(samples, evidence, strict=True)]


def _levels(p_values: Sequence[float], level: float) -> list[float]:
    """The level of each comparison of a family by Holm's procedure (Scandinavian Journal of Statistics 6, 1979).

    The smallest of m p is held against level / m, the next one, if that rejected, against level / (m - 1), and so on;
    from the first that does not reject, all are held against its level, and none of them rejects.
    """
    found = [0.0] * len(p_values)
    rejected = 0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        found[place] = level / (len(p_values) - rejected)
        rejected += rejected == rank and p_values[place] <= found[place]
    return found


def _judged(
    evidence: Evidence, rule: Rule, p: tuple[float, float], level: tuple[float, float], *, strictest: float
) -> Judgement:
    margin, value = math.log1p(rule.tolerance), math.exp(evidence.shift)
    n = min(len(evidence.a), len(evidence.b))
    low, high = evidence.ends(*level)
    tested = TTest(
        method=evidence.test,
        p_worse=p[0],
        p_better=p[1],
        level_worse=level[0],
        level_better=level[1],
        equivalence=evidence.ends(0.05, 0.05),
        unit=evidence.unit,
        scatter=evidence.scatter,
        detectable=evidence.detectable(strictest, margin),
        wanted=rule.wanted,
        repeats=evidence.repeats(strictest, math.log1p(rule.wanted) - margin),
    )
    verdict, reason = _decide(rule, tested)
    ratio = Estimate(value, low, high, n, "Student t", "ratio", level=1 - sum(level))
    return Judgement(verdict=verdict, reason=reason, ratio=ratio, tested=tested)


def _decide(rule: Rule, tested: TTest) -> tuple[Verdict, str]:
    edge = 1 + rule.tolerance
    if tested.p_worse <= tested.level_worse:
        return "regressed", "worse by more than the tolerance, beyond chance"
    if tested.p_better <= tested.level_better:
        return "improved", "better by more than the tolerance, beyond chance"
    low, high = tested.equivalence
    is_changed = low > 1 or high < 1
    if 1 / edge <= low and high <= edge:
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
        tested=None,
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
        {KnownKey.of(name, i, session): value for i, (value, session) in enumerate(zip(side, sessions, strict=True))}
        for name, (side, sessions) in zip(names, sample.sides, strict=True)
    )
    return ratio_estimate(b, a)


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of many: the first that is there of regressed, insufficient, inconclusive, improved, equivalent."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("regressed", "insufficient", "inconclusive", "improved", "equivalent")
    return next((verdict for verdict in order if verdict in found), "insufficient")
