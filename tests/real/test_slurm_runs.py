"""The same plan through a real Slurm (submitted, waited for, collected, reported), and differences between sites."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import dlbench
from dlbench.analysis.measures import measure
from dlbench.datasets.making.catalogue import DatasetRequest, plan_build
from dlbench.datasets.making.production import produce
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.records.status import read_statuses
from tests.conftest import Cli
from tests.slurm_box.box import Box
from tests.slurm_box.config import Equipment
from tests.support import apptainer_stand_in
from tests.support.horovod import require_horovod_over_mpi
from tests.support.leftovers import Leftovers
from tests.support.paths import ROOT
from tests.support.programs import as_shown

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHORT = ("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=4")
BOUND_S = 480


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    produce(plan_build("images", DatasetRequest(samples=64, validation=10, size="64")).recipe, folder)
    return folder


def wait_for(folder: Path, count: int) -> list[Run]:
    """All runs, when each has a record or a failure; fails after BOUND_S with what is known."""
    deadline = time.monotonic() + BOUND_S
    runs: list[Run] = []
    while time.monotonic() < deadline:
        runs = scan(folder).runs
        ended = len(runs) == count and all(run.state != "incomplete" for run in runs)
        # The ranks write their last status after the record.
        if ended and all(status.exit_code is not None for run in runs for status in read_statuses(run.folder)):
            return runs
        time.sleep(0.5)
    logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in folder.rglob("slurm-*.out"))
    pytest.fail(f"not all done within {BOUND_S} s: {[(r.state, r.detail) for r in runs]}\n{logs}")


def cancelled(cli: Cli, box: Box, root: Path, job: str, times: int = 1) -> subprocess.CompletedProcess[str]:
    """What `dlbench status` says of a running job once it is cancelled."""
    assert "RUNNING" in cli("status", root, **box.environment).stdout
    subprocess.run(["scancel", job], env={"PATH": "/usr/bin:/bin", **box.environment}, check=True, timeout=120)
    deadline = time.monotonic() + BOUND_S
    told = cli("status", root, "--full", **box.environment)
    while told.stdout.count("CANCELLED") < times and time.monotonic() < deadline:
        time.sleep(0.5)
        told = cli("status", root, "--full", **box.environment)
    assert told.returncode == 3
    return told


def wait_until_measuring(folder: Path) -> None:
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        runs = scan(folder).runs if folder.is_dir() else []
        if runs and runs[0].statuses and runs[0].statuses[0].stage == "measuring":
            return
        time.sleep(0.3)
    pytest.fail(f"nothing was measured within {BOUND_S} s")


@pytest.mark.horovod
@pytest.mark.parametrize("launcher", [pytest.param("srun-mpi", marks=pytest.mark.nightly), "srun-gloo"])
def test_resnet_on_one_and_two_nodes(
    cli: Cli, slurm_box: Box, tmp_path: Path, images: Path, launcher: str, horovod_installed: None
) -> None:
    if launcher == "srun-mpi":
        require_horovod_over_mpi()
    command = ("submit", "resnet50", "--preset", "ci", "--system", "box", "--nodes", "1,2", "--launcher", launcher)
    command += ("--data", str(images), "--series", "nightly", *SHORT)
    nodes = [tmp_path / name for name in ("n1", "n2")]
    for node in nodes:
        node.mkdir()
    command += ("--set", "data.staging=shard", "--set", "data.shuffle=partial:0.5")
    command += ("--set", f"system.storage.local.path={tmp_path}/{{host}}")
    promised = cli(*command, "--dry-run", "--all-scripts")
    assert promised.returncode == 0, promised.stderr
    assert not (tmp_path / "runs").exists()
    submitted = cli(*command, **slurm_box.environment)
    assert submitted.returncode == 0, submitted.stderr
    jobs = submitted.stdout.split()
    assert len(jobs) == 2
    one, two = wait_for(tmp_path / "runs", 2)
    assert (one.state, two.state) == ("valid", "valid"), (one.detail, two.detail)
    assert one.record is not None
    assert two.record is not None
    assert [r.host for r in one.record.ranks] == ["n1"]
    assert [r.host for r in two.record.ranks] == ["n1", "n2"]
    assert one.record.staging is not None
    assert two.record.staging is not None
    assert [(n.host, n.items) for n in one.record.staging.nodes] == [("n1", 64)]
    assert [(n.host, n.items) for n in two.record.staging.nodes] == [("n1", 32), ("n2", 32)]
    assert [Path(n.path).parent for n in two.record.staging.nodes] == nodes
    assert [list(node.iterdir()) for node in nodes] == [[], []]
    # Samples went from node to node.
    shuffle = two.record.shuffle
    assert shuffle.errors == ()
    assert shuffle.epochs[0].is_whole
    assert 0 < shuffle.epochs[0].sent == shuffle.epochs[0].received <= 32
    carrier = {s.key: s.effective for s in two.record.settings}["engine.horovod.operations"]
    assert carrier == ("mpi" if launcher == "srun-mpi" else "gloo")
    assert two.record.environment["variable.SLURM_JOB_ID"] == jobs[1]
    assert all(as_shown(run.folder.script) in promised.stdout for run in (one, two))
    assert json.loads(two.folder.submission.read_text())["job_id"] == jobs[1]

    status = cli("status", tmp_path / "runs", **slurm_box.environment)
    assert status.returncode == 0
    assert "2 runs, 2 valid" in status.stdout
    report = cli("report", tmp_path / "runs", "-o", tmp_path / "report.html")
    assert report.returncode == 0, report.stderr
    table = json.loads(cli("report", tmp_path / "runs", "--format", "json").stdout)
    assert launcher in json.dumps(table)


@pytest.mark.nightly
def test_ddp_over_two_nodes_of_two_ranks(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    submitted = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "2", "--ranks-per-node", "2"),
        *("--engine", "ddp", "--launcher", "srun-gloo", "--data", "synthetic", *SHORT),
        **slurm_box.environment,
    )
    assert submitted.returncode == 0, submitted.stderr
    (run,) = wait_for(tmp_path / "runs", 1)
    assert run.state == "valid", run.detail
    assert [(r.rank, r.node_rank, r.host) for r in run.record.ranks] == [
        (0, 0, "n1"),
        (1, 0, "n1"),
        (2, 1, "n2"),
        (3, 1, "n2"),
    ]
    names = {path.name for path in run.folder.path.iterdir() if not path.name.startswith("slurm-")}
    of_nodes = {f"node-{node:04d}.{kind}" for node in range(2) for kind in ("steps", "spans", "samples", "status.json")}
    once = {"plan.json", "job.sbatch", "submission.json", "rendezvous.json", "clock.json", "record.json"}
    assert names == of_nodes | once  # whatever the number of ranks
    assert len({len(read_steps(run.folder.steps(rank)).steps) for rank in range(4)}) == 1
    assert measure(run).samples == sum(rank.samples for rank in run.record.ranks)


@pytest.mark.nightly
def test_a_cancelled_job_is_told_and_leaves_nothing(cli: Cli, slurm_box: Box, tmp_path: Path, images: Path) -> None:
    with Leftovers() as leftovers:
        _cancel_a_job(cli, slurm_box, tmp_path, images, leftovers)
        assert leftovers.within() == []


def _cancel_a_job(cli: Cli, slurm_box: Box, tmp_path: Path, images: Path, leftovers: Leftovers) -> None:
    submitted = cli(
        *("submit", "resnet50", "--preset", "ci", "--system", "box", "--nodes", "1", "--engine", "ddp"),
        *("--launcher", "srun-gloo", "--data", images, "--set", "data.loader_workers=1"),
        *("--set", "measure.measured_steps=100000"),
        *("--set", "system.slurm.export=PYTHONPATH,DLBENCH_TEST_MARK,TMPDIR"),
        **{**leftovers.environment, **slurm_box.environment},
    )
    (job,) = submitted.stdout.split()
    wait_until_measuring(tmp_path / "runs")
    assert any("dlbench.supervisor" in words for words in leftovers.processes().values())
    told = cancelled(cli, slurm_box, tmp_path / "runs", job)
    assert f"job {job} ended as CANCELLED without a record" in told.stdout
    assert "measuring, step" in told.stdout


def test_one_job_runs_all_points_and_repeats_and_those_that_fail_lose_no_other(
    cli: Cli, slurm_box: Box, tmp_path: Path
) -> None:
    """Half of the runs fail, by their setup line; those of one node have one of the job's two."""
    command = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1,2", "--repeats", "2")
    command += ("--engine", "ddp", "--launcher", "srun-gloo", "--data", "synthetic", "--series", "packed", *SHORT)
    command += ("--pack", "all", "--sweep", "system.setup=exit 7,umask 022")
    promised = cli(*command, "--dry-run", "--all-scripts")
    assert promised.returncode == 0, promised.stderr
    submitted = cli(*command, **slurm_box.environment)
    assert submitted.returncode == 0, submitted.stderr
    assert "Total: 1 job, 8 runs, at most 2.667 node-hours" in submitted.stderr
    (job,) = submitted.stdout.split()
    told, deadline = "", time.monotonic() + BOUND_S
    while "8 runs, 4 valid" not in told and time.monotonic() < deadline:
        time.sleep(0.5)
        told = cli("status", tmp_path / "runs", **slurm_box.environment).stdout
    runs = scan(tmp_path / "runs").runs
    valid = [run for run in runs if run.state == "valid"]
    assert [run.plan.series.axes["system.setup"] for run in valid] == ["umask 022"] * 4, told
    started = [run.record.started for run in valid if run.record is not None]
    assert started == sorted(started)
    for run in valid:
        assert run.record.environment["variable.SLURM_JOB_ID"] == job
        assert [r.host for r in run.record.ranks] == ["n1", "n2"][: run.plan.layout.nodes]
        assert run.record.held_nodes == 2 - run.plan.layout.nodes
    assert all(as_shown(run.folder.script) in promised.stdout for run in runs)
    output = runs[0].folder.path / f"slurm-{job}.out"
    while not output.read_text().endswith("runs failed\n") and time.monotonic() < deadline:
        time.sleep(0.3)
    log = output.read_text()
    assert log.count("ended with 7: see ") == 4
    told = cli("status", tmp_path / "runs", "--full", **slurm_box.environment).stdout
    assert told.count("it ended with exit code 7 before any rank started; see launch.log") == 4
    assert log.endswith("dlbench: 4 of 8 runs failed\n")
    again = cli(*command[:-4], "--series", "more", "--dry-run", "--pack", "all")
    assert again.stdout.count("estimated from 2 earlier runs: ") == 2


