"""The same plan through a real Slurm: submitted, waited for, collected, reported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlbench.analysis.measures import measure
from dlbench.datasets.making.catalogue import DatasetRequest, plan_build
from dlbench.datasets.making.production import produce
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from dlbench.records.status import read_statuses
from tests.conftest import Cli
from tests.slurm_box.box import Box
from tests.support.horovod import require_horovod_over_mpi
from tests.support.leftovers import Leftovers
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
