"""Intervals of a median, whatever the distribution: two of the ordered values."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

LEVEL = 0.95


@cache
def places(n: int, level: float = LEVEL) -> tuple[int, float]:
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
