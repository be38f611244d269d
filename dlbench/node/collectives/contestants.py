"""What is timed side by side: dlbench's own algorithms, and collectives of libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dlbench.costs.schedules import schedule
from dlbench.node.collectives.executor import Execution
from dlbench.node.collectives.transport import Counters, Transport
from dlbench.specs.collectives import CommSpec


@dataclass(frozen=True)
class Vectors:
    """The memory of one size, used by all contestants in turn; both of the vector's length and on one device."""

    data: torch.Tensor
    """What is worked on, and where the result is looked for."""
    given: torch.Tensor
    """This rank's input; nobody writes it."""


class Contestant(Protocol):
    """One way to do the collective."""

    algorithm: str
    carrier: str
    counters: Counters | None
    """What it sent; None for libraries, which do not tell."""
    is_in_place: bool
    """Whether it works on what the operation before left, in `Vectors.data`; otherwise it reads `Vectors.given`."""

    def bind(self, vectors: Vectors) -> str:
        """Prepares for vectors of one size; why it cannot do this one, or nothing.

        Raises:
            DlbenchError: the algorithm does not exist for these ranks.
        """

    def line_up(self) -> None:
        """Waits for all ranks by the carrier's own barrier, where it has one: the last thing before the timer.

        Raises:
            RunError: a rank is gone or stuck.
        """

    def run(self, times: int) -> None:
        """The collective, so many times back to back: this is timed.

        Raises:
            RunError: it failed, and nothing can be done with it any more.
        """

    def settle(self) -> None:
        """Puts a result that the library keeps elsewhere into the data; not timed."""


class OwnAlgorithm:
    """An algorithm of dlbench over a transport."""

    def __init__(self, comm: CommSpec, algorithm: str, transport: Transport) -> None:
        self.algorithm = algorithm
        self.carrier = transport.carrier
        self.counters: Counters | None = transport.counters
        self.is_in_place = comm.collective in ("allreduce", "reduce-scatter")
        self._comm = comm
        self._transport = transport
        self._execution: Execution | None = None

    def bind(self, vectors: Vectors) -> str:
        comm, transport = self._comm, self._transport
        steps = schedule(
            comm.collective,
            self.algorithm,
            transport.rank,
            transport.size,
            len(vectors.data),
            group_size=transport.group_size,
            shards=comm.shards,
        )
        source = vectors.given if comm.collective == "all-to-all" else None
        self._execution = Execution(steps, vectors.data, transport, source)
        return ""

    def line_up(self) -> None:
        self._transport.line_up()

    def run(self, times: int) -> None:
        assert self._execution is not None
        for _ in range(times):
            self._execution.run()

    def settle(self) -> None:
        """The result is there already."""
