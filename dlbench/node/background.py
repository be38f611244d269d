"""Work in a background thread, whose exception the training thread raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class BackgroundWorker:
    """Runs functions in a thread, one after another, and keeps the exception of the first that fails, which ends it. By
    default the thread is a daemon, so that a rank that fails elsewhere does not wait for it.
    """

    def __init__(self, name: str, *, changed: threading.Condition | None = None, daemon: bool = True) -> None:
        """Starts the thread. `changed` is notified after each function; several workers may share one."""
        self.error: BaseException | None = None
        self.changed = changed or threading.Condition()
        self._num_waiting = 0
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        with self.changed:
            self._num_waiting += 1
        self._queue.put(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits at most so long until all functions have run or one has failed; returns False after a timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self._num_waiting == 0 or self.error is not None, seconds)

    def require_well(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread after all functions have run, and waits for it at most so long; may be called again."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            error = None
            try:
                if self.error is None:
                    work()
            except BaseException as raised:  # whatever it is, it belongs to the caller
                error = raised
            del work  # it may hold memory
            with self.changed:
                self.error = self.error or error
                self._num_waiting -= 1
                self.changed.notify_all()
