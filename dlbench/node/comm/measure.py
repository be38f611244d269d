"""Times all contestants of one size in alternation, so that drift of the machine affects all equally; between two ranks
latency by ping-pong, and bandwidth by a window of messages.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlbench.errors import RunError, first_line
from dlbench.node.comm.contestants import Contestant, HostSampleClock, OwnAlgorithm, Sample, Vectors
from dlbench.node.comm.inputs import DTYPES, Inputs, check
from dlbench.node.comm.transport import Control, Deadline, MessagePart
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.timing import LEAST_SAMPLE_S, Timed, enough_operations, over_ranks
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import ELEMENT_BYTES, ROOTED, CommSpec, RankPair
from dlbench.units import format_bytes

_TRIALS = 3  # Samples for each number of operations that is tried.
_LONG_SAMPLES = 100  # A first operation longer than this many samples is a long one, even if it was cold.
OPERATIONS = 10  # Operations per iteration, each timed, so that their slowest hundredth is known.
LONG_S = 0.4  # Longest iteration; longer operations are repeated less often.
WINDOW_BYTES, WINDOW = 4 * 1024 * 1024, 64  # Most bytes and messages of a window, which has two messages at least.
CONGESTING_BYTES = 1024 * 1024  # Bytes of each message of a congestor.
_PATTERN_LENGTH = 251  # Period of the values of a message, which are exact in every type.


@dataclass
class _Measurement:
    operations: int = 1  # Operations of each sample; the same on all ranks.
    is_cut: bool = False  # Whether the host could not queue more operations in time.
    samples: list[Sample] = field(default_factory=list)
    single: list[Sample] = field(default_factory=list)
    """Samples of one operation by the host's clock, if `samples` are timed in the stream."""
    counters: dict[str, int] | None = None  # Counters of one operation.
    max_error: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class _Size:
    vectors: Vectors
    inputs: Inputs
    text: str


