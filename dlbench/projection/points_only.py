"""Extrapolates measured step times to more ranks, without a model of the step: T(p) = c0 ideal(p) + c1 x(p).

x is one of `LAWS` of k, the nodes (in one node: ranks over those of the smallest point); ideal is 1 under weak and 1/k
under strong scaling. Each draw takes a law by its prior times the likelihood of the points (Gelman et al., Bayesian
Data Analysis, 3rd edition, 2013, section 7.4). The prior favours laws that flatten: by four points of published series
a straight line gave 20 to 420 % too long steps at 8 to 16 times the ranks, logarithm and saturation 4 to 14 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import Miss, model_error
from dlbench.perfmodels.lines import relative_pairs
from dlbench.projection.ingredients import Ingredients, PointFigures
from dlbench.projection.projected import Flag
from dlbench.projection.refusals import MIN_POINTS, flagged, reasons, usable_points
from dlbench.report.wording import percent, ranks_text
from dlbench.stats.multiplicity import SEED, resampled

DRAWS = 1000
LAWS: Mapping[str, Callable[[float], float]] = {
    "a logarithm": math.log2,
    "a saturation": lambda k: 1 - 1 / k,
    "a square root": lambda k: math.sqrt(k) - 1,
    "a straight line": lambda k: k - 1,
    "k log k": lambda k: k * math.log2(k),
    "a square": lambda k: (k - 1) ** 2,
}
"""Growth of the time beyond the ideal with the nodes k, 0 for a single one, by name."""
PRIOR = (0.39, 0.39, 0.02, 0.03, 0.03, 0.14)
"""Prior probability of each law. Runs may hide a square that is large at four times the ranks: with a smaller prior,
bands do not cover such series (`make bench AREA=truth.points`)."""
NUM_FLAT = 2  # Laws that grow no faster than the logarithm: the first ones.
UPWARDS = 0.5  # Probability of growth above the logarithm from which a figure is flagged.
UNEXPLAINED = (0.001, 0.005, 0.03)
"""Unexplained errors of a point (standard deviation, logarithm), equally likely a priori: some per mille in clean runs,
1 to 4 % in published series of large machines."""
OVERHEAD = 0.3  # Prior standard deviation of the overhead of the largest point, as a share of its step.
LAW_SCALE = 0.015
"""Prior error of a law per square root of a doubling: less than `PRIOR_SCALE`, as the law and the unexplained error are
drawn separately."""


@dataclass(frozen=True, kw_only=True)
class ByPoints:
    """The step at a rank count by the points only."""

    law: str  # The most probable one of `LAWS`.
    step_s: Array  # By draw, seconds.
    error: Array  # Factor by the error of the law, included in `step_s`, by draw.
    flags: tuple[Flag, ...]  # F13 if the points bend upwards.


def points_only(ingredients: Ingredients, ranks: int, *, draws: int = DRAWS) -> ByPoints | None:
    """Returns the step by draws of runs, laws and errors of the law; None: the points are not sufficient."""
    if reasons(ingredients, ranks, by="points"):
        return None
    is_inside = ingredients.nodes_of(ranks) == 1
    points = usable_points(ingredients, ranks)
    if len(points) < MIN_POINTS:
        return None
    base = points[0].ranks if is_inside else ingredients.per_node
    counts = [point.ranks / base for point in points]
    is_strong = ingredients.scaling == "strong"
    by_run = [_steps(point) for point in points]
    drawn = resampled(by_run, centre="geometric mean", resamples=draws)
    assert drawn is not None  # Every point has `LEAST_RUNS` runs.
    middle = np.array([[statistics.geometric_mean(runs.values()) for runs in by_run]])
    # Runs of all points are assumed to have equal scatter, as each has few.
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
        # Each point from the third on is predicted by the smaller ones.
        times = np.vstack([middle, drawn])
        missed = np.log(times[:, last] / _at(best, counts[:last], times[:, :last], counts[last], is_strong))
        doublings = math.log2(counts[last] / counts[last - 1])
        misses.append(Miss(error=missed[0], doublings=doublings, scatter=missed[1:].std()))
    # Equal seeds, so that errors at several rank counts belong to one law.
    doublings = min(abs(math.log2(ranks / point.ranks)) for point in points)
    error = model_error(misses, prior_scale=LAW_SCALE).drawn(doublings, draws, [SEED, 8])
    step *= error
    if doublings == 0:  # A measured step needs no law.
        step = drawn[:, [point.ranks for point in points].index(ranks)]
    upwards = float(by_law[NUM_FLAT:].sum())
    point_flags: tuple[Flag, ...] = ()
    if upwards > UPWARDS:
        point_flags = (flagged("F13", probability=percent(upwards, 0), ranks=ranks_text(2 * points[-1].ranks)),)
    return ByPoints(law=best, step_s=step, error=error, flags=point_flags)


def _steps(point: PointFigures) -> dict[tuple[str, str], float]:
    return {(run.session, run.run_id): run.step_s for run in point.runs}


def _terms(law: str, counts: Sequence[float], is_strong: bool) -> Array:
    """Returns ideal and x of the law at each k, shape (counts, 2)."""
    ks = np.array(counts)
    ideal = 1 / ks if is_strong else np.ones_like(ks)
    return np.stack([ideal, np.array([LAWS[law](k) for k in counts])], axis=1)


def _weights(counts: Sequence[float], middle: Array, variances: Array, is_strong: bool) -> Array:
    """Returns the probability of each law with each unexplained error, shape (laws, errors), by a linear regression
    with a flat prior of c0 and a normal one of the overhead. `variances`: of the logarithms of `middle`, by runs.
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


def _at(law: str, counts: Sequence[float], times: Array, target_counts: float, is_strong: bool) -> Array:
    """Returns the law through times of shape (draws, points) at `counts`, at another k: shape (draws,)."""
    coefficients = relative_pairs(_terms(law, counts, is_strong) / times[..., None])
    at: Array = coefficients @ _terms(law, [target_counts], is_strong)[0]
    return at
