"""Values of repeated runs become an estimate: a median with an interval that says how it was made.

The experimental unit is the run, never the step: steps of one run are not independent, and pooling
them calls differences real that are not (Hoefler and Belli, SC'15, rule 6 and section 3.1.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.integer[Any]]

Kind = Literal["bootstrap 95 %", "simultaneous 95 %", "range", "single run", "by definition", "within-run", "fit 95 %"]
"""How an interval was made. `simultaneous 95 %`: of the best of many, corrected for the choice; `within-run`: the
middle half of the iterations of a single run; `fit 95 %`: of a fitted parameter."""

MIN_RUNS = 5
"""Fewer runs carry no 95 % interval, and no comparison."""

RESAMPLES = 10_000
SEED = 20_150_815
"""Fixed, so that the same runs give the same interval, byte for byte."""

# Values that resampling holds at once, so that it stays in the caches of a core.
_AT_ONCE = 1 << 18

RunKey = tuple[str, int]
"""Block (series with its swept values) and repeat: runs with equal keys ran side by side, interleaved."""


@dataclass(frozen=True)
class Estimate:
    """A value and how far to trust it.

    `low` and `high` are the ends of a 95 % bootstrap interval of the median (`bootstrap 95 %`) or
    the smallest and largest value seen (`range`); both are None for a single run and for values
    that hold by definition, such as the efficiency of the baseline.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    """Runs behind the value; for a ratio, runs (or pairs of runs) behind each side."""
    kind: Kind
    unit: str = ""
    """`images/s` (or another sample unit per second), `images/s/rank`, `TFLOP/s/rank`, `GB/s`, `s`, `fraction`,
    `ratio`, `samples`, `epochs`, `error` (a mean absolute error), `bytes`, `messages`, `loss`, `J`, `W`."""

    def in_unit(self, unit: str) -> Estimate:
        """The same numbers, their unit named."""
        return replace(self, unit=unit)

    def inverted(self, unit: str) -> Estimate:
        """1 / value, in `unit`; the ends of the interval change places.

        Raises:
            ZeroDivisionError: the value or an end of the interval is 0.
        """
        low = None if self.high is None else 1 / self.high
        high = None if self.low is None else 1 / self.low
        return Estimate(1 / self.value, low, high, self.n, self.kind, unit)

    def scaled(self, factor: float, unit: str = "") -> Estimate:
        """The same estimate in another unit, e.g. a speed-up as an efficiency.

        Args:
            factor: a positive number.
            unit: of the result.

        Raises:
            ValueError: `factor` is not a positive number.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"cannot scale an estimate by {factor}")
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Estimate(self.value * factor, low, high, self.n, self.kind, unit)


def median_estimate(values: Sequence[float], unit: str = "") -> Estimate:
    """The median over runs.

    Five runs or more: percentile bootstrap of the median (Efron 1979), 95 %. With five or six runs
    this is close to the range and covers the true median in about 94 % to 97 % of cases, the most
    that order statistics of so few runs can give. Two to four runs: the range. One run: no interval.

    Args:
        values: one finite value for each run, in any order.
        unit: of the values.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    import numpy as np

    ordered = np.sort(_checked(values))
    return _estimate(float(np.median(ordered)), ordered, lambda: _resampled_medians(ordered, stream=0)).in_unit(unit)


def mean_estimate(values: Sequence[float], unit: str = "") -> Estimate:
    """The mean over runs, for values that must sum; intervals and errors as `median_estimate`."""
    import numpy as np

    ordered = np.sort(_checked(values))

    def resampled() -> Array:
        return _centres(lambda values: np.mean(values, axis=1), ordered, _resamples(len(ordered), 0))

    return _estimate(float(np.mean(ordered)), ordered, resampled).in_unit(unit)


def _resampled_medians(ordered: Array, *, stream: int) -> Array:
    """Medians of resamples of sorted values: values at places that the number of runs alone decides."""
    lower, upper = _middles(len(ordered), stream)
    medians: Array = (ordered[lower] + ordered[upper]) / 2
    return medians


def _centres(centre: Callable[[Array], Array], values: Array, picks: Indices) -> Array:
    """What `centre` makes of each resample, some resamples at a time."""
    import numpy as np

    size = max(1, _AT_ONCE // len(values))
    return np.concatenate([centre(values[picks[begin : begin + size]]) for begin in range(0, len(picks), size)])


def _estimate(value: float, ordered: Array, resampled: Callable[[], Array]) -> Estimate:
    import numpy as np

    n = len(ordered)
    if n == 1:
        return Estimate(value, None, None, 1, "single run")
    if n < MIN_RUNS:
        return interval(value, ordered[0], ordered[-1], n, "range")
    low, high = np.percentile(resampled(), [2.5, 97.5])
    return interval(value, low, high, n, "bootstrap 95 %")


def are_paired(top: Mapping[RunKey, object], bottom: Mapping[RunKey, object]) -> bool:
    """Whether both sides hold the same repeats of the same blocks, so that drift hits them alike."""
    return top.keys() == bottom.keys()


def ratio_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], unit: str = "ratio") -> Estimate:
    """The ratio of two medians over runs, top / bottom.

    The value is always the ratio of the medians, so it agrees with the two figures it is made of.
    Its interval comes from resampling pairs of runs together where both sides hold the same repeats
    (interleaved runs drift together), and from resampling each side on its own otherwise. Fewer
    than five runs on a side: the range of the paired ratios, or of all ratios that the two ranges
    allow; either one holds the ratio of the medians. A single run on a side: no interval.

    Args:
        top: one positive value for each run, by block and repeat.
        bottom: the same, for the run compared with.
        unit: of the result, `ratio` or `fraction`.

    Raises:
        ValueError: a side is empty or holds a value that is not positive and finite.
    """
    import numpy as np

    return _ratio(top, bottom, lambda values: np.median(values, axis=-1)).in_unit(unit)


