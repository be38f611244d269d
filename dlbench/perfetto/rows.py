"""Reads steps, samples and spans of a run's files on the axis of all its clocks, and collects notes on problems."""
# A step file holds sums of phases, which are drawn one after the other from the step's start. Perfetto drops slices of
# a thread that overlap partially; messages always overlap and are drawn without a thread.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times
from dlbench.records.clocks import ClockLine, ClockPoint
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.spans import LANES, SpanReader
from dlbench.records.rows.steps import LAUNCH_FIELDS, PHASES, StepReader

LARGEST_NS = 1 << 60  # Times or durations from here on (36 years) are damage.
_LARGEST_DRIFT = 0.01  # Largest rate at which a kernel corrects a clock; points that drift more contradict each other.
Basis = Literal["reference", "exchanges", "wall clock", "own start"]
"""Alignment of a node's times: node 0's own; by comparing clocks; by wall clocks, of unknown error; none, from zero."""

T = TypeVar("T")
Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.void]
ROWS_AT_ONCE = 1024  # Steps or samples that are read together.
STAGES_THREAD, COMPUTE_THREAD, LAYERS_THREAD, EXCHANGE_THREAD = 1, 2, 3, 4
INPUT_THREAD, STAGING_THREAD, SWAP_THREAD = 5, 6, 7
THREAD_NAMES = ("", "stages", "compute", "layers", "exchange", "input", "staging", "swap")
"""Names of a rank's kinds of threads, in the order in which they are shown."""

_THREADS = np.array([STAGES_THREAD, LAYERS_THREAD, EXCHANGE_THREAD, INPUT_THREAD, STAGING_THREAD, SWAP_THREAD])
"""The kind of thread of each lane, in the order of `LANES`."""

SPANS_AT_ONCE = 65_536  # Spans held in memory.
DEEPEST = 32  # Most spans of a track that may overlap partially; more are left out and counted.


@dataclass(frozen=True, kw_only=True)
class NodeClock:
    """One node's clock."""

    node: int
    host: str
    basis: Basis
    line: ClockLine | None = None  # Offsets to node 0's clock by comparisons; None with another `basis`.
    shift_ns: int = 0  # Added to all times, in addition to the line.
    bound_ns: int | None = None
    """Largest error until the last comparison of clocks, growing by `MAX_DRIFT_PPM` after it; None if unknown."""
    problem: str = ""

    @property
    def unknown(self) -> str:
        """Suffix of a title for a clock that was not compared, so that its error has no bound; otherwise empty."""
        return "" if self.basis in ("reference", "exchanges") else ", clock unknown"

    def align(self, local_ns: Times) -> Times:
        """Returns times of CLOCK_MONOTONIC of this node on the axis; their order does not change."""
        aligned: Times = local_ns + self.shift_ns
        if self.line is not None:
            aligned = aligned + self.line.offsets_at(local_ns)
        return aligned


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """All clocks, and the zero of the axis."""

    clocks: tuple[NodeClock, ...]  # By node.
    zero_ns: int  # Zero on node 0's CLOCK_MONOTONIC.
    wall_zero_ns: int | None  # Zero on node 0's wall clock, nanoseconds since 1970; None if unknown.


def make_axis(lines: Mapping[int, ClockLine], hosts: Mapping[int, str], earliest: Mapping[int, int]) -> TimeAxis:
    """Returns an axis from each node's `earliest` time; raises `IncompleteDataError` for contradictory or no times."""
    if not earliest:
        raise IncompleteDataError("no rank left step times or spans, and no node samples")
    clocks = {node: _node_clock(node, host, lines, earliest.get(node)) for node, host in hosts.items()}
    first_times = {node: int(clocks[node].align(np.array([time]))[0]) for node, time in earliest.items()}
    aligned_times = [time for node, time in first_times.items() if clocks[node].basis != "own start"]
    zero = min(aligned_times or first_times.values())
    shifted = []
    for node, clock in sorted(clocks.items()):
        begin = first_times.get(node, zero) if clock.basis == "own start" else zero
        shifted.append(replace(clock, shift_ns=clock.shift_ns - begin))
    wall_zero_ns: int | None = None
    if 0 in lines and lines[0].wall_offset_ns:
        wall_zero_ns = lines[0].wall_offset_ns + zero
    return TimeAxis(clocks=tuple(shifted), zero_ns=zero, wall_zero_ns=wall_zero_ns)


def _node_clock(node: int, host: str, lines: Mapping[int, ClockLine], first_ns: int | None) -> NodeClock:
    line = lines.get(node)
    problem = line.problem if line is not None else "the run's record has no data of this node's clock"
    if node == 0:
        return NodeClock(node=node, host=host, basis="reference", bound_ns=0)
    if line is not None and line.points:
        _check(node, [point.offset_ns for point in line.points], line.points)
        moments = [point.local_ns for point in line.used_points]
        if first_ns is not None:
            moments.append(first_ns)
        bound = max(line.bound_at(moment) or 0 for moment in moments)
        return NodeClock(node=node, host=host, basis="exchanges", line=line, bound_ns=bound, problem=problem)
    # Wall clocks start at 1970; a zero means that the clock was not read.
    if line is not None and line.wall_offset_ns and 0 in lines and lines[0].wall_offset_ns:
        shift = line.wall_offset_ns - lines[0].wall_offset_ns
        _check(node, [shift])
        return NodeClock(node=node, host=host, basis="wall clock", shift_ns=shift, problem=problem)
    return NodeClock(node=node, host=host, basis="own start", problem=problem)


def _check(node: int, offsets: Sequence[int], points: Sequence[ClockPoint] = ()) -> None:
    if any(abs(offset) >= LARGEST_NS for offset in offsets):
        raise IncompleteDataError(f"record.json: damaged: watch.nodes: the clock of node {node} has an offset of years")
    for first, second in combinations(points, 2):
        possible_ns = first.bound_ns + second.bound_ns + _LARGEST_DRIFT * (second.local_ns - first.local_ns)
        if abs(second.offset_ns - first.offset_ns) > possible_ns:
            raise IncompleteDataError(
                f"record.json: damaged: watch.nodes: the clock of node {node} drifts as no clock does"
            )


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
