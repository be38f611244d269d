"""Runs the collective benchmark on one rank: takes a plan, returns the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.machine import environment
from dlbench.node import rendezvous
from dlbench.node.comm.contestants import Contestant
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.lineup import Lineup
from dlbench.node.comm.measure import CollectiveTimer
from dlbench.node.comm.pairs import PairTimer
from dlbench.node.cores import CoreBinding, RankCores, check_sharing
from dlbench.node.devices import rank_gpu, require_own_gpu
from dlbench.node.garbage import HeldGarbage
from dlbench.node.nccl_log import NcclLog, joined_transport
from dlbench.node.ranks import RankPlace
from dlbench.node.torch_facts import torch_facts
from dlbench.node.watching.agent import CoreLoad, node_loads
from dlbench.records.comm import CommPoint, CommRecord
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan, CommSpec
from dlbench.units import format_bytes, utc_now


def measure(  # noqa: PLR0913  (everything that a rank is started with, used here only)
    plan: CommPlan,
    folder: RunFolder,
    place: RankPlace,
    binding: CoreBinding,
    device: torch.device,
    *,
    on_point: Callable[[int, int, str], None],
    beat: Callable[[str], None],
    started: float,
    on_stuck: Callable[[str], None] | None = None,
    nccl: NcclLog | None = None,
) -> CommRecord | None:
    """Measures all points on this rank; returns the record on rank 0. After an error the process must end at once."""
    # `on_point` gets points done, points in all, and the next size in words; `on_stuck`, from another thread, the
    # reason before the process ends with exit code 124. `started`: monotonic start of the process, in seconds.
    comm = plan.comm
    if comm.transport == "mpi":
        device = torch.device("cpu")
    started_at = datetime.now(UTC) - timedelta(seconds=time.monotonic() - started)
    control = Control(place, comm.timeout_s, plan.stall_timeout_s * rendezvous.PATIENCE)
    control.start(folder, plan.system.launch.interface)
    gpu = rank_gpu(device, binding.gpu)
    require_own_gpu(gpu, place, partial(control.gather, "GPUs"), by_nccl=gpu is not None)
    deadline = Deadline(place.rank, comm.timeout_s, on_stuck)
    deadline.start()
    lineup = Lineup(plan, place, device, control)
    timer_class = PairTimer if comm.pairs else CollectiveTimer
    timer = timer_class(comm, place, device, control, deadline, beat, clock=lineup.stream_clock())
    contestants = lineup.contestants(deadline)
    load = CoreLoad(sees_node=place.local_rank == 0)
    load.measuring(True)
    if not contestants:
        raise EnvironmentLacksError(f"nothing in the plan can be measured here: {lineup.not_measured[0]}")
    points = _points(timer, comm, contestants, on_point)
    load.measuring(False)
    gathered = _gathered(control, place, binding, load, nccl)
    deadline.begin("end of the run")
    lineup.stop()
    control.stop()
    deadline.end()
    deadline.stop()
    if place.rank != 0:
        return None
    problems: list[str] = []
    facts = environment.capture(problems, withheld=plan.system.launch.referenced) | torch_facts(problems, device)
    return CommRecord(
        run_id=plan.run_id,
        state="invalid" if any(point.correct is False for point in points) else "valid",
        started=started_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        finished=utc_now(),
        device=_device_text(device),
        group_size=plan.group_size,
        points=points,
        not_measured=tuple(lineup.not_measured),
        warnings=(*binding.warnings, *gathered.pop("warnings"), *problems),
        environment=facts,
        **gathered,
    )


def _device_text(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def _points(
    timer: CollectiveTimer, comm: CommSpec, contestants: Sequence[Contestant], on_point: Callable[[int, int, str], None]
) -> tuple[CommPoint, ...]:
    points: list[CommPoint] = []
    garbage = HeldGarbage()
    for number, num_bytes in enumerate(comm.sizes):
        done, total = number * len(contestants), len(comm.sizes) * len(contestants)
        on_point(done, total, f"{comm.collective} of {format_bytes(num_bytes)}")
        garbage.hold()
        points += timer.points(contestants, num_bytes)
        garbage.release()
    return tuple(points)


def _gathered(
    control: Control, place: RankPlace, binding: CoreBinding, load: CoreLoad, nccl: NcclLog | None
) -> dict[str, Any]:
    gathered = control.gather("hosts and cores", [place.host, list(binding.cores), binding.threads, binding.pinned])
    rank_cores = [
        RankCores(rank=rank, host=host, cores=cores, threads=threads, pinned=pinned)
        for rank, (host, cores, threads, pinned) in enumerate(gathered)
    ]
    switches = control.gather("switches", place.switch)
    if not any(switches):
        switches = []
    loads = control.gather("load of the cores", [place.node_rank, load.summary()])
    logs = control.gather("NCCL's logs", nccl.read() if nccl is not None else None)
    return {
        "hosts": tuple(cores.host for cores in rank_cores),
        "switches": tuple(switches),
        "load": node_loads([load for _, load in loads], rank_cores, [node_rank for node_rank, _ in loads]),
        "nccl": joined_transport(logs),
        "warnings": check_sharing(rank_cores).warnings,
    }