def geometric_ratio_estimate(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float]) -> Estimate:
    """The ratio of two geometric means over runs, top / bottom, for ratios that must multiply.

    Where x = y z holds in each run, it holds for geometric means, and not for medians or means
    (Fleming and Wallace, CACM 29(3), 1986). Intervals, arguments and errors as `ratio_estimate`.
    """
    import numpy as np

    return _ratio(top, bottom, lambda values: np.exp(np.log(values).mean(axis=-1))).in_unit("ratio")


def _ratio(top: Mapping[RunKey, float], bottom: Mapping[RunKey, float], centre: Callable[[Array], Array]) -> Estimate:
    """`centre` makes one value of the runs along the last axis; any mean will do."""
    import numpy as np

    keys = sorted(top), sorted(bottom)
    a = _checked([top[key] for key in keys[0]])
    b = _checked([bottom[key] for key in keys[1]])
    if (a <= 0).any() or (b <= 0).any():
        raise ValueError("a ratio needs positive values")
    paired = are_paired(top, bottom)
    value = float(centre(a) / centre(b))
    n = min(len(a), len(b))
    if n == 1:
        return Estimate(value, None, None, 1, "single run")
    if n < MIN_RUNS:
        low, high = ((a / b).min(), (a / b).max()) if paired else (a.min() / b.max(), a.max() / b.min())
        return interval(value, low, high, n, "range")
    if not paired:
        a, b = np.sort(a), np.sort(b)
    first = _resamples(len(a), 0)
    second = first if paired else _resamples(len(b), 1)
    low, high = np.percentile(_centres(centre, a, first) / _centres(centre, b, second), [2.5, 97.5])
    return interval(value, low, high, n, "bootstrap 95 %")


def by_definition(value: float, n: int, unit: str = "ratio") -> Estimate:
    """A value that is not measured but agreed on: the baseline's speed-up of 1."""
    return Estimate(value, None, None, n, "by definition", unit)


def interval(value: float, low: float, high: float, n: int, kind: Kind, unit: str = "") -> Estimate:
    """An interval that holds its value even where rounding of the last bit says otherwise."""
    return Estimate(value, min(float(low), value), max(float(high), value), n, kind, unit)


def _checked(values: Sequence[float]) -> Array:
    import numpy as np

    array = np.asarray(values, dtype=float)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"an estimate needs finite values, got {list(values)}")
    return array


def resample_weights(n: int, *, stream: int) -> Array:
    """How much each of n runs counts in each resample: shape (`RESAMPLES`, n), every row sums to 1.

    Equal `stream` numbers give equal resamples; pairs of runs share one, independent sides do not.
    """
    import numpy as np

    # As if 1/n were added for each time that a run was drawn.
    weights: Array = np.concatenate([[0.0], np.cumsum(np.full(n, 1 / n))])[_counts(n, stream)]
    return weights


@lru_cache(maxsize=4)
def _counts(n: int, stream: int) -> Indices:
    """How often each of n runs is in each resample, shape (RESAMPLES, n); read-only."""
    import numpy as np

    picks = _resamples(n, stream)
    rows = np.arange(len(picks))[:, None] * n
    counts = np.bincount((rows + picks).ravel(), minlength=picks.size)
    return _kept(counts.reshape(picks.shape), n)


@lru_cache(maxsize=4)
def _resamples(n: int, stream: int) -> Indices:
    """Indices of `RESAMPLES` samples of n runs with replacement, shape (RESAMPLES, n); read-only."""
    import numpy as np

    return _kept(np.random.default_rng([SEED, stream]).integers(0, n, size=(RESAMPLES, n)), n)


@cache
def _middles(n: int, stream: int) -> tuple[Indices, Indices]:
    """The two middle indices of each sample of `_resamples`, the same where n is odd; each of shape (RESAMPLES,)."""
    picks = _resamples(n, stream).copy()
    lower, upper = (n - 1) // 2, n // 2
    picks.partition((lower, upper), axis=1)
    return picks[:, lower].copy(), picks[:, upper].copy()


def _kept(values: Indices, largest: int) -> Indices:
    """In as few bytes as will do: thousands of runs make tens of millions of them."""
    import numpy as np

    narrow: Indices = values.astype(np.min_scalar_type(largest))
    narrow.setflags(write=False)
    return narrow
