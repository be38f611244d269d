"""Draws slopes of lines over the measured points by their likelihood, with level and variance integrated out (Gelman et
al., Bayesian Data Analysis, 3rd edition, 2013, section 14.2). Without points the prior remains, and bands are wide.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import chain

from dlbench.analysis.causes import CAUSES
from dlbench.lazy import Array, np, npt
from dlbench.perfmodels.extrapolation import PRIOR_POINTS
from dlbench.projection.ingredients import Ingredients
from dlbench.stats.multiplicity import SEED

MOST_SLOWED = 0.6
"""Largest increase of the backward pass, in seconds, for each second of exchange hidden in it; the prior is uniform up
to it. Over four models of GPUs it was 18.9 % on average, at most 40 % (arXiv 2507.03114)."""
SESSIONS = (0.004, 0.012)
"""Prior deviation of computing between sessions, as a share: if the points are of one session, and if of several."""
_RATIO = 0.002  # Expected deviation of backward over forward between points, as a share.
HOST = 0.01
"""Prior deviation of the growth of causes without a model per doubling, as a share of the step."""
_HOST_SCATTER = 0.002  # Expected deviation of these causes between points, as a share of the step.
WITHOUT_MODEL = tuple(name for name in CAUSES if name not in ("exchange", "straggler", "input", "compute"))
"""Causes without a model; they only grow over the points."""
_SLOPES = 201  # Values of a slope on the grid.


@dataclass(frozen=True)
class Lines:
    """Slopes of lines of y over x, one for each column of y."""

    evidence: Array  # Log likelihood of each column plus a constant, shape (columns,).
    slopes: Array  # Values of a slope, ascending.
    chances: Array  # Cumulative chances of the slopes, shape (slopes, columns).

    def drawn(self, columns: npt.NDArray[np.int64]) -> Array:
        """Returns slopes of these columns by draw, shape (draws,)."""
        draws = len(columns)
        shares = np.random.default_rng([SEED, 18]).permutation((np.arange(draws) + 0.5) / draws)
        drawn = np.zeros(draws)
        for column in np.unique(columns):
            is_drawn = columns == column
            drawn[is_drawn] = np.interp(shares[is_drawn], self.chances[:, column], self.slopes)
        return drawn


def lines(x: Array, y: Array, slopes: Array, prior: Array, expected: float) -> Lines:
    """Returns lines through points with x of shape (points,), y of shape (points, columns). `slopes`, `prior`: values
    of a slope and logs of their chances; `expected`: variance of the error, with the weight of `PRIOR_POINTS` points.
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
    """Returns the slowdown of the backward pass per second of exchange hidden in it, and the deviation of computing
    between sessions (a share), both (draws,). The forward pass hides nothing, so it corrects for sessions.
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
    names = {run.session for run in chain.from_iterable(point.runs for point in ingredients.points)}
    one_session, several_sessions = SESSIONS
    session = one_session if len(names) == 1 else several_sessions
    rng = np.random.default_rng([SEED, 20])
    if not forward:
        return rng.uniform(0.0, MOST_SLOWED, draws), np.full(draws, session)
    common = np.array(forward) / statistics.fmean(forward)
    slopes, expected = np.linspace(0.0, MOST_SLOWED, _SLOPES), (_RATIO * statistics.fmean(backward)) ** 2
    line = lines(hidden / common, (backward / common)[:, None], slopes, np.zeros(_SLOPES), expected)
    # Runs are drawn separately, so their share of the variance is left out.
    of_runs, of_sessions = statistics.fmean(run_variances or [0.0]), session**2
    squares = PRIOR_POINTS * (of_runs + of_sessions) + ((np.log(common) - np.log(common).mean()) ** 2).sum()
    variances = squares / rng.chisquare(PRIOR_POINTS + len(common) - 1, draws) * of_sessions / (of_runs + of_sessions)
    return line.drawn(np.zeros(draws, dtype=np.int64)), np.sqrt(variances)


def host_growth(ingredients: Ingredients, draws: int) -> Array:
    """Returns the growth of causes without a model per doubling of the ranks, in seconds, shape (draws,)."""
    points = [point for point in ingredients.points if point.nodes > 1 and all(run.parts for run in point.runs)]
    if not points:
        return np.zeros(draws)
    host = []
    for point in points:
        seconds = 0.0
        for run in point.runs:
            seconds += sum(run.parts.get(name, 0.0) for name in WITHOUT_MODEL)
        host.append(seconds / len(point.runs))
    doublings = [math.log2(point.ranks / ingredients.anchor.ranks) for point in points]
    step = statistics.fmean(run.step_s for run in ingredients.anchor.runs)
    slopes, prior = normal_slopes(HOST * step)
    line = lines(np.array(doublings), np.array(host)[:, None], slopes, prior, (_HOST_SCATTER * step) ** 2)
    return line.drawn(np.zeros(draws, dtype=np.int64))
