"""What is timed side by side: dlbench's own algorithms, and collectives of libraries as users call them.

A sample of back-to-back operations is timed by the host's clock, or in the stream of a GPU. On a GPU the host only
orders work. Timed by its clock, a short collective is mostly the host's: the way out of a barrier over TCP, launches,
and two waits for the device. In the stream, which is held back until all is queued, ranks meet by a tiny all-reduce of
their own, and events before and after the operations report what passed between them, as a training step would see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dlbench.errors import first_line
from dlbench.node.comm.execution import Execution
from dlbench.node.comm.transport import Counters, Transport, gloo_barrier, mpi_barrier
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import MOST_OPERATIONS, MOST_QUEUED, Clock, StreamTimer
from dlbench.perfmodels.algorithms import schedule
from dlbench.perfmodels.schedules import Layout, all_to_all_block, block, pipeline_chunks
from dlbench.specs.comm import IN_PLACE, LIBRARY, OUT_OF_PLACE, Collective, CommSpec

Timing = Literal["host clock", "in-stream"]


@dataclass(frozen=True)
class Vectors:
    """The memory of one size, used by all contestants in turn; both of the vector's length and on one device."""

    data: torch.Tensor  # What is worked on, and where the result is looked for.
    given: torch.Tensor  # This rank's input; nobody writes it.


class Contestant:
    """One way to do the collective."""

    algorithm: str
    carrier: str
    counters: Counters | None = None  # What it sent; None for libraries, which do not say.
    is_in_place: bool  # Whether it works on what the operation before left, in `Vectors.data`, not on `Vectors.given`.
    chunks: int | None = None  # Of the vectors bound, in which an algorithm of dlbench sends them.

    def bind(self, vectors: Vectors) -> str:
        """Prepares for vectors of one size; why it cannot do this one, or nothing."""
        raise NotImplementedError

    def line_up(self) -> None:
        """Waits for all ranks by the carrier's own barrier, where it has one: the last thing before the timer."""

    def run(self, times: int) -> None:
        """The collective, this many times back to back: this is timed. After an error it is of no use."""
        raise NotImplementedError


class OwnAlgorithm(Contestant):
    """An algorithm of dlbench over a transport."""

    def __init__(self, comm: CommSpec, algorithm: str, transport: Transport) -> None:
        self.algorithm = algorithm
        self.carrier = transport.carrier
        self.counters = transport.counters
        self.is_in_place = comm.collective in ("allreduce", "reduce-scatter", "reduce")
        self._comm = comm
        self.transport = transport
        self._execution: Execution | None = None

    def bind(self, vectors: Vectors) -> str:
        comm, transport = self._comm, self.transport
        layout = Layout(ranks=transport.size, group_size=transport.group_size)
        self.chunks = pipeline_chunks(comm.collective, self.algorithm, layout, len(vectors.data))
        steps = schedule(
            comm.collective,
            self.algorithm,
            transport.rank,
            transport.size,
            len(vectors.data),
            group_size=transport.group_size,
            shards=comm.shards,
            chunks=self.chunks,
        )
        source = vectors.given if comm.collective == "all-to-all" else None
        if self._execution is not None:
            self._execution.release()
        self._execution = Execution(steps, vectors.data, transport, source)
        return ""

    def line_up(self) -> None:
        self.transport.line_up()

    def run(self, times: int) -> None:
        assert self._execution is not None
        self._execution.run(times)


class Reference(Contestant):
    """A library's collective; each says in `_call` how, from `given` or `data` to `data`."""

    algorithm: str = LIBRARY

    def __init__(self, collective: Collective, place: RankPlace, carrier: str) -> None:
        self.carrier = carrier
        self._collective = collective
        self._place = place
        self.is_in_place = collective == "allreduce"
        self._run: Callable[[], object] | None = None

    def bind(self, vectors: Vectors) -> str:
        self._run = self._call(vectors)
        return ""

    def run(self, times: int) -> None:
        assert self._run is not None
        call = self._run
        try:
            for _ in range(times):
                call()
        except RuntimeError as error:  # mpi4py's own errors are of this kind
            raise passed_on(f"{self.carrier}: {first_line(error)}", error) from None

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        raise NotImplementedError

    def _own(self, vector: torch.Tensor) -> torch.Tensor:
        first, count = block(len(vector), self._place.size, self._place.rank)
        return vector[first : first + count]

    def _counts(self, elements: int) -> list[int]:
        return [block(elements, self._place.size, i)[1] for i in range(self._place.size)]

    def _sent_and_received(self, elements: int) -> tuple[list[int], list[int]]:
        size, rank = self._place.size, self._place.rank
        sent = [all_to_all_block(elements, size, rank, other)[2] for other in range(size)]
        return sent, [all_to_all_block(elements, size, other, rank)[2] for other in range(size)]


