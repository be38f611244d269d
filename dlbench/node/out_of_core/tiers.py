"""Far tiers take the bytes of a storage out of the device's memory, and bring them back; records of a pass's work."""
# Transfers out run in the order of their requests, and so do transfers in, alongside the computation.

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, cast

import torch

from dlbench.node.page_locked import locked_memory, page_lock, page_unlock, pieces
from dlbench.node.sync.timing import Clock

ALIGNMENT = 4096  # Places begin and end at multiples of this, which direct I/O requires.
_MAX_SIZE_RATIO = 1.25  # Largest ratio of a free place to the bytes that are put there; beyond it a new place is made.
COMPUTE, OUT, IN = "compute", "out", "in"  # Lanes of operations.
FORWARD, RECOMPUTE, BACKWARD, WAIT = "forward", "recompute", "backward", "wait"  # Operations in the lane compute.
SWAP_OUT, SWAP_IN = "swap out", "swap in"  # Operations in the lanes out and in.
_MOST_MOMENTS = 10_000  # Durations kept as moments before they are added up, for which the host waits for a GPU.


@dataclass(slots=True)
class TierTransfer:
    """One completed transfer, in nanoseconds of CLOCK_MONOTONIC."""

    is_out: bool
    block: int
    num_bytes: int
    start_ns: int
    end_ns: int


class Tier(Protocol):
    """A rank's far tier, with the same `RunError` after a failure; tickets last from `swap_out` to `discard`."""

    takes_back: bool  # Whether a recalled storage is not copied; otherwise the queued copy still runs.

    @property
    def words(self) -> str:
        """Name of the tier for records, e.g. `file in /local, direct I/O`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the tier, each one sentence."""

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> Any:
        """Starts to move a storage out after all work queued so far; its ticket keeps the storage until then."""

    def is_out(self, ticket: Any) -> bool:
        """Returns whether the bytes are out and the memory is free (GPU: for work queued later); never waits."""

    def wait_out(self, ticket: Any) -> None:
        """Waits until the memory is free for work that is queued later (on a GPU its stream waits, not the host)."""

    def recall(self, ticket: Any) -> torch.UntypedStorage | None:
        """Returns the storage if it is not out, so that it stays in memory until `discard`; None if it is out."""

    def swap_in(self, ticket: Any, block: int) -> None:
        """Starts to bring the bytes back once they are out; the computing stream does not wait."""

    def take(self, ticket: Any) -> torch.UntypedStorage:
        """Returns the storage that came back, after `swap_in`; waits for it as `wait_out` does."""

    def is_in(self, ticket: Any) -> bool:
        """Returns whether `take` would not wait."""

    def discard(self, ticket: Any) -> None:
        """Ends a ticket, at any time, once: frees its memory and its place in the tier."""

    def watch(self, watching: bool) -> None:
        """Begins or ends timing each transfer."""

    def take_transfers(self) -> list[TierTransfer]:
        """Returns new timed transfers, oldest first, without those that still run (GPU: waits for the device)."""

    def close(self) -> None:
        """Ends threads and frees everything; may be called twice."""


def aligned(num_bytes: int) -> int:
    """Rounds bytes up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class FreePlaces:
    """Allocates aligned places in a file or pool, as offset and size."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}  # Offsets by size.
        self.end = 0  # End of the last place ever used: size that the file or pool must have.

    def find(self, num_bytes: int) -> tuple[int, int]:
        """Returns a free place of about `num_bytes`, or a new one at the end."""
        place = self.find_free(num_bytes)
        if place is None:
            place = self.end, aligned(num_bytes)
            self.end += aligned(num_bytes)
        return place

    def find_free(self, num_bytes: int) -> tuple[int, int] | None:
        """Returns a free place of about `num_bytes`, the smallest that fits; None if there is none."""
        least = aligned(num_bytes)
        sizes = [size for size, offsets in self._free.items() if offsets and least <= size <= _MAX_SIZE_RATIO * least]
        if not sizes:
            return None
        size = min(sizes)
        return self._free[size].pop(), size

    def give_back(self, offset: int, size: int) -> None:
        self._free.setdefault(size, []).append(offset)


