"""What a device did in a pass, operation by operation: computing, and transfers beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

COMPUTE, OUT, IN = "compute", "out", "in"
"""Lanes of an operation."""
FORWARD, RECOMPUTE, BACKWARD, WAIT = "forward", "recompute", "backward", "wait"
"""Kinds of operations in the lane compute."""
SWAP_OUT, SWAP_IN = "swap out", "swap in"
"""Kinds of operations in the lanes out and in."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One operation of a watched pass; times in CLOCK_MONOTONIC."""

    number: int
    """Of the watched pass, from 0."""
    lane: str
    kind: str
    block: int
    start_ns: int
    end_ns: int


class Moments(Protocol):
    """Moments of a device; `dlbench.node.sync.clocks.Clock` is one."""

    def mark(self) -> Any:
        """This moment, on the stream in force."""

    def anchor(self) -> None:
        """Notes how moments stand to CLOCK_MONOTONIC; waits for the device."""

    def settle(self) -> None:
        """Returns when moments can be read."""

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one moment to another."""

    def monotonic_ns(self, moment: Any) -> int:
        """A moment as nanoseconds of CLOCK_MONOTONIC."""


class HostMoments:
    """Moments on a CPU: a call returns when its work is done."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def anchor(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def between(self, first: int, last: int) -> float:
        return (last - first) / 1e9

    def monotonic_ns(self, moment: int) -> int:
        return moment
