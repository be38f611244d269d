"""Executes a schedule: posts its messages, and sums up or puts in place what arrives.

A `Step` reads the buffer as it was when the step began. Where an arriving run of elements overlaps none that is being
sent, it is received in place; otherwise, and where it is to be added, it lands in one of a few slots first. Long
messages travel in segments, so that one is added while the next arrives. Receives are posted up to one step ahead where
that touches nothing in use: both gloo and MPI then need no second round to agree on a transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlbench.costs.schedules import Schedule, Step, Transfer, all_to_all_block
from dlbench.node.collectives.transport import Part, Transport

SLOT_MEMORY_BYTES = 16 * 1024 * 1024
"""Memory for arriving segments; they are few, so that they stay in the caches."""
LEAST_SLOTS = 4


@dataclass(slots=True)
class _Arrival:
    """A segment that will arrive."""

    part: Part
    step: int
    may_be_early: bool
    place: torch.Tensor
    """Where its elements belong in the buffer."""
    slot: torch.Tensor | None
    """Where it lands first; None: in place."""
    ordinal: int
    """Of those that need a slot, which; -1: it needs none."""
    is_added: bool
    after: tuple[int, ...]
    """Sends of its step that read the place."""


@dataclass(slots=True)
class _Work:
    """What a step that has something to do does."""

    sends: list[Part]
    first: int
    """Its first arrival among all of the schedule."""
    end: int


class Execution:
    """A schedule bound to a buffer and a transport; `run` may be called any number of times."""

    def __init__(
        self, schedule: Schedule, buffer: torch.Tensor, transport: Transport, source: torch.Tensor | None = None
    ) -> None:
        """Prepares all slices, so that running allocates nothing.

        Args:
            schedule: this rank's steps.
            buffer: one-dimensional, contiguous; what the steps work on.
            transport: carries the messages.
            source: for all-to-all, the input; of the buffer's length and type.
        """
        self._transport = transport
        self._buffer = buffer
        self._source = source
        self._steps: list[_Work] = []
        self._arrivals: list[_Arrival] = []
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None
        if source is not None:
            first, into, count = all_to_all_block(len(buffer), transport.size, transport.rank, transport.rank)
            self._own = buffer[into : into + count], source[first : first + count]
        self._num_steps = len(schedule)
        self._compile([step for step in schedule if step.sends or step.receives])

    def run(self) -> None:
        """Executes all steps once; returns when this rank's part is done.

        Raises:
            RunError: a message failed; the buffer is undefined.
        """
        transport, arrivals = self._transport, self._arrivals
        pending: list[Any] = []
        added = 0  # arrivals out of their slots
        if self._own is not None:
            self._own[0].copy_(self._own[1])
        for number, step in enumerate(self._steps):
            reach = self._reach(len(pending), number, number, added)
            arriving, leaving = transport.post([a.part for a in arrivals[len(pending) : reach]], step.sends)
            pending += arriving
            self._post_more(pending, number, added)
            open_sends = set(range(len(leaving)))
            for index in range(step.first, step.end):
                arrival = arrivals[index]
                transport.wait(pending[index], arrival.part, "from")
                pending[index] = None
                for send in arrival.after:
                    if send in open_sends:
                        transport.wait(leaving[send], step.sends[send], "to")
                        open_sends.discard(send)
                if arrival.slot is not None:
                    if arrival.is_added:
                        arrival.place.add_(arrival.slot)
                    else:
                        arrival.place.copy_(arrival.slot)
                    added += 1
                    self._post_more(pending, number, added)
            for send in sorted(open_sends):
                transport.wait(leaving[send], step.sends[send], "to")
        transport.counters.steps += self._num_steps

    def _post_more(self, pending: list[Any], number: int, added: int) -> None:
        reach = self._reach(len(pending), number, number + 1, added)
        if reach > len(pending):
            arriving, _ = self._transport.post([a.part for a in self._arrivals[len(pending) : reach]], ())
            pending += arriving

    def _reach(self, posted: int, current: int, last_step: int, added: int) -> int:
        """How many arrivals may have been posted: in order, each with a free slot, up to `last_step`."""
        arrivals = self._arrivals
        while posted < len(arrivals):
            arrival = arrivals[posted]
            if arrival.step > last_step or (arrival.step > current and not arrival.may_be_early):
                break
            if arrival.ordinal >= added + self._num_slots:
                break
            posted += 1
        return posted

    def _compile(self, steps: Sequence[Step]) -> None:
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
                sends.append(self._part(source[first : first + count], transfer, first, to))
                ranges.append((first, first + count))
            work = _Work(sends=sends, first=len(self._arrivals), end=0)
            flags = {id(t): flag for t, flag in zip(step.receives, staged[number], strict=True)}
            before = steps[number - 1] if number else None
            for transfer, first, count in _segments(step.receives, segment):
                place = self._buffer[first : first + count]
                slot = slots[ordinal % len(slots)][:count] if flags[id(transfer)] else None
                self._arrivals.append(
                    _Arrival(
                        part=self._part(place if slot is None else slot, transfer, first, come),
                        step=number,
                        may_be_early=self._transport.early and (slot is not None or _leaves_alone(before, transfer)),
                        place=place,
                        slot=slot,
                        ordinal=-1 if slot is None else ordinal,
                        is_added=step.reduce,
                        after=()
                        if slot is None or step.from_input
                        else tuple(i for i, (low, high) in enumerate(ranges) if low < first + count and first < high),
                    )
                )
                ordinal += slot is not None
            work.end = len(self._arrivals)
            self._steps.append(work)

    def _make_slots(self, steps: Sequence[Step], staged: Sequence[Sequence[bool]], segment: int) -> list[torch.Tensor]:
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
            number = min(sum(map(len, sizes)), max(LEAST_SLOTS, fitting))
        else:  # all receives of a step are posted together
            number = max(map(len, sizes), default=0)
        self._num_slots = number
        room = torch.zeros(number * longest, dtype=self._buffer.dtype, device=self._buffer.device)
        return [room[i * longest : (i + 1) * longest] for i in range(number)]

    def _is_staged(self, step: Step, receive: Transfer) -> bool:
        return step.reduce or (not step.from_input and any(_overlap(receive, send) for send in step.sends))

    def _part(self, run: torch.Tensor, transfer: Transfer, first: int, tags: Counter[int]) -> Part:
        """Tags number the parts of a pair of ranks; those of one tag arrive in the order of sending."""
        transport, tag = self._transport, tags[transfer.peer]
        tags[transfer.peer] += 1
        return Part(
            handle=transport.wrap(run),
            peer=transfer.peer,
            tag=tag % 32768,  # the least that MPI promises
            num_bytes=run.numel() * run.element_size(),
            is_across=transfer.peer // transport.group_size != transport.rank // transport.group_size,
            opens=first == transfer.first,
        )


def run(schedule: Schedule, buffer: torch.Tensor, transport: Transport, source: torch.Tensor | None = None) -> None:
    """Executes a schedule once; see `Execution`."""
    Execution(schedule, buffer, transport, source).run()


def _segments(transfers: Sequence[Transfer], segment: int) -> Iterator[tuple[Transfer, int, int]]:
    """Each transfer in runs of at most `segment` elements: the transfer, first element, elements."""
    for transfer in transfers:
        for first in range(transfer.first, transfer.first + transfer.count, max(1, segment)):
            yield transfer, first, min(segment, transfer.first + transfer.count - first)


def _overlap(one: Transfer, other: Transfer) -> bool:
    return one.first < other.first + other.count and other.first < one.first + one.count


def _leaves_alone(step: Step | None, receive: Transfer) -> bool:
    """Whether an arrival in place touches nothing that the step before uses."""
    if step is None:
        return True
    in_use = step.receives if step.from_input else (*step.receives, *step.sends)
    return not any(_overlap(receive, transfer) for transfer in in_use)
