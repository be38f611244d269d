"""A process pool for many items, such as reading runs.

Processes are started by `spawn`, so that they inherit neither threads nor locks; none outlives its parent, which alone
gets Ctrl-C. Few items are in work at a time, so that memory stays bounded.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, TypeVar

from dlbench.errors import DlbenchError, RunError

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT = 2  # Items per process, so that it need not wait for the parent between them.

_packed_work = b""  # The pickled work of this process, in processes of the pool.


@contextmanager
def run(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    *,
    name: Callable[[Item], str],
    verb: Literal["read", "made"],
    helps: bool = False,
) -> Iterator[Iterator[tuple[int, Result]]]:
    """Does the same work for every item in several processes; the context manager ends them in any case.

    With one process or none the calling one does the work; with `helps` it is one of them. `name` and `verb` are for
    messages on an item. Yields number and result of each item, in the order in which they are done.

    Raises DlbenchError, OSError, MemoryError of the work; RunError: a process died; RuntimeError: any other error.
    Causes have the traceback of the process.
    """
    processes = min(processes, len(items))

    def result(number: int, answer: Result | _Failure) -> Result:
        if not isinstance(answer, _Failure):
            return answer
        item = name(items[number])
        if answer.is_death:
            raise RunError(f"{item}, or an item next to it: the process that {verb} it died (out of memory?)")
        if isinstance(answer.error, DlbenchError):
            raise answer.error from None
        defect = RuntimeError(f"{item} cannot be {verb}:\n{answer.trace}")
        if answer.error is None:
            raise defect
        raise answer.error from defect

    if processes <= 1:
        yield ((number, result(number, _attempt(work, item))) for number, item in enumerate(items))
        return
    before = multiprocessing.active_children()
    executor = ProcessPoolExecutor(
        processes - helps,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(bytes(ForkingPickler.dumps(work)),),
    )
    try:
        answers = _answers(executor, work if helps else None, items, IN_FLIGHT * (processes - helps))
        yield ((number, result(number, answer)) for number, answer in answers)
    finally:
        for process in multiprocessing.active_children():
            if process not in before:
                process.kill()
        executor.shutdown(cancel_futures=True)


def in_order(results: Iterator[tuple[int, Result]]) -> Iterator[Result]:
    """Yields the results in the order of the items; early results wait for those before them."""
    early: dict[int, Result] = {}
    turn = 0
    for number, result in results:
        early[number] = result
        while turn in early:
            yield early.pop(turn)
            turn += 1


@dataclass(frozen=True, kw_only=True)
class _Failure:
    error: DlbenchError | OSError | MemoryError | None = None
    trace: str = ""
    is_death: bool = False


def _attempt(work: Callable[[Item], Result], item: Item) -> Result | _Failure:
    try:
        return work(item)
    except (DlbenchError, OSError, MemoryError) as error:
        return _Failure(error=error, trace=traceback.format_exc())
    except Exception:
        return _Failure(trace=traceback.format_exc())


def _answers(
    executor: ProcessPoolExecutor, own_work: Callable[[Item], Result] | None, items: Sequence[Item], in_flight: int
) -> Iterator[tuple[int, Result | _Failure]]:
    """Submits items as answers arrive; with `own_work` this process does an item itself while there are none."""
    waiting = iter(range(len(items)))
    running: dict[Future[Any], int] = {}
    with _sigint_blocked():  # Processes are started with the first item.
        for number in islice(waiting, in_flight):
            running[executor.submit(_work_on, items[number])] = number
    while running:
        done = [future for future in running if future.done()]
        if not done and own_work is not None:
            for number in islice(waiting, 1):
                yield number, _attempt(own_work, items[number])
        if not done:
            wait(running, return_when=FIRST_COMPLETED)
            done = [future for future in running if future.done()]  # In the order of the items: `wait` gives a set.
        for future in done:
            number = running.pop(future)
            answer = _answer(future)
            if not (isinstance(answer, _Failure) and answer.is_death):
                for following in islice(waiting, 1):
                    running[executor.submit(_work_on, items[following])] = following
            yield number, answer


def _answer(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        return _Failure(is_death=True)
    except Exception:
        # The answer, or the item, cannot be pickled.
        return _Failure(trace=traceback.format_exc())


def _begin(packed_work: bytes) -> None:
    global _packed_work
    _packed_work = packed_work
    threading.Thread(target=_end_with_parent, daemon=True).start()


@functools.cache
def _work() -> Any:
    # Unpickled with the first item, so that a failing import is a failure of that item.
    return ForkingPickler.loads(_packed_work)


def _work_on(item: Any) -> Any:
    return _attempt(lambda work_item: _work()(work_item), item)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_end([parent.sentinel])
    os._exit(1)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Blocks Ctrl-C, which a terminal sends to all processes, in those that are started inside."""
    # The tracker starts with the first process otherwise, and would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
