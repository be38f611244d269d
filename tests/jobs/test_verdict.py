"""What became of a run, from files and from what its processes said: cause, exit code, and that a series can go on."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlbench.errors import ExitCode, RunError
from dlbench.jobs import local
from dlbench.jobs import local as verdict_module
from dlbench.jobs.local import verdict
from dlbench.jobs.processes import Ending, last_words, stopped_among
from dlbench.records.folder import RunFolder, create
from dlbench.records.scan import read_run
from dlbench.records.status import PEER_MARK, RankStatus, write_status
from dlbench.specs.plan import RunPlan
from tests.support.run_factory import plans, status

T1, T2, T3 = (f"2026-03-01T12:00:0{second}.000000Z" for second in (1, 2, 3))
BAD, CLOSED = "'a.jpg': damaged; repair it", "Connection closed by peer [127.0.0.1]:21430"


def own(rank: int, code: int = 2, at: str = T1) -> RankStatus:
    return status(rank, "n0", "failed", BAD, failure="own", failed_at=at, exit_code=code)


def peer(rank: int, at: str = T2) -> RankStatus:
    return status(rank, "n0", "failed", CLOSED, failure="peer", failed_at=at, exit_code=3)


def run_of(tmp_path: Path, *statuses: RankStatus) -> RunFolder:
    (plan,) = plans(points=(2,), repeats=1)
    tmp_path.mkdir(exist_ok=True)
    folder = create(tmp_path, plan)
    for one in statuses:
        write_status(folder, one)
    return folder


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_the_exit_code_does_not_depend_on_which_rank_met_the_bad_sample(tmp_path: Path, bad: int, first: int) -> None:
    folder = run_of(tmp_path, own(bad), peer(1 - bad))
    outcome = verdict(folder, Ending(rank=first, code=2 if first == bad else 3, at=T3))
    assert outcome.exit_code is ExitCode.USAGE
    assert outcome.detail == f"rank {bad} on n0 failed at step 7: {BAD}; 1 other rank ended with it"
    assert read_run(folder.path).detail == outcome.detail


@pytest.mark.parametrize(
    ("ended_at", "code", "begins"),
    [
        (T2, ExitCode.USAGE, "rank 1 on n0 failed at step 7"),  # a library aborts where its peer is gone
        ("2026-03-01T12:00:00.900000Z", ExitCode.RUN_FAILED, "rank 0 was the first to end, by signal SIGABRT"),
    ],
)
def test_a_signal_is_the_cause_only_if_it_came_first(
    tmp_path: Path, ended_at: str, code: ExitCode, begins: str
) -> None:
    folder = run_of(tmp_path, status(0, "n0", "measuring"), own(1))
    outcome = verdict(folder, Ending(rank=0, code=-signal.SIGABRT, at=ended_at, words="terminate called"))
    assert outcome.exit_code is code
    assert outcome.detail.startswith(begins)


def test_the_kernel_s_out_of_memory_killer_is_named_only_where_its_counters_prove_it(tmp_path: Path) -> None:
    killed = Ending(rank=1, code=-signal.SIGKILL, at=T1, words="irrelevant", log="rank-0001.log")
    assert killed.text == "rank 1 was the first to end, by signal SIGKILL"
    proven = Ending(
        rank=1, code=-signal.SIGKILL, at=T1, out_of_memory="the cgroup's limit is 2 GiB (memory.max)", log="x.log"
    )
    assert proven.text == (
        "rank 1 was killed by the kernel's out-of-memory killer: the cgroup's limit is 2 GiB (memory.max)"
    )
    outcome = verdict(run_of(tmp_path, peer(0), status(1, "n0", "measuring")), proven)
    assert outcome.exit_code is ExitCode.RUN_FAILED
    assert outcome.detail.startswith(proven.text)
    # A loader process, of which the rank knows the signal alone.
    text = "a loader process of the rank ended: DataLoader worker (pid 7) is killed by signal: Killed"
    loader = status(0, "n0", "failed", text, failure="own", failed_at=T1)
    ending = Ending(rank=0, code=3, at=T2, out_of_memory="the cgroup's limit is 2 GiB (memory.max)")
    story = verdict(run_of(tmp_path / "b", loader, peer(1)), ending).detail
    assert story.startswith("the kernel's out-of-memory killer ended a process of the run's cgroup: the cgroup's limit")
    assert text in story


def test_a_stopped_rank_is_told_and_the_stall_is_the_exit_code(tmp_path: Path) -> None:
    stalled = status(0, "n0", "failed", "no progress for 30 s", failure="stalled", failed_at=T1, exit_code=124)
    folder = run_of(tmp_path, stalled, status(1, "n0", "measuring"))
    outcome = verdict(folder, Ending(rank=0, code=124, at=T2), stopped={101})
    assert outcome.exit_code is ExitCode.TIMEOUT
    assert outcome.detail.startswith("rank 1 on n0 was stopped (state T")
    assert read_run(folder.path).detail == outcome.detail


def test_a_rank_that_dies_before_its_status_says_why_by_its_last_words(tmp_path: Path) -> None:
    folder = run_of(tmp_path, status(0, "n0", "starting"))
    ending = Ending(rank=1, code=1, at=T1, words="FileNotFoundError: no such folder", log="rank-0001.log")
    outcome = verdict(folder, ending)
    assert outcome.exit_code is ExitCode.RUN_FAILED
    assert outcome.detail == (
        "rank 1 was the first to end, with exit code 1: FileNotFoundError: no such folder (see rank-0001.log); "
        "1 other rank ended with it"
    )


def test_what_cannot_be_written_or_read_is_told_and_not_raised(tmp_path: Path) -> None:
    folder = run_of(tmp_path, status(0, "n0", "measuring"))
    folder.failure.mkdir()  # in the way of the file, as a full disk is
    words = "rank-0001.steps: No space left on device"
    outcome = verdict(folder, Ending(rank=1, code=3, at=T1, words=words))
    assert outcome.exit_code is ExitCode.INCOMPLETE
    assert words in outcome.detail
    lacking = Ending(rank=1, code=5, at=T1, words=words)
    assert verdict(run_of(tmp_path / "c", status(0, "n0", "measuring")), lacking).exit_code is ExitCode.ENVIRONMENT
    damaged = run_of(tmp_path / "b")
    damaged.status(0).write_text("{")
    assert verdict(damaged, None).exit_code is ExitCode.INCOMPLETE
    gone = verdict(RunFolder(tmp_path / "gone"), None)
    assert (gone.exit_code, "was removed or moved away during the run" in gone.detail) == (ExitCode.RUN_FAILED, True)


def test_a_disk_that_takes_not_even_the_reason_is_told_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: RunFolder, *told: object, **more: object) -> None:
        raise RunError(f"{folder.failure.name}: cannot be written: No space left on device")

    monkeypatch.setattr(verdict_module, "write_failure", refuse)
    folder = run_of(tmp_path, status(0, "n0", "measuring"), status(1, "n0", "measuring"))
    outcome = verdict(folder, Ending(rank=1, code=3, at=T1, words="rank-0001.steps: No space left on device"))
    assert outcome.exit_code is ExitCode.RUN_FAILED
    assert outcome.detail == (
        "rank 1 was the first to end, with exit code 3: rank-0001.steps: No space left on device; "
        "it was on n0, at step 7 or later (measuring); 1 other rank ended with it; "
        "failure.json: cannot be written: No space left on device"
    )


ROOT_PAGE = """
--------------------------------------------------------------------------
mpirun has detected an attempt to run as root.

