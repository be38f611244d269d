"""Fits of non-negative costs by relative errors, robust against outliers.

Sizes of messages span five decades and so do times: plain least squares weighs a 100 MB message ten thousand times
more than a 10 kB one and gives absurd or negative start-ups (as the published code of MG-WFBP does). Here each point
counts by its relative error, and the sum of absolute values is made least, so that a few slow points do not move the
line. numpy is imported where it is needed: a login node may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.specs.comm import LineCost

SMALLEST_RESIDUAL = 1e-4  # Relative errors below this weigh as if they were this large.


def non_negative(rows: Array, target: Array) -> Array:
    """The x >= 0 with the least |rows x - target|^2. Columns of zeros get 0. Of two columns, which ranks fit as well,
    it is found here: ranks do without scipy. `rows`: (points, costs). `target`: (points,).
    """
    norms = np.sqrt((rows * rows).sum(axis=0))
    used = norms > 0
    scaled = rows / np.where(used, norms, 1.0)
    x = np.zeros(rows.shape[1])
    x[used] = np.linalg.lstsq(scaled[:, used], target, rcond=1e-12)[0]
    if (x < 0).any():
        if len(x) == 2:  # of one cost alone, the one that explains more
            gains = scaled.T @ target
            x = np.where(np.arange(2) == gains.argmax(), np.maximum(gains, 0.0), 0.0)
        else:
            from scipy.optimize import nnls

            x = nnls(scaled, target, maxiter=10 * len(x))[0]
    solution: Array = x / np.where(used, norms, 1.0)
    return solution


def reweighted(rows: Array, errors: Array) -> Array:
    """One step towards least absolute errors: weights 1 / |error| of the fit before. `rows`: (points, costs), divided
    by what was measured, so that 1 is aimed at. `errors`: (points,) relative errors of the fit before; zeros at first.
    """
    weights = 1.0 / np.sqrt(np.maximum(np.abs(errors), SMALLEST_RESIDUAL))
    return non_negative(rows * weights[:, None], weights)


def least_relative(rows: Array, measured: Array) -> Array:
    """The x >= 0 with the least sum of |rows x / measured - 1|, by iteratively reweighted least squares. `rows`:
    (points, costs). `measured`: (points,), positive.
    """
    relative = rows / measured[:, None]
    x = non_negative(relative, np.ones(len(measured)))
    best, least = x, float(np.abs(relative @ x - 1).sum())
    for _ in range(40):
        x = reweighted(relative, relative @ x - 1)
        total = float(np.abs(relative @ x - 1).sum())
        if total < least:
            gain, best, least = least - total, x, total
            if gain <= 1e-9 * least:
                break
    return best


def relative_pairs(rows: Array) -> Array:
    """Returns the two x >= 0 with the least |rows x - 1|^2, by draw, (draws, 2). `rows`: (draws, points, 2), divided by
    what was measured.
    """
    squares, sums = rows.swapaxes(1, 2) @ rows, rows.sum(axis=1)
    both = np.linalg.solve(squares, sums[..., None])[..., 0]
    # Where one would be below 0, the best has it at 0.
    alone = np.where(both < 0, 0.0, sums / np.diagonal(squares, axis1=1, axis2=2))
    return np.where(both.min(axis=1, keepdims=True) < 0, alone, both)


def fit_line(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LineCost:
    """A collective of one kind as a line: seconds = startup + bytes x per byte, by least absolute relative errors."""
    if len(set(sizes)) < 2:
        raise UserError(f"costs of {name}: a line needs two sizes or more, here are {len(set(sizes))}")
    measured = np.asarray(seconds, dtype=np.float64)
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise UserError(f"costs of {name}: every time must be positive")
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1)
    startup, per_byte = least_relative(rows, measured)
    return LineCost(name=name, startup_s=float(startup), per_byte_s=float(per_byte), ranks=ranks)
