"""What loader processes and their training process speak by: queues and an event of pipes, without lock and name.

The semaphores of multiprocessing are files in /dev/shm for as long as the training process lives (it starts loader
processes by a fork server, where they are opened by name): whoever killed it and its resource tracker left them there.
And a process that is killed while it holds one holds up all others. Here each pipe has one writer and one reader, so
that no lock is needed: nothing can be left, and of a killed process there comes the end of its pipe.

torch moves a batch into shared memory in a thread of the queue. What fails there is printed and dropped by Python, and
the training process would wait for that batch for ever; here the reason comes in its place.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.queues
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import TYPE_CHECKING, Any

from dlbench.node.data.reader import Fetched
from dlbench.node.preflight import SHARED_MEMORY

_REMEDY = f"{SHARED_MEMORY} may be full: make it larger (containers: --shm-size), or lower data.loader_workers"


if TYPE_CHECKING:
    _Queue = multiprocessing.queues.Queue[Any]
else:
    _Queue = multiprocessing.queues.Queue


def no_room(error: Exception) -> Fetched:
    """What comes in the place of a batch that shared memory has no room for."""
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
        self._theirs: list[Connection] = []
        """Ends of pipes that processes which are being started write to."""
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
        """The next item.

        Raises:
            Empty: none came in time.
            EOFError: a process has ended that could put one.
        """
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
        """A queue without a bound.

        Raises:
            ValueError: one with a bound is asked for.
        """
        if maxsize > 0:
            raise ValueError("a queue of loader processes has no bound")
        return LoaderQueue(self)

    def Lock(self) -> Any:  # noqa: N802
        """For the ends of queues."""
        return _NoLock()

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: N802
        """For the places of queues."""
        return _NoLock()

    def Event(self) -> Any:  # noqa: N802
        """That loader processes are to end."""
        return _Event()
