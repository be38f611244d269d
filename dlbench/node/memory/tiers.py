"""What every far tier does: take the bytes of a storage away, and bring them back.

Transfers out run one after the other in the order in which they were asked for, and so do transfers in; both alongside
the computation, on a thread (file) or a stream (GPU) of their own.

That of a rank that trains on a GPU is page-locked memory of the host. Nothing waits on the host: streams wait for
events. Memory of the device that leaves was made on the stream that computes, and goes back to it when that stream is
past the end of the copy; memory for what comes back is made there as well, and the copy waits for it. Page-locked
memory is taken from one pool: to lock a page costs far more than to copy it. Not measured on a GPU; its order of waits
is tested with streams and events that only note calls.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.units import format_bytes


@dataclass(slots=True)
class Transfer:
    """One transfer as it ran, in CLOCK_MONOTONIC."""

    is_out: bool
    block: int
    num_bytes: int
    start_ns: int
    end_ns: int


class Tier(Protocol):
    """A far tier of one rank.

    A ticket stands for the bytes of one storage from `swap_out` to `discard`; what it is, only the tier knows. After a
    transfer failed, every call raises the same `RunError`; nothing waits for a transfer that cannot end.
    """

    @property
    def words(self) -> str:
        """Where swapped tensors are, for records, e.g. `file in /local, direct I/O`."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of it, each as one sentence."""

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> Any:
        """Starts to take a storage's bytes away, when all work ordered so far is done; returns its ticket.

        The ticket holds the storage until its bytes are away.
        """

    def is_out(self, ticket: Any) -> bool:
        """Whether the bytes are away and the memory is free; never waits."""

    def wait_out(self, ticket: Any) -> None:
        """What is ordered from now on has the memory: waits for the transfer (a GPU's stream waits, not the host)."""

    def recall(self, ticket: Any) -> torch.UntypedStorage | None:
        """The storage, if its bytes have not left yet: they stay, and the ticket is done with. None: they are away."""

    def swap_in(self, ticket: Any, block: int) -> None:
        """Starts to bring the bytes back, after they are away."""

    def take(self, ticket: Any) -> torch.UntypedStorage:
        """The storage that came back; waits for it as `wait_out` does. After `swap_in`."""

    def is_in(self, ticket: Any) -> bool:
        """Whether `take` would not wait."""

    def discard(self, ticket: Any) -> None:
        """The ticket's place in the tier is free again; at any time, once."""

    def watch(self, watching: bool) -> None:
        """Begins or ends noting each transfer's time."""

    def take_transfers(self) -> list[Transfer]:
        """Those noted since, oldest first; waits for none that runs (GPU: waits for the device)."""

    def close(self) -> None:
        """Ends threads and gives everything back; twice does no harm."""


ALIGNMENT = 4096  # places begin and end at multiples of this, as direct I/O wants it
_LOOSE = 1.25  # A free place is given to somewhat smaller bytes rather than a new one


