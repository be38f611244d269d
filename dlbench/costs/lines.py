"""Fits of non-negative costs by relative errors, robust against outliers.

Sizes of messages span five decades and so do times: plain least squares weighs a 100 MB message ten thousand times
more than a 10 kB one and gives absurd or negative start-ups (as the published code of MG-WFBP does). Here each point
counts by its relative error, and the sum of absolute values is made least, so that a few slow points do not move the
line. numpy is imported where it is needed: a login node may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlbench.errors import UserError
from dlbench.specs.collectives import LineCost

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]


SMALLEST_RESIDUAL = 1e-4
"""Relative errors below this weigh as if they were this large."""


def non_negative(rows: Array, target: Array) -> Array:
    """The x >= 0 with the least |rows x - target|^2 (Lawson & Hanson 1974, chapter 23). Columns of zeros get 0.

    Args:
        rows: (points, costs).
        target: (points,).
    """
    import numpy as np

    norms = np.sqrt((rows * rows).sum(axis=0))
    used = norms > 0
    scaled = rows / np.where(used, norms, 1.0)
    x = np.zeros(rows.shape[1])
    passive = used.copy()
    x[passive] = _least_squares(scaled[:, passive], target)
    if (x < 0).any():
        x, passive = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], dtype=bool)
        _grow(scaled, target, x, passive, used)
    solution: Array = x / np.where(used, norms, 1.0)
    return solution


def _least_squares(rows: Array, target: Array) -> Array:
    import numpy as np

    return np.asarray(np.linalg.lstsq(rows, target, rcond=1e-12)[0], dtype=np.float64)


def _grow(rows: Array, target: Array, x: Array, passive: npt.NDArray[np.bool_], used: npt.NDArray[np.bool_]) -> None:
    """Lawson & Hanson's loop: costs become positive one by one, and leave again when others push them below 0."""
    import numpy as np

    tolerance = 1e-12 * float(np.abs(rows.T @ target).max(initial=0.0))
    for _ in range(10 * len(x)):
        gradient = rows.T @ (target - rows @ x)
        gradient[passive | ~used] = -np.inf
        if gradient.max(initial=-np.inf) <= tolerance:
            return
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = _least_squares(rows[:, passive], target)
            below = passive & (trial <= 0)
            if not below.any():
                x[:] = trial
                break
            step = float(np.min(x[below] / (x[below] - trial[below])))
            x += step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0.0


def reweighted(rows: Array, errors: Array) -> Array:
    """One step towards least absolute errors: weights 1 / |error| of the fit before.

    Args:
        rows: (points, costs), divided by what was measured, so that 1 is aimed at.
        errors: (points,) relative errors of the fit before; zeros at first.
    """
    import numpy as np

    weights = 1.0 / np.sqrt(np.maximum(np.abs(errors), SMALLEST_RESIDUAL))
    return non_negative(rows * weights[:, None], weights)


def least_relative(rows: Array, measured: Array, rounds: int = 40) -> Array:
    """The x >= 0 with the least sum of |rows x / measured - 1|, by iteratively reweighted least squares.

    Args:
        rows: (points, costs).
        measured: (points,), positive.
        rounds: most reweightings.
    """
    import numpy as np

    relative = rows / measured[:, None]
    x = non_negative(relative, np.ones(len(measured)))
    best, least = x, float(np.abs(relative @ x - 1).sum())
    for _ in range(rounds):
        x = reweighted(relative, relative @ x - 1)
        total = float(np.abs(relative @ x - 1).sum())
        if total < least:
            gain, best, least = least - total, x, total
            if gain <= 1e-9 * least:
                break
    return best


def fit_line(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LineCost:
    """A collective of one kind as a line: seconds = startup + bytes x per byte, by least absolute relative errors.

    Args:
        name: what was timed.
        ranks: ranks it was timed with.
        sizes: bytes of each point.
        seconds: time of each point, positive.

    Raises:
        UserError: fewer than two sizes, or a time that is not positive.
        ValueError: not as many times as sizes.
    """
    import numpy as np

    if len(sizes) != len(seconds):
        raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times")
    if len(set(sizes)) < 2:
        raise UserError(f"costs of {name}: a line needs two sizes or more, here are {len(set(sizes))}")
    measured = np.asarray(seconds, dtype=np.float64)
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise UserError(f"costs of {name}: every time must be positive")
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1)
    startup, per_byte = least_relative(rows, measured)
    return LineCost(name=name, startup_s=float(startup), per_byte_s=float(per_byte), ranks=ranks)