class Calls:
    """The calls of torch's CUDA interface that a tier needs; tests replace it."""

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def new_event(self, timing: bool) -> Any:
        return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", torch.cuda.stream(stream))

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def page_lock(self, address: int, num_bytes: int) -> int:
        return page_lock(address, num_bytes)

    def page_unlock(self, address: int) -> None:
        page_unlock(address)

    def on_device(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)


@dataclass(slots=True, eq=False)
class PinnedTicket:
    """Bytes of one storage in the pool; changed only by the tier."""

    storage: torch.UntypedStorage | None  # None once its bytes are out.
    stream: Any  # The computing stream, which owns the storage's memory.
    pool: int
    offset: int
    place_bytes: int
    num_bytes: int
    out_event: Any = None  # Event at the end of the copy out.
    in_event: Any = None  # Event at the end of the copy in.
    incoming: torch.Tensor | None = None  # Memory of the device that the bytes are copied to.


class PinnedTier:
    """A `Tier` in page-locked host memory that grows; `beat` is called while it locks. Not measured on a GPU."""

    # The host never waits: streams wait for events. Bytes are out once the computing stream waits for their copy,
    # because their memory is then free for work that is queued later.

    takes_back = False

    def __init__(
        self,
        device: torch.device,
        reserve_bytes: int,
        rank: int = 0,
        calls: Calls | None = None,
        beat: Callable[[str], None] = lambda _progress: None,
    ) -> None:
        self._device = device
        self._rank = rank
        self._calls = calls or Calls()
        self._beat = beat
        self._out, self._in = self._calls.new_stream(device), self._calls.new_stream(device)
        self._edge = self._calls.new_event(False)  # Recorded and waited for at once, so one event is enough.
        self._spare_events: list[Any] = []  # Events that nothing will wait for any more.
        self._pools: list[tuple[torch.Tensor, FreePlaces]] = []
        self._last_read: dict[tuple[int, int], Any] = {}
        """Event after which a place may be overwritten, by pool and offset."""
        self._timed: list[tuple[Any, bool, int, int, Any, Any]] = []
        self._anchor: tuple[Any, int] | None = None
        self._grow(reserve_bytes)

    @property
    def words(self) -> str:
        return "page-locked host memory"

    @property
    def warnings(self) -> tuple[str, ...]:
        if len(self._pools) < 2:
            return ()
        return (f"the pool of page-locked memory grew {len(self._pools) - 1} times: more was swapped than planned",)

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> PinnedTicket:
        stream = self._calls.current_stream(self._device)
        ticket = PinnedTicket(storage, stream, *self._place(storage.nbytes()), storage.nbytes())
        self._follow(self._out, stream)
        last_read = self._last_read.pop((ticket.pool, ticket.offset), None)
        if last_read is not None:
            self._out.wait_event(last_read)
            self._spare_events.append(last_read)
        outgoing = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        ticket.out_event = self._copy(self._out, ticket, outgoing, block, is_out=True)
        return ticket

    def is_out(self, ticket: PinnedTicket) -> bool:
        return ticket.storage is None

    def wait_out(self, ticket: PinnedTicket) -> None:
        if ticket.storage is not None:
            # Work that is queued later, in the memory that is freed here, runs after the copy.
            ticket.stream.wait_event(ticket.out_event)
            ticket.storage = None

    def recall(self, ticket: PinnedTicket) -> torch.UntypedStorage | None:
        return ticket.storage

    def swap_in(self, ticket: PinnedTicket, block: int) -> None:
        incoming = self._calls.on_device(ticket.num_bytes, self._device)
        # Former uses of this memory were queued on the computing stream.
        self._follow(self._in, self._calls.current_stream(self._device))
        self._in.wait_event(ticket.out_event)
        ticket.in_event = self._copy(self._in, ticket, incoming, block, is_out=False)
        ticket.incoming = incoming

    def take(self, ticket: PinnedTicket) -> torch.UntypedStorage:
        assert ticket.incoming is not None
        self._calls.current_stream(self._device).wait_event(ticket.in_event)
        incoming, ticket.incoming = ticket.incoming, None
        return incoming.untyped_storage()

    def is_in(self, ticket: PinnedTicket) -> bool:
        # `take` never waits on the host; the wait of the stream is timed by events.
        return ticket.in_event is not None and bool(ticket.in_event.query())

    def discard(self, ticket: PinnedTicket) -> None:
        if not self._pools:
            return
        # Its memory on the device is freed on the computing stream, after the copies.
        self.wait_out(ticket)
        if ticket.incoming is not None:
            ticket.stream.wait_event(ticket.in_event)
            ticket.incoming = None
        last_event = ticket.out_event
        if ticket.in_event is not None:
            self._spare_events.append(ticket.out_event)
            last_event = ticket.in_event
        self._last_read[ticket.pool, ticket.offset] = last_event
        _, places = self._pools[ticket.pool]
        places.give_back(ticket.offset, ticket.place_bytes)

    def watch(self, watching: bool) -> None:
        self._anchor = None
        if watching:
            self._calls.synchronize(self._device)
            event = self._calls.new_event(True)
            event.record(self._calls.current_stream(self._device))
            event.synchronize()
            self._anchor = (event, time.monotonic_ns())
        elif self._timed:
            self._calls.synchronize(self._device)

    def take_transfers(self) -> list[TierTransfer]:
        if self._timed:
            self._calls.synchronize(self._device)
        timed, self._timed = self._timed, []
        transfers = []
        for (anchor, anchor_ns), is_out, block, num_bytes, *events in timed:
            start_ns, end_ns = (anchor_ns + round(anchor.elapsed_time(event) * 1e6) for event in events)
            transfers.append(TierTransfer(is_out, block, num_bytes, start_ns, end_ns))
        return sorted(transfers, key=attrgetter("start_ns"))

    def close(self) -> None:
        if self._pools:
            self._calls.synchronize(self._device)
        self._pools.clear()
        self._last_read.clear()

    def _place(self, num_bytes: int) -> tuple[int, int, int]:
        for number, (_, places) in enumerate(self._pools):
            place = places.find_free(num_bytes)
            if place is not None:
                return number, *place
        memory, places = self._pools[-1]
        if places.end + aligned(num_bytes) > memory.numel():
            self._grow(max(aligned(num_bytes), memory.numel() // 4))
            _, places = self._pools[-1]
        return len(self._pools) - 1, *places.find(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        memory = locked_memory(
            aligned(max(1, num_bytes)),
            f"rank {self._rank}: swapping",
            beat=self._beat,
            lock=self._calls.page_lock,
            unlock=self._calls.page_unlock,
        )
        self._pools.append((memory, FreePlaces()))

    def _follow(self, stream: Any, other: Any) -> None:
        self._edge.record(other)
        stream.wait_event(self._edge)

    def _copy(self, stream: Any, ticket: PinnedTicket, device: torch.Tensor, block: int, *, is_out: bool) -> Any:
        """Queues a copy between `device` and the ticket's place in host memory; returns the event at its end."""
        memory, _ = self._pools[ticket.pool]
        begin = ticket.offset
        start = self._timing(stream)
        with self._calls.on(stream):
            for first, last in pieces(begin, ticket.num_bytes):
                host_piece, device_piece = memory[first:last], device[first - begin : last - begin]
                if is_out:
                    self._calls.copy(host_piece, device_piece)
                else:
                    self._calls.copy(device_piece, host_piece)
        if start is not None:
            self._timed.append((self._anchor, is_out, block, ticket.num_bytes, start, self._timing(stream)))
        end = self._spare_events.pop() if self._spare_events else self._calls.new_event(False)
        end.record(stream)
        return end

    def _timing(self, stream: Any) -> Any:
        """Returns an event that will time this point of a stream; None if transfers are not watched."""
        if self._anchor is None:
            return None
        event = self._calls.new_event(True)
        event.record(stream)
        return event


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
