"""Spans of a rank on the axis of all nodes, spread over threads of a trace.

Slices of one thread of a trace must lie within each other or apart: Perfetto drops what overlaps in part. Spans of a
lane that overlap so are spread over several threads. Messages always overlap and are drawn without a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlbench.lazy import Times
from dlbench.perfetto.clocks import LARGEST_NS, NodeClock
from dlbench.perfetto.rows import Notes, Rows, merged
from dlbench.records.rows.spans import LANES, SpanReader

STAGES_THREAD, COMPUTE_THREAD, LAYERS_THREAD, EXCHANGE_THREAD = 1, 2, 3, 4
INPUT_THREAD, STAGING_THREAD, SWAP_THREAD = 5, 6, 7
THREAD_NAMES = ("", "stages", "compute", "layers", "exchange", "input", "staging", "swap")
"""Kinds of threads of a rank, in the order in which they are shown."""

_THREADS = np.array([STAGES_THREAD, LAYERS_THREAD, EXCHANGE_THREAD, INPUT_THREAD, STAGING_THREAD, SWAP_THREAD])
"""The kind of thread of each lane, in the order of `LANES`."""

SPANS_AT_ONCE = 65_536  # Spans held in memory.
DEEPEST = 32  # Spans that may overlap in part on one track; more are left out and counted.


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

    rows: Rows  # With the fields of `SPAN_FIELDS`, times on the rank's own clock.
    number: int  # How many spans the file has before these.
    start: Times  # (n,): on the axis of all nodes, nanoseconds; as the next two.
    end: Times
    ready: Times  # When it was queued; its start where it was not.
    threads: Times  # (n,): number of the thread, see `thread_id`; -1 where it is left out.
    names: list[str]  # By number.

    def shown(self, steps: tuple[int, int] | None, window: tuple[int, int] | None) -> npt.NDArray[np.bool_]:
        """Which are shown: those of the steps, and those of no step that overlap the steps' time."""
        kept: npt.NDArray[np.bool_] = self.threads >= 0
        if steps is None or window is None:
            return kept
        number = self.rows["step"]
        during = (number < 0) & (self.ready <= window[1]) & (self.end >= window[0])
        return kept & (during | ((number >= steps[0]) & (number <= steps[1])))


def span_rows(path: Path, run_id: str, clock: NodeClock, notes: Notes) -> Iterator[SpanRows]:
    """Yields all spans of one rank, some at a time. Raises IncompleteDataError: the file is missing or damaged; what
    came before has been given.
    """
    reader = SpanReader(path=path, run_id=run_id)
    tracks = Tracks()
    number = 0
    for rows in merged(reader.blocks(), SPANS_AT_ONCE):
        yield _placed(rows, reader.names, number, tracks, clock, notes)
        number += len(rows)
    notes.torn(reader.torn_bytes)


def _placed(rows: Rows, names: list[str], number: int, tracks: Tracks, clock: NodeClock, notes: Notes) -> SpanRows:
    local, took, queued = rows["start_ns"], rows["duration_ns"], rows["queued_ns"]
    times = np.stack([local, took, queued])
    good = (times >= 0).all(axis=0) & (times < LARGEST_NS).all(axis=0) & (queued <= local)
    good &= (rows["lane"] < len(LANES)) & (rows["name"] < len(names))
    notes.count("spans are damaged (times, lanes or names that cannot be) and left out", int((~good).sum()))
    start, end, ready = (
        clock.align(np.where(good, t, 0)) for t in (local, local + took, local - np.minimum(queued, local))
    )
    kind = _THREADS[np.where(good, rows["lane"], 0)]
    threads = (kind << 24) | (rows["track"].astype(np.int64) << 8)
    threads[~good] = -1
    sliced = np.flatnonzero(good & (kind != EXCHANGE_THREAD))
    subs = tracks.place(threads[sliced], start[sliced], end[sliced])
    threads[sliced] = np.where(subs >= 0, threads[sliced] | subs, -1)
    notes.count(f"spans overlap more than {DEEPEST} others and are left out", int((subs < 0).sum()))
    return SpanRows(rows=rows, number=number, start=start, end=end, ready=ready, threads=threads, names=names)


class Tracks:
    """Spreads slices over tracks so that those of one track lie within each other or apart."""

    def __init__(self) -> None:
        self._floors: dict[int, list[int]] = {}

    def place(self, keys: Times, start: Times, end: Times) -> Times:
        """The track of each slice, counted from 0 for each key; -1 where `DEEPEST` tracks are taken.

        Slices of later calls never share a track with what overlaps them from earlier calls.
        """
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
