"""What carries the messages of a schedule (gloo, NCCL or MPI), what they carried, and the execution of a schedule.

A `ScheduleStep` reads the buffer as it was when the step began. Where an arriving run of elements overlaps none that is
being sent, it is received in place; otherwise, and where it is to be added, it lands in one of a few slots first. Long
messages travel in segments, so that one is added while the next arrives. Receives are posted up to one step ahead where
that touches nothing in use: both gloo and MPI then need no second round to agree on a transfer.

All that does not depend on what arrives is settled when a schedule is bound: over MPI each message is a persistent
request (MPI 4.1, section 3.9), and a run calls one prepared operation after the other. Of 64 KiB between two ranks of a
node it would otherwise be half of the time.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError, PeerLostError, first_line
from dlbench.node.failures import passed_on
from dlbench.node.ranks import RankPlace
from dlbench.perfmodels.schedules import Schedule, ScheduleStep, Transfer, all_to_all_block
from dlbench.specs.launch import LauncherName

SEGMENT_BYTES = 1024 * 1024  # Longer messages travel in such segments: one is summed up while the next arrives.


@dataclass(slots=True)
class Counters:
    """What one rank sent, counted when it was handed to the library.

    A message is one transfer of the schedule, in however many segments it travels: that is what the closed forms of the
    algorithms count. Bytes are those of the segments.
    """

    steps: int = 0  # Steps gone through, also those without a message of this rank: steps of all ranks correspond.
    messages: int = 0
    bytes_sent: int = 0
    bytes_across: int = 0  # Those that left the group of the sender.

    def reset(self) -> None:
        self.steps = self.messages = self.bytes_sent = self.bytes_across = 0


Operation = Callable[[], object]


@dataclass(slots=True)
class Part:
    """A message, or a segment of one: a run of elements in memory, and the rank at the other end."""

    begin: Operation  # Of a part that is under way it is not called again before `finish`.
    finish: Operation  # Returns when it is through.
    release: Operation
    peer: int
    sends: bool
    num_bytes: int

    def lost(self, error: BaseException) -> PeerLostError:
        direction = "to" if self.sends else "from"
        return PeerLostError(f"the message {direction} rank {self.peer} failed: {first_line(error)}")


class Transport:
    """Messages between two ranks. Errors end the use of a transport: none of it works afterwards."""

    carrier: str  # What moves the bytes, e.g. torch-gloo.
    early = True  # Whether receives may be posted before this rank comes to their step.

    def __init__(self, place: RankPlace, group_size: int, segment_bytes: int | None) -> None:
        self.rank, self.size, self.group_size = place.rank, place.size, group_size
        self.segment_bytes = segment_bytes
        self.counters = Counters()

    def part(self, run: torch.Tensor, peer: int, tag: int, *, sends: bool) -> Part:
        """A contiguous run of elements, sent to or received from a rank; made once and used in every iteration."""
        begin, finish, release = self._operations(run, peer, tag, sends)
        return Part(begin, finish, release, peer, sends, run.nbytes)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        raise NotImplementedError

    def line_up(self) -> None:
        """Waits for all ranks by what carries the messages, where that has a barrier of the host."""

    def together(self, parts: Sequence[Part]) -> list[Operation]:
        """What begins these parts; receives come first."""
        return [part.begin for part in parts]

    def refused(self, error: RuntimeError) -> BaseException:
        return passed_on(f"{self.carrier} refuses a message: {first_line(error)}", error)


def gloo_barrier(group: dist.ProcessGroup) -> None:
    """Returns when all ranks of a group of gloo are here; they wait asleep, and wake some 10 us apart."""
    try:
        dist.barrier(group)
    except RuntimeError as error:
        raise PeerLostError(f"gloo's barrier failed: {first_line(error)}") from None


class GlooTransport(Transport):
    """Point-to-point messages of gloo, without the dispatch of torch.distributed's functions. The groups' own timeout
    is that of every wait.

    Each direction between two ranks has a group, so a connection, of its own. While a thread writes to one, gloo's
    event loop comes round for its lock as long as something arrives there (`Pair::handleEvents` of its
    transport/tcp/pair.cc), on a core that both share till the end of its time slice.
    """

    carrier = "torch-gloo"

    def __init__(
        self,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
        place: RankPlace,
        group_size: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`up` carries messages to higher ranks, `down` those to lower ones; all ranks are in both."""
        super().__init__(place, group_size, segment_bytes)
        self._group = up
        self._ways: tuple[Any, ...] = tuple(group._get_backend(torch.device("cpu")) for group in (down, up))

    def line_up(self) -> None:
        gloo_barrier(self._group)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        way = self._ways[(peer > self.rank) == sends]
        call, runs, work = way.send if sends else way.recv, [run], list[Any]()
        return lambda: work.append(call(runs, peer, tag)), lambda: work.pop().wait(), work.clear


