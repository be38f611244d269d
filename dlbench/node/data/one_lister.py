"""The first rank of a node scans a data set and sends its index to the others, to spare the file server. They map the
same sealed memfd, received over an abstract Unix socket: it is in memory once, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dlbench.datasets.file_index import packed, unpacked
from dlbench.errors import PeerLostError, RunError
from dlbench.node.rendezvous import is_own_user, socket_address
from dlbench.units import format_seconds

T = TypeVar("T")

_INDEX = b"i"
_FACTS = struct.Struct("@q")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_RETRY_S = 0.02


class IndexBroadcast:
    """Gives the ranks of a node the same indexes, requested in the same order; `name` must be unique."""

    def __init__(self, *, name: str, first_rank: int, local_rank: int, local_size: int, timeout_s: float) -> None:
        self._name, self._first_rank, self._timeout_s = name, first_rank, timeout_s
        self._local_rank, self._local_size = local_rank, local_size
        self._num_indexes = 0

    def index(self, make: Callable[[], T], expected: Sequence[type]) -> T:
        """Returns the result of `make` on the node's first rank; `expected` are the dataclasses in it."""
        if self._local_size == 1:
            return make()
        self._num_indexes += 1
        address = socket_address(f"index {self._name} {self._num_indexes}")
        if self._local_rank:
            return unpacked(self._received(address), expected)  # type: ignore[no-any-return]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address)
            except OSError:
                raise RunError(f"the name {self._name!r} is in use on this machine, perhaps by another run") from None
            listener.listen(self._local_size)
            with _memory(packed(make())) as memory:
                self._hand_out(listener, memory)
                return unpacked(_mapped(memory), expected)  # type: ignore[no-any-return]

    def _hand_out(self, listener: socket.socket, memory: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(1, self._local_size))
        while missing:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                ranks = ", ".join(str(self._first_rank + local) for local in sorted(missing))
                raise PeerLostError(
                    f"rank {ranks} did not ask for the index of the data set within {format_seconds(self._timeout_s)}"
                ) from None
            with connection, contextlib.suppress(OSError, struct.error):  # a rank that ended stays missing
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                if not is_own_user(connection):
                    continue
                (local,) = _FACTS.unpack(connection.recv(_FACTS.size))
                socket.send_fds(connection, [_INDEX], [memory])
                missing.discard(local)

    def _received(self, address: bytes) -> memoryview:
        deadline = time.monotonic() + self._timeout_s
        late = PeerLostError(
            f"rank {self._first_rank} did not open the data set for the ranks of this node within "
            f"{format_seconds(self._timeout_s)}"
        )
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    connection.connect(address)
                except (ConnectionRefusedError, BlockingIOError, TimeoutError):  # not listening yet, or queue full
                    if time.monotonic() > deadline:
                        raise late from None
                    time.sleep(_RETRY_S)
                    continue
                if not is_own_user(connection):
                    raise RunError(f"another user of this machine listens under the name {self._name!r}")
                try:
                    connection.sendall(_FACTS.pack(self._local_rank))
                    mark, memories, _, _ = socket.recv_fds(connection, len(_INDEX), 1)
                except TimeoutError:
                    raise late from None
                except ConnectionError:
                    mark, memories = b"", []
            return self._taken(mark, memories)

    def _taken(self, mark: bytes, memories: list[int]) -> memoryview:
        try:
            if mark != _INDEX or len(memories) != 1:
                raise PeerLostError(f"rank {self._first_rank} ended while it opened the data set for this node")
            return _mapped(memories[0])
        finally:
            for memory in memories:
                os.close(memory)


ALONE = IndexBroadcast(name="", first_rank=0, local_rank=0, local_size=1, timeout_s=0.0)  # For a single process.


@contextlib.contextmanager
def _memory(pieces: Iterable[bytes | memoryview]) -> Iterator[int]:
    memory = os.memfd_create("dlbench-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(memory, "wb", closefd=False) as file:
            for piece in pieces:
                file.write(piece)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        yield memory
    finally:
        os.close(memory)


def _mapped(memory: int) -> memoryview:
    return memoryview(mmap.mmap(memory, 0, mmap.MAP_SHARED, mmap.PROT_READ))
