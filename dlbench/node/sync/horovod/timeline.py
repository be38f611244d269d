"""Horovod's timeline to messages: which operation ran, on which tensors together, when.

The file is a Chrome trace. Each tensor is a process of its own (`pid`); its spans nest: `ALLREDUCE` around
`MEMCPY_IN_FUSION_BUFFER`, the operation itself (`GLOO_ALLREDUCE`, `MPI_ALLREDUCE`, `NCCL_...`) and
`MEMCPY_OUT_FUSION_BUFFER`; the end of `ALLREDUCE` gives type and shape of what travelled. Times are
microseconds of the steady clock since Horovod's start (timeline.cc of Horovod 0.28). A dying process leaves the
array open and may tear the last entry.

Rank 0 switches it on for a few warm-up steps. Trap handled here: with HOROVOD_TIMELINE set, rank 0 has a writer thread
that asks for work in a loop for the whole run (timeline.cc, WriterLoop of Horovod 0.28). Where this was tried it took
92 % of an idle core and, as it yields, 0.3 % of a busy one. It is recognised by never waiting, and gets the scheduler's
idle class before the measured steps, so that any other thread goes first. In the window it keeps its class, because
Horovod's own thread waits for its lock. A build in which that thread sleeps needs none of this.
"""

from __future__ import annotations

import dataclasses
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

_PREFIX = "allreduce."  # What Horovod puts before a parameter's name.

_FILE = "timeline.json"
_LOOK_S = 0.2  # How long threads are watched for the one that spins.
_SPINS = 0.01  # Least share of that time which it gets, however many others want the core.
_CLOCK_SLACK_S = 1e-3  # How far an operation may seem to lie outside of its step before the clocks are not believed.


@dataclass(frozen=True, kw_only=True)
class FusedMessage:
    """One operation on some tensors that travelled together."""

    tensors: tuple[str, ...]  # Names of the parameters, in the order in the buffer.
    step: int  # How often these tensors had travelled before, in this file.
    method: str  # The operations in their order, e.g. GLOO_ALLREDUCE.
    types: tuple[str, ...]  # Types of the elements that travelled, each once; empty where the file does not say.
    wire_bytes: int | None  # Bytes of the vector; None where the file does not say.
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What a timeline says of all-reduces."""

    epoch_us: int | None  # Microseconds since 1970 at which its times begin.
    messages: tuple[FusedMessage, ...]  # Complete ones, in the order of their beginning.
    cycle_us: float | None  # Median time between two cycles of Horovod's background thread; None without marks.
    is_torn: bool  # Whether the file ended within an entry or held something that is no entry.

    def step(self, number: int) -> tuple[FusedMessage, ...]:
        return tuple(message for message in self.messages if message.step == number)

    @property
    def methods(self) -> dict[str, int]:
        return dict(Counter(message.method for message in self.messages))

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(sorted({name for message in self.messages for name in message.types}))


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
        self._names: dict[int, str] = {}
        self._open: dict[int, list[str]] = {}
        self._spans: dict[int, _Span] = {}
        self._group_of: dict[int, _FusedGroup] = {}
        self._times: Counter[int] = Counter()

    def read(self, entry: dict[str, Any]) -> None:
        """One entry of the array. Raises `KeyError, TypeError`: it lacks what entries of its kind have."""
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
            self._spans[pid] = _Span(tensor=tensor.removeprefix(_PREFIX), step=self._times[pid])
            self._times[pid] += 1
        span = self._spans.get(pid)
        if span is None or not _OPERATION.match(name):
            return
        if not span.operations:
            # Horovod notes the beginning for all tensors of a buffer before anything else happens to one of them.
            if not self.groups or self.groups[-1].is_closing:
                self.groups.append(_FusedGroup())
            self.groups[-1].spans.append(span)
            self._group_of[pid] = self.groups[-1]
        span.operations.append((name, moment))

    def _end(self, pid: int, moment: float, arguments: dict[str, Any]) -> None:
        stack = self._open.get(pid)
        if not stack:  # it began before the file did
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
    """A timeline's content. `text`: the file, whole or torn anywhere."""
    reader = _Reader()
    torn = False
    for entry in _entries(text):
        if entry is None:
            torn = True
            continue
        try:
            reader.read(entry)
        except (KeyError, TypeError, ValueError):
            torn = True
    messages = [_message(group) for group in reader.groups]
    gaps = [later - sooner for sooner, later in zip(reader.cycles, reader.cycles[1:], strict=False)]
    return Timeline(
        epoch_us=reader.epoch_us,
        messages=tuple(message for message in messages if message is not None),
        cycle_us=statistics.median(gaps) if gaps else None,
        is_torn=torn,
    )


