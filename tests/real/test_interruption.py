"""An orderly end: SIGUSR1 to one rank, all end after the same step, a checkpoint, exit 75."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlbench.errors import ExitCode
from dlbench.records.scan import Run, scan

BOUND_S = 240


def begun(out: Path, *words: str, engine: str = "ddp") -> subprocess.Popen[str]:
    """`dlbench run` with two ranks that would train for long; returns when a measured step has begun."""
    command = [sys.executable, "-P", "-m", "dlbench", "run", "resnet50", "--preset", "ci", "--ranks", "2"]
    command += ["--out", str(out), "--data", "synthetic", "--engine", engine]
    command += ["--set", "measure.measured_steps=1000", "--set", "measure.warmup_steps=1"]
    command += words
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + BOUND_S
    while not any("measuring" in path.read_text() for path in out.glob("*/node-*.status.json")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def only(out: Path) -> Run:
    found = scan(out)
    assert not found.problems
    return found.runs[0]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_sigusr1_to_one_rank_ends_all_after_one_step_with_a_checkpoint(tmp_path: Path, engine: str) -> None:
    process = begun(tmp_path, "--set", "checkpoint.every_steps=3", engine=engine)
    try:
        second = next(status for status in only(tmp_path).statuses if status.rank == 1)
        os.kill(second.pid, signal.SIGUSR1)
        said = process.communicate(timeout=BOUND_S)[1]
    finally:
        process.kill()
    assert process.returncode == ExitCode.REQUEUE, said
    run = only(tmp_path)
    assert run.state == "interrupted"
    step = run.interrupted.step
    assert run.interrupted.checkpoint == f"step-{step:08d}.safetensors"
    assert (run.folder.checkpoints / run.interrupted.checkpoint).exists()
    assert f"interrupted after step {step} of attempt 1" in said
    assert [status.exit_code for status in run.statuses] == [75, 75]
