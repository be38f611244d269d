"""Far tier of a rank that trains on a CPU: one unnamed file, written and read alongside the computation."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from uuid import uuid4

import torch

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.cgroup import lies_in_memory
from dlbench.node.failures import BackgroundWorker
from dlbench.node.out_of_core.tiers import ALIGNMENT, FreePlaces, TierTransfer, aligned
from dlbench.units import format_bytes

CHUNK_BYTES = 4 << 20  # Bytes of one system call.
_OUT, _IN = 0, 1  # Directions of transfers.


@dataclass(slots=True, eq=False)
class DiskTicket:
    """Bytes of one storage in the file; changed only by the tier."""

    storage: torch.UntypedStorage | None  # Kept until `DiskTier.is_out` has returned True.
    num_bytes: int
    offset: int
    place_bytes: int  # Size of its place in the file.
    is_out: bool = False
    is_in: bool = False
    incoming: bool = False
    recalled: bool = False
    buffer: ctypes.Array[ctypes.c_char] | None = None  # Memory into which the bytes are read.


class DiskTier:
    """A `Tier` in a file that has its full length before training, so that a full disk is found then; it may grow."""

    takes_back = True

    def __init__(self, folder: Path, reserve_bytes: int, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._file, self._is_direct = _open(folder, reserve_bytes)
        self._is_in_memory = lies_in_memory(folder)
        self._length = 0
        self._places = FreePlaces()
        self._changed = threading.Condition()
        self._watching = False
        self._transfers: list[TierTransfer] = []
        self._lanes: list[BackgroundWorker] = []  # Threads for `_OUT` and `_IN`, from the first transfer on.
        try:
            self._lengthen(reserve_bytes)
        except OSError as error:
            os.close(self._file)
            raise _lacks(folder, reserve_bytes, error) from error

    @property
    def words(self) -> str:
        how = "direct I/O" if self._is_direct else "through the page cache, pages dropped again"
        return f"file in {self._folder} ({how})"

    @property
    def warnings(self) -> tuple[str, ...]:
        folder = f"swap folder {self._folder}"
        if self._is_in_memory:
            return (f"{folder} is in memory: swapped tensors still take memory of this node",)
        if self._is_direct:
            return ()
        return (f"{folder}: its file system has no direct I/O, so swapped tensors pass through the page cache",)

    def swap_out(self, storage: torch.UntypedStorage, block: int) -> DiskTicket:
        with self._changed:
            self._require()
            offset, place_bytes = self._places.find(storage.nbytes())
            if self._places.end > self._length:
                try:
                    self._lengthen(self._places.end)
                except OSError as error:
                    raise self._failed(error) from error
        ticket = DiskTicket(storage, storage.nbytes(), offset, place_bytes)
        self._put(_OUT, partial(self._write, ticket, block))
        return ticket

    def is_out(self, ticket: DiskTicket) -> bool:
        self._require()
        if ticket.is_out:
            # Released on this thread: torch's profiler would not see a release on the other one.
            ticket.storage = None
        return ticket.is_out

    def wait_out(self, ticket: DiskTicket) -> None:
        self._wait(lambda: self.is_out(ticket) or ticket.recalled)

    def recall(self, ticket: DiskTicket) -> torch.UntypedStorage | None:
        with self._changed:
            if self.is_out(ticket):
                return None
            ticket.recalled = True
            storage, ticket.storage = ticket.storage, None
        return storage

    def swap_in(self, ticket: DiskTicket, block: int) -> None:
        self._require()
        ticket.incoming = True
        # Allocated on this thread, which uses memory of swapped tensors again: the C library gives another thread an
        # arena of its own, and the process would grow.
        num_bytes = aligned(ticket.num_bytes)
        memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        ticket.buffer = (ctypes.c_char * num_bytes).from_address(aligned(memory.data_ptr()))
        ticket.buffer._memory = memory  # type: ignore[attr-defined]  # lives as long
        self._put(_IN, partial(self._read, ticket, block))

    def take(self, ticket: DiskTicket) -> torch.UntypedStorage:
        self._wait(lambda: ticket.is_in)
        buffer, ticket.buffer = ticket.buffer, None
        assert buffer is not None
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def is_in(self, ticket: DiskTicket) -> bool:
        self._require()
        return ticket.is_in

    def discard(self, ticket: DiskTicket) -> None:
        if ticket.is_out:
            ticket.storage = None
        if self._lanes and not self._has_failed():
            # Queued after the transfers of this ticket.
            self._put(_IN if ticket.incoming else _OUT, partial(self._forget, ticket))

    def watch(self, watching: bool) -> None:
        self._watching = watching

    def take_transfers(self) -> list[TierTransfer]:
        with self._changed:
            transfers, self._transfers = self._transfers, []
        return sorted(transfers, key=attrgetter("start_ns"))

    def close(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(self, lane: int, work: Callable[[], None]) -> None:
        if self._file < 0:
            raise RunError(f"rank {self._rank}: swap file in {self._folder} is closed")
        if not self._lanes:
            self._lanes = [BackgroundWorker(name, changed=self._changed) for name in ("swap out", "swap in")]
            # Aligned memory that direct I/O can write from.
            self._bounce = memoryview(mmap.mmap(-1, CHUNK_BYTES))

        def run() -> None:
            try:
                work()
            except OSError as error:
                raise self._failed(error) from error
            except Exception as error:
                raise RunError(f"rank {self._rank}: swap file in {self._folder}: {error!r}") from error

        self._lanes[lane].put(run)

    def _has_failed(self) -> bool:
        return any(lane.error is not None for lane in self._lanes)

    def _failed(self, error: OSError) -> RunError:
        why = error.strerror or str(error)
        return RunError(f"rank {self._rank}: swap file in {self._folder}: {why[:1].lower()}{why[1:]}")

    def _require(self) -> None:
        for lane in self._lanes:
            lane.require_well()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._has_failed())
            if not is_done():
                self._require()

    def _lengthen(self, length: int) -> None:
        if length > self._length:
            os.posix_fallocate(self._file, 0, length)
            self._length = length

    def _write(self, ticket: DiskTicket, block: int) -> None:
        start = time.monotonic_ns()
        bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(self._bounce))
        storage = ticket.storage
        if storage is None:  # recalled
            return
        source, position = storage.data_ptr(), 0
        while position < ticket.num_bytes and not ticket.recalled:
            size = min(CHUNK_BYTES, ticket.num_bytes - position)
            ctypes.memmove(bounce_address, source + position, size)
            data, offset = self._bounce[: aligned(size)], ticket.offset + position
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
            position += size
        del storage
        self._done(ticket, block, start, is_out=True)

    def _read(self, ticket: DiskTicket, block: int) -> None:
        self._wait(lambda: ticket.is_out)
        start = time.monotonic_ns()
        buffer = ticket.buffer
        if buffer is None:
            return
        memory, offset = memoryview(buffer).cast("B"), ticket.offset
        while memory:
            num_read = os.preadv(self._file, [memory[: 64 * CHUNK_BYTES]], offset)
            if num_read == 0:
                raise OSError(errno.EIO, "the file ends before the swapped bytes do")
            memory, offset = memory[num_read:], offset + num_read
        self._done(ticket, block, start, is_out=False)

    def _done(self, ticket: DiskTicket, block: int, start: int, *, is_out: bool) -> None:
        if not self._is_direct:
            # Starts to write dirty pages, and drops clean ones.
            os.posix_fadvise(self._file, ticket.offset, ticket.place_bytes, os.POSIX_FADV_DONTNEED)
        end = time.monotonic_ns()
        with self._changed:
            if ticket.recalled:
                return
            if is_out:
                ticket.is_out = True
            else:
                ticket.is_in = True
            if self._watching:
                self._transfers.append(TierTransfer(is_out, block, ticket.num_bytes, start, end))
            self._changed.notify_all()

    def _forget(self, ticket: DiskTicket) -> None:
        with self._changed:
            ticket.storage = ticket.buffer = None
            self._places.give_back(ticket.offset, ticket.place_bytes)


def _open(folder: Path, reserve_bytes: int) -> tuple[int, bool]:
    try:
        if not folder.is_dir():
            raise EnvironmentLacksError(f"train.memory.swap_folder {folder}: there is no such folder on this node")
        for flags, is_direct in ((os.O_DIRECT, True), (0, False)):
            try:
                file = _open_unnamed(folder, flags)
            except OSError as error:
                if is_direct and error.errno == errno.EINVAL:
                    continue
                raise
            if not is_direct or _takes_direct(file):
                return file, is_direct
            os.close(file)
    except OSError as error:
        raise _lacks(folder, reserve_bytes, error) from error
    raise AssertionError


def _open_unnamed(folder: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = folder / f".dlbench-swap-{uuid4().hex}"
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return file


def _takes_direct(file: int) -> bool:
    """Returns whether a write succeeds: some file systems open a file for direct I/O and refuse it later."""
    with mmap.mmap(-1, ALIGNMENT) as memory:
        try:
            os.pwrite(file, memory, 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _lacks(folder: Path, reserve_bytes: int, error: OSError) -> EnvironmentLacksError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = os.statvfs(folder)
        return EnvironmentLacksError(
            f"swapping needs {format_bytes(reserve_bytes)} in {folder}, {format_bytes(free.f_bavail * free.f_frsize)} "
            "are free: set train.memory.swap_folder to a folder on a larger disk"
        )
    why = error.strerror or str(error)
    return EnvironmentLacksError(
        f"train.memory.swap_folder {folder}: {why[:1].lower()}{why[1:]}; it must be one that this user may write to"
    )
