"""Many comparisons at once: paired tests of single comparisons, and what is left of them when all are counted.

A sweep compares many settings, and the best of many looks better than it is. Intervals are made for each
comparison alone; whether a difference is called one is decided by Holm's step-down procedure (Scandinavian
Journal of Statistics 6, 1979) over all comparisons of a family, so that the chance of any false claim among
them is at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from dlbench.lazy import Array, np

LEVEL = 0.05
"""Chance of any false claim in a family of comparisons."""
POWER = 0.8
"""Chance to see a difference of the wanted size, for the number of repeats that is advised."""

ROUNDING = 1e-6
"""Step times are nanoseconds of some milliseconds: a relative scatter below this is rounding."""

_SCATTERS = 15
"""What the true scatter may be, where it is estimated."""


def paired_p(logs: Sequence[float]) -> float:
    """Two-sided p of Student's paired t test that the mean of log ratios is zero.

    Ratios of step times are nearest to normal as logarithms. Ranks would not do here: with five pairs the
    smallest p of Wilcoxon's signed ranks is 0.0625, so no claim could be made at all.

    `logs`: logarithm of the ratio of each pair of runs, one for each repeat. Returns 1 for fewer than two pairs.
    """
    if len(logs) < 2:
        return 1.0
    return student_p(t_of_mean(logs), len(logs) - 1)


def t_of_mean(values: Sequence[float]) -> float:
    """Student's t of a mean against 0, with one degree of freedom less than values; at least two values."""
    return fmean(values) / (max(stdev(values), ROUNDING) / math.sqrt(len(values)))


def welch_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of Welch's t test (Biometrika 34, 1947) that two independent sides have the same mean. `a`: one value
    for each run of a side. `b`: those of the other. Returns 1 for fewer than two runs on a side.
    """
    if min(len(a), len(b)) < 2:
        return 1.0
    error, freedom = welch_error(a, b)
    return student_p((fmean(a) - fmean(b)) / float(error), float(freedom))


def welch_error(a: Array | Sequence[float], b: Array | Sequence[float]) -> tuple[Array, Array]:
    """Standard error of the difference of two means, and its degrees of freedom (Welch, Biometrika 34, 1947).

    Of sides of unlike many runs the error is that of a pooled variance where that is larger: next to a large side, five
    runs that happen to lie close make Welch's own too small, and a test at 1 % fails in 3 to 5 % of cases where noise
    is one-sided or the machine has two states (`make bench AREA=truth.gate`). Of equally many runs both are the same.

    `a`: one value for each run of a side, shape (..., runs), at least two runs. `b`: those of the other, shape (...,
    runs). Returns both of shape (...).
    """
    sides = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    na, nb = (side.shape[-1] for side in sides)
    squares = [np.maximum(side.var(axis=-1, ddof=1), ROUNDING**2) for side in sides]
    parts = squares[0] / na, squares[1] / nb
    freedom = (parts[0] + parts[1]) ** 2 / (parts[0] ** 2 / (na - 1) + parts[1] ** 2 / (nb - 1))
    pooled = ((na - 1) * squares[0] + (nb - 1) * squares[1]) / (na + nb - 2) * (1 / na + 1 / nb)
    return np.sqrt(np.maximum(parts[0] + parts[1], pooled)), freedom


def student_p(t: float, freedom: float) -> float:
    """Two-sided p of Student's t with this many degrees of freedom."""
    return 2 * student_tail(abs(t), freedom)


def student_tail(t: float, freedom: float) -> float:
    """Chance that Student's t exceeds this: the one-sided p."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def student_quantile(probability: float, freedom: float) -> float:
    """The t below which Student's distribution holds this probability. Raises `ValueError`: `probability` is not
    between 0 and 1.
    """
    from scipy.special import stdtrit

    if not 0 < probability < 1:
        raise ValueError(f"no quantile at probability {probability}")
    return float(stdtrit(freedom, probability))


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

    4 (n - 1) / (1 + 3/m) by Satterthwaite (Biometrics Bulletin 2, 1946): more settings do not say more of the noise of
    the baseline, which is half of each variance.

    `count`: m, how many variances. `pairs`: n, pairs of runs behind each; their mean where they differ.
    """
    return max(1, math.floor(4 * (pairs - 1) / (1 + 3 / count)))


def repeats_for(scatter: float, difference: float, comparisons: int, freedom: int | None = None) -> int:
    """Repeats of each setting with which a difference of this size is claimed in at least `POWER` of cases.

    The smallest n of the paired t test at Bonferroni's level for m comparisons, by the non-central t distribution: with
    T = (Z + sqrt(n) log(1 + difference) / scatter) / W, the power is P(T > t(1 - level / (2 m), n - 1)). Where the
    scatter is an estimate, the power is its mean over what the true scatter may be.

    `scatter`: standard deviation of the log ratios of pairs of runs. `difference`: the relative difference to be seen,
    e.g. 0.02. `comparisons`: how many are made. `freedom`: degrees of freedom of the scatter; None where it is known.
    """
    from scipy.special import chdtri, nctdtr

    effect = math.log1p(difference) / max(scatter, ROUNDING)
    tail = LEVEL / (2 * max(1, comparisons))
    roots = [1.0]
    if freedom is not None:
        roots = [math.sqrt(chdtri(freedom, 1 - (i + 0.5) / _SCATTERS) / freedom) for i in range(_SCATTERS)]
    effects = [effect * root for root in roots]

    def is_enough(pairs: int) -> bool:
        # Of Student's non-central t (Cohen, Statistical Power Analysis, 1988, chapter 12).
        quantile = student_quantile(1 - tail, pairs - 1)
        return fmean(1 - float(nctdtr(pairs - 1, math.sqrt(pairs) * one, quantile)) for one in effects) >= POWER

    low, high = 2, 3
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