class TorchReference(Reference):
    """torch.distributed over a group of all ranks."""

    def __init__(self, collective: Collective, place: RankPlace, group: dist.ProcessGroup, backend: str) -> None:
        super().__init__(collective, place, f"torch-{backend}")
        self.is_in_place = collective in ("allreduce", "reduce")
        self._group = group
        self._backend = backend

    def line_up(self) -> None:
        if self._backend == "gloo":
            gloo_barrier(self._group)

    def bind(self, vectors: Vectors) -> str:
        elements, size = len(vectors.data), self._place.size
        of_equal = ("scatter", "gather", *(("all-gather",) if self._backend == "gloo" else ()))
        if self._collective in of_equal and elements % size:
            return (
                f"torch.distributed's {self._collective} over {self._backend} takes equal parts, and {size} ranks do "
                f"not divide {elements} elements"
            )
        return super().bind(vectors)

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        data, given, group = vectors.data, vectors.given, self._group
        size, is_root = self._place.size, self._place.rank == 0
        if self._collective == "allreduce":
            return lambda: dist.all_reduce(data, group=group)
        if self._collective == "reduce":
            return lambda: dist.reduce(data, 0, group=group)
        if self._collective == "broadcast":
            return lambda: dist.broadcast(data, 0, group=group)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(len(data))
            if len(data) % size:
                return lambda: dist.all_to_all_single(data, given, received, sent, group=group)
            return lambda: dist.all_to_all_single(data, given, group=group)
        own_data, own_given, counts = self._own(data), self._own(given), self._counts(len(data))
        if self._collective == "scatter":
            pieces = list(torch.split(given, counts)) if is_root else None
            return lambda: dist.scatter(own_data, pieces, 0, group=group)
        if self._collective == "gather":
            pieces = list(torch.split(data, counts)) if is_root else None
            return lambda: dist.gather(own_given, pieces, 0, group=group)
        if len(data) % size:
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

    def bind(self, vectors: Vectors) -> str:
        if self._collective in ("allreduce", "reduce-scatter", "reduce") and vectors.data.dtype != torch.float32:
            return "MPI has no 16-bit floating type to sum"
        return super().bind(vectors)

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
        if self._collective == "reduce":
            return lambda: world.Reduce([given, kind], [data, kind], op=mpi.SUM, root=0)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(elements)
            if elements % size:
                return lambda: world.Alltoallv([given, sent, kind], [data, received, kind])
            return lambda: world.Alltoall([given, kind], [data, kind])
        counts = self._counts(elements)
        own_data, own_given = self._array(self._own(vectors.data)), self._array(self._own(vectors.given))
        v, parts = ("v", [counts]) if elements % size else ("", [])  # The variant of unequal parts names them.
        if self._collective == "scatter":
            return partial(getattr(world, f"Scatter{v}"), [given, *parts, kind], [own_data, kind])
        if self._collective in ("all-gather", "gather"):
            name = "Gather" if self._collective == "gather" else "Allgather"
            return partial(getattr(world, name + v), [own_given, kind], [data, *parts, kind])
        if elements % size:
            return lambda: world.Reduce_scatter([given, kind], [own_data, kind], counts, op=mpi.SUM)
        return lambda: world.Reduce_scatter_block([given, kind], [own_data, kind], op=mpi.SUM)

    def _array(self, vector: torch.Tensor) -> Any:
        """The same memory as MPI takes it; 16-bit numbers as whole ones, which only travel."""
        return (vector if vector.dtype == torch.float32 else vector.view(torch.int16)).numpy()


def _newest(name: str, older: str) -> Any:
    """A function of torch.distributed under its name of today."""
    return getattr(dist, name, None) or getattr(dist, older)


class Sample(NamedTuple):
    """What one rank notes of some operations back to back."""

    start_ns: int  # When the first began, by the host's clock.
    duration_ns: int  # Of all.
    is_late: bool | None = None
    """Whether the device came to them before the host had queued all: it may have waited for calls. None: it was not
    held back."""


class HostSampleClock:
    """The host's clock, from a device that is idle to one that is idle again."""

    timing: Timing = "host clock"
    shares_starts = True  # Whether starts are readings of the host's clock at which operations really began.
    most_operations = MOST_OPERATIONS  # Of a sample.

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, contestant: Contestant, runs: int, each: int, what: object = None) -> Sample:
        """`runs` times `each` operations back to back; `what`: the same for operations that are alike."""
        first, duration = 0, 0
        for _ in range(runs):
            contestant.line_up()
            begin = time.perf_counter_ns()
            contestant.run(each)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            duration += time.perf_counter_ns() - begin
            first = first or begin
        return Sample(first, duration)


class StreamSampleClock(HostSampleClock):
    """Events of the stream in which the operations are ordered, behind a meeting of all ranks in it."""

    timing: Timing = "in-stream"
    shares_starts = False
    most_operations = MOST_QUEUED

    def __init__(self, meet: Callable[[], None], clock: Clock) -> None:
        """`meet` orders a barrier of all ranks in the stream; nobody waits for it on the host."""
        self._timer = StreamTimer(clock, meet)

    def time(self, contestant: Contestant, runs: int, each: int, what: object = None) -> Sample:
        first, seconds, is_late = 0, 0.0, False
        for _ in range(runs):
            contestant.line_up()
            first = first or time.perf_counter_ns()
            found = self._timer.time(lambda: contestant.run(each), each, what)
            seconds += found.seconds
            is_late |= found.is_late
        return Sample(first, round(seconds * 1e9), is_late)
