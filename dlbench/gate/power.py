"""What a comparison could have seen: the smallest slowdown it would find, and the repeats that smaller ones need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from dlbench.gate.difference import MAX_DIVISIONS, MAX_PAIRS, NUM_RANDOM
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.multiplicity import POWER, student_quantile

MAX_REPEATS = 1000
"""More are not looked for."""

# Times are nanoseconds of some milliseconds: a scatter below this is rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Power:
    """What runs of this scatter show."""

    scatter: float
    """Standard deviation over runs of the logarithms of one side; where paired, of the logarithms of the ratios."""
    detectable: float | None
    """Smallest slowdown that is called one with 80 % probability (fraction); None: none, of whatever size."""
    wanted: float
    """The slowdown that is asked for (fraction)."""
    repeats: int | None
    """Repeats of each side that show it with 80 % probability; None: not with `MAX_REPEATS`, or it is tolerated."""


def power_of(
    a: Sequence[float], b: Sequence[float], *, paired: bool, level: float, tolerance: float, wanted: float
) -> Power:
    """Smallest detectable slowdown: (t(1 - level) + t(power)) s sqrt(1/na + 1/nb) on logarithms.

    That is the usual formula of the t test (Cohen, Statistical Power Analysis, 1988, section 2.3), with the largest
    level below the wanted one that the exact test can give. The permutation test has the same power for large n
    (Hoeffding, Annals of Mathematical Statistics 23, 1952): by simulation 80 % from 7 runs per side, 78 % with 6, and
    74 % with 5.
    A slowdown within the tolerance is never called one, so log(1 + tolerance) + t(power) s sqrt(...) bounds it too.

    Args:
        a: one positive value for each run.
        b: the same; where paired, in the order of A.
        paired: whether equal places are pairs of runs.
        level: the level of this one comparison, that of the family divided by its number of comparisons.
        tolerance: fraction by which B may be slower.
        wanted: the slowdown to find the number of repeats for, a fraction.
    """
    scatter = _scatter(a, b, paired)
    detectable = _detectable(len(a), len(b), scatter, paired, level, tolerance)
    repeats = None
    if wanted > tolerance:
        for count in range(MIN_RUNS, MAX_REPEATS + 1):
            seen = _detectable(count, count, scatter, paired, level, tolerance)
            if seen is not None and seen <= wanted:
                repeats = count
                break
    return Power(scatter=scatter, detectable=detectable, wanted=wanted, repeats=repeats)


def _scatter(a: Sequence[float], b: Sequence[float], paired: bool) -> float:
    if paired:
        found = stdev(math.log(y / x) for x, y in zip(a, b, strict=True))
    else:
        squares = [(len(side) - 1) * stdev(map(math.log, side)) ** 2 for side in (a, b)]
        found = math.sqrt(sum(squares) / (len(a) + len(b) - 2))
    return max(found, _ROUNDING)


def _detectable(na: int, nb: int, scatter: float, paired: bool, level: float, tolerance: float) -> float | None:
    smallest = _smallest_paired_p(na, level) if paired else smallest_unpaired_p(na, nb)
    if smallest > level:
        return None
    attained = math.floor(level / smallest * (1 + 1e-9)) * smallest if smallest else level
    freedom = na - 1 if paired else na + nb - 2
    error = scatter * math.sqrt(1 / na if paired else 1 / na + 1 / nb)
    seen = student_quantile(POWER, freedom) * error
    return math.expm1(max(student_quantile(1 - attained, freedom) * error, math.log1p(tolerance)) + seen)


def _smallest_paired_p(pairs: int, level: float) -> float:
    """The smallest p of the sign-flip test; 0 where Student's test stands in for it."""
    smallest = 1 / 2**pairs if pairs <= MAX_PAIRS else 1 / (NUM_RANDOM + 1)
    return 0.0 if smallest > level else smallest


def smallest_unpaired_p(na: int, nb: int) -> float:
    """The smallest p of the permutation test with so many runs per side."""
    divisions = math.comb(na + nb, na)
    return 1 / divisions if divisions <= MAX_DIVISIONS else 1 / (NUM_RANDOM + 1)
