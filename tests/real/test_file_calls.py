"""How often ranks call the file system that their run's folder is on, counted by strace(1)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.file_calls import STRACE, calls_in, periods
from tests.support.forked_runs import run_forked
from tests.support.forks import start_forks

MOST_CALLS = 100  # Of both ranks on their run's folder, from their start to their first step.
SHORT = ("--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=40", "--set", "train.batch_per_rank=1")


@contextmanager
def traced(process: int, out: Path) -> Iterator[None]:
    tracer = subprocess.Popen([*STRACE, "-o", str(out), "-p", str(process)], stderr=subprocess.DEVNULL)
    try:
        status = Path(f"/proc/{process}/status")
        deadline = time.monotonic() + 60
        while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
            if tracer.poll() is not None or time.monotonic() > deadline:
                pytest.skip("no process may be traced here")
            time.sleep(0.01)
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(timeout=60)


@pytest.mark.slow
def test_ranks_leave_the_shared_folder_alone_while_they_are_measured(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    out = tmp_path / "runs"
    with traced(start_forks(), tmp_path / "trace"):
        words = ("cosmoflow", "--preset", "ci", "--ranks", "2", "--engine", "ddp", "--data", "synthetic", "--out", out)
        (run,) = run_forked(*words, *SHORT)
    # Of both ranks together, but for loading Python.
    calls = calls_in(tmp_path / "trace", [run.folder.path])
    first, begin, end = periods(run, 0)
    assert 0 < sum(at < first for at, _, _ in calls) <= MOST_CALLS
    # The sampler opens its file once, when it has started: ranks that import nothing may be measuring by then.
    assert [call for call in calls if begin <= call[0] < end and not call[2].endswith(".samples")] == []
    assert sorted(path.name for path in run.folder.path.glob("*.status.json")) == ["node-0000.status.json"]
