"""Who takes part: what the plan asks for and every rank has; the rest is named with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError, RunError, first_line
from dlbench.node.comm.contestants import (
    Contestant,
    MpiReference,
    OwnAlgorithm,
    Reference,
    StreamSampleClock,
    TorchReference,
    Vectors,
)
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.inputs import DTYPES
from dlbench.node.comm.transport import GlooTransport, MpiTransport, TorchNcclTransport, Transport, start_mpi, stop_mpi
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import CudaClock
from dlbench.specs.comm import CommPlan

_TRIAL_ELEMENTS = 4  # Elements per rank of the first, untimed call of a library, which shows whether it can do it.


class Lineup:
    """Builds contestants; all ranks call the same methods in the same order."""

    def __init__(self, plan: CommPlan, place: RankPlace, device: torch.device, control: Control) -> None:
        self._plan = plan
        self._place = place
        self._device = device
        self._control = control
        self._mpi: Any = None
        self._torch_groups: dict[str, dist.ProcessGroup] = {}
        self.not_measured: list[str] = []  # What was asked for and cannot be had, each a sentence.

    def in_turns(self, deadline: Deadline) -> list[Contestant]:
        comm = self._plan.comm
        result: list[Contestant] = []
        if comm.algorithms:
            transport = self._transport()
            result += [OwnAlgorithm(comm, name, transport) for name in comm.algorithms]
        for backend in comm.backends:
            references = self._if_possible(backend, partial(self._references, backend)) or ()
            result += [reference for reference in references if self._passes_trial(reference, deadline)]
        return result

    def stream_clock(self) -> StreamSampleClock | None:
        """Times samples in the GPU's stream; None on CPUs, whose calls return when their work is done."""
        if self._device.type != "cuda":
            return None
        group = self._if_possible("timing in the stream", lambda: self._torch_group("nccl"))
        if group is None:
            return None
        flag = torch.zeros(1, device=self._device)
        return StreamSampleClock(lambda: _meet(flag, group), CudaClock(self._device))

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
        group = self._if_possible(backend, lambda: self._torch_group(backend))
        if group is None:
            raise EnvironmentLacksError(self.not_measured[-1])
        if backend == "nccl":
            _meet(torch.zeros(1, device=self._device), group)  # of pairs the first message would wait for all ranks
            return TorchNcclTransport(group, self._place, plan.group_size)
        back = self._control.new_group("gloo", "start of gloo's other direction")
        return GlooTransport(group, back, self._place, plan.group_size)

    def _references(self, backend: str) -> tuple[Reference, ...]:
        collective = self._plan.comm.collective
        if backend != "mpi":
            return (TorchReference(collective, self._place, self._torch_group(backend), backend),)
        if self._device.type != "cpu":
            raise EnvironmentLacksError("mpi: moves memory of the host here, and buffers are on the GPU")
        ways = (True, False) if collective == "allreduce" else (True,)
        return tuple(MpiReference(collective, self._place, self._start_mpi(), in_place=way) for way in ways)

    def _start_mpi(self) -> Any:
        if self._mpi is None:
            self._mpi = start_mpi(self._place, self._plan.system.launch.launcher)
        return self._mpi

    def _torch_group(self, backend: str) -> dist.ProcessGroup:
        """A group of torch.distributed apart from the control channel's; one for each back-end."""
        if backend == "nccl" and self._device.type != "cuda":
            raise EnvironmentLacksError("nccl: needs buffers on a GPU, and they are on the CPU here")
        if backend == "nccl" and not dist.is_nccl_available():
            raise EnvironmentLacksError("nccl: this torch was built without NCCL")
        if backend == "gloo" and self._device.type != "cpu":
            raise EnvironmentLacksError("gloo: moves memory of the host, and buffers are on the GPU here")
        if backend not in self._torch_groups:
            self._torch_groups[backend] = self._control.new_group(backend, f"start of {backend}")
        return self._torch_groups[backend]

    def _if_possible(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes if it can on every rank; None, and a sentence in `not_measured`, otherwise."""
        made, problem = None, ""
        try:
            made = make()
        except EnvironmentLacksError as error:
            problem = str(error)
        return None if self._refused(name, problem) else made

    def _refused(self, name: str, problem: str) -> bool:
        """Whether any rank has a problem; the first one is noted on all."""
        problems = self._control.gather(f"whether {name} can be had", problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is None:
            return False
        text = problems[first] if problems[first].startswith(f"{name}: ") else f"{name}: {problems[first]}"
        where = "" if all(problems) else f" (on rank {first})"
        if text + where not in self.not_measured:  # of MPI's all-reduce, both ways
            self.not_measured.append(text + where)
        return True

    def _passes_trial(self, reference: Reference, deadline: Deadline) -> bool:
        """Calls a library once; what it refuses is no failure of the run."""
        comm = self._plan.comm
        data = torch.ones(_TRIAL_ELEMENTS * self._place.size, dtype=DTYPES[comm.dtype], device=self._device)
        what = f"{comm.collective} of {comm.dtype} by {reference.carrier}"
        deadline.begin(f"trial of {what}")
        try:
            problem = reference.bind(Vectors(data, data.clone()))
            if not problem:
                reference.run(1)
        except RunError as error:
            problem = str(error)
        deadline.end()
        return not self._refused(what, problem)


def _meet(flag: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Orders a tiny all-reduce in the stream, behind which nothing begins before all ranks are there."""
    try:
        dist.all_reduce(flag, group=group)
    except RuntimeError as error:
        raise passed_on(f"NCCL's barrier in the stream failed: {first_line(error)}", error) from None
