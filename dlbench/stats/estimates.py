"""Values of repeated runs become an estimate: a value with an interval that says how it was made.

The experimental unit is the run, never the step: steps of one run are not independent, and pooling
them calls differences real that are not (Hoefler and Belli, SC'15, rule 6 and section 3.1.3). Where runs come from
several sessions, and their keys know that (`dlbench.stats.pairing.KnownKey`), the unit of an interval is the session:
its value is the mean (or median) of its runs, and an interval is made of sessions as else of runs. What is estimated
stays the same over runs, so that all figures of the same runs agree. Intervals of one session hold within it.

What "95 %" of Student's t holds of 5 to 20 runs, simulated (`make bench AREA=truth.intervals`): for normal and
long-tailed noise 94 to 97 %; where run times fall into two states of a machine 91 to 97 %; where noise only ever slows
a run, a mean alone 87 to 92 % and a difference of two sides with the same noise 95 % and more. No interval helps where
a slow state is so rare that no run has met it.

Verdicts are read from an interval. An interval that reaches over an end of the region decides nothing. To take it for
agreement would call noise agreement: the noisier the runs, the more alike everything would be. That a whole interval at
95 % lies within a margin is the two one-sided tests of equivalence at 2.5 % each (Schuirmann, Journal of
Pharmacokinetics and Biopharmaceutics 15, 1987).
"""

from __future__ import annotations

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
_EXACT_PAIRS = 400
"""Up to this many pairs of runs the distribution of rank sums is counted; beyond it is as good as normal."""

