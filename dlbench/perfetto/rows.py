"""Reads steps and samples of a run's files on the axis of all nodes, and collects notes on problems."""
# A step file holds sums of phases, which are drawn one after the other from the step's start.

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

ROWS_AT_ONCE = 1024  # Steps or samples that are read together.


@dataclass(kw_only=True)
class Notes:
    """Problems and notes that are collected while a run is read."""

    problems: dict[str, None] = field(default_factory=dict)
    """Missing or damaged data, one sentence each, in the order of reading."""
    counts: Counter[str] = field(default_factory=Counter)  # Numbers by the words that follow them in a sentence.
    num_events: int = 0

    def problem(self, text: str) -> None:
        self.problems.setdefault(text)

    def count(self, words: str, number: int) -> None:
        if number:
            self.counts[words] += number

    def torn(self, num_bytes: int) -> None:
        """Counts a file that ends with `num_bytes` of an incomplete block."""
        self.count("files end in the middle of a block, because their writer was killed", int(num_bytes > 0))

    @property
    def sentences(self) -> list[str]:
        return [f"{number} {what}" for what, number in sorted(self.counts.items())]

    def guarded(self, items: Iterator[T]) -> Iterator[T]:
        """Yields the items up to the first damage of a file, which is noted."""
        try:
            yield from items
        except IncompleteDataError as error:
            self.problem(str(error))


def merged(blocks: Iterator[Rows], num_rows: int) -> Iterator[Rows]:
    """Yields the rows in arrays of at least `num_rows`, except the last; many small arrays would cost more time."""
    pending: list[Rows] = []
    count = 0
    try:
        for block in blocks:
            pending.append(block)
            count += len(block)
            if count >= num_rows:
                yield np.concatenate(pending)
                pending, count = [], 0
    except IncompleteDataError:
        # Rows before the damage are good.
        if pending:
            yield np.concatenate(pending)
        raise
    if pending:
        yield np.concatenate(pending)


def clean(text: str) -> str:
    """Returns a name from outside with a replacement for control characters and lone surrogates."""
    for letter in set(text):
        if not letter.isprintable():
            text = text.replace(letter, "�")
    return text


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Some steps of one rank, in order."""

    steps: Times  # (n,): numbers of the steps.
    warmup: npt.NDArray[np.bool_]  # (n,): whether it was a warm-up step.
    edges: Times  # (n, 8): start of the step, end of each phase in the order of `PHASES`, end of the step; nanoseconds.
    launch: Times | None = None
    """(n, 3): longest wait of the device for kernel launches by phase of `LAUNCHED`, nanoseconds; None on CPUs."""

    def aligned(self, clock: NodeClock) -> StepRows:
        return replace(self, edges=clock.align(self.edges))

    def chosen(self, steps: tuple[int, int] | None) -> StepRows:
        """Returns the steps from the first to the last of `steps`; None: all."""
        if steps is None:
            return self
        first, last = steps
        mask = (self.steps >= first) & (self.steps <= last)
        launch = self.launch[mask] if self.launch is not None else None
        return StepRows(steps=self.steps[mask], warmup=self.warmup[mask], edges=self.edges[mask], launch=launch)


def step_rows(path: Path, run_id: str, notes: Notes) -> Iterator[StepRows]:
    """Yields a rank's steps on its clock; raises `IncompleteDataError` at damage, after the steps before it."""
    reader = StepReader(path, run_id=run_id)
    end = -LARGEST_NS
    for rows in merged(reader.blocks(), ROWS_AT_ONCE):
        phases = np.stack([rows[f"{phase}_ns"] for phase in PHASES], axis=1)
        start, duration = rows["start_ns"].astype(np.int64), rows["step_ns"].astype(np.int64)
        times = np.concatenate([start[:, None], duration[:, None], phases], axis=1)
        if times.min() < 0 or times.max() >= LARGEST_NS:
            wrong = rows["step"][((times < 0) | (times >= LARGEST_NS)).any(axis=1)][0]
            raise IncompleteDataError(f"{path}: damaged: step {wrong} has an impossible time")
        before = np.cumsum(duration) - duration
        begin = np.maximum(np.maximum.accumulate(start - before), end) + before
        stop = begin + duration
        end = int(stop[-1])
        inner = begin[:, None] + np.cumsum(phases, axis=1)
        notes.count("steps were moved to the end of the step before", int((begin != start).sum()))
        notes.count("steps are shorter than the sum of their phases, which were cut", int((inner[:, -1] > stop).sum()))
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
    values: Mapping[str, Values]  # (n,) each: values in the units of the samples, by field.


def sample_rows(path: Path, run_id: str, clock: NodeClock, notes: Notes) -> Iterator[SampledRows]:
    """Yields a node's samples; raises `IncompleteDataError` at damage, after the samples before it."""
    reader = SamplesReader(path=path, run_id=run_id)
    for rows in merged(reader.blocks(), ROWS_AT_ONCE):
        is_valid = (rows["time_ns"] >= 0) & (rows["time_ns"] < LARGEST_NS)
        time = clock.align(np.where(is_valid, rows["time_ns"], 0))
        is_valid &= time >= 0
        notes.count("samples have an impossible time and are left out", int((~is_valid).sum()))
        values = {name: rows[name][is_valid].astype(np.float64) for name in reader.columns}
        yield SampledRows(time=time[is_valid], values=values)
    notes.torn(reader.torn_bytes)
