"""Steps and samples of a run's files on the axis of all nodes, and what is met while they are read.

A step file holds sums: phases are laid one after the other from the step's start; with gradient accumulation forward
and backward take turns, and only how long they took together is known. A step that would begin before the one before
has ended is moved behind it, and that is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times
from dlbench.perfetto.clocks import LARGEST_NS, NodeClock
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.steps import LAUNCH_FIELDS, PHASES, StepReader

T = TypeVar("T")
Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.void]

ROWS_AT_ONCE = 1024  # Steps, or samples, that are read together.


@dataclass(kw_only=True)
class Notes:
    """Collected while a run is read."""

    problems: dict[str, None] = field(default_factory=dict)
    """Missing or damaged data, a sentence each, in the order in which they were met."""
    counts: Counter[str] = field(default_factory=Counter)  # Things to know, sentences that go on after a number.
    num_events: int = 0

    def problem(self, text: str) -> None:
        self.problems.setdefault(text)

    def count(self, what: str, number: int) -> None:
        if number:
            self.counts[what] += number

    def torn(self, num_bytes: int) -> None:
        """A file was read that ends with these bytes of an incomplete block."""
        self.count("files end in the middle of a block, as who wrote them was killed", int(num_bytes > 0))

    @property
    def sentences(self) -> list[str]:
        return [f"{number} {what}" for what, number in sorted(self.counts.items())]

    def guarded(self, items: Iterator[T]) -> Iterator[T]:
        """The items up to where a file is damaged, which is noted."""
        try:
            yield from items
        except IncompleteDataError as error:
            self.problem(str(error))


def merged(blocks: Iterator[Rows], num_rows: int) -> Iterator[Rows]:
    """The same rows in arrays of at least `num_rows`, but for the last; many small arrays would cost more time."""
    held: list[Rows] = []
    count = 0
    try:
        for block in blocks:
            held.append(block)
            count += len(block)
            if count >= num_rows:
                yield np.concatenate(held)
                held, count = [], 0
    except IncompleteDataError:
        # What came before the damage is good.
        if held:
            yield np.concatenate(held)
        raise
    if held:
        yield np.concatenate(held)


def clean(text: str) -> str:
    """A name from outside, without control characters and halves of characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Some steps of one rank, in order."""

    steps: Times  # (n,): numbers of the steps.
    warmup: npt.NDArray[np.bool_]  # (n,): whether it was a warm-up step.
    edges: Times  # (n, 8): start of the step, end of each phase in the order of `PHASES`, end of the step; nanoseconds.
    launch: Times | None = None
    """(n, 3): how long the device waited for kernel launches in each phase of `LAUNCHED`, at most, nanoseconds; None on
    CPUs."""

    def aligned(self, clock: NodeClock) -> StepRows:
        return replace(self, edges=clock.align(self.edges))

    def chosen(self, steps: tuple[int, int] | None) -> StepRows:
        """Those from the first to the last of `steps`; all where that is None."""
        if steps is None:
            return self
        kept = (self.steps >= steps[0]) & (self.steps <= steps[1])
        launch = self.launch[kept] if self.launch is not None else None
        return StepRows(steps=self.steps[kept], warmup=self.warmup[kept], edges=self.edges[kept], launch=launch)


def step_rows(path: Path, run_id: str, notes: Notes) -> Iterator[StepRows]:
    """All steps of one rank, times on the rank's own clock. Raises IncompleteDataError: the file is missing or damaged;
    what came before has been given.
    """
    reader = StepReader(path, run_id=run_id)
    end = -LARGEST_NS
    for rows in merged(reader.blocks(), ROWS_AT_ONCE):
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


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Some samples of one node."""

    time: Times  # (n,): on the axis of all nodes, nanoseconds.
    values: Mapping[str, Values]  # (n,) each: as they were sampled, by field.


def sample_rows(path: Path, run_id: str, clock: NodeClock, notes: Notes) -> Iterator[SampledRows]:
    """All samples of one node; none where nothing was sampled. Raises IncompleteDataError: the file is missing or
    damaged; what came before has been given.
    """
    reader = SamplesReader(path=path, run_id=run_id)
    for rows in merged(reader.blocks(), ROWS_AT_ONCE):
        good = (rows["time_ns"] >= 0) & (rows["time_ns"] < LARGEST_NS)
        time = clock.align(np.where(good, rows["time_ns"], 0))
        good &= time >= 0
        notes.count("samples have a time that cannot be and are left out", int((~good).sum()))
        values = {name: rows[name][good].astype(np.float64) for name in reader.columns}
        yield SampledRows(time=time[good], values=values)
    notes.torn(reader.torn_bytes)
