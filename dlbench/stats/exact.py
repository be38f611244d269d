"""Intervals that hold whatever the shape of the noise: the range, two of the ordered values, and rank sums."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

_EXACT_PAIRS = 400
"""Up to so many pairs of runs the distribution of rank sums is counted; beyond it is as good as normal."""


def range_level(n: int) -> float:
    """The level of the range of n values as an interval of their centre, for symmetric noise: 1 - 2^(1 - n)."""
    return 1 - 2.0 ** (1 - n)


@cache
def places(n: int, level: float = 0.95) -> tuple[int, float]:
    """Which of n ordered values, counted from either end, bound the median, and the level that this attains.

    The number of runs below the median is binomial, so from the k-th smallest value to the k-th largest the level is
    1 - 2 P(fewer than k of n) (Hahn and Meeker, Statistical Intervals, 1991; Hoefler and Belli, SC'15, 3.1.2).

    Args:
        n: how many values, at least 2.
        level: wanted.

    Returns:
        k, from 1, with the smallest attained level that is not below `level`; k = 1 where none reaches it.
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

    Args:
        a: one value for each run of a side, shape (..., runs).
        b: those of the other, shape (..., runs).
        level: between 0 and 1.

    Returns:
        Low and high ends, shape (...).
    """
    import numpy as np

    differences = (a[..., :, None] - b[..., None, :]).reshape(*a.shape[:-1], -1)
    last = differences.shape[-1] - 1
    below = max(0, _rank_sums_beyond(a.shape[-1], b.shape[-1], (1 - level) / 2)[0] - 1)
    ends = np.partition(differences, (below, last - below), axis=-1)
    return ends[..., below], ends[..., last - below]


@cache
def _rank_sums_beyond(na: int, nb: int, tail: float) -> tuple[int, float]:
    """How many of the smallest values of the Mann-Whitney statistic have at most this probability; and theirs."""
    import numpy as np

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
