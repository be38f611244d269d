"""Processes that read runs: no orphans, no lost reasons.

They are started by `spawn`, so that they inherit neither threads nor locks, and end when the process that started them
does, even if that one is killed.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError, RunError
from dlbench.reading.run_loading import LoadedRun, Wanted, load_or_say
from dlbench.records.scan import Run

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

_GRACE_S = 5.0


@dataclass(frozen=True)
class _Defect:
    """Why a run could not be looked at: a traceback."""

    trace: str

    def as_error(self, run: Run) -> RuntimeError:
        return RuntimeError(f"{run.folder.path} cannot be read:\n{self.trace}")


class _Worker:
    """This process's end of one worker."""

    def __init__(self, wanted: Wanted) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(wanted, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.at = -1
        """The run that it reads, by number."""

    def send(self, number: int, run: Run) -> None:
        """Hands it a run. It has read the one before, so neither end waits for the other."""
        self.at = number
        # A worker that has died is told when its answer is awaited.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(dataclasses.replace(run, statuses=[]))

    def receive(self, run: Run) -> LoadedRun | IncompleteDataError:
        """What the run gave.

        Raises:
            RunError: the worker died.
            RuntimeError: a defect, with the worker's traceback.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise RunError(f"{run.folder.path}: the process that read it was {how}{hint}") from None
        if isinstance(answer, _Defect):
            raise answer.as_error(run)
        assert isinstance(answer, LoadedRun | IncompleteDataError)
        return answer

    def stop(self) -> None:
        """Asks it to end now."""
        self.connection.close()
        self._process.terminate()

    def join(self) -> None:
        """Waits for its end, then insists."""
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def load_in_processes(
    runs: Sequence[Run], weights: Sequence[int], wanted: Wanted, processes: int
) -> list[LoadedRun | IncompleteDataError]:
    """As `dlbench.reading.run_reading.load_runs`; the largest runs first, so that none of them is left for the end.

    Raises:
        RunError: a process died.
        RuntimeError: a defect in one of them.
    """
    waiting = iter(sorted(range(len(runs)), key=lambda number: -weights[number]))
    found: dict[int, LoadedRun | IncompleteDataError] = {}
    crew: list[_Worker] = []
    try:
        with _sigint_blocked():
            crew.extend(_Worker(wanted) for _ in range(processes))
        for worker in crew:
            if (number := next(waiting, None)) is not None:
                worker.send(number, runs[number])
        while busy := {worker.connection: worker for worker in crew if worker.at >= 0}:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]  # what went in comes out
                found[worker.at] = worker.receive(runs[worker.at])
                worker.at = -1
                if (number := next(waiting, None)) is not None:
                    worker.send(number, runs[number])
    finally:
        for worker in crew:
            worker.stop()
        for worker in crew:
            worker.join()
    return [found[number] for number in range(len(runs))]


def _work(wanted: Wanted, connection: Connection) -> None:
    """The life of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run = connection.recv()
            try:
                answer = load_or_say(run, wanted)
            except Exception:  # a defect: the other process raises it with this trace
                connection.send(_Defect(traceback.format_exc()))
            else:
                connection.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C; this one gets it afterwards."""
    # Starting the first process starts this one, too, which would lift the block.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
