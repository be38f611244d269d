"""Estimates over repeated runs: a value with an interval and how the interval was made.

The experimental unit is the run, never the step: steps of one run are not independent (Hoefler and Belli, SC'15, rule 6
and section 3.1.3). If runs come from several sessions (`dlbench.stats.pairing.KnownKey`), the unit of an interval is
the session, with the mean or median of its runs; the value itself is always over runs, so that all figures of the same
runs agree. Intervals of one session are valid only within it.

Simulated coverage of the 95 % interval of Student's t for 5 to 20 runs (`make bench AREA=truth.intervals`): normal and
long-tailed noise 94 to 97 %; run times in two states of a machine 91 to 97 %; noise that only slows runs 87 to 92 % for
a mean, 95 % and more for a difference of two sides with the same noise.

An interval that contains an end of a region decides nothing. A 95 % interval within a margin is the two one-sided tests
of equivalence at 2.5 % each (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from statistics import fmean, variance
from typing import Literal

from dlbench.lazy import Array, np
from dlbench.stats.multiplicity import LEVEL as FAMILY_LEVEL
from dlbench.stats.multiplicity import paired_p, pooled_freedom, student_quantile, welch_error, welch_p
from dlbench.stats.pairing import Pairing, RunKey, in_all, pairing, session_of

LEVEL = 0.95
_EXACT_PAIRS = 400  # Pairs of runs up to which the distribution of rank sums is counted; beyond it is nearly normal.

Kind = Literal[  # `within-run`: middle half of the iterations of a single run; `fit`: of a fitted parameter.
    "Student t",
    "order statistics",
    "rank sums",
    "bootstrap",
    "range",
    "single run",
    "by definition",
    "within-run",
    "fit",
]

Values = Sequence[float] | Mapping[RunKey, float]  # One value for each run; by keys if the sessions of the runs count.

MIN_RUNS = 5  # With fewer runs (or sessions, if several) there is no 95 % interval and no comparison.

Placed = Literal["below", "within", "above", "undecided", "insufficient"]
"""below, within, above: position of the whole interval, each false in at most 5 % of cases (2.5 % for one end).
undecided: it contains an end of the region. insufficient: fewer than `MIN_RUNS` runs or sessions."""


def interval_of_mean(values: Array) -> tuple[Array, Array]:
    """Returns the ends of the 95 % interval of the mean, shape (...), of two runs or more, shape (..., runs)."""
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    half = student_quantile((1 + LEVEL) / 2, n - 1) * np.sqrt(values.var(axis=-1, ddof=1) / n)
    return mean - half, mean + half


def interval_of_difference(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the ends of the 95 % interval of mean(a) - mean(b), for independent sides with unequal variances."""
    from scipy.special import stdtrit

    difference = a.mean(axis=-1) - b.mean(axis=-1)
    error, freedom = welch_error(a, b)
    half = stdtrit(freedom, (1 + LEVEL) / 2) * error
    return difference - half, difference + half


def range_level(n: int) -> float:
    """Returns the level of the range of n values as an interval of their centre, for symmetric noise: 1 - 2^(1 - n)."""
    return 1 - 2.0 ** (1 - n)


@cache
def places(n: int, level: float = LEVEL) -> tuple[int, float]:
    """Returns k, so that the k-th smallest and k-th largest of n values bound the median, and the attained level.

    The number of runs below the median is binomial: the level is 1 - 2 P(fewer than k of n) (Hahn and Meeker,
    Statistical Intervals, 1991). k is the largest whose level is not below `level`, or 1 if there is none; `n` is at
    least 2.
    """
    outcomes = 2**n
    allowed = math.floor(Fraction(1 - level) / 2 * outcomes)
    tail, k = 1, 1
    while tail + math.comb(n, k) <= allowed:
        tail += math.comb(n, k)
        k += 1
    return k, 1 - 2 * tail / outcomes


def rank_sum_level(na: int, nb: int, level: float) -> float:
    """Returns the level that `rank_sums` attains for a requested `level`."""
    count, tail = _rank_sums_beyond(na, nb, (1 - level) / 2)
    if not count:
        tail = 1 / math.comb(na + nb, na)
    return 1 - 2 * tail


