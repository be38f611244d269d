"""Training out of core that cannot be: whole ranks end with one line and the right code, and leave nothing behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlbench.errors import ExitCode
from dlbench.jobs.scripts.launch import local_environments, resolve
from dlbench.records.folder import RunFolder, create, prepare_output
from dlbench.records.status import read_statuses
from tests.support import forked_runs
from tests.support.forked_runs import planned
from tests.support.forks import run_ranks

SHORT = (
    *("cosmoflow", "--preset", "ci", "--engine", "single", "--ranks", "1", "--set", "train.batch_per_rank=2"),
    # Endless: a rank that is not refused is killed.
    *("--set", "measure.warmup_steps=1", "--set", "measure.measured_steps=100000"),
    *("--set", "layout.cores_per_rank=1", "--set", "system.launch.pin=false"),
)
STREAMED = ("--set", "train.swap=streamed")


def start(
    tmp_path: Path, *words: str | Path, meanwhile: Callable[[RunFolder], None] = lambda _: None
) -> tuple[int, str, RunFolder]:
    """Exit code and output of the one rank of a run, and its folder; `meanwhile` is called while it runs."""
    (plan,), out = planned(*SHORT, *words, "--out", tmp_path / "runs")
    folder = create(prepare_output(out), plan)
    environments = [resolve(one) for one in local_environments(plan, secrets.token_hex(8))]
    logs = tmp_path / "logs"
    logs.mkdir()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_ranks, forked_runs.rank, [str(folder.plan)], environments, logs)
        meanwhile(folder)
        (code,), (said,) = ended.result()
    assert not folder.record.exists()
    return code, said, folder


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own, or the test is skipped."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "swap", folder], check=False).returncode:
        pytest.skip("a file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_capacity_that_is_too_small_ends_with_the_smallest_that_would_do(tmp_path: Path) -> None:
    where = ("--set", f"train.memory.swap_folder={tmp_path}", "--set", "train.swap=planned")
    code, said, _ = start(tmp_path, *where, "--set", "train.memory.capacity=1MiB")
    assert code == ExitCode.ENVIRONMENT
    (line,) = [line for line in said.splitlines() if line.startswith("dlbench: error:")]
    assert "does not fit" in line
    assert "needs at least" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "runs"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(None, "no such file or directory"), ("ro", "is not writable"), ("size=1m", "1 mib are free")],
)
def test_a_swap_folder_that_cannot_be_used_is_named(options: str | None, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "swap"
    if options is None:
        code, said, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={folder}")
    else:
        with tmpfs(folder, options):
            code, said, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={folder}")
            assert list(folder.iterdir()) == []
    assert code == ExitCode.ENVIRONMENT
    (line,) = [line for line in said.splitlines() if line.startswith("dlbench: error:")]
    assert str(folder) in line
    assert words in line.lower()


def test_a_rank_that_is_killed_while_it_swaps_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    processes: list[int] = []

    def kill(folder: RunFolder) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            told = next(iter(read_statuses(folder)), None)
            if told is not None and told.stage == "measuring":
                break
            time.sleep(0.02)
        else:
            pytest.fail("the rank never measured")
        rank = told.pid
        processes.extend([rank, *_children(rank)])
        assert _has_nameless_file(rank, swap)
        os.kill(rank, signal.SIGKILL)

    code, _, _ = start(tmp_path, *STREAMED, "--set", f"train.memory.swap_folder={swap}", meanwhile=kill)
    assert code == -signal.SIGKILL
    assert list(swap.iterdir()) == []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in processes):
        time.sleep(0.05)
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


def _children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found]


def _has_nameless_file(process: int, folder: Path) -> bool:
    """Whether a process holds a file of a folder that has no name there."""
    links = [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()]
    return any(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)
