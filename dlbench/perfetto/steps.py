"""Steps of a rank as intervals: where each phase begins and ends, drawn one after the other from the step's start.

A step file holds sums: with gradient accumulation forward and backward take turns, and only how long they took
together is known. A step that would begin before the one before has ended is moved behind it, and that is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError
from dlbench.perfetto.clocks import LARGEST_NS
from dlbench.perfetto.notes import Notes, merged
from dlbench.records.rows.steps import LAUNCH_FIELDS, PHASES, StepReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dlbench.perfetto.clocks import NodeClock, Times

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Some steps of one rank, in order."""

    steps: Times
    """(n,): numbers of the steps."""
    warmup: npt.NDArray[np.bool_]
    """(n,): whether it was a warm-up step."""
    edges: Times
    """(n, 8): start of the step, end of each phase in the order of `PHASES`, end of the step; nanoseconds."""
    launch: Times | None = None
    """(n, 3): how long the device waited for kernel launches in each phase of `LAUNCHED`, at most, nanoseconds; None on
    CPUs."""

    def aligned(self, clock: NodeClock) -> StepRows:
        """The same on the axis of all nodes."""
        return replace(self, edges=clock.align(self.edges))

    def chosen(self, steps: tuple[int, int] | None) -> StepRows:
        """Those from the first to the last of `steps`; all where that is None."""
        if steps is None:
            return self
        kept = (self.steps >= steps[0]) & (self.steps <= steps[1])
        launch = self.launch[kept] if self.launch is not None else None
        return StepRows(steps=self.steps[kept], warmup=self.warmup[kept], edges=self.edges[kept], launch=launch)


def step_rows(path: Path, notes: Notes) -> Iterator[StepRows]:
    """All steps of one rank, times on the rank's own clock.

    Raises:
        IncompleteDataError: the file is missing or damaged; what came before has been given.
    """
    import numpy as np

    reader = StepReader(path)
    end = -LARGEST_NS
    for rows in merged(reader.blocks(), _ROWS_AT_ONCE):
        phases = np.stack([rows[f"{phase}_ns"] for phase in PHASES], axis=1)
        start, took = rows["start_ns"].astype(np.int64), rows["step_ns"].astype(np.int64)
        times = np.concatenate([start[:, None], took[:, None], phases], axis=1)
        if times.min() < 0 or times.max() >= LARGEST_NS:
            wrong = rows["step"][((times < 0) | (times >= LARGEST_NS)).any(axis=1)][0]
            raise IncompleteDataError(f"{path}: damaged: step {wrong} has a time that cannot be")
        before = np.cumsum(took) - took
        begin = np.maximum(np.maximum.accumulate(start - before), end) + before
        stop = begin + took
        end = int(stop[-1])
        inner = begin[:, None] + np.cumsum(phases, axis=1)
        notes.count("steps were moved behind the end of the step before", int((begin != start).sum()))
        notes.count("steps are shorter than their phases together, which were cut", int((inner[:, -1] > stop).sum()))
        edges = np.concatenate([begin[:, None], np.minimum(inner, stop[:, None]), stop[:, None]], axis=1)
        launch = None
        if LAUNCH_FIELDS[0][0] in (rows.dtype.names or ()):
            launch = np.stack([rows[name].astype(np.int64) for name, _ in LAUNCH_FIELDS], axis=1)
        yield StepRows(steps=rows["step"].astype(np.int64), warmup=rows["warmup"] != 0, edges=edges, launch=launch)
    notes.torn(reader.torn_bytes)
