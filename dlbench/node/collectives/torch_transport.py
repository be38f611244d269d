"""Messages by torch.distributed: gloo between memories of hosts, NCCL between GPUs (not measured by the tests)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import PeerLostError
from dlbench.node.collectives.control import first_line
from dlbench.node.collectives.transport import SEGMENT_BYTES, Counters, Part, count_sends
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace


def gloo_barrier(group: dist.ProcessGroup) -> None:
    """Returns when all ranks of a group of gloo are here; they wait asleep, and wake some 10 us apart.

    Raises:
        RunError: a rank is gone or stuck.
    """
    try:
        dist.barrier(group)
    except RuntimeError as error:
        raise PeerLostError(f"gloo's barrier failed: {first_line(error)}") from None


class GlooTransport:
    """Point-to-point messages of gloo, without the dispatch of torch.distributed's functions.

    The group's own timeout is that of every wait.
    """

    carrier = "torch-gloo"
    early = True

    def __init__(
        self, group: dist.ProcessGroup, place: RankPlace, group_size: int, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`group` holds all ranks of the run, in order."""
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.segment_bytes: int | None = segment_bytes
        self.counters = Counters()
        self._group = group
        self._backend: Any = group._get_backend(torch.device("cpu"))

    def wrap(self, run: torch.Tensor) -> Any:
        return [run]

    def line_up(self) -> None:
        gloo_barrier(self._group)

    def post(self, receives: Sequence[Part], sends: Sequence[Part]) -> tuple[list[Any], list[Any]]:
        backend = self._backend
        try:
            arriving = [backend.recv(part.handle, part.peer, part.tag) for part in receives]
            leaving = [backend.send(part.handle, part.peer, part.tag) for part in sends]
        except RuntimeError as error:
            raise passed_on(f"gloo refuses a message: {first_line(error)}", error) from None
        count_sends(self.counters, sends)
        return arriving, leaving

    def wait(self, pending: Any, part: Part, direction: str) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            raise PeerLostError(f"the message {direction} rank {part.peer} failed: {first_line(error)}") from None


class NcclTransport:
    """Point-to-point messages of NCCL, all of a step in one group call: NCCL knows neither tags nor order.

    Waiting orders the stream, not the host; who measures must synchronise.
    """

    carrier = "torch-nccl"
    early = False
    segment_bytes: int | None = None

    def __init__(self, group: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        """`group` holds all ranks of the run, in order."""
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.counters = Counters()
        self._group = group

    def wrap(self, run: torch.Tensor) -> Any:
        return run

    def line_up(self) -> None:
        """NCCL's barrier orders a stream, not the host."""

    def post(self, receives: Sequence[Part], sends: Sequence[Part]) -> tuple[list[Any], list[Any]]:
        operations = [dist.P2POp(dist.irecv, part.handle, part.peer, self._group) for part in receives]
        operations += [dist.P2POp(dist.isend, part.handle, part.peer, self._group) for part in sends]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise passed_on(f"NCCL refuses the messages of a step: {first_line(error)}", error) from None
        count_sends(self.counters, sends)
        # One work stands for the whole group call.
        return works[-1:] * len(receives), works[-1:] * len(sends)

    def wait(self, pending: Any, part: Part, direction: str) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            raise PeerLostError(f"the message {direction} rank {part.peer} failed: {first_line(error)}") from None
