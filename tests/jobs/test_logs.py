"""Logs that are followed while Slurm starts a job again, and until nothing more is to come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlbench.cli import cli as command_line
from dlbench.cli.streams import os_error_words
from dlbench.errors import IncompleteDataError
from dlbench.jobs.scheduler import Submission
from dlbench.opening import UnfitFileError
from dlbench.records.files import write_json
from dlbench.records.folder import RunFolder
from dlbench.records.status import RankStatus, write_status
from tests.support.programs import Program
from tests.support.run_factory import plans, write_unfinished


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (plan,) = plans(points=(1,), repeats=1)
    folder = write_unfinished(tmp_path / "runs", plan)
    submission = Submission(
        job_id="7", command=("sbatch",), submitted="2026-03-01T12:00:00Z", log=f"{plan.run_id}/slurm-7.out"
    )
    write_json(folder.submission, submission.model_dump(mode="json"))
    folder.launch_log.write_text("first attempt, step 1\n")
    return folder


@pytest.mark.parametrize("log", ["/etc/passwd", "../secret.out", "r/../../slurm-7.out", "r/s/slurm-7.out", "r/secret"])
def test_a_submission_that_names_another_file_is_damaged(run: RunFolder, log: str) -> None:
    content = json.loads(run.submission.read_text())
    run.submission.write_text(json.dumps({**content, "log": log}))
    done = CliRunner().invoke(command_line, ["logs", str(run.path)])
    assert isinstance(done.exception, IncompleteDataError)
    assert str(done.exception).startswith(f"{run.submission}: damaged: ")
    assert done.stdout == ""


@pytest.mark.parametrize("what", ["the file", "its folder", "the run's folder"])
def test_no_log_is_reached_through_a_link(run: RunFolder, tmp_path: Path, what: str) -> None:
    """Else who can write there would see, where a log is published, what its reader may read."""
    (tmp_path / "secret").mkdir()
    for name in ("launch.log", "slurm-7.out"):
        (tmp_path / "secret" / name).write_text("of nobody else\n")
    if what == "the file":
        run.launch_log.unlink()
        run.launch_log.symlink_to(tmp_path / "secret" / "launch.log")
    elif what == "its folder":
        (run.path.parent / "first").symlink_to(tmp_path / "secret")
        content = json.loads(run.submission.read_text())
        run.submission.write_text(json.dumps({**content, "log": "first/slurm-7.out"}))
    else:
        (tmp_path / "secret" / "plan.json").write_text("{}")
        run.path.rename(tmp_path / "moved")
        run.path.symlink_to(tmp_path / "secret")
    done = CliRunner().invoke(command_line, ["logs", run.path.name, "--out", str(run.path.parent)])
    assert isinstance(done.exception, UnfitFileError)
    assert "is a link" in os_error_words(done.exception)
    assert "of nobody else" not in done.stdout


def test_a_run_that_a_person_names_may_be_a_link(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run.path)
    done = CliRunner().invoke(command_line, ["logs", str(tmp_path / "latest")])
    assert done.stdout == "first attempt, step 1\n"


def test_a_job_that_goes_on_without_its_ranks_is_told(run: RunFolder, program: Program) -> None:
    """Slurm does not notice that the daemon which started them was killed: their supervisors said the last word."""
    program("squeue", "echo '7|RUNNING|N/A|None||/r'")
    status = RankStatus(
        rank=0, host="n1", pid=1, stage="measuring", step=12, updated="2026-03-01T12:00:09.000000Z", source="supervisor"
    )
    told = CliRunner().invoke(command_line, ["status", str(run.path)])
    assert told.stdout.splitlines()[1].startswith("  RUNNING ")
    assert "vanished" not in told.stdout
    write_status(run, status)
    told = CliRunner().invoke(command_line, ["status", str(run.path)])
    assert told.stdout.splitlines()[1].startswith("  RUNNING ")
    assert (
        "rank 0 on n1 vanished at step 12 (measuring), and its job still runs: if it does not end, scancel 7 ends it"
        in told.stdout
    )
