"""Loader processes and their fork server end with the rank that started them, without anybody's help."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.leftovers import Leftovers

# As LoadedSource starts them, without torch.
RANK = """
import multiprocessing, os, signal, time
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dlbench.node.data.end_with_rank"])
os.environ["DLBENCH_LOADERS_OF"] = str(os.getpid())
loaders = [context.Process(target=time.sleep, args=(1000,)) for _ in range(2)]
for loader in loaders:
    loader.start()
    print(loader.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("wait_s", [None, 0.0, 0.01, 0.05, 0.1])
def test_loaders_end_with_a_killed_rank(tmp_path: Path, wait_s: float | None) -> None:
    """Killed after they have started, or at any time while they do."""
    with Leftovers() as leftovers:
        rank = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=leftovers.environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert rank.stdout is not None
        if wait_s is None:
            rank.stdout.readline()
            rank.stdout.readline()
            assert len(leftovers.processes()) == 5  # with the fork server and the resource tracker
        else:
            deadline = time.monotonic() + 30
            while len(leftovers.processes()) < 3 and time.monotonic() < deadline:
                pass
            time.sleep(wait_s)
        rank.kill()
        rank.communicate()
        assert leftovers.within(files=False) == []  # its supervisor removes the files
