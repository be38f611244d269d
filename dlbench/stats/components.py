"""How much of a scatter lies between groups of runs, and how much within them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def between_and_within(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Standard deviations of what groups differ by, and of what is left within them.

    The estimators of a one-way analysis of variance with random effects and groups of any size (Searle, Casella and
    McCulloch, Variance Components, 1992, section 3.6); between groups 0 where they differ by no more than chance does.

    Returns:
        None for fewer than two groups, or where no group has two values.
    """
    total, count = sum(map(len, groups)), len(groups)
    if count < 2 or total == count:
        return None
    means = [fmean(group) for group in groups]
    centre = fmean([value for group in groups for value in group])
    within = sum((value - mean) ** 2 for group, mean in zip(groups, means, strict=True) for value in group)
    between = sum(len(group) * (mean - centre) ** 2 for group, mean in zip(groups, means, strict=True))
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (count - 1)
    residual = within / (total - count)
    return math.sqrt(max(0.0, (between / (count - 1) - residual) / size)), math.sqrt(residual)
