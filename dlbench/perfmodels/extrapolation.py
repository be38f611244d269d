"""How far a model is to be trusted beyond what it was fitted to: an error that grows with each doubling.

What a model misses at points held out, and what earlier projections missed, says how far it will be off. With e_i the
logarithm of measured over predicted, d_i doublings beyond the points behind that prediction, the error after d
doublings is

    eps(d) = s sqrt(d) t_nu,   s^2 = (nu0 s0^2 + sum_i e_i^2 / d_i) / (nu0 + n),   nu = nu0 + n

the posterior predictive of a normal error with a scaled inverse chi-squared prior of its variance (Gelman et al.,
Bayesian Data Analysis, 3rd edition, 2013, section 2.6). Errors of successive doublings are taken to be independent, so
that their variances add.

Runs scatter, so that a miss is e_i ~ N(0, s^2 d_i + v_i) where its runs alone have the variance v_i. With w_i =
s^2 d_i / (s^2 d_i + v_i), the share of it that the model can have, s is the root of

    s^2 = (nu0 s0^2 + sum_i w_i^2 (e_i^2 - v_i) / d_i) / (nu0 + sum_i w_i^2),   nu = nu0 + sum_i w_i^2

at which the posterior density of s is largest (w_i^2 is the Fisher information of a miss about s, over that of one
without scatter): a miss within the scatter of its runs says nothing, neither that the model is right nor wrong.

`network_factors` applies it to fitted costs of a network, for all that is said of collectives at rank counts beyond the
fitted ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.perfmodels.schedules import power_below
from dlbench.specs.comm import NetworkModel
from dlbench.stats.multiplicity import student_quantile
from dlbench.stats.resampling import SEED

PRIOR_SCALE = 0.03
"""Error per square root of a doubling before any was seen; `make bench AREA=truth.projection` says what it covers."""
PRIOR_POINTS = 2.0  # Points that the prior counts as.
_ROUNDS = 100  # Of the likelihood's maximisation; each brings it nearer.
HALVING = ("recursive-doubling", "recursive-halving", "recursive-halving-doubling", "shifted-halving-doubling")
FREE_RUNNING = (0.85, 1.3)
"""Time over price in lockstep of these where the ranks are no power of two and each goes on by its own clock: about the
middle 80 % over 3 to 100 ranks, simulated with equal costs, with messages eight times faster inside nodes, and with
messages that wait for one of their ranks or for both. All were within 0.78 to 1.6; rings and hierarchical are 1."""


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
    or more their root mean square and their number.
    """
    variance, information = prior_scale**2, float(len(misses))
    for _ in range(_ROUNDS):
        # Expected squares of the model's own errors, given what it missed (Dempster, Laird and Rubin, JRSS B 39, 1977).
        total, information = prior_points * prior_scale**2, 0.0
        for miss in misses:
            share = 1.0
            if miss.scatter:
                share = variance * miss.doublings / (variance * miss.doublings + miss.scatter**2)
            total += share**2 * miss.error**2 / miss.doublings + (1 - share) * variance
            information += share**2
        variance = total / (prior_points + len(misses))
    return ModelError(scale=math.sqrt(variance), freedom=prior_points + information)


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


def free_running(algorithm: str, ranks: int, draws: int) -> Array:
    """Returns what a price in lockstep is multiplied with (1), shape (draws,): between the ends of `FREE_RUNNING`,
    uniform in logarithms; 1 for other algorithms and powers of two.
    """
    if algorithm not in HALVING or ranks == power_below(ranks):
        return np.ones(draws)
    low, high = np.log(FREE_RUNNING)
    factors: Array = np.exp(np.random.default_rng((SEED, 25, ranks)).uniform(low, high, draws))
    return factors


def network_factors(network: NetworkModel, collective: str, algorithm: str, num_bytes: float, ranks: int) -> Array:
    """What a predicted time is multiplied with in each of the network's draws (1), shape (draws,).

    Half of the draws are at either end of what the fit misses at the fitted rank counts next to this one. Beyond the
    fitted rank counts the error of `network_error` comes to it, in a draw the same for all algorithms, and that of
    ranks out of lockstep where it was not measured.
    """
    draws = len(network.draws)
    factors = network_error(network, num_bytes).drawn(doublings_beyond(network, ranks), draws, (SEED, 2))
    factors[0::2] *= (ends := network.residual(collective, algorithm, ranks))[0]
    factors[1::2] *= ends[1]
    measured = {(one.collective, one.algorithm, one.ranks) for one in network.residuals}
    if (collective, algorithm, ranks) not in measured:
        factors *= free_running(algorithm, ranks, draws)
    return factors
