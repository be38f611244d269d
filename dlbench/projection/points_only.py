"""The second opinion: what measured steps alone say of more ranks, without a word on why a step takes as long.

With k the nodes (inside one node: the ranks over those of the smallest point),

    T(p) = c0 ideal(p) + c1 x(p),   x = log2 k (trees, the slowest of k) or 1 - 1/k (bytes of a ring, Amdahl's share)

ideal = 1 under weak and 1/k under strong scaling; c0, c1 >= 0, by least relative squares. Of the two that counts which,
fitted without the largest point, comes nearer to it. How far it is off beyond the points is learnt from every point
that two or more smaller ones predict (`dlbench.perfmodels.extrapolation`).

There is no linear term. Fitted to four points of published series of a large machine it told 20 to 420 % too long at 8
to 16 times the ranks, where the two above were 4 to 14 % off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import Miss, model_error
from dlbench.projection.ingredients import Ingredients
from dlbench.projection.refusals import MIN_POINTS, reasons, usable_points
from dlbench.stats.pairing import SEED, resampled

DRAWS = 1000
CURVES: Mapping[str, Callable[[float], float]] = {"logarithm": math.log2, "saturation": lambda k: 1 - 1 / k}


@dataclass(frozen=True, kw_only=True)
class ByPoints:
    """The step at a rank count by the points alone."""

    curve: str  # One of `CURVES`.
    step_s: Array  # By draw, seconds.
    error: Array  # Factor of the curve's own error that is in it, by draw.


def points_only(ingredients: Ingredients, ranks: int, *, draws: int = DRAWS) -> ByPoints | None:
    """By draw over runs, and over how far the curve may be off; None where the points do not say."""
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

    def misses(curve: str) -> list[Miss]:
        """Each point from the third on, as the smaller ones have it."""
        found = []
        for place in range(MIN_POINTS - 1, len(points)):
            told = _at(curve, counts[:place], middle[:, :place], counts[place], is_strong)[0]
            doublings = math.log2(counts[place] / counts[place - 1])
            found.append(Miss(error=math.log(middle[0, place] / told), doublings=doublings))
        return found

    missed = {curve: misses(curve) for curve in CURVES}
    best = min(CURVES, key=lambda curve: abs(missed[curve][-1].error))
    # Equal seeds, so that errors at several rank counts are those of one curve.
    doublings = min(abs(math.log2(ranks / point.ranks)) for point in points)
    error = model_error(missed[best]).drawn(doublings, draws, [SEED, 8])
    step = _at(best, counts, drawn, ranks / base, is_strong) * error
    if doublings == 0:  # What was measured is no curve's.
        step = drawn[:, [point.ranks for point in points].index(ranks)]
    return ByPoints(curve=best, step_s=step, error=error)


def _at(curve: str, counts: Sequence[float], times: Array, wanted: float, is_strong: bool) -> Array:
    """The curve through times of shape (draws, points) at these k, at another k: shape (draws,)."""

    def terms(k: float) -> tuple[float, float]:
        return (1 / k if is_strong else 1.0), CURVES[curve](k)

    # Relative squares: both sides over the measured time, so that what is fitted is 1.
    rows = np.array([terms(k) for k in counts])[None] / times[..., None]
    squares, sums = rows.swapaxes(1, 2) @ rows, rows.sum(axis=1)
    both = np.linalg.solve(squares, sums[..., None])[..., 0]
    # Where one would be below 0, the best has it at 0.
    alone = np.where(both < 0, 0.0, sums / np.diagonal(squares, axis1=1, axis2=2))
    found: Array = np.where(both.min(axis=1, keepdims=True) < 0, alone, both) @ np.array(terms(wanted))
    return found
