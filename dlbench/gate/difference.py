"""Tests of a difference between two sides of runs, exact where that can be counted.

Two sides that were run apart: the permutation test of the difference of means (Fisher, The Design of Experiments,
1935, section 21; Pitman, Supplement to the JRSS 4, 1937). Under no difference every way to divide the runs among the
sides is equally likely, so p is the share of divisions that look at least as bad as the one seen. It asks nothing of
the distribution of runs, and holds its level with 5 runs as with 50.

Pairs of runs that were interleaved: the same with signs: under no difference each pair could as well have been the
other way round (Fisher 1935; Good, Permutation, Parametric and Bootstrap Tests, 2005, section 3.2.1).

Both are made on logarithms, because times differ by factors, and are one-sided, because a gate asks one question:
is B worse? The other direction is tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.stats.multiplicity import paired_p
from dlbench.stats.resampling import SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

MAX_DIVISIONS = 200_000
"""Divisions of runs among two sides that are counted one by one: up to 10 against 10 runs."""
MAX_PAIRS = 20
"""Pairs whose 2^n signs are counted one by one."""
NUM_RANDOM = 20_000
"""Divisions, or signs, that are drawn where there are more."""

# Logarithms of step times that differ by less are equal: a nanosecond in a step of a second is 1e-9.
_TIE = 1e-11


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What a test says of both directions, before other comparisons are counted."""

    p_worse: float
    """Chance of a B that looks as much worse as this or more, if there is no difference."""
    p_better: float
    method: str
    """The test in words."""
    smallest_p: float
    """The smallest p that it can give with so many runs; 0: it has no such floor."""


def unpaired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Permutation test of the difference of means of logarithms, B - A.

    Args:
        a: one positive value for each run of A, larger is worse.
        b: the same for B.

    Raises:
        ValueError: a side has fewer than two values.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"a test needs two runs per side, got {len(a)} and {len(b)}")
    # One order of the sides, so that exchanging them exchanges the two p to the last digit.
    if (len(a), sorted(a)) > (len(b), sorted(b)):
        mirrored = unpaired_difference(b, a)
        return Difference(
            p_worse=mirrored.p_better,
            p_better=mirrored.p_worse,
            method=mirrored.method,
            smallest_p=mirrored.smallest_p,
        )
    import numpy as np

    pool = np.sort(np.log([*a, *b]))
    pool -= pool.mean()
    seen = float(np.log(b).sum() - len(b) * np.log([*a, *b]).mean())
    divisions = math.comb(len(pool), len(b))
    if divisions <= MAX_DIVISIONS:
        sums = _all_sums(pool, len(b))
        worse, better = (sums >= seen - _TIE).mean(), (sums <= seen + _TIE).mean()
        return Difference(
            p_worse=float(worse),
            p_better=float(better),
            method=f"exact permutation test, {divisions:,} divisions of the runs",
            smallest_p=1 / divisions,
        )
    generator = np.random.default_rng([SEED, 2])
    sums = generator.permuted(np.tile(pool, (NUM_RANDOM, 1)), axis=1)[:, : len(b)].sum(axis=1)
    return _drawn(sums, seen, f"permutation test, {NUM_RANDOM:,} random divisions of the runs")


def paired_difference(a: Sequence[float], b: Sequence[float], *, level: float) -> Difference:
    """Sign-flip test of the mean logarithm of B / A over pairs; Student's where it could not reach the level.

    With five or six pairs the smallest p of the exact test is 1/32 or 1/64, so that no difference of any size would be
    found at 1 %. There Student's paired t test is made, which takes the logarithms to be normal.

    Args:
        a: one positive value for each pair, larger is worse.
        b: the same, in the same order.
        level: the p that must be reached.

    Raises:
        ValueError: fewer than two pairs, or sides of different length.
    """
    import numpy as np

    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"a paired test needs two pairs, got {len(a)} and {len(b)} values")
    logs = np.log(b) - np.log(a)
    pairs = len(logs)
    smallest = 1 / 2**pairs
    seen = float(logs.sum())
    if smallest > level:
        two_sided = paired_p([float(log) for log in logs])
        upper, lower = two_sided / 2, 1 - two_sided / 2
        worse, better = (upper, lower) if seen > 0 else (lower, upper)
        return Difference(
            p_worse=worse,
            p_better=better,
            method=f"Student's paired t test ({pairs} pairs: the exact test cannot reach {level:.2g})",
            smallest_p=0.0,
        )
    if pairs <= MAX_PAIRS:
        sums = np.zeros(1)
        for log in logs:
            sums = np.concatenate([sums + log, sums - log])
        worse, better = float((sums >= seen - _TIE).mean()), float((sums <= seen + _TIE).mean())
        return Difference(
            p_worse=worse,
            p_better=better,
            method=f"exact sign-flip test, {2**pairs:,} signs of {pairs} pairs",
            smallest_p=smallest,
        )
    signs = np.random.default_rng([SEED, 3]).choice([-1.0, 1.0], size=(NUM_RANDOM, pairs))
    return _drawn(signs @ logs, seen, f"sign-flip test, {NUM_RANDOM:,} random signs of {pairs} pairs")


def _drawn(sums: Array, seen: float, method: str) -> Difference:
    """Both p of drawn arrangements; the one seen counts as one of them (Phipson and Smyth, SAGMB 9(1), 2010)."""
    count = len(sums) + 1
    return Difference(
        p_worse=(int((sums >= seen - _TIE).sum()) + 1) / count,
        p_better=(int((sums <= seen + _TIE).sum()) + 1) / count,
        method=method,
        smallest_p=1 / count,
    )


def _all_sums(pool: Array, size: int) -> Array:
    """Sums of all subsets of `size` values, each once: subsets of one half by subsets of the other (Vandermonde)."""
    import numpy as np

    middle = len(pool) // 2
    first, second = _subsets(pool[:middle]), _subsets(pool[middle:])
    pieces = []
    for chosen in range(size + 1):
        left, right = first[0][first[1] == chosen], second[0][second[1] == size - chosen]
        pieces.append(np.add.outer(left, right).ravel())
    return np.concatenate(pieces)


def _subsets(values: Array) -> tuple[Array, npt.NDArray[np.int64]]:
    """Sum and size of every subset."""
    import numpy as np

    sums, sizes = np.zeros(1), np.zeros(1, dtype=np.int64)
    for value in values:
        sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + 1])
    return sums, sizes
