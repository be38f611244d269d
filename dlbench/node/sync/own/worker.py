"""The communication thread: messages go out in the agreed order while the backward pass computes on.

Wait-free back-propagation (Zhang et al., Poseidon, 2017): whoever finds a message complete hands it over and goes on;
one thread exchanges. A message that is complete early waits for those before it, because all ranks must exchange in
the same order. torch releases the interpreter's lock while autograd or a library works, so both run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dlbench.node.failures import passed_on


class ExchangeThread:
    """One thread, one step at a time: `begin`, `hand_over` for each message in any order, `wait`."""

    def __init__(
        self, enter: Callable[[], None], exchange: Callable[[int], None], describe: Callable[[int], str]
    ) -> None:
        """Starts the thread.

        Args:
            enter: called first on the thread.
            exchange: exchanges the message of this number; called on the thread.
            describe: names a message in an error.
        """
        self._enter = enter
        self._exchange = exchange
        self._describe = describe
        self._changed = threading.Condition()
        self._handed: set[int] = set()
        self._next = 0
        self._count = 0
        self._failure: tuple[int, Exception] | None = None
        self._stopping = False
        # A daemon: a rank that fails elsewhere must not wait for a message that will never be answered.
        self._thread = threading.Thread(target=self._run, name="dlbench exchange", daemon=True)
        self._thread.start()

    def begin(self, count: int) -> None:
        """A step of so many messages begins; the last one's are all through."""
        with self._changed:
            self._handed.clear()
            self._next, self._count = 0, count

    def hand_over(self, number: int) -> None:
        """A message is complete."""
        with self._changed:
            self._handed.add(number)
            if number == self._next:
                self._changed.notify_all()

    def wait(self) -> None:
        """Returns when every message of the step is exchanged.

        Raises:
            RunError: the exchange of a message failed; names it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._next == self._count)
            failure = self._failure
        if failure is not None:
            number, error = failure
            reason = " ".join(str(error).split()) or type(error).__name__
            raise passed_on(f"the exchange of {self._describe(number)} failed: {reason}", error) from error

    def stop(self) -> None:
        """Ends the thread once it is through with the message it is at."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        self._enter()
        while (number := self._await_next()) is not None:
            try:
                self._exchange(number)
            except Exception as error:
                # Whatever it is, it belongs to the step that waits for it.
                with self._changed:
                    self._failure = (number, error)
                    self._changed.notify_all()
                return
            with self._changed:
                self._next += 1
                if self._next == self._count:
                    self._changed.notify_all()

    def _await_next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._next < self._count and self._next in self._handed))
            return None if self._stopping else self._next
