"""Times all contestants of one size in turns, so that drift of the machine falls on all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dlbench.errors import RunError
from dlbench.node.collectives.contestants import Contestant, Vectors
from dlbench.node.collectives.control import Control
from dlbench.node.collectives.deadline import Deadline
from dlbench.node.collectives.inputs import DTYPES, Inputs
from dlbench.node.collectives.verify import check
from dlbench.node.ranks import RankPlace
from dlbench.records.collectives import CommPoint
from dlbench.specs.collectives.plan import ELEMENT_BYTES, CommSpec
from dlbench.units import format_bytes


@dataclass
class _Taken:
    """What one rank noted of one contestant."""

    durations_ns: list[int] = field(default_factory=list)
    counters: dict[str, int] | None = None
    max_error: float | None = None
    problem: str = ""


class Measurement:
    """Everything that is the same for all sizes."""

    def __init__(
        self,
        comm: CommSpec,
        place: RankPlace,
        device: torch.device,
        control: Control,
        deadline: Deadline,
        beat: Callable[[str], None],
        *,
        largest_input: int | None = None,
    ) -> None:
        """`largest_input` is the largest entry of inputs; None for one with which sums are exact."""
        self._comm = comm
        self._place = place
        self._device = device
        self._control = control
        self._deadline = deadline
        self._beat = beat
        self._largest_input = largest_input

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """One point for each contestant; the same on every rank.

        Raises:
            RunError: ranks differ in what to do, or a collective failed; no other can follow.
        """
        comm = self._comm
        elements = num_bytes // ELEMENT_BYTES[comm.dtype]
        self._agree(contestants, elements)
        inputs = Inputs(
            comm.collective, self._place.rank, self._place.size, elements, comm.dtype, largest=self._largest_input
        )
        given = inputs.given().to(self._device)
        vectors = Vectors(torch.zeros(elements, dtype=DTYPES[comm.dtype], device=self._device), given)
        taken = {contestant: _Taken(problem=contestant.bind(vectors)) for contestant in contestants}
        able = [contestant for contestant in contestants if not taken[contestant].problem]
        gc.collect()
        gc.disable()
        try:
            for iteration in range(comm.warmup + comm.iterations):
                for contestant in able:
                    self._iterate(contestant, iteration, vectors, inputs, taken[contestant])
        finally:
            gc.enable()
        return [self._point(contestant, num_bytes, taken[contestant]) for contestant in contestants]

    def _agree(self, contestants: Sequence[Contestant], elements: int) -> None:
        comm = self._comm
        point = {
            "collective": comm.collective,
            "algorithms": ", ".join(f"{c.algorithm} ({c.carrier})" for c in contestants),
            "elements": elements,
            "dtype": comm.dtype,
            "iterations": comm.iterations,
            "warmup": comm.warmup,
            "shards": comm.shards,
            "check": comm.check,
        }
        self._control.agree("next point", point)

    def _iterate(self, contestant: Contestant, iteration: int, vectors: Vectors, inputs: Inputs, taken: _Taken) -> None:
        comm = self._comm
        size = format_bytes(vectors.data.numel() * vectors.data.element_size())
        what = f"{comm.collective} {contestant.algorithm} ({contestant.carrier}) of {size}, iteration {iteration}"
        self._beat(what)
        inputs.reset(vectors.data, vectors.given)
        counters = contestant.counters
        if counters is not None:
            counters.reset()
        self._synchronise()
        self._control.barrier(what)
        self._deadline.begin(what)
        try:
            begin = time.perf_counter_ns()
            contestant.run()
            self._synchronise()
            end = time.perf_counter_ns()
        except RunError as error:
            raise type(error)(f"rank {self._place.rank}, {what}: {error}") from None
        self._deadline.end()
        if iteration >= comm.warmup:
            taken.durations_ns.append(end - begin)
        if iteration == comm.warmup + comm.iterations - 1:
            contestant.settle()
            taken.counters = None if counters is None else asdict(counters)
            if comm.check:
                verdict = check(inputs, vectors.data)
                taken.max_error, taken.problem = verdict.max_error, verdict.problem

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _point(self, contestant: Contestant, num_bytes: int, taken: _Taken) -> CommPoint:
        comm = self._comm
        what = f"results of {contestant.algorithm} ({contestant.carrier})"
        everyone = [_Taken(**item) for item in self._control.gather(what, asdict(taken))]
        was_run = bool(everyone[0].durations_ns)
        wrong = [f"rank {rank}: {item.problem}" for rank, item in enumerate(everyone) if item.problem]
        errors = [item.max_error for item in everyone]
        counted = [item.counters for item in everyone if item.counters is not None]
        return CommPoint(
            collective=comm.collective,
            algorithm=contestant.algorithm,
            carrier=contestant.carrier,
            num_bytes=num_bytes,
            dtype=comm.dtype,
            times_s=tuple(max(row) / 1e9 for row in zip(*(item.durations_ns for item in everyone), strict=True)),
            correct=not wrong if comm.check and was_run else None,
            max_error=_worst(errors) if comm.check and was_run else None,
            steps=max(item["steps"] for item in counted) if counted else None,
            **{name: tuple(item[name] for item in counted) for name in ("messages", "bytes_sent", "bytes_across")},
            problem=wrong[0].partition(": ")[2] if wrong and not was_run else "; ".join(wrong[:3]),
        )


def _worst(errors: Sequence[Any]) -> float | None:
    """The largest; None where one is not a number."""
    return None if any(error is None for error in errors) else float(max(errors))