@pytest.mark.nightly
def test_both_sides_of_a_comparison_run_in_one_job(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """Side b is slower by a known time a step, and has a setup of its own."""
    sides = ("--ab", "plain", "fault.step_delay_s=0.3,system.setup=export SIDE=b")
    command = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "2", "--engine", "ddp")
    command += ("--launcher", "srun-gloo", "--data", "synthetic", "--repeats", "2", "--series", "pairs", *sides, *SHORT)
    promised = cli(*command, "--dry-run", "--all-scripts")
    assert promised.returncode == 0, promised.stderr
    submitted = cli(*command, **slurm_box.environment)
    assert submitted.returncode == 0, submitted.stderr
    (job,) = submitted.stdout.split()
    runs = wait_for(tmp_path / "runs", 4)
    assert [run.state for run in runs] == ["valid"] * 4, [run.detail for run in runs]
    assert [(run.plan.series.repeat, run.plan.series.side) for run in runs] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    started = [run.record.started for run in runs if run.record is not None]
    assert started == sorted(started)
    for run in runs:
        assert run.record.environment["variable.SLURM_JOB_ID"] == job
        assert [r.host for r in run.record.ranks] == ["n1", "n2"]
        assert as_shown(run.folder.script) in promised.stdout
        assert json.loads(run.folder.submission.read_text())["job_id"] == job
        assert run.plan.run_id in run.folder.launch_log.read_text()
    status = cli("status", tmp_path / "runs", "--full", **slurm_box.environment)
    assert status.returncode == 0, status.stdout
    assert status.stdout.count(f"job {job}") == 4
    compared = cli("compare", tmp_path / "runs", "--paired", "--format", "json")
    assert compared.returncode == 6, compared.stderr  # two pairs carry no verdict
    assert "insufficient" in compared.stdout


