"""1,000 runs: planned, packed into jobs, every script rendered, and printed by a dry run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, median_interval
from benchmarks.slurm.commands import timed

RUNS = 1000
TIMES = 5
MOST_S = 5.0


def figures() -> Iterator[Figure]:
    """Seconds of a dry run."""
    asked = ("submit", "resnet50", "--system", "example-gpu", "--nodes", "1,2,4,8", "--repeats", str(RUNS // 4))
    for name, more in (("packed", ()), ("each in an element of an array", ("--one-run-per-job",))):
        with tempfile.TemporaryDirectory() as folder:
            each, cpu = [], []
            for _ in range(TIMES):
                seconds, cpu_s, done = timed(
                    Path(folder), {}, *asked, *more, "--dry-run", "--all-scripts", "--max-jobs=10"
                )
                assert done.returncode == 0, done.stderr
                assert f"{RUNS:,} runs" in done.stdout, done.stdout[:2000]
                each.append(seconds)
                cpu.append(cpu_s)
        yield Figure.of(
            each,
            name=f"{RUNS:,} runs planned, rendered and printed by a dry run, {name}",
            unit="s",
            goal=f"under {MOST_S:g} s",
            met=lambda one: one.high < MOST_S,
            reason=f"{median_interval(cpu)[0]:.2g} s of CPU time",
        )
