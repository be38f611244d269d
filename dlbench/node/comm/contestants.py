"""Implementations of collectives that are compared: dlbench's algorithms, and library calls as users make them."""

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
    """The memory of one size, used by all contestants in turn; both vectors have its length and are on one device."""

    data: torch.Tensor  # Buffer that the collective changes; holds the result.
    source: torch.Tensor  # This rank's input, which is never written.


class Contestant:
    """An implementation of the collective."""

    algorithm: str
    carrier: str
    counters: Counters | None = None  # Counts of sent messages and bytes; None for libraries, which do not count.
    is_in_place: bool  # Whether it works on `Vectors.data`, the result of the operation before, not `Vectors.source`.
    chunks: int | None = None  # Number of chunks in which an algorithm of dlbench sends the bound vectors.

    def bind(self, vectors: Vectors) -> str:
        """Prepares for vectors of one size; returns the reason if this size is not possible, or an empty text."""
        raise NotImplementedError

    def line_up(self) -> None:
        """Waits for all ranks by the carrier's barrier, if it has one, right before the timer starts."""

    def run(self, times: int) -> None:
        """Runs the collective `times` times back to back, which is timed; it cannot be used after an error."""
        raise NotImplementedError


class OwnAlgorithm(Contestant):
    """Runs an algorithm of dlbench over a transport."""

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
        source = vectors.source if comm.collective == "all-to-all" else None
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
    """Runs a library's collective, which subclasses return from `_call`: from `source` or `data` to `data`."""

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

    def _block_of(self, vector: torch.Tensor) -> torch.Tensor:
        first, count = block(len(vector), self._place.size, self._place.rank)
        return vector[first : first + count]

    def _counts(self, elements: int) -> list[int]:
        return [block(elements, self._place.size, i)[1] for i in range(self._place.size)]

    def _sent_and_received(self, elements: int) -> tuple[list[int], list[int]]:
        size, rank = self._place.size, self._place.rank
        sent = [all_to_all_block(elements, size, rank, other)[2] for other in range(size)]
        return sent, [all_to_all_block(elements, size, other, rank)[2] for other in range(size)]


class TorchReference(Reference):
    """Runs torch.distributed's collective over a group of all ranks."""

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
        needs_equal_parts = self._collective in ("scatter", "gather")
        if self._collective == "all-gather" and self._backend == "gloo":
            needs_equal_parts = True
        if needs_equal_parts and elements % size:
            return (
                f"torch.distributed's {self._collective} over {self._backend} takes equal parts, and {size} ranks do "
                f"not divide {elements} elements"
            )
        return super().bind(vectors)

    def _call(self, vectors: Vectors) -> Callable[[], object]:
        data, source, group = vectors.data, vectors.source, self._group
        size, is_root = self._place.size, self._place.rank == 0
        if self._collective == "allreduce":
            return partial(dist.all_reduce, data, group=group)
        if self._collective == "reduce":
            return partial(dist.reduce, data, 0, group=group)
        if self._collective == "broadcast":
            return partial(dist.broadcast, data, 0, group=group)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(len(data))
            if len(data) % size:
                return partial(dist.all_to_all_single, data, source, received, sent, group=group)
            return partial(dist.all_to_all_single, data, source, group=group)
        data_block, source_block, counts = self._block_of(data), self._block_of(source), self._counts(len(data))
        if self._collective == "scatter":
            pieces = list(torch.split(source, counts)) if is_root else None
            return partial(dist.scatter, data_block, pieces, 0, group=group)
        if self._collective == "gather":
            pieces = list(torch.split(data, counts)) if is_root else None
            return partial(dist.gather, source_block, pieces, 0, group=group)
        if len(data) % size:
            if self._collective == "all-gather":
                return partial(dist.all_gather, list(torch.split(data, counts)), source_block, group=group)
            return partial(dist.reduce_scatter, data_block, list(torch.split(source, counts)), group=group)
        if self._collective == "all-gather":
            gather = _newest("all_gather_single", "all_gather_into_tensor")
            return partial(gather, data, source_block, group=group)
        scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        return partial(scatter, data_block, source, group=group)


