"""What loader processes and their training process speak by, and shared memory for batches.

Queues and an event of pipes, without lock and name. The semaphores of multiprocessing are files in /dev/shm for as long
as the training process lives (it starts loader processes by a fork server, where they are opened by name): whoever
killed it and its resource tracker left them there. And a process that is killed while it holds one holds up all others.
Here each pipe has one writer and one reader, so that no lock is needed: nothing can be left, and of a killed process
there comes the end of its pipe.

torch moves a batch into shared memory in a thread of the queue. What fails there is printed and dropped by Python, and
the training process would wait for that batch for ever; here the reason comes in its place.

Slots. A loader process writes samples straight into a slot. The memory of a slot crosses to the training process once,
when it is made; from then on only its number does. So a batch is neither copied on its way nor mapped anew (unmapping
holds up the training process: pytorch issue 77139). For a GPU the training process page-locks each slot once, in place.

The training process says which slot a batch goes to. A slot is free again when no tensor of its batch is left, which
Python's reference counts show: whoever copies from one to a GPU keeps it until that copy is done.
"""

from __future__ import annotations

import itertools
import multiprocessing.context
import multiprocessing.queues
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dlbench.errors import EnvironmentLacksError
from dlbench.node.data.reader import Fetched, Forms
from dlbench.node.page_locked import page_lock, page_unlock
from dlbench.node.rank_checks import SHARED_MEMORY
from dlbench.units import format_bytes

_REMEDY = f"{SHARED_MEMORY} may be full: make it larger (containers: --shm-size), or lower data.loader_workers"

if TYPE_CHECKING:
    _Queue = multiprocessing.queues.Queue[Any]
else:
    _Queue = multiprocessing.queues.Queue


def no_room(error: Exception) -> Fetched:
    """Returns the message that replaces a batch for which shared memory has no room."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return Fetched(lacks=f"a loader process cannot hand over a batch: {reason}; {_REMEDY}")


class _NoLock:
    """In the place of the locks of a queue, and of the count of its free places."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass


class _Event:
    """Set by one process, once: a byte in a pipe, which nobody takes out."""

    def __init__(self) -> None:
        self._seen, self._set = Pipe(duplex=False)

    def set(self) -> None:
        self._set.send_bytes(b"\0")

    def is_set(self) -> bool:
        return self._seen.poll(0)


class LoaderQueue(_Queue):
    """A queue of numbered batches between a process and those that it is given to; as torch's DataLoader uses one.

    What the process puts, one of those gets, or itself. What they put, it gets: each has a pipe of its own for that. In
    the place of a batch that cannot be sent comes the reason.
    """

    _reader: Connection
    _writer: Connection

    def __init__(self, context: LoaderContext) -> None:
        super().__init__(ctx=context)
        self._theirs: list[Connection] = []  # ends of pipes that processes which are being started write to
        self._from_them: list[Connection] = []

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        mine, theirs = Pipe(duplex=False)
        self._from_them.append(mine)
        self._theirs.append(theirs)
        return tuple(theirs if part is self._writer else part for part in state)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._theirs, self._from_them = [], []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. Raises Empty: none came in time. EOFError: a process has ended that could put one."""
        # They have been started; a pipe that is written to here, too, would not end with them.
        while self._theirs:
            self._theirs.pop().close()
        ready = wait([self._reader, *self._from_them], timeout if block else 0)
        if not ready:
            raise Empty
        return ForkingPickler.loads(ready[0].recv_bytes())  # type: ignore[union-attr]  # what went in comes out

    # Python calls it in the queue's thread (documented for its own use by concurrent.futures); the default prints.
    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        traceback.print_exception(error)
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Fetched):
            # Without tensors, so that it needs no shared memory.
            self.put((item[0], no_room(error)))


class LoaderContext(multiprocessing.context.ForkServerContext):
    """Processes from a fork server, with such queues and events between."""

    def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802  (multiprocessing's name)
        """A queue without a bound."""
        return LoaderQueue(self)

    def Lock(self) -> Any:  # noqa: N802
        return _NoLock()

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: N802
        return _NoLock()

    def Event(self) -> Any:  # noqa: N802
        return _Event()


Batch = dict[str, torch.Tensor]


class NoRoomError(Exception):
    """Shared memory is full; `str` is the reason."""


class MadeSlots:
    """The slots of one loader process, in that process."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, Forms, Batch]] = {}
        self._told: set[int] = set()

    def room(self, slot: int, num: int, forms: Forms) -> dict[str, NDArray[Any]]:
        """Room for `num` samples in a slot, which is made where there is none of these forms.

        Raises NoRoomError: there is no shared memory left.
        """
        capacity, made_forms, batch = self._slots.get(slot, (0, {}, {}))
        if num > capacity or made_forms != forms:
            self._slots.pop(slot, None)
            self._told.discard(slot)
            try:
                batch = {}
                for name, (shape, dtype) in forms.items():
                    like = torch.from_numpy(np.empty(0, dtype))
                    batch[name] = torch.empty((num, *shape), dtype=like.dtype).share_memory_()  # type: ignore[no-untyped-call]
            except (RuntimeError, OSError) as error:
                raise NoRoomError(" ".join(str(error).split())) from error
            self._slots[slot] = (num, forms, batch)
        return {name: tensor.numpy()[:num] for name, tensor in batch.items()}

    def hand_over(self, fetched: Fetched, slot: int) -> None:
        """Leaves of the tensors that lie in the slot their names only, and the slot where it is not known yet."""
        tensors = self._slots.get(slot, (0, {}, {}))[2]
        inside = [
            n for n, tensor in fetched.batch.items() if n in tensors and tensor.data_ptr() == tensors[n].data_ptr()
        ]
        if not inside:
            return
        fetched.slot, fetched.num, fetched.names = slot, len(fetched.batch[inside[0]]), tuple(fetched.batch)
        fetched.made = {} if slot in self._told else tensors
        fetched.batch = {name: tensor for name, tensor in fetched.batch.items() if name not in inside}
        self._told.add(slot)


