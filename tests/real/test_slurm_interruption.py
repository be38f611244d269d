"""Warning, preemption with a grace time, a lost node, cancelling: a real Slurm ends a job before its end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

BOUND_S = 480
AS_ROOT = "system.launch.environment.OMPI_ALLOW_RUN_AS_ROOT"
YIELDING = Equipment(
    preempt="partition", partitions=("box PriorityTier=1 PreemptMode=REQUEUE GraceTime=20", "urgent PriorityTier=10")
)


@pytest.fixture(scope="module")
def box(slurm_can_run: None) -> Iterator[Box]:
    """Two nodes whose default partition yields to another one."""
    folder = Path(tempfile.mkdtemp(prefix="dlbench-box-", dir="/tmp"))
    with Box.start(folder, has=YIELDING) as started:
        yield started
    shutil.rmtree(folder)


class Job:
    """One run on both nodes that would train for a while, in a job that may be requeued."""

    def __init__(self, cli: Cli, box: Box, out: Path, *, steps: int, launcher: str = "srun-gloo") -> None:
        self.box, self.out = box, out
        submitted = cli(
            *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "2", "--engine", "ddp"),
            *("--launcher", launcher, "--data", "synthetic", "--out", out, "--set", "measure.warmup_steps=1"),
            *("--set", f"measure.measured_steps={steps}", "--set", "checkpoint.every_steps=3"),
            *(word for name in ("", "_CONFIRM") for word in ("--set", f"{AS_ROOT}{name}='1'")),
            *("--set", "system.slurm.requeue=true", "--set", "system.slurm.warn_before_s=8"),
            **box.environment,
        )
        assert submitted.returncode == 0, submitted.stderr
        self.id = submitted.stdout.split()[-1]

    def slurm(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.box.environment, capture_output=True, text=True, timeout=120, check=True, cwd=self.out
        )
        return done.stdout

    @property
    def run(self) -> Run:
        (run,) = scan(self.out).runs
        return run

    def shows(self, words: str) -> bool:
        return words in self.slurm("scontrol", "show", "job", "--oneliner", self.id)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.out.rglob("slurm-*.out"))
            assert time.monotonic() < deadline, f"{self.run.state}: {self.run.detail}\n{logs}"
            time.sleep(0.5)

    def measures(self) -> bool:
        """Whether a measured step has begun and a checkpoint is there."""
        run = self.run
        stages = [status.stage for status in run.statuses]
        return "measuring" in stages and any(run.folder.checkpoints.glob("step-*.safetensors"))

    def attempts(self) -> list[str]:
        return sorted(path.name for path in self.run.folder.path.glob("attempt-*"))

    def goes_on_to_its_end(self) -> None:
        """A second attempt goes on from a checkpoint, ends well, and is marked."""
        self.until(lambda: self.run.record is not None)
        run = self.run
        assert (run.state, run.record.attempt) == ("valid", 2), run.detail
        assert run.record.first_step > 0
        assert run.record.goes_on
        assert self.attempts() == ["attempt-0001"]


@pytest.mark.parametrize(
    ("launcher", "whom"), [("srun-gloo", ()), pytest.param("mpirun", ("--batch",), marks=pytest.mark.nightly)]
)
def test_a_warned_run_keeps_a_checkpoint_and_goes_on(
    cli: Cli, box: Box, tmp_path: Path, launcher: str, whom: tuple[str, ...]
) -> None:
    """What --signal does before the time limit, without the wait for it."""
    job = Job(cli, box, tmp_path / "runs", steps=40, launcher=launcher)
    job.until(job.measures)
    job.slurm("scancel", "--signal=USR1", *whom, job.id)
    job.goes_on_to_its_end()
    assert (job.run.folder.path / "attempt-0001" / "interrupted.json").exists()
    report = cli("report", job.out, "-o", tmp_path / "report.html")
    assert report.returncode == 0, report.stderr
    assert "resumed after interruption (attempt 2) at step" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
def test_a_job_that_yields_with_a_grace_time_is_requeued_and_does_not_fail(cli: Cli, box: Box, tmp_path: Path) -> None:
    job = Job(cli, box, tmp_path / "runs", steps=40)
    job.until(job.measures)
    job.slurm("sbatch", "-p", "urgent", "-N2", "--ntasks-per-node=2", "--output=/dev/null", "--wrap", "sleep 1")
    job.until(lambda: job.shows("Restarts=1"))
    job.goes_on_to_its_end()


@pytest.mark.nightly
def test_an_administrator_requeues_a_job(cli: Cli, box: Box, tmp_path: Path) -> None:
    job = Job(cli, box, tmp_path / "runs", steps=40)
    job.until(job.measures)
    job.slurm("scontrol", "requeue", job.id)
    job.goes_on_to_its_end()


@pytest.mark.nightly
def test_a_job_whose_node_is_lost_goes_on(cli: Cli, box: Box, tmp_path: Path) -> None:
    job = Job(cli, box, tmp_path / "runs", steps=40)
    job.until(job.measures)
    job.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        job.until(lambda: job.shows("Restarts=1"))
    finally:
        job.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.goes_on_to_its_end()


@pytest.mark.nightly
def test_a_cancelled_job_stays_cancelled(cli: Cli, box: Box, tmp_path: Path) -> None:
    job = Job(cli, box, tmp_path / "runs", steps=100_000)
    job.until(job.measures)
    job.slurm("scancel", job.id)
    job.until(lambda: job.shows("JobState=CANCELLED"))
    assert job.shows("Restarts=0")
    assert job.run.record is None
