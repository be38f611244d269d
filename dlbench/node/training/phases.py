"""Marks the ends of a step's phases: with the monotonic clock on a CPU, with CUDA events on a GPU.

On a GPU an event only enters the stream's queue, so nothing waits for it; times are read steps
later, when the events have passed. The input wait measured so is the part the GPU really idled.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

from dlbench.records.rows.steps import PHASES

INPUT, H2D, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(len(PHASES))

StepTimes = tuple[int, int, tuple[int, ...], int, float]
"""start_ns, step_ns, nanoseconds of each phase, samples, loss."""


class PhaseTimer(Protocol):
    """Called around every phase of every step."""

    clock: str

    def begin(self) -> None:
        """A step begins; the one before, if any, ends."""

    def mark(self, phase: int) -> None:
        """A phase has ended; the time since the last mark is added to it, so that phases may take turns."""

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        """The step's work is done; its loss is kept without waiting for it."""

    def close(self) -> None:
        """The last step has ended."""

    def collect(self, *, wait: bool) -> list[StepTimes]:
        """Steps whose times are known by now, in order; all of them if `wait`."""


class CpuTimer:
    """The monotonic clock: work on a CPU is done when its call returns."""

    clock = "monotonic"

    def __init__(self) -> None:
        self._spent = [0] * len(PHASES)
        self._last = 0
        self._begun: int | None = None
        self._pending: tuple[int, float] | None = None
        self._done: list[StepTimes] = []

    def begin(self) -> None:
        now = time.monotonic_ns()
        self._end_step(now)
        self._begun = self._last = now
        self._spent = [0] * len(PHASES)

    def mark(self, phase: int) -> None:
        now = time.monotonic_ns()
        self._spent[phase] += now - self._last
        self._last = now

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        self._pending = (samples, loss.item())

    def close(self) -> None:
        self._end_step(time.monotonic_ns())

    def collect(self, *, wait: bool) -> list[StepTimes]:
        done, self._done = self._done, []
        return done

    def _end_step(self, now: int) -> None:
        if self._begun is None or self._pending is None:
            return
        samples, loss = self._pending
        self._done.append((self._begun, now - self._begun, tuple(self._spent), samples, loss))
        self._pending = None


_Events = tuple["torch.cuda.Event", list[tuple[int, "torch.cuda.Event"]], "torch.cuda.Event"]
"""Start of a step, each phase's end in order, end of the step."""


class CudaTimer:
    """CUDA events on the current stream; losses are copied to pinned memory in the same order."""

    clock = "cuda-events"

    def __init__(self, *, synchronise: bool = False) -> None:
        """`synchronise`: wait for the device at every mark (the plan's phase mode)."""
        self._synchronise = synchronise
        self._start: torch.cuda.Event | None = None
        self._marks: list[tuple[int, torch.cuda.Event]] = []
        self._host_start = 0
        self._pending: tuple[int, torch.Tensor] | None = None
        self._queue: deque[tuple[int, _Events, int, torch.Tensor]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def begin(self) -> None:
        event = self._record()
        self._end_step(event)
        self._start = event
        self._host_start = time.monotonic_ns()

    def mark(self, phase: int) -> None:
        self._marks.append((phase, self._record()))

    def finish(self, samples: int, loss: torch.Tensor) -> None:
        host = torch.empty((), dtype=torch.float32, pin_memory=True)
        host.copy_(loss.detach(), non_blocking=True)
        self._pending = (samples, host)

    def close(self) -> None:
        self._end_step(self._record())

    def collect(self, *, wait: bool) -> list[StepTimes]:
        done: list[StepTimes] = []
        while self._queue:
            host_start, (start, marks, end), samples, loss = self._queue[0]
            if wait:
                end.synchronize()
            elif not end.query():  # type: ignore[no-untyped-call]
                break
            self._queue.popleft()
            phases, last = [0] * len(PHASES), start
            for phase, event in marks:
                phases[phase] += _nanoseconds(last, event)
                last = event
            done.append((host_start, _nanoseconds(start, end), tuple(phases), samples, float(loss)))
            # The end is the next step's start, and this start may still be the one before's end.
            self._spare.extend(event for _, event in marks)
        return done

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
        self._queue.append((self._host_start, (self._start, self._marks, now), samples, loss))
        self._marks = []
        self._pending = None


def _nanoseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    # Events resolve about half a microsecond; elapsed_time is in milliseconds.
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)


def timer_for(device: torch.device, *, synchronise: bool) -> PhaseTimer:
    """The timer that suits a device."""
    return CudaTimer(synchronise=synchronise) if device.type == "cuda" else CpuTimer()
