"""By how much: the ratio of two sides, and the interval that an equivalence is read from."""

from __future__ import annotations

import math

from dlbench.gate.evidence import Evidence
from dlbench.stats.estimates import Estimate, interval
from dlbench.stats.multiplicity import student_quantile
from dlbench.stats.student import LEVEL, interval_of_difference, interval_of_mean


def ratio_of(evidence: Evidence) -> Estimate:
    """B / A of geometric means over units, with its 95 % interval.

    What is tested is the mean of logarithms too, so that no verdict contradicts this number.
    """
    n = min(len(evidence.a), len(evidence.b))
    ends = interval_of(evidence, LEVEL)
    return interval(math.exp(evidence.shift), *ends, n, "Student t", "ratio", level=LEVEL)


def interval_of(evidence: Evidence, level: float) -> tuple[float, float]:
    """The interval of the ratio B / A at this level, on logarithms as all ratios have it; inverted by exchanged sides.

    Where the one at 90 % lies inside the tolerance, both one-sided tests of "beyond the tolerance" reject at 5 %
    (TOST: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
    """
    import numpy as np

    a, b = np.array(evidence.a), np.array(evidence.b)
    if evidence.is_borrowed:
        half = student_quantile((1 + level) / 2, evidence.freedom) * evidence.error
        low, high = evidence.shift - half, evidence.shift + half
    elif evidence.unit == "pair":
        low, high = map(float, interval_of_mean(b - a, level))
    else:
        low, high = map(float, interval_of_difference(b, a, level))
    return math.exp(low), math.exp(high)
