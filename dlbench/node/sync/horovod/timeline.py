"""Reads messages from Horovod's timeline: which operation ran, when, and which tensors it fused."""
# The file is a Chrome trace (timeline.cc of Horovod 0.28) in microseconds since Horovod's start. Each tensor is a
# process (`pid`), whose spans nest: `ALLREDUCE` around the copies and the operation itself, e.g. `GLOO_ALLREDUCE`.

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from dlbench.node.sync.engine import MessageSpan
from dlbench.node.sync.timing import BackwardWatch, Interval, WatchedStep, covered, median
from dlbench.records.exchange import Message

_SIZES = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("uint16", "int16", "float16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
"""Bytes of an element, by Horovod's names (common.cc, DataType_Name)."""

_OPERATION = re.compile(r"^(GLOO|MPI|NCCL|CCL|DDL|ADASUM)_(?!INIT)[A-Z_]+$")

_PREFIX = "allreduce."  # Horovod's prefix of a parameter's name.

_FILE = "timeline.json"
_SPIN_CHECK_S = 0.2  # How long threads are watched to find the one that spins.
_MIN_SPIN_SHARE = 0.01  # Smallest share of that time which a spinning thread runs on a crowded core.
_CLOCK_SLACK_S = 1e-3  # How far an operation may be outside of its step before the clocks count as inconsistent.


@dataclass(frozen=True, kw_only=True)
class FusedMessage:
    """One operation on tensors that were fused into one buffer."""

    tensors: tuple[str, ...]  # Names of the parameters, in the order in the buffer.
    step: int  # How often these tensors were sent before, in this file.
    method: str  # The operations in their order, e.g. GLOO_ALLREDUCE.
    types: tuple[str, ...]  # Types of the sent elements, each once; empty if the file does not say.
    wire_bytes: int | None  # Bytes of the vector; None if the file does not say.
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The all-reduces of a timeline."""

    epoch_us: int | None  # Time 0 of the timeline, in microseconds since 1970; None if the file does not say.
    messages: tuple[FusedMessage, ...]  # Complete messages, in the order of their beginning.
    cycle_us: float | None  # Median time between two cycles of Horovod's background thread; None without marks.
    is_torn: bool  # Whether the file ended within an entry or held something that is not an entry.

    def step(self, number: int) -> tuple[FusedMessage, ...]:
        return tuple(message for message in self.messages if message.step == number)

    @property
    def methods(self) -> dict[str, int]:
        return dict(Counter(message.method for message in self.messages))

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted(set().union(*(message.types for message in self.messages))))


@dataclass(kw_only=True)
class _Span:
    tensor: str
    step: int
    operations: list[tuple[str, float]] = field(default_factory=list)
    end_us: float | None = None
    element: str | None = None
    num_bytes: int | None = None


@dataclass(kw_only=True)
class _FusedGroup:
    """Tensors whose operations began one after the other, before any of them ended."""

    spans: list[_Span] = field(default_factory=list)
    is_closing: bool = False


class _Reader:
    def __init__(self) -> None:
        self.epoch_us: int | None = None
        self.cycles: list[float] = []
        self.groups: list[_FusedGroup] = []
        # By `pid`, of which each tensor has one:
        self._names: dict[int, str] = {}
        self._open: dict[int, list[str]] = {}  # Names of the spans that have begun and not ended.
        self._spans: dict[int, _Span] = {}
        self._group_of: dict[int, _FusedGroup] = {}
        self._times_sent: Counter[int] = Counter()

    def read(self, entry: dict[str, Any]) -> None:
        """Reads one entry of the array; raises `KeyError` or `TypeError` if it lacks fields of its kind."""
        kind = entry["ph"]
        if kind == "M":
            arguments = entry.get("args") or {}
            if "start_time_since_epoch_in_micros" in arguments:
                self.epoch_us = int(arguments["start_time_since_epoch_in_micros"])
            elif entry["name"] == "process_name" and "name" in arguments:
                self._names[int(entry["pid"])] = str(arguments["name"])
        elif kind == "i" and entry["name"] == "CYCLE_START":
            self.cycles.append(float(entry["ts"]))
        elif kind == "B":
            self._begin(int(entry["pid"]), str(entry["name"]), float(entry["ts"]))
        elif kind == "E":
            self._end(int(entry["pid"]), float(entry["ts"]), entry.get("args") or {})

    def _begin(self, pid: int, name: str, moment: float) -> None:
        stack = self._open.setdefault(pid, [])
        stack.append(name)
        tensor = self._names.get(pid, "")
        if name == "ALLREDUCE" and tensor.startswith(_PREFIX):
            self._spans[pid] = _Span(tensor=tensor.removeprefix(_PREFIX), step=self._times_sent[pid])
            self._times_sent[pid] += 1
        span = self._spans.get(pid)
        if span is None or not _OPERATION.match(name):
            return
        if not span.operations:
            # Horovod records the beginning for all tensors of a buffer before any other event of one of them.
            if not self.groups or self.groups[-1].is_closing:
                self.groups.append(_FusedGroup())
            self.groups[-1].spans.append(span)
            self._group_of[pid] = self.groups[-1]
        span.operations.append((name, moment))

    def _end(self, pid: int, moment: float, arguments: dict[str, Any]) -> None:
        stack = self._open.get(pid)
        if not stack:  # it began before the timeline was opened
            return
        name = stack.pop()
        span = self._spans.get(pid)
        if span is None:
            return
        if _OPERATION.match(name):
            span.end_us = moment
            self._group_of[pid].is_closing = True
        elif name == "ALLREDUCE":
            del self._spans[pid]
            shape = re.findall(r"\d+", str(arguments.get("shape", "")))
            if arguments.get("dtype") in _SIZES and "shape" in arguments:
                span.element = str(arguments["dtype"])
                span.num_bytes = prod(map(int, shape)) * _SIZES[span.element]


def parse_timeline(text: str) -> Timeline:
    """Returns a timeline's content. `text`: the file, complete or cut anywhere."""
    reader = _Reader()
    is_torn = False
    for entry in _entries(text):
        if entry is None:
            is_torn = True
            continue
        try:
            reader.read(entry)
        except (KeyError, TypeError, ValueError):
            is_torn = True
    messages = [_message(group) for group in reader.groups]
    return Timeline(
        epoch_us=reader.epoch_us,
        messages=tuple(message for message in messages if message is not None),
        cycle_us=median(later - earlier for earlier, later in itertools.pairwise(reader.cycles)),
        is_torn=is_torn,
    )


def _entries(text: str) -> Iterator[dict[str, Any] | None]:
    """Yields the objects of an array whose end may be missing; None for anything else, and at the first damage."""
    decoder = json.JSONDecoder()
    between_entries = re.compile(r"[\s,\[\]]*")
    position = 0
    while True:
        if skipped := between_entries.match(text, position):
            position = skipped.end()
        if position == len(text):
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except ValueError:
            yield None
            return
        yield entry if isinstance(entry, dict) else None


def _sum_if_all_known(sizes: Sequence[int | None]) -> int | None:
    known_sizes = [size for size in sizes if size is not None]
    if len(known_sizes) < len(sizes):
        return None
    return sum(known_sizes)


def _message(group: _FusedGroup) -> FusedMessage | None:
    spans = group.spans
    ends_us = [span.end_us for span in spans if span.end_us is not None]
    if len(ends_us) < len(spans):
        return None
    return FusedMessage(
        tensors=tuple(span.tensor for span in spans),
        step=min(span.step for span in spans),
        method="+".join(name for name, _ in spans[0].operations),
        types=tuple(dict.fromkeys(span.element for span in spans if span.element is not None)),
        wire_bytes=_sum_if_all_known([span.num_bytes for span in spans]),
        begin_us=min(span.operations[0][1] for span in spans),
        end_us=max(ends_us),
    )


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """The exchange of the watched steps according to the timeline; times are medians over steps."""

    messages: tuple[Message, ...]
    """Messages of one step with their times: the last step that has the median number of messages."""
    counts: tuple[int, ...]  # Number of messages of each watched step.
    wire_bytes: float | None  # Bytes of all vectors of a step.
    communication_s: float | None
    exposed_s: float | None
    hidden_s: float | None
    largest_fused_bytes: int  # Largest fused message, in bytes on the wire; 0 if no message had two tensors.
    timeline: Timeline
    reason: str  # Why exposed and hidden part are unknown; empty if they are known.
    clock_error_s: float
    """By how much backward pass and messages may be shifted against each other; 0 on a CPU, which has one clock."""


class TimelineWindow:
    """The part of a run in which rank 0 records the timeline; made before Horovod is initialised."""

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch
        self._threads_before = set(_threads())
        self._offset_before = _epoch_offset_ns()
        self._offset_ns: int | None = None
        self._writer: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._timeline: Timeline | None = None
        self.scheduling_text = ""  # How the writer thread was scheduled, in words; empty if it does not spin.

    def initialised(self) -> None:
        """Is called when Horovod has started; its timeline's clock began after the constructor."""
        after = _epoch_offset_ns()
        # If the wall clock was set meanwhile, time 0 of the timeline is not known.
        if abs(after - self._offset_before) < _CLOCK_SLACK_S * 1e9:
            self._offset_ns = after
        self._writer = _spinning_thread(self._threads_before)

    def open(self, hvd: Any) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="dlbench-timeline-")
            hvd.start_timeline(str(Path(self._folder.name) / _FILE), mark_cycles=True)

    def close(self, hvd: Any) -> None:
        """Reads the timeline, deletes its file, and lowers the priority of its writer; may be called repeatedly."""
        if self._folder is not None:
            hvd.stop_timeline()
            text = (Path(self._folder.name) / _FILE).read_text(encoding="utf-8", errors="replace")
            self._timeline = parse_timeline(text)
            self._folder.cleanup()
            self._folder = None
        if self._writer is not None:
            # Not before, because Horovod's background thread waits for its lock (WriterLoop in timeline.cc).
            self.scheduling_text = (
                "Horovod's timeline thread, which never sleeps in this build, was moved to the idle scheduling class "
                "after the window"
            )
            try:
                os.sched_setscheduler(self._writer, os.SCHED_IDLE, os.sched_param(0))
            except OSError as error:
                self.scheduling_text = (
                    "Horovod's timeline thread computes all the time on rank 0, and its priority could not be lowered "
                    f"({error.strerror}): it slows the measured steps"
                )
            self._writer = None

    def summary(self) -> TimelineSummary | None:
        timeline = self._gradients()
        if timeline is None:
            return None
        pairs = [(step, messages) for _, step, messages in self._steps(timeline)]
        counts = [len(messages) for _, messages in pairs]
        median_count = statistics.median_low(counts)
        step, messages = [pair for pair in pairs if len(pair[1]) == median_count][-1]
        origin_s, reason = self._origin_s(pairs)
        communication_s, exposed_s, hidden_s = list[float](), list[float](), list[float]()
        for watched, sent in pairs:
            communication_s.append(covered([(message.begin_us / 1e6, message.end_us / 1e6) for message in sent]))
            if origin_s is not None:
                intervals = [self._interval(watched, message, origin_s) for message in sent]
                backward_s = self._watch.clock.between(watched.begin, watched.backward_end)
                exposed_s.append(covered(intervals, begin=backward_s))
                hidden_s.append(covered(intervals, end=backward_s))
        fused_bytes = [message.wire_bytes or 0 for message in timeline.messages if len(message.tensors) > 1]
        return TimelineSummary(
            messages=tuple(self._message(step, message, origin_s) for message in messages),
            counts=tuple(counts),
            wire_bytes=_sum_if_all_known([message.wire_bytes for message in messages]),
            communication_s=median(communication_s),
            exposed_s=median(exposed_s),
            hidden_s=median(hidden_s),
            largest_fused_bytes=max(fused_bytes, default=0),
            timeline=timeline,
            reason=reason,
            clock_error_s=self._watch.clock.error_s,
        )

    def spans(self) -> list[MessageSpan]:
        """Returns the messages of all watched steps; none if the timeline does not fit the monotonic clock."""
        timeline = self._gradients()
        if timeline is None:
            return []
        steps = list(self._steps(timeline))
        origin_s, _ = self._origin_s([(step, messages) for _, step, messages in steps])
        if origin_s is None:
            return []
        spans, sizes, clock = [], self._watch.gradient_bytes, self._watch.clock
        for step_number, step, messages in steps:
            for number, message in enumerate(messages):
                start_ns = round(origin_s * 1e9 + message.begin_us * 1e3)
                ready_ns = [clock.monotonic_ns(step.ready[name]) for name in message.tensors if name in step.ready]
                span = MessageSpan(
                    step=step_number,
                    number=number,
                    ready_ns=min(start_ns, max(ready_ns, default=start_ns)),
                    start_ns=start_ns,
                    end_ns=round(origin_s * 1e9 + message.end_us * 1e3),
                    num_bytes=sum(sizes[name] for name in message.tensors),
                    num_tensors=len(message.tensors),
                    method=message.method,
                )
                spans.append(span)
        return spans

    def _gradients(self) -> Timeline | None:
        """Returns the timeline without exchanges of an evaluation between watched steps; None without gradients."""
        if self._timeline is None:
            return None
        names = self._watch.gradient_bytes.keys()
        gradients = tuple(message for message in self._timeline.messages if names >= set(message.tensors))
        if not self._watch.steps or not gradients:
            return None
        return dataclasses.replace(self._timeline, messages=gradients)

    def _steps(self, timeline: Timeline) -> Iterator[tuple[int, WatchedStep, tuple[FusedMessage, ...]]]:
        for number, step in enumerate(self._watch.steps):
            if messages := timeline.step(number):
                yield number, step, messages

    def _origin_s(self, pairs: Sequence[tuple[WatchedStep, tuple[FusedMessage, ...]]]) -> tuple[float | None, str]:
        """Returns time 0 of the timeline, whose times are the host's, on the monotonic clock in s; or the reason."""
        timeline = self._timeline
        if timeline is None or timeline.epoch_us is None:
            return None, "the timeline does not say when its times begin"
        if self._offset_ns is None:
            return None, "the wall clock was set while Horovod started"
        origin_s = timeline.epoch_us / 1e6 - self._offset_ns / 1e9
        slack_s = _CLOCK_SLACK_S + self._watch.clock.error_s
        for step, messages in pairs:
            length_s = self._watch.clock.between(step.begin, step.exchange_end)
            for message in messages:
                begin_s, end_s = self._interval(step, message, origin_s)
                if begin_s < -slack_s or end_s > length_s + slack_s:
                    return None, "an operation is outside of its step: the clocks do not agree"
        return origin_s, ""

    def _message(self, step: WatchedStep, message: FusedMessage, origin_s: float | None) -> Message:
        sizes, ready_s = self._watch.gradient_bytes, self._watch.ready_s(step)
        start_s = None
        if origin_s is not None:
            begin_s, _ = self._interval(step, message, origin_s)
            start_s = max(0.0, begin_s)
        return Message(
            num_bytes=sum(sizes.get(name, 0) for name in message.tensors),
            num_tensors=len(message.tensors),
            method=message.method,
            ready_s=max((ready_s[name] for name in message.tensors if name in ready_s), default=None),
            start_s=start_s,
            exchange_s=(message.end_us - message.begin_us) / 1e6,
        )

    def _interval(self, step: WatchedStep, message: FusedMessage, origin_s: float) -> Interval:
        begin_s = self._watch.clock.monotonic_ns(step.begin) / 1e9
        return origin_s + message.begin_us / 1e6 - begin_s, origin_s + message.end_us / 1e6 - begin_s


def _epoch_offset_ns() -> int:
    """Returns wall clock minus monotonic clock in nanoseconds, from the closest of five pairs of readings."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2


def _threads() -> dict[int, tuple[int, int]]:
    """Returns each thread's run time in nanoseconds and its voluntary context switches, by thread number."""
    # Only waiting counts as a voluntary switch, yielding does not (proc(5), schedstat and status).
    threads = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            ran_ns = int((task / "schedstat").read_text().split()[0])
            waits = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
        except (OSError, ValueError, IndexError):
            continue
        if waits is not None:
            threads[int(task.name)] = (ran_ns, int(waits[1]))
    return threads


def _spinning_thread(old_threads: set[int]) -> int | None:
    """Returns the one new thread that never waits while there is no work; Horovod's others wait in every cycle."""
    before = _threads()
    time.sleep(_SPIN_CHECK_S)
    spinning = []
    for number, (ran_ns, waits) in _threads().items():
        if number in old_threads or number not in before:
            continue
        ran_before_ns, waits_before = before[number]
        if waits == waits_before and ran_ns - ran_before_ns > _MIN_SPIN_SHARE * _SPIN_CHECK_S * 1e9:
            spinning.append(number)
    if len(spinning) != 1:
        return None
    return spinning[0]