def rank_sums(a: Array, b: Array, level: float) -> tuple[Array, Array]:
    """Returns the interval of the shift of `a` against `b`, shape (..., runs), by Wilcoxon's rank sum test, or the
    range.

    The ends are two of the ordered differences between the sides (Moses 1953; Lehmann, Nonparametrics, 1975, section
    2.6).
    """
    differences = (a[..., :, None] - b[..., None, :]).reshape(*a.shape[:-1], -1)
    last = differences.shape[-1] - 1
    below = max(0, _rank_sums_beyond(a.shape[-1], b.shape[-1], (1 - level) / 2)[0] - 1)
    ends = np.partition(differences, (below, last - below), axis=-1)
    return ends[..., below], ends[..., last - below]


@cache
def _rank_sums_beyond(na: int, nb: int, tail: float) -> tuple[int, float]:
    """Returns how many of the smallest Mann-Whitney statistics have at most the probability `tail`, and theirs."""
    if na * nb > _EXACT_PAIRS:
        from statistics import NormalDist

        sigma = math.sqrt(na * nb * (na + nb + 1) / 12)
        return (max(0, math.floor(na * nb / 2 + NormalDist().inv_cdf(tail) * sigma + 0.5)), tail)
    size = na * nb + 1
    # Row j: probabilities of the statistic of i runs against j; i grows with the outer loop.
    rows = [np.eye(1, size)[0] for _ in range(nb + 1)]
    for i in range(1, na + 1):
        for j in range(1, nb + 1):
            last_of_a = np.concatenate([np.zeros(j), rows[j][: size - j]])
            rows[j] = (i * last_of_a + j * rows[j - 1]) / (i + j)
    tails = np.cumsum(rows[nb])
    count = int(np.searchsorted(tails, tail * (1 + 1e-9), side="right"))
    if not count:
        return 0, 0.0
    return count, float(tails[count - 1])


@dataclass(frozen=True)
class Estimate:
    """A value with its interval or range (smallest and largest value); a single run or a definition has neither."""

    value: float
    low: float | None
    high: float | None
    n: int  # Number of runs; for a ratio or a difference, runs (or pairs of runs) of each side.
    kind: Kind
    unit: str = ""
    """`images/s` (or another sample unit per second), `images/s/rank`, `TFLOP/s/rank`, `GB/s`, `s`, `fraction`,
    `ratio`, `samples`, `epochs`, `error` (a mean absolute error), `bytes`, `messages`, `loss`, `J`, `W`."""
    level: float | None = None
    """Confidence level of the interval, a fraction; None for the range of values that are no repeats."""
    unpaired: int = 0  # Runs that were left out because the other side has no run of the same repeat.
    sessions: int | None = None
    """Sessions of the runs, of the side with fewer; the units of the interval if there are several. None: not known."""
    is_across_sessions: bool = False
    """Whether the sides ran in different sessions and one has a single session: the interval lacks their difference."""

    @property
    def units(self) -> int:
        """The number of units of the interval: sessions if there are several, else runs."""
        if self.sessions is None or self.sessions == 1:
            return self.n
        return self.sessions

    @property
    def is_confident(self) -> bool:
        """True if its interval is a confidence interval, of `MIN_RUNS` runs or more."""
        return self.kind in ("Student t", "order statistics", "rank sums", "bootstrap")

    def in_unit(self, unit: str) -> Estimate:
        return replace(self, unit=unit)

    def holding(self, value: float) -> Estimate:
        """Returns the estimate with this value, and an interval that holds it."""
        if self.low is None or self.high is None:
            return replace(self, value=value)
        return replace(self, value=value, low=min(self.low, value), high=max(self.high, value))

    def mapped(self, function: Callable[[float], float], unit: str) -> Estimate:
        """Returns the estimate of `function`, which is monotone over the interval."""
        if self.low is None or self.high is None:
            return replace(self, value=function(self.value), unit=unit)
        low, high = sorted((function(self.low), function(self.high)))
        return replace(self, value=function(self.value), low=low, high=high, unit=unit)

    def inverted(self, unit: str) -> Estimate:
        return self.mapped(lambda value: 1 / value, unit)

    def scaled(self, factor: float, unit: str = "") -> Estimate:
        """Returns the estimate times a positive factor, e.g. a speed-up as an efficiency."""
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"cannot scale an estimate by {factor}")
        return self.mapped(lambda value: value * factor, unit)


