"""What carries the messages between ranks: gloo, NCCL or MPI, and what they carried.

Over MPI each message is a persistent request (MPI 4.1, section 3.9), made once and used in every iteration. Of 64 KiB
between two ranks of a node it would otherwise be half of the time.
"""

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
    """What one rank sent, counted when it was handed to the library.

    A message is one transfer of the schedule, in however many segments it travels: that is what the closed forms of the
    algorithms count. Bytes are those of the segments.
    """

    steps: int = 0  # Steps gone through, also those without a message of this rank: steps of all ranks correspond.
    messages: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0  # Those that left the group of the sender.

    def reset(self) -> None:
        self.steps = self.messages = self.bytes_sent = self.bytes_across = 0


Operation = Callable[[], object]


@dataclass(slots=True)
class MessagePart:
    """A message, or a segment of one: a run of elements in memory, and the rank at the other end."""

    begin: Operation  # Of a part that is under way it is not called again before `finish`.
    finish: Operation  # Returns when it is through.
    release: Operation
    peer: int
    sends: bool
    num_bytes: int

    def lost(self, error: BaseException) -> PeerLostError:
        direction = "to" if self.sends else "from"
        return PeerLostError(f"the message {direction} rank {self.peer} failed: {first_line(error)}")


class Transport:
    """Messages between two ranks. Errors end the use of a transport: none of it works afterwards."""

    carrier: str  # What moves the bytes, e.g. torch-gloo.
    early = True  # Whether receives may be posted before this rank comes to their step.
    segment_bytes: int | None = 1024 * 1024
    """Longer messages travel in such segments: one is summed up while the next arrives; None: no message is cut."""

    def __init__(self, place: RankPlace, group_size: int) -> None:
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.counters = Counters()

    def part(self, run: torch.Tensor, peer: int, tag: int, *, sends: bool) -> MessagePart:
        """A contiguous run of elements, sent to or received from a rank; made once and used in every iteration."""
        begin, finish, release = self._operations(run, peer, tag, sends)
        return MessagePart(begin, finish, release, peer, sends, run.nbytes)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        raise NotImplementedError

    def line_up(self) -> None:
        """Waits for all ranks by what carries the messages, where that has a barrier of the host."""

    def together(self, parts: Sequence[MessagePart]) -> list[Operation]:
        """What begins these parts; receives come first."""
        return [part.begin for part in parts]

    def refused(self, error: RuntimeError) -> BaseException:
        return passed_on(f"{self.carrier} refuses a message: {first_line(error)}", error)


def gloo_barrier(group: dist.ProcessGroup) -> None:
    """Returns when all ranks of a group of gloo are here; they wait asleep, and wake some 10 us apart."""
    try:
        dist.barrier(group)
    except RuntimeError as error:
        raise PeerLostError(f"gloo's barrier failed: {first_line(error)}") from None


class GlooTransport(Transport):
    """Point-to-point messages of gloo, without the dispatch of torch.distributed's functions. The groups' own timeout
    is that of every wait.

    Each direction between two ranks has a group, so a connection, of its own. While a thread writes to one, gloo's
    event loop comes round for its lock as long as something arrives there (`Pair::handleEvents` of its
    transport/tcp/pair.cc), on a core that both share till the end of its time slice.
    """

    carrier = "torch-gloo"

    def __init__(self, up: dist.ProcessGroup, down: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        """`up` carries messages to higher ranks, `down` those to lower ones; all ranks are in both."""
        super().__init__(place, group_size)
        self._group = up
        self._ways: tuple[Any, ...] = tuple(group._get_backend(torch.device("cpu")) for group in (down, up))

    def line_up(self) -> None:
        gloo_barrier(self._group)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        way = self._ways[(peer > self.rank) == sends]
        call, runs, work = way.send if sends else way.recv, [run], list[Any]()
        return lambda: work.append(call(runs, peer, tag)), lambda: work.pop().wait(), work.clear


class TorchNcclTransport(Transport):
    """Point-to-point messages of NCCL, all of a step in one group call: NCCL knows neither tags nor order. Waiting
    orders the stream, not the host; who measures must synchronise.
    """

    carrier = "torch-nccl"
    early = False
    segment_bytes = None

    def __init__(self, group: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        super().__init__(place, group_size)
        self._group = group
        self._open: list[dist.P2POp] = []
        self._work: Any = None  # Of the last group call: those before it are through in the stream when it is.

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        operation = dist.P2POp(dist.isend if sends else dist.irecv, run, peer, self._group)
        return lambda: self._open.append(operation), lambda: self._work.wait(), list

    def together(self, parts: Sequence[MessagePart]) -> list[Operation]:
        def call() -> None:
            self._work = dist.batch_isend_irecv(self._open)[-1]  # One work stands for the whole group call.
            self._open.clear()

        return [*(part.begin for part in parts), call] if parts else []


def start_mpi(place: RankPlace, launcher: LauncherName) -> Any:
    """The module `mpi4py.MPI`, initialised; it is finalised by `stop_mpi` alone.

    Outside of an MPI launcher MPI would start each rank as a world of its own.
    """
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
    """Starts MPI, which waits for all ranks, with Python's interpreter free.

    mpi4py would hold the interpreter meanwhile, and rank 0 could not answer (Horovod's rendezvous, a thread of Python)
    those who still need its keys before they come here: nobody would ever arrive.
    """
    provided = ctypes.c_int()
    failed = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, thread_level, ctypes.byref(provided))
    if failed:
        raise EnvironmentLacksError(f"mpi: MPI_Init_thread failed with {failed}; is this rank started by the launcher?")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI itself
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def stop_mpi(mpi: Any) -> None:
    """Ends MPI, which waits for all ranks, with Python's interpreter free.

    mpi4py's `Finalize` would hold the interpreter, and no `Deadline` could end a rank that waits there for ever.
    """
    if not mpi.Is_finalized():
        ctypes.CDLL(mpi.__file__).MPI_Finalize()


def mpi_barrier(world: Any) -> None:
    """Returns when all ranks of a communicator are here; ranks leave it awake, within about a message's time."""
    try:
        world.Barrier()
    except RuntimeError as error:
        raise passed_on(f"MPI's barrier failed: {first_line(error)}", error) from None


class MpiTransport(Transport):
    """Persistent requests. MPI's waits know no deadline: who runs it has a `Deadline`."""

    carrier = "mpi"

    def __init__(self, mpi: Any, place: RankPlace, group_size: int) -> None:
        """`mpi` is what `start_mpi` gave."""
        super().__init__(place, group_size)
        self._byte = mpi.BYTE
        self._world = mpi.COMM_WORLD.Dup()  # no other library's messages meet ours

    def line_up(self) -> None:
        mpi_barrier(self._world)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        make = self._world.Send_init if sends else self._world.Recv_init
        request = make([run.view(torch.uint8).numpy(), self._byte], peer, tag)
        return request.Start, request.Wait, request.Free
