"""Messages by MPI (mpi4py), as bytes: MPI has no 16-bit floating types."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch

from dlbench.errors import EnvironmentLacksError, PeerLostError
from dlbench.node.collectives.control import first_line
from dlbench.node.collectives.transport import SEGMENT_BYTES, Counters, Part, count_sends
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.specs.launch import LauncherName

_POLLS = 256
"""Tests of a request between two looks at the clock."""


def start_mpi(place: RankPlace, launcher: LauncherName, *, many_threads: bool) -> Any:
    """The module `mpi4py.MPI`, initialised; it is finalised by `stop_mpi` alone.

    Args:
        place: this rank, as the launcher told.
        launcher: of the plan. Outside of an MPI launcher MPI would start each rank as a world of its own.
        many_threads: whether another library calls MPI from a thread of its own.

    Raises:
        EnvironmentLacksError: no mpi4py, no MPI library, or MPI sees other ranks than planned.
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
        _initialise(MPI, MPI.THREAD_MULTIPLE if many_threads else MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    if world.Get_size() != place.size or world.Get_rank() != place.rank:
        raise EnvironmentLacksError(
            f"mpi: MPI sees rank {world.Get_rank()} of {world.Get_size()}, the launcher says rank {place.rank} of "
            f"{place.size}; mpi4py must use the MPI that the launcher belongs to"
        )
    return MPI


def _initialise(mpi: Any, thread_level: int) -> None:
    """Starts MPI, which waits for all ranks, with Python's interpreter free.

    mpi4py would hold the interpreter meanwhile, and rank 0 could not answer (`KeyServer`, a thread of Python) those
    who still need its keys before they come here: nobody would ever arrive.
    """
    provided = ctypes.c_int()
    failed = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, thread_level, ctypes.byref(provided))
    if failed:
        raise EnvironmentLacksError(f"mpi: MPI_Init_thread failed with {failed}; is this rank started by the launcher?")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI itself
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def stop_mpi(mpi: Any) -> None:
    """Ends MPI; all ranks must come here."""
    if not mpi.Is_finalized():
        mpi.Finalize()


def mpi_barrier(world: Any) -> None:
    """Returns when all ranks of a communicator are here; ranks leave it awake, within about a message's time.

    Raises:
        RunError: MPI says so.
    """
    try:
        world.Barrier()
    except RuntimeError as error:
        raise passed_on(f"MPI's barrier failed: {first_line(error)}", error) from None


class MpiTransport:
    """Isend and Irecv; waiting polls, because MPI's own waits know no deadline."""

    carrier = "mpi"
    early = True

    def __init__(
        self, mpi: Any, place: RankPlace, group_size: int, timeout_s: float, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`mpi` is what `start_mpi` gave; `timeout_s` the longest wait for one part, seconds."""
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.segment_bytes: int | None = segment_bytes
        self.counters = Counters()
        self._byte = mpi.BYTE
        self._world = mpi.COMM_WORLD.Dup()  # no other library's messages meet ours
        self._timeout_s = timeout_s

    def wrap(self, run: torch.Tensor) -> Any:
        return [run.view(torch.uint8).numpy(), self._byte]

    def line_up(self) -> None:
        mpi_barrier(self._world)

    def post(self, receives: Sequence[Part], sends: Sequence[Part]) -> tuple[list[Any], list[Any]]:
        world = self._world
        try:
            arriving = [world.Irecv(part.handle, part.peer, part.tag) for part in receives]
            leaving = [world.Isend(part.handle, part.peer, part.tag) for part in sends]
        except RuntimeError as error:
            raise passed_on(f"MPI refuses a message: {first_line(error)}", error) from None
        count_sends(self.counters, sends)
        return arriving, leaving

    def wait(self, pending: Any, part: Part, direction: str) -> None:
        try:
            if pending.Test():
                return
            deadline = time.monotonic() + self._timeout_s
            while time.monotonic() < deadline:
                for _ in range(_POLLS):
                    if pending.Test():
                        return
        except RuntimeError as error:
            raise PeerLostError(f"the message {direction} rank {part.peer} failed: {first_line(error)}") from None
        raise PeerLostError(f"the message {direction} rank {part.peer} was not through within {self._timeout_s:g} s")
