"""Real ranks that fail: the cause is told first, and the exit code does not depend on which rank it met."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlbench.node.data.sharding import ShardedOrder
from dlbench.records.scan import Run, scan
from tests.conftest import Cli
from tests.support.datasets import encode

BATCH = 2
SHORT = (
    *("--preset", "ci", "--ranks", "2", "--no-progress", "--set", "layout.cores_per_rank=1"),
    *("--set", "measure.warmup_steps=1", "--set", f"train.batch_per_rank={BATCH}"),
)
DDP = (*SHORT, "--engine", "ddp")
ENDLESS = ("--set", "measure.measured_steps=100000", "--set", "measure.stall_timeout_s=20")


def images(folder: Path, bad_of: int | None = None) -> Path:
    """Two classes of JPEGs; one that rank `bad_of` of two meets in its third step is cut off."""
    for label in range(2):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(16):
            (folder / f"class{label}" / f"{number:02}.jpg").write_bytes(encode((64, 64, 3), seed=100 * label + number))
    if bad_of is not None:
        order = ShardedOrder(32, batch_size=BATCH, rank=bad_of, world_size=2, seed=0)
        batches = order.batches()
        third = [next(batches) for _ in range(3)][2]
        path = sorted(folder.rglob("*.jpg"))[third[0][1]]
        path.write_bytes(path.read_bytes()[:200])
    return folder


def only_run(folder: Path) -> Run:
    (found,) = scan(folder).runs
    return found


def started(root: Path, rank: int, stage: str = "measuring") -> int:
    """Process id of a rank, once it measures."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for run in scan(root).runs if root.is_dir() else []:
            for status in run.statuses:
                if status.rank == rank and status.stage == stage:
                    return status.pid
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} never came to {stage}")


@contextmanager
def running(tmp_path: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "dlbench", "run", *map(str, words), "--out", str(tmp_path / "runs")]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        with process:
            yield process
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("bad_of", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_bad_sample_is_told_alike_whichever_rank_meets_it(cli: Cli, tmp_path: Path, bad_of: int) -> None:
    data = images(tmp_path / "images", bad_of)
    done = cli("run", "resnet50", *DDP, "--data", data, "--repeats", "2", "--set", "measure.measured_steps=4")
    # Wrong data is wrong for the second run, too.
    assert done.returncode == 2, done.stderr
    run = only_run(tmp_path / "runs")
    assert run.detail.startswith(f"rank {bad_of} on ")
    assert "failed at step 2: " in run.detail
    assert ".jpg" in run.detail
    assert run.detail.endswith("; 1 other rank ended with it")
    assert run.detail in done.stderr
    (other,) = (status for status in run.statuses if status.rank != bad_of)
    assert (other.failure, other.exit_code) == ("peer", 3)
    assert len(other.reason) < 300  # one line of Gloo's, of two that it has
    said = run.folder.log(other.rank).read_text()  # and there all that torch said
    assert "Connection closed by peer" in said or "Connection reset by peer" in said


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stopped_rank_has_not_vanished(tmp_path: Path) -> None:
    with running(tmp_path, "bert", *DDP, "--data", "synthetic", *ENDLESS) as process:
        os.kill(started(tmp_path / "runs", 1), signal.SIGSTOP)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 124
    assert "rank 1 on " in errors
    assert "was stopped (state T" in errors
    assert "vanished" not in errors


MEMORY_V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_told_with_the_limit(cli: Cli, tmp_path: Path) -> None:
    group = MEMORY_V1 / f"dlbench-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError:
        pytest.skip("no cgroup of version 1 can be made here")
    try:
        words = ("bert", *SHORT[:-2], "--engine", "ddp", "--data", "synthetic", "--set", "train.batch_per_rank=256")
        command = [sys.executable, "-m", "dlbench", "run", *words, "--out", str(tmp_path / "runs")]
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *command], capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                group.rmdir()
                break
            except OSError:  # its processes are still ending
                time.sleep(0.2)
    assert done.returncode == 3
    assert "out-of-memory killer" in done.stderr
    assert "the cgroup's limit is 700 MiB (memory.limit_in_bytes)" in done.stderr


