"""What every far tier does: take the bytes of a storage away, and bring them back.

Transfers out run one after the other in the order in which they were asked for, and so do transfers in; both alongside
the computation, on a thread (file) or a stream (GPU) of their own.

That of a rank that trains on a GPU is page-locked memory of the host. Nothing waits on the host, which is far ahead of
what it orders: streams wait for events, and what a stream has come to is never asked. So *away* is there a matter of
order, not of time: bytes are away once the stream that computes waits for the copy out, from where on their memory is
free for what is ordered next. Memory for what comes back is made on that stream as well, and the copy waits for it.
Page-locked memory is taken from one pool: to lock a page costs far more than to copy it. Not measured on a GPU; tested
with a stand-in whose copies run as late as streams allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from dlbench.node.page_locked import locked_memory, page_lock, page_unlock, pieces

ALIGNMENT = 4096  # places begin and end at multiples of this, as direct I/O wants it
_LOOSE = 1.25  # A free place is given to somewhat smaller bytes rather than a new one


@dataclass(slots=True)
class TierTransfer:
    """One transfer as it ran, in CLOCK_MONOTONIC."""

    is_out: bool
    block: int
    num_bytes: int
    start_ns: int
    end_ns: int


class Tier(Protocol):
    """A far tier of one rank; a ticket stands for the bytes of one storage from `swap_out` to `discard`.

    After a transfer failed, every call raises the same `RunError`. `takes_back`: whether what is recalled is not moved;
    otherwise the copy that was ordered runs all the same.
    """

    takes_back: bool

    @property
    def words(self) -> str:
        """Where swapped tensors are, for records, e.g. `file in /local, direct I/O`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of it, each as one sentence."""

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> Any:
        """Starts to take a storage away, when all work ordered so far is done; its ticket holds it until then."""

    def is_out(self, ticket: Any) -> bool:
        """Whether the bytes are away and the memory is free (on a GPU: for what is ordered next); never waits."""

    def wait_out(self, ticket: Any) -> None:
        """What is ordered from now on has the memory: waits for the transfer (a GPU's stream waits, not the host)."""

    def recall(self, ticket: Any) -> torch.UntypedStorage | None:
        """The storage, if it is not out: it stays. None: it is out. Its memory may be used until `discard`."""

    def swap_in(self, ticket: Any, block: int) -> None:
        """Starts to bring the bytes back, after they are away; the computing stream waits for neither."""

    def take(self, ticket: Any) -> torch.UntypedStorage:
        """The storage that came back; waits for it as `wait_out` does. After `swap_in`."""

    def is_in(self, ticket: Any) -> bool:
        """Whether `take` would not wait."""

    def discard(self, ticket: Any) -> None:
        """The ticket is done with, its memory and its place in the tier are free again; at any time, once."""

    def watch(self, watching: bool) -> None:
        """Begins or ends noting each transfer's time."""

    def take_transfers(self) -> list[TierTransfer]:
        """Those noted since, oldest first; waits for none that runs (GPU: waits for the device)."""

    def close(self) -> None:
        """Ends threads and gives everything back; twice does no harm."""


def aligned(num_bytes: int) -> int:
    """The multiple of `ALIGNMENT` that holds `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class FreePlaces:
    """Offsets of places, each aligned."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self.end = 0  # bytes that were ever in use: what the file or pool must hold

    def find(self, num_bytes: int) -> tuple[int, int]:
        """Offset and size of a place; one that is free if there is one of about that size, else a new one behind."""
        size = aligned(num_bytes)
        found = self.find_free(num_bytes)
        if found is not None:
            return found
        offset, self.end = self.end, self.end + size
        return offset, size

    def find_free(self, num_bytes: int) -> tuple[int, int] | None:
        """The same, but None rather than a new place."""
        size = aligned(num_bytes)
        fits = size if self._free.get(size) else 0
        if not fits:
            fits = min((have for have, free in self._free.items() if free and size <= have <= _LOOSE * size), default=0)
        return (self._free[fits].pop(), fits) if fits else None

    def give_back(self, offset: int, size: int) -> None:
        self._free.setdefault(size, []).append(offset)


class Calls:
    """What of torch's CUDA interface is needed; tests stand in for it."""

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def new_event(self, timing: bool) -> Any:
        return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def current_stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, work is ordered on this stream."""
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
    """Bytes of one storage in the pool; changed by the tier alone."""

    storage: torch.UntypedStorage | None  # Until its bytes are away.
    stream: Any  # Which computes, and whose memory the storage is.
    pool: int
    offset: int
    place: int
    num_bytes: int
    left: Any = None  # Event at the end of the copy out.
    came: Any = None  # Event at the end of the copy in.
    coming: torch.Tensor | None = None


class PinnedTier:
    """Page-locked host memory; a `Tier` that grows. `beat`: called while memory is locked."""

    takes_back = False

    def __init__(
        self,
        device: torch.device,
        reserve_bytes: int,
        rank: int = 0,
        calls: Calls | None = None,
        beat: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._device = device
        self._rank = rank
        self._calls = calls or Calls()
        self._beat = beat
        self._out, self._in = self._calls.new_stream(device), self._calls.new_stream(device)
        self._edge = self._calls.new_event(False)  # Recorded and waited for at once, so that one serves for all.
        self._spare: list[Any] = []  # Events that nothing will wait for any more.
        self._pools: list[tuple[torch.Tensor, FreePlaces]] = []
        self._read: dict[tuple[int, int], Any] = {}
        """Event after which a place may be written to again, by pool and offset."""
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
        free = self._read.pop((ticket.pool, ticket.offset), None)
        if free is not None:
            self._out.wait_event(free)
            self._spare.append(free)
        leaving = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        ticket.left = self._copy(self._out, ticket, leaving, block, is_out=True)
        return ticket

    def is_out(self, ticket: PinnedTicket) -> bool:
        return ticket.storage is None

    def wait_out(self, ticket: PinnedTicket) -> None:
        if ticket.storage is not None:
            # What is computed from now on, in the memory that is freed here, comes after the copy.
            ticket.stream.wait_event(ticket.left)
            ticket.storage = None

    def recall(self, ticket: PinnedTicket) -> torch.UntypedStorage | None:
        return ticket.storage

    def swap_in(self, ticket: PinnedTicket, block: int) -> None:
        coming = self._calls.on_device(ticket.num_bytes, self._device)
        # What used this memory before was ordered on the stream that computes.
        self._follow(self._in, self._calls.current_stream(self._device))
        self._in.wait_event(ticket.left)
        ticket.came = self._copy(self._in, ticket, coming, block, is_out=False)
        ticket.coming = coming

    def take(self, ticket: PinnedTicket) -> torch.UntypedStorage:
        assert ticket.coming is not None
        self._calls.current_stream(self._device).wait_event(ticket.came)
        coming, ticket.coming = ticket.coming, None
        return coming.untyped_storage()

    def is_in(self, ticket: PinnedTicket) -> bool:
        # `take` never waits on the host; the wait of the stream is timed by events.
        return ticket.came is not None and bool(ticket.came.query())

    def discard(self, ticket: PinnedTicket) -> None:
        if not self._pools:
            return
        # Whatever memory of the device is left of it goes back to the stream that computes, behind the copies.
        self.wait_out(ticket)
        if ticket.coming is not None:
            ticket.stream.wait_event(ticket.came)
            ticket.coming = None
        last = ticket.left
        if ticket.came is not None:
            self._spare.append(ticket.left)
            last = ticket.came
        self._read[ticket.pool, ticket.offset] = last
        self._pools[ticket.pool][1].give_back(ticket.offset, ticket.place)

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
        taken, self._timed = self._timed, []
        transfers = []
        for (event, event_ns), is_out, block, num_bytes, *ends in taken:
            start_ns, end_ns = (event_ns + round(event.elapsed_time(end) * 1e6) for end in ends)
            transfers.append(TierTransfer(is_out, block, num_bytes, start_ns, end_ns))
        return sorted(transfers, key=lambda one: one.start_ns)

    def close(self) -> None:
        if self._pools:
            self._calls.synchronize(self._device)
        self._pools.clear()
        self._read.clear()

    def _place(self, num_bytes: int) -> tuple[int, int, int]:
        for number, (_, slots) in enumerate(self._pools):
            found = slots.find_free(num_bytes)
            if found is not None:
                return number, *found
        memory, slots = self._pools[-1]
        if slots.end + aligned(num_bytes) > memory.numel():
            self._grow(max(aligned(num_bytes), memory.numel() // 4))
            slots = self._pools[-1][1]
        return len(self._pools) - 1, *slots.find(num_bytes)

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
        """What is ordered next on a stream comes after what is ordered on another."""
        self._edge.record(other)
        stream.wait_event(self._edge)

    def _copy(self, stream: Any, ticket: PinnedTicket, device: torch.Tensor, block: int, *, is_out: bool) -> Any:
        """Orders a copy between the device and the ticket's place; the event at its end."""
        memory, begin = self._pools[ticket.pool][0], ticket.offset
        start = self._timing(stream)
        with self._calls.on(stream):
            for first, last in pieces(begin, ticket.num_bytes):
                host, there = memory[first:last], device[first - begin : last - begin]
                self._calls.copy(*((host, there) if is_out else (there, host)))
        if start is not None:
            self._timed.append((self._anchor, is_out, block, ticket.num_bytes, start, self._timing(stream)))
        end = self._spare.pop() if self._spare else self._calls.new_event(False)
        end.record(stream)
        return end

    def _timing(self, stream: Any) -> Any:
        """Where a stream is now, to be read later; None where nobody watches."""
        if self._anchor is None:
            return None
        event = self._calls.new_event(True)
        event.record(stream)
        return event
