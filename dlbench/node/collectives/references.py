"""Collectives of libraries as users call them: gloo and NCCL through torch.distributed, and MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlbench.costs.schedules import all_to_all_block, block
from dlbench.node.collectives.contestants import Vectors
from dlbench.node.collectives.control import first_line
from dlbench.node.collectives.mpi_transport import mpi_barrier
from dlbench.node.collectives.torch_transport import gloo_barrier
from dlbench.node.collectives.transport import Counters
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.specs.collectives import IN_PLACE, LIBRARY, OUT_OF_PLACE, Collective


class Reference:
    """A library's collective; each says in `_call` how, from `given` or `data` to `data`."""

    algorithm = LIBRARY
    counters: Counters | None = None

    def __init__(self, collective: Collective, place: RankPlace, carrier: str) -> None:
        self.carrier = carrier
        self._collective = collective
        self._place = place
        self.is_in_place = collective == "allreduce"
        self._run: Callable[[], object] | None = None

    def bind(self, vectors: Vectors) -> str:
        problem = self._problem(vectors)
        if not problem:
            self._run = self._call(vectors)
        return problem

    def line_up(self) -> None:
        """Nothing, where the library has no barrier of the host."""

    def run(self, times: int) -> None:
        assert self._run is not None
        call = self._run
        try:
            for _ in range(times):
                call()
        except RuntimeError as error:  # mpi4py's and Horovod's own errors are of this kind
            raise passed_on(f"{self.carrier}: {first_line(error)}", error) from None

    def settle(self) -> None:
        """The result is in `data` already, for most."""

    def _problem(self, vectors: Vectors) -> str:
        return ""

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        raise NotImplementedError

    def _own(self, vector: torch.Tensor) -> torch.Tensor:
        first, count = block(len(vector), self._place.size, self._place.rank)
        return vector[first : first + count]

    def _counts(self, elements: int) -> list[int]:
        """Elements of each rank's block."""
        return [block(elements, self._place.size, i)[1] for i in range(self._place.size)]

    def _sent_and_received(self, elements: int) -> tuple[list[int], list[int]]:
        """Elements to, and from, each rank in an all-to-all."""
        size, rank = self._place.size, self._place.rank
        sent = [all_to_all_block(elements, size, rank, other)[2] for other in range(size)]
        return sent, [all_to_all_block(elements, size, other, rank)[2] for other in range(size)]


class TorchReference(Reference):
    """torch.distributed over a group of all ranks."""

    def __init__(self, collective: Collective, place: RankPlace, group: dist.ProcessGroup, backend: str) -> None:
        super().__init__(collective, place, f"torch-{backend}")
        self._group = group
        self._backend = backend

    def line_up(self) -> None:
        if self._backend == "gloo":
            gloo_barrier(self._group)

    def _problem(self, vectors: Vectors) -> str:
        elements, size = len(vectors.data), self._place.size
        if self._collective == "all-gather" and self._backend == "gloo" and elements % size:
            return (
                f"torch.distributed gathers equal parts over gloo, and {size} ranks do not divide {elements} elements"
            )
        return ""

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        data, given, group = vectors.data, vectors.given, self._group
        size = self._place.size
        if self._collective == "allreduce":
            return lambda: dist.all_reduce(data, group=group)
        if self._collective == "broadcast":
            return lambda: dist.broadcast(data, 0, group=group)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(len(data))
            if len(data) % size:
                return lambda: dist.all_to_all_single(data, given, received, sent, group=group)
            return lambda: dist.all_to_all_single(data, given, group=group)
        own_data, own_given = self._own(data), self._own(given)
        if len(data) % size:
            counts = self._counts(len(data))
            if self._collective == "all-gather":
                places = list(torch.split(data, counts))
                return lambda: dist.all_gather(places, own_given, group=group)
            parts = list(torch.split(given, counts))
            return lambda: dist.reduce_scatter(own_data, parts, group=group)
        if self._collective == "all-gather":
            gather = _newest("all_gather_single", "all_gather_into_tensor")
            return lambda: gather(data, own_given, group=group)
        scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: scatter(own_data, given, group=group)


