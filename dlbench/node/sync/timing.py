"""Timing of exchanges: by the monotonic clock on a CPU, by events of streams on a GPU."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dlbench.node.sync.engine import MessageSpan
from dlbench.records.exchange import GradientTime, Message

_ANCHOR_TRIES = 5
_MIN_ANCHOR_DISTANCE_S = 0.1  # Between closer anchors their errors are larger than the drift of the clocks.

_SLEEP_CYCLES = 1_000_000
"""Cycles of the sleep that is timed to measure one cycle: half a millisecond or more, long for the clock of events."""

LEAST_SAMPLE_S = 2e-3  # Shortest sample: some fifty times the 15 to 40 us between ranks that leave gloo's barrier.
MOST_OPERATIONS = 1000  # Most operations of a sample; OSU's benchmarks repeat small messages as often.
_GROWTH = 16  # Largest growth from one trial to the next: the first, of one operation, is mostly barrier.

MOST_QUEUED = 150
"""Most calls of a sample whose stream is held: CUDA's launch queue takes 1,024 entries, a call of NCCL makes six."""

_HOLD_FACTOR = 2.0  # Length of the sleep over the time that queueing took before, which varies.
_FIRST_CALL_S = 50e-6  # Assumed time to queue a first call: several times what torch and NCCL need.
_BARRIER_S = 100e-6  # Time to queue the sleep and the barrier.
_LONGEST_HOLD_S = 0.1  # `MOST_QUEUED` calls of 330 us, twice.


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """An event of the current stream, and the host's time at which it passed."""

    event: torch.cuda.Event
    host_ns: int  # CLOCK_MONOTONIC, the middle of `delay_ns`.
    delay_ns: int  # Between recording the event and knowing on the host that it has passed, on an idle device.

    @property
    def error_ns(self) -> int:
        """The largest error of `host_ns`."""
        return (self.delay_ns + 1) // 2


