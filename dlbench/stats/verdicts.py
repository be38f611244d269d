"""Verdicts read from an interval: one rule for all of them, with an answer of its own where the interval decides none.

An interval that reaches over an end of the region decides nothing. To take it for agreement would call noise agreement:
the noisier the runs, the more alike everything would be. That a whole interval at 95 % lies within a margin is the two
one-sided tests of equivalence at 2.5 % each (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
"""

from __future__ import annotations

from typing import Literal

from dlbench.stats.estimates import MIN_RUNS, Estimate

Placed = Literal["below", "within", "above", "undecided", "insufficient"]
"""below, within, above: the whole interval does, so that each is false in at most 5 % of cases (of 2.5 %, for one end).
undecided: it reaches over an end of the region. insufficient: fewer than `MIN_RUNS` runs, or sessions where there are
several, have no interval of a level.
"""


def placed(estimate: Estimate, low: float, high: float) -> Placed:
    """Where a true value lies against the region from `low` to `high`, as far as its interval decides that.

    Args:
        estimate: the value with its interval.
        low: end of the region, in the estimate's unit.
        high: the other end; equal ends ask whether the value is another than that.
    """
    if estimate.low is None or estimate.high is None or estimate.n < MIN_RUNS or estimate.kind == "range":
        return "insufficient"
    if estimate.low > high:
        return "above"
    if estimate.high < low:
        return "below"
    return "within" if low <= estimate.low and estimate.high <= high else "undecided"


def is_other_than(estimate: Estimate, value: float) -> bool:
    """Whether the interval leaves a value out."""
    return placed(estimate, value, value) in ("below", "above")
