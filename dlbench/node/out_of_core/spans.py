"""What a device did in a pass, operation by operation: computing, and transfers alongside it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dlbench.node.out_of_core.tiers import Tier

COMPUTE, OUT, IN = "compute", "out", "in"  # lanes of an operation
FORWARD, RECOMPUTE, BACKWARD, WAIT = "forward", "recompute", "backward", "wait"  # Operations in the lane compute.
SWAP_OUT, SWAP_IN = "swap out", "swap in"  # kinds of operations in the lanes out and in
_MOST_MOMENTS = 10_000  # durations held as moments until they are read, which on a GPU waits for it


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One operation of a watched pass; times in CLOCK_MONOTONIC."""

    number: int  # of the watched pass, from 0
    lane: str
    kind: str
    block: int
    start_ns: int
    end_ns: int


class Moments(Protocol):
    """Moments of a device; `dlbench.node.sync.timing.Clock` is one."""

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


class ComputeLane:
    """What is computed now; how long was waited and recomputed; and, where it is watched, all of it as spans."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self.sink: list[tuple[str, int, Any, Any]] | None = None
        """Where operations go, as kind, block, first and last moment; None: nobody watches."""
        self._now: tuple[str, int, Any] | None = None
        self._durations: dict[str, list[tuple[Any, Any]]] = {}
        self._seconds: dict[str, float] = {}
        self._recompute_began: Any = None
        self.reset()

    def reset(self) -> None:
        self._durations = {"room_wait_s": [], "swap_wait_s": [], "recompute_s": []}
        self._seconds = dict.fromkeys(self._durations, 0.0)

    def seconds(self) -> dict[str, float]:
        """room_wait_s, swap_wait_s and recompute_s; waits for the device. Recomputing includes no wait."""
        if any(self._durations.values()):
            self.moments.settle()
        for name, moments in self._durations.items():
            self._seconds[name] += sum(self.moments.between(first, last) for first, last in moments)
            moments.clear()
        return dict(self._seconds)

    def switch(self, kind: str | None, block: int) -> None:
        """From now on this is computed; None: nothing of the chain."""
        if self.sink is None:
            self._now = None
            return
        moment = self.moments.mark()
        if self._now is not None:
            self.sink.append((*self._now, moment))
        self._now = (kind, block, moment) if kind is not None else None

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Computing stands still meanwhile; counted under `name`."""
        before = self._now
        if before is not None:
            self.switch(WAIT, before[1])
        first = self.moments.mark()
        try:
            yield
        finally:
            self._note(name, first)
            if before is not None:
                self.switch(before[0], before[1])

    def begin_recompute(self, block: int) -> None:
        self._recompute_began = self.moments.mark()
        self.switch(RECOMPUTE, block)

    def end_recompute(self, block: int) -> None:
        self._note("recompute_s", self._recompute_began)
        self.switch(BACKWARD, block)

    def _note(self, name: str, first: Any) -> None:
        durations = self._durations[name]
        durations.append((first, self.moments.mark()))
        if len(durations) >= _MOST_MOMENTS:
            self.seconds()


class Watch:
    """Spans of watched passes, from the compute lane and the tier."""

    def __init__(self, lane: ComputeLane, tier: Tier | None) -> None:
        self._lane = lane
        self._tier = tier
        self._number = -1
        self._starts: list[Any] = []
        self._spans: list[tuple[int, str, int, Any, Any]] = []

    def set(self, watching: bool) -> None:
        if watching:
            self._lane.moments.anchor()
        self._lane.sink = [] if watching else None
        if self._tier is not None:
            self._tier.watch(watching)

    def begin_pass(self) -> None:
        if self._lane.sink is not None:
            self._number += 1
            self._lane.sink.clear()
            self._starts.append(self._lane.moments.mark())

    def end_pass(self) -> None:
        """It has ended; one that never does leaves no spans."""
        sink = self._lane.sink
        if sink is not None:
            self._spans += [(self._number, *one) for one in sink]
            sink.clear()

    def take(self) -> list[LaneSpan]:
        moments = self._lane.moments
        if self._spans:
            moments.settle()
        starts = [moments.monotonic_ns(start) for start in self._starts]
        first = self._number - len(starts) + 1
        spans = [
            LaneSpan(number, COMPUTE, kind, block, moments.monotonic_ns(start), moments.monotonic_ns(end))
            for number, kind, block, start, end in self._spans
        ]
        for one in self._tier.take_transfers() if self._tier is not None else []:
            number = first + max(bisect_right(starts, one.start_ns) - 1, 0)
            lane, kind = (OUT, SWAP_OUT) if one.is_out else (IN, SWAP_IN)
            spans.append(LaneSpan(number, lane, kind, one.block, one.start_ns, one.end_ns))
        self._spans, self._starts = [], []
        return sorted(spans, key=lambda span: span.start_ns)
