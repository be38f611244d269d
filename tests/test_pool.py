"""The one process pool: every result once, no lost reason, no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import psutil
import pytest

from dlbench import pool
from dlbench.errors import RunError, UserError
from tests.support import pool_work
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _no_process_is_left_and_ctrl_c_works() -> object:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    assert multiprocessing.active_children() == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def done(work: Callable[[int], object], num: int, processes: int) -> list[tuple[int, object]]:
    with pool.run(work, range(num), processes, name="item {}".format, verb="made") as results:
        return list(results)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [1, 3])
def test_every_item_is_done_once(processes: int) -> None:
    found = done(pool_work.square, 1000, processes)
    assert sorted(found) == [(item, item * item) for item in range(1000)]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_results_come_as_they_are_done_unless_put_in_order(tmp_path: Path, is_ordered: bool) -> None:
    seen = []

    def watched(results: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for number, result in results:
            seen.append(number)
            if len(seen) == 5:
                (tmp_path / "go").touch()
            yield number, result

    with pool.run(partial(pool_work.wait_for_go, tmp_path), range(6), 2, name=str, verb="made") as results:
        found = list(pool.in_order(watched(results)) if is_ordered else dict(watched(results)))
    assert seen == [1, 2, 3, 4, 5, 0]
    assert found == (sorted(seen) if is_ordered else seen)


@pytest.mark.parametrize("processes", [0, 1])
def test_one_process_is_this_one(processes: int) -> None:
    assert done(pool_work.process_of, 2, processes) == [(0, os.getpid()), (1, os.getpid())]


def test_no_more_processes_are_started_than_there_are_items() -> None:
    assert done(pool_work.square, 0, 4) == []
    assert done(pool_work.process_of, 1, 4) == [(0, os.getpid())]
    with pool.run(pool_work.square, range(2), 4, name=str, verb="made") as results:
        next(results)
        assert len(multiprocessing.active_children()) <= 2


def test_the_calling_process_helps(tmp_path: Path) -> None:
    work = partial(pool_work.together, tmp_path)
    with pool.run(work, range(6), 2, name=str, verb="read", helps=True) as results:
        found = dict(results)
    assert sorted(found) == list(range(6))
    assert os.getpid() in found.values()
    assert len(set(found.values())) == 2


def test_items_wait_until_results_are_taken(tmp_path: Path) -> None:
    work = partial(pool_work.begin, tmp_path)
    with pool.run(work, range(100), 2, name=str, verb="made") as results:
        next(results)
        time.sleep(0.3)
        assert len(list(tmp_path.iterdir())) <= 2 * pool.IN_FLIGHT + 1


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_arrive_with_their_reason(processes: int) -> None:
    with pytest.raises(UserError, match=r"^source.jpg is no JPEG$"):
        done(partial(pool_work.fail, "user"), 5, processes)
    with pytest.raises(OSError, match="Input/output error") as raised:
        done(partial(pool_work.fail, "system"), 5, processes)
    assert (raised.value.errno, raised.value.filename) == (5, "/mnt/source")
    assert "item 3 cannot be made:\nTraceback" in str(raised.value.__cause__)
    with pytest.raises(
        RuntimeError, match=r"(?s)^item 3 cannot be made:.*in fail.*ZeroDivisionError: division by zero"
    ):
        done(partial(pool_work.fail, "defect"), 5, processes)


def test_work_that_a_process_cannot_import_is_a_defect_with_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    work = FunctionType(pool_work.square.__code__, {}, "work")
    work.__module__, work.__qualname__ = "only_here", "work"
    module.work = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(RuntimeError, match=r"(?s)^item \d cannot be made:.*No module named 'only_here'"):
        done(work, 3, 2)


@pytest.mark.parametrize("how", ["killed", "ends"])
@pytest.mark.parametrize("helps", [False, True])
def test_a_process_that_dies_is_told_with_an_item(how: str, helps: bool) -> None:
    work = partial(pool_work.fail, how, home=os.getpid())
    with (
        pool.run(work, range(8), 2, name="item {}".format, verb="read", helps=helps) as results,
        pytest.raises(RunError, match=r"^item \d, or an item next to it: the process that read it died"),
    ):
        list(results)


def test_who_leaves_early_ends_the_processes(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    work = partial(pool_work.begin_and_stay, tmp_path, but=0)
    with pool.run(work, range(4), 2, name=str, verb="made") as results:
        assert next(results) == (0, None)
        wait_until(lambda: len(list(tmp_path.glob("[1-3]"))) == 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "working"])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, number: signal.Signals, when: str) -> None:
    code = (
        "import sys; from functools import partial; from pathlib import Path; from dlbench import pool; "
        "from tests.support import pool_work\n"
        "work = partial(pool_work.begin_and_stay, Path(sys.argv[1]))\n"
        "with pool.run(work, range(4), 2, name=str, verb='made') as r:\n"
        "    list(r)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    children: list[psutil.Process] = []

    def are_there() -> bool:
        """Two workers and the tracker that `spawn` starts."""
        assert process.poll() is None
        children[:] = psutil.Process(process.pid).children(recursive=True)
        return len(children) == 3 and (when == "starting" or len(list(tmp_path.iterdir())) == 2)

    try:
        wait_until(are_there)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert process.returncode == -number
    if number is signal.SIGINT or when == "working":  # `spawn` itself complains of a parent that is gone
        assert said.count("Traceback") == said.count("KeyboardInterrupt") == (number is signal.SIGINT)
