"""Who failed first under srun, from lines that Slurm 22.05 writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.records.folder import RunFolder, create
from dlbench.records.job_log import killed_by_signal
from dlbench.records.scan import read_run
from dlbench.records.status import RankStatus, write_status
from tests.support.run_factory import plans, status, write_unfinished

STEP = "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-22T18:59:48 ***"
KILLED = f"""\
srun: error: n1: task 6: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
{STEP}
srun: error: n1: tasks 4-5,7: Killed
srun: error: n0: tasks 0-3: Terminated
srun: Force Terminated StepId=1.0
"""
OWN_WORDS = "dlbench: rank 6 was ended by signal SIGKILL at 2026-03-01T12:00:00.100000Z\n"
LATER = "dlbench: rank 2 was ended by signal SIGKILL at 2026-03-01T12:00:00.300000Z\n"
LABELLED = f" 6: {OWN_WORDS}{STEP}\n10: {LATER}"
"""As srun --label has it."""
OOM = "slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=1.0. Some of your processes may have been killed.\n"


def run_with(tmp_path: Path, log: str, *said: RankStatus, name: str = "slurm-1.out") -> str:
    """The story of a run of 8 ranks in whose job Slurm wrote these lines."""
    (plan,) = plans(points=(8,), repeats=1)
    folder = create(tmp_path, plan)
    told = {one.rank: one for one in said}
    for rank in range(8):
        write_status(folder, told.get(rank) or status(rank, f"n{rank // 4}", "measuring"))
    (folder.path / name).write_text(log)
    run = read_run(folder.path)
    assert run.state == ("failed" if run.seen or said else "incomplete")
    return run.detail


def lost(rank: int) -> RankStatus:
    at = "2026-03-01T12:00:00.200000Z"
    return status(rank, f"n{rank // 4}", "failed", "Connection reset by peer", failure="peer", failed_at=at)


@pytest.mark.parametrize("name", ["slurm-1.out", "launch.log"])
@pytest.mark.parametrize("log", [KILLED, OWN_WORDS + KILLED, LATER + OWN_WORDS, OWN_WORDS + STEP + LATER, LABELLED])
@pytest.mark.parametrize("said", [(), (lost(0), lost(5))])
def test_the_rank_that_was_killed_is_named_and_not_its_victims(
    tmp_path: Path, log: str, said: tuple[RankStatus, ...], name: str
) -> None:
    story = run_with(tmp_path, log, *said, name=name)
    assert story.startswith("rank 6 was the first to end, by signal SIGKILL; ")
    assert story.endswith("it was on n1, at step 7 or later (measuring); 7 other ranks ended with it")
    assert "vanished" not in story


def test_a_rank_that_lost_it_first_in_srun_s_eyes_is_not_the_cause(tmp_path: Path) -> None:
    log = f"srun: error: n0: task 0: Exited with exit code 3\n{OWN_WORDS}{KILLED}"
    assert run_with(tmp_path, log, lost(0)).startswith("rank 6 was the first to end, by signal SIGKILL")


def test_a_rank_s_own_words_are_enough(tmp_path: Path) -> None:
    at = "2026-03-01T12:00:00.100000Z"
    own = status(6, "n1", "failed", "CUDA error: uncorrectable ECC error", failure="own", failed_at=at)
    log = "srun: error: n1: task 6: Exited with exit code 3\n" + KILLED.split("\n", 1)[1] + LATER
    story = run_with(tmp_path, log, own)
    assert story == ("rank 6 on n1 failed at step 7: CUDA error: uncorrectable ECC error; 7 other ranks ended with it")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (OOM + KILLED, "rank 6 was OOM-killed: Slurm detected 1 oom-kill event(s)"),
        (OWN_WORDS + OOM + KILLED, "rank 6 was OOM-killed: Slurm detected 1 oom-kill event(s)"),
        (KILLED.replace("task 6: Killed", "task 6: Out Of Memory"), "rank 6 was OOM-killed (out of memory), by Slurm"),
    ],
)
def test_a_rank_that_ran_out_of_memory_is_told_from_its_victims(tmp_path: Path, log: str, expected: str) -> None:
    assert run_with(tmp_path, log).startswith(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (STEP.removesuffix(" ***") + " DUE TO TIME LIMIT ***", "at its time limit"),
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-22T18:59:48 DUE TO TIME LIMIT ***", "time limit"),
        ("srun: error: Node failure on n2", "a node of the job failed: n2"),
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-22T18:59:48 DUE TO PREEMPTION ***", "preemption"),
        ("/spool/slurm_script: line 1: 29758 Killed   ( set -e; srun --label x )", "srun was ended by signal SIGKILL"),
        ("0: slurmstepd-n1: error: *** STEP 19.0 ON n1 FAILED (non-zero exit code or other ...) ***", "script ended"),
    ],
)
def test_where_slurm_ended_the_whole_job_no_rank_is_accused(tmp_path: Path, line: str, expected: str) -> None:
    story = run_with(tmp_path, f"{line}\n{KILLED}{LATER}")
    assert expected in story
    assert "rank 6" not in story


def test_a_cancelled_job_accuses_nobody(tmp_path: Path) -> None:
    log = f"slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-22T19:00:13 ***\n{STEP}\n{KILLED}"
    assert run_with(tmp_path, log).startswith("8 of 8 ranks started")


def test_without_a_log_the_rank_that_fell_silent_first_is_named_first(tmp_path: Path) -> None:
    silent = status(6, "n1", "measuring").model_copy(update={"updated": "2026-03-01T11:59:50.000000Z"})
    assert run_with(tmp_path, "", lost(0), silent).startswith("rank 6 on n1 vanished at step 7")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (KILLED, (6, 9)),
        ("srun: error: n1: task 2: Segmentation fault (core dumped)\n", (2, 11)),
        ("srun: error: n1: task 2: Exited with exit code 1\n", None),
        (STEP, None),
        ("", None),
    ],
)
def test_the_signal_is_srun_s(tmp_path: Path, log: str, expected: tuple[int, int] | None) -> None:
    (tmp_path / "launch.log").write_text(log)
    assert killed_by_signal(RunFolder(tmp_path)) == expected


def test_how_far_a_run_is_stands_in_its_log(tmp_path: Path) -> None:
    folder = write_unfinished(tmp_path, plans(points=(1,))[0], "measuring")
    assert "its log" not in read_run(folder.path).detail
    name = folder.path.name
    lines = [f"0: dlbench {name}: measuring, step {step} of 900" for step in (11, 408)]
    (folder.path / "slurm-7.out").write_text("\n".join([*lines, "1: a warning", "0: dlbench other: done", ""]))
    assert read_run(folder.path).detail.endswith("; its log reports measuring, step 408 of 900")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "0: slurmstepd-n1: error: execve(): /no/python: No such file or directory\n",
            "no rank started: /no/python: No",
        ),
        ("/spool/slurm_script: line 9: module: command not found\n", "its log reports module: command not found"),
    ],
)
def test_what_kept_a_job_from_starting_a_rank_is_told(tmp_path: Path, log: str, expected: str) -> None:
    (plan,) = plans(points=(1,), repeats=1)
    folder = create(tmp_path, plan)
    (folder.path / "slurm-1.out").write_text(log)
    assert expected in read_run(folder.path).detail


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", "it ended with exit code 7 before any rank started; see launch.log"),
        (
            "dlbench: error: this Slurm has no MPI plugin pmi2; use another\n",
            "it ended with exit code 7 before any rank started: this Slurm has no MPI plugin pmi2; use another; see",
        ),
        ("/spool/slurm_script: line 9: mpi: not found\n", "before any rank started: mpi: not found; see launch.log"),
    ],
)
def test_a_run_of_a_shared_job_that_started_no_rank_has_the_code_of_its_script(
    tmp_path: Path, log: str, expected: str
) -> None:
    """Also while the job goes on with its other runs."""
    (plan,) = plans(points=(1,), repeats=1)
    folder = create(tmp_path, plan)
    folder.launch_log.write_text(f"{log}dlbench: the run ended with exit code 7\n")
    run = read_run(folder.path)
    assert run.state == "failed"
    assert expected in run.detail


def test_the_code_of_its_script_stands_back_where_a_rank_is_known(tmp_path: Path) -> None:
    line = "dlbench: the run ended with exit code 137\n"
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    assert run_with(tmp_path / "a", KILLED + line, name="launch.log").startswith("rank 6 was the first to end")
    own = status(2, "n0", "failed", "no such file", failure="own")
    assert "exit code 137" not in run_with(tmp_path / "b", line, own, name="launch.log")
    assert run_with(tmp_path / "c", line, name="launch.log").startswith("it ended with exit code 137; see launch.log")


def test_what_a_rank_could_tell_its_log_only_is_told(tmp_path: Path) -> None:
    log = "3: dlbench: error: /runs/a/record.json: cannot be written: No space left on device\n"
    story = run_with(tmp_path, log + "srun: error: n0: task 3: Exited with exit code 3\n")
    assert "with exit code 3: record.json: cannot be written: No space left on device; it was on n0" in story
