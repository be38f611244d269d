"""Rank sums of a history's nights on either side of a place, and how often chance gives as clear ones.

The methods, with their sources, are described in `dlbench.history.trends.change_points`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

MIN_SEGMENT = 5
"""Fewest nights between two change points, so that every level has a 95 % interval."""
_PERMUTATIONS = 4_999
SMALLEST_P = 1 / (_PERMUTATIONS + 1)
"""The smallest p that so many permutations can give."""
NORMAL_MAD = 0.6744897501960817
"""Median of the absolute value of a standard normal."""
_SEED = 20_140_109
_FAR = 5.0
"""Levels so many scaled median absolute deviations apart are no wandering of one level, however autocorrelated."""
_BLOCK = 2_000_000
"""Numbers permuted at a time, so that long histories need no gigabytes."""


def shrink(part: Array, place: int) -> float:
    """What autocorrelation leaves of a standardised difference (1)."""
    import numpy as np

    around = np.concatenate([side - np.median(side) for side in (part[:place], part[place:])])
    scatter = float(np.median(np.abs(around))) / NORMAL_MAD
    if abs(float(np.median(part[place:]) - np.median(part[:place]))) >= _FAR * scatter:
        return 1.0
    ranks = ranks_of(around) - (len(around) + 1) / 2
    r = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    return math.sqrt((1 - r) / (1 + r)) if r > 0 else 1.0


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
    """Share of permutations, the one seen among them, whose largest statistic is no smaller."""
    import numpy as np

    as_large = _PERMUTATIONS - int(np.searchsorted(_null(n), statistic - 1e-9))
    return (as_large + 1) / (_PERMUTATIONS + 1)


@functools.lru_cache(maxsize=1024)
def _null(n: int) -> Array:
    """Largest statistics of `_PERMUTATIONS` random orders of n nights, ascending; equal n, equal numbers."""
    import numpy as np

    generator = np.random.default_rng([_SEED, n])
    rows = max(1, _BLOCK // n)
    largest = []
    for done in range(0, _PERMUTATIONS, rows):
        count = min(rows, _PERMUTATIONS - done)
        orders = generator.permuted(np.broadcast_to(np.arange(1.0, n + 1), (count, n)), axis=1)
        largest.append(rank_sums(orders).max(axis=1))
    return np.sort(np.concatenate(largest))