def anchored() -> Anchor:
    """Returns an event of the current stream with the host's time; waits for the stream, so not within a step."""
    anchors = []
    for _ in range(_ANCHOR_TRIES):
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before = time.monotonic_ns()
        event.record()
        event.synchronize()
        after = time.monotonic_ns()
        anchors.append(Anchor(event=event, host_ns=(before + after) // 2, delay_ns=after - before))
    # An idle device passes the event at once, so the shortest try is the closest; the first waits for former work.
    return min(anchors, key=operator.attrgetter("delay_ns"))


def sleep_ns_per_cycle() -> float:
    """Returns the nanoseconds of a cycle of `torch.cuda._sleep`; waits for the current stream."""
    cycle_ns = 0.0
    # CUDA loads a kernel when it is first launched (CUDA_MODULE_LOADING), so the first time includes loading.
    for cycles in (1, _SLEEP_CYCLES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        last.record()
        last.synchronize()
        cycle_ns = first.elapsed_time(last) * 1e6 / cycles
    return cycle_ns


class Clock:
    """Takes moments and orders computing and exchanging; here on a CPU, where a call returns when its work is done."""

    marks_are_free = True  # Whether a moment is cheap enough for each gradient of each step.

    def enter_thread(self) -> None:
        """Is called once on the communication thread."""

    def mark(self) -> Any:
        """Returns this moment of the current stream."""
        return time.monotonic_ns()

    def give_back(self, moments: Iterable[Any]) -> None:
        """Takes back moments that will never be read again."""

    def exchanging(self, ready: Any) -> AbstractContextManager[object]:
        """Returns a context that queues work on the stream of exchanges, after the moment `ready`."""
        return nullcontext()

    def join(self) -> None:
        """Makes work that is queued from now on wait for all exchanges."""

    def settle(self) -> None:
        """Returns when all queued work is done, so that moments can be read."""

    def sleep(self, seconds: float) -> None:
        """Holds the current stream for about `seconds` while the host continues; no effect on a CPU."""

    def has_passed(self, moment: Any) -> bool:
        """Returns whether the device has reached the moment."""
        return True

    def between(self, first: Any, last: Any) -> float:
        return float(last - first) / 1e9

    @property
    def error_s(self) -> float:
        """The largest error of `monotonic_ns`, in seconds."""
        return 0.0

    def anchor(self) -> None:
        """Measures the offset to CLOCK_MONOTONIC, and called again later the clock's rate; waits for the device."""

    def monotonic_ns(self, moment: Any) -> int:
        """Returns a moment in nanoseconds of CLOCK_MONOTONIC; after `anchor`, and `settle` after the moment."""
        return int(moment)


class CudaClock(Clock):
    """The clock of a GPU, with a separate stream for exchanges; records events again that were given back."""

    marks_are_free = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._anchors: list[Anchor] = []
        self._spare: list[torch.cuda.Event] = []
        self._ns_per_cycle: float | None = None

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        try:  # one atomic call: two threads take marks
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def give_back(self, moments: Iterable[torch.cuda.Event]) -> None:
        self._spare.extend(moments)

    def exchanging(self, ready: torch.cuda.Event) -> AbstractContextManager[object]:
        self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def sleep(self, seconds: float) -> None:
        if self._ns_per_cycle is None:
            self._ns_per_cycle = sleep_ns_per_cycle()
        torch.cuda._sleep(round(seconds * 1e9 / self._ns_per_cycle))  # type: ignore[no-untyped-call]

    def has_passed(self, moment: torch.cuda.Event) -> bool:
        return bool(moment.query())  # type: ignore[no-untyped-call]

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def anchor(self) -> None:
        self.settle()
        self._anchors.append(anchored())

    @property
    def error_s(self) -> float:
        return max((anchor.error_ns for anchor in self._anchors), default=0.0) / 1e9

    def monotonic_ns(self, moment: torch.cuda.Event) -> int:
        first, last = self._anchors[0], self._anchors[-1]
        elapsed_s = self.between(first.event, moment)
        rate = 1.0  # Of the host's clock over the device's; they differ by some parts in a million.
        if last is not first:
            distance_s = self.between(first.event, last.event)
            if distance_s > _MIN_ANCHOR_DISTANCE_S:
                rate = (last.host_ns - first.host_ns) / 1e9 / distance_s
        return first.host_ns + round(elapsed_s * rate * 1e9)


def clock_for(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


class IntervalSums:
    """Seconds of intervals by name, added up once the device has passed them, so that the host never waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: deque[tuple[Sequence[str], Sequence[Any]]] = deque()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, names: Sequence[str], moments: Sequence[Any]) -> None:
        """Adds the intervals between consecutive moments, which are not used again."""
        self._pending.append((names, moments))
        self._add_passed()

    def restart(self) -> None:
        """Resets all sums."""
        self.settle()
        self.seconds.clear()

    def settle(self) -> None:
        """Completes the sums; waits for the device."""
        self._clock.settle()
        self._add_passed()

    def _add_passed(self) -> None:
        while self._pending and self._clock.has_passed(self._pending[0][1][-1]):
            names, moments = self._pending.popleft()
            for name, (begin, end) in zip(names, itertools.pairwise(moments), strict=True):
                self.seconds[name] += self._clock.between(begin, end)
            self._clock.give_back(moments)


Interval = tuple[float, float]  # Begin and end, seconds after the start of the backward pass.


@dataclass(kw_only=True)
class MessageInFlight:
    """The exchange of one bucket, in moments of the clock."""

    num_bytes: int  # Bytes of gradients, before any compression.
    num_tensors: int
    method: str
    handed: Any  # When it was handed over for exchange.
    done: Any = None  # When it came back; None until then.
    wire_bytes: float = 0.0  # Bytes of the exchanged vector, if they are not `num_bytes`.

    @property
    def of_gradients(self) -> bool:
        """Returns whether the message is sent as soon as its last gradient is computed."""
        return True


@dataclass(kw_only=True)
class WatchedStep:
    """One watched step, in moments of the clock."""

    begin: Any
    ready: dict[str, Any] = field(default_factory=dict)
    backward_end: Any = None
    exchange_end: Any = None
    messages: list[MessageInFlight] = field(default_factory=list)


class BackwardWatch:
    """Times gradients and messages of one rank in a window of watched steps."""

    # Hooks on the parameters exist only while the window is open, so measured steps have none.

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        self.is_open = False
        self.steps: list[WatchedStep] = []
        self._current: WatchedStep | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._hooks = ExitStack()

    def attach(self, model: nn.Module) -> None:
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> dict[str, int]:
        return {name: p.nbytes for name, p in self._parameters}

    def open(self) -> None:
        if self.is_open:
            return
        self.is_open = True
        self.clock.anchor()
        for name, parameter in self._parameters:

            def record(parameter: torch.Tensor, name: str = name) -> None:
                if self._current is not None:
                    self._current.ready[name] = self.clock.mark()

            self._hooks.enter_context(parameter.register_post_accumulate_grad_hook(record))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends watching and drops a step that was not finished."""
        self.is_open = False
        self._current = None
        self._hooks.close()
        if self.steps:
            self.clock.anchor()
            self.clock.settle()

    def begin(self) -> None:
        self._current = WatchedStep(begin=self.clock.mark()) if self.is_open else None

    def backward_ended(self) -> None:
        if self._current is not None:
            self._current.backward_end = self.clock.mark()

    def hand_over(self, message: MessageInFlight) -> None:
        if self._current is not None:
            self._current.messages.append(message)

    def exchange_ended(self) -> None:
        step, self._current = self._current, None
        if step is not None:
            step.exchange_end = self.clock.mark()
            self.steps.append(step)

    def ready_s(self, step: WatchedStep) -> dict[str, float]:
        """Returns the seconds after the start of the backward pass at which each gradient was ready."""
        return {name: max(0.0, self.clock.between(step.begin, moment)) for name, moment in step.ready.items()}

    def gradients(self) -> tuple[GradientTime, ...]:
        """Returns each gradient's median over the window, in the order in which they were ready."""
        times: dict[str, list[float]] = defaultdict(list)
        for step in self.steps:
            for name, ready_s in self.ready_s(step).items():
                times[name].append(ready_s)
        sizes = self.gradient_bytes
        gradients = [
            GradientTime(name=name, num_bytes=sizes[name], ready_s=statistics.median(ready_s))
            for name, ready_s in times.items()
        ]
        return tuple(sorted(gradients, key=operator.attrgetter("ready_s")))

    def backward_s(self) -> float | None:
        """Returns the median backward pass of the window, in seconds; None if no step was watched."""
        return median(
            self.clock.between(step.begin, step.backward_end) for step in self.steps if step.backward_end is not None
        )


def spans(steps: Iterable[Sequence[MessageInFlight]], clock: Clock) -> Iterator[MessageSpan]:
    """Yields the completed messages of watched steps, each handed over when its last gradient was ready."""
    for step_number, step in enumerate(steps):
        for number, message in enumerate(step):
            if message.done is None:
                continue
            handed_ns = clock.monotonic_ns(message.handed)
            yield MessageSpan(
                step=step_number,
                number=number,
                ready_ns=handed_ns,
                start_ns=handed_ns,
                end_ns=clock.monotonic_ns(message.done),
                num_bytes=message.num_bytes,
                num_tensors=message.num_tensors,
                method=message.method,
            )


def layout(messages: Sequence[MessageInFlight]) -> list[tuple[int, int, str]]:
    """Returns bytes, tensors and method of each message, which are equal for steps that are grouped equally."""
    return [(message.num_bytes, message.num_tensors, message.method) for message in messages]


def messages_of(
    messages: Sequence[MessageInFlight], watched: Sequence[tuple[Any, Sequence[MessageInFlight]]], clock: Clock
) -> Iterator[Message]:
    """Yields a step's messages with medians over `watched`: each step's start of the backward pass, and messages."""
    for number, message in enumerate(messages):
        ready_s = None
        if message.of_gradients:
            ready_s = median(max(0.0, clock.between(begin, sent[number].handed)) for begin, sent in watched)
        yield Message(
            num_bytes=message.num_bytes,
            num_tensors=message.num_tensors,
            method=message.method,
            ready_s=ready_s,
            start_s=ready_s,
            exchange_s=median(clock.between(sent[number].handed, sent[number].done) for _, sent in watched),
        )


def mean_over_ranks(times_by_rank: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Returns the mean of each time over the ranks that measured it, in seconds, by its name."""
    seconds_by_name: dict[str, list[float]] = defaultdict(list)
    for times in times_by_rank:
        for name, seconds in times.items():
            if seconds is not None:
                seconds_by_name[name].append(seconds)
    return {name: statistics.fmean(seconds) for name, seconds in seconds_by_name.items()}


def median(values: Iterable[float]) -> float | None:
    """Returns the median; None if there are no values."""
    numbers = list(values)
    if not numbers:
        return None
    return statistics.median(numbers)


def covered(intervals: Sequence[Interval], begin: float = float("-inf"), end: float = float("inf")) -> float:
    """Returns the length of the union of intervals within [begin, end], in seconds."""
    total, reach = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reach), min(last, end)
        if last > first:
            total += last - first
            reach = last
    return total


def ring_bytes(wire_bytes: float, *, ranks: int, groups: int) -> tuple[float, float]:
    """Returns mean bytes that a rank sends inside its group and across in ring all-reduces (Patarasuk, Yuan 2009)."""
    # Groups are blocks of neighbouring ranks, so one rank of each has its right neighbour in another group.
    total = 2 * (ranks - 1) / ranks * wire_bytes
    across = total * groups / ranks if groups > 1 else 0.0
    return total - across, across


def tree_bytes(shares: Sequence[int], *, groups: int) -> tuple[float, float]:
    """Returns mean bytes that a rank sends inside its group and across if every rank broadcasts its share by a tree."""
    # Binomial: counted from the root, rank r receives from r without its highest bit (gloo/broadcast.cc).
    ranks = len(shares)
    group_size = ranks // groups
    inside = across = 0
    for root, share in enumerate(shares):
        for receiver in range(1, ranks):
            sender = receiver ^ 1 << receiver.bit_length() - 1
            if (sender + root) % ranks // group_size == (receiver + root) % ranks // group_size:
                inside += share
            else:
                across += share
    return inside / ranks, across / ranks


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The time of one operation of a sample."""

    seconds: float
    skew_s: float  # Time between the first and the last rank's start of the sample.


def over_ranks(
    starts_ns: Sequence[int], durations_ns: Sequence[int], operations: int, *, from_last_start: bool, one_clock: bool
) -> Timed:
    """Returns a sample's time: from last start to last end (`from_last_start`, on `one_clock`), or the longest."""
    skew_ns = max(durations_ns) - min(durations_ns)
    sample_ns = max(durations_ns)
    if one_clock:
        skew_ns = max(starts_ns) - min(starts_ns)
        if from_last_start:
            ends_ns = map(operator.add, starts_ns, durations_ns)
            sample_ns = max(ends_ns) - max(starts_ns)
    return Timed(seconds=sample_ns / operations / 1e9, skew_s=skew_ns / 1e9)


def enough_operations(seconds: float, operations: int, most: int) -> int:
    """Returns the operations to try after a sample of `seconds`; as many if it was long enough, or they are `most`."""
    if seconds >= LEAST_SAMPLE_S or operations >= most:
        return operations
    next_operations = min(most, _GROWTH * operations)
    if seconds > 0:
        needed = math.ceil(operations * LEAST_SAMPLE_S / seconds)
        next_operations = min(next_operations, max(needed, 2 * operations))
    return next_operations


class StreamTimer:
    """Times operations in the current stream, without the host's calls between them, which can take longer."""

    # The device sleeps and enters a barrier while the host queues. If it has not passed the first event when the last
    # one is queued, it never waited for the host.

    def __init__(self, clock: Clock, barrier: Callable[[], object]) -> None:
        """Takes a clock and a function that queues a barrier of all ranks in the stream, without a wait of the host."""
        self._clock = clock
        self._barrier = barrier
        self._call_s: dict[Hashable, float] = {}  # Seconds that the host took to queue a call, by kind of call.
        self._stretch = 1.0  # Factor on a requested sleep, so that it lasts as long as requested.

    def time(self, run: Callable[[], object], calls: int, kind: Hashable) -> tuple[float, bool]:
        """Times `run`, which queues `calls` calls of a `kind`, until the device has done them. Returns seconds, and
        whether the device began before the host had queued everything, so that it may have waited.
        """
        clock = self._clock
        call_s = self._call_s.get(kind, _FIRST_CALL_S)
        sleep_s = min(_BARRIER_S + _HOLD_FACTOR * calls * call_s, _LONGEST_HOLD_S)
        before_sleep = clock.mark()
        clock.sleep(sleep_s * self._stretch)
        after_sleep = clock.mark()
        before = time.perf_counter()
        self._barrier()
        start = clock.mark()
        run()
        end = clock.mark()
        is_late = clock.has_passed(start)
        queueing_s = (time.perf_counter() - before) / calls
        if is_late:
            queueing_s = max(2 * call_s, queueing_s)
        self._call_s[kind] = queueing_s
        clock.settle()
        if (slept_s := clock.between(before_sleep, after_sleep)) > 0:
            self._stretch *= sleep_s / slept_s
        seconds = clock.between(start, end)
        clock.give_back([before_sleep, after_sleep, start, end])
        return seconds, is_late