def aligned(num_bytes: int) -> int:
    """The multiple of `ALIGNMENT` that holds `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Slots:
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

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class PinnedTicket:
    """Bytes of one storage in the pool; changed by the tier alone."""

    __slots__ = ("came", "coming", "left", "num_bytes", "offset", "place", "pool", "storage")

    def __init__(self, storage: torch.UntypedStorage, pool: int, offset: int, place: int) -> None:
        self.storage: torch.UntypedStorage | None = storage  # until its bytes are away
        self.num_bytes = storage.nbytes()
        self.pool, self.offset, self.place = pool, offset, place
        self.left: Any = None  # Event at the end of the copy out
        self.came: Any = None  # Event at the end of the copy in
        self.coming: torch.Tensor | None = None


class PinnedTier:
    """Page-locked host memory; a `Tier`.

    `reserve_bytes`: what will be in it at a time; it grows where that is too little. `calls`: torch's CUDA interface.
    Raises EnvironmentLacksError: so much memory cannot be page-locked.
    """

    def __init__(self, device: torch.device, reserve_bytes: int, rank: int = 0, calls: Calls | None = None) -> None:
        self._device = device
        self._rank = rank
        self._calls = calls or Calls()
        self._out, self._in = self._calls.new_stream(device), self._calls.new_stream(device)
        self._pools: list[tuple[torch.Tensor, Slots]] = []
        self._read: dict[tuple[int, int], Any] = {}
        """Event after which a place may be written to again, by pool and offset."""
        self._being_read: list[tuple[Any, torch.UntypedStorage]] = []
        """What is no longer to leave while a copy out runs, with the event at its end."""
        self._timed: list[tuple[bool, int, int, Any, Any]] = []
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
        pool, offset, place = self._place(storage.nbytes())
        ticket = PinnedTicket(storage, pool, offset, place)
        self._being_read = [one for one in self._being_read if not one[0].query()]
        made = self._mark(self._calls.current_stream(self._device))
        self._out.wait_event(made)
        free = self._read.pop((pool, offset), None)
        if free is not None:
            self._out.wait_event(free)
        with self._calls.on(self._out):
            start = self._start(self._out)
            self._pinned(ticket).copy_(_as_bytes(storage), non_blocking=True)
            ticket.left = self._finish(self._out, start, ticket, block, is_out=True)
        return ticket

    def is_out(self, ticket: PinnedTicket) -> bool:
        if ticket.storage is not None and ticket.left.query():
            ticket.storage = None
        return ticket.storage is None

    def wait_out(self, ticket: PinnedTicket) -> None:
        if ticket.storage is not None:
            # What is computed from now on, in the memory that is freed here, comes after the copy.
            self._calls.current_stream(self._device).wait_event(ticket.left)
            ticket.storage = None

    def recall(self, ticket: PinnedTicket) -> torch.UntypedStorage | None:
        if self.is_out(ticket):
            return None
        storage = ticket.storage
        self.discard(ticket)
        return storage

    def swap_in(self, ticket: PinnedTicket, block: int) -> None:
        self.wait_out(ticket)
        coming = self._calls.on_device(ticket.num_bytes, self._device)
        # What used this memory before was ordered on the stream that computes.
        self._in.wait_event(self._mark(self._calls.current_stream(self._device)))
        self._in.wait_event(ticket.left)
        with self._calls.on(self._in):
            start = self._start(self._in)
            coming.copy_(self._pinned(ticket), non_blocking=True)
            ticket.came = self._finish(self._in, start, ticket, block, is_out=False)
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
        stream = self._calls.current_stream(self._device)
        if ticket.coming is not None:  # nobody took it: its memory goes back to the stream that computes
            stream.wait_event(ticket.came)
            ticket.coming = None
        if ticket.storage is not None:  # the copy still reads it, so its memory must not be given to another
            self._being_read.append((ticket.left, ticket.storage))
            ticket.storage = None
        last = ticket.came or ticket.left
        self._read[ticket.pool, ticket.offset] = last
        self._pools[ticket.pool][1].give_back(ticket.offset, ticket.place)

    def watch(self, watching: bool) -> None:
        self._anchor = None
        if watching:
            self._calls.synchronize(self._device)
            event = self._mark(self._calls.current_stream(self._device), timing=True)
            event.synchronize()
            self._anchor = (event, time.monotonic_ns())
        elif self._timed:
            self._calls.synchronize(self._device)

    def take_transfers(self) -> list[Transfer]:
        if self._timed:
            self._calls.synchronize(self._device)
        taken, self._timed = self._timed, []
        return sorted((self._transfer(*one) for one in taken), key=lambda one: one.start_ns)

    def close(self) -> None:
        if self._pools:
            self._calls.synchronize(self._device)
        self._pools.clear()
        self._being_read.clear()
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
        try:
            self._pools.append((self._calls.pinned(aligned(max(1, num_bytes))), Slots()))
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise EnvironmentLacksError(
                f"rank {self._rank}: cannot lock {format_bytes(num_bytes)} of host memory for swapping: {why}"
            ) from error

    def _pinned(self, ticket: PinnedTicket) -> torch.Tensor:
        return self._pools[ticket.pool][0][ticket.offset : ticket.offset + ticket.num_bytes]

    def _mark(self, stream: Any, *, timing: bool = False) -> Any:
        event = self._calls.new_event(timing)
        event.record(stream)
        return event

    def _start(self, stream: Any) -> Any:
        return self._mark(stream, timing=True) if self._anchor is not None else None

    def _finish(self, stream: Any, start: Any, ticket: PinnedTicket, block: int, *, is_out: bool) -> Any:
        end = self._mark(stream, timing=start is not None)
        if start is not None:
            assert self._anchor is not None
            self._timed.append((is_out, block, ticket.num_bytes, (self._anchor, start), end))
        return end

    def _transfer(self, is_out: bool, block: int, num_bytes: int, begun: Any, end: Any) -> Transfer:
        (anchor, anchor_ns), start = begun
        first, last = (anchor_ns + round(anchor.elapsed_time(event) * 1e6) for event in (start, end))
        return Transfer(is_out, block, num_bytes, first, last)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