def median_estimate(values: Values, unit: str = "") -> Estimate:
    """Returns the median over runs, with the interval by order statistics or the range of few runs.

    Its level is the smallest from 95 % that is attained (five runs: their range, 93.75 %).
    """
    return _over_runs(values, unit, "order statistics")


def mean_estimate(values: Values, unit: str = "") -> Estimate:
    """Returns the mean over runs, for values that must sum, with Student's t interval or the range of few runs."""
    return _over_runs(values, unit, "Student t")


def _over_runs(values: Values, unit: str, kind: Kind) -> Estimate:
    array, sessions = _checked(values), _sessions(values)
    is_median = kind == "order statistics"
    value = float(np.median(array) if is_median else array.mean())
    units = _by_session(array, sessions, statistics.median if is_median else statistics.fmean)
    num_sessions = _count(sessions)
    n, level = len(units), LEVEL
    if n == 1:
        return Estimate(value, None, None, 1, "single run", unit, sessions=num_sessions)
    if n < MIN_RUNS:
        low, high, kind, level = units.min(), units.max(), "range", range_level(n)
    elif kind == "Student t":
        low, high = interval_of_mean(units)
    else:
        k, level = places(n)
        low, high = np.sort(units)[[k - 1, n - k]]
    return interval(value, low, high, len(array), kind, unit, level=level, sessions=num_sessions)


def geometric_mean_estimate(values: Values, unit: str = "") -> Estimate:
    """Returns the geometric mean over runs, for factors that must multiply: `mean_estimate` of the logarithms."""
    if not isinstance(values, Mapping):
        values = {("", number): value for number, value in enumerate(values)}
    return mean_estimate(_logarithms(values)).mapped(math.exp, unit)


def typical_estimate(values: Values, unit: str = "") -> Estimate:
    """Returns the geometric mean over runs, consistent with `ratio_estimate`; the median if some run has 0."""
    if min(_plain(values)) > 0:
        return geometric_mean_estimate(values, unit)
    return median_estimate(values, unit)


def difference_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], unit: str = "") -> Estimate:
    """Returns mean(top) - mean(bottom); each side has one value for each run, by block and repeat.

    If the sides are paired (`dlbench.stats.pairing`), it is the `mean_estimate` of the differences of the pairs: drift
    that affects both sides cancels. For independent sides the interval is Welch's t with five runs per side, with fewer
    the range of all differences, with a single run none. Raises `ValueError`: a side is empty or not finite.
    """
    pairs = pairing(top, bottom)
    if pairs.is_paired:
        return replace(mean_estimate(_of_pairs(pairs, top, bottom), unit), unpaired=pairs.left_out)
    value, n = float(_checked(top).mean() - _checked(bottom).mean()), min(len(top), len(bottom))
    a, b, num_sessions = _independent_units(top, bottom)
    units = min(len(a), len(b))
    is_across = num_sessions == 1 and (_count([*_sessions(top), *_sessions(bottom)]) or 1) > 1
    if units == 1:
        return Estimate(value, None, None, 1, "single run", unit, sessions=num_sessions, is_across_sessions=is_across)
    kind: Kind
    if units < MIN_RUNS:
        # If one side has no noise, the range is that of the other; equal noise on both would attain a higher level.
        low, high, kind, level = a.min() - b.max(), a.max() - b.min(), "range", range_level(units)
    else:
        (low, high), kind, level = map(float, interval_of_difference(a, b)), "Student t", LEVEL
    estimate = interval(value, low, high, n, kind, unit, level=level, sessions=num_sessions)
    return replace(estimate, is_across_sessions=is_across)


def difference_p(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> float:
    """Returns the two-sided p of equal means that belongs to the interval of `difference_estimate`; 1 for few units."""
    pairs = pairing(top, bottom)
    if not pairs.is_paired:
        a, b, _ = _independent_units(top, bottom)
        return welch_p(a.tolist(), b.tolist())
    return paired_p(means_of(_of_pairs(pairs, top, bottom)))


def ratio_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], unit: str = "ratio") -> Estimate:
    """Returns the ratio of two geometric means over runs, top / bottom: `difference_estimate` of the logarithms.

    Only geometric means keep products: if x = y z in each run, it is true of the means, and the ratio of two means is
    the geometric mean of the ratios of the pairs (Fleming and Wallace, CACM 29(3), 1986). Values must be positive.
    """
    return difference_estimate(_logarithms(top), _logarithms(bottom)).mapped(math.exp, unit)


