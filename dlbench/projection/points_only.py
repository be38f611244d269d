"""What measured steps alone say of more ranks, without a word on why a step takes as long, where no model can.

With k the nodes (inside one node: the ranks over those of the smallest point),

    T(p) = c0 ideal(p) + c1 x(p),   x of `LAWS`, e.g. log2 k (trees, the slowest of k) or 1 - 1/k (bytes of a ring)

ideal = 1 under weak and 1/k under strong scaling; c0, c1 >= 0, by least relative squares. Each draw takes a law by its
prior times the likelihood of the points, which is how well it foretells each from the others (Gelman et al., Bayesian
Data Analysis, 3rd edition, 2013, section 7.4). Points miss a law by scatter and by an error that none explains.
How far a law is off beyond the points is learnt from every point that two or more smaller ones predict
(`dlbench.perfmodels.extrapolation`).

The prior favours laws that flatten: fitted to four points of published series of a large machine, a straight line told
20 to 420 % too long at 8 to 16 times the ranks, where logarithm and saturation were 4 to 14 % off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import Miss, model_error
from dlbench.perfmodels.lines import relative_pairs
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.projected import Flag
from dlbench.projection.refusals import MIN_POINTS, flagged, reasons, usable_points
from dlbench.report.wording import percent, ranks_text
from dlbench.stats.resampling import SEED, resampled

DRAWS = 1000
LAWS: Mapping[str, Callable[[float], float]] = {
    "a logarithm": math.log2,
    "a saturation": lambda k: 1 - 1 / k,
    "a square root": lambda k: math.sqrt(k) - 1,
    "a straight line": lambda k: k - 1,
    "k log k": lambda k: k * math.log2(k),
    "a square": lambda k: (k - 1) ** 2,
}
"""How time beyond the ideal grows with the nodes, 0 for a single one; by name in words."""
PRIOR = (0.39, 0.39, 0.02, 0.03, 0.03, 0.14)
"""Probability of each law before any point was seen. Runs may hide a square that is long at four times the ranks: with
less for it, bands do not hold such series (`make bench AREA=truth.points`)."""
NUM_FLAT = 2  # Laws that grow no faster than the logarithm: the first ones.
UPWARDS = 0.5  # Probability of a law that outgrows the logarithm beyond which a figure is flagged.
UNEXPLAINED = (0.001, 0.005, 0.03)
"""Errors of a point that no law explains (standard deviation, logarithm), each as probable before any point was seen:
some per mille where runs are clean, 1 to 4 % in published series of large machines."""
OVERHEAD = 0.3  # Overhead of the largest point (standard deviation), as a share of its step, before any was seen.
LAW_SCALE = 0.015
"""Error of a law per square root of a doubling before any was seen: less than `PRIOR_SCALE`, as the law itself and what
no law explains are drawn."""


@dataclass(frozen=True, kw_only=True)
class ByPoints:
    """The step at a rank count by the points alone."""

    law: str  # The most probable one of `LAWS`.
    step_s: Array  # By draw, seconds.
    error: Array  # Factor of the law's own error that is in it, by draw.
    flags: tuple[Flag, ...]  # Whether the points bend upwards.


def points_only(ingredients: Ingredients, ranks: int, *, draws: int = DRAWS) -> ByPoints | None:
    """By draw over runs, laws, and over how far a law may be off; None where the points do not say."""
    if reasons(ingredients, ranks, by="points"):
        return None
    is_inside = ingredients.nodes_of(ranks) == 1
    points = usable_points(ingredients, ranks)
    if len(points) < MIN_POINTS:
        return None
    base = points[0].ranks if is_inside else ingredients.per_node
    counts = [point.ranks / base for point in points]
    is_strong = ingredients.scaling == "strong"
    by_run = [{(run.session, run.run_id): run.step_s for run in point.runs} for point in points]
    drawn = resampled(by_run, centre="geometric mean", resamples=draws)
    assert drawn is not None  # Every point has `LEAST_RUNS`.
    middle = np.array([[statistics.geometric_mean(runs.values()) for runs in by_run]])
    # Runs of all points scatter alike, as far as so few of each can say.
    variance = statistics.fmean(statistics.variance(map(math.log, runs.values())) for runs in by_run)
    weights = _weights(counts, middle, variance / np.array([len(runs) for runs in by_run]), is_strong)
    rng = np.random.default_rng([SEED, 9])
    picks = np.searchsorted(np.cumsum(weights), rng.permutation((np.arange(draws) + 0.5) / draws))
    laws, unexplained = np.unravel_index(picks, weights.shape)
    fitted = drawn * np.exp(np.array(UNEXPLAINED)[unexplained, None] * rng.standard_normal(drawn.shape))
    step = np.empty(draws)
    for number, law in enumerate(LAWS):
        step[laws == number] = _at(law, counts, fitted[laws == number], ranks / base, is_strong)
    by_law = weights.sum(axis=1)
    best = list(LAWS)[by_law.argmax()]
    misses = []
    for last in range(MIN_POINTS - 1, len(points)):
        # Each point from the third on, as the smaller ones have it.
        times = np.vstack([middle, drawn])
        missed = np.log(times[:, last] / _at(best, counts[:last], times[:, :last], counts[last], is_strong))
        doublings = math.log2(counts[last] / counts[last - 1])
        misses.append(Miss(error=missed[0], doublings=doublings, scatter=missed[1:].std()))
    # Equal seeds, so that errors at several rank counts are those of one law.
    doublings = min(abs(math.log2(ranks / point.ranks)) for point in points)
    error = model_error(misses, prior_scale=LAW_SCALE).drawn(doublings, draws, [SEED, 8])
    step *= error
    if doublings == 0:  # What was measured is no law's.
        step = drawn[:, [point.ranks for point in points].index(ranks)]
    upwards = float(by_law[NUM_FLAT:].sum())
    told: tuple[Flag, ...] = ()
    if upwards > UPWARDS:
        told = (flagged("F13", probability=percent(upwards, 0), ranks=ranks_text(2 * points[-1].ranks)),)
    return ByPoints(law=best, step_s=step, error=error, flags=told)


def _terms(law: str, counts: Sequence[float], is_strong: bool) -> Array:
    """Returns ideal and x of the law at each k, shape (counts, 2)."""
    terms: Array = np.array([(1 / k if is_strong else 1.0, LAWS[law](k)) for k in counts])
    return terms


def _weights(counts: Sequence[float], middle: Array, variances: Array, is_strong: bool) -> Array:
    """Returns how probable each law is with each error that no law explains, shape (laws, errors); they sum to 1.

    `variances`: of the logarithms of `middle`, by runs alone. The likelihood is a linear regression's with a flat prior
    of c0 and a normal one of the overhead at the largest point, as a share of the step there.
    """
    precisions = 1 / (np.square(UNEXPLAINED)[:, None] + variances)  # Shape (errors, points).
    logs = np.empty((len(LAWS), len(UNEXPLAINED)))
    for number, law in enumerate(LAWS):
        rows = _terms(law, counts, is_strong) / middle.T
        rows[:, 1] /= rows[-1, 1]
        squares, sums = rows.T * precisions[:, None] @ rows, precisions @ rows
        squares[:, 1, 1] += OVERHEAD**-2
        fitted = (np.linalg.solve(squares, sums[..., None])[..., 0] * sums).sum(axis=1)
        volume = np.linalg.slogdet(squares)[1] - np.log(precisions).sum(axis=1)
        logs[number] = math.log(PRIOR[number]) - (precisions.sum(axis=1) - fitted + volume) / 2
    weights: Array = np.exp(logs - logs.max())
    weights /= weights.sum()
    return weights


def _at(law: str, counts: Sequence[float], times: Array, wanted: float, is_strong: bool) -> Array:
    """The law through times of shape (draws, points) at these k, at another k: shape (draws,)."""
    coefficients = relative_pairs(_terms(law, counts, is_strong) / times[..., None])
    at: Array = coefficients @ _terms(law, [wanted], is_strong)[0]
    return at
