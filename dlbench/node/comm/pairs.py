"""Messages between two ranks: latency by ping-pong, bandwidth by a window of messages; alone, and beside congestors.

Pairs are measured one at a time while all other ranks sleep in a barrier, so that nothing but the pair is on the way.
Beside congestors the same is done once more, in turns with it alone, while pairs of other ranks send one to the other
without a pause: a message is under way while the next is posted. Congestors learn that the pair is done from a barrier
that they look at between two messages; what they sent meanwhile is counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlbench.errors import RunError
from dlbench.node.comm.control import Control, Deadline
from dlbench.node.comm.inputs import DTYPES
from dlbench.node.comm.transport import Part, Transport
from dlbench.node.garbage import HeldGarbage
from dlbench.node.ranks import RankPlace
from dlbench.records.comm import CommPoint
from dlbench.specs.comm import CommSpec, RankPair
from dlbench.units import format_bytes

OF_AN_ITERATION = 10  # Operations, each timed by itself, so that the slowest hundredth of them is known.
LONG_S = 0.4  # Fewer where they take longer together.
WINDOW_BYTES, WINDOW = 4 * 1024 * 1024, 64  # A window holds no more than this, but two messages at least.
CONGESTING_BYTES = 1024 * 1024  # Of each message of a congestor, of which two are under way.
_DATA, _ACK, _NOISE = 0, 1, 2  # Tags.
_REPEATS_AFTER = 251  # Entries of a message count up to here: exact in every type of element.


@dataclass
class _Taken:
    """What one rank noted of a pair."""

    times: list[float] = field(default_factory=list)
    sent: float = 0.0  # Bytes that it sent as a congestor, and in how long.
    seconds: float = 0.0
    wrong: bool = False


class PairMeasurement:
    """All pairs of a run, one size after the other."""

    def __init__(
        self,
        comm: CommSpec,
        place: RankPlace,
        device: torch.device,
        control: Control,
        deadline: Deadline,
        beat: Callable[[str], None],
        transport: Transport,
    ) -> None:
        """As `Measurement`; `transport` carries the messages."""
        self._comm, self._rank, self._device = comm, place.rank, device
        self._control, self._deadline, self._beat, self._transport = control, deadline, beat, transport
        self._noise = [self._filled(CONGESTING_BYTES // 4, torch.float32) for _ in range(2)]

    def points(self, pairs: Sequence[RankPair], num_bytes: int) -> list[CommPoint]:
        """Of each pair and way one point, and one beside the congestors; the same on every rank. Raises `RunError`:
        ranks differ in what to do, or a message failed; no other can follow.
        """
        comm = self._comm
        dtype = DTYPES[comm.dtype]
        elements = num_bytes // dtype.itemsize
        self._control.agree("next point", comm.model_dump(mode="json") | {"elements": elements})
        message, landed = self._filled(elements, dtype), self._filled(elements, dtype)
        kinds = list(itertools.product(pairs, comm.algorithms, (False, True) if comm.congestors else (False,)))
        taken = {kind: _Taken() for kind in kinds}
        garbage = HeldGarbage()
        garbage.hold()
        try:
            counts = dict.fromkeys(kinds, OF_AN_ITERATION)
            for iteration in range(-1, comm.warmup + comm.iterations):
                for kind in kinds:
                    pair, way, is_beside = kind
                    what = f"{way} {pair[0]}:{pair[1]} of {format_bytes(num_bytes)}{' beside congestors' * is_beside}"
                    what += f", iteration {iteration}" if iteration >= 0 else ", trial"
                    # The trial warms up connections, and its last operation says how long one is.
                    found = self._block(kind, message, landed, counts[kind] if iteration >= 0 else 2, what)
                    if iteration < 0:
                        last = max(self._control.gather(what, found.times[-1] if found.times else 0.0))
                        last *= 2 if way == "ping-pong" else window_of(num_bytes)
                        count = max(1, min(counts[kind], int(LONG_S / max(last, 1e-9))))
                        # As many alone as beside: a percentile depends on it.
                        counts |= {(pair, way, beside): count for beside in (False, True)}
                    elif iteration >= comm.warmup:
                        one = taken[kind]
                        one.times += found.times
                        one.sent, one.seconds = one.sent + found.sent, one.seconds + found.seconds
                        one.wrong |= found.wrong
        finally:
            garbage.release()
        return [self._point(kind, num_bytes, taken[kind]) for kind in kinds]

    def _filled(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """What every message holds."""
        return (torch.arange(elements, device=self._device) % _REPEATS_AFTER).to(dtype)

    def _block(
        self, kind: tuple[RankPair, str, bool], message: torch.Tensor, landed: torch.Tensor, operations: int, what: str
    ) -> _Taken:
        """Some operations of one pair, on this rank: it is of the pair, a congestor, or waits."""
        pair, way, is_beside = kind
        rank, control = self._rank, self._control
        congestor = next((one for one in self._comm.congestors if rank in one), None) if is_beside else None
        self._beat(what)
        self._synchronise()
        control.barrier(what)
        self._deadline.begin(what)
        found = _Taken()
        try:
            if congestor is not None:
                self._congest(congestor, found, what)
            elif is_beside:
                control.barrier(f"{what}: congestors are under way")
            if rank in pair:
                self._exchange(pair, way, message, landed, operations, found)
            if is_beside and congestor is None:
                control.barrier(f"{what}: done")
        except RunError as error:
            raise type(error)(f"rank {rank}, {what}: {error}") from None
        self._deadline.end()
        if rank == pair[1]:
            found.wrong = self._comm.check and not torch.equal(landed, message)
        return found

    def _exchange(
        self, pair: RankPair, way: str, message: torch.Tensor, landed: torch.Tensor, operations: int, found: _Taken
    ) -> None:
        begins, peer = self._rank == pair[0], pair[self._rank == pair[0]]
        many = 1 if way == "ping-pong" else window_of(message.numel() * message.element_size())
        answer = landed if way == "ping-pong" else landed[:1].clone()
        if not begins:
            landed.zero_()
        out, back = self._part(message, peer, _DATA), self._part(answer, peer, _ACK)
        into = self._part(landed, peer, _DATA)
        # Who gets a ping sends it back as it came; a window is acknowledged by one element.
        for _ in range(operations):
            start = time.perf_counter_ns()
            if begins:
                self._pass([], [out] * many)
                self._pass([back], [])
                found.times.append((time.perf_counter_ns() - start) / 1e9 / (2 if way == "ping-pong" else many))
            else:
                self._pass([into] * many, [])
                self._pass([], [back])

    def _congest(self, pair: RankPair, found: _Taken, what: str) -> None:
        """Sends, or receives, until the pair is done. The first element of a message says whether one more follows; it
        is on its way by then.
        """
        sends, peer = self._rank == pair[0], pair[self._rank == pair[0]]
        parts = [self._part(buffer, peer, _NOISE) for buffer in self._noise]
        barriers: list[Any] = []
        pending: list[Any] = []
        begun, count, last = 0.0, 0, -1
        while last < 0 or count <= last:
            turn = count % 2
            if sends:
                if len(pending) == 2:
                    self._finish(pending.pop(0), parts[turn], "to")
                is_over = bool(barriers) and last < 0 and barriers[1].is_completed()
                self._noise[turn][0] = float(is_over)
                pending += self._transport.post([], [parts[turn]])[1]
                last = count + 1 if is_over else last
                if begun and last < 0:
                    found.sent, found.seconds = found.sent + CONGESTING_BYTES, time.monotonic() - begun
                elif barriers and not begun and barriers[0].is_completed():
                    begun = time.monotonic()
            else:
                while len(pending) < 2 and (last < 0 or count + len(pending) <= last):
                    pending += self._transport.post([parts[(count + len(pending)) % 2]], [])[0]
                self._finish(pending.pop(0), parts[turn], "from")
                if last < 0 and float(self._noise[turn][0]):
                    last = count + 1
            count += 1
            if count == 3:  # All congestors are, and then the pair begins; then it is done.
                barriers = [self._control.begin_barrier(what) for _ in range(2)]
        for one in pending:
            self._finish(one, parts[0], "to")
        for barrier in barriers:
            self._control.end_barrier(barrier, what)

    def _part(self, run: torch.Tensor, peer: int, tag: int) -> Part:
        handle, size = self._transport.wrap(run), run.numel() * run.element_size()
        return Part(handle=handle, peer=peer, tag=tag, num_bytes=size, is_across=False, opens=True)

    def _pass(self, receives: Sequence[Part], sends: Sequence[Part]) -> None:
        arriving, leaving = self._transport.post(receives, sends)
        for part, pending in zip(receives, arriving, strict=True):
            self._finish(pending, part, "from")
        for part, pending in zip(sends, leaving, strict=True):
            self._finish(pending, part, "to")

    def _finish(self, pending: Any, part: Part, direction: str) -> None:
        self._transport.wait(pending, part, direction)
        self._synchronise()

    def _synchronise(self) -> None:
        """On a GPU waiting orders the stream, and not the host."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _point(self, kind: tuple[RankPair, str, bool], num_bytes: int, taken: _Taken) -> CommPoint:
        pair, way, is_beside = kind
        everyone = self._control.gather("results of a pair", vars(taken))
        wrong = everyone[pair[1]]["wrong"]
        senders = [everyone[sender] for sender, _ in self._comm.congestors]
        return CommPoint(
            collective=self._comm.collective,
            algorithm=way,
            carrier=self._transport.carrier,
            num_bytes=num_bytes,
            dtype=self._comm.dtype,
            times_s=tuple(everyone[pair[0]]["times"]),
            operations=1 if way == "ping-pong" else window_of(num_bytes),
            pair=pair,
            congestors=tuple(one["sent"] / one["seconds"] if one["seconds"] else 0.0 for one in senders if is_beside),
            correct=not wrong if self._comm.check else None,
            max_error=None,
            problem="what arrived is not what was sent" if wrong else "",
        )


def window_of(num_bytes: int) -> int:
    """Messages of a window."""
    return max(2, min(WINDOW, WINDOW_BYTES // num_bytes))
