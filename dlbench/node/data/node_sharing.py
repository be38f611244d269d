"""Data that processes of one node share: batches of loader processes, and the index of a data set that one rank lists.

Loader processes: queues and events are pipes, each with one writer and one reader, because semaphores would be files in
/dev/shm that stay if the training process is killed, and a process that is killed while it holds one blocks all others.
They write samples into slots, whose memory is sent to the training process once, so that batches are neither copied nor
mapped again (unmapping blocks the training process: pytorch issue 77139). For a GPU each slot is page-locked once. A
slot is free again when the last tensor of its batch is freed, by Python's reference counts: code that copies from one
to a GPU keeps it until the copy is done.

Index: the first rank of a node scans a data set and sends its index to the others, to spare the file server. They map
the same sealed memfd, received over an abstract Unix socket: it is in memory once, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import multiprocessing.context
import multiprocessing.queues
import os
import socket
import struct
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.datasets.arrays import packed, unpacked
from dlbench.errors import EnvironmentLacksError, PeerLostError, RunError
from dlbench.node.data.reader import ArraySpecs, Fetched
from dlbench.node.page_locked import page_lock, page_unlock
from dlbench.node.ranks import SHARED_MEMORY
from dlbench.node.rendezvous import is_own_user, socket_address
from dlbench.units import format_bytes, format_seconds

_REMEDY = f"{SHARED_MEMORY} may be full: make it larger (containers: --shm-size), or lower data.loader_workers"
Batch = dict[str, torch.Tensor]
T = TypeVar("T")
_INDEX = b"i"
_FACTS = struct.Struct("@q")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_RETRY_S = 0.02

if TYPE_CHECKING:
    _Queue = multiprocessing.queues.Queue[Any]
else:
    _Queue = multiprocessing.queues.Queue


def no_room(error: Exception) -> Fetched:
    """Returns the message that replaces a batch for which shared memory has no room."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return Fetched(lacks=f"a loader process cannot send a batch: {reason}; {_REMEDY}")


class _NoLock:
    """Replaces the locks of a queue and the semaphore of its size."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass


class _Event:
    """An event that one process sets once: a byte in a pipe, which nobody reads."""

    def __init__(self) -> None:
        self._seen, self._set = Pipe(duplex=False)

    def set(self) -> None:
        self._set.send_bytes(b"\0")

    def is_set(self) -> bool:
        return self._seen.poll(0)


class LoaderQueue(_Queue):
    """A queue between a process and its children, for torch's DataLoader, that never drops a batch silently."""

    _reader: Connection
    _writer: Connection

    def __init__(self, context: LoaderContext) -> None:
        super().__init__(ctx=context)
        self._child_ends: list[Connection] = []  # writing ends of pipes of children that are being started
        self._from_children: list[Connection] = []

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        own_end, child_end = Pipe(duplex=False)
        self._from_children.append(own_end)
        self._child_ends.append(child_end)
        parts = list(state)
        parts[parts.index(self._writer)] = child_end
        return tuple(parts)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._child_ends, self._from_children = [], []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns the next item. Raises Empty after `timeout`, EOFError if a child has ended."""
        # The children have been started; open ends here would keep their pipes open when they end.
        while self._child_ends:
            self._child_ends.pop().close()
        ready = wait([self._reader, *self._from_children], timeout if block else 0)
        if not ready:
            raise Empty
        return ForkingPickler.loads(ready[0].recv_bytes())  # type: ignore[union-attr]  # a Connection

    # Python calls this in the queue's thread (used by concurrent.futures); the default only prints.
    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        traceback.print_exception(error)
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Fetched):
            # Without tensors, so that it needs no shared memory.
            self.put((item[0], no_room(error)))


class LoaderContext(multiprocessing.context.ForkServerContext):
    """A multiprocessing context with a fork server, and with the queues and events of this module."""

    def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802  (multiprocessing's name)
        return LoaderQueue(self)

    def Lock(self) -> Any:  # noqa: N802
        return _NoLock()

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: N802
        return _NoLock()

    def Event(self) -> Any:  # noqa: N802
        return _Event()


class NoRoomError(Exception):
    """Raised if shared memory is full."""


class WorkerSlots:
    """The slots of one loader process, in that process."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, ArraySpecs, Batch]] = {}  # capacity in samples, specs and tensors by slot
        self._sent: set[int] = set()  # slots whose memory the training process has

    def allocate(self, slot: int, num: int, specs: ArraySpecs) -> dict[str, NDArray[Any]]:
        """Returns arrays for `num` samples in a slot. Raises NoRoomError if shared memory is full."""
        capacity, slot_specs, batch = self._slots.get(slot, (0, {}, {}))
        if num > capacity or slot_specs != specs:
            self._slots.pop(slot, None)
            self._sent.discard(slot)
            try:
                batch = {}
                for name, (shape, dtype) in specs.items():
                    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
                    batch[name] = torch.empty((num, *shape), dtype=torch_dtype).share_memory_()  # type: ignore[no-untyped-call]
            except (RuntimeError, OSError) as error:
                raise NoRoomError(" ".join(str(error).split())) from error
            self._slots[slot] = (num, specs, batch)
        return {name: tensor.numpy()[:num] for name, tensor in batch.items()}

    def hand_over(self, fetched: Fetched, slot: int) -> None:
        """Replaces tensors of a batch that are in the slot by the slot's number, with its memory the first time."""
        tensors = self._slots.get(slot, (0, {}, {}))[2]
        inside = [
            n for n, tensor in fetched.batch.items() if n in tensors and tensor.data_ptr() == tensors[n].data_ptr()
        ]
        if not inside:
            return
        fetched.slot, fetched.num, fetched.names = slot, len(fetched.batch[inside[0]]), tuple(fetched.batch)
        if slot not in self._sent:
            fetched.new_slot_tensors = tensors
        fetched.batch = {name: tensor for name, tensor in fetched.batch.items() if name not in inside}
        self._sent.add(slot)


