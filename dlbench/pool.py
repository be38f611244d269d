"""The one process pool: work on many items in several processes, such as reading runs or making parts of a data set.

`run` hands items to processes and yields each result as it comes; `in_order` puts results back into order. What holds
for every use:

- Processes are started by `spawn`, so that they inherit neither threads nor locks.
- No process outlives the one that started it, even if that one is killed.
- Ctrl-C reaches the starting process alone, so that one traceback is printed and not one per process.
- An error arrives with its reason and the name of the item; so does the death of a process.
- Memory does not grow with the number of items: a process holds `ahead` of them and its results wait in a pipe, but
  where the starting process helps.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from dlbench.errors import DlbenchError, RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

_GRACE_S = 5.0  # a process that does not end within this time after SIGTERM is killed


@contextmanager
def run(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    name: Callable[[Item], str],
    verb: Literal["read", "made"],
    ahead: int = 1,
    helps: bool = False,
) -> Iterator[Iterator[tuple[int, Result]]]:
    """Does the same work for every item, in several processes; a context manager, which ends them in any case.

    `work`: picklable, such as a `functools.partial` of a function of a module; sent once per process. `items`:
    picklable; handed out in this order. `processes`: at most one per item is started; with one or none the calling
    process does the work. `name`: how messages call an item. `verb`: what messages say of it. `ahead`: items that a
    process holds. With 2 it need not wait for this process between them, which pays if each takes little time; items
    must then fit into a pipe (some 64 KiB), or both ends could wait for each other. `helps`: this process is one of
    them, and holds what the others have done while it is at an item.
    Yields an iterator over the number and the result of each item, as they are done: in any order.
    Raises DlbenchError, OSError, MemoryError: as the work; the last two with the traceback of the process as their
    cause. RunError: a process died. RuntimeError: any other error, with its traceback.
    """
    processes = min(processes, len(items))
    crew: list[_Worker] = []
    try:
        if processes > 1:
            with _sigint_blocked():
                for _ in range(processes - helps):
                    crew.append(_Worker())  # noqa: PERF401  # those that were started must end if the next cannot be
        if crew:
            answers = (_helped if helps else _hand_out)(work, items, iter(range(len(items))), crew, ahead)
        else:
            answers = enumerate(_attempt(work, item) for item in items)
        yield ((number, _result(answer, name(items[number]), verb)) for number, answer in answers)
    finally:
        for worker in crew:
            worker.stop()
        for worker in crew:
            worker.join()


def in_order(results: Iterator[tuple[int, Result]]) -> Iterator[Result]:
    """The results in the order of the items; one that is early is held until those before it are there."""
    early: dict[int, Result] = {}
    turn = 0
    for number, result in results:
        early[number] = result
        while turn in early:
            yield early.pop(turn)
            turn += 1


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why an item has no result: an error, a defect or the death of the process."""

    error: DlbenchError | OSError | MemoryError | None = None
    trace: str = ""
    death: str = ""


def _attempt(work: Callable[[Item], Result], item: Item) -> Result | _Failure:
    try:
        return work(item)
    except (DlbenchError, OSError, MemoryError) as error:
        return _Failure(error=error, trace=traceback.format_exc())
    except Exception:
        return _Failure(trace=traceback.format_exc())


def _result(answer: Result | _Failure, name: str, verb: str) -> Result:
    if not isinstance(answer, _Failure):
        return answer
    if answer.death:
        raise RunError(f"{name}: the process that {verb} it was {answer.death}")
    defect = RuntimeError(f"{name} cannot be {verb}:\n{answer.trace}")
    if answer.error is None:
        raise defect
    raise answer.error from (None if isinstance(answer.error, DlbenchError) else defect)


def _hand_out(
    work: Callable[[Item], Result], items: Sequence[Item], waiting: Iterator[int], crew: Sequence[_Worker], ahead: int
) -> Iterator[tuple[int, Result | _Failure]]:
    for worker in crew:
        worker.send(work)
    for worker in [*crew] * ahead:
        worker.hand(next(waiting, None), items)
    while busy := {worker.connection: worker for worker in crew if worker.in_work}:
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]  # what went in comes out
            number, answer = worker.in_work.pop(0), worker.receive()
            worker.hand(next(waiting, None), items)
            yield number, answer


def _helped(
    work: Callable[[Item], Result], items: Sequence[Item], waiting: Iterator[int], crew: Sequence[_Worker], ahead: int
) -> Iterator[tuple[int, Result | _Failure]]:
    """The same, where this process does items too: a thread hands out from the same numbers meanwhile."""
    done: SimpleQueue[tuple[int, Result | _Failure] | BaseException | None] = SimpleQueue()

    def hand_out() -> None:
        try:
            for answer in _hand_out(work, items, waiting, crew, ahead):
                done.put(answer)
        except BaseException as error:  # Nobody reads it where the crew was stopped, which closes connections.
            done.put(error)
        else:
            done.put(None)

    threading.Thread(target=hand_out, daemon=True).start()
    for number in waiting:
        yield number, _attempt(work, items[number])
    while (answer := done.get()) is not None:
        if isinstance(answer, BaseException):
            raise answer
        yield answer


class _Worker:
    """This process's end of one worker."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.in_work: list[int] = []  # numbers of the items that it holds, the one it has had longest first
        self._process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def hand(self, number: int | None, items: Sequence[Item]) -> None:
        """Gives it one more item; nothing if there is none left."""
        if number is not None:
            self.in_work.append(number)
            self.send(items[number])

    def send(self, thing: object) -> None:
        """Sends the work, which comes first, or an item."""
        # The death of a worker shows when its answer is awaited.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(thing)

    def receive(self) -> Any:
        """Its answer to the item that it has had longest: the result or a `_Failure`."""
        try:
            packed = self.connection.recv_bytes()
        except (EOFError, OSError):  # it died between two answers or in the middle of one
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            return _Failure(death=how + (" (out of memory?)" if code == -signal.SIGKILL else ""))
        return ForkingPickler.loads(packed)

    def stop(self) -> None:
        """Asks it to end now; what it was doing is thrown away."""
        self.connection.close()
        self._process.terminate()

    def join(self) -> None:
        """Waits for its end, then insists."""
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(connection: Connection) -> None:
    """The life of a worker: receives the work, then one item after the other, and answers each."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        # Unpacked with the first item, so that a failing import is answered, too.
        work = functools.cache(functools.partial(ForkingPickler.loads, connection.recv_bytes()))
        while True:
            answer = _attempt(
                lambda packed: ForkingPickler.dumps(work()(ForkingPickler.loads(packed))), connection.recv_bytes()
            )
            connection.send_bytes(ForkingPickler.dumps(answer) if isinstance(answer, _Failure) else answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, from their first instruction on; this one gets it afterwards.

    A terminal sends it to all of them.
    """
    # Starting the first process starts this one, too, which would lift the block.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
