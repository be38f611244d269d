"""Tests whether B is worse than A by more than a margin, exact where that can be counted.

The margin is the tolerance: B is divided by it and then compared, so that a smaller change is a false alarm like any
other and has the level's chance to be called one (a test of non-inferiority: Wellek, Testing Statistical Hypotheses of
Equivalence and Noninferiority, 2010, section 2.2).

Two sides that were run apart: the permutation test of the difference of means (Fisher, The Design of Experiments,
1935, section 21; Pitman, Supplement to the JRSS 4, 1937). Under no difference every way to divide the units among the
sides is equally likely, so p is the share of divisions that look at least as bad as the one seen. It asks nothing of
the distribution, and holds its level with 5 units as with 50.

Pairs of runs that were interleaved: the same with signs: under no difference each pair could as well have been the
other way round (Fisher 1935; Good, Permutation, Parametric and Bootstrap Tests, 2005, section 3.2.1).

Where so few units cannot reach the level by counting, and where a side borrows the scatter of others: Student's t.

All are made on logarithms, because times differ by factors, and are one-sided, because a gate asks one question:
is B worse? The other direction is tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.gate.evidence import Evidence
from dlbench.stats.multiplicity import student_p
from dlbench.stats.run_draws import SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

MAX_DIVISIONS = 200_000
"""Divisions of units among two sides that are counted one by one: up to 10 against 10."""
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
    """Chance of a B that looks as much worse as this or more, if it is worse by the margin and no more."""
    p_better: float
    """The mirror image."""
    method: str
    """The test in words."""
    smallest_p: float
    """The smallest p that it can give with so many units; 0: it has no such floor."""


def difference_of(evidence: Evidence, *, margin: float, level: float) -> Difference:
    """The test of B against A, both ways.

    Args:
        evidence: the units of both sides.
        margin: logarithm of the ratio up to which B may be worse, or better.
        level: the p that must be reached; where counting cannot, Student's t is asked.
    """
    smallest = smallest_p(evidence, level)
    if smallest == 0:
        up, down = ((sign * evidence.shift - margin) / evidence.error for sign in (1, -1))
        p_worse, p_better = (_upper_tail(t, evidence.freedom) for t in (up, down))
        method = _student_words(evidence, level)
    else:
        one_sided, method = _counting(evidence)
        p_worse, p_better = one_sided(evidence.a, evidence.b, margin), one_sided(evidence.b, evidence.a, margin)
    return Difference(p_worse=p_worse, p_better=p_better, method=method, smallest_p=smallest)


def _counting(evidence: Evidence) -> tuple[Callable[[Sequence[float], Sequence[float], float], float], str]:
    """The test that counts arrangements of the units, and its name."""
    a, b, unit = len(evidence.a), len(evidence.b), evidence.unit
    if unit == "pair":
        told = (
            f"exact sign-flip test, {2**a:,} signs"
            if a <= MAX_PAIRS
            else f"sign-flip test, {NUM_RANDOM:,} random signs"
        )
        return _sign_flip_p, f"{told} of {a} pairs"
    divisions = math.comb(a + b, b)
    if divisions <= MAX_DIVISIONS:
        return _permutation_p, f"exact permutation test, {divisions:,} divisions of the {unit}s"
    return _permutation_p, f"permutation test, {NUM_RANDOM:,} random divisions of the {unit}s"


def _upper_tail(t: float, freedom: int) -> float:
    tail = student_p(t, freedom) / 2
    return tail if t > 0 else 1 - tail


def smallest_p(evidence: Evidence, level: float) -> float:
    """The smallest p of the test by counting; 0 where Student's t stands in for it."""
    if evidence.is_borrowed:
        return 0.0
    a, b = len(evidence.a), len(evidence.b)
    return smallest_paired_p(a, level) if evidence.unit == "pair" else smallest_unpaired_p(a, b, level)


def smallest_paired_p(pairs: int, level: float) -> float:
    """The smallest p of the sign-flip test; 0 where Student's t stands in for it."""
    smallest = 1 / 2**pairs if pairs <= MAX_PAIRS else 1 / (NUM_RANDOM + 1)
    return 0.0 if smallest > level else smallest


def smallest_unpaired_p(a: int, b: int, level: float) -> float:
    """The smallest p of the permutation test; 0 where Student's t stands in for it."""
    divisions = math.comb(a + b, a)
    smallest = 1 / divisions if divisions <= MAX_DIVISIONS else 1 / (NUM_RANDOM + 1)
    return 0.0 if smallest > level else smallest


def _student_words(evidence: Evidence, level: float) -> str:
    if evidence.is_borrowed:
        return (
            f"Student's t test on sessions ({evidence.freedom} degrees of freedom: the scatter of all sessions stands "
            "for that of a side with fewer than five)"
        )
    name, count = "Welch's", f"{len(evidence.a)} and {len(evidence.b)} {evidence.unit}s"
    if evidence.unit == "pair":
        name, count = "Student's paired", f"{len(evidence.a)} pairs"
    return f"{name} t test ({count}: the exact test cannot reach {level:.2g})"


def _permutation_p(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    """Chance of a mean of B that is so far above that of A, over all divisions of A and of B less the margin."""
    import numpy as np

    moved = np.asarray(b) - margin
    pool = np.sort(np.concatenate([a, moved]))
    centre = pool.mean()
    pool -= centre
    seen = float(moved.sum() - len(b) * centre)
    if math.comb(len(pool), len(b)) <= MAX_DIVISIONS:
        return float((_all_sums(pool, len(b)) >= seen - _TIE).mean())
    generator = np.random.default_rng([SEED, 2])
    sums = generator.permuted(np.tile(pool, (NUM_RANDOM, 1)), axis=1)[:, : len(b)].sum(axis=1)
    return _drawn_p(sums, seen)


def _sign_flip_p(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    """Chance of so high a sum of the differences of pairs less the margin, over all their signs."""
    import numpy as np

    logs = np.asarray(b) - np.asarray(a) - margin
    seen = float(logs.sum())
    if len(logs) <= MAX_PAIRS:
        sums = np.zeros(1)
        for log in logs:
            sums = np.concatenate([sums + log, sums - log])
        return float((sums >= seen - _TIE).mean())
    signs = np.random.default_rng([SEED, 3]).choice([-1.0, 1.0], size=(NUM_RANDOM, len(logs)))
    return _drawn_p(signs @ logs, seen)


def _drawn_p(sums: Array, seen: float) -> float:
    """The p of drawn arrangements; the one seen counts as one of them (Phipson and Smyth, SAGMB 9(1), 2010)."""
    return (int((sums >= seen - _TIE).sum()) + 1) / (len(sums) + 1)


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
