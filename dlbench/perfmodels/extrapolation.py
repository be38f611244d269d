"""The error of a model beyond the points that it was fitted to, which grows with each doubling.

With e_i the logarithm of measured over predicted at a held-out point, d_i doublings beyond the points behind that
prediction, the error after d doublings is eps(d) = s sqrt(d) t_nu: the posterior predictive of a normal error with a
scaled inverse chi-squared prior of its variance (Gelman et al., Bayesian Data Analysis, 3rd edition, 2013, section
2.6). If the runs have the variance v_i, with w_i = s^2 d_i / (s^2 d_i + v_i), s is the root of s^2 = (nu0 s0^2 + sum_i
w_i^2 (e_i^2 - v_i) / d_i) / (nu0 + sum_i w_i^2), nu = nu0 + sum_i w_i^2, at which its posterior density is largest: an
error within the scatter of its runs tells nothing about the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.perfmodels.schedules import power_below
from dlbench.specs.comm import NetworkModel
from dlbench.stats.multiplicity import SEED, student_quantile

PRIOR_SCALE = 0.03  # Without any observation, per square root of a doubling; see `make bench AREA=truth.projection`.
PRIOR_POINTS = 2.0  # Observations that the prior is worth.
_ROUNDS = 100  # Rounds of expectation-maximization.
HALVING = ("recursive-doubling", "recursive-halving", "recursive-halving-doubling", "shifted-halving-doubling")
FREE_RUNNING = (0.85, 1.3)
"""Time of `HALVING` with ranks out of step over that in lockstep, for ranks that are no power of two: about the middle
80 % over 3 to 100 simulated ranks, all within 0.78 to 1.6; rings and hierarchical are 1."""


@dataclass(frozen=True, kw_only=True)
class Miss:
    """The error of a model at a point that it was not fitted to."""

    error: float  # log(measured / predicted).
    doublings: float  # Doublings beyond the points behind the prediction, above 0.
    scatter: float = 0.0  # Standard deviation of the error due to the scatter of runs.


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """The distribution of a model's error, as logarithms of measured over predicted."""

    scale: float  # s, per square root of a doubling.
    freedom: float  # nu, degrees of freedom.

    def drawn(self, doublings: float, draws: int, seed: Sequence[int]) -> Array:
        """Returns factors on a predicted time, shape (draws,); all 1 if nothing is extrapolated (`doublings` <= 0).
        They are quantiles of the distribution in random order, so that few draws represent its tails.
        """
        from scipy.special import stdtrit

        noise = stdtrit(self.freedom, np.random.default_rng(seed).permutation((np.arange(draws) + 0.5) / draws))
        factors: Array = np.exp(self.scale * math.sqrt(max(0.0, doublings)) * noise)
        return factors

    def factor(self, doublings: float, level: float) -> float:
        """Returns the factor (1 or more), up or down, within which the middle `level` of the errors is."""
        quantile = student_quantile((1 + level) / 2, self.freedom)
        return math.exp(quantile * self.scale * math.sqrt(max(0.0, doublings)))


def model_error(
    misses: Sequence[Miss], *, prior_scale: float = PRIOR_SCALE, prior_points: float = PRIOR_POINTS
) -> ModelError:
    """Returns the error of a model given its errors at other points; `prior_scale` and `prior_points` are s0 and nu0.
    For ten earlier projections or more these are the root mean square of their errors and their number.
    """
    variance = prior_scale**2
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
    """Returns the doublings from the largest fitted rank count; 0 up to it, and for costs that were not fitted."""
    return 0.0 if network.fitted_over is None else max(0.0, math.log2(ranks / network.fitted_over.ranks[-1]))


def network_error(network: NetworkModel, num_bytes: float) -> ModelError:
    """Returns the error of fitted costs for messages of `num_bytes`: of a fit without the largest rank count, at the
    nearest size.
    """
    held_out = network.largest_held_out
    if held_out is None:
        return model_error(())
    nearest = min(held_out.by_size, key=lambda bias: abs(math.log(bias.num_bytes / max(1.0, num_bytes))))
    doublings = math.log2(held_out.ranks / held_out.fitted_ranks[-1])
    return model_error([Miss(error=-math.log(nearest.ratio), doublings=doublings)])


def free_running(algorithm: str, ranks: int, draws: int) -> Array:
    """Returns factors for ranks out of step, shape (draws,), log-uniform over `FREE_RUNNING`; 1 for other algorithms
    and powers of two.
    """
    if algorithm not in HALVING or ranks == power_below(ranks):
        return np.ones(draws)
    low, high = np.log(FREE_RUNNING)
    factors: Array = np.exp(np.random.default_rng((SEED, 25, ranks)).uniform(low, high, draws))
    return factors


def network_factors(network: NetworkModel, collective: str, algorithm: str, num_bytes: float, ranks: int) -> Array:
    """Returns factors on a predicted time, one for each of the network's draws, shape (draws,).

    Half of the draws are at either end of the residuals at the nearest fitted rank counts; beyond those with
    `network_error`, the same in a draw for all algorithms, and `free_running` unless measured.
    """
    draws = len(network.draws)
    factors = network_error(network, num_bytes).drawn(doublings_beyond(network, ranks), draws, (SEED, 2))
    least, most = network.residual(collective, algorithm, ranks)
    factors[0::2] *= least
    factors[1::2] *= most
    measured = {(residual.collective, residual.algorithm, residual.ranks) for residual in network.residuals}
    if (collective, algorithm, ranks) not in measured:
        factors *= free_running(algorithm, ranks, draws)
    return factors