@dataclass
class _Slot:
    batch: Batch
    locked: list[int]  # addresses that were page-locked
    left: int = 0  # tensors of the batch that was handed out last which somebody may still have


class Slots:
    """The slots of all loader processes of a rank, in the training process.

    `loader_workers`: processes; batches go to them in turn, as torch's DataLoader deals them out. `pin_memory`:
    page-lock them (needs a GPU).
    """

    def __init__(self, loader_workers: int, *, pin_memory: bool) -> None:
        self._workers, self._pins = loader_workers, pin_memory
        self._numbers = itertools.count()
        self._free: list[list[int]] = [[] for _ in range(loader_workers)]
        self._home: dict[int, int] = {}  # by slot: the process that it is meant for
        self._known: dict[tuple[int, int], _Slot] = {}  # by process and slot
        self._dropped: deque[tuple[int, int]] = deque()
        """Process and slot of each tensor that is gone; appended to by any thread, without a lock."""

    def turns(self) -> Iterator[int]:
        for worker in itertools.cycle(range(self._workers)):
            while self._dropped:
                key = self._dropped.popleft()
                dropped = self._known.get(key)
                if dropped is not None:
                    dropped.left -= 1
                    if dropped.left == 0:
                        self._free[self._home[key[1]]].append(key[1])
            if self._free[worker]:
                yield self._free[worker].pop()
            else:
                slot = next(self._numbers)
                self._home[slot] = worker
                yield slot

    def take(self, fetched: Fetched) -> None:
        """Gives a batch from a loader process its tensors, which lie in its slot."""
        planned_slot = fetched.asked_slot
        if fetched.slot is None:
            # An error, an empty batch, or one whose form differed from the one before: its slot was not used.
            if planned_slot is not None:
                self._free[self._home[planned_slot]].append(planned_slot)
            return
        key = (fetched.worker, fetched.slot)
        if fetched.made:
            if key in self._known:
                self._forget(self._known.pop(key))
            self._known[key] = _Slot(fetched.made, self._lock(fetched.made))
            fetched.made = {}
        slot, sent = self._known[key], fetched.batch
        slot.left = len(fetched.names) - len(sent)
        fetched.batch = {}
        for name in fetched.names:
            if name in sent:
                fetched.batch[name] = sent[name].pin_memory() if self._pins else sent[name]
                continue
            # The storage of the tensor, and of every view of it, holds this array, and nothing else does.
            array = slot.batch[name].numpy()[: fetched.num]
            weakref.finalize(array, partial(self._dropped.append, key)).atexit = False
            fetched.batch[name] = torch.from_numpy(array)

    def _lock(self, batch: Batch) -> list[int]:
        locked: list[int] = []
        for tensor in batch.values() if self._pins else ():
            error = page_lock(tensor.data_ptr(), tensor.nbytes)
            if error:
                for address in locked:  # while it is mapped: nobody keeps this batch
                    page_unlock(address)
                raise EnvironmentLacksError(
                    f"{format_bytes(tensor.nbytes)} of shared memory cannot be page-locked for the GPU (CUDA error "
                    f"{error}): see `ulimit -l`, or lower data.loader_workers or data.prefetch_batches"
                )
            locked.append(tensor.data_ptr())
        return locked

    def _forget(self, slot: _Slot) -> None:
        for address in slot.locked:
            page_unlock(address)
        slot.locked.clear()

    def close(self) -> None:
        """Nothing is page-locked any more; call it when no copy from a slot is under way."""
        for slot in self._known.values():
            self._forget(slot)
        self._known.clear()
