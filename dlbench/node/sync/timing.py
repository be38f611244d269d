"""Moments of an exchange: the monotonic clock on a CPU, events of streams on a GPU (the latter not measured here).

On a GPU the host only orders work. So a message waits for its gradients, and the step for its messages, by events
between streams, and moments are events too, read when the run is over.

A barrier does not release all ranks at once: over TCP they wake some 10 us apart. Where one operation is as short as
that, several are timed back to back, as nccl-tests does, and a rank that is early waits in the first of them only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from dlbench.node.sync.engine import MessageSpan
from dlbench.records.exchange import GradientTime, Message

_ANCHOR_TRIES = 5
_RATE_FROM_S = 0.1  # Between anchors closer than this, their own errors are larger than what the clocks drift apart.

_SLEEP_CYCLES = 1_000_000
"""Of the sleep that is timed to learn how long a cycle is; half a millisecond and more, so that events resolve it."""

LEAST_SAMPLE_S = 2e-3  # Shortest sample: some fifty times the 15 to 40 us by which ranks leave gloo's barrier apart.
MOST_OPERATIONS = 1000  # Of a sample; OSU's benchmarks repeat small messages as often.
_GROWTH = 16  # From a trial to the next one at most: the first one, of one operation, is mostly barrier.

MOST_QUEUED = 150
"""Calls of a sample that is held back: CUDA's launch queue takes about 1,024 entries before launching waits, and a call
of torch's NCCL makes some six: its kernel, and records of events and waits for them (ProcessGroupNCCL.cpp)."""

_HOLD_FACTOR = 2.0  # Sleep by what queueing took before; calls do not always take as long.
_FIRST_CALL_S = 50e-6  # Queueing a call, where it was not seen yet: some times what torch and NCCL need.
_MEETING_S = 100e-6  # Ordering the sleep and the meeting.
_LONGEST_HOLD_S = 0.1  # `MOST_QUEUED` calls of 330 us, twice.


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """An event of the stream in force, and when it passed."""

    event: torch.cuda.Event
    host_ns: int  # CLOCK_MONOTONIC.
    delay_ns: int  # From the call to the host's knowing that the event has passed, on an idle device.

    @property
    def error_ns(self) -> int:
        """How far `host_ns` may be off: it is the middle of `delay_ns`."""
        return (self.delay_ns + 1) // 2


