"""Samples over TCP, one connection for each pair of ranks and direction, without a thread for any of them.

The sender opens a connection when it first has something for a rank. It says the run's secret (32 bytes) and its own
number (4 bytes), then sends samples: epoch, sample, length and CRC-32 (24 bytes, big-endian), and the bytes. The
receiver compares the secret before it reads on, and answers each sample that it has stored with its epoch and number
(16 bytes). Nothing is unpickled, and nothing is allocated by a length that another process says. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

SECRET_BYTES = 32
MAX_SAMPLE_BYTES = 1 << 30  # more is a mistake, or nonsense from the network
HELLO_S = 30.0  # how long a connection may take to say the secret
_HELLO, _HEADER, _ANSWER = struct.Struct(">I"), struct.Struct(">qqII"), struct.Struct(">qq")
_PIECE = 1 << 18


class PeerGoneError(Exception):
    """A connection with another rank is lost; `rank` is None where it never said which."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class NonsenseError(Exception):
    """A rank that knows the secret sent what is no sample; `str` says what."""


@dataclass(frozen=True)
class Arrival:
    """A sample that arrived."""

    epoch: int
    index: int
    sender: int
    data: bytes


def listen(address: str) -> socket.socket:
    """A listening socket at a free port of an IPv4 address. Raises OSError: it cannot listen there."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)  # all ranks may come at once
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class Outgoing:
    """A connection on which this rank sends.

    `on_stored`: given epoch and number of each sample that the receiver has stored.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        peer: int,
        address: tuple[str, int],
        *,
        secret: bytes,
        rank: int,
        on_stored: Callable[[int, int], None],
    ) -> None:
        self.peer = peer
        self.used_s = time.monotonic()
        self._selector, self._on_stored = selector, on_stored
        self._out: deque[memoryview] = deque([memoryview(secret + _HELLO.pack(rank))])
        self._in = bytearray()
        self._unanswered: set[tuple[int, int]] = set()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.connect_ex(address)  # what comes of it, the first sending says
        selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    @property
    def is_idle(self) -> bool:
        """Whether everything sent has been answered."""
        return not self._unanswered

    def send(self, epoch: int, index: int, data: bytes) -> None:
        self._unanswered.add((epoch, index))
        self._out += (memoryview(_HEADER.pack(epoch, index, len(data), zlib.crc32(data))), memoryview(data))
        self.used_s = time.monotonic()
        self._selector.modify(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def handle(self, events: int) -> bool:
        """Goes on with what can go on; False once the receiver has closed a connection on which nothing was sent.

        Raises PeerGoneError: the receiver is gone, and with it what it has not answered.
        """
        try:
            if events & selectors.EVENT_WRITE:
                self._write()
            return not events & selectors.EVENT_READ or self._read()
        except OSError as error:
            raise PeerGoneError(self.peer, error.strerror or str(error)) from None

    def _write(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out[0])
            except BlockingIOError:
                return
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]
        self._selector.modify(self._socket, selectors.EVENT_READ, self)

    def _read(self) -> bool:
        try:
            got = self._socket.recv(_PIECE)
        except BlockingIOError:
            return True
        if not got:
            if self.is_idle:
                return False
            raise PeerGoneError(self.peer, "it closed the connection")
        self._in += got
        while len(self._in) >= _ANSWER.size:
            answer = _ANSWER.unpack(self._in[: _ANSWER.size])
            del self._in[: _ANSWER.size]
            if answer not in self._unanswered:
                raise NonsenseError(f"rank {self.peer} answered a sample that it was not sent: {answer}")
            self._unanswered.remove(answer)
            self._on_stored(*answer)
        return True

    def close(self) -> None:
        _close(self._selector, self._socket)


class Incoming:
    """A connection on which another rank sends.

    `secret`: of the run; who does not say it is sent away. `on_arrival`: takes and stores each sample.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        *,
        secret: bytes,
        ranks: int,
        on_arrival: Callable[[Arrival], None],
    ) -> None:
        self._selector, self._socket, self._secret, self._ranks = selector, connection, secret, ranks
        self._on_arrival = on_arrival
        self.peer: int | None = None
        self._is_known = False
        self._begun_s = time.monotonic()
        self._in = bytearray()
        self._out = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, self)

    @property
    def is_overdue(self) -> bool:
        """Whether it had its time to say the secret and did not."""
        return self.peer is None and time.monotonic() - self._begun_s > HELLO_S

    def handle(self, events: int) -> bool:
        """Goes on with what can go on; False once it is over.

        Raises PeerGoneError: it ended within a sample. NonsenseError: a rank sent what is no sample.
        """
        try:
            if events & selectors.EVENT_WRITE:
                self._write()
            return not events & selectors.EVENT_READ or self._read()
        except OSError as error:
            if self.peer is None:
                return False
            raise PeerGoneError(self.peer, error.strerror or str(error)) from None

    def _read(self) -> bool:
        # Until the secret is known, no byte more than it is taken from the network.
        room = _PIECE if self._is_known else SECRET_BYTES - len(self._in)
        try:
            got = self._socket.recv(room)
        except BlockingIOError:
            return True
        if not got:
            if self._in and self.peer is not None:
                raise PeerGoneError(self.peer, "it closed the connection within a sample")
            return False
        self._in += got
        if not self._is_known:
            if len(self._in) < SECRET_BYTES:
                return True
            if not hmac.compare_digest(bytes(self._in), self._secret):
                return False
            self._in.clear()
            self._is_known = True
            return True
        if self.peer is None:
            if len(self._in) < _HELLO.size:
                return True
            (self.peer,) = _HELLO.unpack(self._in[: _HELLO.size])
            del self._in[: _HELLO.size]
            if not self.peer < self._ranks:
                raise NonsenseError(f"a process that knows the secret says that it is rank {self.peer}")
        self._take()
        return True

    def _take(self) -> None:
        assert self.peer is not None
        while len(self._in) >= _HEADER.size:
            epoch, index, length, crc = _HEADER.unpack(self._in[: _HEADER.size])
            if length > MAX_SAMPLE_BYTES:
                raise NonsenseError(f"rank {self.peer} announced a sample of {length} bytes")
            end = _HEADER.size + length
            if len(self._in) < end:
                return
            data = bytes(memoryview(self._in)[_HEADER.size : end])
            del self._in[:end]
            if zlib.crc32(data) != crc:
                raise NonsenseError(f"sample {index} of rank {self.peer} was damaged on its way")
            self._on_arrival(Arrival(epoch, index, self.peer, data))
            self._out += _ANSWER.pack(epoch, index)
        self._write()

    def _write(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                break
            del self._out[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._socket, wanted, self)

    def close(self) -> None:
        _close(self._selector, self._socket)


class Waker:
    """Wakes a thread that waits at a selector, from any other thread and without waiting."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._lock = threading.Lock()  # a closed descriptor's number may already be another file's
        selector.register(self._event, selectors.EVENT_READ, self)

    def wake(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._is_open:
                os.eventfd_write(self._event, 1)

    def handle(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._event)
            os.close(self._event)


def _close(selector: selectors.BaseSelector, connection: socket.socket) -> None:
    with suppress(KeyError, ValueError):
        selector.unregister(connection)
    connection.close()