def shift_estimate(top: Sequence[float], bottom: Sequence[float]) -> Estimate:
    """Returns the ratio by which one side is shifted against the other, robust to outliers.

    The value is Hodges and Lehmann's: the median of the ratios of every value of one side to every value of the other
    (Annals of Mathematical Statistics 34, 1963). The interval is the inverted rank sum test, at the smallest level from
    95 % that it attains; with fewer than `MIN_RUNS` values per side the range of those ratios. Values must be positive.
    """
    a, b = (np.log(_checked(side, above=0.0)) for side in (top, bottom))
    value, n = math.exp(float(np.median(np.subtract.outer(a, b)))), min(len(a), len(b))
    if n == 1:
        return Estimate(value, None, None, 1, "single run", "ratio")
    if n < MIN_RUNS:
        ends = math.exp(a.min() - b.max()), math.exp(a.max() - b.min())
        return interval(value, *ends, n, "range", "ratio", level=range_level(n))
    low, high = (math.exp(float(end)) for end in rank_sums(a, b, LEVEL))
    return interval(value, low, high, n, "rank sums", "ratio", level=rank_sum_level(len(a), len(b), LEVEL))


def of_known(
    make: Callable[[Values, str], Estimate], values: Mapping[RunKey, float | None], unit: str
) -> Estimate | None:
    """Returns the estimate of the values that are not None; None if all are. `make`: e.g. `median_estimate`."""
    known_values = {key: float(value) for key, value in values.items() if value is not None}
    return make(known_values, unit) if known_values else None


def by_definition(value: float, n: int, unit: str = "ratio") -> Estimate:
    """Returns a value that is not measured but defined, such as the baseline's speed-up of 1."""
    return Estimate(value, None, None, n, "by definition", unit)


def interval(  # noqa: PLR0913 - the fields of an Estimate
    value: float,
    low: float,
    high: float,
    n: int,
    kind: Kind,
    unit: str = "",
    *,
    level: float | None = None,
    sessions: int | None = None,
) -> Estimate:
    """Returns an estimate whose interval contains its value, despite rounding or sessions of unequal size."""
    return Estimate(value, float(low), float(high), n, kind, unit, level, sessions=sessions).holding(value)


def _plain(values: Values) -> list[float]:
    return list(values.values()) if isinstance(values, Mapping) else list(values)


def _checked(values: Values, above: float = -math.inf) -> Array:
    array = np.asarray(_plain(values), dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"an estimate needs finite values, got {array.tolist()}")
    if (array <= above).any():
        raise ValueError("a ratio needs positive values")
    return array


def _logarithms(values: Mapping[RunKey, float]) -> dict[RunKey, float]:
    return {key: math.log(value) for key, value in zip(values, _checked(values, above=0.0), strict=True)}


def _sessions(values: Values) -> list[str | None]:
    if not isinstance(values, Mapping):
        return [None] * len(values)
    return [session_of(key) for key in values]


def _count(sessions: Sequence[str | None]) -> int | None:
    """Returns the number of different sessions; None if one is not known."""
    return None if None in sessions else len(set(sessions))


