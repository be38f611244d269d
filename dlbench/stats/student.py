"""Student's t intervals of a mean and of a difference of means.

What "95 %" holds of 5 to 20 runs, simulated (`make bench AREA=truth.intervals`): for normal and long-tailed noise 94 to
97 %; where run times fall into two states of a machine 91 to 97 %; where noise only ever slows a run, a mean alone 87
to 92 % and a difference of two sides with the same noise 95 % and more. No interval helps where a slow state is so rare
that no run has met it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlbench.stats.multiplicity import student_quantile, welch_error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

LEVEL = 0.95


def interval_of_mean(values: Array, level: float = LEVEL) -> tuple[Array, Array]:
    """Ends of the interval of the mean.

    Args:
        values: one for each run, shape (..., runs), at least two runs.
        level: its confidence, between 0 and 1.

    Returns:
        Low and high ends, shape (...).
    """
    import numpy as np

    n = values.shape[-1]
    mean = values.mean(axis=-1)
    half = student_quantile((1 + level) / 2, n - 1) * np.sqrt(values.var(axis=-1, ddof=1) / n)
    return mean - half, mean + half


def interval_of_difference(a: Array, b: Array, level: float = LEVEL) -> tuple[Array, Array]:
    """Ends of the interval of mean of `a` less mean of `b`, of independent sides whose noise may differ in size.

    Args:
        a: one value for each run of a side, shape (..., runs), at least two runs.
        b: those of the other, shape (..., runs), at least two runs.
        level: its confidence, between 0 and 1.

    Returns:
        Low and high ends, shape (...).
    """
    from scipy.special import stdtrit

    difference = a.mean(axis=-1) - b.mean(axis=-1)
    error, freedom = welch_error(a, b)
    half = stdtrit(freedom, (1 + level) / 2) * error
    return difference - half, difference + half
