"""What a batch costs and what it is worth: own work of a rank over its batch, epochs to a target over the global batch.

Own work is w(b) = w0 + w1 b, piecewise through all measured batches; beyond the smallest or the largest it is the line
of all of them through that end, with a model error that grows with each halving or doubling
(`dlbench.perfmodels.extrapolation`), learnt from the smallest batch as the others foretell it.

Epochs to a target are E(B) = E0 (1 + B / Bc) (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
section 2.4: examples processed over the least of them, where each batch has its own best learning rate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlbench.lazy import Array, np
from dlbench.perfmodels.extrapolation import PRIOR_POINTS, PRIOR_SCALE, Miss, model_error
from dlbench.perfmodels.lines import relative_pairs
from dlbench.projection.ingredients import BatchFigures, QualityFigures
from dlbench.projection.projected import Refused
from dlbench.projection.refusals import refused

LEAST_BATCHES = 3  # Global batches with runs to the target from which E0 and Bc are both fitted.


def own_work(batches: Sequence[BatchFigures], batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Drawn own work of a rank at `batch` samples, seconds, shape (draws,): the runs of each batch are drawn with
    replacement, and beyond the measured batches the model's error is in it. Equal seeds draw equal runs, so that ratios
    of two batches are of the same runs. `batches`: two or more, ascending.
    """
    rng = np.random.default_rng([*seed, 0])
    at = np.array([one.batch_per_rank for one in batches], dtype=np.float64)
    runs = [np.array(one.own_work_s) for one in batches]
    drawn = np.stack([rng.choice(one, (draws, len(one))).mean(axis=1) for one in runs], axis=1)
    if at[0] <= batch <= at[-1]:
        above = min(int(np.searchsorted(at, batch, side="right")), len(at) - 1)
        share = (batch - at[above - 1]) / (at[above] - at[above - 1])
        inside: Array = drawn[:, above - 1] * (1 - share) + drawn[:, above] * share
        return inside
    end = 0 if batch < at[0] else -1
    fixed, each = _lines(at, drawn)
    known = [one.mean() for one in runs]
    misses = []
    if len(at) > 2:
        first, slope = _lines(at[1:], np.array([known[1:]]))
        error = math.log(known[0] / (first[0] + slope[0] * at[0]))
        misses.append(Miss(error=error, doublings=math.log2(at[1] / at[0])))
    beyond = model_error(misses).drawn(abs(math.log2(batch / at[end])), draws, [*seed, 1])
    work: Array = drawn[:, end] * (fixed + each * batch) / (fixed + each * at[end]) * beyond
    return work


def why_no_epochs(quality: QualityFigures) -> Refused | None:
    """Why nothing is said of the epochs to the target (R10); None where something is."""
    batches = len({one.global_batch for one in quality.runs})
    if batches >= LEAST_BATCHES or (batches and quality.noise_scale is not None):
        return None
    known = f"runs at {batches} global batch{'es' * (batches != 1)} (at least {LEAST_BATCHES})"
    return refused("R10", None, known=known)


def epochs(quality: QualityFigures, global_batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Drawn epochs to the target at a global batch, shape (draws,). What the law leaves over at its own runs is drawn
    anew for each of them; two points of the prior of `dlbench.perfmodels.extrapolation` stand for the two constants
    fitted. Beyond the largest batch of a run the model's error is in it. Raises `ValueError`: see `why_no_epochs`.
    """
    if (why := why_no_epochs(quality)) is not None:
        raise ValueError(why.text)
    rng = np.random.default_rng([*seed, 0])
    at = np.array([one.global_batch for one in quality.runs], dtype=np.float64)
    met = np.array([one.epochs for one in quality.runs])
    slope = None if len(set(at)) >= LEAST_BATCHES else 1 / (quality.noise_scale or math.inf)
    fitted = _law(at, met[None, :], slope, at)[0]
    scale = math.sqrt((PRIOR_POINTS * PRIOR_SCALE**2 + float((np.log(met / fitted) ** 2).sum())) / len(at))
    sigma = scale * np.sqrt(len(at) / rng.chisquare(len(at), (draws, 1)))
    again = fitted * np.exp(sigma * rng.standard_normal((draws, len(at))))
    beyond = model_error(()).drawn(math.log2(global_batch / at.max()), draws, [*seed, 1])
    found: Array = _law(at, again, slope, np.array([global_batch]))[:, 0] * beyond
    return found


def _law(at: Array, met: Array, slope: float | None, asked: Array) -> Array:
    """E0 (1 + B / Bc) at the batches asked, (draws, asked), of epochs (draws, runs). `slope`: 1 / Bc if known."""
    if slope is None:
        least, each = _lines(at, met)
        return np.asarray(least[:, None] + each[:, None] * asked)
    least = np.exp(np.log(met / (1 + slope * at)).mean(axis=1))
    return np.asarray(least[:, None] * (1 + slope * asked))


def _lines(x: Array, y: Array) -> Array:
    """Start and slope, both >= 0, of the least squares of relative errors, for each row of y (draws, points)."""
    return relative_pairs(np.stack([1 / y, x / y], axis=2)).T
