"""Ends a rank that no longer moves: a hung collective would otherwise burn an allocation to its limit.

Horovod's own stall inspector needs our patch under Gloo and knows only its own tensors; this one
needs nothing from the engine.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from dlbench.errors import ExitCode

LAST_RESORT_S = 30
"""How long the status of a stalled rank may take to write."""


class Watchdog:
    """A thread that looks once a second whether `beat` was called within `timeout_s`."""

    def __init__(self, timeout_s: float, on_stall: Callable[[str], None]) -> None:
        """`on_stall` gets the reason in one line; afterwards the process ends with exit code 124."""
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._last = time.monotonic()
        self._where = "start"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._last = time.monotonic()
        self._thread.start()

    def beat(self, where: str) -> None:
        """Something moved; cheap enough for every step."""
        self._last = time.monotonic()
        self._where = where

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s / 4)):
            silent = time.monotonic() - self._last
            if silent > self._timeout_s:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                # Needs no lock and no Python: ends the process even if its status cannot be written.
                faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True)
                try:
                    self._on_stall(f"no progress for {silent:.0f} s after {self._where} (stall_timeout_s)")
                finally:
                    os._exit(int(ExitCode.TIMEOUT))
