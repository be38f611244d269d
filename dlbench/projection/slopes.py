"""How figures grow over the measured points: slopes of lines, drawn by how likely the points make them.

A slope has a prior; the points' error about the line is normal of unknown variance (Gelman et al., Bayesian Data
Analysis, 3rd edition, 2013, section 14.2), and level and variance are integrated out on a grid of slopes. So where the
points cannot tell, the prior is left, and the band is wide.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from dlbench.analysis.causes import CAUSES
from dlbench.lazy import Array, np, npt
from dlbench.perfmodels.extrapolation import PRIOR_POINTS
from dlbench.projection.ingredients import Ingredients
from dlbench.stats.resampling import SEED

MOST_SLOWED = 0.6
"""Most seconds that the backward pass may take longer for each second of exchange hidden in it; up to it all are as
likely before any was seen. Over four models of GPUs it was 18.9 % on average, at most 40 % (arXiv 2507.03114)."""
SESSIONS = (0.004, 0.012)
"""Deviation of computing from session to session, a share of it, before any was seen: where the points are of one
session, and where they are of several, so that something may have changed between them."""
_RATIO = 0.002  # Deviation of backward over forward from point to point that is expected, a share of it.
HOST = 0.01
"""Deviation, before any was seen, of what causes without a model grow by with each doubling, a share of the step."""
_HOST_SCATTER = 0.002  # Of these from point to point, a share of the step, that is expected.
WITHOUT_MODEL = tuple(name for name in CAUSES if name not in ("exchange", "straggler", "input", "compute"))
"""Causes of the account that stay as they are but for their growth over the points."""
_SLOPES = 201  # Values that a slope may have, between its ends.


@dataclass(frozen=True)
class Lines:
    """Slopes of lines of y over x, one for each column of y."""

    evidence: Array  # Logarithm of how likely a column is, but for a constant, shape (columns,).
    slopes: Array  # Values that a slope may have, ascending.
    chances: Array  # Of each, summed up, shape (slopes, columns).

    def drawn(self, columns: npt.NDArray[np.int64]) -> Array:
        """Returns slopes of these columns by draw, shape (draws,)."""
        draws = len(columns)
        shares = np.random.default_rng([SEED, 18]).permutation((np.arange(draws) + 0.5) / draws)
        found = np.zeros(draws)
        for column in np.unique(columns):
            is_drawn = columns == column
            found[is_drawn] = np.interp(shares[is_drawn], self.chances[:, column], self.slopes)
        return found


def lines(x: Array, y: Array, slopes: Array, prior: Array, expected: float) -> Lines:
    """Returns lines through points of x, shape (points,), and y, shape (points, columns).

    `slopes`, `prior`: values that a slope may have, and the logarithm of how likely each was before; `expected`: the
    variance expected of the error, with the weight of `PRIOR_POINTS` points.
    """
    x, y = x - x.sum() / max(1, len(x)), y - y.sum(axis=0) / max(1, len(y))
    squares = (y**2).sum(axis=0) - 2 * slopes[:, None] * (x @ y) + slopes[:, None] ** 2 * (x @ x)
    total = PRIOR_POINTS * expected + np.maximum(0.0, squares)
    freedom = PRIOR_POINTS + max(0, len(x) - 1)
    logs = prior[:, None] - freedom / 2 * np.log(total)
    chances = np.exp(logs - logs.max(axis=0))
    evidence = np.log(chances.sum(axis=0)) + logs.max(axis=0)
    return Lines(evidence, slopes, np.cumsum(chances, axis=0) / chances.sum(axis=0))


def normal_slopes(deviation: float) -> tuple[Array, Array]:
    """Returns values of a slope and the logarithms of their chances by a normal prior about 0."""
    slopes = np.linspace(-5 * deviation, 5 * deviation, _SLOPES)
    return slopes, -((slopes / deviation) ** 2) / 2


def slowed_by_hidden(ingredients: Ingredients, draws: int) -> tuple[Array, Array]:
    """Returns how many seconds the backward pass takes longer for each second of exchange hidden in it, and how much
    computing differs from session to session (standard deviation, a share of it), both of shape (draws,).

    Both are of the points of one batch. Nothing is hidden in the forward pass: from point to point it differs by hosts
    and sessions alone, and the backward pass as much, so that this is taken out of it.
    """
    forward, backward, hidden, run_variances = [], [], [], []
    for point in ingredients.points:
        runs = [run for run in point.runs if run.parts.get("forward") and run.communication_s is not None]
        if point.batch_per_rank != ingredients.anchor.batch_per_rank or len(runs) < len(point.runs):
            continue
        passes = [run.parts["forward"] for run in runs]
        forward.append(statistics.fmean(passes))
        backward.append(statistics.fmean(run.parts.get("backward", 0.0) for run in runs))
        hidden_s = [max(0.0, (run.communication_s or 0.0) - run.parts.get("exchange", 0.0)) for run in runs]
        hidden.append(statistics.fmean(hidden_s))
        if len(runs) > 1:
            run_variances.append(statistics.variance(passes) / len(runs) / forward[-1] ** 2)
    session = SESSIONS[len({run.session for point in ingredients.points for run in point.runs}) > 1]
    rng = np.random.default_rng([SEED, 20])
    if not forward:
        return rng.uniform(0.0, MOST_SLOWED, draws), np.full(draws, session)
    common = np.array(forward) / statistics.fmean(forward)
    slopes, expected = np.linspace(0.0, MOST_SLOWED, _SLOPES), (_RATIO * statistics.fmean(backward)) ** 2
    line = lines(hidden / common, (backward / common)[:, None], slopes, np.zeros(_SLOPES), expected)
    # Runs are drawn by themselves, so that their share of the variance does not count.
    of_runs, of_sessions = statistics.fmean(run_variances or [0.0]), session**2
    squares = PRIOR_POINTS * (of_runs + of_sessions) + ((np.log(common) - np.log(common).mean()) ** 2).sum()
    variances = squares / rng.chisquare(PRIOR_POINTS + len(common) - 1, draws) * of_sessions / (of_runs + of_sessions)
    return line.drawn(np.zeros(draws, dtype=np.int64)), np.sqrt(variances)


def host_growth(ingredients: Ingredients, draws: int) -> Array:
    """Returns how many seconds the causes without a model grow with each doubling of the ranks, over the points on
    several nodes, shape (draws,).
    """
    points = [point for point in ingredients.points if point.nodes > 1 and all(run.parts for run in point.runs)]
    if not points:
        return np.zeros(draws)
    host = []
    for point in points:
        of_runs = [sum(run.parts.get(name, 0.0) for name in WITHOUT_MODEL) for run in point.runs]
        host.append(statistics.fmean(of_runs))
    doublings = [math.log2(point.ranks / ingredients.anchor.ranks) for point in points]
    step = statistics.fmean(run.step_s for run in ingredients.anchor.runs)
    slopes, prior = normal_slopes(HOST * step)
    line = lines(np.array(doublings), np.array(host)[:, None], slopes, prior, (_HOST_SCATTER * step) ** 2)
    return line.drawn(np.zeros(draws, dtype=np.int64))
