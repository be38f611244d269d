"""A real Slurm ends a job before its end; preflight names a node that fails; links between nodes are slow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest

from benchmarks.shaped_cluster import shaped_cluster, submit, wait_for
from dlbench.jobs.preflight.check import job_of, plan_of, render_preflight, trial
from dlbench.perfmodels.algorithms import counts
from dlbench.perfmodels.schedules import Layout
from dlbench.records.comm import scan_comm
from dlbench.records.preflight import PreflightFolder, PreflightReport
from dlbench.records.scan import Run, scan
from dlbench.specs.choices import choose_system
from tests.conftest import Cli
from tests.jobs.test_requeue_script import EXAMPLES
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment
from tests.support.paths import ROOT

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


NOW = datetime(2026, 3, 1, tzinfo=UTC)


def system(folder: Path, **lines: str) -> Path:
    """The box with Gloo alone, whose local scratch is a folder of each node's own; `lines` replace others."""
    text = (ROOT / "systems" / "box.yaml").read_text()
    text = text.replace("name: box", "name: trial").replace("path: $TMPDIR", f"path: {folder}/{{host}}")
    text = text.replace("launcher: srun-mpi", "launcher: srun-gloo")
    for key in ("mpi_plugin", "oversubscribe_yield"):
        text = "\n".join(line for line in text.split("\n") if key not in line)
    file = folder / "trial.yaml"
    file.write_text(text + "".join(f"{key}: {value}\n" for key, value in lines.items()))
    return file


def report_of(folder: Path) -> PreflightReport:
    (file,) = folder.glob("preflight/*/preflight.json")
    content = json.loads(file.read_text())
    jsonschema.validate(content, PreflightReport.model_json_schema())
    return PreflightReport.model_validate(content)


