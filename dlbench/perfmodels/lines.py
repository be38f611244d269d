"""Lines of costs over bytes: their fit, and which gradients to send in one message by them.

Costs are not negative and have the least absolute relative errors, robust against outliers. Plain least squares weighs
a 100 MB message ten thousand times more than a 10 kB one, and gives absurd start-ups.

Wait-free back-propagation sends each gradient as soon as it is ready (Zhang et al., Poseidon, USENIX ATC 2017); a
message starts when it is ready and the one before has ended. MG-WFBP (Shi, Chu & Li, INFOCOM 2019, algorithm 1) merges
by a rule over two neighbours, which is not always the best. Gradients are in the order in which they become ready.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dlbench.errors import UserError
from dlbench.lazy import Array, np
from dlbench.specs.comm import LineCost

SMALLEST_RESIDUAL = 1e-4  # Relative errors below this weigh as if they were this large.


def non_negative(rows: Array, target: Array) -> Array:
    """Returns the x >= 0 with the least |rows x - target|^2; 0 for columns of zeros. `rows` has shape (points, costs),
    `target` (points,). Two columns need no scipy, because ranks fit them, too.
    """
    norms = np.sqrt((rows * rows).sum(axis=0))
    used = norms > 0
    scaled = rows / np.where(used, norms, 1.0)
    x = np.zeros(rows.shape[1])
    x[used] = np.linalg.lstsq(scaled[:, used], target, rcond=1e-12)[0]
    if (x < 0).any():
        if len(x) == 2:  # The cost that explains more when it is alone.
            gains = scaled.T @ target
            x = np.where(np.arange(2) == gains.argmax(), np.maximum(gains, 0.0), 0.0)
        else:
            from scipy.optimize import nnls

            x = nnls(scaled, target, maxiter=10 * len(x))[0]
    solution: Array = x / np.where(used, norms, 1.0)
    return solution


def reweighted(rows: Array, errors: Array) -> Array:
    """Returns the costs after one step towards least absolute errors, with weights 1 / |error| of the fit before.

    `rows`, shape (points, costs), are over the measured values; `errors`, shape (points,), are relative, at first all
    equal.
    """
    weights = 1.0 / np.sqrt(np.maximum(np.abs(errors), SMALLEST_RESIDUAL))
    return non_negative(rows * weights[:, None], weights)


def least_relative(rows: Array, measured: Array) -> Array:
    """Returns the x >= 0 with the least sum of |rows x / measured - 1|, by iteratively reweighted least squares. `rows`
    has shape (points, costs), `measured` (points,), all positive.
    """
    relative = rows / measured[:, None]
    x = non_negative(relative, np.ones(len(measured)))
    best, best_error = x, float(np.abs(relative @ x - 1).sum())
    for _ in range(40):
        x = reweighted(relative, relative @ x - 1)
        error = float(np.abs(relative @ x - 1).sum())
        if error < best_error:
            gain, best, best_error = best_error - error, x, error
            if gain <= 1e-9 * best_error:
                break
    return best


def relative_pairs(rows: Array) -> Array:
    """Returns the two x >= 0 with the least |rows x - 1|^2 by draw, shape (draws, 2); `rows` have shape (draws, points,
    2).
    """
    squares, sums = rows.swapaxes(1, 2) @ rows, rows.sum(axis=1)
    unconstrained = np.linalg.solve(squares, sums[..., None])[..., 0]
    # If one would be below 0, the best has it at 0.
    alone = np.where(unconstrained < 0, 0.0, sums / np.diagonal(squares, axis1=1, axis2=2))
    return np.where(unconstrained.min(axis=1, keepdims=True) < 0, alone, unconstrained)


def fit_line(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> LineCost:
    """Returns the line seconds = startup + bytes x per byte of a collective, by least absolute relative errors. Raises
    `UserError`: there are fewer than two sizes, or a time is not positive.
    """
    if len(set(sizes)) < 2:
        raise UserError(f"costs of {name}: a line needs at least two sizes; got {len(set(sizes))}")
    measured = np.asarray(seconds, dtype=np.float64)
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise UserError(f"costs of {name}: every time must be positive")
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1)
    startup, per_byte = least_relative(rows, measured)
    return LineCost(name=name, startup_s=float(startup), per_byte_s=float(per_byte), ranks=ranks)


def merged(
    groups: Sequence[int], sizes: Sequence[float], ready_s: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the sizes of merged messages and when each is ready; `groups` are the numbers of gradients of each
    message.
    """
    ends = list(accumulate(groups))
    spans = [slice(end - count, end) for end, count in zip(ends, groups, strict=True)]
    return tuple(sum(sizes[span]) for span in spans), tuple(max(ready_s[span]) for span in spans)


def best_merge(sizes: Sequence[float], ready_s: Sequence[float], cost: LineCost) -> tuple[int, ...]:
    """Returns the gradients of each message so that the last exchange ends as early as any partition allows.

    Exact, by dynamic programming: end(j) = min over i of max(end(i), ready(j)) + startup + per byte x bytes of i + 1,
    ..., j. Takes time quadratic in the number of gradients; `ready_s` is ascending.
    """
    total = np.array([0.0, *accumulate(float(size) for size in sizes)])
    # For the first j gradients: end, messages, and the number of gradients before the last message.
    ends, messages, before = np.full(len(total), -math.inf), np.zeros(len(total)), [0]
    for j, ready in enumerate(ready_s, start=1):
        last_ends = np.maximum(ends[:j], ready) + (cost.startup_s + (total[j] - total[:j]) * cost.per_byte_s)
        earliest = np.flatnonzero(last_ends == last_ends.min())
        i = int(earliest[messages[earliest].argmin()])  # Of equal ends the fewest messages, then the longest last one.
        ends[j], messages[j] = last_ends[i], messages[i] + 1
        before.append(i)
    groups: list[int] = []
    j = len(sizes)
    while j:
        groups.append(j - before[j])
        j = before[j]
    return tuple(reversed(groups))


def hybrid_threshold(flat: LineCost, grouped: LineCost) -> int | None:
    """Returns the bytes from which on the flat exchange is no slower than the grouped one; 0: always, None: never."""
    startup, per_byte = flat.startup_s - grouped.startup_s, flat.per_byte_s - grouped.per_byte_s
    if per_byte > 0 or (per_byte == 0 and startup > 0):
        return None
    if startup <= 0:
        return 0
    return math.ceil(startup / -per_byte)
