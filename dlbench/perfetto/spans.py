"""Spans of a rank, each with the thread of the trace on which it is drawn.

Slices of one thread must lie within each other or apart: Perfetto drops what overlaps in part. Spans of a lane that
overlap so are spread over several threads. Messages always overlap and are drawn without a thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.perfetto.clocks import LARGEST_NS
from dlbench.perfetto.notes import Notes, merged
from dlbench.records.rows.spans import COMPUTE, EXCHANGE, INPUT, STAGE, STAGING, SWAP, SpanReader

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dlbench.perfetto.clocks import NodeClock, Times
    from dlbench.perfetto.notes import Rows

STAGES_THREAD, COMPUTE_THREAD, LAYERS_THREAD, EXCHANGE_THREAD = 1, 2, 3, 4
INPUT_THREAD, STAGING_THREAD, SWAP_THREAD, PROFILER_THREAD = 5, 6, 7, 8
THREAD_NAMES = ("", "stages", "compute", "layers", "exchange", "input", "staging", "swap", "profiler")
"""Kinds of threads of a rank, in the order in which they are shown."""

_THREAD_OF_LANE = {
    STAGE: STAGES_THREAD,
    COMPUTE: LAYERS_THREAD,
    EXCHANGE: EXCHANGE_THREAD,
    INPUT: INPUT_THREAD,
    STAGING: STAGING_THREAD,
    SWAP: SWAP_THREAD,
}

SPANS_AT_ONCE = 65_536
"""Spans held in memory."""
DEEPEST = 32
"""Spans that may overlap in part on one track; more are left out and counted."""


def thread_id(kind: int, track: int = 0, sub: int = 0) -> int:
    """Number of a thread within a rank's process: the same in every trace of the run, and no process has it."""
    return kind << 24 | track << 8 | sub


def thread_name(tid: int) -> str:
    """What the thread of that number is called."""
    kind, track, sub = tid >> 24, tid >> 8 & 0xFFFF, tid & 0xFF
    return THREAD_NAMES[kind] + (f" {track}" if track else "") + (f" ({sub + 1})" if sub else "")


@dataclass(frozen=True, kw_only=True)
class SpanRows:
    """Some spans of one rank."""

    rows: Rows
    """With the fields of `SPAN_FIELDS`, times on the rank's own clock."""
    number: int
    """How many spans the file has before these."""
    start: Times
    """(n,): on the axis of all nodes, nanoseconds; as the next two."""
    end: Times
    ready: Times
    """When it was queued; its start where it was not."""
    threads: Times
    """(n,): number of the thread, see `thread_id`; -1 where it is left out."""
    names: list[str]
    """By number."""

    def shown(self, steps: tuple[int, int] | None, window: tuple[int, int] | None) -> npt.NDArray[np.bool_]:
        """Which are shown: those of the steps, and those of no step that overlap the steps' time."""
        kept: npt.NDArray[np.bool_] = self.threads >= 0
        if steps is None or window is None:
            return kept
        number = self.rows["step"]
        during = (number < 0) & (self.ready <= window[1]) & (self.end >= window[0])
        return kept & (during | ((number >= steps[0]) & (number <= steps[1])))


