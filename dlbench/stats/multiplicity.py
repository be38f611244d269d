"""Tests of single comparisons, corrections for many, and resampled runs for intervals of fits.

The best of many settings seems better than it is: a difference is claimed by Holm's step-down procedure (Scandinavian
Journal of Statistics 6, 1979) over a family.

In intervals of fits points of one run share its state, so runs are drawn, never points or iterations; runs with equal
keys were interleaved and are drawn together. Each resample's distance from the centre is stretched, as logarithm, by
Student's quantile over the normal one and by sqrt(n / (n - 1)): for a mean that gives Student's t interval (Hesterberg,
The American Statistician 69(4), 2015, expanded percentile interval).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Literal, TypeVar

from dlbench.lazy import Array, np

LEVEL = 0.05  # Probability of any false claim in a family of comparisons.
POWER = 0.8  # Probability to find a difference of the wanted size with the advised number of repeats.
ROUNDING = 1e-6  # Step times are nanoseconds of some milliseconds: a relative scatter below this is rounding.
_SCATTERS = 15  # Number of possible true scatters over which the power is averaged if the scatter is an estimate.
Key = TypeVar("Key", bound=Hashable)
SEED = 20_150_815  # Fixed, so that the same runs give the same interval, byte for byte.
RESAMPLES = 200  # Resamples per fit: enough for the ends of a 95 % interval to within their own scatter.
LEAST_RUNS = 3  # Runs per point that an interval needs: for two, Student's quantile is 12.7.


def paired_p(logs: Sequence[float]) -> float:
    """Returns the two-sided p of Student's paired t test that the mean of log ratios is zero; 1 for fewer than two.

    A rank test could make no claim: with five pairs the smallest p of Wilcoxon's signed ranks is 0.0625.
    """
    if len(logs) < 2:
        return 1.0
    return student_p(t_of_mean(logs), len(logs) - 1)


def t_of_mean(values: Sequence[float]) -> float:
    """Returns Student's t of a mean against 0, with one degree of freedom less than values; at least two values."""
    return fmean(values) / (max(stdev(values), ROUNDING) / math.sqrt(len(values)))


def welch_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p of Welch's t test (Biometrika 34, 1947) of equal means; 1 for a side of one run."""
    if min(len(a), len(b)) < 2:
        return 1.0
    error, freedom = welch_error(a, b)
    return student_p((fmean(a) - fmean(b)) / float(error), float(freedom))


def welch_error(a: Array | Sequence[float], b: Array | Sequence[float]) -> tuple[Array, Array]:
    """Returns the standard error of the difference of two means, and its degrees of freedom, both of shape (...).

    The method is Welch's (Biometrika 34, 1947). With unequal sample sizes the error of the pooled variance is used if
    it is larger: five runs that happen to agree make Welch's error too small next to a large side, and a test at 1 %
    fails in 3 to 5 % of cases with one-sided noise or a machine with two states (`make bench AREA=truth.gate`). `a`,
    `b`: shape (..., runs), at least two runs each.
    """
    sides = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    na, nb = (side.shape[-1] for side in sides)
    squares = [np.maximum(side.var(axis=-1, ddof=1), ROUNDING**2) for side in sides]
    parts = squares[0] / na, squares[1] / nb
    freedom = (parts[0] + parts[1]) ** 2 / (parts[0] ** 2 / (na - 1) + parts[1] ** 2 / (nb - 1))
    pooled = ((na - 1) * squares[0] + (nb - 1) * squares[1]) / (na + nb - 2) * (1 / na + 1 / nb)
    return np.sqrt(np.maximum(parts[0] + parts[1], pooled)), freedom


def student_p(t: float, freedom: float) -> float:
    """Returns the two-sided p of Student's t."""
    return 2 * student_tail(abs(t), freedom)


