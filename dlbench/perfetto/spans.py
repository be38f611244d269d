"""Reads the spans of a rank on the axis of all nodes, and distributes them over threads of a trace."""
# Perfetto drops slices of a thread that overlap partially; messages always overlap and are drawn without a thread.

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
"""Names of a rank's kinds of threads, in the order in which they are shown."""

_THREADS = np.array([STAGES_THREAD, LAYERS_THREAD, EXCHANGE_THREAD, INPUT_THREAD, STAGING_THREAD, SWAP_THREAD])
"""The kind of thread of each lane, in the order of `LANES`."""

SPANS_AT_ONCE = 65_536  # Spans held in memory.
DEEPEST = 32  # Most spans of a track that may overlap partially; more are left out and counted.


def thread_id(kind: int, track: int = 0, sub: int = 0) -> int:
    """Returns the number of a thread in a rank's process, equal in every trace of the run and no process number."""
    return kind << 24 | track << 8 | sub


def thread_name(tid: int) -> str:
    """Returns the name of the thread of that number."""
    kind, track, sub = tid >> 24, tid >> 8 & 0xFFFF, tid & 0xFF
    name = THREAD_NAMES[kind]
    if track:
        name += f" {track}"
    if sub:
        name += f" ({sub + 1})"
    return name


@dataclass(frozen=True, kw_only=True)
class SpanRows:
    """Some spans of one rank; start, end and ready are nanoseconds on the axis of all nodes."""

    rows: Rows  # With the fields of `SPAN_FIELDS`, times on the rank's clock.
    number: int  # Number of spans before these in the file.
    start: Times  # (n,)
    end: Times  # (n,)
    ready: Times  # (n,): when it was queued; its start if it was not.
    threads: Times  # (n,): number of the thread, see `thread_id`; -1 if it is left out.
    names: list[str]  # By number.

    def shown(self, steps: tuple[int, int] | None, window: tuple[int, int] | None) -> npt.NDArray[np.bool_]:
        """Returns which spans are shown: those of the steps, and those of no step in the steps' time window."""
        has_thread: npt.NDArray[np.bool_] = self.threads >= 0
        if steps is None or window is None:
            return has_thread
        number = self.rows["step"]
        is_in_window = (number < 0) & (self.ready <= window[1]) & (self.end >= window[0])
        return has_thread & (is_in_window | ((number >= steps[0]) & (number <= steps[1])))


def span_rows(path: Path, run_id: str, clock: NodeClock, notes: Notes) -> Iterator[SpanRows]:
    """Yields a rank's spans, some at a time; raises `IncompleteDataError` at damage, after the spans before it."""
    reader = SpanReader(path=path, run_id=run_id)
    tracks = Tracks()
    number = 0
    for rows in merged(reader.blocks(), SPANS_AT_ONCE):
        yield _with_threads(rows, reader.names, number, tracks, clock, notes)
        number += len(rows)
    notes.torn(reader.torn_bytes)


def _with_threads(
    rows: Rows, names: list[str], number: int, tracks: Tracks, clock: NodeClock, notes: Notes
) -> SpanRows:
    local, duration, queued = rows["start_ns"], rows["duration_ns"], rows["queued_ns"]
    times = np.stack([local, duration, queued])
    is_valid = (times >= 0).all(axis=0) & (times < LARGEST_NS).all(axis=0) & (queued <= local)
    is_valid &= (rows["lane"] < len(LANES)) & (rows["name"] < len(names))
    notes.count("spans are damaged (impossible times, lanes or names) and left out", int((~is_valid).sum()))
    start = clock.align(np.where(is_valid, local, 0))
    end = clock.align(np.where(is_valid, local + duration, 0))
    ready = clock.align(np.where(is_valid, local - np.minimum(queued, local), 0))
    kind = _THREADS[np.where(is_valid, rows["lane"], 0)]
    threads = (kind << 24) | (rows["track"].astype(np.int64) << 8)
    threads[~is_valid] = -1
    sliced = np.flatnonzero(is_valid & (kind != EXCHANGE_THREAD))
    subs = tracks.place(threads[sliced], start[sliced], end[sliced])
    threads[sliced] = np.where(subs >= 0, threads[sliced] | subs, -1)
    notes.count(f"spans overlap more than {DEEPEST} others and are left out", int((subs < 0).sum()))
    return SpanRows(rows=rows, number=number, start=start, end=end, ready=ready, threads=threads, names=names)


class Tracks:
    """Distributes slices over tracks so that slices of one track nest or are disjoint."""

    def __init__(self) -> None:
        self._floors: dict[int, list[int]] = {}  # End of each track's slices of earlier calls, by key.

    def place(self, keys: Times, start: Times, end: Times) -> Times:
        """Returns each slice's track, counted from 0 for each key; -1 if `DEEPEST` tracks are occupied."""
        order = np.lexsort((-end, start)).tolist()
        placed = [-1] * len(order)
        stacks: dict[int, list[list[int]]] = {}  # Ends of the open slices of each track, innermost last.
        ends: dict[int, list[int]] = {}  # Last end of each track.
        for n, key, begin, stop in zip(
            order, keys[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True
        ):
            track_stacks = stacks.setdefault(key, [])
            floors = self._floors.setdefault(key, [])
            latest = ends.setdefault(key, [])
            for sub in range(DEEPEST):
                if sub == len(track_stacks):
                    track_stacks.append([])
                    latest.append(-1)
                    if sub == len(floors):
                        floors.append(-LARGEST_NS)
                if begin < floors[sub]:
                    continue
                stack = track_stacks[sub]
                while stack and stack[-1] <= begin:
                    stack.pop()
                if not stack or stop <= stack[-1]:
                    stack.append(stop)
                    latest[sub] = max(latest[sub], stop)
                    placed[n] = sub
                    break
        for key, latest in ends.items():
            self._floors[key][: len(latest)] = map(max, self._floors[key], latest)
        return np.array(placed, dtype=np.int64)
