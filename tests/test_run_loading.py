"""Many runs read by several processes: the same numbers, no lost reasons, no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dlbench.errors import IncompleteDataError, RunError
from dlbench.reading import run_reading, run_workers
from dlbench.reading.causes import causes_of
from dlbench.reading.digest import digest_of
from dlbench.reading.measures import load_steps
from dlbench.reading.run_loading import LoadedRun, Wanted
from dlbench.reading.run_reading import load_runs
from dlbench.reading.run_table import RunTable, tabulate
from dlbench.records.scan import scan
from tests.run_factory import write_scaling
from tests.watch_factory import large_runs

ROOT = Path(__file__).resolve().parents[1]
ALL = Wanted(causes=True, digest=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of several sizes; one of them is damaged."""
    folder = tmp_path_factory.mktemp("runs")
    write_scaling(folder, repeats=2)
    large_runs(folder, ranks=8, steps=40, ranks_per_node=4, runs=2)
    damaged = scan(folder).runs[1].folder.steps(0)
    damaged.write_bytes(damaged.read_bytes()[:-3])
    return folder


def test_several_processes_give_what_one_gives(out: Path) -> None:
    runs = scan(out).runs
    alone = load_runs(runs, ALL, processes=1)
    assert [isinstance(one, IncompleteDataError) for one in alone].count(True) == 1
    assert told(load_runs(runs, ALL, processes=2)) == told(alone)
    assert told(load_runs(runs[::-1], ALL, processes=3)) == told(alone)[::-1]
    assert multiprocessing.active_children() == []


def told(found: list[LoadedRun | IncompleteDataError]) -> list[str]:
    """Errors are equal only to themselves."""
    return [repr(one) for one in found]


def test_what_is_loaded_is_what_its_makers_give(out: Path) -> None:
    run = scan(out).runs[-1]
    (found,) = load_runs([run], ALL)
    assert isinstance(found, LoadedRun)
    steps = load_steps(run)
    assert found.causes == causes_of(run, steps)
    assert found.digest == digest_of(run, steps)
    (bare,) = load_runs([run], Wanted())
    assert isinstance(bare, LoadedRun)
    assert (bare.row, bare.parts, bare.causes, bare.digest) == (found.row, found.parts, None, None)


def test_a_table_is_the_same_with_and_without_processes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tabulate(scan(out), with_causes=True, with_digests=True)
    started: list[int] = []
    load = run_workers.load_in_processes

    def counted(*arguments: object) -> object:
        started.append(int(str(arguments[-1])))
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run_reading, "load_in_processes", counted)
    monkeypatch.setattr(run_reading, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    together = tabulate(scan(out), with_causes=True, with_digests=True)
    assert started == [2]
    assert_same(alone, together)
    assert len(alone.damaged) == 1
    assert len(alone.digests) == len(alone.runs) == 5


def assert_same(one: RunTable, other: RunTable) -> None:
    assert one.figures.equals(other.figures)
    assert one.parts.equals(other.parts)
    assert (one.causes, one.digests, one.damaged) == (other.causes, other.digests, other.damaged)
    assert [(item.state, item.why) for item in one.without] == [(item.state, item.why) for item in other.without]


def test_few_runs_start_no_process(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_workers, "_Worker", None)
    assert len(load_runs(scan(out).runs, ALL)) == 6


def test_a_killed_process_is_told(out: Path, tmp_path: Path) -> None:
    runs = scan(out).runs[2:4]
    stuck = stuck_run(out, tmp_path)

    def kill() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.05)
        time.sleep(0.5)
        for child in multiprocessing.active_children():
            child.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RunError, match="the process that read it was killed by signal 9"):
        load_runs([*runs, *scan(stuck).runs], ALL, processes=2)
    thread.join()
    assert multiprocessing.active_children() == []


def test_a_defect_comes_with_its_trace(out: Path) -> None:
    without_record = [replace(run, record=None) for run in scan(out).runs[:2]]
    with pytest.raises(RuntimeError, match=r"(?s)cannot be read.*ValueError.*has no figures"):
        load_runs(without_record, ALL, processes=2)
    assert multiprocessing.active_children() == []


def stuck_run(out: Path, folder: Path) -> Path:
    """A copy of a run from whose step file nothing ever comes."""
    source = scan(out).runs[2].folder.path
    copy = folder / source.name
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "rank-0000.steps").unlink()
    os.mkfifo(copy / "rank-0000.steps")
    return folder


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_without_their_traces(out: Path, tmp_path: Path) -> None:
    stuck = stuck_run(out, tmp_path)
    script = tmp_path / "read.py"
    script.write_text(
        "from pathlib import Path\n"
        "from dlbench.reading.run_loading import Wanted\n"
        "from dlbench.reading.run_reading import load_runs\n"
        "from dlbench.records.scan import scan\n"
        "if __name__ == '__main__':\n"
        f"    load_runs(scan(Path({str(stuck)!r})).runs * 2, Wanted(), processes=2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    children: list[psutil.Process] = []
    try:
        # Two workers, which have come as far as the file, and the tracker that `spawn` starts.
        deadline = time.monotonic() + 120
        while len(children) < 3 or min(child.cpu_times().user for child in children[1:]) < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert error.count("KeyboardInterrupt") == 1
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
