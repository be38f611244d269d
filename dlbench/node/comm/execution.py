"""Executes a schedule by a transport; a `ScheduleStep` reads the buffer as it was when the step began."""
# Elements are received into slots if they are to be added, or overlap elements that are being sent. Receives are posted
# up to one step ahead, as gloo and MPI then save a handshake.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain

import numpy as np
import torch

from dlbench.node.comm.transport import MessagePart, Operation, Transport
from dlbench.perfmodels.schedules import Schedule, ScheduleStep, Transfer, all_to_all_block

SLOT_MEMORY_BYTES = 16 * 1024 * 1024  # Memory for arriving segments; small, so that they stay in the caches.
LEAST_SLOTS = 4
_ONE_THREAD_ELEMENTS = 32768  # Elements up to which torch adds on one thread (its GRAIN_SIZE); NumPy is faster there.


class _Earliness(IntEnum):
    """From when on a receive may be posted, the latest first."""

    IN_ITS_STEP = 0
    AFTER_SENDS = 1  # When all sends of the step before have finished.
    IN_STEP_BEFORE = 2


@dataclass(slots=True)
class _Arrival:
    part: MessagePart
    step: int
    earliness: _Earliness
    place: torch.Tensor  # The elements of the buffer that it changes.
    slot: torch.Tensor | None  # Memory that it is received into; None: in place.
    ordinal: int  # Its number among the arrivals that need a slot; -1: it needs none.
    is_added: bool
    sends_to_finish_first: tuple[int, ...]  # Numbers of the sends of its step that read `place`.


@dataclass(slots=True)
class _CompiledStep:
    sends: list[MessagePart]
    first_arrival: int  # Its arrivals are `_arrivals[first_arrival:end_arrival]`.
    end_arrival: int


