"""Costs of a given structure by alternating between rows and costs.

Which port or link is the slowest of a step depends on the costs themselves. So with the costs in hand, the slowest of
each step gives one row a point; the rows give new costs by one step towards least absolute relative errors; and again.
The best round counts.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.costs.fit.least_errors import reweighted
from dlbench.costs.fit.load_table import LEVELS, LoadTable, Structure

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]

ROUNDS = 60
PATIENCE = 6
"""Rounds without a better fit after which the rounds end."""
# Alpha and beta inside and across from which fitting starts; the better end counts.
_STARTS = (((1e-5, 1e-10), (1e-5, 1e-10)), ((1e-5, 1e-10), (1e-4, 1e-8)))


@dataclass(frozen=True)
class CostFit:
    """Costs of a structure, fitted to some points."""

    structure: Structure
    costs: Array
    error: float
    """Mean |predicted / measured - 1|."""
    rows: Array
    """Of all observations, at these costs."""


def descend(table: LoadTable, structure: Structure, points: Mask, old: CostFit | None = None) -> CostFit:
    """The best costs for some of the points, beginning from those of another fit or from general ones."""
    loads = table.loads(structure)
    starts = (
        [_begin(structure, inside, across) for inside, across in _STARTS] if old is None else [_carry(old, structure)]
    )
    return min((_rounds(table, loads, structure, points, start) for start in starts), key=lambda fit: fit.error)


def _begin(structure: Structure, inside: tuple[float, float], across: tuple[float, float]) -> Array:
    import numpy as np

    pieces = [inside] * (len(structure.inside) + 1) + [across] * (len(structure.across) + 1)
    return np.array([*(cost for piece in pieces for cost in piece), 0.0])


def _carry(old: CostFit, structure: Structure) -> Array:
    """Costs of a fit as those of a structure with more pieces: each begins with the piece that it was part of."""
    import numpy as np

    costs = np.zeros(structure.columns)
    costs[-1] = old.costs[-1]
    for level in LEVELS:
        for piece, limit in enumerate((*structure.breaks(level), math.inf)):
            new = structure.column(level, piece)
            was = old.structure.column(level, bisect.bisect_left(old.structure.breaks(level), limit))
            costs[new : new + 2] = old.costs[was : was + 2]
    return costs


def _rounds(table: LoadTable, loads: Array, structure: Structure, points: Mask, costs: Array) -> CostFit:
    """Rows at the costs, costs from the rows, and again; the best round counts, the start does not."""
    import numpy as np

    best: CostFit | None = None
    errors = np.ones(len(table.seconds))
    since = 0
    rows = table.rows(loads, costs, gamma=structure.gamma)
    for _ in range(ROUNDS):
        costs = reweighted(rows[points] / table.seconds[points, None], errors[points])
        rows = table.rows(loads, costs, gamma=structure.gamma)
        errors = rows @ costs / table.seconds - 1
        error = float(np.abs(errors[points]).mean())
        since += 1
        if best is None or error < best.error:
            since = 0 if best is None or error < best.error * (1 - 1e-4) else since
            best = CostFit(structure, costs, error, rows)
        if since >= PATIENCE:
            break
    assert best is not None
    return best
