"""Measures messages between two ranks: latency by ping-pong, bandwidth by a window of messages."""
# All other ranks sleep in a barrier, or are congestors: pairs that send in one direction without a pause in every other
# sample, and poll a barrier between two messages to see that the pair has finished.

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlbench.errors import RunError, first_line
from dlbench.node.comm.contestants import Contestant, OwnAlgorithm
from dlbench.node.comm.inputs import DTYPES
from dlbench.node.comm.measure import CollectiveTimer
from dlbench.node.comm.transport import MessagePart
from dlbench.node.failures import passed_on
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import RankPair
from dlbench.units import format_bytes

OPERATIONS = 10  # Operations per iteration, each timed, so that their slowest hundredth is known.
LONG_S = 0.4  # Longest iteration; longer operations are repeated less often.
WINDOW_BYTES, WINDOW = 4 * 1024 * 1024, 64  # Most bytes and messages of a window, which has two messages at least.
CONGESTING_BYTES = 1024 * 1024  # Bytes of each message of a congestor.
_PATTERN_LENGTH = 251  # Period of the values of a message, which are exact in every type.


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
