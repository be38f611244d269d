"""Marks the ends of a step's phases: with the monotonic clock on a CPU, with CUDA events on a GPU.

On a GPU events only enter the stream's queue; their times are read steps later, without waiting. When the device is
idle between steps, an event is tied to CLOCK_MONOTONIC (`dlbench.node.sync.timing.anchored`), and starts are summed up
from there: a float32 of milliseconds, as CUDA gives it, resolves 8 ns in a step, but 62 us ten minutes after an anchor.

How long the device waited for the host: with h the host's and d the device's time of a mark, all idle time of a phase
lies between the end of the phase before and the host's last call, because kernels of a stream run in order::

    idle of a phase  <=  min(d_k - d_(k-1), max(0, h_k + delay - d_(k-1)))

`delay` is the time from recording an event until the host knows that it passed. If the bound is 0, the phase is the
time of its kernels alone. `hold_back` makes such steps in the warm-up: before each section of a step (two for each part
of a batch, one for the update) the device sleeps for twice the time that the host needed for its calls in the last step
before. `dlbench.analysis.causes` computes the idle time of measured steps from both.
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

_HOLD_FACTOR = 2  # Sleep of the device over the host's last time for a section; if it is too short, the bound is not 0.
_LONGEST_HOLD_NS = 1_000_000_000  # Longest sleep before a section; the launch queue holds about 1,000 calls of some us.


class StepTimes(NamedTuple):
    """Times of one step, in nanoseconds."""

    start_ns: int  # CLOCK_MONOTONIC.
    step_ns: int
    phases: tuple[int, ...]  # Time of each of `PHASES`.
    samples: int
    loss: float
    launch: tuple[int, ...] = ()  # Longest wait of the device for the host in each of `LAUNCHED`; empty on a CPU.


class CpuTimer:
    """Times phases on a CPU with the monotonic clock: work is done when its call returns."""

    clock = "monotonic"
    clock_error_ns = 0  # Largest error of `start_ns` against CLOCK_MONOTONIC.

    def __init__(self) -> None:
        self._spent = [0] * len(PHASES)
        self._last = 0
        self._begun: int | None = None
        self._pending: tuple[int, float] | None = None
        self._done: list[StepTimes] = []

    def begin(self) -> None:
        """Begins a step and ends the one before; after `close` it may wait for the device."""
        now = time.monotonic_ns()
        self._end_step(now)
        self._begun = self._last = now
        self._spent = [0] * len(PHASES)

    def hold(self, holds: bool) -> None:
        """Switches `hold_back` on or off; called between steps, after `close`."""

    def hold_back(self) -> None:
        """Begins a section of the step; if switched on, the device sleeps until the host has queued it."""

    def mark(self, phase: int) -> None:
        """Adds the time since the last mark to a phase, which may occur several times in a step."""
        now = time.monotonic_ns()
        self._spent[phase] += now - self._last
        self._last = now

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        """Notes the samples and the loss of the step, on a GPU without waiting for the loss."""
        self._pending = (samples, loss.item())

    def close(self) -> None:
        self._end_step(time.monotonic_ns())

    def collect(self, *, wait: bool) -> list[StepTimes]:
        """Returns the steps whose times became known, in order; waits for the device if `wait`."""
        done, self._done = self._done, []
        return done

    def _end_step(self, now: int) -> None:
        if self._begun is None or self._pending is None:
            return
        samples, loss = self._pending
        self._done.append(StepTimes(self._begun, now - self._begun, tuple(self._spent), samples, loss))
        self._pending = None


class _Mark(NamedTuple):
    """The end of a phase: the event, and the host's clock after it was queued."""

    phase: int
    event: torch.cuda.Event
    host_ns: int