Kind = Literal[
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
"""How an interval was made. `within-run`: the middle half of the iterations of a single run; `fit`: of a fitted
parameter."""

Values = Sequence[float] | Mapping[RunKey, float]
"""One value for each run; by keys where the sessions of runs are to count."""

MIN_RUNS = 5
"""Fewer runs, or sessions where there are several, carry no interval of about 95 %, and no comparison."""

Placed = Literal["below", "within", "above", "undecided", "insufficient"]
"""below, within, above: the whole interval does, so that each is false in at most 5 % of cases (of 2.5 %, for one end).
undecided: it reaches over an end of the region. insufficient: fewer than `MIN_RUNS` runs, or sessions where there are
several, have no interval of a level.
"""


def interval_of_mean(values: Array) -> tuple[Array, Array]:
    """Low and high ends of the 95 % interval of the mean, shape (...), of two runs or more, shape (..., runs)."""
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    half = student_quantile((1 + LEVEL) / 2, n - 1) * np.sqrt(values.var(axis=-1, ddof=1) / n)
    return mean - half, mean + half


def interval_of_difference(a: Array, b: Array) -> tuple[Array, Array]:
    """The same of the mean of `a` less that of `b`, independent sides whose noise may differ in size."""
    from scipy.special import stdtrit

    difference = a.mean(axis=-1) - b.mean(axis=-1)
    error, freedom = welch_error(a, b)
    half = stdtrit(freedom, (1 + LEVEL) / 2) * error
    return difference - half, difference + half


def range_level(n: int) -> float:
    """The level of the range of n values as an interval of their centre, for symmetric noise: 1 - 2^(1 - n)."""
    return 1 - 2.0 ** (1 - n)


@cache
def places(n: int, level: float = LEVEL) -> tuple[int, float]:
    """Which of n ordered values, counted from either end, bound the median, and the level that this attains.

    The number of runs below the median is binomial, so from the k-th smallest value to the k-th largest the level is
    1 - 2 P(fewer than k of n) (Hahn and Meeker, Statistical Intervals, 1991; Hoefler and Belli, SC'15, 3.1.2).

    `n`: how many values, at least 2. Returns k, from 1, with the smallest attained level that is not below `level`;
    k = 1 where none reaches it.
    """
    outcomes = 2**n
    allowed = math.floor(Fraction(1 - level) / 2 * outcomes)
    tail, k = 1, 1
    while tail + math.comb(n, k) <= allowed:
        tail += math.comb(n, k)
        k += 1
    return k, 1 - 2 * tail / outcomes


def rank_sum_level(na: int, nb: int, level: float) -> float:
    """The level that `rank_sums` attains where `level` is wanted."""
    places, tail = _rank_sums_beyond(na, nb, (1 - level) / 2)
    return 1 - 2 * (tail if places else 1 / math.comb(na + nb, na))


def rank_sums(a: Array, b: Array, level: float) -> tuple[Array, Array]:
    """Ends of the interval of the shift of `a` against `b` by Wilcoxon's rank sum test, of the range if it has none.

    The ends are two of the ordered differences between a run of one side and one of the other (Moses 1953; Lehmann,
    Nonparametrics, 1975, section 2.6). Holds for noise of equal shape on both sides.

    `a`: one value for each run of a side, shape (..., runs). `b`: those of the other, shape (..., runs). `level`:
    between 0 and 1. Returns low and high ends, shape (...).
    """
    differences = (a[..., :, None] - b[..., None, :]).reshape(*a.shape[:-1], -1)
    last = differences.shape[-1] - 1
    below = max(0, _rank_sums_beyond(a.shape[-1], b.shape[-1], (1 - level) / 2)[0] - 1)
    ends = np.partition(differences, (below, last - below), axis=-1)
    return ends[..., below], ends[..., last - below]


@cache
def _rank_sums_beyond(na: int, nb: int, tail: float) -> tuple[int, float]:
    """How many of the smallest values of the Mann-Whitney statistic have at most this probability; and theirs."""
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
    places = int(np.searchsorted(tails, tail * (1 + 1e-9), side="right"))
    return places, float(tails[places - 1]) if places else 0.0


@dataclass(frozen=True)
class Estimate:
    """A value and how far to trust it. `low` and `high` are the ends of its interval or, of kind `range`, the smallest
    and largest value seen; both are None for a single run and for values that hold by definition, such as the
    efficiency of the baseline.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    """Runs behind the value; for a ratio or a difference, runs (or pairs of runs) behind each side."""
    kind: Kind
    unit: str = ""
    """`images/s` (or another sample unit per second), `images/s/rank`, `TFLOP/s/rank`, `GB/s`, `s`, `fraction`,
    `ratio`, `samples`, `epochs`, `error` (a mean absolute error), `bytes`, `messages`, `loss`, `J`, `W`."""
    level: float | None = None
    """Confidence of the interval, a fraction: how often intervals made in this way hold the true value. None where
    there is none, as for the range of values that are no repeats."""
    unpaired: int = 0
    """Runs that were left out because the other side has no run of the same repeat."""
    sessions: int | None = None
    """Sessions of these runs, of the side with fewer; of two or more the interval is made, of one it holds within it.
    None: not known."""
    is_across_sessions: bool = False
    """Whether its sides are of different sessions though one is of a single one: how far sessions differ is in the
    ratio and not in its interval."""

    @property
    def units(self) -> int:
        """What its interval is made of: sessions where there are several, else runs."""
        return self.sessions if self.sessions is not None and self.sessions > 1 else self.n

    @property
    def is_confident(self) -> bool:
        """Whether its interval is one of confidence, from `MIN_RUNS` runs or more."""
        return self.kind in ("Student t", "order statistics", "rank sums", "bootstrap")

    def in_unit(self, unit: str) -> Estimate:
        return replace(self, unit=unit)

    def holding(self, value: float) -> Estimate:
        """Returns the estimate with this value, and an interval that holds it."""
        if self.low is None or self.high is None:
            return replace(self, value=value)
        return replace(self, value=value, low=min(self.low, value), high=max(self.high, value))

    def mapped(self, function: Callable[[float], float], unit: str) -> Estimate:
        """The estimate of a function of what is estimated; ends change places where it falls. `function`: monotone over
        the interval.
        """
        if self.low is None or self.high is None:
            return replace(self, value=function(self.value), unit=unit)
        low, high = sorted((function(self.low), function(self.high)))
        return replace(self, value=function(self.value), low=low, high=high, unit=unit)

    def inverted(self, unit: str) -> Estimate:
        """1 / value, in `unit`; the ends of the interval change places. Raises `ZeroDivisionError`: the value or an end
        of the interval is 0.
        """
        return self.mapped(lambda value: 1 / value, unit)

    def scaled(self, factor: float, unit: str = "") -> Estimate:
        """The same estimate in another unit, e.g. a speed-up as an efficiency. Raises `ValueError`: `factor` is not a
        positive number.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"cannot scale an estimate by {factor}")
        return self.mapped(lambda value: value * factor, unit)


