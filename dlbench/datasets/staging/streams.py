"""Several copies at a time: threads, what they have moved so far, and how the first failure ends all of them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dlbench.errors import EnvironmentLacksError
from dlbench.units import format_bytes

T = TypeVar("T")

_SPAN_NS = 1_000_000_000
"""Copies of a stream that follow each other within this time are told as one."""
_MOST_SPANS = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CancelledError(Exception):
    """Somebody else failed, and this copying ends for it."""


@dataclass
class Moved:
    """Copies of one stream, one after the other."""

    stream: int
    start_ns: int
    """CLOCK_MONOTONIC."""
    end_ns: int
    num_bytes: int
    items: int


class Tally:
    """How far staging on this node is. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cancelled = threading.Event()
        self.needed = self.copied = self.reused = self.items = self.looked = 0
        """Bytes that had to be there; of these copied, and found whole; files or samples staged; files looked at."""
        self.moved: list[Moved] = []

    def look(self, num: int = 1) -> None:
        """So many files were looked at, for listing or checking.

        Raises:
            CancelledError: staging is to end.
        """
        self._go_on()
        with self._lock:
            self.looked += num

    def add(self, num_bytes: int) -> None:
        """Bytes were copied.

        Raises:
            CancelledError: staging is to end.
        """
        self._go_on()
        with self._lock:
            self.copied += num_bytes

    def done(self, stream: int, start_ns: int, num_bytes: int, items: int = 1) -> None:
        """A stream has copied some files or samples, whose bytes were added before."""
        end_ns = time.monotonic_ns()
        with self._lock:
            self.items += items
            last = next((one for one in reversed(self.moved) if one.stream == stream), None)
            if last is not None and (start_ns - last.start_ns < _SPAN_NS or len(self.moved) >= _MOST_SPANS):
                last.end_ns, last.num_bytes, last.items = end_ns, last.num_bytes + num_bytes, last.items + items
            else:
                self.moved.append(Moved(stream, start_ns, end_ns, num_bytes, items))

    def found(self, num_bytes: int, items: int = 1) -> None:
        """Files or samples of an earlier run were there, whole."""
        self._go_on()
        with self._lock:
            self.reused += num_bytes
            self.items += items

    def _go_on(self) -> None:
        if self.cancelled.is_set():
            raise CancelledError


def run_streams(num: int, tasks: Iterable[T], work: Callable[[int, T], None]) -> None:
    """Does all tasks, `num` at a time, begun in their order; `work` gets the stream's number and a task.

    Raises:
        Exception: what the first failing task raised; the others have ended then.
    """
    waiting, lock = iter(tasks), threading.Lock()
    failures: list[BaseException] = []

    def stream(number: int) -> None:
        for task in _taken(waiting, lock, failures):
            try:
                work(number, task)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=stream, args=(n,), name=f"dlbench-stage-{n}", daemon=True) for n in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _taken(waiting: Iterator[T], lock: threading.Lock, failures: list[BaseException]) -> Iterator[T]:
    while not failures:
        with lock:
            try:
                task = next(waiting)
            except StopIteration:
                return
            except BaseException as error:
                failures.append(error)
                return
        yield task


def told_of_disk(error: OSError, where: str, tally: Tally, free_before: int) -> EnvironmentLacksError | None:
    """The error of a disk that is full: what was needed and what was there; None for another error."""
    if error.errno not in _FULL:
        return None
    return EnvironmentLacksError(
        f"staging to {where}: {error.strerror} after {format_bytes(tally.copied)} of "
        f"{format_bytes(tally.needed - tally.reused)}; {format_bytes(free_before)} were free before; nothing of it is "
        "left there"
    )