class CollectiveTimer:
    """Times all sizes of a run; all contestants of one size in alternation."""

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
        """Takes `beat`, called before each iteration with its name, and the clock for samples; None: the host's."""
        self._comm = comm
        self._place = place
        self._device = device
        self._control = control
        self._deadline = deadline
        self._beat = beat
        before = control.gather("clocks before", [place.host, time.perf_counter_ns()])
        after = control.gather("clocks after", time.perf_counter_ns())
        # No rank leaves the first gather before all ranks have read the clock for it.
        self._one_clock = len({host for host, _ in before}) == 1 and max(reading for _, reading in before) <= min(after)
        self._host_clock = HostSampleClock(device)
        self._clock = clock or self._host_clock

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """Returns one point for each contestant, the same on every rank; cannot be called again after a `RunError`."""
        comm = self._comm
        elements = num_bytes // ELEMENT_BYTES[comm.dtype]
        inputs = Inputs(comm.collective, self._place.rank, self._place.size, elements, comm.dtype)
        source = inputs.source().to(self._device)
        vectors = Vectors(torch.zeros(elements, dtype=DTYPES[comm.dtype], device=self._device), source)
        size = _Size(vectors, inputs, format_bytes(num_bytes))
        measurements = [_Measurement(problem=contestant.bind(vectors)) for contestant in contestants]
        pairs = list(zip(contestants, measurements, strict=True))
        runnable = [(contestant, measurement) for contestant, measurement in pairs if not measurement.problem]
        for contestant, measurement in runnable:
            measurement.operations, measurement.is_cut = self._sample_size(contestant, size)
        for iteration in range(comm.warmup + comm.iterations):
            for contestant, measurement in runnable:
                self._iterate(contestant, iteration, size, measurement)
        return [self._point(contestant, num_bytes, measurement) for contestant, measurement in pairs]

    def _purpose(self, contestant: Contestant, size: _Size, phase: str) -> str:
        return f"{self._comm.collective} {contestant.algorithm} ({contestant.carrier}) of {size.text}, {phase}"

    def _sample_size(self, contestant: Contestant, size: _Size) -> tuple[int, bool]:
        """Finds, by trials on all ranks, the operations of a sample, and whether more cannot be queued in time."""
        purpose = self._purpose(contestant, size, "trial")
        most = self._clock.most_operations
        if contestant.is_in_place and size.inputs.longest_chain is not None:
            most = min(most, size.inputs.longest_chain)
        operations, trials, queued = 1, 1, 1
        while True:
            local_samples = [self._sample(contestant, size, operations, purpose) for _ in range(trials)]
            by_rank = self._control.gather(purpose, local_samples)
            samples = self._over_ranks(by_rank, operations)
            # The shortest of a few: interruptions of a rank say nothing about the operation.
            shortest_s = min(sample.seconds * operations for sample in samples)
            if trials == 1 and shortest_s < _LONG_SAMPLES * LEAST_SAMPLE_S:
                trials = _TRIALS  # the first sample was cold: buffers, connections
                continue
            if all(_late_flags(by_rank)):
                # These are more operations than the launch queue takes, or than the host queues in time.
                return queued, operations > 1
            queued = operations
            next_operations = enough_operations(shortest_s, operations, most)
            if next_operations == operations:
                return operations, False
            operations = next_operations

    def _iterate(self, contestant: Contestant, iteration: int, size: _Size, measurement: _Measurement) -> None:
        comm = self._comm
        purpose = self._purpose(contestant, size, f"iteration {iteration}")
        single: Sample | None = None
        if self._clock.timing == "in-stream":
            single = self._sample(contestant, size, 1, purpose, self._host_clock)
        sample = self._sample(contestant, size, measurement.operations, purpose)
        if iteration >= comm.warmup:
            if single is not None:
                measurement.single.append(single)
            measurement.samples.append(sample)
        if iteration == comm.warmup + comm.iterations - 1:
            self._conclude(contestant, size, measurement, purpose)

    def _sample(
        self, contestant: Contestant, size: _Size, operations: int, purpose: str, clock: HostSampleClock | None = None
    ) -> Sample:
        self._beat(purpose)
        size.inputs.reset(size.vectors.data, size.vectors.source)
        if contestant.counters is not None:
            contestant.counters.reset()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._control.barrier(purpose)
        self._deadline.begin(purpose)
        runs, run_operations = (operations, 1) if self._has_barriers else (1, operations)
        try:
            sample = (clock or self._clock).time(contestant, runs, run_operations, (contestant, size.text))
        except RunError as error:
            raise type(error)(f"rank {self._place.rank}, {purpose}: {error}") from None
        self._deadline.end()
        return sample

    @property
    def _has_barriers(self) -> bool:
        """Returns whether each operation of a sample begins with an untimed barrier, as in OSU's benchmarks."""
        # If a root waits for nobody, or nobody for it, back-to-back operations would overlap.
        return self._comm.collective in ROOTED and self._device.type == "cpu"

    def _conclude(self, contestant: Contestant, size: _Size, measurement: _Measurement, purpose: str) -> None:
        operations = measurement.operations
        if contestant.counters is not None:
            measurement.counters = asdict(contestant.counters)
        if operations > 1:
            # Several reduce-scatters or reduces in place cannot be checked: what an algorithm leaves outside of the
            # result is undefined, and the next operation sums it.
            problem, is_in_place = "", contestant.is_in_place
            if self._comm.check and not (is_in_place and self._comm.collective in ("reduce-scatter", "reduce")):
                result = check(size.inputs, size.vectors.data, operations if is_in_place else 1)
                if result.problem:
                    problem = f"after {operations} operations: {result.problem}"
            self._sample(contestant, size, 1, purpose)
            if contestant.counters is not None:
                sample_counters, measurement.counters = measurement.counters, asdict(contestant.counters)
                if sample_counters != {name: count * operations for name, count in measurement.counters.items()}:
                    problem = f"{operations} operations counted {sample_counters}, one counted {measurement.counters}"
            measurement.problem = problem
        if self._comm.check:
            result = check(size.inputs, size.vectors.data)
            measurement.max_error = result.max_error
            measurement.problem = measurement.problem or result.problem

    def _over_ranks(
        self, by_rank: Sequence[Sequence[Sample]], operations: int, clock: HostSampleClock | None = None
    ) -> list[Timed]:
        one_clock, from_last_start = self._one_clock and (clock or self._clock).shares_starts, not self._has_barriers
        timed = []
        for rank_samples in zip(*by_rank, strict=True):
            starts_ns, durations_ns, _ = zip(*rank_samples, strict=True)
            sample = over_ranks(
                starts_ns, durations_ns, operations, from_last_start=from_last_start, one_clock=one_clock
            )
            timed.append(sample)
        return timed

    def _point(self, contestant: Contestant, num_bytes: int, measurement: _Measurement) -> CommPoint:
        comm = self._comm
        purpose = f"results of {contestant.algorithm} ({contestant.carrier})"
        by_rank = [_Measurement(**fields) for fields in self._control.gather(purpose, asdict(measurement))]
        samples = self._over_ranks([rank.samples for rank in by_rank], measurement.operations)
        single = self._over_ranks([rank.single for rank in by_rank], 1, self._host_clock)
        was_run = bool(samples)
        launch_bound: int | None = None
        if was_run and self._clock.timing == "in-stream":
            launch_bound = sum(_late_flags([rank.samples for rank in by_rank]))
        problems = [f"rank {number}: {rank.problem}" for number, rank in enumerate(by_rank) if rank.problem]
        problem = "; ".join(problems[:3])
        if problems and not was_run:
            problem = problems[0].partition(": ")[2]
        correct: bool | None = None
        max_error: float | None = None
        if comm.check and was_run:
            correct = not problems
            errors = [rank.max_error for rank in by_rank if rank.max_error is not None]
            if len(errors) == len(by_rank):
                max_error = float(max(errors))
        counted = [rank.counters for rank in by_rank if rank.counters is not None]
        return CommPoint(
            collective=comm.collective,
            algorithm=contestant.algorithm,
            carrier=contestant.carrier,
            num_bytes=num_bytes,
            dtype=comm.dtype,
            operations=measurement.operations,
            timing=self._clock.timing,
            times_s=tuple(sample.seconds for sample in samples),
            is_cut=measurement.is_cut,
            launch_bound=launch_bound,
            single_call_s=tuple(sample.seconds for sample in single),
            skew_s=tuple(sample.skew_s for sample in samples),
            correct=correct,
            max_error=max_error,
            chunks=contestant.chunks,
            steps=max((counters["steps"] for counters in counted), default=None),
            messages=tuple(counters["messages"] for counters in counted),
            bytes_sent=tuple(counters["bytes_sent"] for counters in counted),
            bytes_across=tuple(counters["bytes_across"] for counters in counted),
            problem=problem,
        )


