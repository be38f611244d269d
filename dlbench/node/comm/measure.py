"""Times all contestants of one size in turns, so that drift of the machine falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dlbench.errors import RunError
from dlbench.node.comm.contestants import Contestant, HostSampleClock, Sample, Vectors
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.inputs import DTYPES, Inputs, check
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import LEAST_SAMPLE_S, Timed, enough_operations, over_ranks
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import ELEMENT_BYTES, ROOTED, CommSpec
from dlbench.units import format_bytes

_TRIALS = 3  # Samples of each number of operations that is tried.
_COLD = 100  # This many times as long as a sample need be, the first operation is no short one, however cold it was.


@dataclass
class _Taken:
    """What one rank noted of one contestant."""

    operations: int = 1  # Of each sample; the same on all ranks.
    is_cut: bool = False  # Whether more of them would have been more than the host queues in time.
    samples: list[Sample] = field(default_factory=list)
    single: list[Sample] = field(default_factory=list)
    """One operation alone by the host's clock, where the samples are timed otherwise."""
    counters: dict[str, int] | None = None  # Of one operation.
    max_error: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Size:
    """What all contestants of one size share."""

    vectors: Vectors
    inputs: Inputs
    text: str


class CollectiveTimer:
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
        clock: HostSampleClock | None = None,
    ) -> None:
        """`beat`: called before each iteration with what comes next. `clock`: times samples; None: the host's."""
        self._comm = comm
        self._place = place
        self._device = device
        self._control = control
        self._deadline = deadline
        self._beat = beat
        before = control.gather("clocks before", [place.host, time.perf_counter_ns()])
        after = control.gather("clocks after", time.perf_counter_ns())
        # Nobody has passed the first gathering before everybody has read the clock for it.
        self._one_clock = len({host for host, _ in before}) == 1 and max(reading for _, reading in before) <= min(after)
        self._host_clock = HostSampleClock(device)
        self._clock: HostSampleClock = self._host_clock if clock is None else clock

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """One point for each contestant; the same on every rank. After a `RunError` no other can follow."""
        comm = self._comm
        elements = num_bytes // ELEMENT_BYTES[comm.dtype]
        inputs = Inputs(comm.collective, self._place.rank, self._place.size, elements, comm.dtype)
        given = inputs.given().to(self._device)
        vectors = Vectors(torch.zeros(elements, dtype=DTYPES[comm.dtype], device=self._device), given)
        size = _Size(vectors, inputs, format_bytes(num_bytes))
        taken = {contestant: _Taken(problem=contestant.bind(vectors)) for contestant in contestants}
        able = [contestant for contestant in contestants if not taken[contestant].problem]
        for contestant in able:
            taken[contestant].operations, taken[contestant].is_cut = self._enough(contestant, size)
        for iteration in range(comm.warmup + comm.iterations):
            for contestant in able:
                self._iterate(contestant, iteration, size, taken[contestant])
        return [self._point(contestant, num_bytes, taken[contestant]) for contestant in contestants]

    def _what(self, contestant: Contestant, size: _Size, which: str) -> str:
        return f"{self._comm.collective} {contestant.algorithm} ({contestant.carrier}) of {size.text}, {which}"

    def _enough(self, contestant: Contestant, size: _Size) -> tuple[int, bool]:
        """How many operations make a sample, and whether that is too few: the same on all ranks, found by trials."""
        what = self._what(contestant, size, "trial")
        chain = size.inputs.longest_chain if contestant.is_in_place else None
        most = min(self._clock.most_operations, chain or self._clock.most_operations)
        operations, trials, queued = 1, 1, 1
        while True:
            own = [self._sample(contestant, size, operations, what) for _ in range(trials)]
            everyone = self._control.gather(what, own)
            samples = self._over_ranks(everyone, operations)
            # The shortest of a few: a rank that lost its core in between says nothing on the operation.
            shortest = min(one.seconds * operations for one in samples)
            if trials == 1 and shortest < _COLD * LEAST_SAMPLE_S:
                trials = _TRIALS  # the first one was cold: buffers, connections
                continue
            if all(any(late for _, _, late in ranks) for ranks in zip(*everyone, strict=True)):
                # So many are more than the launch queue takes, or than the host queues in time.
                return queued, operations > 1
            queued = operations
            wanted = enough_operations(shortest, operations, most)
            if wanted == operations:
                return operations, False
            operations = wanted

    def _iterate(self, contestant: Contestant, iteration: int, size: _Size, taken: _Taken) -> None:
        comm = self._comm
        what = self._what(contestant, size, f"iteration {iteration}")
        alone = None
        if self._clock.timing == "in-stream":
            alone = self._sample(contestant, size, 1, what, self._host_clock)
        sample = self._sample(contestant, size, taken.operations, what)
        if iteration >= comm.warmup:
            if alone is not None:
                taken.single.append(alone)
            taken.samples.append(sample)
        if iteration == comm.warmup + comm.iterations - 1:
            self._conclude(contestant, size, taken, what)

    def _sample(
        self, contestant: Contestant, size: _Size, operations: int, what: str, clock: HostSampleClock | None = None
    ) -> Sample:
        self._beat(what)
        size.inputs.reset(size.vectors.data, size.vectors.given)
        if contestant.counters is not None:
            contestant.counters.reset()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._control.barrier(what)
        self._deadline.begin(what)
        runs, each = (operations, 1) if self._is_apart else (1, operations)
        try:
            found = (clock or self._clock).time(contestant, runs, each, (contestant, size.text))
        except RunError as error:
            raise type(error)(f"rank {self._place.rank}, {what}: {error}") from None
        self._deadline.end()
        return found

    @property
    def _is_apart(self) -> bool:
        """Whether each operation of a sample begins with a barrier of its own, outside of the timer, as OSU's do.

        Where a root waits for nobody, or nobody for it, back to back one would begin while others are under way. On a
        GPU the host would have to wait for each, and nccl-tests has no barrier either.
        """
        return self._comm.collective in ROOTED and self._device.type == "cpu"

    def _conclude(self, contestant: Contestant, size: _Size, taken: _Taken, what: str) -> None:
        """Verdict and counters of the last sample; and of one operation more, where that one held several."""
        if contestant.counters is not None:
            taken.counters = asdict(contestant.counters)
        if taken.operations > 1:
            # Of a reduce-scatter or reduce in place nothing can be said. What that leaves outside of the result, which
            # the next one sums up, is the algorithm's affair.
            problem, is_in_place = "", contestant.is_in_place
            if self._comm.check and not (is_in_place and self._comm.collective in ("reduce-scatter", "reduce")):
                verdict = check(size.inputs, size.vectors.data, taken.operations if is_in_place else 1)
                if verdict.problem:
                    problem = f"after {taken.operations} operations: {verdict.problem}"
            self._sample(contestant, size, 1, what)
            if contestant.counters is not None:
                several, taken.counters = taken.counters, asdict(contestant.counters)
                if several != {name: count * taken.operations for name, count in taken.counters.items()}:
                    problem = f"{taken.operations} operations were counted as {several}, one as {taken.counters}"
            taken.problem = problem
        if self._comm.check:
            verdict = check(size.inputs, size.vectors.data)
            taken.max_error = verdict.max_error
            taken.problem = taken.problem or verdict.problem

    def _over_ranks(
        self, noted: Sequence[Sequence[Sample]], operations: int, clock: HostSampleClock | None = None
    ) -> list[Timed]:
        shares_starts = (clock or self._clock).shares_starts
        return [
            over_ranks(
                [start for start, _, _ in rows],
                [duration for _, duration, _ in rows],
                operations,
                from_last_start=not self._is_apart,
                one_clock=self._one_clock and shares_starts,
            )
            for rows in zip(*noted, strict=True)
        ]

    def _point(self, contestant: Contestant, num_bytes: int, taken: _Taken) -> CommPoint:
        comm = self._comm
        what = f"results of {contestant.algorithm} ({contestant.carrier})"
        everyone = [_Taken(**item) for item in self._control.gather(what, asdict(taken))]
        samples = self._over_ranks([item.samples for item in everyone], taken.operations)
        late = [[late for _, _, late in ranks] for ranks in zip(*(item.samples for item in everyone), strict=True)]
        alone = self._over_ranks([item.single for item in everyone], 1, self._host_clock)
        was_run = bool(everyone[0].samples)
        wrong = [f"rank {rank}: {item.problem}" for rank, item in enumerate(everyone) if item.problem]
        errors: list[Any] = [item.max_error for item in everyone]  # None where one is not a number.
        counted = [item.counters for item in everyone if item.counters is not None]
        max_error = None
        if comm.check and was_run and None not in errors:
            max_error = float(max(errors))
        return CommPoint(
            collective=comm.collective,
            algorithm=contestant.algorithm,
            carrier=contestant.carrier,
            num_bytes=num_bytes,
            dtype=comm.dtype,
            operations=taken.operations,
            timing=self._clock.timing,
            times_s=tuple(one.seconds for one in samples),
            is_cut=taken.is_cut,
            launch_bound=None if not late or None in late[0] else sum(map(any, late)),
            single_call_s=tuple(one.seconds for one in alone),
            skew_s=tuple(one.skew_s for one in samples),
            correct=not wrong if comm.check and was_run else None,
            max_error=max_error,
            chunks=contestant.chunks,
            steps=max(item["steps"] for item in counted) if counted else None,
            **{name: tuple(item[name] for item in counted) for name in ("messages", "bytes_sent", "bytes_across")},
            problem=wrong[0].partition(": ")[2] if wrong and not was_run else "; ".join(wrong[:3]),
        )