def median_estimate(values: Values, unit: str = "") -> Estimate:
    """The median over runs.

    Five runs or more: two of the ordered values, at the level nearest to 95 % from above that order statistics attain;
    the range at its own level, 93.75 %, of five. Two to four runs: the range. One run: no interval.

    `values`: one finite value for each run, in any order. Raises `ValueError`: no values, or one that is not finite.
    """
    array, sessions = _checked(values), _sessions(values)
    value, ordered = float(np.median(array)), np.sort(_of_sessions(array, sessions, statistics.median))
    n, known = len(ordered), _count(sessions)
    if n == 1:
        return Estimate(value, None, None, 1, "single run", unit, sessions=known)
    kind: Kind
    if n < MIN_RUNS:
        low, high, kind, level = ordered[0], ordered[-1], "range", range_level(n)
    else:
        k, level = places(n)
        low, high, kind = ordered[k - 1], ordered[n - k], "order statistics"
    return interval(value, low, high, len(array), kind, unit, level=level, sessions=known)


def mean_estimate(values: Values, unit: str = "") -> Estimate:
    """The mean over runs, for values that must sum.

    Five runs or more: Student's t. Two to four runs: the range. One run: no interval.

    `values`: one finite value for each run, in the order of the runs. Raises `ValueError`: no values, or one that is
    not finite.
    """
    array, sessions = _checked(values), _sessions(values)
    value, units = float(array.mean()), _of_sessions(array, sessions, statistics.fmean)
    n, known = len(units), _count(sessions)
    if n == 1:
        return Estimate(value, None, None, 1, "single run", unit, sessions=known)
    kind: Kind
    if n < MIN_RUNS:
        low, high, kind, level = units.min(), units.max(), "range", range_level(n)
    else:
        (low, high), kind, level = map(float, interval_of_mean(units)), "Student t", LEVEL
    return interval(value, low, high, len(array), kind, unit, level=level, sessions=known)


def geometric_mean_estimate(values: Values, unit: str = "") -> Estimate:
    """The geometric mean over runs, for factors that must multiply: `mean_estimate` of the logarithms. Raises
    `ValueError`: no values, or one that is not positive and finite.
    """
    by_run = values if isinstance(values, Mapping) else {("", number): value for number, value in enumerate(values)}
    return mean_estimate(_logarithms(by_run)).mapped(math.exp, unit)


def typical_estimate(values: Values, unit: str = "") -> Estimate:
    """The geometric mean over runs, whose ratios are those of `ratio_estimate`; the median where some run has 0. Raises
    `ValueError`: no values, or one that is not finite.
    """
    least = min(values.values() if isinstance(values, Mapping) else values)
    return (geometric_mean_estimate if least > 0 else median_estimate)(values, unit)


def difference_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], unit: str = "") -> Estimate:
    """The mean of one side less that of the other.

    Where the sides are paired (`dlbench.stats.pairing`), the mean of the differences of the pairs, as `mean_estimate`:
    what drifts with both sides cancels. Otherwise of independent sides: Welch's t interval from five runs a side; with
    fewer the range of all differences; for a single run none.

    `top`: one value for each run, by block and repeat. Raises `ValueError`: a side is empty or holds a value that is
    not finite.
    """
    pairs = pairing(top, bottom)
    if pairs.is_paired:
        return replace(mean_estimate(_of_pairs(pairs, top, bottom), unit), unpaired=pairs.left_out)
    value, n = float(_checked(top).mean() - _checked(bottom).mean()), min(len(top), len(bottom))
    a, b, known = _apart(top, bottom)
    units = min(len(a), len(b))
    is_across = known == 1 and (_count([*_sessions(top), *_sessions(bottom)]) or 1) > 1
    if units == 1:
        return Estimate(value, None, None, 1, "single run", unit, sessions=known, is_across_sessions=is_across)
    kind: Kind
    if units < MIN_RUNS:
        # Where one side is quiet, the range is that of the other; equal noise on both would attain more.
        low, high, kind, level = a.min() - b.max(), a.max() - b.min(), "range", range_level(units)
    else:
        (low, high), kind, level = map(float, interval_of_difference(a, b)), "Student t", LEVEL
    found = interval(value, low, high, n, kind, unit, level=level, sessions=known)
    return replace(found, is_across_sessions=is_across)


