"""Rank sums of a history's nights on either side of a place, and how often chance gives as clear ones.

The methods, with their sources, are described in `dlbench.history.trends.change_points`.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

MIN_SEGMENT = 5
"""Fewest nights between two change points, so that every level has a 95 % interval."""
_PERMUTATIONS, _MOST_PERMUTATIONS, _PERMUTED = 4_999, 49_999, 1_000_000
"""Fewest and most permutations, and numbers permuted: the nulls of short histories have few values, and need more."""
SMALLEST_P = 1 / (_PERMUTATIONS + 1)
"""The smallest p that the fewest permutations can give; smaller ones are extrapolated."""
NORMAL_MAD = 0.6744897501960817
"""Median of the absolute value of a standard normal."""
_SEED = 20_140_109
_BOUND = NormalDist().inv_cdf(0.95)
"""The autocorrelation counts with the upper end of its one-sided 95 % interval: too little makes changes of nothing."""
_MOST = 0.95
"""Largest autocorrelation that is taken out: at 1 nothing would be left of a level."""
_TAIL = 0.005
"""Beyond this share of the permutations p is extrapolated."""
_BLOCK = 2_000_000
"""Numbers permuted at a time, so that long histories need no gigabytes."""


def whitened(part: Array, place: int) -> Array:
    """Nights without what each has from the night before it: x[t] - r x[t - 1], for the test of a place.

    r is the upper end of a one-sided 95 % interval of the lag-1 autocorrelation of the ranks around both levels, whose
    bias (Kendall, Biometrika 41, 1954: (1 + 4 r) / n for one level) is taken out for two. Taking out too much makes the
    test say less, never more. A change of level stays one, (1 - r) times as large.
    """
    import numpy as np

    n = len(part)
    ranks = ranks_of(np.concatenate([side - np.median(side) for side in (part[:place], part[place:])])) - (n + 1) / 2
    scatter = float(ranks @ ranks)
    r = float(ranks[1:] @ ranks[:-1]) / scatter if scatter else 0.0
    r += 2 * (1 + 4 * max(r, 0.0)) / n
    r += _BOUND * math.sqrt(max(0.0, 1 - r * r) / n)
    r = min(max(r, 0.0), _MOST)
    white = part - r * np.concatenate([part[:1], part[:-1]])
    return np.asarray(white)


def ranks_of(values: Array) -> Array:
    """Ranks from 1, equal values share their mean; ties make the test say less, never more."""
    import numpy as np

    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse], dtype=float)


def rank_sums(ranks: Array) -> Array:
    """Standardised rank sums of the first k of n nights; along the last axis, k from `MIN_SEGMENT` on.

    |sum - k (n + 1) / 2| / sqrt(k (n - k) (n + 1) / 12)
    """
    import numpy as np

    n = ranks.shape[-1]
    k = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    sums = np.cumsum(ranks, axis=-1)[..., MIN_SEGMENT - 1 : n - MIN_SEGMENT]
    return np.asarray(np.abs(sums - k * (n + 1) / 2) / np.sqrt(k * (n - k) * (n + 1) / 12))


def p_value(statistic: float, n: int) -> float:
    """Share of permutations, the one seen among them, whose largest statistic is no smaller.

    Of many histories only far smaller p count than permutations resolve: beyond the largest `_TAIL` of them p goes on
    as it fell before, exp(-c s^2) (the tail of permutations, as Knijnenburg et al., Bioinformatics 25, 2009, extend it;
    the largest deviation of a Brownian bridge falls so, but for a factor s: James, James and Siegmund, Biometrika 74,
    1987).
    """
    import numpy as np

    null = _null(n)
    as_large = len(null) - int(np.searchsorted(null, statistic - 1e-9))
    p = (as_large + 1) / (len(null) + 1)
    before, begin = (float(null[-round(share * len(null))]) ** 2 for share in (10 * _TAIL, _TAIL))
    if statistic**2 <= begin or begin <= before:
        return p
    return min(p, _TAIL * math.exp(-math.log(10) * (statistic**2 - begin) / (begin - before)))


@functools.lru_cache(maxsize=1024)
def _null(n: int) -> Array:
    """Largest statistics of random orders of n nights, ascending; equal n, equal numbers."""
    import numpy as np

    generator = np.random.default_rng([_SEED, n])
    rows = max(1, _BLOCK // n)
    permutations = max(_PERMUTATIONS, min(_MOST_PERMUTATIONS, _PERMUTED // n))
    largest = []
    for done in range(0, permutations, rows):
        count = min(rows, permutations - done)
        orders = generator.permuted(np.broadcast_to(np.arange(1.0, n + 1), (count, n)), axis=1)
        largest.append(rank_sums(orders).max(axis=1))
    return np.sort(np.concatenate(largest))
