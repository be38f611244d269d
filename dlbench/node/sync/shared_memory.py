"""Ranks of one machine exchange through memory they share: a `Group` for CPU tensors that no socket slows down.

The memory is a memfd, which has no name in any file system, handed to the other ranks over an abstract Unix socket,
which has none either: however ranks end, nothing stays behind, and a small /dev/shm (containers) does not matter.

Ranks meet at process-shared POSIX semaphores in that memory, one for each ordered pair of ranks. Two reasons:

- Order of memory. What a rank stored before sem_post is seen by the rank whose sem_wait takes that post (POSIX, "memory
  synchronization"), on weakly ordered CPUs too. Python has no fence that would make a plain counter as safe.
- A waiting rank sleeps in the kernel, Python's interpreter lock released. The thread that exchanges often shares its
  core with the backward pass: spinning would take its time, and a thread that only yields waits a whole time slice.

Each rank holds a POSIX lock on a byte of the memfd. The kernel drops it when the process ends, so a waiting rank finds
a dead one by trying its lock: zombies and reused process ids do not deceive it, and loader processes do not inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, NoReturn

import torch

from dlbench.errors import EnvironmentLacksError, PeerLostError, RunError
from dlbench.node.local_sockets import is_own_user, socket_address
from dlbench.units import format_seconds

LINE_BYTES = 64  # What one rank writes lies so far from what another writes: a cache line. A sem_t fits into one.

LOOK_AROUND_NS = 20_000_000  # So often a waiting rank looks whether the others still live.

RUNNING, LEFT, FOUND_DEAD, FOUND_LATE, FOUND_LEFT = range(5)  # The last three: the rank gave up because of another.

FINDINGS = {FOUND_DEAD: "has died", FOUND_LATE: "did not come in time", FOUND_LEFT: "has left the group"}

CALLS = ("sum", "reduce-scatter", "all-gather", "reduce", "broadcast", "gather", "allocate")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8)

_CALL = struct.Struct("@5q")
_STATE = struct.Struct("@3q")


class Call(NamedTuple):
    """What a rank is about to do. All ranks must do the same; only what is gathered may differ in length."""

    name: str
    elements: int
    dtype: torch.dtype
    root: int = 0
    place: int = -1  # Byte of allocated memory at which the vector begins; -1: it lies elsewhere.

    def text(self) -> str:
        root = f" with root {self.root}" if self.name in ("reduce", "broadcast") else ""
        place = f" at byte {self.place} of allocated memory" if self.place >= 0 else ""
        return f"{self.name} of {self.elements} {str(self.dtype).removeprefix('torch.')}{root}{place}"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc(blocks: bool) -> ctypes.CDLL:
    """The C library's semaphores. Only calls that may block release the interpreter lock."""
    library = ctypes.CDLL(None, use_errno=True) if blocks else ctypes.PyDLL(None, use_errno=True)
    if not hasattr(os, "memfd_create") or not hasattr(library, "sem_timedwait"):
        raise EnvironmentLacksError("sync.inside shared-memory: needs Linux (memfd, POSIX semaphores); use backend")
    library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    library.sem_post.argtypes = (ctypes.c_void_p,)
    library.sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
    library.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
    return library


