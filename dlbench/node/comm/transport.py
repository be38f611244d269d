"""Point-to-point messages between ranks over gloo, NCCL or MPI, and counters of what was sent."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError, PeerLostError, first_line
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.specs.launch import LauncherName


@dataclass(slots=True)
class Counters:
    """Messages (transfers of the schedule, whatever their segments) and bytes that one rank gave to the library."""

    steps: int = 0  # Completed steps, also those without a message of this rank, so that all ranks count the same.
    messages: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0  # Bytes sent to ranks of other groups.

    def reset(self) -> None:
        self.steps = self.messages = self.bytes_sent = self.bytes_across = 0


Operation = Callable[[], object]


@dataclass(slots=True)
class MessagePart:
    """A message, or a segment of one: consecutive elements in memory, sent to or received from a rank."""

    begin: Operation  # Starts the transfer; not called again before `finish`.
    finish: Operation  # Waits for the end of the transfer.
    release: Operation  # Frees the library's resources.
    peer: int
    sends: bool
    num_bytes: int

    def lost(self, error: BaseException) -> PeerLostError:
        direction = "to" if self.sends else "from"
        return PeerLostError(f"the message {direction} rank {self.peer} failed: {first_line(error)}")


class Transport:
    """Sends and receives messages; it cannot be used after an error."""

    carrier: str  # Library that sends the bytes, e.g. torch-gloo.
    early = True  # Whether receives may be posted before their step.
    segment_bytes: int | None = 1024 * 1024
    """Longer messages are sent in segments of this size: one is summed while the next arrives. None: no segments."""

    def __init__(self, place: RankPlace, group_size: int) -> None:
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.counters = Counters()

    def part(self, run: torch.Tensor, peer: int, tag: int, *, sends: bool) -> MessagePart:
        """Makes a transfer of the contiguous elements `run` to or from a rank, which is used in every iteration."""
        begin, finish, release = self._operations(run, peer, tag, sends)
        return MessagePart(begin, finish, release, peer, sends, run.nbytes)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        raise NotImplementedError

    def line_up(self) -> None:
        """Waits for all ranks by the carrier's barrier, if it has one on the host."""

    def together(self, parts: Sequence[MessagePart]) -> list[Operation]:
        """Returns the operations that begin these parts; receives come first."""
        return [part.begin for part in parts]

    def refused(self, error: RuntimeError) -> BaseException:
        return passed_on(f"{self.carrier} refuses a message: {first_line(error)}", error)


def gloo_barrier(group: dist.ProcessGroup) -> None:
    """Waits for all ranks of a gloo group; they sleep meanwhile, and wake some 10 us apart."""
    try:
        dist.barrier(group)
    except RuntimeError as error:
        raise PeerLostError(f"gloo's barrier failed: {first_line(error)}") from None


class GlooTransport(Transport):
    """Point-to-point messages of gloo, without the dispatch of torch.distributed; waits have the groups' timeout."""

    # Each direction has a separate group, and so a separate connection: while a thread writes to one, gloo's event loop
    # polls for its lock as long as data arrives there (`Pair::handleEvents` of transport/tcp/pair.cc).

    carrier = "torch-gloo"

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        """Takes two groups of all ranks: `up` for messages to higher ranks, `down` for those to lower ranks."""
        super().__init__(place, group_size)
        self._group = up
        self._up: Any = up._get_backend(torch.device("cpu"))
        self._down: Any = down._get_backend(torch.device("cpu"))

    def line_up(self) -> None:
        gloo_barrier(self._group)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        backend = self._up if (peer > self.rank) == sends else self._down
        call = backend.send if sends else backend.recv
        runs, work = [run], list[Any]()
        return lambda: work.append(call(runs, peer, tag)), lambda: work.pop().wait(), work.clear


class TorchNcclTransport(Transport):
    """NCCL's messages, all of a step in one group call, as it has no tags; waits hold the stream, not the host."""

    carrier = "torch-nccl"
    early = False
    segment_bytes = None

    def __init__(self, group: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        super().__init__(place, group_size)
        self._group = group
        self._open: list[dist.P2POp] = []
        self._work: Any = None  # Work of the last group call; it ends after all earlier ones in the stream.

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        operation = dist.P2POp(dist.isend if sends else dist.irecv, run, peer, self._group)
        return lambda: self._open.append(operation), lambda: self._work.wait(), list

    def together(self, parts: Sequence[MessagePart]) -> list[Operation]:
        def call() -> None:
            self._work = dist.batch_isend_irecv(self._open)[-1]  # the whole group call is one work
            self._open.clear()

        if not parts:
            return []
        return [*(part.begin for part in parts), call]


def start_mpi(place: RankPlace, launcher: LauncherName) -> Any:
    """Returns `mpi4py.MPI`, initialised; without an MPI launcher each rank would be a separate world."""
    if launcher not in ("mpirun", "srun-mpi"):
        raise EnvironmentLacksError(f"mpi: needs launcher mpirun or srun-mpi, this run was started by {launcher}")
    try:
        import mpi4py
    except ImportError:
        raise EnvironmentLacksError("mpi: mpi4py is not installed; run pip install 'dlbench[mpi]'") from None
    mpi4py.rc.finalize = False  # at exit it would wait for ranks that are dead
    mpi4py.rc.initialize = False  # `_initialise` does it
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"mpi: mpi4py finds no MPI library ({first_line(error)}); install Open MPI, or load its module"
        ) from None
    if not MPI.Is_initialized():
        _initialise(MPI, MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    if world.Get_size() != place.size or world.Get_rank() != place.rank:
        raise EnvironmentLacksError(
            f"mpi: MPI sees rank {world.Get_rank()} of {world.Get_size()}, the launcher says rank {place.rank} of "
            f"{place.size}; mpi4py must use the MPI that the launcher belongs to"
        )
    return MPI


def _initialise(mpi: Any, thread_level: int) -> None:
    """Starts MPI, which waits for all ranks, without holding the GIL, which mpi4py would hold."""
    # Horovod's rendezvous, a Python thread of rank 0, must serve ranks that need its keys before they get here.
    provided = ctypes.c_int()
    failed = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, thread_level, ctypes.byref(provided))
    if failed:
        raise EnvironmentLacksError(f"mpi: MPI_Init_thread failed with {failed}; is this rank started by the launcher?")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI itself
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def stop_mpi(mpi: Any) -> None:
    """Ends MPI without the GIL, which mpi4py's `Finalize` holds, so that no `Deadline` could end a hanging rank."""
    if not mpi.Is_finalized():
        ctypes.CDLL(mpi.__file__).MPI_Finalize()


def mpi_barrier(world: Any) -> None:
    """Waits for all ranks of a communicator; they poll, and leave within about a message's time."""
    try:
        world.Barrier()
    except RuntimeError as error:
        raise passed_on(f"MPI's barrier failed: {first_line(error)}", error) from None


class MpiTransport(Transport):
    """Persistent requests of MPI; its waits have no timeout, so callers need a `Deadline`."""

    carrier = "mpi"

    def __init__(self, mpi: Any, place: RankPlace, group_size: int) -> None:
        """Takes the module that `start_mpi` returned."""
        super().__init__(place, group_size)
        self._byte = mpi.BYTE
        self._world = mpi.COMM_WORLD.Dup()  # separates messages from those of other libraries

    def line_up(self) -> None:
        mpi_barrier(self._world)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        make = self._world.Send_init if sends else self._world.Recv_init
        request = make([run.view(torch.uint8).numpy(), self._byte], peer, tag)
        return request.Start, request.Wait, request.Free
