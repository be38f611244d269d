"""Python's garbage collector, held out of measured steps and called between them, on all ranks alike.

Left alone it starts by counts of allocations, on each rank in another step; a collection of all generations with torch
loaded takes tens of milliseconds, and in a synchronous step all ranks wait for the one that collects. So the objects of
set-up are frozen (no collection looks at them again), collecting by itself is off in measured steps, and the loop
collects between steps. Python frees by reference counts as before; only cycles wait.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_EVERY = 100
"""Measured steps after which the loop collects where nothing else interrupts it: cycles may hold tensors, so they must
not wait for long; what was frozen is not looked at, so collecting takes less than a millisecond."""


class HeldGarbage:
    """The collector of one process while it measures."""

    def __init__(self) -> None:
        self.collections = 0  # By the loop, between steps.
        self.seconds = 0.0  # Of these collections.
        self.in_steps = 0  # Collections that somebody else started in a measured step.
        self._is_held = False
        self._counts = False
        self._was_enabled = gc.isenabled()

    def hold(self) -> None:
        """Collects, keeps what is there out of every later collection and turns the collector off; between steps."""
        self._is_held = True
        gc.collect()
        gc.freeze()
        gc.disable()

    def begin_measuring(self) -> None:
        """Holds the collector, and counts what starts though."""
        self.hold()
        gc.callbacks.append(self._seen)
        self._counts = True

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What interrupts training collects as it likes, and is collected behind at its end."""
        if not self._is_held:
            yield
            return
        counted, self._counts = self._counts, False
        if self._was_enabled:
            gc.enable()
        try:
            yield
        finally:
            began = time.perf_counter()
            gc.collect()
            gc.disable()
            self.collections += 1
            self.seconds += time.perf_counter() - began
            self._counts = counted

    def release(self) -> None:
        """The collector works as before; twice does no harm."""
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)
        self._counts = False
        if not self._is_held:
            return
        self._is_held = False
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def _seen(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start" and self._counts:
            self.in_steps += 1
