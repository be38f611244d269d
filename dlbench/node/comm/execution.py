"""Executes a schedule by a transport; a `ScheduleStep` reads the buffer as it was when the step began."""
# Elements are received into slots if they are to be added, or overlap elements that are being sent. Receives are posted
# up to one step ahead, as gloo and MPI then save a handshake.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch

from dlbench.node.comm.transport import MessagePart, Operation, Transport
from dlbench.perfmodels.schedules import Schedule, ScheduleStep, Transfer, all_to_all_block

SLOT_MEMORY_BYTES = 16 * 1024 * 1024  # Memory for arriving segments; small, so that they stay in the caches.
LEAST_SLOTS = 4
_ONE_THREAD_ELEMENTS = 32768  # Elements up to which torch adds on one thread (its GRAIN_SIZE); NumPy is faster there.


@dataclass(slots=True)
class _Arrival:
    part: MessagePart
    step: int
    early: int  # When it may be posted before its step: 0 never, 1 after the sends of the step before, 2 at any time.
    place: torch.Tensor  # The elements of the buffer that it changes.
    slot: torch.Tensor | None  # Memory that it is received into; None: in place.
    ordinal: int  # Its number among the arrivals that need a slot; -1: it needs none.
    is_added: bool
    after: tuple[int, ...]  # Numbers of the sends of its step that read `place`.


@dataclass(slots=True)
class _Work:
    sends: list[MessagePart]
    first: int  # Its first arrival among all of the schedule.
    end: int  # The end of its arrivals.


