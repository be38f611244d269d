"""Ends a rank whose library waits for ever: MPI's and Horovod's blocking calls, and NCCL's, know no deadline."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from dlbench.errors import ExitCode

LATE_S = 5.0
"""How much later than a call's own deadline, so that calls that have one end by themselves."""

_LOOK_S = 0.5


class Deadline:
    """A thread that looks whether the call under way has gone on for too long."""

    def __init__(self, rank: int, timeout_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        """`on_expiry` gets the reason in one line; afterwards the process ends with exit code 124."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._call: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-deadline", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def begin(self, what: str) -> None:
        """A call begins; cheap enough for every iteration."""
        self._call = (what, time.monotonic())

    def end(self) -> None:
        """The call is done."""
        self._call = None

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            call = self._call
            if call is None or time.monotonic() - call[1] < self._timeout_s + LATE_S:
                continue
            reason = (
                f"rank {self._rank}, {call[0]}: not done within {self._timeout_s:g} s; another rank is gone or stuck"
            )
            print(f"dlbench: error: {reason}", file=sys.stderr, flush=True)
            try:
                if self._on_expiry is not None:
                    self._on_expiry(reason)
            finally:
                os._exit(int(ExitCode.TIMEOUT))
