"""What the default watching costs a step: the sampler is stopped and continued by turns while a run goes on.

Measured steps carry no hooks; all that watching does during them is the sampler. Stopped and continued every few
seconds (SIGSTOP, SIGCONT), it is compared with itself in one run, block by block, which no drift between runs can hide.
The steps of a small machine scatter by far more than a sample a second costs. So samples are taken `FASTER` times as
often, and what they cost is divided by that: a sample costs the same however soon the next one follows.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.figures import Figure, median_interval
from dlbench.records.rows.steps import read_steps

WORKLOADS = ("resnet50", "bert", "cosmoflow")
BLOCK_S = 5.0
BLOCKS = 40
"""Half of them watched."""
FASTER = 10
"""Samples a second, where the default is one."""

Block = tuple[bool, int, int]
"""Whether the sampler ran, and from when to when, monotonic nanoseconds."""


def figures() -> Iterator[Figure]:
    """Overhead of each workload."""
    for workload in WORKLOADS:
        yield from _by_blocks(workload)


def _by_blocks(workload: str) -> Iterator[Figure]:
    about = {
        "name": f"default watching, {workload} ci, 2 ranks, ddp, synthetic data",
        "unit": "% of step time",
        "goal": "upper end of the interval at most 1",
    }
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "runs"
        process = subprocess.Popen(_command(workload, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            blocks = _take_turns(process, out)
        finally:
            # The run has shown what it can; it is ended as Ctrl-C would.
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        if not blocks:
            yield Figure(**about, value=None, reason="the run ended before enough was seen")
            return
        (folder,) = (path for path in out.iterdir() if path.is_dir())
        ratios = _ratios(folder / "node-0000.steps", blocks)
        size = (folder / "node-0000.steps").stat().st_size / len(read_steps(folder / "node-0000.steps").steps)
        sampled = (folder / "node-0000.samples").stat().st_size
    value, low, high = (100 * (one - 1) / FASTER for one in median_interval(ratios))
    yield Figure(
        **about, value=value, low=low, high=high, n=len(ratios), met=high <= 1,
        reason=f"pairs of neighbouring blocks of {BLOCK_S:g} s; {FASTER} samples per second, divided by {FASTER}",
    )  # fmt: skip
    yield Figure(name=f"step file, {workload} ci", value=size, unit="bytes per step and rank", goal="measured")
    yield Figure(
        name=f"samples, {workload} ci", value=sampled / (BLOCKS * BLOCK_S / 2) / FASTER,
        unit="bytes per sample and node", goal="measured",
    )  # fmt: skip


def _command(workload: str, out: Path) -> list[str]:
    command = [sys.executable, "-m", "dlbench", "run", workload, "--preset", "ci", "--ranks", "2", "--engine", "ddp"]
    command += ["--data", "synthetic", "--set", "layout.cores_per_rank=1", "--set", "measure.measured_steps=100000"]
    command += ["--set", "measure.warmup_steps=4", "--set", f"watch.period_s={1 / FASTER}"]
    return [*command, "--out", str(out), "--no-progress"]


def _take_turns(process: subprocess.Popen[bytes], out: Path) -> list[Block]:
    """Waits for the measured steps, then stops and continues the sampler."""
    deadline = time.monotonic() + 180
    while not any(_stage(path) == "measuring" for path in out.glob("*/node-0000.status.json")):
        if time.monotonic() > deadline or process.poll() is not None:
            return []
        time.sleep(0.2)
    (sampler,) = (
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "dlbench.node.watching.sampler" in child.cmdline()
    )
    blocks = []
    try:
        for number in range(BLOCKS):
            # On, off, off, on: a drift falls on both alike.
            watched = number % 4 in (0, 3)
            sampler.resume() if watched else sampler.suspend()
            start = time.monotonic_ns()
            time.sleep(BLOCK_S)
            blocks.append((watched, start, time.monotonic_ns()))
    finally:
        sampler.resume()  # a stopped process would outlive the run
    return blocks if process.poll() is None else []


def _stage(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["ranks"][0]["stage"])
    except (OSError, ValueError):  # it is replaced at this moment
        return ""


def _ratios(path: Path, blocks: list[Block]) -> list[float]:
    """Mean step of watched blocks over that of their unwatched neighbours; steps across a border count nowhere."""
    steps = read_steps(path).steps
    start, end = steps["start_ns"], steps["start_ns"] + steps["step_ns"]
    means = []
    for watched, first, last in blocks:
        inside = steps["step_ns"][(start >= first) & (end <= last)]
        means.append((watched, statistics.fmean(inside.tolist()) if len(inside) else None))
    found = []
    for (one, a), (_, b) in zip(means[::2], means[1::2], strict=True):
        if a is not None and b is not None:
            found.append(a / b if one else b / a)
    return found