def _entries(text: str) -> Iterator[dict[str, Any] | None]:
    """The objects of an array that may lack its end; None for what is none, after which nothing more is read."""
    decoder = json.JSONDecoder()
    place = re.compile(r"[\s,\[\]]*")
    position = 0
    while True:
        skipped = place.match(text, position)
        position = skipped.end() if skipped else position
        if position == len(text):
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except ValueError:
            yield None
            return
        yield entry if isinstance(entry, dict) else None


def _message(group: _FusedGroup) -> FusedMessage | None:
    spans = group.spans
    ends = [span.end_us for span in spans if span.end_us is not None]
    if len(ends) < len(spans):
        return None
    sizes = [span.num_bytes for span in spans if span.num_bytes is not None]
    return FusedMessage(
        tensors=tuple(span.tensor for span in spans),
        step=min(span.step for span in spans),
        method="+".join(name for name, _ in spans[0].operations),
        types=tuple(dict.fromkeys(span.element for span in spans if span.element is not None)),
        wire_bytes=sum(sizes) if len(sizes) == len(spans) else None,
        begin_us=min(span.operations[0][1] for span in spans),
        end_us=max(ends),
    )


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """The watched steps as the timeline has them; medians over steps where nothing else is said."""

    messages: tuple[Message, ...]  # Of one step, the last with the median number of messages, with its own times.
    counts: tuple[int, ...]  # Messages of each watched step.
    wire_bytes: float | None  # Of all vectors of a step.
    communication_s: float | None
    exposed_s: float | None
    hidden_s: float | None
    largest_fused_bytes: int  # Of gradients on the wire; 0 if no message had two tensors.
    timeline: Timeline
    reason: str  # Why exposed and hidden part are unknown; empty where they are known.
    clock_error_s: float
    """By how much backward pass and messages may be misplaced against each other; 0 on a CPU, which has one clock."""


