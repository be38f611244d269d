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

from dlbench.errors import RunError
from dlbench.node.comm.contestants import Contestant, OwnAlgorithm
from dlbench.node.comm.inputs import DTYPES
from dlbench.node.comm.measure import Measurement
from dlbench.node.comm.transport import Part
from dlbench.node.garbage import HeldGarbage
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import RankPair
from dlbench.units import format_bytes

OF_AN_ITERATION = 10  # Operations, each timed by itself, so that the slowest hundredth of them is known.
LONG_S = 0.4  # Fewer where they take longer together.
WINDOW_BYTES, WINDOW = 4 * 1024 * 1024, 64  # A window holds no more than this, but two messages at least.
CONGESTING_BYTES = 1024 * 1024  # Of each message of a congestor.
_REPEATS_AFTER = 251  # Entries of a message: exact in every type of element.

Kind = tuple[RankPair, str, bool]  # Pair, way, and whether beside the congestors.


class PairMeasurement(Measurement):
    """All pairs of a run, one size after the other."""

    def points(self, contestants: Sequence[Contestant], num_bytes: int) -> list[CommPoint]:
        """Of each pair and way one point, and one beside the congestors; the same on every rank. `contestants`: have
        the transport. Raises `RunError`: ranks differ in what to do, or a message failed; no other can follow.
        """
        assert isinstance(contestants[0], OwnAlgorithm)
        self._transport, self._rank = contestants[0].transport, self._place.rank
        comm, dtype = self._comm, DTYPES[self._comm.dtype]
        self._control.agree("next point", comm.model_dump(mode="json") | {"of": num_bytes})
        message = (torch.arange(num_bytes // dtype.itemsize, device=self._device) % _REPEATS_AFTER).to(dtype)
        window = max(2, min(WINDOW, WINDOW_BYTES // num_bytes))
        kinds: list[Kind] = list(
            itertools.product(comm.pairs, comm.algorithms, (False, True)[: 1 + bool(comm.congestors)])
        )
        counts = dict.fromkeys(kinds, OF_AN_ITERATION)
        taken: dict[Kind, list[tuple[list[float], float, bool]]] = {kind: [] for kind in kinds}
        garbage = HeldGarbage()
        garbage.hold()
        try:
            for iteration, kind in itertools.product(range(-1, comm.warmup + comm.iterations), kinds):
                (first, second), way, is_beside = kind
                many = window if way == "window" else 1
                what = f"{way} {first}:{second} of {format_bytes(num_bytes)}{' beside congestors' * is_beside}"
                what += f", iteration {iteration}" if iteration >= 0 else ", trial"
                found = self._block(kind, message, many, counts[kind] if iteration >= 0 else 2, what)
                if iteration < 0:  # The first operation was cold. As many alone as beside: percentiles depend on it.
                    longest = max(self._control.gather(what, found[0][-1] * 2 * many if found[0] else 0.0))
                    count = max(1, min(counts[kind], int(LONG_S / max(longest, 1e-9))))
                    counts |= {((first, second), way, beside): count for beside in (False, True)}
                elif iteration >= comm.warmup:
                    taken[kind].append(found)
        finally:
            garbage.release()
        return [self._pair_point(kind, num_bytes, window, taken[kind]) for kind in kinds]

    def _block(
        self, kind: Kind, message: torch.Tensor, many: int, operations: int, what: str
    ) -> tuple[list[float], float, bool]:
        """Some operations of one pair. On this rank: seconds of each that it began, bytes per second that it sent as a
        congestor, and whether what came is wrong.
        """
        pair, way, is_beside = kind
        rank, control, landed = self._rank, self._control, torch.zeros_like(message)
        congestor = next((one for one in self._comm.congestors if rank in one), None) if is_beside else None
        times, rate = list[float](), 0.0
        self._beat(what)
        control.barrier(what)
        self._deadline.begin(what)
        try:
            if congestor is not None:
                rate = self._congest(congestor)
            elif is_beside:
                control.barrier(f"{what}: congestors are under way")
            if rank in pair:
                begins, peer = rank == pair[0], pair[rank == pair[0]]
                out, into = ([self._part(run, peer, 0)] * many for run in (message, landed))
                # A ping comes back whole; a window is acknowledged by one element.
                answer = message if way == "ping-pong" else message[:1]
                reply = [self._part(answer if not begins else torch.empty_like(answer), peer, 1)]
                for _ in range(operations):
                    start = time.perf_counter_ns()
                    self._pass([], out) if begins else self._pass(into, [])
                    self._pass(reply, []) if begins else self._pass([], reply)
                    elapsed = (time.perf_counter_ns() - start) / 1e9
                    times += [elapsed / (2 if way == "ping-pong" else many)] * begins
            if is_beside and congestor is None:
                control.barrier(f"{what}: done")
        except RunError as error:
            raise type(error)(f"rank {rank}, {what}: {error}") from None
        self._deadline.end()
        return times, rate, rank == pair[1] and not torch.equal(landed, message)

    def _congest(self, pair: RankPair) -> float:
        """Sends, or receives, until the pair is done: how many bytes per second. The first element of a message says
        whether the next is the last: that one is posted by then.
        """
        sends, peer = self._rank == pair[0], pair[self._rank == pair[0]]
        buffers = [torch.zeros(CONGESTING_BYTES // 4, device=self._device) for _ in range(2)]
        parts = [self._part(buffer, peer, 2) for buffer in buffers]
        done: Any = None
        pending: list[Any] = []
        begun, count, last = time.monotonic(), 0, -1
        while last < 0 or count <= last:
            turn = count % 2
            if sends:
                if len(pending) == 2:
                    self._finish(pending.pop(0), parts[turn], "to")
                is_over = last < 0 and done is not None and done.is_completed()
                buffers[turn][0] = float(is_over)
                pending += self._transport.post([], [parts[turn]])[1]
            else:
                while len(pending) < 2 and (last < 0 or count + len(pending) <= last):
                    pending += self._transport.post([parts[(count + len(pending)) % 2]], [])[0]
                self._finish(pending.pop(0), parts[turn], "from")
                is_over = last < 0 and bool(buffers[turn][0])
            last = count + 1 if is_over else last
            count += 1
            if count == 3:  # The pair begins when all congestors have come so far, and ends with the second.
                _, done = (dist.barrier(async_op=True) for _ in range(2))
        for one in pending:
            self._finish(one, parts[0], "to")
        return count * CONGESTING_BYTES / (time.monotonic() - begun)

    def _part(self, run: torch.Tensor, peer: int, tag: int) -> Part:
        handle, size = self._transport.wrap(run), run.numel() * run.element_size()
        return Part(handle=handle, peer=peer, tag=tag, num_bytes=size, is_across=False, opens=True)

    def _pass(self, receives: Sequence[Part], sends: Sequence[Part]) -> None:
        arriving, leaving = self._transport.post(receives, sends)
        for pending, part in zip((*arriving, *leaving), (*receives, *sends), strict=True):
            self._finish(pending, part, "to" if sends else "from")

    def _finish(self, pending: Any, part: Part, direction: str) -> None:
        self._transport.wait(pending, part, direction)
        if self._device.type == "cuda":  # There waiting orders the stream, and not the host.
            torch.cuda.synchronize(self._device)

    def _pair_point(
        self, kind: Kind, num_bytes: int, window: int, taken: Sequence[tuple[list[float], float, bool]]
    ) -> CommPoint:
        pair, way, is_beside = kind
        everyone = self._control.gather("results of a pair", taken)
        wrong = self._comm.check and any(one[2] for one in everyone[pair[1]])
        rates = (statistics.fmean(one[1] for one in everyone[sender]) for sender, _ in self._comm.congestors)
        return CommPoint(
            collective=self._comm.collective,
            algorithm=way,
            carrier=self._transport.carrier,
            num_bytes=num_bytes,
            dtype=self._comm.dtype,
            times_s=tuple(seconds for one in everyone[pair[0]] for seconds in one[0]),
            operations=window if way == "window" else 1,
            pair=pair,
            congestors=tuple(rates) if is_beside else (),
            correct=not wrong if self._comm.check else None,
            max_error=None,
            problem="what arrived is not what was sent" if wrong else "",
        )
