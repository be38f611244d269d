"""How far the making or reading of a data set is: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import click

from dlbench.cli.streams import cleaned, terminal
from dlbench.units import format_bytes, format_seconds

_LINE_EVERY_S = 10.0


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Meter(Protocol):
    """Is told how far a piece of work is."""

    def __call__(self, what: str, done: int, total: int, num_bytes: int | None = None) -> None:
        """Takes a state; another `what` begins another piece."""


@contextmanager
def meter(*, resumes: bool = False) -> Iterator[Meter]:
    """A bar if standard error is a terminal, else lines every ten seconds; both on standard error.

    What is done in the first state counts neither for the rate nor for the time left; with `resumes` it is told, too.
    Inside, a cancelled job or a closed terminal (SIGTERM, SIGHUP) ends like Ctrl-C, so that worker processes end.
    """
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        if not sys.stderr.isatty():
            yield _Lines(resumes)
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        with Progress(*columns, console=terminal(), refresh_per_second=2) as progress:
            yield _Bar(progress)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Rate:
    """Numbers of one piece of work: share, bytes per second and time left, counted from its first state."""

    def __init__(self, done: int, num_bytes: int | None) -> None:
        self._start = time.monotonic()
        self._done = done
        self._bytes = num_bytes or 0

    def numbers(self, done: int, total: int, num_bytes: int | None) -> str:
        """Text such as `1,200 of 5,000, 35 MiB/s, 2 min 03 s left`."""
        elapsed = time.monotonic() - self._start
        text = f"{done:,} of {total:,}"
        if num_bytes is not None and elapsed > 0.5 and num_bytes > self._bytes:
            text += f", {format_bytes((num_bytes - self._bytes) / elapsed)}/s"
        if done > self._done and done < total:
            text += f", {format_seconds((total - done) * elapsed / (done - self._done))} left"
        return text


class _Lines:
    def __init__(self, resumes: bool) -> None:
        self._resumes = resumes
        self._what = ""
        self._rate = _Rate(0, None)
        self._told = 0.0

    def __call__(self, what: str, done: int, total: int, num_bytes: int | None = None) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._rate, self._told = what, _Rate(done, num_bytes), now
            if done and self._resumes:
                click.echo(f"{what}: {done:,} of {total:,} are there already", err=True)
        elif now - self._told >= _LINE_EVERY_S:
            self._told = now
            click.echo(f"{what}: {self._rate.numbers(done, total, num_bytes)}", err=True)


class _Bar:
    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._tasks: dict[str, tuple[Any, _Rate]] = {}

    def __call__(self, what: str, done: int, total: int, num_bytes: int | None = None) -> None:
        from rich.markup import escape

        if what not in self._tasks:
            task = self._progress.add_task(escape(cleaned(what)), total=total, numbers="")
            self._tasks[what] = task, _Rate(done, num_bytes)
        task, rate = self._tasks[what]
        self._progress.update(task, completed=done, total=total, numbers=rate.numbers(done, total, num_bytes))
