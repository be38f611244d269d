"""Worker processes that write and digest the parts of a data set: no orphans, no lost reasons.

Workers are started by `spawn`, so that they inherit neither threads nor locks, and end when the process that started
them does, even if that one is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
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

from dlbench.datasets.making.manifest import FileEntry, describe_files
from dlbench.errors import DlbenchError, RunError, UserError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from dlbench.datasets.making.recipe import Part, Recipe

_AHEAD = 2
"""Parts a worker holds: one in work, one so that it need not wait for this process."""
_GRACE_S = 5.0


@dataclass(frozen=True)
class Done:
    """A part that is written and synced, not yet at its place."""

    part: Part
    path: Path
    files: list[FileEntry]
    """Relative to the data set."""


@dataclass(frozen=True)
class _Failed:
    """Why a part cannot be written: an error with a clear line, or the traceback of a defect."""

    part: Part
    error: DlbenchError | None
    trace: str = ""

    def as_error(self) -> Exception:
        if self.error is not None:
            return self.error
        return RuntimeError(f"{self.part.name} cannot be made:\n{self.trace}")


def write_parts(recipe: Recipe, parts: Sequence[Part], temporary: Path, workers: int) -> Iterator[Done]:
    """Writes parts below a temporary folder, in any order; yields each when it is there.

    Closing the iterator, an error and Ctrl-C end the workers.

    Raises:
        DlbenchError: as the recipe, with the part's name; UserError for a system error; RunError if a worker died.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        for part in parts:
            yield _or_raise(_write(recipe, part, temporary / "0"))
        return
    crew: list[_Worker] = []
    try:
        with _sigint_blocked():
            crew.extend(_Worker(recipe, temporary / str(i)) for i in range(workers))
        yield from _deal_out(crew, parts)
    finally:
        for worker in crew:
            worker.stop()
        for worker in crew:
            worker.join()


def _deal_out(crew: Sequence[_Worker], parts: Sequence[Part]) -> Iterator[Done]:
    waiting = iter(parts)
    for worker in [*crew] * _AHEAD:
        if (part := next(waiting, None)) is not None:
            worker.send(part)
    while busy := {w.connection: w for w in crew if w.in_work}:
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]  # what went in comes out
            done = _or_raise(worker.receive())
            yield done
            if (part := next(waiting, None)) is not None:
                worker.send(part)


def _or_raise(result: Done | _Failed) -> Done:
    if isinstance(result, _Failed):
        raise result.as_error()
    return result


class _Worker:
    """This process's end of one worker."""

    def __init__(self, recipe: Recipe, temporary: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(recipe, temporary, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.in_work: list[Part] = []

    def send(self, part: Part) -> None:
        """Hands it a part."""
        self.in_work.append(part)
        # A worker that has died is told when its answer is awaited.
        with suppress(BrokenPipeError):
            self.connection.send(part)

    def receive(self) -> Done | _Failed:
        """Its answer to the part it has had longest."""
        part = self.in_work.pop(0)
        try:
            result = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return _Failed(part, RunError(f"{part.name}: the process that made it was {how}{hint}"))
        assert isinstance(result, (Done, _Failed))
        return result

    def stop(self) -> None:
        """Asks it to end now; what it was writing is thrown away."""
        self.connection.close()
        self._process.terminate()

    def join(self) -> None:
        """Waits for its end, then insists."""
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _work(recipe: Recipe, temporary: Path, connection: Connection) -> None:
    """The life of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_write(recipe, connection.recv(), temporary))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _write(recipe: Recipe, part: Part, temporary: Path) -> Done | _Failed:
    # A folder of its own for each part: it keeps its last name, which some writers look at.
    path = temporary / part.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(path)
        recipe.write(part, path)
        files = [_synced(path, part.name, entry) for entry in describe_files(path)]
    except DlbenchError as error:
        return _Failed(part, type(error)(f"{part.name}: {error}"))
    except OSError as error:
        return _Failed(part, UserError(f"{part.name}: cannot be made: {_reason(error, path)}"))
    except Exception:  # a defect: the other process raises it with this trace
        return _Failed(part, None, traceback.format_exc())
    return Done(part, path, files)


def _reason(error: OSError, path: Path) -> str:
    text = error.strerror or str(error)
    of_this = error.filename is None or str(error.filename).startswith(str(path))
    return text if of_this else f"{error.filename}: {text}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _synced(path: Path, name: str, entry: FileEntry) -> FileEntry:
    """Brings a file to the disk; returns its entry with the path from the data set's folder."""
    inside = path.is_dir()
    handle = os.open(path / entry.path if inside else path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileEntry(f"{name}/{entry.path}" if inside else name, entry.sha256, entry.num_bytes)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, from their first instruction on; this one gets it afterwards.

    A terminal sends it to all of them, and each would print a traceback.
    """
    # Starting the first process starts this one, too, which would lift the block.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