We reiterate our advice against doing so - please proceed at your own risk.
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", ""),
        ("\n-----\n", ""),
        (ROOT_PAGE, "mpirun does not run as root: run as another user or, in your own container, set OMPI_ALLOW_"),
        (
            "Traceback:\n  File x\nModuleNotFoundError: No module named 'torch'\n",
            "ModuleNotFoundError: No module named",
        ),
        ("x.Error: a\ndlbench: error: the disk is full\ndlbench: error: a status\nRuntimeError: b", "the disk is full"),
        ("srun: error: Unable to allocate resources\nsrun: error: end\n", "srun: error: Unable to allocate resources"),
        ("srun: error: no DNS\nsrun: fatal: Could not establish\n", "srun: fatal: Could not establish"),
        ("mpirun noticed that process rank 0 with PID 7 on node n exited on signal 15 (Terminated).\n", ""),
        (
            "---\nprterun noticed that process rank 0 with PID 7 on node n exited\non signal 9 (Killed).\n---\nlast",
            "last",
        ),
        ("12: dlbench: error: the disk is full\n 3: RuntimeError: b", "the disk is full"),  # srun --label
        (f"dlbench: error: Connection closed\n{PEER_MARK}\nTraceback\n", "Connection closed"),
        ("terminate called\n  what():  std::bad_alloc\n", "what(): std::bad_alloc"),
        ("x" * 5000, "x" * 297 + "..."),
        # What a library warns of is no reason, nor is the line of source behind it.
        ("/p/run.py:7: FutureWarning: old\n  module = nn.parallel.DistributedDataParallel(\n", ""),
        ("[rank0]:[W1124 06:00:00.1 socket.cpp:7] hm\n", ""),
        ("cannot open device\n0: /p/x.py:1: UserWarning: a\n0:   f()\nWARNING: b\n", "cannot open device"),
    ],
)
def test_the_last_words_of_a_process(output: str, words: str) -> None:
    told = last_words(output.splitlines())
    assert told.startswith(words)
    assert bool(told) is bool(words)
    assert "\n" not in told