def _hand_out(ranks: tuple[int, ...], name: str, fd: int, timeout_s: float) -> None:
    """Gives the memory to all other ranks; returns when they have it."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(socket_address(name))
        except OSError:
            raise RunError(f"shared memory: the name {name!r} is in use on this machine, by another run?") from None
        listener.listen(len(ranks))
        ready: dict[int, socket.socket] = {}
        try:
            while len(ready) < len(ranks) - 1:
                listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not is_own_user(connection):
                    continue
                with contextlib.suppress(ConnectionError, struct.error):  # it ended meanwhile, and will be missed
                    socket.send_fds(connection, [b"m"], [fd])
                    ready[struct.unpack("@q", connection.recv(8))[0]] = connection
        except TimeoutError:
            missing = ", ".join(str(rank) for index, rank in enumerate(ranks[1:], 1) if index not in ready)
            text = f"shared memory: rank {missing} did not come to share it within {format_seconds(timeout_s)}"
            _tell(ready.values(), text)
            raise PeerLostError(text) from None
        _tell(ready.values(), "go")


def _tell(connections: Iterable[socket.socket], text: str) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # a rank that ended by now is found when ranks meet
            connection.sendall(text.encode())


def _receive(ranks: tuple[int, ...], index: int, name: str, timeout_s: float, take: Callable[[int], None]) -> None:
    """Gets the memory from the first rank, `take`s it, and returns when all have done so."""
    deadline = time.monotonic() + timeout_s
    late = PeerLostError(f"shared memory: rank {ranks[0]} did not open it within {format_seconds(timeout_s)}")
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(socket_address(name))
            except ConnectionRefusedError:  # nobody listens yet
                if time.monotonic() > deadline:
                    raise late from None
                time.sleep(0.005)
                continue
            if not is_own_user(connection):
                raise RunError(f"shared memory: another user of this machine listens under the name {name!r}")
            # The first rank gives up within timeout_s from now and says for whom; that is worth waiting for.
            connection.settimeout(timeout_s + 5)
            try:
                _, fds, _, _ = socket.recv_fds(connection, 1, 1)
                for fd in fds:
                    os.set_inheritable(fd, False)
                    take(fd)
                    connection.sendall(struct.pack("@q", index))
                verdict = connection.recv(4096)
            except (TimeoutError, ConnectionError):
                verdict = b""
        if verdict != b"go":
            raise PeerLostError(verdict.decode()) if verdict else late
        return


class Room:
    """The memory that ranks share, and where they meet in it. It begins with a control line per rank (its state; its
    present and its last call) and the semaphores.
    """

    CONTROL_BYTES = 4 * LINE_BYTES

    def __init__(self, ranks: tuple[int, ...], index: int, name: str, data_bytes: int, timeout_s: float) -> None:
        self.ranks, self.index, self._timeout_s = ranks, index, timeout_s
        self.others = [other for other in range(len(ranks)) if other != index]
        control = len(ranks) * self.CONTROL_BYTES + len(ranks) ** 2 * LINE_BYTES
        self._data_at = -(-control // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size = self._data_at + -(-data_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._maps: list[mmap.mmap] = []
        self._fd = -1
        self._num_calls = 0
        self._broken = ""
        _libc(True)
        if index:
            _receive(ranks, index, name, timeout_s, self._take)
            return
        fd = os.memfd_create(f"dlbench-{name}"[:200])
        os.ftruncate(fd, self.size)
        self._take(fd)
        for number in range(len(ranks) ** 2):
            _libc(False).sem_init(self._semaphores + number * LINE_BYTES, 1, 0)
        try:
            _hand_out(ranks, name, fd, timeout_s)
        except RunError:
            self.close()
            raise

    def _take(self, fd: int) -> None:
        if os.fstat(fd).st_size != self.size:
            os.close(fd)
            raise RunError("shared memory: ranks ask for different capacities, or their groups differ")
        self._fd = fd
        self.data = self.map(0, self.size)[self._data_at :]
        self._control = self._maps[0]
        self._semaphores = self.data.data_ptr() - self._data_at + len(self.ranks) * self.CONTROL_BYTES
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.index)
        self._say(RUNNING, self.index)

    def map(self, offset: int, num_bytes: int) -> torch.Tensor:
        # Kept to the end: a map owns a copy of the file descriptor, and closing any copy drops this process's locks.
        self._maps.append(mmap.mmap(self._fd, num_bytes, offset=offset))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def grow(self, num_bytes: int) -> int:
        """Where this many bytes (whole pages) begin that are added at the end; the first rank adds them."""
        offset, self.size = self.size, self.size + num_bytes
        if self.index == 0:
            os.ftruncate(self._fd, self.size)
        return offset

    def meet(self, call: Call) -> list[Call]:
        """Returns when all ranks are at their next call: these calls. Raises `RunError`: another rank died, left or is
        late, or does something else.
        """
        code = (CALLS.index(call.name), call.elements, DTYPES.index(call.dtype), call.root, call.place)
        # Two lines in turn: a rank may be one call ahead of another that still reads the one before, never two.
        line = LINE_BYTES * (1 + self._num_calls % 2)
        self._num_calls += 1
        _CALL.pack_into(self._control, self.index * self.CONTROL_BYTES + line, *code)
        self.wait(call)
        calls = []
        for other in range(len(self.ranks)):
            name, elements, dtype, root, place = _CALL.unpack_from(self._control, other * self.CONTROL_BYTES + line)
            calls.append(Call(CALLS[name], elements, DTYPES[dtype], root, place))
        for other, theirs in enumerate(calls):
            comparable = theirs._replace(elements=call.elements) if call.name == "gather" else theirs
            if comparable != call:
                raise RunError(
                    f"shared memory: ranks disagree: rank {self.ranks[self.index]} calls {call.text()}, "
                    f"rank {self.ranks[other]} calls {theirs.text()}"
                )
        return calls

    def wait(self, call: Call) -> None:
        """Returns when all ranks are here too, and sees what they stored before. Raises `RunError`: another rank died,
        left or is late.
        """
        if self._broken:
            raise PeerLostError(self._broken)
        for other in self.others:
            _libc(False).sem_post(self._semaphore(self.index, other))
        began = time.monotonic()
        for position, other in enumerate(self.others):
            self._await(self.others[position:], self._semaphore(other, self.index), call, began)

    def _semaphore(self, by: int, of: int) -> int:
        return self._semaphores + (by * len(self.ranks) + of) * LINE_BYTES

    def _await(self, missing: Sequence[int], semaphore: int, call: Call, began: float) -> None:
        """Waits for the first of `missing`, and gives up if any of them is lost."""
        while True:
            # Absolute time of the wall clock, which may be set; so a wait is short, and the deadline another clock's.
            until = time.time_ns() + LOOK_AROUND_NS
            if _libc(True).sem_timedwait(semaphore, ctypes.byref(_Timespec(*divmod(until, 10**9)))) == 0:
                return
            for other in missing:
                found = self._trouble(other)
                # It may have come and ended since: what it posted counts.
                if found is not None and not self._has_come(other):
                    self._give_up(other, *found, call, began)
            if time.monotonic() - began > self._timeout_s and not self._has_come(missing[0]):
                self._give_up(missing[0], FOUND_LATE, missing[0], call, began)

    def _has_come(self, other: int) -> bool:
        value = ctypes.c_int()
        _libc(False).sem_getvalue(self._semaphore(other, self.index), ctypes.byref(value))
        return value.value > 0

    def _trouble(self, other: int) -> tuple[int, int] | None:
        """What is wrong with a rank and because of whom; None: it lives and takes part."""
        at = other * self.CONTROL_BYTES
        state, cause, pid = _STATE.unpack_from(self._control, at)
        if state == RUNNING:
            if pid == os.getpid():  # ranks as threads: a process's own locks never stop it
                return None
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
            except (BlockingIOError, PermissionError):
                return None
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, other)
            state, cause, _ = _STATE.unpack_from(self._control, at)  # it may have left properly meanwhile
        if state == RUNNING:
            return FOUND_DEAD, other
        return (FOUND_LEFT, other) if state == LEFT else (state, cause)

    def _give_up(self, other: int, finding: int, cause: int, call: Call, began: float) -> NoReturn:
        self._say(finding, cause)
        since = time.strftime("%H:%M:%S", time.gmtime(time.time() - (time.monotonic() - began)))
        by = "" if other == cause else f", as rank {self.ranks[other]} found"
        limit = f" ({format_seconds(self._timeout_s)})" if finding == FOUND_LATE else ""
        self._broken = (
            f"shared memory: rank {self.ranks[cause]} {FINDINGS[finding]}{limit}{by}; rank {self.ranks[self.index]} "
            f"waited since {since} UTC at {call.text()}"
        )
        raise PeerLostError(self._broken)

    def _say(self, state: int, cause: int) -> None:
        _STATE.pack_into(self._control, self.index * self.CONTROL_BYTES, state, cause, os.getpid())

    def close(self) -> None:
        if self._fd < 0:
            return
        if not self._broken:
            self._broken = "shared memory: this rank has left the group"
            self._say(LEFT, self.index)
        os.close(self._fd)
        self._fd = -1


BLOCK_ELEMENTS = 1 << 16
"""Summed at a time: still in the cache when the next rank's numbers are added and when the result is copied."""