def in_namespace(kind: str, script: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `dlbench run ...` after a bash script in a namespace of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", kind, "true"], check=False).returncode != 0:
        pytest.skip(f"unshare {kind} is not possible here")
    command = [sys.executable, "-m", "dlbench", "run", *map(str, words), "--out", str(cwd / "runs")]
    return subprocess.run(
        ["unshare", kind, "bash", "-euc", f'{script}; "$@"', "bash", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


SMALL = "mount -t tmpfs -o size={size} none /dev/shm"


MEASURING = "grep -qs measuring runs/*/node-0000.status.json"
OURS = "[ $p/cwd -ef . ] && grep -qs ^python $p/comm"
LOADERS = f"for p in /proc/[0-9]*; do {OURS} && grep -qs forkserver $p/cmdline && break; done"


def filled(path: str, when: str = MEASURING) -> str:
    """In the background, for two minutes at most: once that is so, fills the disk of this path."""
    wait = f"for i in {{1..12000}}; do {when} && break; sleep 0.01; done"
    # Again and again: what others set free meanwhile.
    fill = f"for i in {{1..6000}}; do cat /dev/zero >> {path}; sleep 0.01; done"
    return f"({wait}; {fill}) > /dev/null 2>&1 & true"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        SMALL.format(size="256k"),
        # When loader processes start: later they need no more, as batches use the memory of earlier ones.
        f"{SMALL.format(size='8m')}; {filled('/dev/shm/x', LOADERS)}",
    ],
    ids=["small", "full"],
)
def test_shared_memory_that_is_too_small_ends_a_run_at_once(tmp_path: Path, script: str) -> None:
    data = images(tmp_path / "images")
    loaders = ("--set", "data.loader_workers=1", "--set", "measure.measured_steps=100000")
    began = time.monotonic()
    done = in_namespace("-m", script, "resnet50", *DDP, *loaders, "--data", data, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "/dev/shm" in done.stderr
    assert "make it larger (containers: --shm-size)" in done.stderr
    assert time.monotonic() - began < 120  # the stall limit is 600


KILL_ALL = f"for p in /proc/[0-9]*; do {OURS} && kill -9 ${{p#/proc/}}; done"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0.0, 0.2, 1.0, 5.0])
def test_all_killed_at_once_leave_nothing_in_shared_memory(tmp_path: Path, wait_s: float) -> None:
    """Launcher, supervisors, ranks, loader processes and resource trackers, some time after the first loader."""
    data = images(tmp_path / "images")
    await_loader = f"for i in {{1..12000}}; do {LOADERS} && break; sleep 0.01; done"
    kill = f"(set +e; {await_loader}; sleep {wait_s}; for i in 1 2 3; do {KILL_ALL}; done) > /dev/null 2>&1 &"
    script = f"{SMALL.format(size='256m')}; {kill} trap 'wait; ls /dev/shm > left' EXIT"
    loaders = ("--set", "data.loader_workers=2", "--set", "measure.measured_steps=100000")
    done = in_namespace("-m", script, "resnet50", *DDP, *loaders, "--data", data, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert (tmp_path / "left").read_text() == ""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_full_disk_in_mid_run_is_told_with_the_rank_and_the_file(tmp_path: Path) -> None:
    script = (
        f"mkdir runs; mount -t tmpfs -o size=400k none runs; {filled('runs/x')}; trap 'cp -r runs kept; rm kept/x' EXIT"
    )
    words = ("bert", *DDP, "--data", "synthetic", "--set", "measure.measured_steps=100000")
    done = in_namespace("-m", script, *words, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "No space left on device" in done.stderr
    run = only_run(tmp_path / "kept")
    assert run.state == "failed"
    assert run.detail.startswith("rank ")
    assert "No space left on device" in run.detail