def test_stopped_among_are_told_from_others(tmp_path: Path) -> None:
    for pid, line in {
        7: "7 (a) b) T 1 7 7 0",
        8: "8 (x) S 1 8 7 0",
        9: "9 (y) t 1 9 7 0",
        10: "10 (z) T 1 10 10 0",
        11: "",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(line)
    (tmp_path / "self").mkdir()
    (tmp_path / "12").mkdir()
    assert stopped_among(range(7, 13), tmp_path) == {7, 9, 10}
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while (found := stopped_among({sleeper.pid})) != {sleeper.pid}:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
    finally:
        sleeper.kill()
        sleeper.wait()


# --- processes that stand for ranks -----------------------------------------------------------------------------------


def with_python(tmp_path: Path, script: str) -> tuple[RunPlan, RunFolder]:
    """A run whose ranks are this shell script; its argument is the plan."""
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/bash\nplan=${{@: -1}}\n{script}\n")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    (plan,) = plans(points=(2,), repeats=1)
    plan = plan.model_copy(update={"system": plan.system.model_copy(update={"python": str(stub)})})
    (tmp_path / "runs").mkdir()
    return plan, create(tmp_path / "runs", plan)


def run(plan: RunPlan, folder: RunFolder) -> local.RunOutcome:
    return local.run(plan, folder, lambda number, of, text: None)


def test_a_python_without_what_ranks_need_is_told(tmp_path: Path) -> None:
    plan, folder = with_python(tmp_path, "echo \"ModuleNotFoundError: No module named 'torch'\"; exit 1")
    outcome = run(plan, folder)
    assert outcome.exit_code is ExitCode.RUN_FAILED
    assert "with exit code 1: ModuleNotFoundError: No module named 'torch'; install 'dlbench[node]'" in outcome.detail
    assert "(see rank-000" in outcome.detail
    assert read_run(folder.path).detail == outcome.detail


# At one moment, so that the launcher never looks between: renameat2 with RENAME_EXCHANGE (2), from the folder (-100).
EXCHANGED = f"""{sys.executable} -c 'import ctypes, sys
sys.exit(ctypes.CDLL(None).renameat2(-100, b"link", -100, sys.argv[1].encode(), 2))' $run"""


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("rm -rf $run", "was removed or moved away"),
        # Also where another run lies there, which goes on as if it were this one.
        (f"mkdir victim; cp $run/plan.json victim; ln -s $PWD/victim link; {EXCHANGED}", "was replaced by a link"),
    ],
)
def test_ranks_whose_folder_is_taken_away_are_ended_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, folder = with_python(tmp_path, f'run=$(dirname "$plan"); mkdir go && {{ {action}; }}; exec sleep 60')
    outcome = run(plan, folder)
    assert outcome.exit_code is ExitCode.RUN_FAILED
    assert outcome.detail == f"{folder.path} {words} during the run: its ranks were ended, and it has no result"
    if (tmp_path / "victim").exists():
        assert [path.name for path in (tmp_path / "victim").iterdir()] == ["plan.json"]


def test_ranks_of_which_none_says_anything_any_more_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their watchdogs are stopped, too."""
    monkeypatch.setattr(local, "MARGIN_S", 1.0)
    plan, folder = with_python(tmp_path, "kill -STOP $$; exec sleep 60")
    measure = plan.measure.model_copy(update={"stall_timeout_s": 1.0})
    write_status(folder, status(0, "n0", "measuring"))
    outcome = run(plan.model_copy(update={"measure": measure}), folder)
    assert outcome.exit_code is ExitCode.TIMEOUT
    assert "no rank made progress for" in outcome.detail
    assert read_run(folder.path).detail == outcome.detail


def test_a_rank_that_lost_the_cause_and_ended_before_it_is_not_told(tmp_path: Path) -> None:
    own, lost = (
        "echo 'dlbench: error: r.steps: No space left on device'",
        f"echo 'dlbench: error: x'; echo '{PEER_MARK}'",
    )
    plan, folder = with_python(tmp_path, f'if [ "$DLBENCH_RANK" = 1 ]; then sleep 1; {own}; else {lost}; fi; exit 3')
    story = run(plan, folder).detail
    assert (
        story == "rank 1 was the first to end, with exit code 3: r.steps: No space left on device (see rank-0001.log)"
    )


def test_nothing_is_left_of_the_room_for_the_reason(tmp_path: Path) -> None:
    plan, folder = with_python(tmp_path, 'ls -A "$(dirname "$plan")" | grep room; exit 3')
    assert "room" in run(plan, folder).detail  # it was there meanwhile
    assert {path.name for path in folder.path.iterdir()} == {
        *("plan.json", "failure.json", "rank-0000.log", "rank-0001.log")
    }
