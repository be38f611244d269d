"""How one sample of back-to-back operations is timed: by the host's clock, or in the stream of a GPU.

On a GPU the host only orders work. Timed by its clock, a short collective is mostly the host's: the way out of a
barrier over TCP, launches, and two waits for the device. In the stream, ranks meet by a tiny all-reduce of their own,
and events before and after the operations tell what passed between them, as a training step would see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from dlbench.node.collectives.contestants import Contestant

Timing = Literal["host clock", "in-stream"]


class SampleClock(Protocol):
    """Times operations on one rank."""

    timing: Timing
    shares_starts: bool
    """Whether starts are readings of the host's clock at which operations really began."""

    def time(self, contestant: Contestant, runs: int, each: int) -> tuple[int, int]:
        """`runs` times `each` operations back to back: when the first began, and how long all took, nanoseconds.

        Raises:
            RunError: an operation failed.
        """


class HostSampleClock:
    """The host's clock, from a device that is idle to one that is idle again."""

    timing: Timing = "host clock"
    shares_starts = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, contestant: Contestant, runs: int, each: int) -> tuple[int, int]:
        first, duration = 0, 0
        for _ in range(runs):
            contestant.line_up()
            begin = time.perf_counter_ns()
            contestant.run(each)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            duration += time.perf_counter_ns() - begin
            first = first or begin
        return first, duration


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StreamSampleClock:
    """Events of the stream in which the operations are ordered."""

    timing: Timing = "in-stream"
    shares_starts = False

    def __init__(self, meet: Callable[[], None], new_event: Callable[[], Any] = _timing_event) -> None:
        """`meet` orders a barrier of all ranks in the stream; nobody waits for it on the host."""
        self._meet = meet
        self._begin, self._end = new_event(), new_event()

    def time(self, contestant: Contestant, runs: int, each: int) -> tuple[int, int]:
        first, milliseconds = 0, 0.0
        for _ in range(runs):
            contestant.line_up()
            self._meet()
            first = first or time.perf_counter_ns()
            self._begin.record()
            contestant.run(each)
            self._end.record()
            self._end.synchronize()
            milliseconds += self._begin.elapsed_time(self._end)
        return first, round(milliseconds * 1e6)
