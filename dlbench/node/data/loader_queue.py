"""What loader processes and their training process speak by: queues and an event of pipes, without a name anywhere.

The semaphores of multiprocessing are files in /dev/shm for as long as the training process lives (it starts loader
processes by a fork server, which opens them by name): whoever killed it and its resource tracker left eleven of them a
loader. Here nothing has a name, so nothing can be left:

- A queue needs one lock, that of its writing end. It is a lock on a file in memory, which the kernel takes from a
  process that ends: a loader process killed while it writes holds up nobody.
- One process reads each queue, and none is bounded: the DataLoader of torch counts what is on its way.
- The event is a pipe in which a byte lies or not.

torch moves a batch into shared memory in a thread of the queue. What fails there is printed and dropped by Python, and
the training process would wait for that batch for ever; here the reason comes in its place.
"""

from __future__ import annotations

import fcntl
import multiprocessing.context
import multiprocessing.queues
import os
import traceback
from multiprocessing.connection import Connection, Pipe
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


class _Lock:
    """A lock between processes, each of which takes it from one thread (fcntl(2): record locks belong to processes)."""

    def __init__(self) -> None:
        # A Connection travels to a process that is being started, and closes the file with the last who knows it.
        self._file = Connection(os.memfd_create("dlbench-lock"))

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Waits for it without end: the kernel frees it when its holder ends, and a queue's reader is alone."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Unbounded:
    """In the place of the semaphore that counts the free places of a queue."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        return True

    def release(self) -> None:
        pass


class _Event:
    """What is set once, and seen by all."""

    def __init__(self) -> None:
        self._seen, self._set = Pipe(duplex=False)

    def set(self) -> None:
        self._set.send_bytes(b"\0")

    def is_set(self) -> bool:
        return self._seen.poll(0)


class LoaderQueue(_Queue):
    """A queue of numbered batches; in the place of one that cannot be sent comes the reason."""

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
        return LoaderQueue(ctx=self)

    def Lock(self) -> Any:  # noqa: N802
        """For the ends of queues."""
        return _Lock()

    def BoundedSemaphore(self, value: int = 1) -> Any:  # noqa: N802
        """For the places of queues, which are not counted."""
        return _Unbounded()

    def Event(self) -> Any:  # noqa: N802
        """That loader processes are to end."""
        return _Event()
