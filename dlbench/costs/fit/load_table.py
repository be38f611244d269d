"""The steps of many measured collectives as arrays, so that a fit can price all of them at once.

Columns of costs: alpha and beta of each piece inside groups, alpha and beta of each piece across groups, gamma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.costs.collectives import Layout
from dlbench.costs.fit.step_loads import Load, Sharing, summarise
from dlbench.costs.predictions import whole_elements
from dlbench.errors import UserError
from dlbench.specs.collectives.network import LevelName
from dlbench.specs.collectives.plan import Collective

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.int64]

LEVELS: tuple[LevelName, ...] = ("inside", "across")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured collective."""

    collective: Collective
    algorithm: str
    layout: Layout
    num_bytes: int
    """Of each rank's whole buffer."""
    element_bytes: int
    shards: int | None
    """Servers of parameter-server; None: every rank is one."""
    seconds: float
    """Measured."""


@dataclass(frozen=True)
class Structure:
    """Which costs a fit has: sizes in bytes up to which each piece goes (the last goes on), and whether gamma."""

    inside: tuple[int, ...] = ()
    across: tuple[int, ...] = ()
    gamma: bool = False

    def breaks(self, level: LevelName) -> tuple[int, ...]:
        """Breaks of one level."""
        return self.inside if level == "inside" else self.across

    def column(self, level: LevelName, piece: int) -> int:
        """Column of alpha of a piece; beta's is the next."""
        return 2 * piece if level == "inside" else 2 * (len(self.inside) + 1 + piece)

    @property
    def columns(self) -> int:
        """Number of columns; gamma's is the last, whether it is used or not."""
        return 2 * (len(self.inside) + len(self.across) + 2) + 1


class LoadTable:
    """Loads of all steps of all observations."""

    def __init__(self, observations: Sequence[Observation], sharing: Sharing) -> None:
        import numpy as np

        entries: list[tuple[int, int, float, float, float]] = []  # load, level, bytes of a message, starts, bytes
        load_steps: list[int] = []
        steps: list[tuple[int, int]] = []  # observation, how many there are
        reduced = np.zeros(len(observations))
        for index, seen in enumerate(observations):
            elements = whole_elements(seen.num_bytes, seen.element_bytes)
            if elements < 1 or not 0 < seen.seconds < float("inf"):
                raise UserError(f"fit: {seen.num_bytes} bytes in {seen.seconds} s are no measurement")
            summary = summarise(
                seen.collective, seen.algorithm, seen.layout, elements, shards=seen.shards, sharing=sharing
            )
            scale = seen.num_bytes / summary.elements
            for step, times in summary.steps:
                reduced[index] += times * step.reduced * scale
                if step.loads:
                    steps.append((index, times))
                for load in step.loads:
                    entries += _entries(load, len(load_steps), scale)
                    load_steps.append(len(steps) - 1)
        table = np.array(entries, dtype=np.float64).reshape(-1, 5)
        self._load: Indices = table[:, 0].astype(np.int64)
        self._level: Indices = table[:, 1].astype(np.int64)
        self._size, self._starts, self._bytes = table[:, 2], table[:, 3], table[:, 4]
        self._load_steps: Indices = np.array(load_steps, dtype=np.int64)
        self._first_loads: Indices = np.unique(self._load_steps, return_index=True)[1]
        self._steps: Indices = np.array(steps, dtype=np.int64).reshape(-1, 2)
        self.reduced: Array = reduced
        self.seconds: Array = np.array([seen.seconds for seen in observations])

    def sizes(self, level: LevelName) -> Array:
        """Distinct sizes of messages at a level, bytes, ascending; none if no message goes there."""
        import numpy as np

        return np.unique(self._size[self._level == LEVELS.index(level)])

    def loads(self, structure: Structure) -> Array:
        """How often each cost counts in each load: (loads, columns)."""
        import numpy as np

        columns = structure.columns
        column = np.zeros(len(self._load), dtype=np.int64)
        for index, level in enumerate(LEVELS):
            piece = np.searchsorted(np.array(structure.breaks(level), dtype=np.float64), self._size, side="left")
            column = np.where(self._level == index, structure.column(level, 0) + 2 * piece, column)
        length = len(self._load_steps) * columns
        flat: Array = np.bincount(self._load * columns + column, self._starts, length).astype(np.float64)
        flat += np.bincount(self._load * columns + column + 1, self._bytes, length)
        return flat.reshape(-1, columns)

    def rows(self, loads: Array, costs: Array, *, gamma: bool) -> Array:
        """How often each cost counts in each observation, (observations, columns), at the given costs.

        The costs decide which load of a step takes longest: the prediction is rows x costs. Without gamma, bytes that
        are added do not count.
        """
        import numpy as np

        seconds = loads @ costs
        rows = np.zeros((len(self.seconds), loads.shape[1]))
        if len(seconds):
            slowest = np.maximum.reduceat(seconds, self._first_loads)
            ties = np.flatnonzero(seconds == slowest[self._load_steps])
            _, first = np.unique(self._load_steps[ties], return_index=True)
            weighted = loads[ties[first]] * self._steps[:, 1:]
            present, begins = np.unique(self._steps[:, 0], return_index=True)
            rows[present] = np.add.reduceat(weighted, begins, axis=0)
        if gamma:
            rows[:, -1] = self.reduced
        return rows


def _entries(load: Load, number: int, scale: float) -> list[tuple[int, int, float, float, float]]:
    level = LEVELS.index(load.level)
    starts = [(number, level, count * scale, float(n), 0.0) for count, n in load.starts]
    return starts + [(number, level, count * scale, 0.0, n * count * scale) for count, n in load.flows]