def test_a_cancelled_comparison_starts_no_further_run(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    submitted = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1", "--engine", "ddp"),
        *("--launcher", "srun-gloo", "--data", "synthetic", "--set", "measure.measured_steps=100000"),
        *("--repeats", "2", "--ab", "plain", "train.seed=7"),
        **slurm_box.environment,
    )
    (job,) = submitted.stdout.split()
    wait_until_measuring(tmp_path / "runs")
    told = cancelled(cli, slurm_box, tmp_path / "runs", job, times=4)
    assert told.stdout.count(f"job {job} ended as CANCELLED without a record") == 1, told.stdout
    assert told.stdout.count(f"job {job} ended as CANCELLED before this run began") == 3, told.stdout
    assert "measuring, step" in told.stdout
    assert [bool(run.statuses) for run in scan(tmp_path / "runs").runs] == [True, False, False, False]


def test_what_slurm_refuses_is_told_in_one_line(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    done = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1"),
        *("--data", "synthetic", "--set", "system.slurm.partition=nowhere"),
        **slurm_box.environment,
    )
    assert done.returncode == 3
    assert done.stderr.count("dlbench: error:") == 1
    assert "invalid partition" in done.stderr.lower()
    assert list((tmp_path / "runs").iterdir()) == []


def test_runs_inside_an_allocation_load_what_their_side_says(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """As a job does: before, both sides ran without the setup lines, which made an A/A test of it."""
    command = ["salloc", "--nodes=2", "--ntasks=2", "--quiet", sys.executable, "-m", "dlbench", "run", "cosmoflow"]
    command += ["--preset", "ci", "--system", "box", "--ranks", "2", "--engine", "ddp", "--launcher", "srun-gloo"]
    done = subprocess.run(
        [*command, "--data", "synthetic", "--ab", "plain", "system.setup=export NCCL_ALGO=Ring", *SHORT],
        cwd=tmp_path,
        env={**os.environ, **slurm_box.environment},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    a, b = scan(tmp_path / "runs").runs
    for run, loaded in ((a, None), (b, "Ring")):
        assert run.state == "valid", run.detail
        assert [r.host for r in run.record.ranks] == ["n1", "n2"]
        assert run.record.environment.get("variable.NCCL_ALGO") == loaded
        assert run.record.environment_differences == ()
        assert run.folder.launch_script.exists() == (loaded is not None)


def test_a_killed_rank_is_named_and_not_those_that_srun_ended(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """--kill-on-bad-exit ends the healthy ranks, which vanish as well."""
    submitted = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "2", "--ranks-per-node", "2"),
        *("--engine", "ddp", "--launcher", "srun-gloo", "--data", "synthetic"),
        *("--set", "measure.measured_steps=100000"),
        **slurm_box.environment,
    )
    assert submitted.returncode == 0, submitted.stderr
    wait_until_measuring(tmp_path / "runs")
    (run,) = scan(tmp_path / "runs").runs
    (victim,) = (status for status in run.statuses if status.rank == 2)
    os.kill(victim.pid, signal.SIGKILL)
    told, deadline = "", time.monotonic() + BOUND_S
    while "first to end" not in told and time.monotonic() < deadline:
        time.sleep(0.3)
        told = cli("status", tmp_path / "runs", **slurm_box.environment).stdout
    assert "rank 2 was the first to end, by signal SIGKILL; it was on n2, at step" in told
    assert "3 other ranks ended with it" in told
    assert "vanished" not in told


def test_a_series_is_submitted_resumed_waited_for_read_and_cancelled(slurm_box: Box, tmp_path: Path) -> None:
    """The terminal closes during the second of four jobs; later the controller takes a job without saying so."""
    ran, bin_folder = tmp_path / "ran", tmp_path / "bin"
    bin_folder.mkdir()
    stubs = {
        # Stands for the Python of the nodes: says which plan it got. What it has, `submit` asks it, too: no answer.
        "python": f'for plan; do :; done; [ -f "$plan" ] || exit 1; echo "$plan" >> {ran}; echo "here is $plan"',
        "sbatch": f"""\
echo call >> {tmp_path}/calls
case $(wc -l < {tmp_path}/calls) in
  2) kill -HUP $PPID; sleep 0.5 ;;
  4) {shutil.which("sbatch")} "$@" > /dev/null
     echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
     exit 1 ;;
esac
exec {shutil.which("sbatch")} "$@\"""",
    }
    for name, body in stubs.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    variables = {**os.environ, **slurm_box.environment, "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def dlbench(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "dlbench", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=BOUND_S, check=False
        )

    asked = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--nodes", "1", "--engine", "ddp")
    asked += ("--launcher", "srun-gloo", "--data", "synthetic", "--set", f"system.python={bin_folder / 'python'}")
    # Other requests each, so that none shares a job.
    four = "system.slurm.extra=nice=1,nice=2,nice=3,nice=4"
    cut = dlbench(*asked, "--no-chain", "--series", "long", "--sweep", four)
    assert cut.returncode == 130, cut.stderr
    assert len(cut.stdout.split()) == 2
    assert "series long: 2 of 4 jobs submitted; the rest: dlbench submit --resume long --out runs" in cut.stderr
    resumed = dlbench("submit", "--resume", "long")
    assert resumed.returncode == 0, resumed.stderr
    assert "series long: 4 of 4 jobs submitted" in resumed.stderr
    jobs = [*cut.stdout.split(), *resumed.stdout.split()]
    assert len(set(jobs)) == 4
    assert dlbench("submit", "--resume", "long").stdout == ""
    waited = dlbench("wait", "long", "--timeout", f"{BOUND_S}s", "--every", "1s")
    # This Python writes no record.
    assert waited.returncode == 3, waited.stderr
    assert waited.stdout == "series long: 0 of 4 runs valid, 4 failed\n"
    plans = sorted(ran.read_text().split())
    assert [Path(plan).parent.parent for plan in plans] == [tmp_path / "runs"] * 4
    assert len(set(plans)) == 4
    logs = dlbench("logs", Path(plans[0]).parent.name)
    assert f"here is {plans[0]}" in logs.stdout, logs.stderr

    held = dlbench(*asked, "--series", "held", "--set", "system.slurm.extra=hold")
    assert held.returncode == 0, held.stderr
    (job,) = held.stdout.split()
    told = dlbench("status", "runs", "--where", "series=held")
    assert f"(JobHeldUser), it is held: `scontrol release {job}` lets it start" in told.stdout
    # A file that names another job of the user's cancels nothing; of an array each run is cancelled alone.
    own_jobs = (*asked, "--series", "array", "--repeats", "2", "--one-run-per-job", "--set", "system.slurm.extra=hold")
    array = dlbench(*own_jobs).stdout.strip()
    victim, (first, second) = next((tmp_path / "runs").glob("held-*")), sorted((tmp_path / "runs").glob("array-*"))
    own = (second / "submission.json").read_text()
    for forged in ((victim / "submission.json").read_text(), (first / "submission.json").read_text()):
        (second / "submission.json").write_text(forged)
        assert "0 jobs cancelled, not cancelled" in dlbench("cancel", second.name).stderr
    (second / "submission.json").write_text(own)
    assert dlbench("cancel", second.name).stdout.split() == [f"{array}_2"]
    assert dlbench("cancel", "array").stderr == "series array: 1 job cancelled\n"
    cancelled = dlbench("cancel", "held")
    assert (cancelled.stdout.split(), cancelled.stderr) == ([job], "series held: 1 job cancelled\n")
    assert dlbench("wait", "held", "--timeout", "60s", "--every", "1s").returncode == 3
    assert "ended as CANCELLED" in dlbench("status", "runs", "--where", "series=held").stdout
    left = dlbench("submit", "--resume", "held")
    assert left.stdout == ""
    assert f"left out: 1 run of cancelled job {job}" in left.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_killed_run_inside_an_allocation_leaves_nothing(
    slurm_box: Box, tmp_path: Path, images: Path, victim: str
) -> None:
    """Although the allocation stays, so that Slurm itself ends nothing."""
    words = [sys.executable, "-P", "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--system", "box"]
    words += ["--ranks", "2", "--engine", "ddp", "--launcher", "srun-gloo", "--data", str(images)]
    words += ["--set", "data.loader_workers=1", "--set", "measure.measured_steps=100000"]
    # Long enough to look, and ended by itself, so that the next test gets the nodes.
    script = '"$@"; exec env -i sleep 12'
    with Leftovers() as leftovers:
        salloc = subprocess.Popen(
            ["salloc", "--nodes=2", "--ntasks=2", "--quiet", "sh", "-c", script, "sh", *words],
            cwd=tmp_path,
            env={**leftovers.environment, **slurm_box.environment},
            stdin=subprocess.DEVNULL,
        )
        wait_until_measuring(tmp_path / "runs")
        command = " ".join(words[:5])
        (launcher,) = (pid for pid, line in leftovers.processes().items() if line.startswith(command))
        (run,) = scan(tmp_path / "runs").runs
        os.kill(launcher if victim == "launcher" else run.statuses[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 30  # the launcher gives other ranks ten seconds
        while Path(f"/proc/{launcher}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        deadline = time.monotonic() + 5
        while left := [line for line in leftovers.now() if "salloc" not in line]:
            if time.monotonic() > deadline:
                pytest.fail(f"left: {left}")
            time.sleep(0.1)
    salloc.wait(timeout=60)


SUBMIT = ("submit", "cosmoflow", "--preset", "ci", "--system", "box", "--engine", "ddp")
SUBMIT += ("--data", "synthetic", *SHORT)
SECRET = "hunter2-of-the-shell"
SHELL = {
    "SBATCH_PARTITION": "nowhere",
    "SBATCH_TIMELIMIT": "77",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_EXPORT": "NONE",
    "SLURM_CPU_BIND": "map_cpu:99",
    "SLURM_MEM_PER_CPU": "1",
    "SLURM_JOB_ID": "4711",
    "SQUEUE_FORMAT": "%N",
    "OF_THE_SHELL": "1",
    "NCCL_ALGO": "Tree",
    "SITE_TOKEN": SECRET,
}
"""Of a shell in a job of somebody's, with settings of its own."""


@pytest.fixture
def two_kinds(slurm_box: Box) -> Iterator[Box]:
    """The box with a feature on each node."""

    def update(**features: str) -> None:
        for node, feature in features.items():
            words = [
                "scontrol",
                "update",
                f"NodeName={node}",
                f"AvailableFeatures={feature}",
                f"ActiveFeatures={feature}",
            ]
            environment = {"PATH": "/usr/sbin:/usr/bin:/bin", **slurm_box.environment}
            subprocess.run(words, env=environment, check=True, timeout=120, capture_output=True)

    update(n1="a100", n2="h100")
    yield slurm_box
    update(n1="", n2="")


def submitted(cli: Cli, box: Box, tmp_path: Path, *words: str, launcher: str = "srun-gloo") -> Run:
    done = cli(*SUBMIT, "--launcher", launcher, *words, **SHELL, **box.environment)
    assert done.returncode == 0, done.stderr
    (run,) = wait_for(tmp_path / "runs", 1)
    return run


def test_the_system_file_decides_and_the_shell_does_not(cli: Cli, two_kinds: Box, tmp_path: Path) -> None:
    settings = {
        "constraint": "a100|h100",
        "srun_args": "--cpu-freq=high --exact",
        "extra": "--comment='of the site' --nice=1",
        "hint": "nomultithread",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"system.slurm.{key}={value}")]
    asked = ("--set", "system.launch.environment.API_TOKEN.variable=SITE_TOKEN")
    asked += ("--set", f"system.setup=env > {tmp_path}/seen; scontrol -o show job $SLURM_JOB_ID > {tmp_path}/job")
    asked += ("--set", "system.modules=site/1", "--set", "system.modules_init=module() { LOADEDMODULES=$2; }")
    run = submitted(cli, two_kinds, tmp_path, "--nodes", "2", *sets, *asked)
    assert run.state == "valid", run.detail
    assert [rank.host for rank in run.record.ranks] == ["n1", "n2"]
    assert run.record.environment_differences == ()
    # What Slurm took in.
    job = (tmp_path / "job").read_text()
    for words in ("Partition=box", "TimeLimit=00:10:00", "Features=a100|h100", "Comment=of the site", "Nice=1"):
        assert f" {words} " in job
    # What the job got of the shell.
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert not {"OF_THE_SHELL", "NCCL_ALGO", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_EXPORT_ENV"} & set(seen)
    assert (seen["SITE_TOKEN"], seen["SLURM_JOB_ID"] != "4711") == (SECRET, True)
    kept = json.loads(run.folder.submission.read_text())
    assert "SITE_TOKEN" in kept["variables"]
    written = [path for path in run.folder.path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    # What srun got, and what the ranks met of it.
    assert "variable.NCCL_ALGO" not in run.record.environment
    assert run.record.environment["variable.SLURM_DISTRIBUTION"] == "block:block"
    assert "variable.PATH" in run.record.environment
    log = (run.folder.path / f"slurm-{kept['job_id']}.out").read_text()
    assert {"0: ", "1: "} <= {line[:3] for line in log.splitlines()}
    assert " --cpu-freq=high --exact " in run.folder.script.read_text()


ASKED_OF_SLURM = (
    "Partition|NumNodes|NumTasks|CPUs/Task|TimeLimit|Requeue|WorkDir|Command|Nice|OverSubscribe|MinCPUsNode"
)


@pytest.mark.parametrize("kind", ["--pack=points", pytest.param("--one-run-per-job", marks=pytest.mark.nightly)])
def test_sbatch_by_hand_is_the_same_job_as_by_dlbench_submit(
    cli: Cli, slurm_box: Box, tmp_path: Path, kind: str
) -> None:
    """From another folder and shell: what Slurm is asked for, what the ranks get, and where output goes."""
    python = tmp_path / "python"  # stands for that of the nodes
    python.write_text('#!/bin/bash\nfor plan; do :; done\nenv -0 > "${plan%/*}/rank-env"\n')
    python.chmod(0o755)
    asked = (*SUBMIT, "--launcher", "srun-gloo", "--series", "same", "--nodes", "2", "--repeats", "2", kind)
    asked += ("--set", f"system.python={python}", "--set", "system.slurm.extra=hold", "--set", "system.slurm.mem=0")
    outs = (tmp_path / "submitted", tmp_path / """by "hand" #1's 100%j""")
    done = cli(*asked, "--out", outs[0], **SHELL, **slurm_box.environment)
    assert done.returncode == 0, done.stderr
    written = cli(*asked, "--out", outs[1], "--write-only", **slurm_box.environment)
    assert written.returncode == 0, written.stderr
    theirs = {name: value for name, value in SHELL.items() if not name.startswith(("SBATCH_", "SITE_"))}
    for_srun = {"MPI_TYPE": "nosuch", "EXCLUSIVE": "1", "EXPORT_ENV": "NONE", "TIMELIMIT": "nosuch", "STEP_ID": "7"}
    for_srun |= {"CPU_FREQ_REQ": "high", "WORKING_DIR": "/nosuch"}
    theirs |= {"TMPDIR": "/nosuch", **{f"SLURM_{name}": value for name, value in for_srun.items()}}
    shell = {**os.environ, **theirs, **slurm_box.environment}
    typed = subprocess.run(
        ["bash", "-c", written.stdout], cwd="/", env=shell, capture_output=True, text=True, timeout=120, check=True
    )
    jobs = (done.stdout.strip(), typed.stdout.split()[-1])
    own = {**os.environ, **slurm_box.environment}

    def slurm(*words: str) -> str:
        return subprocess.run(words, env=own, capture_output=True, text=True, timeout=120, check=True).stdout

    seen = []
    for out, job in zip(outs, jobs, strict=True):
        told = slurm("scontrol", "show", "job", "--oneliner", job).splitlines()[0].replace(str(out), "OUT")
        found = dict(re.findall(rf" ({ASKED_OF_SLURM})=(\S+)", told))
        seen.append(found)
        assert len(found) == len(ASKED_OF_SLURM.split("|"))
    assert seen[0] == seen[1]
    for out, job in zip(outs, jobs, strict=True):
        slurm("scontrol", "release", job)
        waited = cli("wait", out, "--timeout", "120s", "--every", "1s", **slurm_box.environment)
        assert waited.stdout == "series same: 0 of 2 runs valid, 2 failed\n", waited.stderr
        first = min(out.glob("same-*"))
        assert json.loads((first / "submission.json").read_text())["job_id"].partition("_")[0] == job
        assert [path for path in first.glob("slurm-*.out") if job in path.name]
    environments: list[set[str]] = []
    of_slurm: list[set[str]] = []
    for out in outs:
        pairs = (max(out.glob("same-*")) / "rank-env").read_text().replace(str(out), "OUT").split("\0")[:-1]
        of_slurm.append({pair.partition("=")[0] for pair in pairs if pair.startswith(("SLURM", "SRUN"))})
        environments.append({pair for pair in pairs if not re.match(r"SLURM|SRUN|_=|USER=|LOGNAME=|SHELL=", pair)})
    assert environments[0] == environments[1]
    assert of_slurm[0] == of_slurm[1]
    assert not [pair for pair in environments[1] if pair.startswith(("OF_THE_SHELL", "NCCL_ALGO"))]


def test_ranks_on_a_shared_node_are_shown_the_gpus_of_their_job(cli: Cli, slurm_folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"  # stands for that of the nodes
    python.write_text(
        '#!/bin/bash\nfor plan; do :; done\necho "$CUDA_VISIBLE_DEVICES" >"${plan%/*}/gpus-$SLURM_PROCID"\n'
    )
    python.chmod(0o755)
    asked = {"node.gpus": 4, "node.cores": 2, "python": python}
    sets = [word for key, value in asked.items() for word in ("--set", f"system.{key}={value}")]
    with Box.start(slurm_folder, nodes=1, cpus_per_node=4, has=Equipment(gres=("gpu:4",))) as box:
        words = ("sbatch", "--gres=gpu:2", "--output=/dev/null", "--wrap", "sleep 300")
        subprocess.run(words, env={**os.environ, **box.environment}, cwd=tmp_path, check=True, timeout=120)
        for request in ("gres", "gpus-per-task", "gpus-per-node"):
            out = tmp_path / request
            words = (*SUBMIT, "--launcher", "srun-gloo", "--nodes", "1", "--ranks-per-node", "2", "--out", str(out))
            done = cli(*words, *sets, "--set", f"system.slurm.gpu_request={request}", **box.environment)
            assert done.returncode == 0, done.stderr
            cli("wait", out, "--timeout", "120s", "--every", "1s", **box.environment)
            (run,) = scan(out).runs
            assert [(run.folder.path / f"gpus-{rank}").read_text() for rank in (0, 1)] == ["2,3\n", "2,3\n"], request


def test_ranks_of_another_version_refuse_the_plan(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import dlbench\ndlbench.__version__ = '99.0'\n")
    setup = f"export PYTHONPATH={tmp_path}/other:$PYTHONPATH"
    run = submitted(cli, slurm_box, tmp_path, "--nodes", "1", "--set", f"system.setup={setup}")
    assert run.state == "failed"
    assert f"has dlbench 99.0, but version {dlbench.__version__} made the plan: set system.python" in run.detail
    assert {status.exit_code for status in run.statuses} == {5}


@pytest.mark.nightly
def test_what_setup_sets_reaches_the_ranks_of_mpirun_on_other_nodes(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """Its daemons are a step of srun, which hands on what the script has; -x has the plan's names alone."""
    as_root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    setup = f"export {as_root} NCCL_ALGO=Ring PATH={tmp_path}/bin:$PATH"
    asked = ("--nodes", "2", "--set", f"system.setup={setup}")
    run = submitted(cli, slurm_box, tmp_path, *asked, launcher="mpirun")
    assert run.state == "valid", run.detail
    assert [rank.host for rank in run.record.ranks] == ["n1", "n2"]
    assert run.record.environment["variable.NCCL_ALGO"] == "Ring"
    assert run.record.environment_differences == ()


HAS_NO_APPTAINER = shutil.which("apptainer") is None


def system_with(folder: Path, **container: object) -> Path:
    """The box's system, whose ranks are in a container; its jobs find programs where this test does."""
    content = yaml.safe_load((ROOT / "systems" / "box.yaml").read_text())
    content["slurm"]["export"] = ["PYTHONPATH", "PATH"]
    content["container"] = {"python": sys.executable, "mounts": apptainer_stand_in.mounts(), **container}
    file = folder / "contained.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.skipif(
    HAS_NO_APPTAINER and bool(apptainer_stand_in.lacking()), reason=f"no apptainer, and {apptainer_stand_in.lacking()}"
)
def test_ranks_of_two_nodes_train_in_a_container(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    """In Apptainer, or, where there is none, in a stand-in that takes what `apptainer exec` takes."""
    if HAS_NO_APPTAINER:
        apptainer_stand_in.install(tmp_path)
    image = apptainer_stand_in.packed(apptainer_stand_in.made(tmp_path / "root"))
    done = cli(
        *("submit", "cosmoflow", "--preset", "ci", "--nodes", "2", "--engine", "ddp", "--launcher", "srun-gloo"),
        *("--system", system_with(tmp_path, kind="apptainer", image=str(image)), "--data", "synthetic"),
        *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=2"),
        **{**slurm_box.environment, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (run,) = wait_for(tmp_path / "runs", 1)
    logs = "\n".join(path.read_text(errors="replace") for path in run.folder.path.glob("*.out"))
    assert run.record is not None, f"{run.detail}\n{logs}"
    assert run.state == "valid", run.detail
    record = json.loads((run.folder.path / "record.json").read_text())
    assert record["environment"]["container.image"] == str(image)
    assert record["environment"]["container.sha256"] == hashlib.sha256(image.read_bytes()).hexdigest()
    assert record["environment"]["os"] == "Linux"  # the image has no /etc/os-release
    assert len({rank["host"] for rank in record["ranks"]}) == 2
