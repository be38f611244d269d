"""Messages between ranks of the collective benchmark: point to point over gloo, NCCL or MPI, with counters of what was
sent; the control channel by which ranks agree on the next step; and a deadline for libraries that hang.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError, ExitCode, PeerLostError, first_line
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.run_store import gather_over_torch, meet
from dlbench.records.folder import RunFolder
from dlbench.specs.launch import LauncherName

Operation = Callable[[], object]
LATE_S = 5.0  # Added to the timeout, so that calls that have one end by themselves.
_POLL_S = 0.5  # Polling interval of the deadline.


@dataclass(slots=True)
class Counters:
    """Messages (transfers of the schedule, whatever their segments) and bytes that one rank gave to the library."""

    steps: int = 0  # Completed steps, also those without a message of this rank, so that all ranks count the same.
    messages: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0  # Bytes sent to ranks of other groups.

    def reset(self) -> None:
        self.steps = self.messages = self.bytes_sent = self.bytes_across = 0


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


class Control:
    """A gloo group over all ranks. Every call takes its purpose, which the error names if a rank is gone."""

    def __init__(self, place: RankPlace, timeout_s: float, rendezvous_s: float) -> None:
        """Takes timeouts in seconds: `rendezvous_s` until all ranks are connected, `timeout_s` for any later wait."""
        self._place = place
        self._patience = datetime.timedelta(seconds=rendezvous_s)
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def start(self, folder: RunFolder, interface: str | None) -> None:
        """Connects to the other ranks by the run's shared folder; `interface` None: gloo uses the one to rank 0."""
        place = self._place
        self._store = store = meet(folder.rendezvous, place, interface, self._patience)
        try:
            # Ranks may start minutes apart; from here on the short timeout is used.
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=self._timeout)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {place.rank}: not all {place.size} ranks connected: {first_line(error)}"
            ) from None

    def new_group(self, backend: str, purpose: str) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=self._timeout)
        except RuntimeError as error:
            raise passed_on(f"rank {self._place.rank}, {purpose}: {first_line(error)}", error) from None
        return group

    def gather(self, purpose: str, value: Any) -> list[Any]:
        """Returns the JSON-serialisable `value` of every rank, by rank; raises `RunError` if a rank is gone."""
        try:
            return gather_over_torch(value, self._place.size)
        except RuntimeError as error:
            raise self._lost(purpose, error) from None

    def barrier(self, purpose: str) -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise self._lost(purpose, error) from None

    def stop(self) -> None:
        """Leaves all groups; only after success, because it waits for all ranks."""
        dist.destroy_process_group()

    def _lost(self, purpose: str, error: BaseException) -> PeerLostError:
        return PeerLostError(f"rank {self._place.rank}, {purpose}: another rank is gone or stuck: {first_line(error)}")


class Deadline:
    """A thread that ends the process if the current call takes too long."""

    def __init__(self, rank: int, timeout_s: float, on_expiry: Callable[[str], None] | None = None) -> None:
        """Takes the timeout; `on_expiry` gets the reason in one line before the process ends with exit code 124."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._call: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dlbench-deadline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, purpose: str) -> None:
        self._call = (purpose, time.monotonic())

    def end(self) -> None:
        self._call = None

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            call = self._call
            if call is None:
                continue
            purpose, began = call
            if time.monotonic() - began < self._timeout_s + LATE_S:
                continue
            reason = (
                f"rank {self._rank}, {purpose}: not done within {self._timeout_s:g} s; another rank is gone or stuck"
            )
            print(f"dlbench: error: {reason}", file=sys.stderr, flush=True)
            try:
                if self._on_expiry is not None:
                    self._on_expiry(reason)
            finally:
                os._exit(int(ExitCode.TIMEOUT))
