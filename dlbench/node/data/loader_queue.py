"""How batches come from loader processes: a queue that says what it could not send.

torch moves a batch into shared memory in a thread of the queue. What fails there is printed and dropped by Python, and
the training process would wait for that batch for ever.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.queues
import traceback
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


class LoaderQueue(_Queue):
    """A queue of numbered batches; in the place of one that cannot be sent comes the reason."""

    # Python calls it in the queue's thread (documented for its own use by concurrent.futures); the default prints.
    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        traceback.print_exception(error)
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Fetched):
            # Without tensors, so that it needs no shared memory.
            self.put((item[0], no_room(error)))


class LoaderContext(multiprocessing.context.ForkServerContext):
    """Processes from a fork server, with such queues between."""

    def Queue(self, maxsize: int = 0) -> LoaderQueue:  # noqa: N802  (multiprocessing's name)
        return LoaderQueue(maxsize, ctx=self.get_context())
