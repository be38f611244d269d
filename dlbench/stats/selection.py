"""The best of many: what it gains, when it was chosen because it looked best.

The largest of many measured gains is large by merit and by luck. An interval that knows nothing of the choice misses
the true gain of the chosen one far too often, and always on the same side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from dlbench.stats.estimates import MIN_RUNS, Estimate, interval
from dlbench.stats.multiplicity import LEVEL, pooled_freedom, student_quantile


def gain_of_best(logs: Sequence[Sequence[float]], best: int) -> Estimate:
    """The ratio of the setting with the largest mean log ratio to the baseline that all settings share; 95 %.

    Low end: `mean - t(1 - 0.025/m) s`, simultaneous over the m settings (Bonferroni), because any of them may have been
    lifted to the top by luck. High end: `mean + t(1 - 0.025) s` without a correction, because the best lies above what
    was measured of the truly best one (Fuentes, Casella and Wells, Electronic Journal of Statistics 12, 2018;
    Benjamini, Hechtlinger and Stark, arXiv:1906.00505). The value is the middle of both: a choice among
    equals flatters less, and a setting that truly stands out loses no more than that.

    s is the scatter of all settings together, because five repeats of one know it badly; where the chosen one scatters
    more than all, its own. Its degrees of freedom are those of `pooled_freedom`.

    Args:
        logs: logarithms of each setting's ratios to the baseline in pairs of runs; settings without two do not count.
        best: which of them was chosen.

    Raises:
        ValueError: the chosen setting has fewer than `MIN_RUNS` pairs.
    """
    own = logs[best]
    if len(own) < MIN_RUNS:
        raise ValueError(f"{len(own)} pairs of runs, fewer than {MIN_RUNS}, have no interval")
    known = [found for found in logs if len(found) > 1]
    m, mean = len(known), fmean(own)
    pairs = 1 + fmean(len(found) - 1 for found in known)
    weights = sum(len(found) - 1 for found in known)
    pooled = math.fsum((len(found) - 1) * variance(found) for found in known) / weights
    error = math.sqrt(max(pooled, variance(own)) / len(own))
    freedom = pooled_freedom(m, pairs)
    low = mean - student_quantile(1 - LEVEL / (2 * m), freedom) * error
    high = mean + student_quantile(1 - LEVEL / 2, freedom) * error
    return interval(
        math.exp((low + high) / 2), math.exp(low), math.exp(high), len(own), "Student t", "ratio", level=1 - LEVEL
    )