def difference_p(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> float:
    """Two-sided p that both sides have the same mean, by the test that the interval of `difference_estimate` inverts.
    Returns 1 where there are fewer than two pairs, or runs of a side.
    """
    pairs = pairing(top, bottom)
    if not pairs.is_paired:
        a, b, _ = _apart(top, bottom)
        return welch_p(a.tolist(), b.tolist())
    return paired_p(means_of(_of_pairs(pairs, top, bottom)))


def ratio_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], unit: str = "ratio") -> Estimate:
    """The ratio of two geometric means over runs, top / bottom: `difference_estimate` of the logarithms.

    Geometric means alone keep products: where x = y z holds in each run, it holds of them, and the ratio of two is the
    geometric mean of the ratios of the pairs (Fleming and Wallace, CACM 29(3), 1986).

    `top`: one positive value for each run, by block and repeat. `unit`: of the result, `ratio` or `fraction`. Raises
    `ValueError`: a side is empty or holds a value that is not positive and finite.
    """
    return difference_estimate(_logarithms(top), _logarithms(bottom)).mapped(math.exp, unit)


def shift_estimate(top: Sequence[float], bottom: Sequence[float]) -> Estimate:
    """The ratio by which one side is shifted against the other, whatever outliers either holds.

    Value: the Hodges-Lehmann estimate, the median of the ratios of every value of one side to every value of the other
    (Annals of Mathematical Statistics 34, 1963); interval: inverted rank sum test, at the level nearest to 95 % from
    above that it attains. Fewer than `MIN_RUNS` values a side: the range of those ratios; one value: no interval.

    Raises `ValueError`: a side is empty or holds a value that is not positive and finite.
    """
    a, b = (np.log(_checked(side, least=0.0)) for side in (top, bottom))
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
    """What `make` (`median_estimate` and the like) makes of the values that are there; None where none is."""
    known = {key: float(value) for key, value in values.items() if value is not None}
    return make(known, unit) if known else None


def by_definition(value: float, n: int, unit: str = "ratio") -> Estimate:
    """A value that is not measured but agreed on: the baseline's speed-up of 1."""
    return Estimate(value, None, None, n, "by definition", unit)


