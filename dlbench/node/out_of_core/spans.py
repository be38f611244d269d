"""Records the operations of a pass on a device: computing, and transfers alongside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from dlbench.node.out_of_core.tiers import Tier
from dlbench.node.sync.timing import Clock

COMPUTE, OUT, IN = "compute", "out", "in"  # Lanes of operations.
FORWARD, RECOMPUTE, BACKWARD, WAIT = "forward", "recompute", "backward", "wait"  # Operations in the lane compute.
SWAP_OUT, SWAP_IN = "swap out", "swap in"  # Operations in the lanes out and in.
_MOST_MOMENTS = 10_000  # Durations kept as moments before they are added up, for which the host waits for a GPU.


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One operation of a watched pass; times in CLOCK_MONOTONIC."""

    number: int  # Number of the watched pass, from 0.
    lane: str
    kind: str
    block: int
    start_ns: int
    end_ns: int


class ComputeLane:
    """Adds up the seconds of waiting and recomputing, and records all operations as spans while it is watched."""

    def __init__(self, clock: Clock, tier: Tier | None = None) -> None:
        self.clock = clock
        self._tier = tier
        self._number = -1  # Number of the last watched pass.
        self._starts: list[Any] = []  # Moments at which watched passes began.
        self._spans: list[tuple[int, str, int, Any, Any]] = []
        self._operations: list[tuple[str, int, Any, Any]] | None = None
        """Operations of the current pass, as kind, block, first and last moment; None if it is not watched."""
        self._now: tuple[str, int, Any] | None = None  # Kind, block and first moment of the current operation.
        self._recompute_began: Any = None
        self.reset()

    def reset(self) -> None:
        self._durations: dict[str, list[tuple[Any, Any]]] = {"room_wait_s": [], "swap_wait_s": [], "recompute_s": []}
        self._seconds = dict.fromkeys(self._durations, 0.0)

    def seconds(self) -> dict[str, float]:
        """Returns room_wait_s, swap_wait_s and recompute_s (without waiting); waits for the device."""
        if any(self._durations.values()):
            self.clock.settle()
        for name, moments in self._durations.items():
            self._seconds[name] += sum(self.clock.between(first, last) for first, last in moments)
            moments.clear()
        return dict(self._seconds)

    def switch(self, kind: str | None, block: int) -> None:
        """Begins an operation and ends the one before; None: nothing of the chain is computed."""
        if self._operations is None:
            self._now = None
            return
        moment = self.clock.mark()
        if self._now is not None:
            self._operations.append((*self._now, moment))
        self._now = None if kind is None else (kind, block, moment)

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        interrupted = self._now
        if interrupted is not None:
            self.switch(WAIT, interrupted[1])
        first = self.clock.mark()
        try:
            yield
        finally:
            self._add_duration(name, first)
            if interrupted is not None:
                self.switch(interrupted[0], interrupted[1])

    def begin_recompute(self, block: int) -> None:
        self._recompute_began = self.clock.mark()
        self.switch(RECOMPUTE, block)

    def end_recompute(self, block: int) -> None:
        self._add_duration("recompute_s", self._recompute_began)
        self.switch(BACKWARD, block)

    def _add_duration(self, name: str, first: Any) -> None:
        durations = self._durations[name]
        durations.append((first, self.clock.mark()))
        if len(durations) >= _MOST_MOMENTS:
            self.seconds()

    def watch(self, is_on: bool) -> None:
        """Begins or ends recording the operations of passes and, by the tier, transfers alongside them."""
        self._operations = None
        if is_on:
            self.clock.anchor()
            self._operations = []
        if self._tier is not None:
            self._tier.watch(is_on)

    def begin_pass(self) -> None:
        if self._operations is not None:
            self._number += 1
            self._operations.clear()
            self._starts.append(self.clock.mark())

    def end_pass(self) -> None:
        if self._operations is not None:
            self._spans += [(self._number, *operation) for operation in self._operations]
            self._operations.clear()

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
        transfers = self._tier.take_transfers() if self._tier is not None else []
        for transfer in transfers:
            number = first + max(bisect_right(starts, transfer.start_ns) - 1, 0)
            lane, kind = (OUT, SWAP_OUT) if transfer.is_out else (IN, SWAP_IN)
            spans.append(LaneSpan(number, lane, kind, transfer.block, transfer.start_ns, transfer.end_ns))
        self._spans, self._starts = [], []
        return sorted(spans, key=attrgetter("start_ns"))
