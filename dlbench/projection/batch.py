"""Models own work of a rank over its batch, w(b) = w0 + w1 b by pieces, and epochs to a target over the global batch,
E(B) = E0 (1 + B / Bc) (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.4).
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

LEAST_BATCHES = 3  # Global batches with runs to the target needed to fit both E0 and Bc.


def own_work(batches: Sequence[BatchFigures], batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Returns draws of a rank's own work at `batch` samples, seconds, shape (draws,). Equal seeds draw equal runs, so
    that ratios of two batches are paired. `batches`: two or more, ascending.
    """
    rng = np.random.default_rng([*seed, 0])
    batch_sizes = np.array([figures.batch_per_rank for figures in batches], dtype=np.float64)
    runs = [np.array(figures.own_work_s) for figures in batches]
    drawn = np.stack([rng.choice(work_s, (draws, len(work_s))).mean(axis=1) for work_s in runs], axis=1)
    if batch_sizes[0] <= batch <= batch_sizes[-1]:
        above = min(int(np.searchsorted(batch_sizes, batch, side="right")), len(batch_sizes) - 1)
        share = (batch - batch_sizes[above - 1]) / (batch_sizes[above] - batch_sizes[above - 1])
        inside: Array = drawn[:, above - 1] * (1 - share) + drawn[:, above] * share
        return inside
    end = 0 if batch < batch_sizes[0] else -1
    fixed, per_sample = _lines(batch_sizes, drawn)
    means = [own_work_s.mean() for own_work_s in runs]
    misses = []
    if len(batch_sizes) > 2:
        first, slope = _lines(batch_sizes[1:], np.array([means[1:]]))
        error = math.log(means[0] / (first[0] + slope[0] * batch_sizes[0]))
        misses.append(Miss(error=error, doublings=math.log2(batch_sizes[1] / batch_sizes[0])))
    beyond = model_error(misses).drawn(abs(math.log2(batch / batch_sizes[end])), draws, [*seed, 1])
    work: Array = drawn[:, end] * (fixed + per_sample * batch) / (fixed + per_sample * batch_sizes[end]) * beyond
    return work


def why_no_epochs(quality: QualityFigures) -> Refused | None:
    """Returns why epochs to the target cannot be projected (R10); None if they can."""
    batches = len({run.global_batch for run in quality.runs})
    if batches >= LEAST_BATCHES or (batches and quality.noise_scale is not None):
        return None
    noun = "global batch" if batches == 1 else "global batches"
    return refused("R10", None, batches=f"{batches} {noun}", least=LEAST_BATCHES)


def epochs(quality: QualityFigures, global_batch: int, draws: int, seed: Sequence[int]) -> Array:
    """Returns draws of the epochs to the target at a global batch, shape (draws,), by residuals of the law for each
    run; two points of the prior replace the two fitted constants. Raises `ValueError`: see `why_no_epochs`.
    """
    if (why := why_no_epochs(quality)) is not None:
        raise ValueError(why.text)
    rng = np.random.default_rng([*seed, 0])
    batch_sizes = np.array([run.global_batch for run in quality.runs], dtype=np.float64)
    run_epochs = np.array([run.epochs for run in quality.runs])
    slope = None
    if len(set(batch_sizes)) < LEAST_BATCHES:
        slope = 1 / (quality.noise_scale or math.inf)
    fitted = _law(batch_sizes, run_epochs[None, :], slope, batch_sizes)[0]
    scale = math.sqrt(
        (PRIOR_POINTS * PRIOR_SCALE**2 + float((np.log(run_epochs / fitted) ** 2).sum())) / len(batch_sizes)
    )
    sigma = scale * np.sqrt(len(batch_sizes) / rng.chisquare(len(batch_sizes), (draws, 1)))
    redrawn = fitted * np.exp(sigma * rng.standard_normal((draws, len(batch_sizes))))
    beyond = model_error(()).drawn(math.log2(global_batch / batch_sizes.max()), draws, [*seed, 1])
    drawn: Array = _law(batch_sizes, redrawn, slope, np.array([global_batch]))[:, 0] * beyond
    return drawn


def _law(batch_sizes: Array, run_epochs: Array, slope: float | None, targets: Array) -> Array:
    """Returns E0 (1 + B / Bc), shape (draws, targets), by epochs of shape (draws, runs). `slope`: 1 / Bc if known."""
    if slope is None:
        smallest, per_sample = _lines(batch_sizes, run_epochs)
        return np.asarray(smallest[:, None] + per_sample[:, None] * targets)
    smallest = np.exp(np.log(run_epochs / (1 + slope * batch_sizes)).mean(axis=1))
    return np.asarray(smallest[:, None] * (1 + slope * targets))


def _lines(x: Array, y: Array) -> Array:
    """Returns start and slope, both >= 0, with the least relative squares, for each row of y (draws, points)."""
    return relative_pairs(np.stack([1 / y, x / y], axis=2)).T
