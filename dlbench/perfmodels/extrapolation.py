"""How far a model is to be trusted beyond what it was fitted to: an error that grows with each doubling.

What a model misses at points held out, and what earlier projections missed, says how far it will be off. With e_i the
logarithm of measured over predicted, d_i doublings beyond the points behind that prediction, the error after d
doublings is

    eps(d) = s sqrt(d) t_nu,   s^2 = (nu0 s0^2 + sum_i e_i^2 / d_i) / (nu0 + n),   nu = nu0 + n

the posterior predictive of a normal error with a scaled inverse chi-squared prior of its variance (Gelman et al.,
Bayesian Data Analysis, 3rd edition, 2013, section 2.6). Errors of successive doublings are taken to be independent, so
that their variances add.

`network_factors` applies it to fitted costs of a network, for all that is said of collectives at rank counts beyond the
fitted ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.specs.comm import NetworkModel
from dlbench.stats.multiplicity import student_quantile
from dlbench.stats.pairing import SEED

PRIOR_SCALE = 0.03
"""Error per square root of a doubling before any was seen; `make bench AREA=truth.projection` says what it covers."""
PRIOR_POINTS = 2.0  # Points that the prior counts as.


@dataclass(frozen=True, kw_only=True)
class Miss:
    """A point that a model was asked for without knowing it."""

    error: float  # log(measured / predicted).
    doublings: float  # Beyond the points behind the prediction, above 0.
    scatter: float = 0.0  # Standard deviation of the error that runs alone give it.


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """How far a model may be off, as logarithms of measured over predicted."""

    scale: float  # s, per square root of a doubling.
    freedom: float  # nu, degrees of freedom.

    def drawn(self, doublings: float, draws: int, seed: Sequence[int]) -> Array:
        """Factors on a predicted time (1), shape (draws,); all 1 where nothing is extrapolated (`doublings` <= 0). They
        are the quantiles of the distribution in random order, so that few draws hold its tails as it has them.
        """
        from scipy.special import stdtrit

        noise = stdtrit(self.freedom, np.random.default_rng(seed).permutation((np.arange(draws) + 0.5) / draws))
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
    return ModelError(scale=math.sqrt(total / freedom), freedom=freedom)


def doublings_beyond(network: NetworkModel, ranks: int) -> float:
    """Doublings from the largest fitted rank count; 0 up to it, and for costs that were not fitted."""
    return 0.0 if network.fitted_over is None else max(0.0, math.log2(ranks / network.fitted_over.ranks[-1]))


def network_error(network: NetworkModel, num_bytes: float) -> ModelError:
    """The error of fitted costs: by what a fit without the largest rank count missed there, at the size nearest to this
    (bytes); the prior alone where none was held out.
    """
    held = network.largest_held_out
    if held is None:
        return model_error(())
    near = min(held.by_size, key=lambda one: abs(math.log(one.num_bytes / max(1.0, num_bytes))))
    return model_error([Miss(error=-math.log(near.ratio), doublings=math.log2(held.ranks / held.fitted_ranks[-1]))])


def network_factors(network: NetworkModel, collective: str, algorithm: str, num_bytes: float, ranks: int) -> Array:
    """What a predicted time is multiplied with in each of the network's draws (1), shape (draws,).

    Half of the draws are at either end of what the fit misses at the fitted rank counts next to this one. Beyond the
    fitted rank counts the error of `network_error` comes to it, in a draw the same for all algorithms.
    """
    draws = len(network.draws)
    factors = network_error(network, num_bytes).drawn(doublings_beyond(network, ranks), draws, (SEED, 2))
    factors[0::2] *= (ends := network.residual(collective, algorithm, ranks))[0]
    factors[1::2] *= ends[1]
    return factors
