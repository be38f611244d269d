"""Keeps Python's garbage collector out of measured steps; the loop collects between them, on all ranks together. A full
collection with torch loaded takes tens of milliseconds, and all ranks of a synchronous step wait for the one that
collects.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_EVERY = 100
"""Measured steps between two collections, unless something else interrupts the loop: cycles may hold tensors. As
objects of the set-up are frozen, a collection takes less than a millisecond."""


class HeldGarbage:
    """Controls the collector of one process while it measures."""

    def __init__(self) -> None:
        self.collections = 0  # Collections by the loop, between steps.
        self.seconds = 0.0  # Time of these collections.
        self.in_steps = 0  # Collections that a library started in a measured step.
        self._is_held = False
        self._counts = False
        self._was_enabled = gc.isenabled()

    def hold(self) -> None:
        """Collects, freezes all remaining objects and turns the collector off; called between steps."""
        self._is_held = True
        gc.collect()
        gc.freeze()
        gc.disable()

    def begin_measuring(self) -> None:
        """Turns the collector off, and counts collections that others start."""
        self.hold()
        gc.callbacks.append(self._count)
        self._counts = True

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Surrounds an interruption of training: turns the collector on, and collects at the end."""
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
        if self._count in gc.callbacks:
            gc.callbacks.remove(self._count)
        self._counts = False
        if not self._is_held:
            return
        self._is_held = False
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def _count(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start" and self._counts:
            self.in_steps += 1