@dataclass
class _Slot:
    batch: Batch
    locked: list[int]  # addresses that were page-locked
    num_in_use: int = 0  # tensors of the last batch that have not been freed


class Slots:
    """The slots of all loader processes of a rank, in the training process; page-locked with `pin_memory`."""

    def __init__(self, loader_workers: int, *, pin_memory: bool) -> None:
        self._workers, self._pins = loader_workers, pin_memory
        self._numbers = itertools.count()
        self._free: list[list[int]] = [[] for _ in range(loader_workers)]
        self._worker_of: dict[int, int] = {}  # loader process of each slot
        self._slots: dict[tuple[int, int], _Slot] = {}  # by process and slot
        self._dropped: deque[tuple[int, int]] = deque()  # process and slot of each freed tensor, from any thread

    def turns(self) -> Iterator[int]:
        """Yields a free slot for each batch, without end."""
        for worker in itertools.cycle(range(self._workers)):
            while self._dropped:
                key = self._dropped.popleft()
                dropped = self._slots.get(key)
                if dropped is not None:
                    dropped.num_in_use -= 1
                    if dropped.num_in_use == 0:
                        self._free[self._worker_of[key[1]]].append(key[1])
            if self._free[worker]:
                yield self._free[worker].pop()
            else:
                slot = next(self._numbers)
                self._worker_of[slot] = worker
                yield slot

    def take(self, fetched: Fetched) -> None:
        """Adds the tensors in its slot to a batch from a loader process."""
        planned_slot = fetched.asked_slot
        if fetched.slot is None:
            # An error, an empty batch, or one with other arrays than the last: its slot was not used.
            if planned_slot is not None:
                self._free[self._worker_of[planned_slot]].append(planned_slot)
            return
        key = (fetched.worker, fetched.slot)
        if fetched.new_slot_tensors:
            if key in self._slots:
                self._unlock(self._slots.pop(key))
            self._slots[key] = _Slot(fetched.new_slot_tensors, self._lock(fetched.new_slot_tensors))
            fetched.new_slot_tensors = {}
        slot, sent = self._slots[key], fetched.batch
        slot.num_in_use = len(fetched.names) - len(sent)
        fetched.batch = {}
        for name in fetched.names:
            if name in sent:
                fetched.batch[name] = sent[name].pin_memory() if self._pins else sent[name]
                continue
            # This array lives as long as the tensor or a view of it.
            array = slot.batch[name].numpy()[: fetched.num]
            weakref.finalize(array, partial(self._dropped.append, key)).atexit = False
            fetched.batch[name] = torch.from_numpy(array)

    def _lock(self, batch: Batch) -> list[int]:
        locked: list[int] = []
        if not self._pins:
            return locked
        for tensor in batch.values():
            error = page_lock(tensor.data_ptr(), tensor.nbytes)
            if error:
                for address in locked:  # before the batch is unmapped
                    page_unlock(address)
                raise EnvironmentLacksError(
                    f"{format_bytes(tensor.nbytes)} of shared memory cannot be page-locked for the GPU (CUDA error "
                    f"{error}): see `ulimit -l`, or lower data.loader_workers or data.prefetch_batches"
                )
            locked.append(tensor.data_ptr())
        return locked

    def _unlock(self, slot: _Slot) -> None:
        for address in slot.locked:
            page_unlock(address)
        slot.locked.clear()

    def close(self) -> None:
        """Unlocks all slots; called when no copy from a slot is running."""
        for slot in self._slots.values():
            self._unlock(slot)
        self._slots.clear()


