"""What others computed on the cores of the ranks: by the kernel's counts of cores and of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.node.watching.core_load import CoreLoad, node_loads
from dlbench.records.record import RankResult

BUSY = "import time\nend = time.monotonic() + 40\nwhile time.monotonic() < end: pass"

WATCHED = """
import json, os, subprocess, sys, time
from dlbench.node.watching.core_load import CoreLoad
load = CoreLoad(sees_node=True)
def ticks(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11])
load.measuring(True)
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]]) if not sys.argv[1].isdigit() else None
pid = child.pid if child else int(sys.argv[1])
began, first = time.monotonic(), ticks(pid)
while ticks(pid) - first < 0.3 * os.sysconf("SC_CLK_TCK") and time.monotonic() - began < 30:
    time.sleep(0.05)
load.measuring(False)
if child:
    child.kill()
print(json.dumps(load.summary()))
"""
"""Measures until the busy loop has computed for 0.3 s, however busy this machine is."""


def rank_result(rank: int, cores: tuple[int, ...]) -> RankResult:
    return RankResult.model_construct(rank=rank, node_rank=0, host="n0", cores=cores)


def proc(folder: Path, cores: dict[int, tuple[int, int]], pressure_us: int | None) -> None:
    """Busy and stolen ticks of each core."""
    lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
    lines += [f"cpu{core} {busy - 3} 1 2 400 50 60 70 {steal} 9 9" for core, (busy, steal) in cores.items()]
    (folder / "proc/pressure").mkdir(parents=True, exist_ok=True)
    (folder / "proc/stat").write_text("\n".join([*lines, "intr 0"]))
    if pressure_us is not None:
        text = f"some avg10=1.00 avg60=2.00 avg300=3.00 total={pressure_us}\nfull avg10=0.00 total=0\n"
        (folder / "proc/pressure/cpu").write_text(text)


@pytest.mark.parametrize("beside", [True, False])
def test_a_busy_loop_beside_is_others_time_and_one_of_its_own_is_not(beside: bool) -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, [{core}])\n"
    loop = subprocess.Popen([sys.executable, "-c", pinned + BUSY]) if beside else None
    try:
        words = [sys.executable, "-c", pinned + WATCHED, str(loop.pid) if loop else pinned + BUSY]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    finally:
        if loop is not None:
            loop.kill()
            loop.wait()
    told = json.loads(done.stdout)
    (load,) = node_loads([told], [rank_result(0, (core,))], [0])
    assert load.problem == ""
    assert load.others_s is not None
    if beside:
        assert load.others_s > 0.2
        assert load.own_s < 0.2
    else:  # whatever else this machine does
        assert load.own_s > 0.2
        assert load.busy_s is not None
        # Two clocks: what a rank used may be counted a tick ahead of what its core was busy.
        assert load.others_s <= max(0.0, load.busy_s - load.own_s) + 1e-9


def test_windows_add_up_and_only_the_ranks_cores_count(tmp_path: Path) -> None:
    first, second = CoreLoad(sees_node=True, root=tmp_path), CoreLoad(sees_node=False, root=tmp_path)
    for busy, steal, pressure in ((100, 0, 0), (150, 3, 200_000), (400, 50, 900_000), (420, 51, 950_000)):
        proc(tmp_path, {0: (busy, steal), 1: (busy, 0), 2: (10 * busy, 0)}, pressure)
        is_edge = busy in (100, 400)
        for load in (first, second):
            load.measuring(is_edge)
    told = [first.summary(), second.summary()]
    told[0] |= {"own_s": 0.5}
    told[1] |= {"own_s": 0.25}
    (load,) = node_loads(told, [rank_result(0, (0,)), rank_result(1, (1,))], [0, 0])
    assert load.cores == (0, 1)
    assert load.busy_s == pytest.approx(1.4)  # 50 and 20 ticks on two cores; the pause between is left out
    assert load.others_s == pytest.approx(0.65)
    assert load.steal_s == pytest.approx(0.04)
    assert load.pressure_s == pytest.approx(0.25)


def test_what_the_kernel_does_not_count_is_not_measured(tmp_path: Path) -> None:
    proc(tmp_path, {0: (100, 0)}, None)
    load = CoreLoad(sees_node=True, root=tmp_path)
    load.measuring(True)
    load.measuring(False)
    (seen,) = node_loads([load.summary()], [rank_result(0, (0,))], [0])
    assert (seen.pressure_s, seen.steal_s) == (None, 0.0)
    nothing = CoreLoad(sees_node=True, root=tmp_path / "none")
    nothing.measuring(True)
    nothing.measuring(False)
    (seen,) = node_loads([nothing.summary()], [rank_result(0, (0,))], [0])
    assert (seen.busy_s, seen.others_s, seen.steal_s) == (None, None, None)
    assert seen.problem.startswith("/proc/stat: ")