class SpanSource:
    """The spans of one rank; read again each time, unless they fit into memory.

    Args:
        path: the file.
        clock: the rank's.
        notes: what is met goes there.
    """

    def __init__(self, path: Path, clock: NodeClock, notes: Notes) -> None:
        self._path, self._clock, self._notes = path, clock, notes
        self._is_told = False
        batches = notes.guarded(self._read())
        self._first = next(batches, None)
        self._is_all = next(batches, None) is None

    def _read(self) -> Iterator[tuple[Rows, list[str]]]:
        reader = SpanReader(path=self._path)
        for rows in merged(reader.blocks(), SPANS_AT_ONCE):
            yield rows, reader.names
        # Read more than once where there are many: told once.
        if not self._is_told:
            self._notes.torn(reader.torn_bytes)
            self._is_told = True

    @property
    def watched_steps(self) -> set[int]:
        """Steps whose layers may lie within their phases; none where there are too many spans to look."""
        if self._first is None or not self._is_all:
            return set()
        rows = self._first[0]
        return {int(step) for step in set(rows["step"][rows["lane"] == COMPUTE].tolist()) if step >= 0}

    def batches(self, edges: Mapping[int, Times]) -> Iterator[SpanRows]:
        """All spans.

        Args:
            edges: of the watched steps, see `StepRows.edges`.
        """
        if self._first is None:
            return
        tracks = Tracks()
        number = 0
        for rows, names in [self._first] if self._is_all else self._notes.guarded(self._read()):
            yield self._placed(rows, names, number, tracks, edges)
            number += len(rows)

    def _placed(
        self, rows: Rows, names: list[str], number: int, tracks: Tracks, edges: Mapping[int, Times]
    ) -> SpanRows:
        import numpy as np

        local, took, queued = rows["start_ns"], rows["duration_ns"], rows["queued_ns"]
        times = np.stack([local, took, queued])
        good = (times >= 0).all(axis=0) & (times < LARGEST_NS).all(axis=0) & (queued <= local)
        good &= (rows["lane"] < len(_THREAD_OF_LANE)) & (rows["name"] < len(names))
        self._notes.count("spans are damaged (times, lanes or names that cannot be) and left out", int((~good).sum()))
        start, end, ready = (
            self._clock.align(np.where(good, t, 0)) for t in (local, local + took, local - np.minimum(queued, local))
        )
        kinds = np.array([_THREAD_OF_LANE[lane] for lane in range(len(_THREAD_OF_LANE))])
        kind = kinds[np.where(good, rows["lane"], 0)]
        if self._is_all:
            layers = good & (rows["lane"] == COMPUTE) & (rows["step"] >= 0)
            if _nests(start[layers], end[layers], rows["step"][layers], edges):
                kind[layers] = COMPUTE_THREAD
        threads = (kind << 24) | (rows["track"].astype(np.int64) << 8)
        threads[~good] = -1
        sliced = np.flatnonzero(good & (kind != EXCHANGE_THREAD))
        subs = tracks.place(threads[sliced], start[sliced], end[sliced])
        threads[sliced] = np.where(subs >= 0, threads[sliced] | subs, -1)
        self._notes.count(f"spans overlap more than {DEEPEST} others and are left out", int((subs < 0).sum()))
        return SpanRows(rows=rows, number=number, start=start, end=end, ready=ready, threads=threads, names=names)


def _nests(start: Times, end: Times, steps: npt.NDArray[np.int32], edges: Mapping[int, Times]) -> bool:
    """Whether every span lies within one phase of its step, and all of them within each other or apart."""
    import numpy as np

    for step in set(steps.tolist()):
        if step not in edges:
            return False
        those = steps == step
        at = edges[step]
        part = np.searchsorted(at, start[those], side="right") - 1
        if part.min() < 0 or part.max() >= len(at) - 1 or (end[those] > at[part + 1]).any():
            return False
    return bool((Tracks().place(np.zeros(len(start), dtype=np.int64), start, end) == 0).all())


class Tracks:
    """Spreads slices over tracks so that those of one track lie within each other or apart."""

    def __init__(self) -> None:
        self._floors: dict[int, list[int]] = {}

    def place(self, keys: Times, start: Times, end: Times) -> Times:
        """The track of each slice, counted from 0 for each key; -1 where `DEEPEST` tracks are taken.

        Slices of later calls never share a track with what overlaps them from earlier calls.
        """
        import numpy as np

        order = np.lexsort((-end, start)).tolist()
        placed = [-1] * len(order)
        stacks: dict[int, list[list[int]]] = {}
        ends: dict[int, list[int]] = {}
        for n, key, begin, stop in zip(
            order, keys[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True
        ):
            own = stacks.setdefault(key, [])
            floors = self._floors.setdefault(key, [])
            latest = ends.setdefault(key, [])
            for sub in range(DEEPEST):
                if sub == len(own):
                    own.append([])
                    latest.append(-1)
                    if sub == len(floors):
                        floors.append(-LARGEST_NS)
                if begin < floors[sub]:
                    continue
                stack = own[sub]
                while stack and stack[-1] <= begin:
                    stack.pop()
                if not stack or stop <= stack[-1]:
                    stack.append(stop)
                    latest[sub] = max(latest[sub], stop)
                    placed[n] = sub
                    break
        for key, tops in ends.items():
            floors = self._floors[key]
            for sub, top in enumerate(tops):
                floors[sub] = max(floors[sub], top)
        return np.array(placed, dtype=np.int64)