class NcclTransport(Transport):
    """Point-to-point messages of NCCL, all of a step in one group call: NCCL knows neither tags nor order. Waiting
    orders the stream, not the host; who measures must synchronise.
    """

    carrier = "torch-nccl"
    early = False

    def __init__(self, group: dist.ProcessGroup, place: RankPlace, group_size: int) -> None:
        super().__init__(place, group_size, None)
        self._group = group
        self._open: list[dist.P2POp] = []
        self._work: Any = None  # Of the last group call: those before it are through in the stream when it is.

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        operation = dist.P2POp(dist.isend if sends else dist.irecv, run, peer, self._group)
        return lambda: self._open.append(operation), lambda: self._work.wait(), list

    def together(self, parts: Sequence[Part]) -> list[Operation]:
        def call() -> None:
            self._work = dist.batch_isend_irecv(self._open)[-1]  # One work stands for the whole group call.
            self._open.clear()

        return [*(part.begin for part in parts), call] if parts else []


def start_mpi(place: RankPlace, launcher: LauncherName) -> Any:
    """The module `mpi4py.MPI`, initialised; it is finalised by `stop_mpi` alone.

    Outside of an MPI launcher MPI would start each rank as a world of its own.
    """
    if launcher not in ("mpirun", "srun-mpi"):
        raise EnvironmentLacksError(f"mpi: needs launcher mpirun or srun-mpi, this run was started by {launcher}")
    try:
        import mpi4py
    except ImportError:
        raise EnvironmentLacksError("mpi: mpi4py is not installed; run pip install 'dlbench[mpi]'") from None
    mpi4py.rc.finalize = False  # at exit it would wait for ranks that are dead
    mpi4py.rc.initialize = False  # `_initialise` does it
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentLacksError(
            f"mpi: mpi4py finds no MPI library ({first_line(error)}); install Open MPI, or load its module"
        ) from None
    if not MPI.Is_initialized():
        _initialise(MPI, MPI.THREAD_SERIALIZED)
    world = MPI.COMM_WORLD
    if world.Get_size() != place.size or world.Get_rank() != place.rank:
        raise EnvironmentLacksError(
            f"mpi: MPI sees rank {world.Get_rank()} of {world.Get_size()}, the launcher says rank {place.rank} of "
            f"{place.size}; mpi4py must use the MPI that the launcher belongs to"
        )
    return MPI


def _initialise(mpi: Any, thread_level: int) -> None:
    """Starts MPI, which waits for all ranks, with Python's interpreter free.

    mpi4py would hold the interpreter meanwhile, and rank 0 could not answer (Horovod's rendezvous, a thread of Python)
    those who still need its keys before they come here: nobody would ever arrive.
    """
    provided = ctypes.c_int()
    failed = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, thread_level, ctypes.byref(provided))
    if failed:
        raise EnvironmentLacksError(f"mpi: MPI_Init_thread failed with {failed}; is this rank started by the launcher?")
    for communicator in (mpi.COMM_WORLD, mpi.COMM_SELF):  # as mpi4py does when it starts MPI itself
        communicator.Set_errhandler(mpi.ERRORS_RETURN)


def stop_mpi(mpi: Any) -> None:
    """Ends MPI, which waits for all ranks, with Python's interpreter free.

    mpi4py's `Finalize` would hold the interpreter, and no `Deadline` could end a rank that waits there for ever.
    """
    if not mpi.Is_finalized():
        ctypes.CDLL(mpi.__file__).MPI_Finalize()


def mpi_barrier(world: Any) -> None:
    """Returns when all ranks of a communicator are here; ranks leave it awake, within about a message's time."""
    try:
        world.Barrier()
    except RuntimeError as error:
        raise passed_on(f"MPI's barrier failed: {first_line(error)}", error) from None


class MpiTransport(Transport):
    """Persistent requests. MPI's waits know no deadline: who runs it has a `Deadline`."""

    carrier = "mpi"

    def __init__(self, mpi: Any, place: RankPlace, group_size: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`mpi` is what `start_mpi` gave."""
        super().__init__(place, group_size, segment_bytes)
        self._byte = mpi.BYTE
        self._world = mpi.COMM_WORLD.Dup()  # no other library's messages meet ours

    def line_up(self) -> None:
        mpi_barrier(self._world)

    def _operations(self, run: torch.Tensor, peer: int, tag: int, sends: bool) -> tuple[Operation, ...]:
        make = self._world.Send_init if sends else self._world.Recv_init
        request = make([run.view(torch.uint8).numpy(), self._byte], peer, tag)
        return request.Start, request.Wait, request.Free


SLOT_MEMORY_BYTES = 16 * 1024 * 1024  # Memory for arriving segments; they are few, so that they stay in the caches.
LEAST_SLOTS = 4


@dataclass(slots=True)
class _Arrival:
    part: Part
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

    sends: list[Part]
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
        self._awaited: dict[int, Part] = {}  # By the place of its `finish` in the program.
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

        def post(current: int, last_step: int, sends: Sequence[Part] = (), least: int = 2) -> None:
            nonlocal posted
            reach = self._reach(posted, current, last_step, added, least)
            self._program += self._transport.together([*(a.part for a in arrivals[posted:reach]), *sends])
            posted = reach

        def wait(part: Part) -> None:
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

    def _part(self, run: torch.Tensor, transfer: Transfer, tags: Counter[int], *, sends: bool) -> Part:
        """Tags number the parts of a pair of ranks; those of one tag arrive in the order of sending."""
        tag = tags[transfer.peer]
        tags[transfer.peer] += 1
        return self._transport.part(run, transfer.peer, tag % 32768, sends=sends)  # the least that MPI promises


_ALONE = 32768  # Elements up to which torch adds by one thread (its GRAIN_SIZE); there NumPy is faster.


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
