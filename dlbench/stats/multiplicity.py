"""Many comparisons at once: paired tests of single comparisons, and what is left of them when all are counted.

A sweep compares many settings, and the best of many looks better than it is. Intervals are made for each
comparison alone; whether a difference is called one is decided by Holm's step-down procedure (Scandinavian
Journal of Statistics 6, 1979) over all comparisons of a family, so that the chance of any false claim among
them is at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.05
"""Chance of any false claim in a family of comparisons."""
POWER = 0.8
"""Chance to see a difference of the wanted size, for the number of repeats that is advised."""

ROUNDING = 1e-6
"""Step times are nanoseconds of some milliseconds: a relative scatter below this is rounding."""

_STEPS = 200
"""Of numeric integration: errors of the power below 1e-4 from three pairs on."""
_SCATTERS = 15
"""What the true scatter may be, where it is estimated."""


def paired_p(logs: Sequence[float]) -> float:
    """Two-sided p of Student's paired t test that the mean of log ratios is zero.

    Ratios of step times are nearest to normal as logarithms. Ranks would not do here: with five pairs the
    smallest p of Wilcoxon's signed ranks is 0.0625, so no claim could be made at all.

    Args:
        logs: logarithm of the ratio of each pair of runs, one for each repeat.

    Returns:
        1 for fewer than two pairs.
    """
    if len(logs) < 2:
        return 1.0
    return student_p(t_of_mean(logs), len(logs) - 1)


def t_of_mean(values: Sequence[float]) -> float:
    """Student's t of a mean against 0, with one degree of freedom less than values; at least two values."""
    return fmean(values) / (max(stdev(values), ROUNDING) / math.sqrt(len(values)))