def anchored() -> Anchor:
    """Ties an event of the stream in force to the host's clock; waits for the stream, so not within a step."""
    found: Anchor | None = None
    for _ in range(_ANCHOR_TRIES):
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before = time.monotonic_ns()
        event.record()
        event.synchronize()
        after = time.monotonic_ns()
        # An idle device is at the event at once, so the shortest try is the closest; the first waits for former work.
        if found is None or after - before < found.delay_ns:
            found = Anchor(event=event, host_ns=(before + after) // 2, delay_ns=after - before)
    assert found is not None
    return found


def sleep_ns_per_cycle() -> float:
    """How long a cycle of `torch.cuda._sleep` is, nanoseconds; waits for the stream in force."""
    found = 0.0
    # CUDA loads a kernel when it is launched first (CUDA_MODULE_LOADING): the first time is not that of the sleep.
    for cycles in (1, _SLEEP_CYCLES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        last.record()
        last.synchronize()
        found = first.elapsed_time(last) * 1e6 / cycles
    return found


class Clock:
    """Moments, and the order between computing and exchanging: of a CPU, where a call returns when its work is done."""

    marks_are_free = True  # Whether a moment costs so little that each gradient of each step may take one.

    def enter_thread(self) -> None:
        """Called once on the communication thread."""

    def mark(self) -> Any:
        """This moment, on the stream in force."""
        return time.monotonic_ns()

    def give_back(self, moments: Iterable[Any]) -> None:
        """These long past moments will never be read again."""

    def exchanging(self, ready: Any) -> AbstractContextManager[object]:
        """Within it, work is ordered on the stream of exchanges, after the moment `ready`."""
        return nullcontext()

    def join(self) -> None:
        """What is ordered from now on comes after all exchanges."""

    def settle(self) -> None:
        """Returns when all that was ordered is done, so that moments can be read."""

    def sleep(self, seconds: float) -> None:
        """The stream in force stands still for about so long, while the host goes on; nothing on a CPU."""

    def has_passed(self, moment: Any) -> bool:
        """Whether the device has come to it."""
        return True

    def between(self, first: Any, last: Any) -> float:
        return float(last - first) / 1e9

    @property
    def error_s(self) -> float:
        """By how much `monotonic_ns` may be off, seconds."""
        return 0.0

    def anchor(self) -> None:
        """Notes how moments stand to CLOCK_MONOTONIC; waits for the device, so not within a step. Called before and
        after some moments, it gives the rate of the device's clock, too.
        """

    def monotonic_ns(self, moment: Any) -> int:
        """A moment as nanoseconds of CLOCK_MONOTONIC; after `anchor` and, behind the moment, `settle`."""
        return int(moment)


class CudaClock(Clock):
    """GPU: a stream of its own for exchanges. Events that were given back are recorded again."""

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
        try:  # taken by one call: two threads mark
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
        """Half of the time that the device may have passed an anchor in, of the worst one."""
        return max((anchor.error_ns for anchor in self._anchors), default=0.0) / 1e9

    def monotonic_ns(self, moment: torch.cuda.Event) -> int:
        first, last = self._anchors[0], self._anchors[-1]
        elapsed_s = self.between(first.event, moment)
        apart_s = self.between(first.event, last.event) if last is not first else 0.0
        # The two clocks run at rates of their own, some parts in a million apart.
        rate = (last.host_ns - first.host_ns) / 1e9 / apart_s if apart_s > _RATE_FROM_S else 1.0
        return first.host_ns + round(elapsed_s * rate * 1e9)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


Interval = tuple[float, float]  # Begin and end, seconds after the start of the backward pass.


@dataclass(kw_only=True)
class MessageInFlight:
    """One bucket on its way, in moments of the clock."""

    num_bytes: int  # Of gradients, before any compression.
    num_tensors: int
    method: str
    handed: Any
    done: Any = None  # None until it is back.
    wire_bytes: float = 0.0  # Of the vector that is exchanged, where that is not as long.

    @property
    def of_gradients(self) -> bool:
        """Whether it goes when its last gradient is there."""
        return True


@dataclass(kw_only=True)
class WatchedStep:
    """One step of the window, in moments of the clock."""

    begin: Any
    ready: dict[str, Any] = field(default_factory=dict)
    backward_end: Any = None
    exchange_end: Any = None
    messages: list[MessageInFlight] = field(default_factory=list)


class BackwardWatch:
    """The window of watched steps of one rank. Used by an engine: `attach` once, `open` and `close` between steps, and
    within every step `begin`, `backward_ended` and `exchange_ended`, which do nothing while the window is closed.
    Hooks on the parameters exist only while it is open, so that measured steps carry none of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_for(device)
        self.is_open = False
        self.steps: list[WatchedStep] = []
        self._current: WatchedStep | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._hooks: list[Any] = []

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

            def note(parameter: torch.Tensor, name: str = name) -> None:
                if self._current is not None:
                    self._current.ready[name] = self.clock.mark()

            self._hooks.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Watches no more; a step that was not finished does not count."""
        self.is_open = False
        self._current = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
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
        """Seconds after the start of the backward pass at which each gradient was ready."""
        return {name: max(0.0, self.clock.between(step.begin, moment)) for name, moment in step.ready.items()}

    def gradients(self) -> tuple[GradientTime, ...]:
        """Each gradient's median over the window, in the order in which they were ready."""
        times: dict[str, list[float]] = {}
        for step in self.steps:
            for name, moment in self.ready_s(step).items():
                times.setdefault(name, []).append(moment)
        sizes = self.gradient_bytes
        found = [
            GradientTime(name=name, num_bytes=sizes[name], ready_s=statistics.median(all_s))
            for name, all_s in times.items()
        ]
        return tuple(sorted(found, key=lambda gradient: gradient.ready_s))

    def backward_s(self) -> float | None:
        """The backward pass, median over the window; None where no step was watched."""
        return median(
            self.clock.between(step.begin, step.backward_end) for step in self.steps if step.backward_end is not None
        )


def spans(steps: Iterable[Sequence[MessageInFlight]], clock: Clock) -> list[MessageSpan]:
    """Messages of watched steps that are back; each was handed over when its last gradient was there."""
    return [
        MessageSpan(
            step=number,
            number=place,
            ready_ns=clock.monotonic_ns(message.handed),
            start_ns=clock.monotonic_ns(message.handed),
            end_ns=clock.monotonic_ns(message.done),
            num_bytes=message.num_bytes,
            num_tensors=message.num_tensors,
            method=message.method,
        )
        for number, step in enumerate(steps)
        for place, message in enumerate(step)
        if message.done is not None
    ]


def layout(step: Sequence[MessageInFlight]) -> list[tuple[int, int, str]]:
    """By which messages of steps are those of another one."""
    return [(one.num_bytes, one.num_tensors, one.method) for one in step]


def messages_of(
    step: Sequence[MessageInFlight], watched: Sequence[tuple[Any, Sequence[MessageInFlight]]], clock: Clock
) -> tuple[Message, ...]:
    """Those of a step, with medians over `watched` ones of the same layout, each with the start of its backward."""

    def summed_up(number: int, one: MessageInFlight) -> Message:
        ways = [(begin, sent[number]) for begin, sent in watched]
        ready = median(max(0.0, clock.between(begin, way.handed)) for begin, way in ways) if one.of_gradients else None
        return Message(
            num_bytes=one.num_bytes,
            num_tensors=one.num_tensors,
            method=one.method,
            ready_s=ready,
            start_s=ready,
            exchange_s=median(clock.between(way.handed, way.done) for _, way in ways),
        )

    return tuple(summed_up(number, one) for number, one in enumerate(step))


def median(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def covered(intervals: Sequence[Interval], begin: float = float("-inf"), end: float = float("inf")) -> float:
    """Length of the union of intervals within [begin, end], seconds."""
    total, reach = 0.0, begin
    for first, last in sorted(intervals):
        first, last = max(first, reach), min(last, end)
        if last > first:
            total += last - first
            reach = last
    return total


def ring_bytes(wire_bytes: float, *, ranks: int, groups: int) -> tuple[float, float]:
    """Bytes that a rank sends inside its group and to other groups in ring all-reduces; mean over ranks.

    A ring sends 2 (p - 1) / p of the vector to the right neighbour (science of all-reduce: Patarasuk and Yuan, 2009).
    Where groups are blocks of neighbouring ranks, one rank of each group has its neighbour in another one.
    """
    total = 2 * (ranks - 1) / ranks * wire_bytes
    across = total * groups / ranks if groups > 1 else 0.0
    return total - across, across


def tree_bytes(shares: Sequence[int], *, groups: int) -> tuple[float, float]:
    """Bytes that a rank sends inside its group and to other groups where every rank broadcasts its share by a binomial
    tree; mean over ranks.

    Counted from its root, rank r has the message from r without its highest bit (gloo/broadcast.cc).
    """
    ranks = len(shares)
    block, sent = ranks // groups, [0, 0]
    for root, share in enumerate(shares):
        for receiver in range(1, ranks):
            sender = receiver ^ 1 << receiver.bit_length() - 1
            ends = ((place + root) % ranks // block for place in (sender, receiver))
            sent[next(ends) != next(ends)] += share
    return sent[0] / ranks, sent[1] / ranks


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a sample says of one operation."""

    seconds: float
    skew_s: float  # How far apart ranks began the sample.


def over_ranks(
    starts_ns: Sequence[int], durations_ns: Sequence[int], operations: int, *, from_last_start: bool, one_clock: bool
) -> Timed:
    """One sample from what each rank noted."""
    skew = (max(starts_ns) - min(starts_ns)) if one_clock else (max(durations_ns) - min(durations_ns))
    taken = max(durations_ns)
    if from_last_start and one_clock:
        taken = max(start + own for start, own in zip(starts_ns, durations_ns, strict=True)) - max(starts_ns)
    return Timed(seconds=taken / operations / 1e9, skew_s=skew / 1e9)


def enough_operations(seconds: float, operations: int, most: int) -> int:
    """How many operations to try, or to take, after a trial of `operations` whose sample lasted `seconds`. Returns
    `operations` itself once that is long enough, or cannot be more than `most`.
    """
    if seconds >= LEAST_SAMPLE_S or operations >= most:
        return operations
    wanted = math.ceil(operations * LEAST_SAMPLE_S / seconds) if seconds > 0 else math.inf
    return int(min(most, _GROWTH * operations, max(wanted, 2 * operations)))


class InStream(NamedTuple):
    """A sample timed in the stream of a GPU."""

    seconds: float
    is_late: bool  # Whether the device was there before the host had queued everything, so that it may have waited.


class StreamTimer:
    """Times operations in the stream in force, without the host's calls, which can take longer, between them.

    The device sleeps, then meets the other ranks, and then begins; meanwhile the host queues. Where the device has not
    passed the first event when the last one is queued, none of it waited for the host. How long to sleep is learnt
    from what queueing took before; and what a sleep lasts from the sleep before, for a device's clock may change.
    """

    def __init__(self, clock: Clock, meet: Callable[[], object]) -> None:
        """`meet` orders a barrier of all ranks in the stream; nobody waits for it on the host."""
        self._clock = clock
        self._meet = meet
        self._call_s: dict[Hashable, float] = {}
        self._stretch = 1.0  # Of what is asked for, so that the sleep lasts as long as it should.

    def time(self, run: Callable[[], object], calls: int, what: Hashable) -> InStream:
        """`run` orders so many calls of a kind: `what`. Returns when the device is through."""
        clock = self._clock
        call_s = self._call_s.get(what, _FIRST_CALL_S)
        moments = [clock.mark()]
        asked_s = min(_MEETING_S + _HOLD_FACTOR * calls * call_s, _LONGEST_HOLD_S)
        clock.sleep(asked_s * self._stretch)
        moments.append(clock.mark())
        before = time.perf_counter()
        self._meet()
        moments.append(clock.mark())
        run()
        moments.append(clock.mark())
        is_late = clock.has_passed(moments[2])
        queueing_s = (time.perf_counter() - before) / calls
        self._call_s[what] = max(2 * call_s, queueing_s) if is_late else queueing_s
        clock.settle()
        if (slept_s := clock.between(*moments[:2])) > 0:
            self._stretch *= asked_s / slept_s
        seconds = clock.between(*moments[2:])
        clock.give_back(moments)
        return InStream(seconds, is_late)