def _late_flags(by_rank: Sequence[Sequence[Sample]]) -> list[bool]:
    """Returns for each sample whether the device of any rank began before all operations were queued."""
    flags_by_rank = [[bool(is_late) for _, _, is_late in samples] for samples in by_rank]
    return [any(flags) for flags in zip(*flags_by_rank, strict=True)]


class _Kind(NamedTuple):
    pair: RankPair
    algorithm: str  # ping-pong or window.
    is_congested: bool


class _Block(NamedTuple):
    times_s: list[float]  # Seconds of each operation, on the rank that begins them.
    congesting_rate: float  # Bytes per second that this rank sent or received as a congestor.
    is_wrong: bool  # Whether the received message differs from the sent one.


class PairTimer(CollectiveTimer):
    """Times all pairs of a run, one size after the other."""

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """Returns a point for each pair and algorithm, and one with congestors; the same on every rank."""
        assert isinstance(contestants[0], OwnAlgorithm)
        self._transport, self._rank = contestants[0].transport, self._place.rank
        comm, dtype = self._comm, DTYPES[self._comm.dtype]
        message = (torch.arange(num_bytes // dtype.itemsize, device=self._device) % _PATTERN_LENGTH).to(dtype)
        num_messages = {"ping-pong": 1, "window": max(2, min(WINDOW, WINDOW_BYTES // num_bytes))}  # By algorithm.
        congested = (False, True) if comm.congestors else (False,)
        kinds = [_Kind(*values) for values in itertools.product(comm.pairs, comm.algorithms, congested)]
        # The same number with and without congestors: percentiles depend on it.
        operations = dict.fromkeys(itertools.product(comm.pairs, comm.algorithms), OPERATIONS)
        blocks: dict[_Kind, list[_Block]] = {kind: [] for kind in kinds}
        for iteration, kind in itertools.product(range(-1, comm.warmup + comm.iterations), kinds):
            first, second = kind.pair
            count = num_messages[kind.algorithm]
            purpose = f"{kind.algorithm} {first}:{second} of {format_bytes(num_bytes)}"
            if kind.is_congested:
                purpose += " with congestors"
            purpose += f", iteration {iteration}"
            key = (kind.pair, kind.algorithm)
            if iteration >= 0:
                block = self._block(kind, message, count, operations[key], purpose)
                if iteration >= comm.warmup:
                    blocks[kind].append(block)
                continue
            # A trial of two operations, of which the first was cold.
            block = self._block(kind, message, count, 2, purpose)
            operation_s = block.times_s[-1] * 2 * count if block.times_s else 1e-9
            longest_s = max(self._control.gather(purpose, operation_s))
            operations[key] = max(1, min(operations[key], int(LONG_S / longest_s)))
        return [self._pair_point(kind, num_bytes, num_messages[kind.algorithm], blocks[kind]) for kind in kinds]

    def _block(self, kind: _Kind, message: torch.Tensor, num_messages: int, operations: int, purpose: str) -> _Block:
        rank, received = self._rank, torch.zeros_like(message)
        times_s, rate = list[float](), 0.0
        congestor: RankPair | None = None
        if kind.is_congested:
            congestor = next((pair for pair in self._comm.congestors if rank in pair), None)
        self._beat(purpose)
        self._control.barrier(purpose)
        self._deadline.begin(purpose)
        try:
            if congestor is not None:
                rate = self._congest(congestor)
            elif kind.is_congested:
                dist.barrier()  # congestors have started
            if rank in kind.pair:
                times_s = self._operations(kind, message, received, num_messages, operations)
            if kind.is_congested and congestor is None:
                dist.barrier()  # the pair has finished
        except RunError as error:
            raise type(error)(f"rank {rank}, {purpose}: {error}") from None
        except RuntimeError as error:
            raise passed_on(f"rank {rank}, {purpose}: {first_line(error)}", error) from None
        self._deadline.end()
        return _Block(times_s, rate, rank == kind.pair[1] and not torch.equal(received, message))

    def _operations(
        self, kind: _Kind, message: torch.Tensor, received: torch.Tensor, num_messages: int, operations: int
    ) -> list[float]:
        """Sends messages and receives answers, or the reverse; returns the seconds of a message on the first rank."""
        first, second = kind.pair
        begins, part = self._rank == first, self._transport.part
        vector, answer, peer = message, torch.empty_like(_answer(kind, message)), second
        if not begins:
            vector, answer, peer = received, _answer(kind, message), first
        messages = [part(vector, peer, 0, sends=begins) for _ in range(num_messages)]
        answers = [part(answer, peer, 1, sends=not begins)]
        messages_per_operation = 2 if kind.algorithm == "ping-pong" else num_messages
        times_s = []
        for _ in range(operations):
            start_ns = time.perf_counter_ns()
            self._transfer(messages)
            self._transfer(answers)
            times_s.append((time.perf_counter_ns() - start_ns) / 1e9 / messages_per_operation)
        for message_part in (*messages, *answers):
            message_part.release()
        return times_s if begins else []

    def _transfer(self, parts: Sequence[MessagePart]) -> None:
        self._begin(parts)
        for part in parts:
            self._finish(part)

    def _congest(self, pair: RankPair) -> float:
        """Sends or receives, bytes/s returned, until the pair has finished: element 0 then marks the last message."""
        sender, receiver = pair
        sends = self._rank == sender
        peer = receiver if sends else sender
        buffers = [torch.zeros(CONGESTING_BYTES // 4, device=self._device) for _ in range(2)]
        parts = [self._transport.part(buffer, peer, 2, sends=sends) for buffer in buffers]
        end_barrier: Any = None
        pending, began, count, is_over = list[MessagePart](), time.monotonic(), 0, False
        while not is_over:
            current = count % 2
            if len(pending) == 2:
                self._finish(pending.pop(0))
            last_completed = 1 - current if sends else current
            is_over = bool(buffers[last_completed][0])
            if sends:
                buffers[current][0] = float(end_barrier is not None and end_barrier.is_completed())
            if sends or not is_over:
                self._begin([parts[current]])
                pending.append(parts[current])
                count += 1
            if count == 3 and end_barrier is None:
                # The pair starts after the first barrier, when all congestors are here, and finishes before the second.
                _start_barrier, end_barrier = (dist.barrier(async_op=True) for _ in range(2))
        for part in pending:
            self._finish(part)
        for part in parts:
            part.release()
        rate = count * CONGESTING_BYTES / (time.monotonic() - began)
        end_barrier.wait()  # raises if a rank is gone, which also completes the barrier
        return rate

    def _begin(self, parts: Sequence[MessagePart]) -> None:
        try:
            for operation in self._transport.together(parts):
                operation()
        except RuntimeError as error:
            raise self._transport.refused(error) from None

    def _finish(self, part: MessagePart) -> None:
        try:
            part.finish()
        except RuntimeError as error:
            raise part.lost(error) from None
        if self._device.type == "cuda":  # on a GPU `finish` holds the stream, not the host
            torch.cuda.synchronize(self._device)

    def _pair_point(self, kind: _Kind, num_bytes: int, num_messages: int, blocks: Sequence[_Block]) -> CommPoint:
        comm = self._comm
        gathered = self._control.gather("results of a pair", blocks)
        by_rank = [list(itertools.starmap(_Block, rank_blocks)) for rank_blocks in gathered]
        first, second = kind.pair
        times_s = itertools.chain.from_iterable(block.times_s for block in by_rank[first])
        rates: list[float] = []
        if kind.is_congested:
            for sender, _ in comm.congestors:
                rates.append(statistics.fmean(block.congesting_rate for block in by_rank[sender]))
        correct, problem = None, ""
        if comm.check:
            correct = not any(block.is_wrong for block in by_rank[second])
            if not correct:
                problem = "the received message differs from the sent one"
        return CommPoint(
            collective=comm.collective,
            dtype=comm.dtype,
            carrier=self._transport.carrier,
            algorithm=kind.algorithm,
            num_bytes=num_bytes,
            times_s=tuple(times_s),
            operations=num_messages,
            pair=kind.pair,
            congestors=tuple(rates),
            correct=correct,
            max_error=None,
            problem=problem,
        )


def _answer(kind: _Kind, message: torch.Tensor) -> torch.Tensor:
    """Returns the answer to a message: a ping comes back whole, a window is acknowledged by one element."""
    return message if kind.algorithm == "ping-pong" else message[:1]