SMALL_BYTES = 8192  # Up to this, every rank sums the whole vector: more work, but one meeting instead of two.


class SharedMemoryGroup:
    """A `Group` of CPU ranks of one machine.

    Each rank has a slot, in two halves used in turn, each half with a part for every rank. A vector goes through in
    chunks of half a slot. To sum, a rank puts into its slot what others are to sum, sums its own share in the order of
    ranks, and leaves the result in its own part, where the others fetch it: every share is summed once, by one rank, so
    all ranks get the same bits. The next chunk is in the other half before the ranks meet: a chunk costs one meeting.

    A half is written again two chunks later. Between lies a meeting to which a rank comes only after it has read all it
    needs of the half, so nothing is overwritten early, and no meeting is needed at the end of a call.

    16-bit types are summed in fp32 and rounded once.
    """

    carrier = "shared memory"

    def __init__(
        self, ranks: tuple[int, ...], index: int, name: str, capacity_bytes: int, timeout_s: float = 60.0
    ) -> None:
        """All ranks call it together; `index` is this rank's position in `ranks`.

        `name` is the same for these ranks, and no other group's on this machine at the time. `capacity_bytes` is the
        memory of one rank, rounded up to a line of each rank in each half. Longer than `timeout_s` no rank waits for
        another, here or in a call.

        Raises `RunError`: not all ranks came, or the name is in use; `EnvironmentLacksError`: not on Linux.
        """
        self.ranks, self.index = ranks, index
        lines = max(capacity_bytes // (2 * len(ranks) * LINE_BYTES), 1)
        self._shape = (len(ranks), 2, len(ranks), lines * LINE_BYTES)
        slot_bytes = 2 * len(ranks) * lines * LINE_BYTES
        self._room = Room(ranks, index, name, len(ranks) * slot_bytes, timeout_s)
        self._slots = self._room.data[: len(ranks) * slot_bytes].view(self._shape)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._half = 0
        self._areas: list[tuple[int, torch.Tensor]] = []

    def close(self) -> None:
        """Leaves; ranks that still wait for this one learn it. Allocated vectors stay usable, but not exchangeable."""
        self._room.close()

    def allocate(self, num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A vector of zeros that others read and write in place: it, and parts of it, go without copies in and out. All
        ranks call it together and then use the same parts of it in the same calls.
        """
        call = Call("allocate", num_elements, dtype)
        stride = -(-max(num_elements * dtype.itemsize, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        offset = self._room.grow(stride * len(self.ranks))
        self._room.meet(call)
        area = self._room.map(offset, stride * len(self.ranks)).view(len(self.ranks), stride)
        self._areas.append((offset, area))
        return area[self.index, : num_elements * dtype.itemsize].view(dtype)

    def sum(self, vector: torch.Tensor) -> None:
        """Every share is summed by one rank and fetched by all."""
        self._sum_to(vector, "sum", 0)

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        self.sum(vector)
        return lambda: None

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        """As `sum`, but only `root` fetches."""
        self._sum_to(vector, "reduce", root)

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Every rank sums its own share."""
        place, buffers = self._examine(vector)
        if vector.numel() % len(self.ranks):
            raise ValueError(f"{vector.numel()} elements do not divide by {len(self.ranks)} ranks")
        call = Call("reduce-scatter", vector.numel(), vector.dtype, place=place)
        shares = vector.view(len(self.ranks), -1)
        share = torch.empty_like(shares[self.index])
        if buffers is not None:
            self._room.meet(call)
            self._add_up([buffer.view(shares.shape)[self.index] for buffer in buffers], [share])
            self._room.wait(call)  # the others have read this rank's vector
            return share
        slots = self._slots_of(vector.dtype)
        for first, last in self._chunks(share.numel(), slots.shape[3]):
            half, count = self._next_half(), last - first
            for other in self._room.others:
                slots[self.index, half, other, :count].copy_(shares[other, first:last])
            self._meet(call, first)
            parts = list(slots[:, half, self.index, :count])
            parts[self.index] = shares[self.index, first:last]
            self._add_up(parts, [share[first:last]])
        return share

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        """Each rank puts its share into its slot, the others fetch it."""
        self._examine(share)
        place, buffers = self._examine(vector)
        if share.dtype != vector.dtype or share.numel() * len(self.ranks) != vector.numel():
            raise ValueError(f"{len(self.ranks)} shares of {share.numel()} do not make {vector.numel()} elements")
        call = Call("all-gather", vector.numel(), vector.dtype, place=place)
        shares = vector.view(len(self.ranks), -1)
        shares[self.index].copy_(share)
        if buffers is not None:
            self._room.meet(call)
            for other in self._room.others:
                shares[other].copy_(buffers[other].view(shares.shape)[other])
            self._room.wait(call)
            return
        slots = self._slots_of(vector.dtype).flatten(2)
        for first, last in self._chunks(share.numel(), slots.shape[2]):
            half = self._next_half()
            slots[self.index, half, : last - first].copy_(share[first:last])
            self._meet(call, first)
            for other in self._room.others:
                shares[other, first:last].copy_(slots[other, half, : last - first])

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        self._examine(vector)
        call = Call("broadcast", vector.numel(), vector.dtype, root)
        slots = self._slots_of(vector.dtype).flatten(2)
        for first, last in self._chunks(vector.numel(), slots.shape[2]):
            slot = slots[root, self._next_half(), : last - first]
            if self.index == root:
                slot.copy_(vector[first:last])
            self._meet(call, first)
            if self.index != root:
                vector[first:last].copy_(slot)

    def gather_all(self, tensor: torch.Tensor, *, equal: bool = False) -> list[torch.Tensor]:
        """As `all_gather`; the lengths become known when the ranks meet."""
        self._examine(tensor)
        call = Call("gather", tensor.numel(), tensor.dtype)
        slots = self._slots_of(tensor.dtype).flatten(2)
        capacity = slots.shape[2]
        result: list[torch.Tensor] = []
        first, longest = 0, 1
        while first < longest:
            half, piece = self._next_half(), tensor[first : first + capacity]
            slots[self.index, half, : piece.numel()].copy_(piece)
            calls = self._meet(call, first)
            if first == 0:
                result = [tensor.new_empty(theirs.elements) for theirs in calls]
                longest = max(theirs.elements for theirs in calls)
            for whole, slot in zip(result, slots[:, half], strict=True):
                part = whole[first : first + capacity]
                part.copy_(slot[: part.numel()])
            first += capacity
        return result

    def _sum_to(self, vector: torch.Tensor, name: str, root: int) -> None:
        place, buffers = self._examine(vector)
        call = Call(name, vector.numel(), vector.dtype, root, place)
        fetches = name == "sum" or self.index == root
        if buffers is not None:
            self._room.meet(call)
            shares = [self._shares(buffer)[self.index] for buffer in buffers]
            self._add_up(shares, shares if name == "sum" else [shares[root]])
            self._room.wait(call)
            return
        slots = self._slots_of(vector.dtype)
        chunks = self._chunks(vector.numel(), slots.shape[2] * slots.shape[3])
        if len(chunks) == 1 and vector.nbytes <= SMALL_BYTES:
            small = list(slots.flatten(2)[:, self._next_half(), : vector.numel()])
            small[self.index].copy_(vector)
            self._room.meet(call)
            if fetches:
                self._add_up(small, [vector])
            return
        pieces = [self._shares(vector[first:last]) for first, last in chunks]
        halves = [self._next_half() for _ in pieces]
        self._put(pieces[0], slots[self.index, halves[0]])
        self._room.meet(call)
        for number, (shares, half) in enumerate(zip(pieces, halves, strict=True)):
            if number + 1 < len(pieces):
                self._put(pieces[number + 1], slots[self.index, halves[number + 1]])
            own = shares[self.index]
            parts = list(slots[:, half, self.index, : own.numel()])
            result = parts[self.index]
            parts[self.index] = own
            self._add_up(parts, [own, result] if fetches else [result])
            self._room.wait(call)
            for other in self._room.others if fetches else ():
                shares[other].copy_(slots[other, half, other, : shares[other].numel()])

    def _put(self, shares: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        for other in self._room.others:
            slot[other, : shares[other].numel()].copy_(shares[other])

    def _add_up(self, parts: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Each of `results` becomes the sum of `parts` in their order; a result may be one of the parts."""
        dtype = parts[0].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        if wide not in self._scratch:
            self._scratch[wide] = torch.empty(BLOCK_ELEMENTS, dtype=wide)
        # Cut at once: a slice of Python takes as long as the sum of a few thousand elements.
        cut = [torch.split(one, BLOCK_ELEMENTS) for one in (*parts, *results)]
        for blocks in zip(*cut, strict=True):
            added, into = blocks[: len(parts)], blocks[len(parts) :]
            if len(parts) == 2 and wide == dtype:  # saves a pass
                total = torch.add(*added, out=into[0])
            else:
                total = self._scratch[wide][: added[0].numel()]
                total.copy_(added[0])
                for block in added[1:]:
                    total.add_(block)
                into[0].copy_(total)
            for result in into[1:]:
                result.copy_(total)

    def _examine(self, vector: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """Where it lies in allocated memory, and what lies there for all ranks (ranks x elements); or -1 and None."""
        if vector.dim() != 1 or not vector.is_contiguous() or vector.device.type != "cpu" or vector.dtype not in DTYPES:
            raise ValueError(
                f"shared memory takes contiguous vectors on the CPU, not {vector.dtype} of shape {tuple(vector.shape)} "
                f"on {vector.device}"
            )
        for offset, area in self._areas:
            at = vector.data_ptr() - area[self.index].data_ptr()
            if 0 <= at < area.shape[1]:
                return offset + at, area[:, at : at + vector.nbytes].view(vector.dtype)
        return -1, None

    def _slots_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self._slots.view(dtype)
        return self._typed[dtype]

    def _shares(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """A share per rank, the last ones shorter or empty."""
        size = -(-vector.numel() // len(self.ranks))
        return [vector[size * index : size * (index + 1)] for index in range(len(self.ranks))]

    def _chunks(self, num_elements: int, capacity: int) -> list[tuple[int, int]]:
        """First and last element (exclusive) of each; one even if there is nothing, so that ranks meet."""
        return [(at, min(at + capacity, num_elements)) for at in range(0, max(num_elements, 1), capacity)]

    def _next_half(self) -> int:
        self._half ^= 1
        return self._half

    def _meet(self, call: Call, first: int) -> list[Call]:
        """For the first chunk the ranks compare what they do; for the others they only wait for each other."""
        if first == 0:
            return self._room.meet(call)
        self._room.wait(call)
        return []
