"""Moments of an exchange: the monotonic clock on a CPU, events of streams on a GPU (the latter not measured here).

On a GPU the host only orders work. So a message waits for its gradients, and the step for its messages, by events
between streams, and moments are events too, read when the run is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_ANCHOR_TRIES = 5
_RATE_FROM_S = 0.1
"""Between anchors closer than this, their own errors are larger than what the clocks drift apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """An event of the stream in force, and when it passed."""

    event: torch.cuda.Event
    host_ns: int
    """CLOCK_MONOTONIC."""
    delay_ns: int
    """From the call to the host's knowing that the event has passed, on a device that had nothing else to do."""

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


class Clock(Protocol):
    """Moments, and the order between computing and exchanging."""

    def enter_thread(self) -> None:
        """Called once on the communication thread."""

    marks_are_free: bool
    """Whether a moment costs next to nothing, so that one may be taken for every gradient of every step."""

    def mark(self) -> Any:
        """This moment, on the stream in force."""

    def give_back(self, moments: Iterable[Any]) -> None:
        """These long past moments will never be read again."""

    def exchanging(self, ready: Any) -> AbstractContextManager[object]:
        """Within it, work is ordered on the stream of exchanges, after the moment `ready`."""

    def join(self) -> None:
        """What is ordered from now on comes after all exchanges."""

    def settle(self) -> None:
        """Returns when all that was ordered is done, so that moments can be read."""

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one moment to another."""

    @property
    def error_s(self) -> float:
        """By how much `monotonic_ns` may be off, seconds."""

    def anchor(self) -> None:
        """Notes how moments stand to CLOCK_MONOTONIC; waits for the device, so not within a step.

        Called before and after some moments, it tells the rate of the device's clock, too.
        """

    def monotonic_ns(self, moment: Any) -> int:
        """A moment as nanoseconds of CLOCK_MONOTONIC; after `anchor` and, behind the moment, `settle`."""


class HostClock:
    """CPU: a call returns when its work is done."""

    marks_are_free = True

    def enter_thread(self) -> None:
        pass

    def mark(self) -> int:
        return time.monotonic_ns()

    def give_back(self, moments: Iterable[int]) -> None:
        pass

    def exchanging(self, ready: int) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def between(self, first: int, last: int) -> float:
        return (last - first) / 1e9

    @property
    def error_s(self) -> float:
        return 0.0

    def anchor(self) -> None:
        pass

    def monotonic_ns(self, moment: int) -> int:
        return moment


class CudaClock:
    """GPU: a stream of its own for exchanges. Events that were given back are recorded again."""

    marks_are_free = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._anchors: list[Anchor] = []
        self._spare: list[torch.cuda.Event] = []

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
    return CudaClock(device) if device.type == "cuda" else HostClock()
