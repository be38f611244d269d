"""What a device did in a pass, operation by operation: computing, and transfers alongside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dlbench.node.out_of_core.tiers import Tier
from dlbench.node.sync.timing import Clock

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


class ComputeLane:
    """Notes what is computed now, how long was waited and recomputed and, while it is watched, all of it as spans."""

    def __init__(self, clock: Clock, tier: Tier | None = None) -> None:
        self.clock = clock
        self._tier = tier
        self._number = -1  # Of the last watched pass.
        self._starts: list[Any] = []
        self._spans: list[tuple[int, str, int, Any, Any]] = []
        self._sink: list[tuple[str, int, Any, Any]] | None = None
        """Operations of the pass that runs, as kind, block, first and last moment; None: nobody watches."""
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
            self.clock.settle()
        for name, moments in self._durations.items():
            self._seconds[name] += sum(self.clock.between(first, last) for first, last in moments)
            moments.clear()
        return dict(self._seconds)

    def switch(self, kind: str | None, block: int) -> None:
        """From now on this is computed; None: nothing of the chain."""
        if self._sink is None:
            self._now = None
            return
        moment = self.clock.mark()
        if self._now is not None:
            self._sink.append((*self._now, moment))
        self._now = (kind, block, moment) if kind is not None else None

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Computing stands still meanwhile; counted under `name`."""
        before = self._now
        if before is not None:
            self.switch(WAIT, before[1])
        first = self.clock.mark()
        try:
            yield
        finally:
            self._note(name, first)
            if before is not None:
                self.switch(before[0], before[1])

    def begin_recompute(self, block: int) -> None:
        self._recompute_began = self.clock.mark()
        self.switch(RECOMPUTE, block)

    def end_recompute(self, block: int) -> None:
        self._note("recompute_s", self._recompute_began)
        self.switch(BACKWARD, block)

    def _note(self, name: str, first: Any) -> None:
        durations = self._durations[name]
        durations.append((first, self.clock.mark()))
        if len(durations) >= _MOST_MOMENTS:
            self.seconds()

    def watch(self, is_on: bool) -> None:
        """Begins or ends noting the operations of passes and, by the tier, transfers alongside them."""
        if is_on:
            self.clock.anchor()
        self._sink = [] if is_on else None
        if self._tier is not None:
            self._tier.watch(is_on)

    def begin_pass(self) -> None:
        """Notes that a pass begins; the operations of one that never ended are left out."""
        if self._sink is not None:
            self._number += 1
            self._sink.clear()
            self._starts.append(self.clock.mark())

    def end_pass(self) -> None:
        """Keeps the operations of the pass that has ended."""
        if self._sink is not None:
            self._spans += [(self._number, *operation) for operation in self._sink]
            self._sink.clear()

    def take(self) -> list[LaneSpan]:
        """Returns the operations of watched passes since the last call, by their start."""
        clock = self.clock
        if self._spans:
            clock.settle()
        starts = [clock.monotonic_ns(start) for start in self._starts]
        first = self._number - len(starts) + 1
        spans = [
            LaneSpan(number, COMPUTE, kind, block, clock.monotonic_ns(start), clock.monotonic_ns(end))
            for number, kind, block, start, end in self._spans
        ]
        for transfer in self._tier.take_transfers() if self._tier is not None else []:
            number = first + max(bisect_right(starts, transfer.start_ns) - 1, 0)
            lane, kind = (OUT, SWAP_OUT) if transfer.is_out else (IN, SWAP_IN)
            spans.append(LaneSpan(number, lane, kind, transfer.block, transfer.start_ns, transfer.end_ns))
        self._spans, self._starts = [], []
        return sorted(spans, key=lambda span: span.start_ns)
