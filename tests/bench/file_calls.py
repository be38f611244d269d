"""How often a rank calls the shared file system: strace(1) of every rank of a run on a one-box cluster.

The folders that are shared on a cluster are told apart by their paths: the run's, the checkout, the environment, its
interpreter. Everything that a rank's processes do counts: supervisor, rank, sampler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dlbench import bundled
from dlbench.jobs.box.box import Box, check_requirements
from dlbench.records.folder import RunFolder
from dlbench.records.rows.steps import read_steps
from dlbench.records.scan import Run, scan
from tests.bench.figures import NO_GOAL, Figure
from tests.support.paths import ROOT

BUDGET = 200
"""File calls on shared folders that a rank may make from its start to its first step."""

STRACE = ("strace", "-f", "-qq", "-y", "-ttt", "-e", "trace=%file", "-e", "signal=none", "--seccomp-bpf")

NAME = "file calls of a rank on shared folders"
NODES, RANKS_PER_NODE = 4, 4

_CALL = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\((.*)$")
_FOLDER = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BOUND_S = 400.0


@dataclass(kw_only=True)
class RankCalls:
    """File calls of one rank on shared folders."""

    rank: int
    before: int = 0
    """From its start to its first step."""
    measured: int = 0
    """From the start of its first measured step to the end of its last."""


def calls_in(trace: Path, shared: Sequence[Path]) -> list[tuple[float, str, str]]:
    """Time (seconds since 1970), call and path of each call on one of the folders."""
    roots = tuple(f"{root}/" for root in shared)
    found = []
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        told = _CALL.match(line)
        if told is None:
            continue
        for path in _paths(told[3].partition(", [")[0] if told[2].startswith("execve") else told[3]):
            if f"{path}/".startswith(roots):
                found.append((float(told[1]), told[2], path))
                break
    return found


def _paths(arguments: str) -> Iterable[str]:
    """Absolute paths of a call's arguments; a relative one belongs to the folder that stands before it."""
    folder = _FOLDER.search(arguments)
    texts = _TEXT.findall(arguments)
    for text in texts or [""]:
        yield text if text.startswith("/") else os.path.normpath(f"{folder[1] if folder else ''}/{text}")


def periods(run: Run, rank: int) -> tuple[float, float, float]:
    """When a rank's first step began, and its first measured one, and when the last ended: seconds since 1970."""
    # The trace has the clock of the day, steps have CLOCK_MONOTONIC; one machine has all nodes.
    offset_s = time.time() - time.monotonic()
    steps = read_steps(RunFolder(run.folder.path).steps(rank)).steps
    measured = steps[steps["warmup"] == 0]
    end_ns = measured["start_ns"][-1] + measured["step_ns"][-1]
    first, begin, end = (float(ns) / 1e9 + offset_s for ns in (steps["start_ns"][0], measured["start_ns"][0], end_ns))
    return first, begin, end


def calls_of(run: Run, rank: int, trace: Path, shared: Sequence[Path]) -> RankCalls:
    """The calls of one rank of a run, by the time of its steps."""
    first, begin, end = periods(run, rank)
    found = RankCalls(rank=rank)
    for at, _call, _path in calls_in(trace, shared):
        if at < first:
            found.before += 1
        elif begin <= at < end:
            found.measured += 1
    return found


def traced_system(folder: Path) -> Path:
    """A box's system file whose ranks are traced, into `folder`."""
    content = yaml.safe_load((bundled.folder("systems") / "box.yaml").read_text(encoding="utf-8"))
    # Before Python stands a shell that knows the rank; only the ranks' srun has a Python among its words.
    shell = f'bash -c \'exec {" ".join(STRACE)} -o "$0/$SLURM_PROCID" "$@"\' {folder}'
    before = f'for word in "$@"; do case $word in */bin/python*) words+=({shell}) ;; esac; words+=("$word"); done'
    content["setup"] = [f'srun() {{ local words=() word; {before}; command srun "${{words[@]}}"; }}']
    content["node"] |= {"ranks": RANKS_PER_NODE, "cores": RANKS_PER_NODE}
    content["name"] = "traced"
    path = folder / "traced.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def measure(folder: Path, environment: Mapping[str, str]) -> list[RankCalls]:
    """Submits a run of CosmoFlow to a box, and counts.

    `folder`: for the run and its traces; shared, as the nodes see it. `environment`: what a shell needs to use the box.
    """
    traces = folder / "traces"
    traces.mkdir()
    system = traced_system(traces)
    out = folder / "runs"
    words = ("submit", "cosmoflow", "--preset", "ci", "--system", str(system), "--nodes", str(NODES))
    words += ("--launcher", "srun-gloo", "--engine", "ddp", "--data", "synthetic", "--out", str(out))
    words += ("--set", "measure.warmup_steps=2", "--set", "measure.measured_steps=20")
    words += ("--set", "train.batch_per_rank=1")
    subprocess.run(
        [sys.executable, "-P", "-m", "dlbench", *words], env={**os.environ, **environment}, check=True, timeout=120
    )
    run = _ended(out)
    shared = shared_folders(folder)
    return [calls_of(run, rank, traces / str(rank), shared) for rank in range(NODES * RANKS_PER_NODE)]


def figures() -> Iterator[Figure]:
    """File calls of each of 16 ranks on 4 nodes, which load Python from where it is installed."""
    missing = [*check_requirements(), *([] if shutil.which("strace") else ["strace is not installed"])]
    if missing:
        yield Figure(name=NAME, value=None, unit="calls", goal=NO_GOAL[0], reason="; ".join(missing))
        return
    with tempfile.TemporaryDirectory(prefix="dlbench-calls-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "box").mkdir()
        with Box.start(folder / "box", nodes=NODES, cpus_per_node=RANKS_PER_NODE) as box:
            ranks = measure(folder, box.environment)
            names = [path.name for path in (folder / "runs").glob("*/*")]
    most = max(rank.before for rank in ranks)
    reason = f"the most of {len(ranks)} ranks on {NODES} nodes, nearly all by loading Python"
    yield Figure(name=NAME, value=most, unit="calls", n=len(ranks), goal=NO_GOAL[0], reason=reason)
    of_ranks = [name for name in names if name.startswith("rank-")]
    yield Figure(
        name="files of a run that are one for each rank",
        value=len(of_ranks),
        unit="files",
        goal="0",
        met=not of_ranks,
        reason=f"{len(names)} files of {len(ranks)} ranks on {NODES} nodes, "
        f"{sum(name.startswith('node-') for name in names)} of them by node",
    )
    measured = sum(rank.measured for rank in ranks)
    yield Figure(name=f"{NAME}, in measured steps", value=measured, unit="calls", goal="0", met=measured == 0)


def shared_folders(folder: Path) -> list[Path]:
    """What lies on the shared file system of a cluster: runs, checkout, environment, interpreter."""
    base = Path(sys.base_prefix)
    return [folder / "runs", ROOT, Path(sys.prefix), *([base] if base != Path("/usr") else [])]


def _ended(out: Path) -> Run:
    """The one run of a folder, when it has its record.

    Raises:
        RuntimeError: it failed, or did not end in time.
    """
    deadline = time.monotonic() + _BOUND_S
    while time.monotonic() < deadline:
        (run,) = scan(out).runs or [None]
        if run is not None and run.state != "incomplete":
            if run.record is not None:
                return run
            break
        time.sleep(0.5)
    said = "\n".join(path.read_text(errors="replace")[-2000:] for path in out.rglob("slurm-*.out"))
    raise RuntimeError(f"no record: {said}")
