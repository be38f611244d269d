"""Runs whose job ended before it came to them are submitted again, with their series' next `submit --resume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlbench.jobs.campaign.beginning import begin
from dlbench.jobs.campaign.completing import Submitted, complete
from dlbench.jobs.campaign.packing import Packing, jobs_of
from dlbench.jobs.campaign.reopening import reopen
from dlbench.jobs.campaign.standing import standing
from dlbench.jobs.slurm.scheduler import Slurm
from dlbench.jobs.submission import read_submission
from dlbench.records.folder import RunFolder
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request
from tests.support.programs import Program


def submitted(root: Path, program: Program, packing: Packing = "points") -> list[RunFolder]:
    """The folders of a series of 2 node counts and 2 repeats, all with Slurm: jobs 41 and 42."""
    request = Request(
        workload="cosmoflow", preset="ci", system="box", points=(1, 2), points_are="nodes", repeats=2, series="s"
    )
    plans = expand(request, machine_cores=4)
    root.mkdir()
    program("sbatch", 'n=$(wc -l < "$CALLS"); echo $((40 + n))')
    begin(root, jobs_of(plans, packing=packing), chain=False, python="/python", request="dlbench submit")
    assert len(again(root)) == 2
    return [RunFolder(root / plan.run_id) for plan in plans]


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
    assert reopen(root, "s", Slurm()) == 1
    assert not one_b.accounting.exists()
    assert standing(root, "s").text == "2 of 3 jobs submitted"
    (new,) = again(root)
    assert new.job.run_ids == (one_b.path.name,)
    kept = read_submission(one_b)
    assert kept is not None
    assert kept.job_id == new.job_id.partition(";")[0] != "41"
    # No other job, however often it is asked; and the run that began is left to itself.
    ended(program, j41="TIMEOUT", j42="RUNNING", **{f"j{new.job_id}": "PENDING"})
    assert reopen(root, "s", Slurm()) == 0
    assert again(root) == []
    # Then the whole of the other job ends before it began, and so does the new one.
    ended(program, j41="TIMEOUT", j42="NODE_FAIL", **{f"j{new.job_id}": "CANCELLED"})
    assert reopen(root, "s", Slurm()) == 3
    assert (two_a.path / "earlier-slurm-42.out").exists()
    assert sorted(run for one in again(root) for run in one.job.run_ids) == sorted(
        folder.path.name for folder in (two_a, two_b, one_b)
    )
    assert standing(root, "s").text == "3 of 3 jobs submitted"


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
    assert reopen(root, "s", Slurm()) == 0
    assert (root / ".series" / "s.json").read_text() == before


def test_a_job_that_slurm_forgot_is_over_if_it_wrote_anything(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    one_a, *_ = submitted(root, program)
    ended(program)
    program("sacct", "true")
    assert reopen(root, "s", Slurm()) == 0
    (one_a.path / "slurm-41.out").write_text("srun: error")
    assert reopen(root, "s", Slurm()) == 2


def test_elements_of_an_array_that_never_began_are_packed_anew(tmp_path: Path, program: Program) -> None:
    root = tmp_path / "runs"
    one_a, _, _, one_b = submitted(root, program, packing="runs")
    one_b.launch_log.write_text("began")
    ended(program, j41_1="CANCELLED", j41_2="TIMEOUT", j42_1="RUNNING", j42_2="PENDING")
    assert reopen(root, "s", Slurm()) == 1
    (new,) = again(root)
    assert new.job.run_ids == (one_a.path.name,)
    assert standing(root, "s").text == "3 of 3 jobs submitted"


@pytest.mark.parametrize("stops", ["_clear", "append", "write_series"])
def test_a_reopening_that_is_cut_off_is_made_up_for(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch, stops: str
) -> None:
    root = tmp_path / "runs"
    one_a, two_a, two_b, one_b = submitted(root, program)
    one_a.launch_log.write_text("began")
    ended(program, j41="TIMEOUT", j42="CANCELLED")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"dlbench.jobs.campaign.reopening.{stops}", stop)
        with pytest.raises(KeyboardInterrupt):
            reopen(root, "s", Slurm())
    reopen(root, "s", Slurm())
    taken = [run for one in again(root) for run in one.job.run_ids]
    assert sorted(taken) == sorted(folder.path.name for folder in (two_a, two_b, one_b))
