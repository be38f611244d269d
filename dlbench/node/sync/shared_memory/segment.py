"""Memory that ranks of one machine share, and how they meet there.

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

LINE_BYTES = 64
"""What one rank writes lies so far from what another writes: a cache line. A sem_t fits into one."""

LOOK_AROUND_NS = 20_000_000
"""So often a waiting rank looks whether the others still live."""

RUNNING, LEFT, FOUND_DEAD, FOUND_LATE, FOUND_LEFT = range(5)
"""States of a rank. The last three: it gave up because of another rank."""

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
    place: int = -1
    """Byte of allocated memory at which the vector begins; -1: it lies elsewhere."""

    def text(self) -> str:
        """For a person, e.g. ``sum of 1000 float32``."""
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
    """The memory that ranks share, and where they meet in it.

    It begins with a control line a rank (its state; its present and its last call) and the semaphores.
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
        """A part of the memory as bytes."""
        # Kept to the end: a map owns a copy of the file descriptor, and closing any copy drops this process's locks.
        self._maps.append(mmap.mmap(self._fd, num_bytes, offset=offset))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def grow(self, num_bytes: int) -> int:
        """Where so many bytes (whole pages) begin that are added at the end; the first rank adds them."""
        offset, self.size = self.size, self.size + num_bytes
        if self.index == 0:
            os.ftruncate(self._fd, self.size)
        return offset

    def meet(self, call: Call) -> list[Call]:
        """Returns when all ranks are at their next call: these calls.

        Raises:
            RunError: another rank died, left or is late, or does something else.
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
        """Returns when all ranks are here too, and sees what they stored before.

        Raises:
            RunError: another rank died, left or is late.
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
            state, cause, _ = _STATE.unpack_from(self._control, at)  # it may have left in good order meanwhile
        if state == RUNNING:
            return FOUND_DEAD, other
        return (FOUND_LEFT, other) if state == LEFT else (state, cause)

    def _give_up(self, other: int, finding: int, cause: int, call: Call, began: float) -> NoReturn:
        """Says so to the ranks that wait for this one."""
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
        """Leaves; the memory itself goes when the last tensor in it does."""
        if self._fd < 0:
            return
        if not self._broken:
            self._broken = "shared memory: this rank has left the group"
            self._say(LEFT, self.index)
        os.close(self._fd)
        self._fd = -1
