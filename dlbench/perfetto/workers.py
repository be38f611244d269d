"""Processes that write parts of a trace: no orphans, no lost reasons.

They are started by `spawn`, so that they inherit neither threads nor locks, and end when the process that started them
does, even if that one is killed.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING

from dlbench.errors import DlbenchError, RunError
from dlbench.perfetto.notes import Notes
from dlbench.perfetto.parts import Part, write_part

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from dlbench.perfetto.run import TraceRun

_GRACE_S = 5.0


@dataclass(frozen=True)
class _Failure:
    """Why a part cannot be written."""

    error: DlbenchError | OSError | None
    trace: str = ""

    def as_error(self) -> Exception:
        if self.error is not None:
            return self.error
        return RuntimeError(f"a part of the trace cannot be made:\n{self.trace}")


def write_parts(
    run: TraceRun, parts: Sequence[Part], temporary: Path, workers: int, *, compress: bool
) -> Iterator[tuple[Path, Notes]]:
    """Writes the parts below a folder; yields them in order, each with what was met.

    Closing the iterator, an error and Ctrl-C end the processes.

    Raises:
        OSError, DlbenchError: as the writing.
        RunError: a process died.
    """
    crew: list[tuple[SpawnProcess, Connection]] = []
    try:
        with _sigint_blocked():
            crew.extend(
                _start(run, [*enumerate(parts)][n::workers], temporary, compress=compress) for n in range(workers)
            )
        for number in range(len(parts)):
            process, connection = crew[number % workers]
            answer = _answer(process, connection)
            if isinstance(answer, _Failure):
                raise answer.as_error()
            yield _path(temporary, number), answer
    finally:
        for process, connection in crew:
            connection.close()
            process.terminate()
        for process, _ in crew:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _start(
    run: TraceRun, parts: list[tuple[int, Part]], temporary: Path, *, compress: bool
) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(run, parts, temporary, compress, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _answer(process: SpawnProcess, connection: Connection) -> Notes | _Failure:
    try:
        answer = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(_GRACE_S)
        code = process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return _Failure(RunError(f"a process that wrote a part of the trace was {how}{hint}"))
    assert isinstance(answer, (Notes, _Failure))
    return answer


def _path(temporary: Path, number: int) -> Path:
    return temporary / f"part-{number}"


def _work(
    run: TraceRun, parts: list[tuple[int, Part]], temporary: Path, compress: bool, connection: Connection
) -> None:
    """What a process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(BrokenPipeError):
        for number, part in parts:
            notes = Notes()
            try:
                with _path(temporary, number).open("xb") as file:
                    write_part(run, part, file, notes, compress=compress)
            except (DlbenchError, OSError) as error:
                connection.send(_Failure(error))
                return
            except Exception:  # a defect: the other process raises it with this trace
                connection.send(_Failure(None, traceback.format_exc()))
                return
            connection.send(notes)


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
