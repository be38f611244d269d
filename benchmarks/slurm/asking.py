"""Status of 1,000 jobs: one squeue and at most one sacct, stubs that answer at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, median_interval
from benchmarks.slurm.commands import timed
from dlbench.jobs.campaign.campaign import job_of
from dlbench.jobs.scheduler import keep_submission
from dlbench.records.folder import create
from dlbench.specs.expand import expand
from dlbench.specs.requests import Request

JOBS = 1000
FORGOTTEN = 100
TIMES = 5
MOST_S = 2.0

_STUBS = {
    "squeue": 'echo squeue >> calls; seq -f "%.0f|PENDING|2026-11-23T06:10:00|Priority||/r" {first} {jobs}',
    "sacct": 'echo sacct >> calls; seq -f "%.0f|FAILED|1:0" 1 {forgotten}',
}


def figures() -> Iterator[Figure]:
    """Seconds of `dlbench status`, and what of them is asking Slurm."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, body in _STUBS.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            words = body.format(first=FORGOTTEN + 1, jobs=JOBS, forgotten=FORGOTTEN)
            program.write_text(f"#!/bin/bash\ncd {folder}\n{words}\n", encoding="utf-8")
            program.chmod(0o755)
        _submitted(folder / "runs")
        variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        each, cpu = [], []
        for _ in range(TIMES):
            (folder / "calls").unlink(missing_ok=True)
            seconds, cpu_s, done = timed(folder, variables, "status")
            assert done.stdout.count("PENDING") == JOBS - FORGOTTEN, done.stdout[-2000:] + done.stderr
            assert (folder / "calls").read_text(encoding="utf-8").split() == ["squeue", "sacct"]
            each.append(seconds)
            cpu.append(cpu_s)
        yield Figure.of(
            each,
            name=f"status of {JOBS:,} jobs, one squeue and one sacct, the whole command",
            unit="s",
            goal=f"under {MOST_S:g} s",
            met=lambda one: one.high < MOST_S,
            reason=f"{median_interval(cpu)[0]:.2g} s of CPU time",
        )


def _submitted(root: Path) -> None:
    root.mkdir()
    request = Request(
        workload="cosmoflow", preset="ci", system="box", points=(1,), points_are="nodes", repeats=JOBS, series="bench"
    )
    for number, plan in enumerate(expand(request, machine_cores=2), 1):
        keep_submission(job_of([plan]), [create(root, plan)], str(number), ["sbatch"], [])