def test_a_node_without_scratch_is_named_for_exclude(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    (tmp_path / "n1").mkdir()
    done = cli("preflight", system(tmp_path), **slurm_box.environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "--exclude=n2" in done.stdout
    assert len(done.stdout.splitlines()) <= 24
    report = report_of(tmp_path)
    assert report.exclude == "n2"
    first, second = report.nodes
    assert (first.host, first.problems) == ("n1", ())
    assert "No such file" in second.problems[0]
    # All else of it works: it saw the folder, and sums are right.
    assert len(second.ranks) == 1
    exchange = {one.subject: one for one in report.job}["all-reduce"]
    assert exchange.state == "ok", exchange.found
    assert "torch-gloo" in exchange.found


@pytest.mark.nightly
def test_a_node_without_python_is_named_and_nobody_waits_for_it(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    for host in ("n1", "n2"):
        (tmp_path / host).mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] || exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = cli("preflight", system(tmp_path, python=str(python)), **slurm_box.environment)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "--exclude=n1" in done.stdout
    exchange = {one.subject: one for one in report_of(tmp_path).job}["all-reduce"]
    assert "not tried, because the check of n1 failed" in exchange.found


@pytest.mark.nightly
def test_a_job_that_does_not_start_is_cancelled(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    file = system(tmp_path)
    file.write_text(file.read_text().replace("  exclusive: false", "  exclusive: false\n  extra: [begin=now+1hour]"))
    begun = time.monotonic()
    done = cli("preflight", file, "--timeout", "3", **slurm_box.environment)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "was pending (BeginTime)" in " ".join(done.stdout.split())
    assert time.monotonic() - begun < 60
    report = report_of(tmp_path)
    assert report.job_id
    assert report.nodes == ()


SITES = {
    "gres": ("gpu:a100:4,gpu:h100:8,gpu:rtx4090:4",),
    "features": ("gpu",),
    "memory_mb": 480 * 1024,
    "partitions": ("box", "batch", "standard-g", "booster", "boost_usr_prod", "normal", "p5", "gpu"),
}
"""What the example systems ask for, devices counted only."""


def accepts_every_example(folder: Path, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in box.environment.items():
        monkeypatch.setenv(name, value)
    for name in EXAMPLES:
        plan = plan_of(choose_system(name, {}), 2, machine_cores=1, now=NOW)
        where = PreflightFolder(folder / name)
        where.path.mkdir()
        where.run.script.write_text(render_preflight(job_of(plan), where, "/usr/bin/python3"))
        finding = trial(job_of(plan), where, {**box.environment, "PATH": "/usr/bin:/bin"})
        assert finding.state == "ok", f"{name}: {finding.found}"


def test_slurm_accepts_every_example(slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Box.start(slurm_folder, cpus_per_node=288, has=Equipment(**SITES)) as box:
        accepts_every_example(tmp_path, box, monkeypatch)


@pytest.mark.nightly
def test_their_accounts_and_qos_are_enforced(
    slurm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = {
        "accounting": True,
        "accounts": ("my-account", "project_465000000", "m0000_g", "my-project", "g000"),
        "qos": ("regular",),
    }
    with Box.start(slurm_folder, cpus_per_node=288, has=Equipment(**SITES, **books)) as box:
        accepts_every_example(tmp_path, box, monkeypatch)


@pytest.fixture(scope="module")
def cluster(slurm_can_run: None) -> Iterator[tuple[Box, Path]]:
    """Four nodes, links of 200 Mbit/s; and the system's file."""
    with shaped_cluster(nodes=4) as found:
        yield found


@pytest.mark.nightly
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 4), (4, 2)])
def test_every_algorithm_between_nodes(
    cluster: tuple[Box, Path], tmp_path: Path, nodes: int, ranks_per_node: int
) -> None:
    box, system = cluster
    submit(
        box,
        *("comm", "submit", "--system", str(system), "--out", str(tmp_path / "runs"), "--backends", "gloo"),
        *("--algorithms", "all", "--sizes", "1000B,256KiB", "--iterations", "1", "--warmup", "0"),
        *("--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)),
    )

    def is_done() -> bool:
        return all(run.state != "incomplete" for run in scan_comm(tmp_path / "runs").runs)

    wait_for(is_done, BOUND_S)
    (run,) = scan_comm(tmp_path / "runs").runs
    assert run.state == "valid", run.detail
    assert len(set(run.record.hosts)) == nodes
    layout = Layout(ranks=8, group_size=ranks_per_node)
    own = [point for point in run.record.points if point.algorithm != "library"]
    assert len(own) == 2 * 10
    for point in own:
        assert point.correct, point
        wanted = counts("allreduce", point.algorithm, layout, point.num_bytes // 4, 4)
        assert point.bytes_sent == tuple(one.bytes_sent for one in wanted), point.algorithm
        assert point.bytes_across == tuple(one.bytes_across for one in wanted), point.algorithm


@pytest.mark.nightly
@pytest.mark.parametrize("exchanges", ["flat,hierarchical", "flat,hierarchical,leader"])
def test_training_goes_by_nodes(cluster: tuple[Box, Path], tmp_path: Path, exchanges: str) -> None:
    box, system = cluster
    submit(
        box,
        *("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", "2", "--ranks-per-node", "2"),
        *("--engine", "ddp", "--data", "synthetic", "--sweep", f"sync.exchange={exchanges}"),
        *("--set", "sync.fusion=own:single", "--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2"),
        *("--set", "layout.cores_per_rank=1"),
        *("--out", str(tmp_path / "runs")),
    )

    def is_done() -> bool:
        runs = scan(tmp_path / "runs").runs
        return len(runs) == len(exchanges.split(",")) and all(run.state != "incomplete" for run in runs)

    wait_for(is_done, BOUND_S)
    found = {}
    for run in scan(tmp_path / "runs").runs:
        assert run.state == "valid", run.detail
        assert run.record.inert == ()
        exchange = run.record.exchange
        assert (exchange.group_size, exchange.num_groups) == (2, 2)
        assert {rank.host for rank in run.record.ranks} <= set(box.node_names)
        found[exchange.exchange] = run.record
    assert set(found) == set(exchanges.split(","))
    for record in found.values():
        assert record.ranks[0].last_loss == pytest.approx(found["flat"].ranks[0].last_loss, rel=1e-5)
