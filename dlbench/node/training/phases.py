"""Marks the ends of a step's phases: with the monotonic clock on a CPU, with CUDA events on a GPU.

On a GPU an event only enters the stream's queue, so nothing waits for it; times are read steps
later, when the events have passed. The input wait measured so is the part the GPU really idled.

**Where a step lies on the host's clock.** Wherever the device stands still between steps, an event is tied to
CLOCK_MONOTONIC (`dlbench.node.sync.timing.anchored`); from there starts are summed up step by step, so that steps
neither overlap nor leave gaps. They are not taken from the anchor in one go: CUDA gives the time between two events as
a float32 of milliseconds, which after ten minutes resolves 62 microseconds, and within a step of 100 ms 8 nanoseconds.
How far both clocks have come apart is seen at the next standstill; `clock_error_ns` bounds it.

**How long the device waited for the host.** The host's clock is read at each mark too. Kernels of a stream run in
order, so once the host has queued the last of a phase, the device is busy until the phase ends. With h the host's and d
the device's time of a mark, all idling of a phase lies between the end of the phase before and the host's last call:

    idle of a phase  <=  min(d_k - d_(k-1), max(0, h_k + delay - d_(k-1)))

`delay` is what an event takes from the call to the host's knowing that it passed, as anchors measured it here. Where
the bound is 0 there was none, and d_k - d_(k-1) is what the kernels take. `hold_back` makes such steps in the warm-up:
the device sleeps while the host queues. `dlbench.analysis.launching` makes the idle time of measured steps of both.

**How long it sleeps.** A section of a step is what follows a `hold_back`: with gradient accumulation a step has two for
each part of its batch, and one for the update. Before each section the device sleeps for twice the time (with `delay`)
that the host took for this section's calls in the last step before the held ones, and not at all where the host was
ahead then. So each part is held back where it has to be, the sleeps of a step are about twice the host's step at most,
however many parts it has, and where the device is what is slow, it does not sleep at all.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch

from dlbench.node.sync.timing import Anchor, anchored, sleep_ns_per_cycle
from dlbench.records.rows.steps import LAUNCHED, PHASES

INPUT, H2D, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(len(PHASES))
_LAUNCHED = tuple(PHASES.index(phase) for phase in LAUNCHED)
_launches = itemgetter(*_LAUNCHED)

_HOLD_FACTOR = 2
"""How much longer the device sleeps than the host took for the same section before, since calls do not always take as
long; where that is not enough, the bound of the phase is not 0, and its time is not taken for that of its kernels."""

_LONGEST_HOLD_NS = 1_000_000_000
"""Of one section. What the host needs longer for is no matter of launches (some microseconds each, and the launch queue
holds about a thousand of them)."""


class StepTimes(NamedTuple):
    """One step; times are nanoseconds."""

    start_ns: int  # CLOCK_MONOTONIC.
    step_ns: int
    phases: tuple[int, ...]  # By `PHASES`.
    samples: int
    loss: float
    launch: tuple[int, ...] = ()
    """By `LAUNCHED`: how long the device waited for the host's calls, at most; nothing on a CPU, whose calls return
    when their work is done."""


class CpuTimer:
    """The monotonic clock: work on a CPU is done when its call returns. Called around every phase of every step."""

    clock = "monotonic"
    clock_error_ns = 0  # How far `start_ns` may be off CLOCK_MONOTONIC.

    def __init__(self) -> None:
        self._spent = [0] * len(PHASES)
        self._last = 0
        self._begun: int | None = None
        self._pending: tuple[int, float] | None = None
        self._done: list[StepTimes] = []

    def begin(self) -> None:
        """A step begins; the one before, if any, ends. After `close` it may wait for the device."""
        now = time.monotonic_ns()
        self._end_step(now)
        self._begun = self._last = now
        self._spent = [0] * len(PHASES)

    def hold(self, holds: bool) -> None:
        """Whether `hold_back` acts from now on; between steps, after `close`."""

    def hold_back(self) -> None:
        """A section of the step begins, the same ones in the same order in every step. Where steps are held back, the
        device sleeps until the host has queued the section; the time counts as input. Nothing on a CPU.
        """

    def mark(self, phase: int) -> None:
        """A phase has ended; the time since the last mark is added to it, so that phases may take turns."""
        now = time.monotonic_ns()
        self._spent[phase] += now - self._last
        self._last = now

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        """The step's work is done; its loss is kept, on a GPU without waiting for it."""
        self._pending = (samples, loss.item())

    def close(self) -> None:
        self._end_step(time.monotonic_ns())

    def collect(self, *, wait: bool) -> list[StepTimes]:
        """Steps whose times are known by now, in order; all of them if `wait`."""
        done, self._done = self._done, []
        return done

    def _end_step(self, now: int) -> None:
        if self._begun is None or self._pending is None:
            return
        samples, loss = self._pending
        self._done.append(StepTimes(self._begun, now - self._begun, tuple(self._spent), samples, loss))
        self._pending = None