class Execution:
    """A schedule bound to a buffer and a transport; `run` may be called any number of times."""

    def __init__(
        self, schedule: Schedule, buffer: torch.Tensor, transport: Transport, source: torch.Tensor | None = None
    ) -> None:
        """Prepares all slices of the one-dimensional `buffer`, which steps change; `source`: input of an all-to-all."""
        self._transport = transport
        self._buffer = buffer
        self._source = source
        self._steps: list[_Work] = []
        self._arrivals: list[_Arrival] = []
        self._program: list[Operation] = []
        self._awaited: dict[int, MessagePart] = {}  # Parts by the position of their `finish` in the program.
        if source is not None:
            first, into, count = all_to_all_block(len(buffer), transport.size, transport.rank, transport.rank)
            self._program.append(_move(buffer[into : into + count], source[first : first + count], False))
        self._num_steps = len(schedule)
        self._messages = self._bytes_sent = self._bytes_across = 0  # Counts of one run.
        self._compile([step for step in schedule if step.sends or step.receives])
        self._make_program()

    def run(self, times: int = 1) -> None:
        """Executes all steps `times` times; returns when this rank's part is done."""
        number = 0
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # as torch adds
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
        posted = added = 0  # Number of arrivals that were posted, and that have left their slots.

        def post(current: int, last_step: int, sends: Sequence[MessagePart] = (), min_early: int = 2) -> None:
            nonlocal posted
            reach = self._reach(posted, current, last_step, added, min_early)
            self._program += self._transport.together([*(a.part for a in arrivals[posted:reach]), *sends])
            posted = reach

        def wait(part: MessagePart) -> None:
            self._awaited[len(self._program)] = part
            self._program.append(part.finish)

        for number, step in enumerate(self._steps):
            post(number, number, step.sends)
            post(number, number + 1)
            open_sends = set(range(len(step.sends)))
            for following, arrival in enumerate(arrivals[step.first : step.end], step.first + 1):
                # Before waiting for the last arrival, post those of the next step that wait only for this step's sends.
                posts_next = following == step.end < len(arrivals) and arrivals[following].early == 1
                awaited_sends: Sequence[int] = arrival.after
                if posts_next:
                    awaited_sends = sorted(open_sends)
                else:
                    wait(arrival.part)
                for send in awaited_sends:
                    if send in open_sends:
                        wait(step.sends[send])
                        open_sends.discard(send)
                if posts_next:
                    post(number, number + 1, min_early=1)
                    wait(arrival.part)
                if arrival.slot is not None:
                    self._program.append(_move(arrival.place, arrival.slot, arrival.is_added))
                    added += 1
                    post(number, number + 1)
            for send in sorted(open_sends):
                wait(step.sends[send])

    def _reach(self, posted: int, current: int, last_step: int, added: int, min_early: int) -> int:
        """Returns how many arrivals may be posted by now: in order, each with a free slot, up to `last_step`."""
        # Arrivals of later steps than `current` need an `early` of `min_early` or more.
        arrivals = self._arrivals
        while posted < len(arrivals):
            arrival = arrivals[posted]
            if arrival.step > last_step or (arrival.step > current and arrival.early < min_early):
                break
            if arrival.ordinal >= added + self._num_slots:
                break
            posted += 1
        return posted

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
            work = _Work(sends=sends, first=len(self._arrivals), end=0)
            for transfer, first, count in _segments(step.receives, segment):
                place = received_into = self._buffer[first : first + count]
                slot: torch.Tensor | None = None
                early = _earliness(previous, transfer)
                after: tuple[int, ...] = ()
                if _is_staged(step, transfer):
                    slot = received_into = slots[ordinal % len(slots)][:count]
                    early = 2
                    if not step.from_input:
                        after = tuple(
                            i for i, (low, high) in enumerate(sent_ranges) if low < first + count and first < high
                        )
                arrival = _Arrival(
                    part=self._part(received_into, transfer, receive_tags, sends=False),
                    step=number,
                    early=early if self._transport.early else 0,
                    place=place,
                    slot=slot,
                    ordinal=-1,
                    is_added=transfer.is_added,
                    after=after,
                )
                if slot is not None:
                    arrival.ordinal = ordinal
                    ordinal += 1
                self._arrivals.append(arrival)
            work.end = len(self._arrivals)
            self._steps.append(work)
            previous = step

    def _make_slots(self, steps: Sequence[ScheduleStep], segment: int) -> list[torch.Tensor]:
        staged = [[transfer for transfer in step.receives if _is_staged(step, transfer)] for step in steps]
        segments = [list(_segments(transfers, segment)) for transfers in staged]
        longest = max((count for _, _, count in chain.from_iterable(segments)), default=0)
        if self._transport.early:
            fitting = SLOT_MEMORY_BYTES // max(1, longest * self._buffer.element_size())
            # At least those of all peers: a sum waits for sends from its place, and each of them for its peer.
            peers = max(map(len, staged), default=0)
            num_slots = min(sum(map(len, segments)), max(LEAST_SLOTS, fitting, peers))
        else:  # all receives of a step are posted together
            num_slots = max(map(len, segments), default=0)
        self._num_slots = num_slots
        memory = torch.zeros(num_slots * longest, dtype=self._buffer.dtype, device=self._buffer.device)
        return [memory[i * longest : (i + 1) * longest] for i in range(num_slots)]

    def _part(self, run: torch.Tensor, transfer: Transfer, tags: Counter[int], *, sends: bool) -> MessagePart:
        tag = tags[transfer.peer]
        tags[transfer.peer] += 1
        return self._transport.part(run, transfer.peer, tag % 32768, sends=sends)  # MPI promises tags below 32768


def _is_staged(step: ScheduleStep, receive: Transfer) -> bool:
    return receive.is_added or (not step.from_input and any(_overlap(receive, send) for send in step.sends))


def _move(place: torch.Tensor, slot: torch.Tensor, is_added: bool) -> Operation:
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


def _earliness(previous: ScheduleStep | None, receive: Transfer) -> int:
    """Returns `_Arrival.early` of a receive in place, by the elements that the step before uses."""
    if previous is None:
        return 2
    if any(_overlap(receive, transfer) for transfer in previous.receives):
        return 0
    if not previous.from_input and any(_overlap(receive, transfer) for transfer in previous.sends):
        return 1
    return 2