def _of_pairs(pairs: Pairing, top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> dict[RunKey, float]:
    differences = _checked(pairs.of(top)) - _checked(pairs.of(bottom))
    return dict(zip(in_all(top, bottom), differences.tolist(), strict=True))


def _independent_units(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> tuple[Array, Array, int | None]:
    """Returns the units of both sides, session means if both have several, and the fewer sessions of a side."""
    a, b = _checked(top), _checked(bottom)
    sessions_a, sessions_b = _sessions(top), _sessions(bottom)
    count_a, count_b = _count(sessions_a), _count(sessions_b)
    if count_a is None or count_b is None:
        return a, b, None
    if min(count_a, count_b) > 1:
        a = _by_session(a, sessions_a, statistics.fmean)
        b = _by_session(b, sessions_b, statistics.fmean)
    return a, b, min(count_a, count_b)


def means_of(values: Mapping[RunKey, float]) -> list[float]:
    """Returns the units of the interval of a mean: the mean of each session if there are several, else the runs."""
    means: list[float] = _by_session(_checked(values), _sessions(values), statistics.fmean).tolist()
    return means


def paired_logs(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> dict[RunKey, float]:
    """Returns log(top / bottom) of the runs that both sides have, with the sessions of both."""
    shared = sorted(top.keys() & bottom.keys())
    if not shared:
        return {}
    top_logs = {key: math.log(value) for key, value in top.items() if key in bottom}
    bottom_logs = {key: math.log(value) for key, value in bottom.items() if key in top}
    return _of_pairs(Pairing(tuple(shared), 0), top_logs, bottom_logs)


def _by_session(array: Array, sessions: Sequence[str | None], centre: Callable[[list[float]], float]) -> Array:
    """Returns the centre of each session's runs, in order of appearance; the runs themselves of a single session."""
    if (_count(sessions) or 1) == 1:
        return array
    values_by_session: dict[str | None, list[float]] = {}
    for value, session in zip(array.tolist(), sessions, strict=True):
        values_by_session.setdefault(session, []).append(value)
    return np.array([centre(runs) for runs in values_by_session.values()])


def placed(estimate: Estimate, low: float, high: float) -> Placed:
    """Returns the position of the true value relative to the region `low` to `high`, if the interval decides it."""
    if estimate.low is None or estimate.high is None or estimate.n < MIN_RUNS or estimate.kind == "range":
        return "insufficient"
    if estimate.low > high:
        return "above"
    if estimate.high < low:
        return "below"
    return "within" if low <= estimate.low and estimate.high <= high else "undecided"


def is_other_than(estimate: Estimate, value: float) -> bool:
    """Returns whether the interval excludes a value."""
    return placed(estimate, value, value) in ("below", "above")


def gain_of_best(logs: Sequence[Sequence[float]], best: int) -> Estimate:
    """Returns the 95 % estimate of the ratio of the best setting to the baseline that all settings share.

    Low end: `mean - t(1 - 0.025/m) s`, simultaneous over the m settings (Bonferroni), because any of them may have been
    lifted to the top by luck. High end: `mean + t(1 - 0.025) s` without a correction, because the best lies above what
    was measured of the truly best one (Fuentes, Casella and Wells, Electronic Journal of Statistics 12, 2018;
    Benjamini, Hechtlinger and Stark, arXiv:1906.00505). The value is the middle of both. s is the pooled scatter of all
    settings, because five repeats of one estimate it badly, or that of the chosen setting if larger.

    `logs`: logarithms of each setting's ratios to the baseline in pairs of runs; settings with one pair do not count.
    `best`: index of the chosen setting, which has `MIN_RUNS` pairs.
    """
    best_logs = logs[best]
    if len(best_logs) < MIN_RUNS:
        raise ValueError(f"{len(best_logs)} pairs of runs, fewer than {MIN_RUNS}, have no interval")
    repeated = [setting_logs for setting_logs in logs if len(setting_logs) > 1]
    m, mean = len(repeated), fmean(best_logs)
    pairs = 1 + fmean(len(setting_logs) - 1 for setting_logs in repeated)
    weights = sum(len(setting_logs) - 1 for setting_logs in repeated)
    pooled = math.fsum((len(setting_logs) - 1) * variance(setting_logs) for setting_logs in repeated) / weights
    error = math.sqrt(max(pooled, variance(best_logs)) / len(best_logs))
    freedom = pooled_freedom(m, pairs)
    low = mean - student_quantile(1 - FAMILY_LEVEL / (2 * m), freedom) * error
    high = mean + student_quantile(1 - FAMILY_LEVEL / 2, freedom) * error
    middle, level = math.exp((low + high) / 2), 1 - FAMILY_LEVEL
    return interval(middle, math.exp(low), math.exp(high), len(best_logs), "Student t", "ratio", level=level)


def between_and_within(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Returns the standard deviations between and within groups; None for one group, or if no group has two values.

    The estimators of a one-way analysis of variance with random effects and groups of any size (Searle, Casella and
    McCulloch, Variance Components, 1992, section 3.6).
    """
    total, count = sum(map(len, groups)), len(groups)
    if count < 2 or total == count:
        return None
    means = [fmean(group) for group in groups]
    centre = fmean(itertools.chain.from_iterable(groups))
    within = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    between = sum(len(group) * (mean - centre) ** 2 for group, mean in zip(groups, means, strict=True))
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (count - 1)
    residual = within / (total - count)
    return math.sqrt(max(0.0, (between / (count - 1) - residual) / size)), math.sqrt(residual)