class TimelineWindow:
    """One run's window; made before Horovod is initialised, on rank 0 alone."""

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch
        self._threads_before = set(_threads())
        self._offset_before = _epoch_offset_ns()
        self._offset_ns: int | None = None
        self._writer: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._timeline: Timeline | None = None
        self.calm_text = ""  # What was done about the writer thread, in words; empty if there was nothing to do.

    def initialised(self) -> None:
        """Horovod has started: its timeline's clock began between the constructor and now."""
        after = _epoch_offset_ns()
        # Times begin while Horovod starts; a wall clock that was set meanwhile gives no place for them.
        if abs(after - self._offset_before) < _CLOCK_SLACK_S * 1e9:
            self._offset_ns = after
        self._writer = _spinning_thread(self._threads_before)

    def open(self, hvd: Any) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="dlbench-timeline-")
            hvd.start_timeline(str(Path(self._folder.name) / _FILE), mark_cycles=True)

    def close(self, hvd: Any) -> None:
        """Reads what was written, takes the file away, and calms the writer down; again and again without harm."""
        if self._folder is not None:
            hvd.stop_timeline()
            text = (Path(self._folder.name) / _FILE).read_text(encoding="utf-8", errors="replace")
            self._timeline = parse_timeline(text)
            self._folder.cleanup()
            self._folder = None
        if self._writer is not None:
            self.calm_text = (
                "Horovod's timeline thread, which never sleeps in this build, got the idle scheduling class after the "
                "window"
            )
            try:
                os.sched_setscheduler(self._writer, os.SCHED_IDLE, os.sched_param(0))
            except OSError as error:
                self.calm_text = (
                    "Horovod's timeline thread computes all the time on rank 0 and could not be calmed "
                    f"({error.strerror}): it takes from the measured steps"
                )
            self._writer = None

    def summary(self) -> TimelineSummary | None:
        """What the window saw; None if it was never open."""
        timeline = self._gradients()
        if timeline is None:
            return None
        pairs = [(step, messages) for _, step, messages in self._steps(timeline)]
        counts = [len(messages) for _, messages in pairs]
        typical = sorted(counts)[(len(counts) - 1) // 2]
        step, messages = [pair for pair in pairs if len(pair[1]) == typical][-1]
        origin_s, reason = self._origin_s(pairs)
        exposed_s, hidden_s = list[float](), list[float]()
        for watched, sent in pairs:
            if origin_s is None:
                break
            ways = [self._way(watched, message, origin_s) for message in sent]
            ready = self._watch.clock.between(watched.begin, watched.backward_end)
            exposed_s.append(covered(ways, begin=ready))
            hidden_s.append(covered(ways, end=ready))
        sizes = [message.wire_bytes for message in messages]
        known = [size for size in sizes if size is not None]
        fused = [m.wire_bytes or 0 for m in timeline.messages if len(m.tensors) > 1]
        return TimelineSummary(
            messages=tuple(self._message(step, message, origin_s) for message in messages),
            counts=tuple(counts),
            wire_bytes=float(sum(known)) if len(known) == len(sizes) else None,
            communication_s=median(covered([(m.begin_us / 1e6, m.end_us / 1e6) for m in found]) for _, found in pairs),
            exposed_s=median(exposed_s),
            hidden_s=median(hidden_s),
            largest_fused_bytes=max(fused, default=0),
            timeline=timeline,
            reason=reason,
            clock_error_s=self._watch.clock.error_s,
        )

    def spans(self) -> list[MessageSpan]:
        """Messages of all watched steps; none where the timeline cannot be compared with the monotonic clock."""
        timeline = self._gradients()
        if timeline is None:
            return []
        steps = list(self._steps(timeline))
        origin_s, _ = self._origin_s([(step, messages) for _, step, messages in steps])
        if origin_s is None:
            return []
        return [
            self._span(number, place, step, message, origin_s)
            for number, step, messages in steps
            for place, message in enumerate(messages)
        ]

    def _span(self, number: int, place: int, step: WatchedStep, message: FusedMessage, origin_s: float) -> MessageSpan:
        sizes, clock = self._watch.gradient_bytes, self._watch.clock
        start_ns = round(origin_s * 1e9 + message.begin_us * 1e3)
        ready = [clock.monotonic_ns(step.ready[name]) for name in message.tensors if name in step.ready]
        return MessageSpan(
            step=number,
            number=place,
            ready_ns=min(start_ns, max(ready, default=start_ns)),
            start_ns=start_ns,
            end_ns=round(origin_s * 1e9 + message.end_us * 1e3),
            num_bytes=sum(sizes[name] for name in message.tensors),
            num_tensors=len(message.tensors),
            method=message.method,
        )

    def _gradients(self) -> Timeline | None:
        """The timeline without what else was exchanged (an evaluation between two watched steps); None of nothing."""
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
        """Where the timeline's times begin on the monotonic clock, seconds; or None and the reason. Horovod's times are
        the host's on a GPU, too: rank 0 waits there for each message's begin and end, and notes them when it
        learns of them.
        """
        timeline = self._timeline
        if timeline is None or timeline.epoch_us is None:
            return None, "the timeline does not say when its times begin"
        if self._offset_ns is None:
            return None, "the wall clock was set while Horovod started"
        origin_s = timeline.epoch_us / 1e6 - self._offset_ns / 1e9
        slack_s = _CLOCK_SLACK_S + self._watch.clock.error_s
        for step, messages in pairs:
            length_s = self._watch.clock.between(step.begin, step.exchange_end)
            for first_s, last_s in (self._way(step, message, origin_s) for message in messages):
                if first_s < -slack_s or last_s > length_s + slack_s:
                    return None, "an operation seems to lie outside of its step: the clocks do not agree"
        return origin_s, ""

    def _message(self, step: WatchedStep, message: FusedMessage, origin_s: float | None) -> Message:
        sizes, ready = self._watch.gradient_bytes, self._watch.ready_s(step)
        return Message(
            num_bytes=sum(sizes.get(name, 0) for name in message.tensors),
            num_tensors=len(message.tensors),
            method=message.method,
            ready_s=max((ready[name] for name in message.tensors if name in ready), default=None),
            start_s=None if origin_s is None else max(0.0, self._way(step, message, origin_s)[0]),
            exchange_s=(message.end_us - message.begin_us) / 1e6,
        )

    def _way(self, step: WatchedStep, message: FusedMessage, origin_s: float) -> Interval:
        """Begin and end of an operation, seconds after the start of the backward pass (monotonic clock)."""
        begin_s = self._watch.clock.monotonic_ns(step.begin) / 1e9
        return origin_s + message.begin_us / 1e6 - begin_s, origin_s + message.end_us / 1e6 - begin_s


def _epoch_offset_ns() -> int:
    """Wall clock less monotonic clock, nanoseconds; from the closest of some pairs of readings."""
    pairs = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(5)]
    first, wall, last = min(pairs, key=lambda pair: pair[2] - pair[0])
    return wall - (first + last) // 2


def _threads() -> dict[int, tuple[int, int]]:
    """Of each thread of this process the nanoseconds that it ran, and how often it gave the core up to wait, which
    yielding is not (proc(5), schedstat and status); none where the kernel does not say.
    """
    found = {}
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            ran_ns = int((task / "schedstat").read_text().split()[0])
            waits = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
        except (OSError, ValueError, IndexError):
            continue
        if waits is not None:
            found[int(task.name)] = (ran_ns, int(waits[1]))
    return found


def _spinning_thread(known: set[int]) -> int | None:
    """The new thread that computes and never waits though there is nothing to do; None if all of them wait. Horovod's
    other threads wait in every cycle, on a crowded machine too.
    """
    before = _threads()
    time.sleep(_LOOK_S)
    spinning = [
        number
        for number, (ran_ns, waits) in _threads().items()
        if number not in known
        and (was := before.get(number)) is not None
        and waits == was[1]
        and ran_ns - was[0] > _SPINS * _LOOK_S * 1e9
    ]
    return spinning[0] if len(spinning) == 1 else None
