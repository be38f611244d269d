"""How long one waits: from `dlbench run` to the first measured step, between the runs of a series, for Horovod's build.

`import torch` alone stands beside, as no rank can start faster than that. Bytecode is kept, as it is outside of tests.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure, median_interval
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import scan

WORKLOADS = ("resnet50", "bert", "cosmoflow")
REPEATS, RUNS = 3, 6
GOAL_S, GOAL_IMPORT_S, GOAL_BUILD_S = 4.0, 1.2, 120.0
BUILD = "wait: Horovod's build for CPUs, dlbench setup horovod without a kept wheel"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
RANK = (  # As a rank does: nothing is collected meanwhile, nor at the end.
    "import gc; gc.disable(); "
    "import dlbench.node.__main__, torch, dlbench.node.devices, dlbench.node.sync.build_engine, "
    "dlbench.node.training.run, dlbench.node.sync.horovod.engine, horovod.torch; gc.freeze()"
)


def _python(*words: str, environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """Seconds and CPU seconds of a Python with these words, and these variables besides."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    variables = ENVIRONMENT | dict(environment or {})
    subprocess.run([sys.executable, "-W", "ignore", *words], env=variables, check=True, capture_output=True)
    took_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run(workload: str, repeats: int, folder: str) -> list[tuple[float, float, float]]:
    """For each run in order: start of its first step and of its first measured one, end of its last, seconds after
    `dlbench run`.
    """
    began = time.monotonic_ns()
    words = ["-m", "dlbench", "run", workload, "--preset", "ci", "--data", "synthetic", "--out", folder]
    _python(*words, "--repeats", str(repeats), "--set", "measure.measured_steps=2", "--no-progress")
    times = []
    for run in scan(Path(folder)).runs:
        steps = read_steps(run.folder.steps(0))
        ended = int(steps.steps["start_ns"][-1] + steps.steps["step_ns"][-1])
        starts = (int(rows["start_ns"][0]) for rows in (steps.steps, steps.measured))
        first, measured, last = ((at - began) / 1e9 for at in (*starts, ended))
        times.append((first, measured, last))
    return sorted(times)


def _figure(name: str, values: list[float], goal: float | None, why_none: str = "the limit of the next") -> Figure:
    value, low, high = median_interval(values)
    met = None if goal is None or low <= goal < high else high <= goal
    text = f"none: {why_none}" if goal is None else f"at most {goal:g}"
    return Figure(name=name, value=value, low=low, high=high, n=len(values), unit="s", goal=text, met=met)


def first_step() -> Iterator[Figure]:
    """Seconds from `dlbench run` to the first measured step, warm-up included; and what of it is importing."""
    waits: dict[str, list[tuple[float, float, float]]] = {workload: [] for workload in WORKLOADS}
    torch_alone, torch_cpu, rank_cpu = [], [], []
    _python("-c", RANK)  # bytecode, and the page cache
    for _ in range(REPEATS):
        for workload in WORKLOADS:
            with tempfile.TemporaryDirectory() as folder:
                waits[workload].append(_run(workload, 1, folder)[0])
        wall, cpu = _python("-c", "import torch")
        torch_alone.append(wall)
        torch_cpu.append(cpu)
        rank_cpu.append(_python("-c", RANK)[1])
    yield _figure("wait: import torch alone", torch_alone, None)
    yield _figure("wait: import torch alone, CPU time", torch_cpu, None)
    yield _figure("wait: all that a rank of Horovod imports, CPU time", rank_cpu, GOAL_IMPORT_S)
    for workload, times in waits.items():
        measured = [at for _, at, _ in times]
        yield _figure(f"wait: dlbench run {workload} to the first measured step, ci, 1 rank", measured, GOAL_S)
        warmup = [at - first for first, at, _ in times]
        yield _figure(f"wait: of it, {workload}'s warm-up steps", warmup, None, "part of the protocol")


def series() -> Iterator[Figure]:
    """From the last step of a run to the first measured one of the next."""
    with tempfile.TemporaryDirectory() as folder:
        times = _run("bert", RUNS, folder)
    gaps = [begun - ended for (_, begun, _), (_, _, ended) in zip(times[1:], times, strict=False)]
    yield _figure(f"wait: between the runs of a series of {RUNS}, BERT ci, 1 rank", gaps, GOAL_S)


def build() -> Iterator[Figure]:
    """Seconds of `dlbench setup horovod` without a kept wheel; what it fetches included."""
    if importlib.util.find_spec("horovod") is None:  # This Python's is built anew, and stays.
        yield Figure(name=BUILD, value=None, unit="s", goal=f"at most {GOAL_BUILD_S:g}", reason="no Horovod here")
        return
    with tempfile.TemporaryDirectory() as cache:
        took, cpu = _python("-m", "dlbench", "setup", "horovod", "--rebuild", environment={"DLBENCH_CACHE": cache})
    yield replace(_figure(BUILD, [took], GOAL_BUILD_S), low=None, high=None, reason=f"{cpu:.0f} s of the CPU")


def figures() -> Iterator[Figure]:
    """All of it."""
    yield from first_step()
    yield from series()
    yield from build()
