"""Predicted times of collectives on a fitted network, step by step, all ranks in step (bulk-synchronous); and the error
of a model beyond the points that it was fitted to, which grows with each doubling.

A step takes as long as its most loaded port or link (`dlbench.perfmodels.topology`), by Hockney's alpha and beta, plus
gamma for every byte that its busiest rank adds: for messages of one size, their time under max-min fair sharing.

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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dlbench.errors import UserError
from dlbench.lazy import Array, np, npt
from dlbench.perfmodels.schedules import Layout, power_below
from dlbench.specs.comm import Collective, Level, LevelName, NetworkModel
from dlbench.stats.multiplicity import SEED, student_quantile

if TYPE_CHECKING:
    from dlbench.perfmodels.topology import Load

STAND_INS = ("ring", "double-binary-tree", "recursive-halving-doubling", "hierarchical")
"""Algorithms that a library may choose: NCCL rings and trees, MPI rings and halving, both with a hierarchy."""

_WHERE: dict[LevelName, str] = {
    "inside": "inside a group",
    "across": "across groups",
    "beyond": "between leaf switches",
}
PRIOR_SCALE = 0.03  # Without any observation, per square root of a doubling; see `make bench AREA=truth.projection`.
PRIOR_POINTS = 2.0  # Observations that the prior is worth.
_ROUNDS = 100  # Rounds of expectation-maximization.
HALVING = ("recursive-doubling", "recursive-halving", "recursive-halving-doubling", "shifted-halving-doubling")
FREE_RUNNING = (0.85, 1.3)
"""Time of `HALVING` with ranks out of step over that in lockstep, for ranks that are no power of two: about the middle
80 % over 3 to 100 simulated ranks, all within 0.78 to 1.6; rings and hierarchical are 1."""


def bus_factor(collective: Collective, ranks: int) -> float:
    """Returns busbw over algbw as nccl-tests defines them (doc/PERFORMANCE.md); bytes are those of a rank's whole
    buffer.
    """
    if collective in ("broadcast", "reduce", "p2p"):
        return 1.0
    if collective == "allreduce":
        return 2 * ((ranks - 1) / ranks)
    return (ranks - 1) / ranks


def whole_elements(num_bytes: int, element_bytes: int) -> int:
    """Returns the number of elements in `num_bytes`; raises `UserError` if an element would be cut."""
    if num_bytes < 0 or num_bytes % element_bytes:
        raise UserError(f"{num_bytes} bytes are no whole number of elements of {element_bytes} bytes")
    return num_bytes // element_bytes


@dataclass(frozen=True)
class Features:
    """A prediction as a linear function of the network's costs: seconds = sum of coefficients x costs."""

    starts: dict[tuple[LevelName, int], float]  # Start-ups by level and number of the piece.
    num_bytes: dict[tuple[LevelName, int], float]  # Bytes per link by level and number of the piece.
    reduced_bytes: float  # Bytes that the busiest rank adds.
    phi: dict[LevelName, float]
    """Flows of a link at once in the steps that it decides, the contention coefficient; 1: not shared."""

    def seconds(self, network: NetworkModel) -> float:
        by_level = self.link_seconds(network)
        for (name, piece), count in self.starts.items():
            by_level[name] = by_level.get(name, 0.0) + count * level_of(network, name).pieces[piece].alpha_s
        return self.reduced_bytes * network.gamma_s_per_byte + sum(by_level.values())

    def link_seconds(self, network: NetworkModel) -> dict[LevelName, float]:
        """Returns the seconds of the bytes on the links that decide, by level."""
        by_level: dict[LevelName, float] = {}
        for (name, piece), num_bytes in self.num_bytes.items():
            by_level[name] = by_level.get(name, 0.0) + num_bytes * level_of(network, name).pieces[piece].beta_s_per_byte
        return by_level

    def drawn(self, network: NetworkModel) -> npt.NDArray[np.float64]:
        """Returns the seconds by the costs of each of the network's `draws`, shape (draws,); the slowest links are the
        same in all.
        """
        if not network.draws:
            return np.zeros(0)
        counts: list[float] = []
        for name, level in network.levels.items():
            for piece in range(len(level.pieces)):
                counts += [self.starts.get((name, piece), 0.0), self.num_bytes.get((name, piece), 0.0)]
        seconds: npt.NDArray[np.float64] = _costs_drawn(network.draws) @ np.array([*counts, self.reduced_bytes])
        return seconds


@lru_cache(maxsize=4)
def _costs_drawn(draws: tuple[tuple[float, ...], ...]) -> npt.NDArray[np.float64]:
    return np.array(draws)


def level_of(network: NetworkModel, name: LevelName) -> Level:
    """Returns one level of a network; raises `UserError` if its messages were never measured."""
    level = network.levels.get(name)
    if level is None:
        raise UserError(
            f"network {network.system} over {network.transport}: messages {_WHERE[name]} were never measured; "
            "measure with --ranks and --group-size that have them (dlbench comm run), and fit again"
        )
    return level


def predict(
    collective: Collective, algorithm: str, num_bytes: int, layout: Layout, network: NetworkModel, **options: Any
) -> float:
    """Returns the seconds of a collective; arguments as for `features`."""
    return features(collective, algorithm, num_bytes, layout, network, **options).seconds(network)


def features(  # noqa: PLR0913  # A collective has this many properties.
    collective: Collective,
    algorithm: str,
    num_bytes: int,
    layout: Layout,
    network: NetworkModel,
    *,
    element_bytes: int = 4,
    shards: int | None = None,
    chunks: int | None = None,
) -> Features:
    """Returns how often each cost of the network counts in a prediction, for its most loaded ports and links.
    `num_bytes` is the size of each rank's whole buffer; other arguments as for `algorithms.schedule`.
    """
    from dlbench.perfmodels.topology import Sharing, summarise

    elements = whole_elements(num_bytes, element_bytes)
    if not elements:
        return Features({}, {}, 0.0, {})
    sharing = Sharing(**{name: level.links for name, level in network.levels.items()})
    summary = summarise(collective, algorithm, layout, elements, shards=shards, chunks=chunks, sharing=sharing)
    scale = num_bytes / summary.elements
    levels = {name: level_of(network, name) for name in summary.levels}

    def seconds(load: Load) -> float:
        level = levels[load.level]
        starts_s = sum(n * levels[name].piece(count * scale).alpha_s for name, count, n in load.starts)
        flows_s = sum(n * count * scale * level.piece(count * scale).beta_s_per_byte for count, n in load.flows)
        return starts_s + flows_s / load.links

    starts: dict[tuple[LevelName, int], float] = {}
    bytes_sent: dict[tuple[LevelName, int], float] = {}
    phi: dict[LevelName, float] = {}
    reduced = 0.0
    for step, times in summary.steps:
        reduced += times * step.reduced * scale
        load = max(step.loads, key=seconds)
        for name, count, n in load.starts:
            key = (name, _piece(levels[name], count * scale))
            starts[key] = starts.get(key, 0.0) + times * n
        for count, n in load.flows:
            key = (load.level, _piece(levels[load.level], count * scale))
            bytes_sent[key] = bytes_sent.get(key, 0.0) + times * n * count * scale / load.links
        phi[load.level] = max(load.phi, phi.get(load.level, 1.0))
    return Features(starts, bytes_sent, reduced, phi)


def _piece(level: Level, num_bytes: float) -> int:
    return level.pieces.index(level.piece(num_bytes))


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
