"""Runs whose job ended before it came to them are submitted again, with their series' next `submit --resume`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli as command_line
from dlbench.jobs.campaign.campaign import Packing, jobs_of
from dlbench.jobs.campaign.completing import Submitted, begin, complete
from dlbench.jobs.campaign.ended import reopen
from dlbench.jobs.campaign.series_file import submission_status
from dlbench.jobs.scheduler import read_submission
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.records.folder import RunFolder
from dlbench.records.status import attempt_of
from tests.support.programs import Program
from tests.support.run_factory import BOX, plans


def submitted(root: Path, program: Program, packing: Packing = "points") -> list[RunFolder]:
    """The folders of a series of 2 node counts and 2 repeats, all with Slurm: jobs 41 and 42."""
    made = plans(**{**BOX, "points": (1, 2), "repeats": 2, "series": "s"})
    root.mkdir()
    program("sbatch", 'n=$(wc -l < "$CALLS"); echo $((40 + n))')
    begin(root, jobs_of(made, packing=packing), chain=False, python="/python", request="dlbench submit")
    assert len(again(root)) == 2
    return [RunFolder(root / plan.run_id) for plan in made]


def again(root: Path) -> list[Submitted]:
    told: list[Submitted] = []
    complete(root, "s", Slurm(), lambda: None, told.append)
    return told


def ended(program: Program, **states: str) -> None:
    lines = "".join(f"echo '{job[1:]}|{state}|N/A|None|(null)|/x'\n" for job, state in states.items())
    program("squeue", lines or "true")


def test_what_a_job_did_not_come_to_is_submitted_again(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    one_a, two_a, two_b, one_b = submitted(root, program)
    one_a.launch_log.write_text("began")
    (one_a.path / "slurm-41.out").write_text("run 1 of 2")
    (two_a.path / "slurm-42.out").write_text("slurmstepd: error: JOB 42 ON n1 CANCELLED DUE TO TIME LIMIT")
    # What Slurm told of the job that they were in (`dlbench cost`) does not begin a run, nor is it true any more then.
    one_b.accounting.write_text("{}")
    ended(program, j41="TIMEOUT", j42="RUNNING")
    assert reopen(root, "s", Slurm()).runs == 1
    assert not one_b.accounting.exists()
    assert submission_status(root, "s").text == "2 of 3 jobs submitted"
    (new,) = again(root)
    assert new.job.run_ids == (one_b.path.name,)
    kept = read_submission(one_b)
    assert kept.job_id == new.job_id.partition(";")[0] != "41"
    # No other job, however often it is asked; and the run that began is left to itself.
    ended(program, j41="TIMEOUT", j42="RUNNING", **{f"j{new.job_id}": "PENDING"})
    assert reopen(root, "s", Slurm()).runs == 0
    assert again(root) == []
    # Then the whole of the other job ends before it began, and so does the new one.
    ended(program, j41="TIMEOUT", j42="NODE_FAIL", **{f"j{new.job_id}": "BOOT_FAIL"})
    assert reopen(root, "s", Slurm()).runs == 3
    assert (two_a.path / "earlier-slurm-42.out").exists()
    assert sorted(run for one in again(root) for run in one.job.run_ids) == sorted(
        folder.path.name for folder in (two_a, two_b, one_b)
    )
    assert submission_status(root, "s").text == "3 of 3 jobs submitted"


@pytest.mark.parametrize(
    "answer", ["echo '41|COMPLETED|N/A|None|(null)|/x'; echo '42|COMPLETED|N/A|None|(null)|/x'", "exit 1"]
)
def test_jobs_that_were_completed_and_a_scheduler_that_does_not_answer_change_nothing(
    tmp_path: Path, program: Program, answer: str
) -> None:
    root = tmp_path / "runs"
    submitted(root, program)
    program("squeue", answer)
    before = (root / ".series" / "s.json").read_text()
    assert reopen(root, "s", Slurm()).runs == 0
    assert (root / ".series" / "s.json").read_text() == before


def test_a_job_that_slurm_forgot_is_over_if_it_wrote_anything(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    one_a, *_ = submitted(root, program)
    ended(program)
    program("sacct", "true")
    assert reopen(root, "s", Slurm()).runs == 0
    (one_a.path / "slurm-41.out").write_text("srun: error")
    assert reopen(root, "s", Slurm()).runs == 2


def test_elements_of_an_array_that_never_began_are_packed_anew(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    one_a, _, _, one_b = submitted(root, program, packing="runs")
    one_b.launch_log.write_text("began")
    ended(program, j41_1="PREEMPTED", j41_2="TIMEOUT", j42_1="RUNNING", j42_2="PENDING")
    assert reopen(root, "s", Slurm()).runs == 1
    (new,) = again(root)
    assert new.job.run_ids == (one_a.path.name,)
    assert submission_status(root, "s").text == "3 of 3 jobs submitted"
    # What stays of the array is known by its id, whatever becomes of the folder.
    shutil.rmtree(one_b.path)
    assert "41" in submission_status(root, "s").ids
    assert submission_status(root, "s").text == "3 of 3 jobs submitted"


def test_runs_of_cancelled_jobs_come_back_only_if_they_are_asked_for(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    _, two_a, two_b, _ = submitted(root, program)
    ended(program, j41="TIMEOUT", j42="CANCELLED")
    done = reopen(root, "s", Slurm())
    assert done.runs == 2
    assert set(done.cancelled) == {two_a.path.name, two_b.path.name}
    assert done.cancelled_jobs == ("42",)
    assert len(again(root)) == 1
    assert reopen(root, "s", Slurm(), with_cancelled=True).runs == 2
    assert {run for one in again(root) for run in one.job.run_ids} == {two_a.path.name, two_b.path.name}


@pytest.mark.parametrize(
    ("end", "is_cancelled"),
    [
        ("CANCELLED AT 2026-03-01T12:00:00 ***", True),
        ("CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***", False),
        ("CANCELLED AT 2026-03-01T12:00:00 DUE TO PREEMPTION ***", False),
    ],
)
def test_of_a_job_that_slurm_forgot_its_log_says_whether_it_was_cancelled(
    tmp_path: Path, program: Program, end: str, is_cancelled: bool
) -> None:
    root = tmp_path / "runs"
    one_a, *_ = submitted(root, program)
    ended(program)
    (one_a.path / "slurm-41.out").write_text(f"run 1\nslurmstepd: error: *** JOB 41 ON n1 {end}\n")
    done = reopen(root, "s", Slurm())
    assert (done.runs, len(done.cancelled)) == ((0, 2) if is_cancelled else (2, 0))


def test_a_cancelled_run_is_told_as_cancelled_and_one_that_had_failed_before_as_failed(
    tmp_path: Path, program: Program
) -> None:
    """Slurm says it of one job, and of the other one, which it forgot, its log does."""
    one_a, two_a, two_b, one_b = submitted(tmp_path / "runs", program)
    one_a.launch_log.write_text("dlbench: the run ended with exit code 7\n")
    (two_a.path / "slurm-42.out").write_text("*** JOB 42 ON n1 CANCELLED AT 2026-03-01T12:00:00 ***\n")
    ended(program, j41="CANCELLED")
    told = CliRunner().invoke(command_line, ["status", str(tmp_path / "runs"), "--json"])
    states = {row["run_id"]: row["state"] for row in json.loads(told.stdout)["runs"]}
    cancelled = dict.fromkeys((folder.path.name for folder in (two_a, two_b, one_b)), "cancelled")
    assert states == {one_a.path.name: "failed", **cancelled}
    assert told.exit_code == 3


def test_what_accounting_told_does_not_make_a_run_begin(tmp_path: Path, program: Program) -> None:
    """`dlbench cost` and `dlbench wait` keep what the job took in the folders of all its runs."""
    root = tmp_path / "runs"
    one_a, _, _, one_b = submitted(root, program)
    one_a.launch_log.write_text("began")
    for folder in (one_a, one_b):
        folder.accounting.write_text("{}")
    ended(program, j41="TIMEOUT", j42="RUNNING")
    assert reopen(root, "s", Slurm()).runs == 1
    assert not one_b.accounting.exists()
    assert one_a.accounting.exists()


def test_the_command_says_what_it_takes_in_again_and_what_it_leaves_out(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path / "runs", program)
    monkeypatch.chdir(tmp_path)
    ended(program, j41="TIMEOUT", j42="CANCELLED")
    done = CliRunner().invoke(command_line, ["submit", "--resume", "s"])
    assert done.exit_code == 0, done.output
    assert "series s: 2 runs did not begin before their job ended; they are submitted again" in done.stderr
    assert "Total: 1 job, 2 runs, at most" in done.stderr
    command = "dlbench submit --resume s --cancelled --out runs"
    assert f"series s: left out: 2 runs of cancelled job 42; to submit: {command}" in done.stderr
    assert "series s: 2 of 2 jobs submitted, 1 of them by this command; next: dlbench status runs" in done.stderr
    ended(program, j42="CANCELLED", j43="RUNNING")
    told = CliRunner().invoke(command_line, ["status", "runs"]).stdout
    assert f"job 42 ended as CANCELLED before this run began; {command} submits it again" in told
    wrong = CliRunner().invoke(command_line, ["submit", "cosmoflow", "--system", "box", "--nodes", "1", "--cancelled"])
    assert "--cancelled needs --resume SERIES without WORKLOAD" in str(wrong.exception)


def test_a_cancelled_run_that_had_begun_is_tried_again_and_its_first_attempt_is_kept(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what had not begun of its job; the job's own entry is gone, so that no job is counted that is no more."""
    root = tmp_path / "my runs"
    one_a, two_a, two_b, one_b = submitted(root, program)
    monkeypatch.chdir(tmp_path)
    for folder in (one_a, one_b):
        folder.record.write_text("{}")
    ended(program, j41="COMPLETED", j42="CANCELLED")
    (two_a.path / "slurm-42.out").write_text("run 1 of 2")
    (two_a.path / "rank-0000.log").write_text("step 7")
    two_a.launch_log.write_text("began")
    two_a.checkpoints.mkdir()
    begun = {path.name for path in two_a.path.iterdir()} - {"plan.json", "checkpoints", "slurm-42.out"}
    command = "dlbench submit --resume s --cancelled --out 'my runs'"
    told = CliRunner().invoke(command_line, ["status", "my runs", "--full"]).stdout
    assert told.count(f"{command} submits it again") == 2
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    resume = ["submit", "--resume", "s", "--cancelled", "--out", "my runs"]
    dry = CliRunner().invoke(command_line, [*resume, "--dry-run", "--all-scripts"])
    assert dry.exit_code == 0, dry.output
    assert "# Dry run: 1 job of series s on system box; nothing is submitted." in dry.stdout
    assert f"\nrun start '{two_a.path}'\nrun start '{two_b.path}'\n" in dry.stdout
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    done = CliRunner().invoke(command_line, resume)
    assert done.exit_code == 0, done.output
    (job,) = done.stdout.split()
    assert "series s: 1 run had begun before the job was cancelled, and will be tried again; files" in done.stderr
    assert "series s: 1 run did not begin before its job ended; it is submitted again" in done.stderr
    assert "series s: 2 of 2 jobs submitted, 1 of them by this command" in done.stderr
    left = {path.name for path in (two_a.path / "attempt-0001").iterdir()}
    assert left == begun >= {"rank-0000.log", "launch.log", "submission.json", "job.sbatch"}
    assert {path.name for path in two_a.path.iterdir()} == {
        *("plan.json", "job.sbatch", "submission.json", "checkpoints", "attempt-0001", "earlier-slurm-42.out")
    }
    assert attempt_of(two_a) == 2
    # The next job is cancelled before the run begins: there is no attempt of which anything could be kept.
    ended(program, j41="COMPLETED", **{f"j{job}": "CANCELLED"})
    assert reopen(root, "s", Slurm(), with_cancelled=True).begun == ()
    assert not (two_a.path / "attempt-0002").exists()
    dry = CliRunner().invoke(command_line, ["submit", "--resume", "s", "--out", "my runs", "--dry-run"])
    assert "# Dry run: 1 job of series s" in dry.stdout
    (new,) = again(root)
    ended(program, j41="COMPLETED", **{f"j{new.job_id}": "PENDING"})
    dry = CliRunner().invoke(command_line, ["submit", "--resume", "s", "--out", "my runs", "--dry-run"])
    assert dry.stdout == "# Dry run: nothing is left to submit.\n"


@pytest.mark.parametrize("stops", ["_clear", "append", "write_series"])
def test_a_reopening_that_is_cut_off_is_made_up_for(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    root = tmp_path / "runs"
    one_a, two_a, two_b, one_b = submitted(root, program)
    one_a.launch_log.write_text("began")
    ended(program, j41="TIMEOUT", j42="NODE_FAIL")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"dlbench.jobs.campaign.ended.{stops}", stop)
        with pytest.raises(KeyboardInterrupt):
            reopen(root, "s", Slurm())
    reopen(root, "s", Slurm())
    taken = [run for one in again(root) for run in one.job.run_ids]
    assert sorted(taken) == sorted(folder.path.name for folder in (two_a, two_b, one_b))
