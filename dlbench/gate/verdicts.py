"""Runs of two sides become a verdict: regressed, improved, equivalent, inconclusive or insufficient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.gate.difference import Difference, paired_difference, unpaired_difference
from dlbench.gate.estimates import equivalence_interval, ratio_of_sides, shift_ratio
from dlbench.gate.power import Power, power_of
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.multiplicity import holm

Verdict = Literal["regressed", "improved", "equivalent", "inconclusive", "insufficient"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What counts as a change."""

    tolerance: float = 0.02
    """B may be slower by this fraction; what is smaller never fails the gate."""
    level: float = 0.01
    """Chance of any false alarm in one direction, over all comparisons of a command."""
    wanted: float = 0.03
    """The slowdown for which the number of repeats is told (fraction)."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric at one point: a value for each run, larger is worse."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    paired: bool
    """Whether equal places are pairs of interleaved runs."""

    @property
    def is_enough(self) -> bool:
        """Whether there are runs for a verdict."""
        return min(len(self.a), len(self.b)) >= MIN_RUNS


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the runs of both sides say."""

    verdict: Verdict
    reason: str
    """Why, in a sentence without its full stop."""
    ratio: Estimate | None
    """B / A of medians over runs, above 1 is worse; None where a side has no run."""
    shift: float | None
    """The Hodges-Lehmann shift as a ratio; None likewise."""
    equivalence: tuple[float, float] | None
    """90 % interval of the ratio; None with too few runs."""
    difference: Difference | None
    p_worse: float | None
    """Adjusted by Holm for all comparisons of the family; None with too few runs."""
    p_better: float | None
    power: Power | None


def judge(samples: Sequence[Sample], rule: Rule) -> list[Judgement]:
    """Verdicts of one family of comparisons, in the order given.

    regressed: the one-sided test says worse at `rule.level` after Holm's correction over the family, and the ratio of
    medians is beyond the tolerance. improved: the mirror image. equivalent: the 90 % interval of the ratio lies within
    the tolerance (TOST at 5 %). inconclusive: none of these. insufficient: fewer than five runs on a side.

    Equivalence needs no correction: that all comparisons of a family are called equivalent though one is not is at
    most as likely as that one is (intersection-union: Berger, Technometrics 24, 1982).
    """
    enough = [sample for sample in samples if sample.is_enough]
    # What the strictest comparison of the family must reach.
    strictest = rule.level / max(1, len(enough))
    found = [_difference(sample, strictest) for sample in enough]
    worse = holm([one.p_worse for one in found])
    better = holm([one.p_better for one in found])
    judged = iter(
        [
            _judged(sample, rule, strictest, difference, p_worse, p_better)
            for sample, difference, p_worse, p_better in zip(enough, found, worse, better, strict=True)
        ]
    )
    return [next(judged) if sample.is_enough else _insufficient(sample) for sample in samples]


def _difference(sample: Sample, level: float) -> Difference:
    if sample.paired:
        return paired_difference(sample.a, sample.b, level=level)
    return unpaired_difference(sample.a, sample.b)


def _judged(
    sample: Sample, rule: Rule, strictest: float, difference: Difference, p_worse: float, p_better: float
) -> Judgement:
    a, b, paired = sample.a, sample.b, sample.paired
    ratio = ratio_of_sides(a, b, paired=paired)
    interval = equivalence_interval(a, b, paired=paired)
    verdict, reason = _decide(rule, ratio.value, interval, p_worse, p_better)
    return Judgement(
        verdict=verdict,
        reason=reason,
        ratio=ratio,
        shift=shift_ratio(a, b, paired=paired),
        equivalence=interval,
        difference=difference,
        p_worse=p_worse,
        p_better=p_better,
        power=power_of(a, b, paired=paired, level=strictest, tolerance=rule.tolerance, wanted=rule.wanted),
    )


def _decide(
    rule: Rule, ratio: float, interval: tuple[float, float], p_worse: float, p_better: float
) -> tuple[Verdict, str]:
    edge = 1 + rule.tolerance
    worse, better = p_worse <= rule.level, p_better <= rule.level
    if worse and ratio > edge:
        return "regressed", "worse beyond chance and beyond the tolerance"
    if better and ratio < 1 / edge:
        return "improved", "better beyond chance and beyond the tolerance"
    if 1 / edge <= interval[0] and interval[1] <= edge:
        changed = "; a change within it is certain" if worse or better else ""
        return "equivalent", f"the 90 % interval of the ratio lies within the tolerance{changed}"
    if worse or better:
        return "inconclusive", "changed beyond chance, but not shown to be within the tolerance or beyond it"
    return "inconclusive", "neither a change nor its absence is shown: too noisy for so few runs"


def _insufficient(sample: Sample) -> Judgement:
    counts = len(sample.a), len(sample.b)
    known = min(counts) > 0
    unit = "pairs" if sample.paired else "runs per side"
    told = f"{counts[0]}" if sample.paired else f"{counts[0]} and {counts[1]}"
    return Judgement(
        verdict="insufficient",
        reason=f"{told} of the {MIN_RUNS} {unit} that a verdict needs",
        ratio=ratio_of_sides(sample.a, sample.b, paired=sample.paired) if known else None,
        shift=shift_ratio(sample.a, sample.b, paired=sample.paired) if known else None,
        equivalence=None,
        difference=None,
        p_worse=None,
        p_better=None,
        power=None,
    )


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of many: the first that is there of regressed, insufficient, inconclusive, improved, equivalent."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("regressed", "insufficient", "inconclusive", "improved", "equivalent")
    return next((verdict for verdict in order if verdict in found), "insufficient")