class MpiReference(Reference):
    """Runs MPI's blocking collective; the MPI library chooses the algorithm."""

    def __init__(self, collective: Collective, place: RankPlace, mpi: Any, *, in_place: bool = True) -> None:
        """Takes `mpi4py.MPI`; `in_place`: whether an all-reduce sums in place, or from `source` to `data`."""
        super().__init__(collective, place, "mpi")
        if collective == "allreduce":
            self.algorithm = IN_PLACE if in_place else OUT_OF_PLACE
            self.is_in_place = in_place
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
        kind = {torch.float32: mpi.FLOAT}.get(vectors.data.dtype, mpi.UINT16_T)
        data, source = self._array(vectors.data), self._array(vectors.source)
        elements, size = len(vectors.data), self._place.size
        if self._collective == "allreduce":
            send_buffer = mpi.IN_PLACE if self.is_in_place else [source, kind]
            return partial(world.Allreduce, send_buffer, [data, kind], op=mpi.SUM)
        if self._collective == "broadcast":
            return partial(world.Bcast, [data, kind], root=0)
        if self._collective == "reduce":
            return partial(world.Reduce, [source, kind], [data, kind], op=mpi.SUM, root=0)
        if self._collective == "all-to-all":
            sent, received = self._sent_and_received(elements)
            if elements % size:
                return partial(world.Alltoallv, [source, sent, kind], [data, received, kind])
            return partial(world.Alltoall, [source, kind], [data, kind])
        counts = self._counts(elements)
        data_block = self._array(self._block_of(vectors.data))
        source_block = self._array(self._block_of(vectors.source))
        # The variant for unequal parts takes their counts.
        suffix, counts_argument = ("v", [counts]) if elements % size else ("", [])
        if self._collective == "scatter":
            return partial(getattr(world, f"Scatter{suffix}"), [source, *counts_argument, kind], [data_block, kind])
        if self._collective in ("all-gather", "gather"):
            name = "Gather" if self._collective == "gather" else "Allgather"
            return partial(getattr(world, name + suffix), [source_block, kind], [data, *counts_argument, kind])
        if elements % size:
            return partial(world.Reduce_scatter, [source, kind], [data_block, kind], counts, op=mpi.SUM)
        return partial(world.Reduce_scatter_block, [source, kind], [data_block, kind], op=mpi.SUM)

    def _array(self, vector: torch.Tensor) -> Any:
        """Returns the memory as an array for MPI; 16-bit numbers, which are only moved, as integers."""
        if vector.dtype != torch.float32:
            vector = vector.view(torch.int16)
        return vector.numpy()


def _newest(name: str, older: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, older)


class Sample(NamedTuple):
    """The time of back-to-back operations on one rank."""

    start_ns: int  # Start of the first operation, by the host's clock.
    duration_ns: int  # Duration of all operations.
    is_late: bool | None = None
    """Whether the device began before the host had queued all operations; None: the device was not held."""


class HostSampleClock:
    """Times samples by the host's clock, with the device idle before and after."""

    timing: Timing = "host clock"
    shares_starts = True  # Whether starts are readings of the host's clock at which operations really began.
    most_operations = MOST_OPERATIONS  # Most operations of a sample.

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, contestant: Contestant, runs: int, operations: int, kind: object = None) -> Sample:
        """Times `runs` runs of `operations` back to back; `kind` is equal for operations that take as long."""
        first, duration = 0, 0
        for _ in range(runs):
            contestant.line_up()
            begin = time.perf_counter_ns()
            contestant.run(operations)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            duration += time.perf_counter_ns() - begin
            first = first or begin
        return Sample(first, duration)


class StreamSampleClock(HostSampleClock):
    """Times samples by events in the stream, after a barrier of all ranks in it, as a training step would see them."""

    # By the host's clock a short collective is mostly host time: leaving a barrier, launches, two waits for the device.

    timing: Timing = "in-stream"
    shares_starts = False
    most_operations = MOST_QUEUED

    def __init__(self, barrier: Callable[[], None], clock: Clock) -> None:
        """Takes a function that queues a barrier of all ranks in the stream, without a wait of the host."""
        self._timer = StreamTimer(clock, barrier)

    def time(self, contestant: Contestant, runs: int, operations: int, kind: object = None) -> Sample:
        first, total_s, was_late = 0, 0.0, False
        for _ in range(runs):
            contestant.line_up()
            first = first or time.perf_counter_ns()
            seconds, is_late = self._timer.time(partial(contestant.run, operations), operations, kind)
            total_s += seconds
            was_late |= is_late
        return Sample(first, round(total_s * 1e9), was_late)
