"""By how much: the ratio of two sides, and the interval that an equivalence is read from."""

from __future__ import annotations

import math

from dlbench.gate.evidence import Evidence
from dlbench.stats.estimates import Estimate
from dlbench.stats.multiplicity import student_quantile


def ratio_of(evidence: Evidence) -> Estimate:
    """B / A of geometric means over units, with its 95 % interval by Student's t on logarithms.

    What is tested is the mean of logarithms too, so that no verdict contradicts this number.
    """
    low, high = interval_of(evidence, 0.95)
    n = min(len(evidence.a), len(evidence.b))
    return Estimate(math.exp(evidence.shift), low, high, n, "bootstrap 95 %", "ratio")


def interval_of(evidence: Evidence, level: float) -> tuple[float, float]:
    """The interval of the ratio B / A at this level, by Student's t on logarithms; exchanging the sides inverts it.

    Where the one at 90 % lies inside the tolerance, both one-sided tests of "beyond the tolerance" reject at 5 %
    (TOST: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
    """
    width = student_quantile((1 + level) / 2, evidence.freedom) * evidence.error
    return math.exp(evidence.shift - width), math.exp(evidence.shift + width)