class MpiReference(Reference):
    """MPI's blocking collectives; the algorithm is the MPI library's choice."""

    def __init__(self, collective: Collective, place: RankPlace, mpi: Any, *, in_place: bool = True) -> None:
        """`in_place` is of an all-reduce: whether it sums in place, or from `given` into `data`."""
        super().__init__(collective, place, "mpi")
        if collective == "allreduce":
            self.algorithm, self.is_in_place = (IN_PLACE if in_place else OUT_OF_PLACE), in_place
        self._mpi = mpi
        self._world = mpi.COMM_WORLD.Dup()

    def line_up(self) -> None:
        mpi_barrier(self._world)

    def _problem(self, vectors: Vectors) -> str:
        if self._collective in ("allreduce", "reduce-scatter") and vectors.data.dtype != torch.float32:
            return "MPI has no 16-bit floating type to sum"
        return ""

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        mpi, world = self._mpi, self._world
        kind = mpi.FLOAT if vectors.data.dtype == torch.float32 else mpi.UINT16_T
        data, given = self._array(vectors.data), self._array(vectors.given)
        elements, size = len(vectors.data), self._place.size
        if self._collective == "allreduce":
            source = mpi.IN_PLACE if self.is_in_place else [given, kind]
            return lambda: world.Allreduce(source, [data, kind], op=mpi.SUM)
        if self._collective == "broadcast":
            return lambda: world.Bcast([data, kind], root=0)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(elements)
            if elements % size:
                return lambda: world.Alltoallv([given, sent, kind], [data, received, kind])
            return lambda: world.Alltoall([given, kind], [data, kind])
        counts = self._counts(elements)
        own_data, own_given = self._array(self._own(vectors.data)), self._array(self._own(vectors.given))
        if self._collective == "all-gather":
            if elements % size:
                return lambda: world.Allgatherv([own_given, kind], [data, counts, kind])
            return lambda: world.Allgather([own_given, kind], [data, kind])
        if elements % size:
            return lambda: world.Reduce_scatter([given, kind], [own_data, kind], counts, op=mpi.SUM)
        return lambda: world.Reduce_scatter_block([given, kind], [own_data, kind], op=mpi.SUM)

    def _array(self, vector: torch.Tensor) -> Any:
        """The same memory as MPI takes it; 16-bit numbers as whole ones, which only travel."""
        return (vector if vector.dtype == torch.float32 else vector.view(torch.int16)).numpy()


class HorovodReference(Reference):
    """Horovod's operations: its background thread negotiates and executes them."""

    def __init__(self, collective: Collective, place: RankPlace, hvd: Any, library: str) -> None:
        """`hvd` is the started module; `library` moves the bytes: gloo, mpi or nccl."""
        super().__init__(collective, place, f"horovod-{library}")
        self._hvd = hvd
        self._result: torch.Tensor | None = None
        self._target: torch.Tensor | None = None

    def line_up(self) -> None:
        try:
            self._hvd.barrier()
        except RuntimeError as error:
            raise passed_on(f"{self.carrier}'s barrier failed: {first_line(error)}", error) from None

    def _problem(self, vectors: Vectors) -> str:
        return "Horovod has no bfloat16" if vectors.data.dtype == torch.bfloat16 else ""

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        hvd, data, given = self._hvd, vectors.data, vectors.given
        name = f"dlbench.{self._collective}.{len(data)}"
        self._target = None
        if self._collective == "allreduce":
            return lambda: hvd.allreduce_(data, op=hvd.Sum, name=name)
        if self._collective == "broadcast":
            return lambda: hvd.broadcast_(data, root_rank=0, name=name)
        own_given = self._own(given)
        self._target = self._own(data) if self._collective == "reduce-scatter" else data
        sent = torch.tensor(self._sent_and_received(len(data))[0], dtype=torch.int32)

        def keep(result: torch.Tensor) -> None:
            self._result = result

        if self._collective == "reduce-scatter":
            return lambda: keep(hvd.reducescatter(given, op=hvd.Sum, name=name))
        if self._collective == "all-gather":
            return lambda: keep(hvd.allgather(own_given, name=name))
        return lambda: keep(hvd.alltoall(given, splits=sent, name=name)[0])

    def settle(self) -> None:
        if self._target is not None and self._result is not None:
            self._target.copy_(self._result)
            self._result = None


def _newest(name: str, older: str) -> Any:
    """A function of torch.distributed under its name of today."""
    return getattr(dist, name, None) or getattr(dist, older)
