"""Stages of a pipeline: where a network is cut, and how long equal parts of a batch take to pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def cut(work: Sequence[float], parts: int) -> tuple[tuple[int, int], ...]:
    """Returns consecutive non-empty pieces (first, end) with the smallest largest sum."""
    return tuple(pairwise((0, *_cuts(tuple(work))[parts - 1])))


@lru_cache(maxsize=16)
def _cuts(work: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the ends of the pieces of the best cut into 1, 2, ... parts."""
    import numpy as np

    sums = np.array([0.0, *accumulate(work)])
    numbers = range(len(sums))
    pieces = np.where(np.tri(len(sums), k=-1, dtype=bool), sums[:, None] - sums, np.inf)  # From `column` to `row`.
    # Smallest largest sum of the first n blocks in `part` parts, and the ends of these parts.
    largest = sums.copy()
    ends: list[tuple[int, ...]] = [(n,) for n in numbers]
    largest[0] = np.inf
    cuts = [ends[-1]]
    for part in range(2, len(work) + 1):
        options = np.maximum(largest, pieces)
        largest = options.min(axis=1)
        longer = {n: np.flatnonzero(options[n] == largest[n]).tolist() for n in numbers[part:]}
        ends = [(*min(ends[end] for end in longer[n]), n) if n in longer else () for n in numbers]
        cuts.append(ends[-1])
    return tuple(cuts)


def passed(times: Sequence[float], parts: int) -> float:
    """Returns the time in which equal parts pass all stages, as in a flow shop with unlimited buffers."""
    return sum(times) + (parts - 1) * max(times)