def student_tail(t: float, freedom: float) -> float:
    """Returns the probability that Student's t exceeds `t`: the one-sided p."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def student_quantile(probability: float, freedom: float) -> float:
    """Returns the quantile of Student's t. Raises `ValueError`: `probability` is not between 0 and 1."""
    from scipy.special import stdtrit

    if not 0 < probability < 1:
        raise ValueError(f"no quantile at probability {probability}")
    return float(stdtrit(freedom, probability))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p values, in the order given: below 0.05, at most 5 % of families have a false claim."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Returns adjusted p values, in the order given: below q, at most a share q of the claims is false on average.

    Benjamini and Hochberg, JRSS B 57(1), 1995; valid for independent and positively dependent tests (Benjamini and
    Yekutieli, Annals of Statistics 29, 2001).
    """
    adjusted = [1.0] * len(p_values)
    lowest = 1.0
    ranked = sorted(range(len(p_values)), key=p_values.__getitem__, reverse=True)
    for above, index in enumerate(ranked):
        lowest = min(lowest, p_values[index] * len(p_values) / (len(p_values) - above))
        adjusted[index] = lowest
    return adjusted


def pooled_freedom(count: int, pairs: float) -> int:
    """Returns the degrees of freedom of the mean of `count` sample variances of log ratios with one baseline.

    4 (n - 1) / (1 + 3/m) by Satterthwaite (Biometrics Bulletin 2, 1946), with m variances of n pairs of runs (their
    mean): more settings give no more information on the noise of the baseline, which is half of each variance.
    """
    return max(1, math.floor(4 * (pairs - 1) / (1 + 3 / count)))


def repeats_for(scatter: float, difference: float, comparisons: int, freedom: int | None = None) -> int:
    """Returns the repeats per setting with which a difference of this size is claimed in at least `POWER` of cases.

    The smallest n of the paired t test at Bonferroni's level for m comparisons, by the non-central t distribution: with
    T = (Z + sqrt(n) log(1 + difference) / scatter) / W, the power is P(T > t(1 - level / (2 m), n - 1)), the mean over
    possible true scatters if the scatter is an estimate with `freedom` degrees of freedom.

    `scatter`: standard deviation of the log ratios of pairs of runs. `difference`: relative, e.g. 0.02. `comparisons`:
    m.
    """
    from scipy.special import chdtri, nctdtr

    effect = math.log1p(difference) / max(scatter, ROUNDING)
    tail = LEVEL / (2 * max(1, comparisons))
    roots = [1.0]
    if freedom is not None:
        roots = [math.sqrt(chdtri(freedom, 1 - (i + 0.5) / _SCATTERS) / freedom) for i in range(_SCATTERS)]
    effects = [effect * root for root in roots]

    def is_enough(pairs: int) -> bool:
        # Student's non-central t (Cohen, Statistical Power Analysis, 1988, chapter 12).
        quantile = student_quantile(1 - tail, pairs - 1)
        return fmean(1 - float(nctdtr(pairs - 1, math.sqrt(pairs) * effect, quantile)) for effect in effects) >= POWER

    count = 3
    while not is_enough(count):
        count *= 2
    return bisect_left(range(count), True, lo=max(3, count // 2 + 1), key=is_enough)


def stretch(runs: int) -> float:
    """Returns the factor by which deviations of resamples of this many runs (two or more) are stretched."""
    return student_quantile(0.975, runs - 1) / NormalDist().inv_cdf(0.975) * math.sqrt(runs / (runs - 1))


def resampled(
    points: Sequence[Mapping[Key, float]], *, centre: Literal["median", "geometric mean"], resamples: int = RESAMPLES
) -> Array | None:
    """Returns the centre over runs of each point in each resample, shape (resamples, points).

    `points`: for each point a positive value per run, by a key that interleaved runs share; None with too few runs.
    """
    if min(map(len, points), default=0) < LEAST_RUNS:
        return None
    middle = np.nanmedian if centre == "median" else np.nanmean
    centres_by_point = np.empty((resamples, len(points)))
    for number, (keys, members) in enumerate(_linked_points(points)):
        column_by_key = {key: column for column, key in enumerate(keys)}
        logs = np.full((len(members), len(keys)), np.nan)
        for row, member in enumerate(members):
            for key, value in points[member].items():
                logs[row, column_by_key[key]] = math.log(value)
        picks = np.random.default_rng([SEED, number]).integers(0, len(keys), size=(resamples, len(keys)))
        centres = middle(logs, axis=1)
        drawn = logs[:, picks]
        # A point with fewer runs, none of which was drawn, keeps its centre.
        missed = np.isnan(drawn).all(axis=2)
        drawn[missed, 0] = np.broadcast_to(centres[:, None], missed.shape)[missed]
        factor = np.array([stretch(len(points[member])) for member in members])[:, None]
        centres_by_point[:, members] = np.exp(centres[:, None] + factor * (middle(drawn, axis=2) - centres[:, None])).T
    return centres_by_point


def _linked_points(points: Sequence[Mapping[Key, float]]) -> list[tuple[list[Key], list[int]]]:
    """Returns groups of points that share keys, directly or by other points: the keys and the indices of the points."""
    groups: list[tuple[set[Key], list[int]]] = []
    for index, point in enumerate(points):
        keys, members = set(point), [index]
        unlinked = []
        for group_keys, group_members in groups:
            if keys & group_keys:
                keys, members = keys | group_keys, [*group_members, *members]
            else:
                unlinked.append((group_keys, group_members))
        groups = [*unlinked, (keys, members)]
    return [(sorted(keys, key=repr), members) for keys, members in groups]
