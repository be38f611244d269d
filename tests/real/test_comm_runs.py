"""Real ranks of the collective benchmark: what a run leaves behind, and what becomes of one that loses a rank."""

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

from dlbench.records.comm import CommRecord, CommRun, scan_comm
from tests.conftest import Cli
from tests.real.test_watched_runs import is_alive
from tests.slurm_box.box import Box

pytestmark = pytest.mark.slow

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
BOUND_S = 240


def only_run(root: Path) -> CommRun:
    found = scan_comm(root)
    assert found.problems == []
    (run,) = found.runs
    return run


def record_of(run: CommRun) -> CommRecord:
    assert run.record is not None, run.detail
    return run.record


def need_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: install Open MPI")


def test_two_ranks_of_this_machine(cli: Cli, tmp_path: Path) -> None:
    asked = ("--algorithms", "ring,direct", "--backends", "gloo", "--sizes", "1KiB,64KiB", "--iterations", "3")
    done = cli("comm", "run", "--ranks", "2", *asked, "--repeats", "2")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-1].endswith("; next: dlbench comm report runs")
    assert done.stderr.splitlines()[-1].startswith("2 of 2 runs valid, in ")
    found = scan_comm(tmp_path / "runs")
    assert found.problems == []
    assert [run.plan.series.repeat for run in found.runs] == [0, 1]
    for run in found.runs:
        record = record_of(run)
        assert (run.state, run.detail) == ("valid", "")
        assert len(record.hosts) == 2
        assert record.not_measured == ()
        assert len(record.points) == 2 * 3
        assert {point.correct for point in record.points} == {True}
        assert [status.stage for status in run.statuses] == ["done", "done"]
        assert [status.exit_code for status in run.statuses] == [0, 0]
        assert not (run.folder.path / "record.json").exists()
    assert cli("status").stdout.splitlines()[-1] == "2 runs, 2 valid"


def test_mpirun_carries_messages_over_mpi(cli: Cli, tmp_path: Path) -> None:
    need_mpirun()
    asked = ("--transport", "mpi", "--algorithms", "ring,leader", "--group-size", "2", "--backends", "mpi,gloo")
    done = cli(
        *("comm", "run", "--ranks", "4", "--launcher", "mpirun", *asked, "--sizes", "1KiB,64KiB", "--iterations", "3"),
        **AS_ROOT,
        SLURM_TOPOLOGY_ADDR="root.leaf1.n3",
        SLURM_TOPOLOGY_ADDR_PATTERN="switch.switch.node",
    )
    assert done.returncode == 0, done.stderr
    record = record_of(only_run(tmp_path / "runs"))
    assert record.switches == ("root.leaf1",) * 4
    assert {(p.algorithm, p.carrier) for p in record.points} == {
        ("ring", "mpi"),
        ("leader", "mpi"),
        # In place, and into a second buffer as OSU's benchmark does.
        ("library-in-place", "mpi"),
        ("library-out-of-place", "mpi"),
        ("library", "torch-gloo"),
    }
    assert {p.correct for p in record.points} == {True}
    assert record.group_size == 2
    # Only the two leaders speak across groups, and each sends half a vector twice.
    (leader,) = [p for p in record.points if p.algorithm == "leader" and p.num_bytes == 65536]
    assert sorted(leader.bytes_across) == [0, 0, 65536, 65536]


class Endless:
    """A run of two ranks in the background that would take hours, for doing harm to."""

    def __init__(self, folder: Path, *extra: str) -> None:
        command = [sys.executable, "-m", "dlbench", "comm", "run", "--ranks", "2", "--backends", "none", *extra]
        command += ["--algorithms", "ring", "--sizes", "1KiB", "--iterations", "100000000", "--timeout", "20"]
        self.root = folder / "runs"
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **AS_ROOT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_measuring(self) -> list[int]:
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            runs = scan_comm(self.root).runs if self.root.is_dir() else []
            if runs and [status.stage for status in runs[0].statuses] == ["measuring", "measuring"]:
                return [status.pid for status in runs[0].statuses]
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before it measured: {self.end()}")
            time.sleep(0.1)
        pytest.fail("the run never came to measure")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, errors

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # which ends the ranks, too
            self.process.communicate(timeout=BOUND_S)


@pytest.mark.parametrize("launcher", ["local", pytest.param("mpirun", marks=pytest.mark.nightly)])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, launcher: str) -> None:
    if launcher == "mpirun":
        need_mpirun()
    extra = () if launcher == "local" else ("--launcher", "mpirun", "--transport", "mpi")
    with Endless(tmp_path, *extra) as running:
        survivor, victim = running.wait_until_measuring()
        os.kill(victim, signal.SIGKILL)
        code, errors = running.end()
    assert code == 3
    assert "rank 1 was the first to end, by signal SIGKILL" in errors
    assert "Traceback" not in errors
    assert not is_alive(survivor)
    run = only_run(running.root)
    assert run.state == "failed"
    assert "rank 1 was the first to end, by signal SIGKILL" in run.detail
    assert run.record is None


# A run of training is interrupted by SIGINT.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_interrupting_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with Endless(tmp_path) as running:
        pids = running.wait_until_measuring()
        running.process.send_signal(number)
        code, errors = running.end()
    assert code == 130
    assert "Traceback" not in errors
    assert not any(is_alive(pid) for pid in pids)
    assert "interrupted" in only_run(running.root).detail


@pytest.mark.slurm
def test_a_job_of_two_nodes(cli: Cli, slurm_box: Box, tmp_path: Path) -> None:
    submitted = cli(
        *("comm", "submit", "--system", "box", "--nodes", "2", "--ranks-per-node", "2", "--launcher", "srun-gloo"),
        *("--algorithms", "ring,hierarchical", "--backends", "gloo", "--sizes", "4KiB", "--iterations", "3"),
        # Where others spin, processes may wait for a core for the default minute: Linux 6.18 has noted 59 s.
        *("--timeout", "240"),
        **slurm_box.environment,
    )
    assert submitted.returncode == 0, submitted.stderr
    deadline = time.monotonic() + 480
    run = only_run(tmp_path / "runs")
    while time.monotonic() < deadline and (run.state == "incomplete" or any(s.exit_code is None for s in run.statuses)):
        time.sleep(0.5)
        run = only_run(tmp_path / "runs")
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in run.folder.path.glob("slurm-*.out"))
    assert run.state == "valid", f"{run.detail}\n{logs}"
    record = record_of(run)
    assert record.hosts == ("n1", "n1", "n2", "n2")
    assert record.group_size == 2
    (hierarchical,) = [p for p in record.points if p.algorithm == "hierarchical"]
    # Each rank holds half of the sum of its node and exchanges it with one rank of the other node.
    assert hierarchical.bytes_across == (2048, 2048, 2048, 2048)
    submission = json.loads(run.folder.submission.read_text())
    assert submission["job_id"] == submitted.stdout.strip()
    assert "1 run, 1 valid" in cli("status", **slurm_box.environment).stdout
