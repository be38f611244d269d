"""Rank 0's window on Horovod: its timeline is switched on for a few warm-up steps, read, and set beside the clock.

Trap handled here: with HOROVOD_TIMELINE set, rank 0 has a writer thread that asks for work in a loop for the whole run
(timeline.cc, WriterLoop of Horovod 0.28). Where this was tried it took 92 % of an idle core and, as it yields, 0.3 % of
a busy one. It is told apart by never waiting, and gets the scheduler's idle class before the measured steps, so that
any other thread goes first. In the window it keeps its class, because Horovod's own thread waits for its lock. A build
in which that thread sleeps needs none of this.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlbench.node.sync.engine import MessageSpan
from dlbench.node.sync.gradient_times import BackwardWatch, Interval, WatchedStep, covered, median
from dlbench.node.sync.horovod.timeline import FusedMessage, Timeline, parse_timeline
from dlbench.records.exchange import Message

_FILE = "timeline.json"

_LOOK_S = 0.2
"""How long threads are watched for the one that spins."""
_SPINS = 0.01
"""Least share of that time which it gets, however many others want the core."""
_CLOCK_SLACK_S = 1e-3
"""How far an operation may seem to lie outside of its step before the clocks are not believed."""


_Pair = tuple[WatchedStep, tuple[FusedMessage, ...]]
"""A watched step and its messages."""


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """The watched steps as the timeline has them; medians over steps where nothing else is said."""

    messages: tuple[Message, ...]
    """Of one step, the last of those with the median number of messages, with its own times."""
    counts: tuple[int, ...]
    """Messages of each watched step."""
    wire_bytes: float | None
    """Of all vectors of a step."""
    communication_s: float | None
    exposed_s: float | None
    hidden_s: float | None
    largest_fused_bytes: int
    """Of gradients on the wire; 0 if no message had two tensors."""
    timeline: Timeline
    reason: str
    """Why exposed and hidden part are unknown; empty where they are known."""
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
        self.calm_text = ""
        """What was done about the writer thread, in words; empty if there was nothing to do."""

    def initialised(self) -> None:
        """Horovod has started: its timeline's clock began between the constructor and now."""
        after = _epoch_offset_ns()
        # Times begin while Horovod starts; a wall clock that was set meanwhile gives no place for them.
        if abs(after - self._offset_before) < _CLOCK_SLACK_S * 1e9:
            self._offset_ns = after
        self._writer = _spinning_thread(self._threads_before)

    def open(self, hvd: Any) -> None:
        """From now on Horovod writes."""
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
            self.calm_text = _calm(self._writer)
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
        parts = [] if origin_s is None else [self._parts(step, found, origin_s) for step, found in pairs]
        sizes = [message.wire_bytes for message in messages]
        known = [size for size in sizes if size is not None]
        fused = [m.wire_bytes or 0 for m in timeline.messages if len(m.tensors) > 1]
        return TimelineSummary(
            messages=tuple(self._message(step, message, origin_s) for message in messages),
            counts=tuple(counts),
            wire_bytes=float(sum(known)) if len(known) == len(sizes) else None,
            communication_s=median(covered([(m.begin_us / 1e6, m.end_us / 1e6) for m in found]) for _, found in pairs),
            exposed_s=median(exposed for exposed, _ in parts),
            hidden_s=median(hidden for _, hidden in parts),
            largest_fused_bytes=max(fused, default=0),
            timeline=timeline,
            reason=reason,
            clock_error_s=self._watch.clock.error_s,
        )

    def spans(self) -> list[MessageSpan]:
        """Messages of all watched steps; none where the timeline cannot be set beside the monotonic clock."""
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
        """Each watched step with its messages, where it has some; and its number."""
        for number, step in enumerate(self._watch.steps):
            if messages := timeline.step(number):
                yield number, step, messages

    def _origin_s(self, pairs: Sequence[_Pair]) -> tuple[float | None, str]:
        """Where the timeline's times begin on the monotonic clock, seconds; or None and the reason.

        Horovod's times are the host's on a GPU, too: rank 0 waits there for each message's begin and end, and notes
        them when it is told.
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

    def _parts(self, step: WatchedStep, messages: Sequence[FusedMessage], origin_s: float) -> tuple[float, float]:
        """Exposed and hidden part of one step's communication, seconds."""
        ways = [self._way(step, message, origin_s) for message in messages]
        ready = self._watch.clock.between(step.begin, step.backward_end)
        return covered(ways, begin=ready), covered(ways, end=ready)

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


@dataclass(frozen=True, kw_only=True)
class _Thread:
    """What the kernel counts of a thread."""

    ran_ns: int
    waits: int
    """How often it gave the core up to wait for something; yielding does not count."""


def _threads() -> dict[int, _Thread]:
    """Threads of this process (proc(5), schedstat and status); none where the kernel does not tell."""
    found = {}
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            ran_ns = int((task / "schedstat").read_text().split()[0])
            waits = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
        except (OSError, ValueError, IndexError):
            continue
        if waits is not None:
            found[int(task.name)] = _Thread(ran_ns=ran_ns, waits=int(waits[1]))
    return found


def _spinning_thread(known: set[int]) -> int | None:
    """The new thread that computes and never waits though there is nothing to do; None if all of them wait.

    Horovod's other threads wait in every cycle, on a crowded machine too.
    """
    before = _threads()
    time.sleep(_LOOK_S)
    spinning = [
        number
        for number, thread in _threads().items()
        if number not in known
        and (was := before.get(number)) is not None
        and thread.waits == was.waits
        and thread.ran_ns - was.ran_ns > _SPINS * _LOOK_S * 1e9
    ]
    return spinning[0] if len(spinning) == 1 else None


def _calm(thread: int) -> str:
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        return (
            f"Horovod's timeline thread computes all the time on rank 0 and could not be calmed ({error.strerror}): it "
            "takes from the measured steps"
        )
    return "Horovod's timeline thread, which never sleeps in this build, got the idle scheduling class after the window"