class _Section(NamedTuple):
    """The part of a step after a `hold_back`."""

    first: int  # Index of its first mark.
    host_ns: int  # The host's clock at its begin.


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose events may not have passed yet."""

    anchor: Anchor | None  # Anchor of its start; None if it begins with the end of the step before.
    start: torch.cuda.Event
    marks: list[_Mark]
    sections: list[_Section]
    end: torch.cuda.Event
    samples: int
    loss: torch.Tensor


class CudaTimer:
    """Times phases on a GPU with CUDA events on the current stream; losses are copied to pinned memory in order."""

    clock = "cuda-events"

    def __init__(self, *, synchronise: bool = False) -> None:
        """`synchronise` waits for the device at every mark (the plan's phase mode)."""
        self.clock_error_ns = 0
        self._synchronise = synchronise
        self._start: torch.cuda.Event | None = None
        self._anchor: Anchor | None = None
        self._marks: list[_Mark] = []
        self._sections: list[_Section] = []
        self._known: tuple[_Queued, list[int]] | None = None
        """The last step whose times are known, and the device's longest wait for the host before each mark, ns."""
        self._sleep_cycles: list[int] = []  # Sleep before each section, clock cycles; empty if switched off.
        self._pending: tuple[int, torch.Tensor] | None = None
        self._queue: deque[_Queued] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._spare_losses: list[torch.Tensor] = []
        self._delay_ns = 0
        self._end_ns = 0  # End of the last step whose times are known, on the host's clock.
        self._last_anchor: Anchor | None = None

    def begin(self) -> None:
        if self._start is None:
            # Between steps the device has done all its work, so that waiting costs nothing.
            self._anchor = anchored()
        event = self._record()
        self._end_step(event)
        self._start = event

    def hold(self, holds: bool) -> None:
        self._sleep_cycles = []
        if not holds or self._synchronise:
            return
        sleeps_ns = self._to_sleep_ns()
        if any(sleeps_ns):
            ns_per_cycle = sleep_ns_per_cycle()
            self._sleep_cycles = [round(sleep_ns / ns_per_cycle) for sleep_ns in sleeps_ns]

    def _to_sleep_ns(self) -> list[int]:
        """Returns the sleep before each section, from the last step whose times are known; 0 if no call came late."""
        if self._known is None:
            return []
        (step, waits), sleeps_ns = self._known, []
        ends = [section.first for section in step.sections[1:]] + [len(step.marks)]
        for section, end in zip(step.sections, ends, strict=True):
            late = [
                mark.host_ns
                for mark, wait in zip(step.marks[section.first : end], waits[section.first : end], strict=True)
                if wait and mark.phase in _LAUNCHED
            ]
            host_ns = 0
            if late:
                host_ns = late[-1] - section.host_ns + self._delay_ns
            sleeps_ns.append(min(_HOLD_FACTOR * host_ns, _LONGEST_HOLD_NS))
        return sleeps_ns

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
        if spare:
            host = spare.pop()
        else:
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
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
            # Events of start and end are shared with the neighbouring steps.
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
            self._end_ns = max(begins_ns, self._end_ns)
        start_ns = self._end_ns
        phases, launch, waits = [0] * len(PHASES), [0] * len(PHASES), list[int]()
        last, last_ns = step.start, start_ns
        for phase, event, host_ns in step.marks:
            took_ns = _nanoseconds(last, event)
            phases[phase] += took_ns
            if not self._synchronise:
                waits.append(min(max(0, host_ns + self._delay_ns - last_ns), took_ns))
                launch[phase] += waits[-1]
            last, last_ns = event, last_ns + took_ns
        step_ns = _nanoseconds(step.start, step.end)
        self._end_ns = start_ns + step_ns
        self._known = step, waits
        return StepTimes(start_ns, step_ns, tuple(phases), step.samples, step.loss.item(), _launches(launch))

    def _compare(self, anchor: Anchor) -> None:
        """Notes how far the host's and the device's clock may have drifted apart since the anchor before."""
        error, before = anchor.error_ns, self._last_anchor
        if before is not None:
            drift_ns = anchor.host_ns - before.host_ns - _nanoseconds(before.event, anchor.event)
            error += before.error_ns + abs(drift_ns)
        self._last_anchor = anchor
        self.clock_error_ns = max(self.clock_error_ns, error)

    def _record(self) -> torch.cuda.Event:
        if self._synchronise:
            # This stream only: the whole device would include the exchange that still runs on its own.
            torch.cuda.current_stream().synchronize()
        if self._spare:
            event = self._spare.pop()
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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
    milliseconds: float = start.elapsed_time(end)  # resolves about half a microsecond
    return round(milliseconds * 1e6)


PhaseTimer = CpuTimer | CudaTimer


def timer_for(device: torch.device, *, synchronise: bool) -> PhaseTimer:
    """Returns a timer for a device."""
    return CudaTimer(synchronise=synchronise) if device.type == "cuda" else CpuTimer()
