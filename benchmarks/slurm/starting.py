"""From the start of a one-box cluster to the first job that is done, on a real Slurm."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure
from tests.slurm_box.box import Box, check_requirements

TIMES = 3
MOST_S = 30.0
NAME = "box start to the first job done"


def figures() -> Iterator[Figure]:
    """Seconds, and what they are spent on."""
    if missing := check_requirements():
        yield Figure(name=NAME, value=None, unit="s", goal=f"under {MOST_S:g} s", reason="; ".join(missing))
        return
    each = []
    for _ in range(TIMES):
        with tempfile.TemporaryDirectory(prefix="dlbench-box-", dir="/tmp") as folder:
            start = time.monotonic()
            with Box.start(Path(folder)) as box:
                subprocess.run(
                    ["sbatch", "--wait", "--nodes=2", f"--output={folder}/out", "--wrap=srun hostname"],
                    env={"PATH": "/usr/bin:/bin", **box.environment},
                    cwd=folder,
                    check=True,
                    capture_output=True,
                    timeout=120,
                )
                each.append(time.monotonic() - start)
                assert Path(folder, "out").read_text(encoding="utf-8").split() != []
    yield Figure.of(
        each,
        name=NAME,
        unit="s",
        goal=f"under {MOST_S:g} s",
        met=lambda one: one.high < MOST_S,
        reason="two nodes, srun on both",
    )
