"""A one-box cluster with slow links between its nodes, and what is submitted to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlbench.records.scan import scan
from tests.slurm_box.box import Box, check_requirements

RATE = "200mbit"
RATE_BYTES_PER_S = 200e6 / 8
OPEN_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""A box needs root, and Open MPI then wants to be asked twice."""
SYSTEM = """\
format: dlbench.system
version: 1
name: shaped-box
title: One-box cluster with slow links
scheduler: slurm
slurm:
  partition: box
  time_limit: "01:00:00"
  exclusive: false
node:
  cores: 4
launch:
  launcher: srun-gloo
  mpi_plugin: pmix
  pin: false
"""


@contextmanager
def shaped_cluster(nodes: int = 4, rate: str = RATE) -> Iterator[tuple[Box, Path]]:
    """A cluster with four processors a node and links of a rate, and the file that describes it as a system."""
    with tempfile.TemporaryDirectory(prefix="dlbench-bench-", dir="/tmp") as temporary:
        system = Path(temporary) / "shaped-box.yaml"
        system.write_text(SYSTEM, encoding="utf-8")
        with Box.start(Path(temporary) / "box", nodes=nodes, cpus_per_node=4) as box:
            box.shape(rate)
            yield box, system


def lacking() -> str:
    """Why there can be no such cluster here; empty if there can."""
    return "; ".join(check_requirements())


def submit(box: Box, *arguments: str) -> None:
    """`dlbench ARGUMENTS`, with the cluster of the box.

    Raises:
        RuntimeError: it was refused; with its own words.
    """
    environment = {**os.environ, **box.environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dlbench", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def wait_for(is_done: Callable[[], bool], bound_s: float) -> None:
    """Looks once a second.

    Raises:
        RuntimeError: not done in time.
    """
    deadline = time.monotonic() + bound_s
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"jobs did not end within {bound_s:.0f} s")
        time.sleep(1.0)


def all_ended(out: Path, count: int) -> Callable[[], bool]:
    """Tells whether so many runs are there, none of them running any more."""

    def is_done() -> bool:
        runs = scan(out).runs
        return len(runs) == count and all(run.state != "incomplete" for run in runs)

    return is_done
