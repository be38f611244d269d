"""Runs the collective benchmark on one rank: selects the implementations that the plan names and every rank has, lists
the others with the reason, and returns the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError, RunError, first_line
from dlbench.machine import environment
from dlbench.node import rendezvous
from dlbench.node.comm.contestants import (
    Contestant,
    MpiReference,
    OwnAlgorithm,
    Reference,
    StreamSampleClock,
    TorchReference,
    Vectors,
)
from dlbench.node.comm.inputs import DTYPES
from dlbench.node.comm.measure import CollectiveTimer, PairTimer
from dlbench.node.comm.transport import (
    Control,
    Deadline,
    GlooTransport,
    MpiTransport,
    TorchNcclTransport,
    Transport,
    start_mpi,
    stop_mpi,
)
from dlbench.node.devices import NcclLog, joined_transport, rank_gpu, require_own_gpu, torch_facts
from dlbench.node.failures import passed_on
from dlbench.node.garbage import HeldGarbage
from dlbench.node.ranks import CoreBinding, RankCores, RankPlace, check_sharing
from dlbench.node.sync.timing import CudaClock
from dlbench.node.watching.agent import CoreLoad, node_loads
from dlbench.records.comm import CommPoint, CommRecord
from dlbench.records.folder import RunFolder
from dlbench.specs.comm import CommPlan, CommSpec
from dlbench.units import format_bytes, utc_now

_TRIAL_ELEMENTS = 4  # Elements per rank of the first, untimed call of a library, which shows whether it works.


class Lineup:
    """Makes the implementations to compare; all ranks call the same methods in the same order."""

    def __init__(self, plan: CommPlan, place: RankPlace, device: torch.device, control: Control) -> None:
        self._plan = plan
        self._place = place
        self._device = device
        self._control = control
        self._mpi: Any = None
        self._torch_groups: dict[str, dist.ProcessGroup] = {}
        self.not_measured: list[str] = []  # Reasons why requested implementations are not available, as sentences.

    def contestants(self, deadline: Deadline) -> list[Contestant]:
        comm = self._plan.comm
        contestants: list[Contestant] = []
        if comm.algorithms:
            transport = self._transport()
            contestants += [OwnAlgorithm(comm, name, transport) for name in comm.algorithms]
        for backend in comm.backends:
            references = self._if_possible(backend, partial(self._references, backend)) or ()
            contestants += [reference for reference in references if self._passes_trial(reference, deadline)]
        return contestants

    def stream_clock(self) -> StreamSampleClock | None:
        """Returns a clock for samples in the GPU's stream; None on CPUs, whose calls return when they are done."""
        if self._device.type != "cuda":
            return None
        group = self._if_possible("timing in the stream", partial(self._torch_group, "nccl"))
        if group is None:
            return None
        flag = torch.zeros(1, device=self._device)
        return StreamSampleClock(partial(_stream_barrier, flag, group), CudaClock(self._device))

    def stop(self) -> None:
        """Ends the libraries; only after success, since they wait for all ranks."""
        if self._mpi is not None:
            stop_mpi(self._mpi)

    def _transport(self) -> Transport:
        comm, plan = self._plan.comm, self._plan
        if comm.transport == "mpi":
            mpi = self._if_possible("mpi", self._start_mpi)
            if mpi is None:
                raise EnvironmentLacksError(self.not_measured[-1])
            return MpiTransport(mpi, self._place, plan.group_size)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        group = self._if_possible(backend, partial(self._torch_group, backend))
        if group is None:
            raise EnvironmentLacksError(self.not_measured[-1])
        if backend == "nccl":
            # Otherwise a pair's first message would wait for all ranks.
            _stream_barrier(torch.zeros(1, device=self._device), group)
            return TorchNcclTransport(group, self._place, plan.group_size)
        down = self._control.new_group("gloo", "start of gloo's other direction")
        return GlooTransport(group, down, self._place, plan.group_size)

    def _references(self, backend: str) -> tuple[Reference, ...]:
        collective = self._plan.comm.collective
        if backend != "mpi":
            return (TorchReference(collective, self._place, self._torch_group(backend), backend),)
        if self._device.type != "cpu":
            raise EnvironmentLacksError("mpi: sends host memory here, and buffers are on the GPU")
        references = [MpiReference(collective, self._place, self._start_mpi(), in_place=True)]
        if collective == "allreduce":
            references.append(MpiReference(collective, self._place, self._start_mpi(), in_place=False))
        return tuple(references)

    def _start_mpi(self) -> Any:
        if self._mpi is None:
            self._mpi = start_mpi(self._place, self._plan.system.launch.launcher)
        return self._mpi

    def _torch_group(self, backend: str) -> dist.ProcessGroup:
        if backend == "nccl" and self._device.type != "cuda":
            raise EnvironmentLacksError("nccl: needs buffers on a GPU, and they are on the CPU here")
        if backend == "nccl" and not dist.is_nccl_available():
            raise EnvironmentLacksError("nccl: this torch was built without NCCL")
        if backend == "gloo" and self._device.type != "cpu":
            raise EnvironmentLacksError("gloo: sends host memory, and buffers are on the GPU here")
        if backend not in self._torch_groups:
            self._torch_groups[backend] = self._control.new_group(backend, f"start of {backend}")
        return self._torch_groups[backend]

    def _if_possible(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` makes if it can on every rank; otherwise None, with the reason in `not_measured`."""
        made, problem = None, ""
        try:
            made = make()
        except EnvironmentLacksError as error:
            problem = str(error)
        if self._has_problem(name, problem):
            return None
        return made

    def _has_problem(self, name: str, problem: str) -> bool:
        """Returns whether any rank has a problem, and adds the first one to `not_measured` on all ranks."""
        problems = self._control.gather(f"whether {name} is available", problem)
        if not any(problems):
            return False
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        if not text.startswith(f"{name}: "):
            text = f"{name}: {text}"
        if not all(problems):
            text += f" (on rank {rank})"
        if text not in self.not_measured:  # both of MPI's all-reduces have the same problem
            self.not_measured.append(text)
        return True

    def _passes_trial(self, reference: Reference, deadline: Deadline) -> bool:
        comm = self._plan.comm
        data = torch.ones(_TRIAL_ELEMENTS * self._place.size, dtype=DTYPES[comm.dtype], device=self._device)
        name = f"{comm.collective} of {comm.dtype} by {reference.carrier}"
        deadline.begin(f"trial of {name}")
        try:
            problem = reference.bind(Vectors(data, data.clone()))
            if not problem:
                reference.run(1)
        except RunError as error:
            problem = str(error)
        deadline.end()
        return not self._has_problem(name, problem)


def _stream_barrier(flag: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Queues a tiny all-reduce in the stream, after which nothing begins before all ranks have reached it."""
    try:
        dist.all_reduce(flag, group=group)
    except RuntimeError as error:
        raise passed_on(f"NCCL's barrier in the stream failed: {first_line(error)}", error) from None


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
        "warnings": check_sharing(rank_cores)[1],
    }
