"""Cuts a chain of work into stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut(work: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Returns consecutive non-empty pieces (first, end) with the smallest largest sum."""
    sums = [0.0, *accumulate(work)]
    # Smallest largest sum of the first n blocks in `part` parts, and the ends of these parts.
    best_cuts: dict[int, tuple[float, tuple[int, ...]]] = {n: (sums[n], (n,)) for n in range(1, len(sums))}
    for part in range(2, parts + 1):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for n in range(part, len(sums)):
            options = [
                (max(best_cuts[end][0], sums[n] - sums[end]), (*best_cuts[end][1], n)) for end in range(part - 1, n)
            ]
            longer[n] = min(options)
        best_cuts = longer
    return tuple(pairwise((0, *best_cuts[len(work)][1])))
