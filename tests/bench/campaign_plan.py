"""What planning, rendering and listing 1,000 runs costs: `submit --dry-run`, from the start of Python to its end."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.bench.figures import Figure

GOAL_S = 5.0

COMMANDS = {
    "200 repeats of 5 node counts": ("--nodes", "1,2,4,8,16", "--repeats", "200"),
    "200 swept values at 5 node counts": (
        *("--nodes", "1,2,4,8,16", "--sweep", "train.seed=" + ",".join(map(str, range(200)))),
    ),
}


def figures() -> Iterator[Figure]:
    """One for each way to 1,000 runs, all scripts printed."""
    for what, words in COMMANDS.items():
        cpu_s, runs = _dry_run(words)
        yield Figure(
            name=f"dry run of 1,000 runs, {what}",
            value=cpu_s,
            unit="s of CPU",
            goal=f"below {GOAL_S:g} s",
            met=cpu_s < GOAL_S and runs == 1000,
            reason="" if runs == 1000 else f"scripts hold {runs} runs",
        )


def _dry_run(words: tuple[str, ...]) -> tuple[float, int]:
    """Seconds of processor time, and the runs that all scripts start."""
    command = [sys.executable, "-P", "-m", "dlbench", "submit", "resnet50", "--system", "example-gpu", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--dry-run", "--all-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    runs = sum(line.startswith("run start") for line in done.stdout.splitlines())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, runs
