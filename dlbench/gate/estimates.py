"""By how much: the ratio of two sides of runs, and the interval that an equivalence is read from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dlbench.stats.estimates import Estimate, ratio_estimate
from dlbench.stats.resampling import resample_weights

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]


def ratio_of_sides(a: Sequence[float], b: Sequence[float], *, paired: bool) -> Estimate:
    """B / A of the medians over runs with its 95 % interval, see `dlbench.stats.estimates.ratio_estimate`.

    Args:
        a: one positive value for each run.
        b: the same; where paired, in the order of A.
        paired: whether equal places are pairs of runs.
    """
    names = ("pair", "pair") if paired else ("a", "b")
    return ratio_estimate({(names[1], i): v for i, v in enumerate(b)}, {(names[0], i): v for i, v in enumerate(a)})


def shift_ratio(a: Sequence[float], b: Sequence[float], *, paired: bool) -> float:
    """The Hodges-Lehmann shift of the logarithms, as a ratio B / A.

    Unpaired: the median of all differences between a run of B and one of A; paired: the median of the means of any two
    differences of pairs, each with itself too (Hodges and Lehmann, Annals of Mathematical Statistics 34, 1963).
    """
    import numpy as np

    if paired:
        logs = np.log(b) - np.log(a)
        rows, columns = np.triu_indices(len(logs))
        return float(np.exp(np.median((logs[rows] + logs[columns]) / 2)))
    return float(np.exp(np.median(np.subtract.outer(np.log(b), np.log(a)))))


def equivalence_interval(a: Sequence[float], b: Sequence[float], *, paired: bool) -> tuple[float, float]:
    """The 90 % percentile bootstrap interval of the ratio of medians B / A, of the same resamples as the 95 % one.

    Where it lies inside the tolerance, both one-sided tests of "beyond the tolerance" reject at 5 % (TOST: Schuirmann,
    Journal of Pharmacokinetics and Biopharmaceutics 15, 1987). Exchanging the sides inverts it.
    """
    import numpy as np

    if not paired and (len(a), sorted(a)) > (len(b), sorted(b)):
        low, high = equivalence_interval(b, a, paired=False)
        return 1 / high, 1 / low
    logs = _resampled_medians(b, stream=0 if paired else 1) - _resampled_medians(a, stream=0)
    low, high = np.exp(np.percentile(logs, [5, 95]))
    return float(low), float(high)


def _resampled_medians(values: Sequence[float], *, stream: int) -> Array:
    """Logarithm of the median of each resample: the middle one by counting how often each value was drawn."""
    import numpy as np

    data = np.log(values)
    order = np.argsort(data, kind="stable")
    data = data[order]
    upto = np.cumsum(_counts(len(data), stream)[:, order], axis=1)
    lower = data[(upto > (len(data) - 1) // 2).argmax(axis=1)]
    upper = data[(upto > len(data) // 2).argmax(axis=1)]
    middle: Array = (lower + upper) / 2
    return middle


@lru_cache(maxsize=8)
def _counts(n: int, stream: int) -> npt.NDArray[np.int32]:
    """How often each of n runs is in each resample."""
    import numpy as np

    return np.rint(resample_weights(n, stream=stream) * n).astype(np.int32)
