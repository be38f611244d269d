"""What the files of a run hold, on the axis of all nodes: nanoseconds since the earliest thing that they say.

A step file holds sums: phases are laid one after the other from the step's start; with gradient accumulation forward
and backward take turns, and only how long they took together is known. A step that would begin before the one before
has ended is moved behind it, and that is noted.

Slices of one thread of a trace must lie within each other or apart: Perfetto drops what overlaps in part. Spans of a
lane that overlap so are spread over several threads. Messages always overlap and are drawn without a thread.
"""

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
from dlbench.records.clocks import MAX_DRIFT_PPM, ClockLine, ClockPoint
from dlbench.records.rows.samples import SamplesReader
from dlbench.records.rows.spans import COMPUTE, EXCHANGE, INPUT, STAGE, STAGING, SWAP, SpanReader
from dlbench.records.rows.steps import LAUNCH_FIELDS, PHASES, StepReader

T = TypeVar("T")
Times = npt.NDArray[np.int64]
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


Basis = Literal["reference", "exchanges", "wall clock", "own start"]
"""How a node's times came onto the axis: they are node 0's; by comparing clocks during the run; by the two nodes' wall
clocks, whose error nobody knows; not at all, the node's own beginning was put at zero."""

LARGEST_NS = 1 << 60  # A time or a length that is as large (36 years) is damage.
_LARGEST_DRIFT = 0.01  # No kernel corrects a clock faster: beyond that and their bounds, two points contradict.


@dataclass(frozen=True, kw_only=True)
class NodeClock:
    """One node's clock."""

    node: int
    host: str
    basis: Basis
    points: tuple[tuple[int, int], ...] = ()
    """Local time and what to add there to have node 0's, nanoseconds: `ClockLine.used_points`."""
    shift_ns: int = 0  # What to add everywhere, beyond the points.
    bound_ns: int | None = None
    """Largest possible error from the first thing in the node's files to the last comparison of clocks; what
    happened later is off by up to `MAX_DRIFT_PPM` of the time since more. None where it is unknown."""
    problem: str = ""

    @property
    def unknown(self) -> str:
        """What a title says of a clock that was not compared, so that its error has no bound; else empty."""
        return "" if self.basis in ("reference", "exchanges") else ", clock unknown"

    def align(self, local_ns: Times) -> Times:
        """Times of CLOCK_MONOTONIC of this node on the axis; the order of times is kept.

        The same numbers as `ClockLine.offset_at`, for arrays of any shape.
        """
        if not self.points:
            return local_ns + self.shift_ns
        at = np.array([point[0] for point in self.points], dtype=np.int64)
        offsets = np.array([point[1] for point in self.points], dtype=np.int64)
        limit = MAX_DRIFT_PPM / 1_000_000
        inside = np.diff(offsets) / np.diff(at)
        outside = np.clip(inside if len(inside) else [0.0], -limit, limit)
        slopes = np.concatenate([outside[:1], inside, outside[-1:]])
        part = np.searchsorted(at, local_ns, side="right")
        start = np.maximum(part - 1, 0)
        turned = np.rint(slopes[part] * (local_ns - at[start])).astype(np.int64)
        aligned: Times = local_ns + offsets[start] + turned + self.shift_ns
        return aligned


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """All clocks, and where zero is."""

    clocks: tuple[NodeClock, ...]  # By node.
    zero_ns: int  # Zero on node 0's CLOCK_MONOTONIC.
    wall_zero_ns: int | None  # Zero on node 0's wall clock, nanoseconds since 1970; None where it is unknown.


def make_axis(lines: Mapping[int, ClockLine], hosts: Mapping[int, str], earliest: Mapping[int, int]) -> TimeAxis:
    """The axis on which every time is zero or more.

    `earliest`: first time in the files of a node, on its own clock; nodes without any are missing. Raises
    IncompleteDataError: points of a clock contradict each other, or there is no time at all.
    """
    if not earliest:
        raise IncompleteDataError("no rank left step times or spans, and no node samples")
    clocks = {node: _node_clock(node, host, lines, earliest.get(node)) for node, host in hosts.items()}
    firsts = {node: int(clocks[node].align(np.array([time]))[0]) for node, time in earliest.items()}
    placed = [first for node, first in firsts.items() if clocks[node].basis != "own start"]
    zero = min(placed or firsts.values())
    done = []
    for node, clock in sorted(clocks.items()):
        begin = firsts.get(node, zero) if clock.basis == "own start" else zero
        done.append(replace(clock, shift_ns=clock.shift_ns - begin))
    wall = lines[0].wall_offset_ns if 0 in lines else 0
    return TimeAxis(clocks=tuple(done), zero_ns=zero, wall_zero_ns=wall + zero if wall else None)


