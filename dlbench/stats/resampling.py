"""Bootstrap over runs (Efron, Annals of Statistics 7, 1979), for fits that have no interval of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.integer[Any]]

RESAMPLES = 10_000
SEED = 20_150_815
"""Fixed, so that the same runs give the same interval, byte for byte."""


def resample_weights(n: int, *, stream: int) -> Array:
    """How much each of n runs counts in each resample: shape (`RESAMPLES`, n), every row sums to 1.

    Equal `stream` numbers give equal resamples; pairs of runs share one, independent sides do not.
    """
    import numpy as np

    # As if 1/n were added for each time that a run was drawn.
    weights: Array = np.concatenate([[0.0], np.cumsum(np.full(n, 1 / n))])[_counts(n, stream)]
    return weights


@lru_cache(maxsize=4)
def _counts(n: int, stream: int) -> Indices:
    """How often each of n runs is in each resample, shape (RESAMPLES, n); read-only."""
    import numpy as np

    picks = np.random.default_rng([SEED, stream]).integers(0, n, size=(RESAMPLES, n))
    rows = np.arange(len(picks))[:, None] * n
    counts = np.bincount((rows + picks).ravel(), minlength=picks.size).reshape(picks.shape)
    # In as few bytes as will do: thousands of runs make tens of millions of them.
    narrow: Indices = counts.astype(np.min_scalar_type(n))
    narrow.setflags(write=False)
    return narrow
