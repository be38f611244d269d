"""The execution of a schedule by a transport.

A `ScheduleStep` reads the buffer as it was when the step began. Where an arriving run of elements overlaps none that is
being sent, it is received in place; otherwise, and where it is to be added, it lands in one of a few slots first. Long
messages travel in segments, so that one is added while the next arrives. Receives are posted up to one step ahead where
that touches nothing in use: both gloo and MPI then need no second round to agree on a transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dlbench.node.comm.transport import MessagePart, Operation, Transport
from dlbench.perfmodels.schedules import Schedule, ScheduleStep, Transfer, all_to_all_block

SLOT_MEMORY_BYTES = 16 * 1024 * 1024  # Memory for arriving segments; they are few, so that they stay in the caches.
LEAST_SLOTS = 4
_ALONE = 32768  # Elements up to which torch adds by one thread (its GRAIN_SIZE); there NumPy is faster.


@dataclass(slots=True)
class _Arrival:
    part: MessagePart
    step: int
    early: int  # Before its step it may be posted: 0 never, 1 after the sends of the step before it, 2 at any time.
    place: torch.Tensor  # Where its elements belong in the buffer.
    slot: torch.Tensor | None  # Where it lands first; None: in place.
    ordinal: int  # Of those that need a slot, which; -1: it needs none.
    is_added: bool
    after: tuple[int, ...]  # Sends of its step that read the place.


@dataclass(slots=True)
class _Work:
    """What a step that has something to do does."""

    sends: list[MessagePart]
    first: int  # Its first arrival among all of the schedule.
    end: int


class Execution:
    """A schedule bound to a buffer and a transport; `run` may be called any number of times."""

    def __init__(
        self, schedule: Schedule, buffer: torch.Tensor, transport: Transport, source: torch.Tensor | None = None
    ) -> None:
        """Prepares all slices, so that running allocates nothing. `buffer`: one-dimensional, contiguous; what the steps
        work on. `source`: for all-to-all, the input; of the buffer's length and type.
        """
        self._transport = transport
        self._buffer = buffer
        self._source = source
        self._steps: list[_Work] = []
        self._arrivals: list[_Arrival] = []
        self._program: list[Operation] = []
        self._awaited: dict[int, MessagePart] = {}  # By the place of its `finish` in the program.
        if source is not None:
            first, into, count = all_to_all_block(len(buffer), transport.size, transport.rank, transport.rank)
            self._program.append(_taking(buffer[into : into + count], source[first : first + count], False))
        self._num_steps = len(schedule)
        self._messages = self._bytes_sent = self._bytes_across = 0  # That a run sends.
        self._compile([step for step in schedule if step.sends or step.receives])
        self._settle()

    def run(self, times: int = 1) -> None:
        """Executes all steps, this many times; returns when this rank's part is done."""
        number = 0
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # as torch adds
                for _ in range(times):
                    for number, operation in enumerate(self._program):  # noqa: B007  (an error is told by it)
                        operation()
        except RuntimeError as error:
            part = self._awaited.get(number)
            raise (self._transport.refused(error) if part is None else part.lost(error)) from None
        counters = self._transport.counters
        counters.steps += times * self._num_steps
        counters.messages += times * self._messages
        counters.bytes_sent += times * self._bytes_sent
        counters.bytes_across += times * self._bytes_across

    def release(self) -> None:
        """Gives back what the library keeps of it; nothing may be under way."""
        for part in (*(arrival.part for arrival in self._arrivals), *(p for step in self._steps for p in step.sends)):
            part.release()

    def _settle(self) -> None:
        """The operations of a run in their order; it depends on the schedule alone."""
        arrivals = self._arrivals
        posted = added = 0  # Arrivals that were posted, and that are out of their slots.

        def post(current: int, last_step: int, sends: Sequence[MessagePart] = (), least: int = 2) -> None:
            nonlocal posted
            reach = self._reach(posted, current, last_step, added, least)
            self._program += self._transport.together([*(a.part for a in arrivals[posted:reach]), *sends])
            posted = reach

        def wait(part: MessagePart) -> None:
            self._awaited[len(self._program)] = part
            self._program.append(part.finish)

        for number, step in enumerate(self._steps):
            post(number, number, step.sends)
            post(number, number + 1)
            open_sends = set(range(len(step.sends)))
            for which, arrival in enumerate(arrivals[step.first : step.end], step.first + 1):
                # Before the last the other end learns that those of the next step may come.
                is_due = which == step.end < len(arrivals) and arrivals[which].early == 1
                if not is_due:
                    wait(arrival.part)
                for send in sorted(open_sends) if is_due else arrival.after:
                    if send in open_sends:
                        wait(step.sends[send])
                        open_sends.discard(send)
                if is_due:
                    post(number, number + 1, least=1)
                    wait(arrival.part)
                if arrival.slot is not None:
                    self._program.append(_taking(arrival.place, arrival.slot, arrival.is_added))
                    added += 1
                    post(number, number + 1)
            for send in sorted(open_sends):
                wait(step.sends[send])

    def _reach(self, posted: int, current: int, last_step: int, added: int, least: int) -> int:
        """How many arrivals may have been posted: in order, each with a free slot, up to `last_step`; of steps to come
        those that may be so early.
        """
        arrivals = self._arrivals
        while posted < len(arrivals):
            arrival = arrivals[posted]
            if arrival.step > last_step or (arrival.step > current and arrival.early < least):
                break
            if arrival.ordinal >= added + self._num_slots:
                break
            posted += 1
        return posted

    def _compile(self, steps: Sequence[ScheduleStep]) -> None:
        width = self._buffer.element_size()
        limit = self._transport.segment_bytes
        segment = len(self._buffer) if limit is None else max(1, limit // width)
        staged = [[self._is_staged(step, transfer) for transfer in step.receives] for step in steps]
        slots = self._make_slots(steps, staged, segment)
        to, come = Counter[int](), Counter[int]()
        ordinal = 0
        for number, step in enumerate(steps):
            source = self._source if step.from_input else self._buffer
            if source is None:
                raise ValueError("a schedule that reads its input needs one")
            sends, ranges = [], []
            for transfer, first, count in _segments(step.sends, segment):
                sends.append(part := self._part(source[first : first + count], transfer, to, sends=True))
                self._messages += first == transfer.first
                self._bytes_sent += part.num_bytes
                if part.peer // self._transport.group_size != self._transport.rank // self._transport.group_size:
                    self._bytes_across += part.num_bytes
                ranges.append((first, first + count))
            work = _Work(sends=sends, first=len(self._arrivals), end=0)
            flags = {id(t): flag for t, flag in zip(step.receives, staged[number], strict=True)}
            before = steps[number - 1] if number else None
            for transfer, first, count in _segments(step.receives, segment):
                place = self._buffer[first : first + count]
                slot = slots[ordinal % len(slots)][:count] if flags[id(transfer)] else None
                self._arrivals.append(
                    _Arrival(
                        part=self._part(place if slot is None else slot, transfer, come, sends=False),
                        step=number,
                        early=self._transport.early * (2 if slot is not None else _earliness(before, transfer)),
                        place=place,
                        slot=slot,
                        ordinal=-1 if slot is None else ordinal,
                        is_added=transfer.is_added,
                        after=()
                        if slot is None or step.from_input
                        else tuple(i for i, (low, high) in enumerate(ranges) if low < first + count and first < high),
                    )
                )
                ordinal += slot is not None
            work.end = len(self._arrivals)
            self._steps.append(work)

    def _make_slots(
        self, steps: Sequence[ScheduleStep], staged: Sequence[Sequence[bool]], segment: int
    ) -> list[torch.Tensor]:
        """Room for arrivals that cannot go to their place at once."""
        sizes = [
            [
                count
                for _, _, count in _segments([t for t, flag in zip(s.receives, flags, strict=True) if flag], segment)
            ]
            for s, flags in zip(steps, staged, strict=True)
        ]
        longest = max((count for step in sizes for count in step), default=0)
        if self._transport.early:
            fitting = SLOT_MEMORY_BYTES // max(1, longest * self._buffer.element_size())
            # Those of all peers at once: a sum waits for the sends of what it changes, and each of them for its peer.
            peers = max(map(sum, staged), default=0)
            number = min(sum(map(len, sizes)), max(LEAST_SLOTS, fitting, peers))
        else:  # all receives of a step are posted together
            number = max(map(len, sizes), default=0)
        self._num_slots = number
        room = torch.zeros(number * longest, dtype=self._buffer.dtype, device=self._buffer.device)
        return [room[i * longest : (i + 1) * longest] for i in range(number)]

    def _is_staged(self, step: ScheduleStep, receive: Transfer) -> bool:
        return receive.is_added or (not step.from_input and any(_overlap(receive, send) for send in step.sends))

    def _part(self, run: torch.Tensor, transfer: Transfer, tags: Counter[int], *, sends: bool) -> MessagePart:
        """Tags number the parts of a pair of ranks; those of one tag arrive in the order of sending."""
        tag = tags[transfer.peer]
        tags[transfer.peer] += 1
        return self._transport.part(run, transfer.peer, tag % 32768, sends=sends)  # the least that MPI promises


def _taking(place: torch.Tensor, slot: torch.Tensor, is_added: bool) -> Operation:
    """What arrived is added to the elements at its place, or put there."""
    is_alone = place.numel() <= _ALONE or torch.get_num_threads() == 1
    if place.device.type == "cpu" and place.dtype == torch.float32 and is_alone:
        into, arrived = place.numpy(), slot.numpy()
        return partial(np.add, into, arrived, into) if is_added else partial(np.copyto, into, arrived)
    return partial(place.add_ if is_added else place.copy_, slot)


def _segments(transfers: Sequence[Transfer], segment: int) -> Iterator[tuple[Transfer, int, int]]:
    """Transfers in runs of at most `segment` elements, the first of each, then the second: with element and length."""
    for begin in range(0, max((transfer.count for transfer in transfers), default=0), max(1, segment)):
        for transfer in transfers:
            if begin < transfer.count:
                yield transfer, transfer.first + begin, min(segment, transfer.count - begin)


def _overlap(one: Transfer, other: Transfer) -> bool:
    return one.first < other.first + other.count and other.first < one.first + one.count


def _earliness(step: ScheduleStep | None, receive: Transfer) -> int:
    """Of an arrival in place: 2 if it touches nothing that the step before uses, 1 if only what that sends."""
    if step is None:
        return 2
    if any(_overlap(receive, transfer) for transfer in step.receives):
        return 0
    return 2 if step.from_input or not any(_overlap(receive, transfer) for transfer in step.sends) else 1