def _node_clock(node: int, host: str, lines: Mapping[int, ClockLine], first_ns: int | None) -> NodeClock:
    line = lines.get(node)
    problem = line.problem if line is not None else "the run's record says nothing of this node's clock"
    if node == 0:
        return NodeClock(node=node, host=host, basis="reference", bound_ns=0)
    if line is not None and line.points:
        _check(node, [point.offset_ns for point in line.points], line.points)
        points = tuple((point.local_ns, point.offset_ns) for point in line.used_points)
        bound = max((line.bound_at(at) or 0) for at in (*(at for at, _ in points), first_ns) if at is not None)
        return NodeClock(node=node, host=host, basis="exchanges", points=points, bound_ns=bound, problem=problem)
    # Wall clocks start at 1970; a zero means that nobody read one.
    walls = (line.wall_offset_ns, lines[0].wall_offset_ns) if line is not None and 0 in lines else (0, 0)
    if line is not None and all(walls):
        shift = walls[0] - walls[1]
        _check(node, [shift])
        return NodeClock(node=node, host=host, basis="wall clock", shift_ns=shift, problem=problem)
    return NodeClock(node=node, host=host, basis="own start", problem=problem)


def _check(node: int, offsets: Sequence[int], points: Sequence[ClockPoint] = ()) -> None:
    """Refuses offsets that are too large, and points of which no clock can have shown both."""
    if any(abs(offset) >= LARGEST_NS for offset in offsets):
        raise IncompleteDataError(f"record.json: damaged: watch.nodes: the clock of node {node} has an offset of years")
    for one, other in combinations(points, 2):
        possible = one.bound_ns + other.bound_ns + _LARGEST_DRIFT * (other.local_ns - one.local_ns)
        if abs(other.offset_ns - one.offset_ns) > possible:
            raise IncompleteDataError(
                f"record.json: damaged: watch.nodes: the clock of node {node} drifts as no clock does"
            )


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


STAGES_THREAD, COMPUTE_THREAD, LAYERS_THREAD, EXCHANGE_THREAD = 1, 2, 3, 4
INPUT_THREAD, STAGING_THREAD, SWAP_THREAD = 5, 6, 7
THREAD_NAMES = ("", "stages", "compute", "layers", "exchange", "input", "staging", "swap")
"""Kinds of threads of a rank, in the order in which they are shown."""

_THREAD_OF_LANE = {
    STAGE: STAGES_THREAD,
    COMPUTE: LAYERS_THREAD,
    EXCHANGE: EXCHANGE_THREAD,
    INPUT: INPUT_THREAD,
    STAGING: STAGING_THREAD,
    SWAP: SWAP_THREAD,
}

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


class SpanSource:
    """The spans of one rank, some at a time."""

    def __init__(self, path: Path, run_id: str, clock: NodeClock, notes: Notes) -> None:
        self._path, self._run_id, self._clock, self._notes = path, run_id, clock, notes

    def batches(self) -> Iterator[SpanRows]:
        """All spans up to where the file is damaged, which is noted."""
        tracks = Tracks()
        number = 0
        for rows, names in self._notes.guarded(self._read()):
            yield self._placed(rows, names, number, tracks)
            number += len(rows)

    def _read(self) -> Iterator[tuple[Rows, list[str]]]:
        reader = SpanReader(path=self._path, run_id=self._run_id)
        for rows in merged(reader.blocks(), SPANS_AT_ONCE):
            yield rows, reader.names
        self._notes.torn(reader.torn_bytes)

    def _placed(self, rows: Rows, names: list[str], number: int, tracks: Tracks) -> SpanRows:
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
        threads = (kind << 24) | (rows["track"].astype(np.int64) << 8)
        threads[~good] = -1
        sliced = np.flatnonzero(good & (kind != EXCHANGE_THREAD))
        subs = tracks.place(threads[sliced], start[sliced], end[sliced])
        threads[sliced] = np.where(subs >= 0, threads[sliced] | subs, -1)
        self._notes.count(f"spans overlap more than {DEEPEST} others and are left out", int((subs < 0).sum()))
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