class IndexBroadcast:
    """Gives the ranks of a node the same indexes, requested in the same order; `name` must be unique."""

    def __init__(self, *, name: str, first_rank: int, local_rank: int, local_size: int, timeout_s: float) -> None:
        self._name, self._first_rank, self._timeout_s = name, first_rank, timeout_s
        self._local_rank, self._local_size = local_rank, local_size
        self._num_indexes = 0

    def index(self, make: Callable[[], T], expected: Sequence[type]) -> T:
        """Returns the result of `make` on the node's first rank; `expected` are the dataclasses in it."""
        if self._local_size == 1:
            return make()
        self._num_indexes += 1
        address = socket_address(f"index {self._name} {self._num_indexes}")
        if self._local_rank:
            return unpacked(self._received(address), expected)  # type: ignore[no-any-return]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address)
            except OSError:
                raise RunError(f"the name {self._name!r} is in use on this machine, perhaps by another run") from None
            listener.listen(self._local_size)
            with _memory(packed(make())) as memory:
                self._hand_out(listener, memory)
                return unpacked(_mapped(memory), expected)  # type: ignore[no-any-return]

    def _hand_out(self, listener: socket.socket, memory: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(1, self._local_size))
        while missing:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                ranks = ", ".join(str(self._first_rank + local) for local in sorted(missing))
                raise PeerLostError(
                    f"rank {ranks} did not ask for the index of the data set within {format_seconds(self._timeout_s)}"
                ) from None
            with connection, contextlib.suppress(OSError, struct.error):  # a rank that ended stays missing
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not is_own_user(connection):
                    continue
                (local,) = _FACTS.unpack(connection.recv(_FACTS.size))
                socket.send_fds(connection, [_INDEX], [memory])
                missing.discard(local)

    def _received(self, address: bytes) -> memoryview:
        deadline = time.monotonic() + self._timeout_s
        late = PeerLostError(
            f"rank {self._first_rank} did not open the data set for the ranks of this node within "
            f"{format_seconds(self._timeout_s)}"
        )
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    connection.connect(address)
                except (ConnectionRefusedError, BlockingIOError, TimeoutError):  # not listening yet, or queue full
                    if time.monotonic() > deadline:
                        raise late from None
                    time.sleep(_RETRY_S)
                    continue
                if not is_own_user(connection):
                    raise RunError(f"another user of this machine listens under the name {self._name!r}")
                try:
                    connection.sendall(_FACTS.pack(self._local_rank))
                    mark, memories, _, _ = socket.recv_fds(connection, len(_INDEX), 1)
                except TimeoutError:
                    raise late from None
                except ConnectionError:
                    mark, memories = b"", []
            return self._taken(mark, memories)

    def _taken(self, mark: bytes, memories: list[int]) -> memoryview:
        try:
            if mark != _INDEX or len(memories) != 1:
                raise PeerLostError(f"rank {self._first_rank} ended while it opened the data set for this node")
            return _mapped(memories[0])
        finally:
            for memory in memories:
                os.close(memory)


ALONE = IndexBroadcast(name="", first_rank=0, local_rank=0, local_size=1, timeout_s=0.0)  # For a single process.


@contextlib.contextmanager
def _memory(pieces: Iterable[bytes | memoryview]) -> Iterator[int]:
    memory = os.memfd_create("dlbench-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(memory, "wb", closefd=False) as file:
            for piece in pieces:
                file.write(piece)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        yield memory
    finally:
        os.close(memory)


def _mapped(memory: int) -> memoryview:
    return memoryview(mmap.mmap(memory, 0, mmap.MAP_SHARED, mmap.PROT_READ))