def interval(
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
    """An interval that holds its value, also where rounding of the last bit or unequal sessions say otherwise."""
    return Estimate(value, float(low), float(high), n, kind, unit, level, sessions=sessions).holding(value)


def _checked(values: Values, least: float = -math.inf) -> Array:
    array = np.asarray(list(values.values() if isinstance(values, Mapping) else values), dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"an estimate needs finite values, got {array.tolist()}")
    if (array <= least).any():
        raise ValueError("a ratio needs positive values")
    return array


def _logarithms(values: Mapping[RunKey, float]) -> dict[RunKey, float]:
    return {key: math.log(value) for key, value in zip(values, _checked(values, least=0.0), strict=True)}


def _sessions(values: Values) -> list[str | None]:
    return [session_of(key) for key in values] if isinstance(values, Mapping) else [None] * len(values)


def _count(sessions: Sequence[str | None]) -> int | None:
    return None if None in sessions else len(set(sessions))


def _of_pairs(pairs: Pairing, top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> dict[RunKey, float]:
    differences = _checked(pairs.of(top)) - _checked(pairs.of(bottom))
    return dict(zip(in_all(top, bottom), differences.tolist(), strict=True))


def _apart(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> tuple[Array, Array, int | None]:
    """What independent sides are compared by: sessions, where both have several; and the sessions of either side."""
    (a, of_a), (b, of_b) = ((_checked(side), _sessions(side)) for side in (top, bottom))
    counts = _count(of_a), _count(of_b)
    known = None if counts[0] is None or counts[1] is None else min(counts[0], counts[1])
    if (known or 1) > 1:
        a, b = (_of_sessions(array, own, statistics.fmean) for array, own in ((a, of_a), (b, of_b)))
    return a, b, known


def means_of(values: Mapping[RunKey, float]) -> list[float]:
    """What the interval of a mean is made of: the mean of each session where there are several, else the runs."""
    found: list[float] = _of_sessions(_checked(values), _sessions(values), statistics.fmean).tolist()
    return found


def paired_logs(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> dict[RunKey, float]:
    """log(top / bottom) of the runs that both sides have, with the sessions of both."""
    shared = top.keys() & bottom.keys()
    logs = ({key: math.log(value) for key, value in side.items() if key in shared} for side in (top, bottom))
    return _of_pairs(Pairing(tuple(sorted(shared)), 0), *logs) if shared else {}


def _of_sessions(array: Array, sessions: Sequence[str | None], centre: Callable[[list[float]], float]) -> Array:
    if (_count(sessions) or 1) == 1:
        return array
    found: dict[str | None, list[float]] = {}
    for value, session in zip(array.tolist(), sessions, strict=True):
        found.setdefault(session, []).append(value)
    return np.array([centre(runs) for runs in found.values()])


def placed(estimate: Estimate, low: float, high: float) -> Placed:
    """Where a true value lies against the region from `low` to `high`, as far as its interval decides that; equal
    ends ask whether the value is another than that.
    """
    if estimate.low is None or estimate.high is None or estimate.n < MIN_RUNS or estimate.kind == "range":
        return "insufficient"
    if estimate.low > high:
        return "above"
    if estimate.high < low:
        return "below"
    return "within" if low <= estimate.low and estimate.high <= high else "undecided"


def is_other_than(estimate: Estimate, value: float) -> bool:
    """Whether the interval leaves a value out."""
    return placed(estimate, value, value) in ("below", "above")


def gain_of_best(logs: Sequence[Sequence[float]], best: int) -> Estimate:
    """The ratio of the setting with the largest mean log ratio to the baseline that all settings share; 95 %.

    Low end: `mean - t(1 - 0.025/m) s`, simultaneous over the m settings (Bonferroni), because any of them may have been
    lifted to the top by luck. High end: `mean + t(1 - 0.025) s` without a correction, because the best lies above what
    was measured of the truly best one (Fuentes, Casella and Wells, Electronic Journal of Statistics 12, 2018;
    Benjamini, Hechtlinger and Stark, arXiv:1906.00505). The value is the middle of both: a choice among
    equals flatters less, and a setting that truly stands out loses no more than that.

    s is the scatter of all settings together, because five repeats of one know it badly; where the chosen one scatters
    more than all, its own. Its degrees of freedom are those of `pooled_freedom`.

    `logs`: logarithms of each setting's ratios to the baseline in pairs of runs; settings without two do not count.
    `best`: which of them was chosen. Raises `ValueError`: the chosen setting has fewer than `MIN_RUNS` pairs.
    """
    own = logs[best]
    if len(own) < MIN_RUNS:
        raise ValueError(f"{len(own)} pairs of runs, fewer than {MIN_RUNS}, have no interval")
    known = [found for found in logs if len(found) > 1]
    m, mean = len(known), fmean(own)
    pairs = 1 + fmean(len(found) - 1 for found in known)
    weights = sum(len(found) - 1 for found in known)
    pooled = math.fsum((len(found) - 1) * variance(found) for found in known) / weights
    error = math.sqrt(max(pooled, variance(own)) / len(own))
    freedom = pooled_freedom(m, pairs)
    low = mean - student_quantile(1 - FAMILY_LEVEL / (2 * m), freedom) * error
    high = mean + student_quantile(1 - FAMILY_LEVEL / 2, freedom) * error
    middle, level = math.exp((low + high) / 2), 1 - FAMILY_LEVEL
    return interval(middle, math.exp(low), math.exp(high), len(own), "Student t", "ratio", level=level)


def between_and_within(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Standard deviations of what groups differ by, and of what is left within them.

    The estimators of a one-way analysis of variance with random effects and groups of any size (Searle, Casella and
    McCulloch, Variance Components, 1992, section 3.6); between groups 0 where they differ by no more than chance does.

    Returns None for fewer than two groups, or where no group has two values.
    """
    total, count = sum(map(len, groups)), len(groups)
    if count < 2 or total == count:
        return None
    means = [fmean(group) for group in groups]
    centre = fmean([value for group in groups for value in group])
    within = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    between = sum(len(group) * (mean - centre) ** 2 for group, mean in zip(groups, means, strict=True))
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (count - 1)
    residual = within / (total - count)
    return math.sqrt(max(0.0, (between / (count - 1) - residual) / size)), math.sqrt(residual)