class Execution:
    """A schedule bound to a buffer and a transport; `run` may be called any number of times."""

    def __init__(
        self, schedule: Schedule, buffer: torch.Tensor, transport: Transport, source: torch.Tensor | None = None
    ) -> None:
        """Prepares all slices of the one-dimensional `buffer`, which steps change; `source`: input of an all-to-all."""
        self._transport = transport
        self._buffer = buffer
        self._source = source
        self._steps: list[_CompiledStep] = []
        self._arrivals: list[_Arrival] = []
        self._program: list[Operation] = []
        self._awaited: dict[int, MessagePart] = {}  # Parts by the position of their `finish` in the program.
        if source is not None:
            first, into, count = all_to_all_block(len(buffer), transport.size, transport.rank, transport.rank)
            self._program.append(_add_or_copy(buffer[into : into + count], source[first : first + count], False))
        self._num_steps = len(schedule)
        self._messages = self._bytes_sent = self._bytes_across = 0  # Counts of one run.
        self._compile([step for step in schedule if step.sends or step.receives])
        self._make_program()

    def run(self, times: int = 1) -> None:
        """Executes all steps `times` times; returns when this rank's part is done."""
        number = 0
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # torch gives no warnings either
                for _ in range(times):
                    for number, operation in enumerate(self._program):  # noqa: B007  (the error names its message)
                        operation()
        except RuntimeError as error:
            part = self._awaited.get(number)
            if part is None:
                raise self._transport.refused(error) from None
            raise part.lost(error) from None
        counters = self._transport.counters
        counters.steps += times * self._num_steps
        counters.messages += times * self._messages
        counters.bytes_sent += times * self._bytes_sent
        counters.bytes_across += times * self._bytes_across

    def release(self) -> None:
        for arrival in self._arrivals:
            arrival.part.release()
        for part in chain.from_iterable(step.sends for step in self._steps):
            part.release()

    def _make_program(self) -> None:
        arrivals = self._arrivals
        num_posted = num_freed_slots = 0  # Of arrivals; a slot is free when its elements were added or copied.

        def post(current: int, last_step: int, sends: Sequence[MessagePart] = (), has_sent: bool = False) -> None:
            nonlocal num_posted
            num_postable = self._num_postable(num_posted, current, last_step, num_freed_slots, has_sent)
            self._program += self._transport.together([*(a.part for a in arrivals[num_posted:num_postable]), *sends])
            num_posted = num_postable

        def wait(part: MessagePart) -> None:
            self._awaited[len(self._program)] = part
            self._program.append(part.finish)

        for number, step in enumerate(self._steps):
            post(number, number, step.sends)
            post(number, number + 1)
            open_sends = set(range(len(step.sends)))
            for following in range(step.first_arrival + 1, step.end_arrival + 1):
                arrival = arrivals[following - 1]
                # Before waiting for the last arrival, post those of the next step that wait only for this step's sends.
                precedes_next_step = following == step.end_arrival < len(arrivals)
                posts_next = precedes_next_step and arrivals[following].earliness is _Earliness.AFTER_SENDS
                awaited_sends: Sequence[int] = arrival.sends_to_finish_first
                if posts_next:
                    awaited_sends = sorted(open_sends)
                else:
                    wait(arrival.part)
                for send in awaited_sends:
                    if send in open_sends:
                        wait(step.sends[send])
                        open_sends.discard(send)
                if posts_next:
                    post(number, number + 1, has_sent=True)
                    wait(arrival.part)
                if arrival.slot is not None:
                    self._program.append(_add_or_copy(arrival.place, arrival.slot, arrival.is_added))
                    num_freed_slots += 1
                    post(number, number + 1)
            for send in sorted(open_sends):
                wait(step.sends[send])

    def _num_postable(self, num_posted: int, current: int, last_step: int, num_freed_slots: int, has_sent: bool) -> int:
        """Returns how many arrivals may be posted by now: in order, each with a free slot, up to `last_step`."""
        # Arrivals of later steps than `current` must not need to wait for its sends, unless it `has_sent` them all.
        minimum = _Earliness.AFTER_SENDS if has_sent else _Earliness.IN_STEP_BEFORE
        arrivals = self._arrivals
        while num_posted < len(arrivals):
            arrival = arrivals[num_posted]
            if arrival.step > last_step or (arrival.step > current and arrival.earliness < minimum):
                break
            if arrival.ordinal >= num_freed_slots + self._num_slots:
                break
            num_posted += 1
        return num_posted

    def _compile(self, steps: Sequence[ScheduleStep]) -> None:
        width = self._buffer.element_size()
        segment = len(self._buffer)
        if self._transport.segment_bytes is not None:
            segment = max(1, self._transport.segment_bytes // width)
        slots = self._make_slots(steps, segment)
        send_tags, receive_tags = Counter[int](), Counter[int]()
        ordinal = 0
        previous: ScheduleStep | None = None
        for number, step in enumerate(steps):
            source = self._source if step.from_input else self._buffer
            if source is None:
                raise ValueError("a schedule that reads its input needs one")
            sends, sent_ranges = [], []
            for transfer, first, count in _segments(step.sends, segment):
                part = self._part(source[first : first + count], transfer, send_tags, sends=True)
                sends.append(part)
                if first == transfer.first:
                    self._messages += 1
                self._bytes_sent += part.num_bytes
                if part.peer // self._transport.group_size != self._transport.rank // self._transport.group_size:
                    self._bytes_across += part.num_bytes
                sent_ranges.append((first, first + count))
            compiled = _CompiledStep(sends=sends, first_arrival=len(self._arrivals), end_arrival=0)
            for transfer, first, count in _segments(step.receives, segment):
                place = received_into = self._buffer[first : first + count]
                slot: torch.Tensor | None = None
                earliness = _earliness(previous, transfer)
                sends_to_finish_first: tuple[int, ...] = ()
                if _is_staged(step, transfer):
                    slot = received_into = slots[ordinal % len(slots)][:count]
                    earliness = _Earliness.IN_STEP_BEFORE
                    if not step.from_input:
                        sends_to_finish_first = tuple(
                            i for i, (low, high) in enumerate(sent_ranges) if low < first + count and first < high
                        )
                arrival = _Arrival(
                    part=self._part(received_into, transfer, receive_tags, sends=False),
                    step=number,
                    earliness=earliness if self._transport.early else _Earliness.IN_ITS_STEP,
                    place=place,
                    slot=slot,
                    ordinal=-1,
                    is_added=transfer.is_added,
                    sends_to_finish_first=sends_to_finish_first,
                )
                if slot is not None:
                    arrival.ordinal = ordinal
                    ordinal += 1
                self._arrivals.append(arrival)
            compiled.end_arrival = len(self._arrivals)
            self._steps.append(compiled)
            previous = step

    def _make_slots(self, steps: Sequence[ScheduleStep], segment: int) -> list[torch.Tensor]:
        staged = [[transfer for transfer in step.receives if _is_staged(step, transfer)] for step in steps]
        segments = [list(_segments(transfers, segment)) for transfers in staged]
        longest = max((count for _, _, count in chain.from_iterable(segments)), default=0)
        if self._transport.early:
            fitting = SLOT_MEMORY_BYTES // max(1, longest * self._buffer.element_size())
            # One slot per peer at least, else ranks deadlock: a slot is free only after the sends from its `place`.
            # Each of those sends waits until its peer has posted a receive, for which the peer needs a slot as well.
            peers = max(map(len, staged), default=0)
            num_slots = min(sum(map(len, segments)), max(LEAST_SLOTS, fitting, peers))
        else:  # all receives of a step are posted together
            num_slots = max(map(len, segments), default=0)
        self._num_slots = num_slots
        memory = torch.zeros(num_slots * longest, dtype=self._buffer.dtype, device=self._buffer.device)
        return [memory[i * longest : (i + 1) * longest] for i in range(num_slots)]

    def _part(self, elements: torch.Tensor, transfer: Transfer, tags: Counter[int], *, sends: bool) -> MessagePart:
        tag = tags[transfer.peer]
        tags[transfer.peer] += 1
        return self._transport.part(elements, transfer.peer, tag % 32768, sends=sends)  # MPI promises tags below 32768


def _is_staged(step: ScheduleStep, receive: Transfer) -> bool:
    return receive.is_added or (not step.from_input and any(_overlap(receive, send) for send in step.sends))


def _add_or_copy(place: torch.Tensor, slot: torch.Tensor, is_added: bool) -> Operation:
    """Returns the operation that adds `slot` to `place`, or copies it there."""
    is_on_one_thread = place.numel() <= _ONE_THREAD_ELEMENTS or torch.get_num_threads() == 1
    if place.device.type == "cpu" and place.dtype == torch.float32 and is_on_one_thread:
        target, arrived = place.numpy(), slot.numpy()
        if is_added:
            return partial(np.add, target, arrived, target)
        return partial(np.copyto, target, arrived)
    if is_added:
        return partial(place.add_, slot)
    return partial(place.copy_, slot)


def _segments(transfers: Sequence[Transfer], segment: int) -> Iterator[tuple[Transfer, int, int]]:
    """Yields transfers in segments, with first element and length: the first segment of each, then the second."""
    for begin in range(0, max((transfer.count for transfer in transfers), default=0), max(1, segment)):
        for transfer in transfers:
            if begin < transfer.count:
                yield transfer, transfer.first + begin, min(segment, transfer.count - begin)


def _overlap(first: Transfer, second: Transfer) -> bool:
    return first.first < second.first + second.count and second.first < first.first + first.count


def _earliness(previous: ScheduleStep | None, receive: Transfer) -> _Earliness:
    """Returns when a receive in place may be posted, by the elements that the step before uses."""
    if previous is None:
        return _Earliness.IN_STEP_BEFORE
    if any(_overlap(receive, transfer) for transfer in previous.receives):
        return _Earliness.IN_ITS_STEP
    if not previous.from_input and any(_overlap(receive, transfer) for transfer in previous.sends):
        return _Earliness.AFTER_SENDS
    return _Earliness.IN_STEP_BEFORE