class _Mark(NamedTuple):
    """The end of a phase: the event, and the host's clock once it had entered the queue."""

    phase: int
    event: torch.cuda.Event
    host_ns: int


class _Section(NamedTuple):
    """What follows a `hold_back`: its first mark, and the host's clock as it began."""

    first: int
    host_ns: int


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose events may not have passed yet."""

    anchor: Anchor | None  # Of its start; None where it begins as the step before ends.
    start: torch.cuda.Event
    marks: list[_Mark]
    sections: list[_Section]
    end: torch.cuda.Event
    samples: int
    loss: torch.Tensor


class CudaTimer:
    """CUDA events on the current stream; losses are copied to pinned memory in the same order."""

    clock = "cuda-events"

    def __init__(self, *, synchronise: bool = False) -> None:
        """`synchronise`: wait for the device at every mark (the plan's phase mode)."""
        self.clock_error_ns = 0
        self._synchronise = synchronise
        self._start: torch.cuda.Event | None = None
        self._anchor: Anchor | None = None
        self._marks: list[_Mark] = []
        self._sections: list[_Section] = []
        self._known: tuple[_Queued, list[int]] | None = None
        """The last step whose times are known, and what the device waited for the host before each mark, at most."""
        self._sleep_cycles: list[int] = []  # By section; none while nothing is held back.
        self._pending: tuple[int, torch.Tensor] | None = None
        self._queue: deque[_Queued] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._spare_losses: list[torch.Tensor] = []
        self._delay_ns = 0
        self._end_ns: int | None = None  # Of the last step whose times are known, on the host's clock.
        self._last_anchor: Anchor | None = None

    def begin(self) -> None:
        if self._start is None:
            # Between steps, with everything done that was ordered: nothing is lost by waiting.
            self._anchor = anchored()
        event = self._record()
        self._end_step(event)
        self._start = event

    def hold(self, holds: bool) -> None:
        self._sleep_cycles = []
        asleep_ns = self._to_sleep_ns() if holds and not self._synchronise else []
        if not any(asleep_ns):
            return
        ns_per_cycle = sleep_ns_per_cycle()
        self._sleep_cycles = [round(each / ns_per_cycle) for each in asleep_ns]

    def _to_sleep_ns(self) -> list[int]:
        """By section of a step, from the last one whose times are known; 0 where no call of the host came late."""
        if self._known is None:
            return []
        (step, waits), found = self._known, []
        ends = [section.first for section in step.sections[1:]] + [len(step.marks)]
        for section, end in zip(step.sections, ends, strict=True):
            late = [
                mark.host_ns
                for mark, wait in zip(step.marks[section.first : end], waits[section.first : end], strict=True)
                if wait and mark.phase in _LAUNCHED
            ]
            took_ns = late[-1] - section.host_ns + self._delay_ns if late else 0
            found.append(min(_HOLD_FACTOR * took_ns, _LONGEST_HOLD_NS))
        return found

    def hold_back(self) -> None:
        number = len(self._sections)
        if number < len(self._sleep_cycles) and self._sleep_cycles[number]:
            torch.cuda._sleep(self._sleep_cycles[number])  # type: ignore[no-untyped-call]
            self.mark(INPUT)
        self._sections.append(_Section(len(self._marks), time.monotonic_ns()))

    def mark(self, phase: int) -> None:
        self._marks.append(_Mark(phase, self._record(), time.monotonic_ns()))

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        spare = self._spare_losses
        host = spare.pop() if spare else torch.empty((), dtype=torch.float32, pin_memory=True)
        host.copy_(loss.detach(), non_blocking=True)
        self._pending = (samples, host)

    def close(self) -> None:
        if self._start is not None:
            self._end_step(self._record())
            self._start = None

    def collect(self, *, wait: bool) -> list[StepTimes]:
        done: list[StepTimes] = []
        while self._queue:
            step = self._queue[0]
            if wait:
                step.end.synchronize()
            elif not step.end.query():  # type: ignore[no-untyped-call]
                break
            self._queue.popleft()
            done.append(self._times(step))
            # The end is the next step's start, and this start may still be the one before's end.
            self._spare.extend(mark.event for mark in step.marks)
            self._spare_losses.append(step.loss)
        if wait and self._start is None and self._last_anchor is not None:
            self._compare(anchored())
        return done

    def _times(self, step: _Queued) -> StepTimes:
        if step.anchor is not None:
            self._compare(step.anchor)
            self._delay_ns = step.anchor.delay_ns
            begins_ns = step.anchor.host_ns + _nanoseconds(step.anchor.event, step.start)
            self._end_ns = begins_ns if self._end_ns is None else max(begins_ns, self._end_ns)
        assert self._end_ns is not None
        start_ns = self._end_ns
        phases, launch, waits = [0] * len(PHASES), [0] * len(PHASES), list[int]()
        last, last_ns = step.start, start_ns
        for phase, event, host_ns in step.marks:
            took = _nanoseconds(last, event)
            phases[phase] += took
            if not self._synchronise:
                late = host_ns + self._delay_ns - last_ns
                waits.append(0 if late <= 0 else min(late, took))
                launch[phase] += waits[-1]
            last, last_ns = event, last_ns + took
        step_ns = _nanoseconds(step.start, step.end)
        self._end_ns = start_ns + step_ns
        self._known = step, waits
        return StepTimes(start_ns, step_ns, tuple(phases), step.samples, step.loss.item(), _launches(launch))

    def _compare(self, anchor: Anchor) -> None:
        """Notes how far the clocks may have come apart since the anchor before."""
        error, before = anchor.error_ns, self._last_anchor
        if before is not None:
            # The same interval by the host's clock and by the device's.
            apart = anchor.host_ns - before.host_ns - _nanoseconds(before.event, anchor.event)
            error += before.error_ns + abs(apart)
        self._last_anchor = anchor
        self.clock_error_ns = max(self.clock_error_ns, error)

    def _record(self) -> torch.cuda.Event:
        if self._synchronise:
            # This stream only: the whole device would include the exchange that still runs on its own.
            torch.cuda.current_stream().synchronize()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _end_step(self, now: torch.cuda.Event) -> None:
        if self._pending is None or self._start is None:
            return
        samples, loss = self._pending
        self._queue.append(_Queued(self._anchor, self._start, self._marks, self._sections, now, samples, loss))
        self._anchor = None
        self._marks, self._sections = [], []
        self._pending = None


def _nanoseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    # Events resolve about half a microsecond; elapsed_time is in milliseconds, a float32 of CUDA's.
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)


PhaseTimer = CpuTimer | CudaTimer


def timer_for(device: torch.device, *, synchronise: bool) -> PhaseTimer:
    """The timer that suits a device."""
    return CudaTimer(synchronise=synchronise) if device.type == "cuda" else CpuTimer()
