"""What a comparison could have seen: the smallest slowdown it would find, and the repeats that smaller ones need."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dlbench.gate.difference import MAX_PAIRS, smallest_p, smallest_paired_p, smallest_unpaired_p
from dlbench.gate.evidence import Evidence, Unit
from dlbench.stats.estimates import MIN_RUNS
from dlbench.stats.multiplicity import POWER, noncentral_power, student_quantile
from dlbench.stats.run_draws import SEED

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

MAX_REPEATS = 1000
"""More are not looked for."""
MAX_ARRANGEMENTS = 1024
"""Of the units: with as many or fewer, the power of counting them is simulated; it is Student's beyond."""
_DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Power:
    """What units of this scatter show."""

    unit: Unit
    scatter: float
    """Standard deviation over units of the logarithms of one side; where paired, of the logarithms of the ratios."""
    detectable: float
    """Smallest slowdown that is called one with 80 % probability (fraction)."""
    wanted: float
    """The slowdown that is asked for (fraction)."""
    repeats: int | None
    """Units of each side that show it with 80 % probability; None: not with `MAX_REPEATS`, or it is tolerated."""


def power_of(evidence: Evidence, *, level: float, tolerance: float, wanted: float) -> Power:
    """The smallest slowdown that is found, if the scatter seen is the true one.

    Args:
        evidence: the units of both sides.
        level: the level of this one comparison, that of the family divided by its number of comparisons.
        tolerance: fraction by which B may be slower.
        wanted: the slowdown to find the number of units for, a fraction.
    """
    return Power(
        unit=evidence.unit,
        scatter=evidence.scatter,
        detectable=math.expm1(math.log1p(tolerance) + _detectable(evidence, level)),
        wanted=wanted,
        repeats=_repeats(evidence, level, math.log1p(wanted) - math.log1p(tolerance)),
    )


def _detectable(evidence: Evidence, level: float) -> float:
    """Logarithm beyond the tolerance."""
    a, b = len(evidence.a), len(evidence.b)
    if smallest_p(evidence, level) == 0:
        return noncentral_shift(level, evidence.freedom) * evidence.error
    if evidence.unit == "pair":
        return paired_shift(a, level) * evidence.scatter
    return unpaired_shift(a, b, level) * evidence.scatter


def _repeats(evidence: Evidence, level: float, beyond: float) -> int | None:
    """Fewest units of each side whose smallest slowdown is at most this far beyond the tolerance."""
    if beyond <= 0:
        return None

    def suffices(count: int) -> bool:
        shift = paired_shift(count, level) if evidence.unit == "pair" else unpaired_shift(count, count, level)
        return shift * evidence.scatter <= beyond

    few = next((count for count in range(MIN_RUNS, MAX_PAIRS + 1) if suffices(count)), None)
    if few is not None or not suffices(MAX_REPEATS):
        return few
    # With more units, more always find more; below, the levels that counting can attain go up and down.
    return bisect_left(range(MAX_REPEATS), True, lo=MAX_PAIRS + 1, key=suffices)


@lru_cache(maxsize=4096)
def paired_shift(pairs: int, level: float) -> float:
    """The mean difference, in standard deviations, that the paired test finds with 80 % probability.

    The sign-flip test rejects where at most `level` of all signs give as high a sum. Flipping a set F of pairs does so
    if the mean of their differences is at most 0, so each draw of noise has a shift from which on it is rejected, and
    the 80th percentile of these is the answer.
    """
    smallest = smallest_paired_p(pairs, level)
    if smallest == 0 or 2**pairs > MAX_ARRANGEMENTS:
        attained = level if smallest == 0 else _attained(level, smallest)
        return noncentral_shift(attained, pairs - 1) / math.sqrt(pairs)
    import numpy as np

    flipped = (np.arange(1, 2**pairs)[:, None] >> np.arange(pairs)) & 1
    noise = np.random.default_rng([SEED, 4]).standard_normal((_DRAWS, pairs))
    needed = -(noise @ (flipped / flipped.sum(axis=1, keepdims=True)).T)
    return _found_by_most(needed, level, smallest)


@lru_cache(maxsize=4096)
def unpaired_shift(a: int, b: int, level: float) -> float:
    """The same for two sides apart, in standard deviations of either.

    A division of the units that exchanges m of each side for the other's gives as high a sum as the one seen if the
    shift is at most the difference of the sums over m.
    """
    smallest = smallest_unpaired_p(a, b, level)
    if smallest == 0 or math.comb(a + b, b) > MAX_ARRANGEMENTS:
        attained = level if smallest == 0 else _attained(level, smallest)
        return noncentral_shift(attained, a + b - 2) * math.sqrt(1 / a + 1 / b)
    import itertools

    import numpy as np

    divisions = np.array(list(itertools.combinations(range(a + b), b)))[:-1]
    members = np.zeros((len(divisions), a + b))
    np.put_along_axis(members, divisions, 1.0, axis=1)
    exchanged = b - members[:, a:].sum(axis=1)
    members[:, a:] -= 1
    noise = np.random.default_rng([SEED, 5]).standard_normal((_DRAWS, a + b))
    return _found_by_most((noise @ members.T) / exchanged, level, smallest)


def _found_by_most(needed: Array, level: float, smallest: float) -> float:
    """The shift beyond which 80 % of draws are rejected.

    Args:
        needed: for each draw and each arrangement but the one seen, the shift up to which it gives as high a sum;
            shape (draws, arrangements - 1).
        level: the level of the test.
        smallest: p where no other arrangement does.
    """
    import numpy as np

    others = round(_attained(level, smallest) / smallest) - 1
    # With so many others as high it is rejected still: the shift must pass the next one.
    passed = -np.partition(-needed, others, axis=1)[:, others]
    return float(np.percentile(passed, 100 * POWER))


def _attained(level: float, smallest: float) -> float:
    """The largest p of a counting test that is no larger than the level."""
    return math.floor(level / smallest * (1 + 1e-9)) * smallest


@lru_cache(maxsize=4096)
def noncentral_shift(level: float, freedom: int) -> float:
    """The difference, in standard errors, that Student's one-sided t test finds with 80 % probability."""
    critical = student_quantile(1 - level, freedom)
    low, high = 0.0, critical + 10
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if noncentral_power(critical, middle, freedom) < POWER else (low, middle)
    return high
