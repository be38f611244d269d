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
from typing import Literal

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


def done(work: Callable[[int], object], num: int, processes: int, ahead: int = 1) -> list[tuple[int, object]]:
    with pool.run(work, range(num), processes, name="item {}".format, verb="made", ahead=ahead) as results:
        return list(results)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("processes", "ahead"), [(1, 1), (2, 1), (3, 2)])
def test_every_item_is_done_once(processes: int, ahead: int) -> None:
    found = done(pool_work.square, 1000, processes, ahead)
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
    with pool.run(pool_work.square, range(2), 4, name=str, verb="made"):
        assert len(multiprocessing.active_children()) == 2


def test_the_calling_process_helps(tmp_path: Path) -> None:
    work = partial(pool_work.together, tmp_path)
    with pool.run(work, range(6), 2, name=str, verb="read", helps=True) as results:
        assert len(multiprocessing.active_children()) == 1
        found = dict(results)
    assert sorted(found) == list(range(6))
    assert os.getpid() in found.values()
    assert len(set(found.values())) == 2


def test_errors_arrive_where_the_calling_process_helps() -> None:
    for work, reason in (
        (partial(pool_work.fail, "user"), "source.jpg is no JPEG"),
        (partial(pool_work.end_elsewhere, os.getpid()), "the process that read it was ended with exit code 7"),
    ):
        with (
            pytest.raises((UserError, RunError), match=reason),
            pool.run(work, range(20), 2, name=str, verb="read", helps=True) as results,
        ):
            dict(results)


@pytest.mark.parametrize("helps", [False, True])
def test_an_answer_that_cannot_be_unpacked_is_no_end(tmp_path: Path, helps: bool) -> None:
    work = partial(pool_work.unreadable, tmp_path / "answered", os.getpid())
    with (
        pytest.raises(ValueError, match="not to be unpacked"),
        pool.run(work, range(20), 3, name=str, verb="read", helps=helps) as results,
    ):
        dict(results)


@pytest.mark.parametrize("ahead", [1, 2])
def test_items_wait_until_results_are_taken(tmp_path: Path, ahead: int) -> None:
    work = partial(pool_work.begin, tmp_path)
    with pool.run(work, range(100), 2, name=str, verb="made", ahead=ahead) as results:
        next(results)
        time.sleep(0.3)
        assert len(list(tmp_path.iterdir())) <= 2 * ahead + 1
    assert len(list(tmp_path.iterdir())) <= 2 * ahead + 1


def test_large_items_and_large_results_do_not_block_each_other() -> None:
    items = [bytes([number]) * pool_work.LARGE for number in range(6)]
    with pool.run(pool_work.echo, items, 2, name=str, verb="read") as results:
        assert [items[number] == result for number, result in results] == [True] * 6


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


def test_what_cannot_be_sent_back_is_a_defect_with_its_trace() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^item 3 cannot be made:.*cannot pickle '_thread.lock' object"):
        done(partial(pool_work.fail, "unsendable"), 5, 2)


def test_work_that_a_process_cannot_import_is_a_defect_with_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    work = FunctionType(pool_work.square.__code__, {}, "work")
    work.__module__, work.__qualname__ = "only_here", "work"
    module.work = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(RuntimeError, match=r"(?s)^item \d cannot be made:.*No module named 'only_here'"):
        done(work, 3, 2)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", r"killed by signal 9 \(out of memory\?\)"),
        ("ends", "ended with exit code 7"),
    ],
)
@pytest.mark.parametrize("verb", ["read", "made"])
def test_a_process_that_dies_is_named_with_its_item(how: str, reason: str, verb: Literal["read", "made"]) -> None:
    with (
        pool.run(partial(pool_work.fail, how), range(8), 2, name="item {}".format, verb=verb, ahead=2) as results,
        pytest.raises(RunError, match=f"^item 3: the process that {verb} it was {reason}$"),
    ):
        list(results)


def test_a_process_that_dies_in_the_middle_of_its_answer_is_named(tmp_path: Path) -> None:
    with pool.run(
        partial(pool_work.die_answering, tmp_path), range(2), 2, name="item {}".format, verb="made"
    ) as results:
        assert next(results) == (1, b"")
        (tmp_path / "go").touch()
        wait_until(lambda: len(multiprocessing.active_children()) == 1)
        with pytest.raises(RunError, match=r"^item 0: the process that made it was killed by signal 9"):
            next(results)


def test_who_leaves_early_ends_the_processes(tmp_path: Path) -> None:
    work = partial(pool_work.begin_and_stay, tmp_path)
    with pool.run(work, range(4), 2, name=str, verb="made"):
        children = multiprocessing.active_children()
    assert len(children) == 2
    with pool.run(pool_work.square, range(4), 2, name=str, verb="made") as results:
        next(results)


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.2)
    work = partial(pool_work.stay_after_sigterm, tmp_path)
    with pool.run(work, range(2), 2, name=str, verb="made") as results:
        assert next(results) == (0, None)
        wait_until(lambda: (tmp_path / "1").exists())


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