def welch_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of Welch's t test (Biometrika 34, 1947) that two independent sides have the same mean.

    Args:
        a: one value for each run of a side.
        b: those of the other.

    Returns:
        1 for fewer than two runs on a side.
    """
    if min(len(a), len(b)) < 2:
        return 1.0
    error, freedom = welch_error(a, b)
    return student_p((fmean(a) - fmean(b)) / error, freedom)


def welch_error(a: Sequence[float], b: Sequence[float]) -> tuple[float, int]:
    """Standard error of the difference of two means, and its degrees of freedom, rounded down (Biometrika 34, 1947).

    Args:
        a: one value for each run of a side, at least two.
        b: those of the other.
    """
    parts = [max(stdev(side), ROUNDING) ** 2 / len(side) for side in (a, b)]
    squares = math.fsum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    return math.sqrt(sum(parts)), math.floor(sum(parts) ** 2 / squares * (1 + 1e-9))


def student_p(t: float, freedom: int) -> float:
    """Two-sided p of Student's t, by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Args:
        t: the statistic.
        freedom: degrees of freedom, from 1.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine2 = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for i in range(freedom // 2):
        total += term
        term *= cosine2 * (2 * i + 2) / (2 * i + 3) if odd else cosine2 * (2 * i + 1) / (2 * i + 2)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - within))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given: a comparison is one of at most 5 % false families below 0.05."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values, in the order given: below q, at most a share q of the claims is false on average.

    Benjamini and Hochberg, JRSS B 57(1), 1995; holds for independent and for positively dependent tests (Benjamini and
    Yekutieli, Annals of Statistics 29, 2001).
    """
    adjusted = [1.0] * len(p_values)
    lowest = 1.0
    ranked = sorted(range(len(p_values)), key=lambda i: p_values[i], reverse=True)
    for above, index in enumerate(ranked):
        lowest = min(lowest, p_values[index] * len(p_values) / (len(p_values) - above))
        adjusted[index] = lowest
    return adjusted


def pooled_freedom(count: int, pairs: float) -> int:
    """Degrees of freedom of the mean of sample variances of log ratios that all have the same baseline.

    4 (n - 1) / (1 + 3/m) by Satterthwaite (Biometrics Bulletin 2, 1946): more settings do not tell more of the noise of
    the baseline, which is half of each variance.

    Args:
        count: m, how many variances.
        pairs: n, pairs of runs behind each; their mean where they differ.
    """
    return max(1, math.floor(4 * (pairs - 1) / (1 + 3 / count)))


def repeats_for(scatter: float, difference: float, comparisons: int, freedom: int | None = None) -> int:
    """Repeats of each setting with which a difference of this size is claimed in at least `POWER` of cases.

    The smallest n of the paired t test at Bonferroni's level for m comparisons, by the non-central t distribution: with
    T = (Z + sqrt(n) log(1 + difference) / scatter) / W, the power is P(T > t(1 - level / (2 m), n - 1)). Where the
    scatter is an estimate, the power is its mean over what the true scatter may be.

    Args:
        scatter: standard deviation of the log ratios of pairs of runs.
        difference: the relative difference to be seen, e.g. 0.02.
        comparisons: how many are made.
        freedom: degrees of freedom of the scatter; None where it is known.
    """
    effect = math.log1p(difference) / max(scatter, ROUNDING)
    tail = LEVEL / (2 * max(1, comparisons))
    effects = [effect * root for root in ([1.0] if freedom is None else _root_quantiles(freedom))]

    def is_enough(pairs: int) -> bool:
        return fmean(_power(pairs, one, tail) for one in effects) >= POWER

    low, high = 2, 3
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _root_quantiles(freedom: int) -> list[float]:
    """Roots of chi-squared / freedom at equally likely places (Wilson and Hilferty, PNAS 17, 1931)."""
    spread = 2 / (9 * freedom)
    normal = NormalDist()
    places = [normal.inv_cdf((i + 0.5) / _SCATTERS) for i in range(_SCATTERS)]
    return [max(0.0, 1 - spread + place * math.sqrt(spread)) ** 1.5 for place in places]


def _power(pairs: int, effect: float, tail: float) -> float:
    """Chance that a mean of normal values, `effect` standard deviations from 0, is called larger at this tail."""
    freedom = pairs - 1
    return noncentral_power(student_quantile(1 - tail, freedom), math.sqrt(pairs) * effect, freedom)


def noncentral_power(critical: float, shift: float, freedom: int) -> float:
    """Chance that Student's noncentral t exceeds a critical t (Cohen, Statistical Power Analysis, 1988, chapter 12).

    P(Z > critical W - shift) over the root W of a mean square, by the midpoint rule on its density,
    w^(freedom - 1) exp(-freedom w^2 / 2).

    Args:
        critical: the t that the test asks for.
        shift: the true difference, in standard errors.
        freedom: degrees of freedom, from 1.
    """
    width = 8 / math.sqrt(2 * freedom)
    begin = max(0.0, 1 - width)
    roots = [begin + (1 + width - begin) * (i + 0.5) / _STEPS for i in range(_STEPS)]
    weights = [math.exp((freedom - 1) * math.log(w) - freedom * (w * w - 1) / 2) for w in roots]
    normal = NormalDist()
    chances = (weight * normal.cdf(shift - critical * w) for weight, w in zip(weights, roots, strict=True))
    return math.fsum(chances) / math.fsum(weights)


@lru_cache(maxsize=4096)
def student_quantile(probability: float, freedom: int) -> float:
    """The t below which Student's distribution holds this probability; inverse of `student_p`, by bisection.

    Args:
        probability: between 0 and 1, exclusive.
        freedom: degrees of freedom, from 1.

    Raises:
        ValueError: `probability` is not between 0 and 1.
    """
    if not 0 < probability < 1:
        raise ValueError(f"no quantile at probability {probability}")
    tail = min(probability, 1 - probability)
    low, high = 0.0, 1.0
    while student_p(high, freedom) / 2 > tail and high < 1e12:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if student_p(middle, freedom) / 2 > tail:
            low = middle
        else:
            high = middle
    return high if probability >= 0.5 else -high
