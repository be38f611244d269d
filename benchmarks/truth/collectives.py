"""`dlbench comm` against a loop as OSU's micro-benchmarks have it, in the same processes and over the same group.

Two ranks on this machine, all-reduce of 1 to 64 KiB by MPI, in place and into a second buffer, and by gloo, in turns.
OSU's loop times each operation by itself, and ranks meet at the library's own barrier outside of the timer; what it
prints is the mean of a rank's times. Here it is the slowest rank's mean, and the median of several loops, since others
use the machine, too. So is dlbench's figure a median of iterations.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.shaped_cluster import OPEN_MPI_AS_ROOT
from dlbench.comm.measurements import SeriesName
from dlbench.jobs.scripts.launch import rank_environment
from dlbench.specs.comm import CommPlan, CommSeries, CommSpec
from dlbench.specs.launch import LaunchSpec
from dlbench.specs.plan import LayoutSpec
from dlbench.specs.system import SystemSpec
from tests.support.paths import ROOT

SIZES = (1024, 4096, 16384, 65536)
ROUNDS = 12
LOOP = 100
"""Operations of one loop as OSU has it."""
GOAL = 1.5
LIMIT_S = 300
FOUND = "found.json"


def figures() -> Iterator[Figure]:
    """Ratios of dlbench's figure to the loop's, by library and size."""
    name = "dlbench comm over an OSU-style loop, all-reduce, 2 ranks"
    if shutil.which("mpirun") is None:
        yield Figure(name=name, value=None, unit="ratio of times", goal=f"at most {GOAL}", reason="no mpirun")
        return
    comm = CommSpec(backends=("mpi", "gloo"), sizes=SIZES, warmup=1, iterations=5, timeout_s=30.0)
    found = found_by_two_ranks(__name__, comm)
    for title, size, rounds in found:
        ratios = [ours / theirs for ours, theirs, _, _ in rounds]
        ours, theirs, operations, skew = (statistics.median(column) for column in zip(*rounds, strict=True))
        yield Figure.of(
            ratios,
            name=f"{name}, {title}, {size // 1024} KiB",
            unit="ratio of times",
            goal=f"at most {GOAL}",
            met=lambda one: one.value <= GOAL,
            reason=f"{ours * 1e6:.1f} us against {theirs * 1e6:.1f} us; {operations:g} operations, "
            f"started {skew * 1e6:.1f} us apart",
        )


def found_by_two_ranks(module: str, comm: CommSpec) -> Any:
    """What `rank` of a module writes to `found.json` of the folder that it is given, which has a plan; under mpirun."""
    plan = CommPlan(
        run_id="bench-collectives",
        created="2026-01-01T00:00:00Z",
        dlbench_version="0",
        layout=LayoutSpec(nodes=1, ranks=2, cores_per_rank=1),
        system=SystemSpec(
            name="bench",
            title="this machine",
            launch=LaunchSpec(launcher="mpirun", environment={"OMP_NUM_THREADS": "1"}),
        ),
        series=CommSeries(id="bench", repeat=0, repeats=1, position=0),
        comm=comm,
    )
    environment: dict[str, Any] = {**os.environ, **rank_environment(plan), **OPEN_MPI_AS_ROOT}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        command = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none"]
        program = f"from pathlib import Path; from {module} import rank; rank(Path({temporary!r}))"
        subprocess.run(
            [*command, sys.executable, "-c", program],
            env=environment | {"DLBENCH_LAUNCH_TOKEN": "bench"},
            timeout=LIMIT_S,
            cwd=ROOT,
            check=True,
        )
        return json.loads((folder / FOUND).read_text(encoding="utf-8"))


def rank(folder: Path) -> None:
    """One rank: `found.json` gets, by library and size, dlbench's and the loop's seconds of each round."""
    import torch

    from dlbench.node.comm.contestants import MpiReference, TorchReference
    from dlbench.node.comm.measure import CollectiveTimer
    from dlbench.node.comm.transport import Control, Deadline, start_mpi, stop_mpi
    from dlbench.node.garbage import HeldGarbage
    from dlbench.node.ranks import detect
    from dlbench.records.folder import RunFolder

    torch.set_num_threads(1)
    plan = CommPlan.model_validate_json((folder / "plan.json").read_text(encoding="utf-8"))
    comm, place = plan.comm, detect(plan)
    control = Control(place, comm.timeout_s, plan.stall_timeout_s)
    control.start(RunFolder(folder), None)
    mpi = start_mpi(place, "mpirun")
    group = control.new_group("gloo", "bench")
    cpu = torch.device("cpu")
    measurement = CollectiveTimer(comm, place, cpu, control, Deadline(place.rank, comm.timeout_s), lambda where: None)
    contestants = (
        MpiReference("allreduce", place, mpi),
        MpiReference("allreduce", place, mpi, in_place=False),
        TorchReference("allreduce", place, group, "gloo"),
    )
    found = []
    HeldGarbage().hold()
    for size in comm.sizes:
        loops = _loops(mpi, group, torch.zeros(size // 4), torch.zeros(size // 4))
        for contestant, loop in zip(contestants, loops, strict=True):
            rounds = []
            for _ in range(ROUNDS):
                control.barrier("loop")
                slowest = max(control.gather("loop", _osu(*loop)))
                (point,) = measurement.points([contestant], size)
                assert point.correct, point.problem
                ours, skew = statistics.median(point.times_s), statistics.median(point.skew_s)
                rounds.append((ours, slowest, point.operations, skew))
            title = SeriesName(carrier=contestant.carrier, algorithm=contestant.algorithm).title
            found.append((title, size, rounds))
    if place.rank == 0:
        (folder / FOUND).write_text(json.dumps(found), encoding="utf-8")
    control.barrier("end")
    stop_mpi(mpi)
    control.stop()


def _loops(mpi: Any, group: Any, vector: Any, given: Any) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], ...]:
    """The all-reduce of each contestant and its library's barrier."""
    import torch.distributed as dist

    world, array = mpi.COMM_WORLD, [vector.numpy(), mpi.FLOAT]
    return (
        (lambda: world.Allreduce(mpi.IN_PLACE, array), world.Barrier),
        (lambda: world.Allreduce([given.numpy(), mpi.FLOAT], array), world.Barrier),
        (lambda: dist.all_reduce(vector, group=group), lambda: dist.barrier(group)),
    )


def _osu(call: Callable[[], Any], barrier: Callable[[], Any]) -> float:
    """Mean seconds of an operation on this rank."""
    taken = 0
    for number in range(LOOP + LOOP // 10):
        begin = time.perf_counter_ns()
        call()
        end = time.perf_counter_ns()
        if number >= LOOP // 10:
            taken += end - begin
        barrier()
    return taken / LOOP / 1e9
