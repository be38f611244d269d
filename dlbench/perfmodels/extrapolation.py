"""How far a model is to be trusted beyond what it was fitted to: an error that grows with each doubling.

What a model misses at points held out, and what earlier projections missed, says how far it will be off. With e_i the
logarithm of measured over predicted, d_i doublings beyond the points behind that prediction, the error after d
doublings is

    eps(d) = s sqrt(d) t_nu,   s^2 = (nu0 s0^2 + sum_i e_i^2 / d_i) / (nu0 + n),   nu = nu0 + n

the posterior predictive of a normal error with a scaled inverse chi-squared prior of its variance (Gelman et al.,
Bayesian Data Analysis, 3rd edition, 2013, section 2.6). Errors of successive doublings are taken to be independent, so
that their variances add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.stats.multiplicity import student_quantile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

PRIOR_SCALE = 0.03
"""Error per square root of a doubling before any was seen; `make bench AREA=truth.projection` says what it covers."""
PRIOR_POINTS = 2.0  # Points that the prior counts as.


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A point that a model was asked for without knowing it."""

    error: float  # log(measured / predicted).
    doublings: float  # Beyond the points behind the prediction, above 0.


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """How far a model may be off, as logarithms of measured over predicted."""

    scale: float  # s, per square root of a doubling.
    freedom: float  # nu, degrees of freedom.
    num_points: int  # Misses behind it, without the prior.

    def drawn(self, doublings: float, draws: int, seed: Sequence[int]) -> Array:
        """Factors on a predicted time (1), shape (draws,); all 1 where nothing is extrapolated (`doublings` <= 0)."""
        import numpy as np

        rng = np.random.default_rng(seed)
        noise = rng.standard_t(self.freedom, draws)
        factors: Array = np.exp(self.scale * math.sqrt(max(0.0, doublings)) * noise)
        return factors

    def factor(self, doublings: float, level: float) -> float:
        """How far up or down (a factor of 1 or more) the middle `level` of the errors goes."""
        quantile = student_quantile((1 + level) / 2, self.freedom)
        return math.exp(quantile * self.scale * math.sqrt(max(0.0, doublings)))


def model_error(
    misses: Sequence[Miss], *, prior_scale: float = PRIOR_SCALE, prior_points: float = PRIOR_POINTS
) -> ModelError:
    """The error of a model by what it missed. `prior_scale`, `prior_points`: s0 and nu0; of a ledger of ten projections
    or more their root mean square and their number. Raises `ValueError`: a miss of no doublings.
    """
    if any(miss.doublings <= 0 for miss in misses):
        raise ValueError("a miss lies beyond the points it was predicted from, so its doublings are above 0")
    freedom = prior_points + len(misses)
    total = prior_points * prior_scale**2 + sum(miss.error**2 / miss.doublings for miss in misses)
    return ModelError(scale=math.sqrt(total / freedom), freedom=freedom, num_points=len(misses))
