"""Messages between two ranks: latency by ping-pong, bandwidth by a window of messages; alone, and beside congestors.

Pairs are measured one at a time while all other ranks sleep in a barrier. Beside congestors the same is done in turns
with it alone, while other pairs send one way without a pause: a message is under way while the next is posted. They
learn that the pair is done from a barrier that they look at between two messages.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

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

OF_AN_ITERATION = 10  # Operations, each timed by itself, so that the slowest hundredth of them is known.
LONG_S = 0.4  # Fewer where they take longer together.
WINDOW_BYTES, WINDOW = 4 * 1024 * 1024, 64  # A window holds no more than this, but two messages at least.
CONGESTING_BYTES = 1024 * 1024  # Of each message of a congestor.
_REPEATS_AFTER = 251  # Entries of a message: exact in every type of element.

Kind = tuple[RankPair, str, bool]  # Pair, way, and whether beside the congestors.
Block = tuple[list[float], float, bool]
"""Of one rank: seconds of each operation that it began, bytes per second as a congestor, and whether what came is
wrong."""


class PairTimer(CollectiveTimer):
    """All pairs of a run, one size after the other."""

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """Of each pair and way one point, and one beside the congestors; the same on every rank."""
        assert isinstance(contestants[0], OwnAlgorithm)
        self._transport, self._rank = contestants[0].transport, self._place.rank
        comm, dtype = self._comm, DTYPES[self._comm.dtype]
        message = (torch.arange(num_bytes // dtype.itemsize, device=self._device) % _REPEATS_AFTER).to(dtype)
        window = max(2, min(WINDOW, WINDOW_BYTES // num_bytes))
        sides = (False, True)[: 1 + bool(comm.congestors)]
        kinds = list(itertools.product(comm.pairs, comm.algorithms, sides))
        # As many alone as beside: percentiles depend on it.
        counts = dict.fromkeys(itertools.product(comm.pairs, comm.algorithms), OF_AN_ITERATION)
        taken: dict[Kind, list[Block]] = {kind: [] for kind in kinds}
        for iteration, kind in itertools.product(range(-1, comm.warmup + comm.iterations), kinds):
            (pair, way, is_beside), of = kind, kind[:2]
            many = window if way == "window" else 1
            meanwhile = " beside congestors" if is_beside else ""
            what = f"{way} {pair[0]}:{pair[1]} of {format_bytes(num_bytes)}{meanwhile}, iteration {iteration}"
            block = self._block(kind, message, many, counts[of] if iteration >= 0 else 2, what)
            if iteration < 0:  # A trial, whose first operation was cold.
                longest = max(self._control.gather(what, block[0][-1] * 2 * many if block[0] else 1e-9))
                counts[of] = max(1, min(counts[of], int(LONG_S / longest)))
            elif iteration >= comm.warmup:
                taken[kind].append(block)
        return [self._pair_point(kind, num_bytes, window, taken[kind]) for kind in kinds]

    def _block(self, kind: Kind, message: torch.Tensor, many: int, operations: int, what: str) -> Block:
        pair, way, is_beside = kind
        rank, landed, times, rate = self._rank, torch.zeros_like(message), list[float](), 0.0
        congestor = next((one for one in self._comm.congestors if rank in one), None) if is_beside else None
        self._beat(what)
        self._control.barrier(what)
        self._deadline.begin(what)
        try:
            if congestor is not None:
                rate = self._congest(congestor)
            elif is_beside:
                dist.barrier()  # Congestors are under way.
            if rank in pair:
                begins, peer = rank == pair[0], pair[rank == pair[0]]
                # A ping comes back whole; a window is acknowledged by one element.
                back = message if way == "ping-pong" else message[:1]
                part = self._transport.part
                there = [part(message if begins else landed, peer, 0, sends=begins) for _ in range(many)]
                answer = [part(torch.empty_like(back) if begins else back, peer, 1, sends=not begins)]
                for _ in range(operations):
                    start = time.perf_counter_ns()
                    for parts in (there, answer):
                        self._begin(parts)
                        for one in parts:
                            self._finish(one)
                    elapsed = (time.perf_counter_ns() - start) / 1e9
                    times += [elapsed / (2 if way == "ping-pong" else many)] * begins
                for one in (*there, *answer):
                    one.release()
            if is_beside and congestor is None:
                dist.barrier()  # Done.
        except RunError as error:
            raise type(error)(f"rank {rank}, {what}: {error}") from None
        except RuntimeError as error:
            raise passed_on(f"rank {rank}, {what}: {first_line(error)}", error) from None
        self._deadline.end()
        return times, rate, rank == pair[1] and not torch.equal(landed, message)

    def _congest(self, pair: RankPair) -> float:
        """Sends, or receives, until the pair is done: how many bytes per second. The first element of a message says
        whether the next is the last: that one is posted by then.
        """
        sends, peer = self._rank == pair[0], pair[self._rank == pair[0]]
        buffers = [torch.zeros(CONGESTING_BYTES // 4, device=self._device) for _ in range(2)]
        parts = [self._transport.part(buffer, peer, 2, sends=sends) for buffer in buffers]
        done: Any = None
        pending, begun, count, is_over = list[MessagePart](), time.monotonic(), 0, False
        while not is_over:
            turn = count % 2
            if len(pending) == 2:
                self._finish(pending.pop(0))
            is_over = bool(buffers[not turn if sends else turn][0])
            if sends:
                buffers[turn][0] = float(done is not None and done.is_completed())
            if sends or not is_over:
                self._begin([parts[turn]])
                pending.append(parts[turn])
                count += 1
            if count == 3 and done is None:  # The pair begins when all congestors are here, and ends with the second.
                _, done = (dist.barrier(async_op=True) for _ in range(2))
        for one in pending:
            self._finish(one)
        for one in parts:
            one.release()
        rate = count * CONGESTING_BYTES / (time.monotonic() - begun)
        done.wait()  # Completed as well where a rank is gone: that is raised here.
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
        if self._device.type == "cuda":  # There waiting orders the stream, and not the host.
            torch.cuda.synchronize(self._device)

    def _pair_point(self, kind: Kind, num_bytes: int, window: int, taken: Sequence[Block]) -> CommPoint:
        (pair, way, is_beside), comm = kind, self._comm
        everyone = self._control.gather("results of a pair", taken)
        wrong = comm.check and any(one[2] for one in everyone[pair[1]])
        rates = (statistics.fmean(one[1] for one in everyone[sender]) for sender, _ in comm.congestors)
        return CommPoint(
            collective=comm.collective,
            dtype=comm.dtype,
            carrier=self._transport.carrier,
            algorithm=way,
            num_bytes=num_bytes,
            times_s=tuple(seconds for one in everyone[pair[0]] for seconds in one[0]),
            operations=window if way == "window" else 1,
            pair=pair,
            congestors=tuple(rates) if is_beside else (),
            correct=not wrong if comm.check else None,
            max_error=None,
            problem="what arrived is not what was sent" if wrong else "",
        )
