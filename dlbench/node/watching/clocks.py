"""Comparison of clocks over TCP: during the whole run, samplers ask that of node 0 for the time.

A connection begins with a greeting (mark, SHA-256 of the run's token). Each request, a number, is answered with the
number and two readings of node 0's clock. Connections are served one after another, since nodes that ask at the same
time would measure each other's queue.

The offset has a strict bound: Cristian, Probabilistic Clock Synchronization, Distributed Computing 3, 1989; four time
stamps as in RFC 5905, section 8. No message goes back in time, so the offset lies between t2 - t3 and t1 - t0
(`Exchange`), for any asymmetry of the two messages; the exchange with the shortest round trip is the best one.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from dlbench.node.rendezvous import read_published
from dlbench.records.files import write_json

Clock = Callable[[], int]  # Reads a clock, nanoseconds.

GREETING_S = 1.0  # Longest time to the greeting of a connection, for which others wait.
BURST_S = 2.0  # Longest time that one connection is served.
PAUSE_S = 0.2  # Longest time between two requests of a connection.
MAX_ROUNDS = 1000  # Requests answered on one connection.
_MARK = b"DLBCLK01"
_GREETING = struct.Struct("<8s32s")
_REQUEST = struct.Struct("<q")
_ANSWER = struct.Struct("<qqq")

FORMAT, VERSION = "dlbench.clock", 1
MAX_BYTES = 1 << 16  # Most bytes of `clock.json`, which holds an address.
BURST_ROUNDS = 200  # Exchanges at the start and at the end of a run.
SHORT_ROUNDS = 20  # Exchanges in between.
EVERY_S = 60.0  # Seconds between two comparisons.
MAX_ESTIMATES = 64  # With more estimates every second one is dropped, and the time between two doubles.
WAIT_S = 180.0  # Seconds that samplers wait for node 0's address; shared file systems show new files late.
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0

# Largest difference of the rates of two clocks, parts per million: MAXFREQ, RFC 5905, appendix A.1.1.
MAX_DRIFT_PPM = 500
WIDE = 10  # Estimates whose bound is this many times the narrowest one are dropped.


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Time stamps of one request and its answer, nanoseconds of two clocks."""

    sent_ns: int  # t0, own clock.
    received_ns: int  # t1, the other's clock.
    answered_ns: int  # t2, the other's clock.
    returned_ns: int  # t3, own clock.

    def __post_init__(self) -> None:
        if self.returned_ns < self.sent_ns or self.answered_ns < self.received_ns or self.bound_ns < 0:
            raise ValueError(f"impossible time stamps: {self}; a clock was set during the exchange")

    @property
    def offset_ns(self) -> int:
        """The other clock minus the own: ((t1 - t0) + (t2 - t3)) / 2."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2

    @property
    def bound_ns(self) -> int:
        """The largest error of `offset_ns`: half the round trip, drift meanwhile, and 1 for rounding."""
        passed_ns = self.returned_ns - self.sent_ns
        round_trip_ns = passed_ns - (self.answered_ns - self.received_ns)  # without the other side's work
        return -(-round_trip_ns // 2) - (-passed_ns * MAX_DRIFT_PPM // 1_000_000) + 1


@dataclass(frozen=True, kw_only=True)
class OffsetEstimate:
    """The offset of two clocks at one moment."""

    local_ns: int  # The moment by the own clock.
    offset_ns: int  # The other clock minus the own.
    bound_ns: int  # Largest possible error of the offset.
    num_exchanges: int  # Number of exchanges of which the best was used.


def estimate(exchanges: Sequence[Exchange]) -> OffsetEstimate:
    """Returns the estimate of the exchange with the narrowest bound."""
    best = min(exchanges, key=attrgetter("bound_ns"))
    return OffsetEstimate(
        local_ns=(best.sent_ns + best.returned_ns) // 2,
        offset_ns=best.offset_ns,
        bound_ns=best.bound_ns,
        num_exchanges=len(exchanges),
    )


def worth_keeping(estimates: Sequence[OffsetEstimate]) -> tuple[OffsetEstimate, ...]:
    """Returns the first, the last, and those between whose bounds a busy network has not widened too much."""
    if len(estimates) < 3:
        return tuple(estimates)
    limit_ns = WIDE * min(point.bound_ns for point in estimates)
    return (estimates[0], *(point for point in estimates[1:-1] if point.bound_ns <= limit_ns), estimates[-1])


def every_second(estimates: Sequence[OffsetEstimate]) -> list[OffsetEstimate]:
    """Returns every second estimate, with the first and the last."""
    half = list(estimates[::2])
    if len(estimates) % 2 == 0:
        half.extend(estimates[-1:])
    return half


def greeting(token: str) -> bytes:
    """Returns the first message of a connection, 40 bytes."""
    return _GREETING.pack(_MARK, hashlib.sha256(token.encode()).digest())


class ClockServer:
    """Answers requests with the readings of `clock`, in a thread, one connection after another."""

    def __init__(self, address: str, token: str, *, clock: Clock = time.monotonic_ns) -> None:
        self._greeting = greeting(token)
        self._clock = clock
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="clock server", daemon=True)
        self.address, self.port = self._listener.getsockname()[:2]
        self.problem = ""  # Reason why it stopped to answer; empty while it does.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    self.problem = f"the clock server stopped: {error.strerror or error}"
                return
            with connection, suppress(OSError):
                connection.settimeout(GREETING_S)
                if hmac.compare_digest(_receive(connection, _GREETING.size), self._greeting):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        clock = self._clock
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(PAUSE_S)
        deadline = time.monotonic() + BURST_S
        for _ in range(MAX_ROUNDS):
            request = _receive(connection, _REQUEST.size)
            received = clock()
            (number,) = _REQUEST.unpack(request)
            connection.sendall(_ANSWER.pack(number, received, clock()))
            if time.monotonic() > deadline:
                return


def compare(
    address: str, port: int, token: str, rounds: int, *, timeout_s: float, clock: Clock = time.monotonic_ns
) -> list[Exchange]:
    """Returns exchanges with node 0, fewer than `rounds` if the connection or `timeout_s` ended."""
    deadline = time.monotonic() + timeout_s
    exchanges: list[Exchange] = []
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(greeting(token))
        try:
            for number in range(rounds):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                exchanges.append(_ask(connection, number, clock))
        except OSError:
            if not exchanges:
                raise
    return exchanges


def _ask(connection: socket.socket, number: int, clock: Clock) -> Exchange:
    request = _REQUEST.pack(number)
    sent = clock()
    connection.sendall(request)
    answer = _receive(connection, _ANSWER.size)
    returned = clock()
    echoed, received, answered = _ANSWER.unpack(answer)
    if echoed != number:
        raise ValueError(f"node 0 answered request {echoed} instead of {number}")
    return Exchange(sent_ns=sent, received_ns=received, answered_ns=answered, returned_ns=returned)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("the connection was closed")
        data += received
    return data


def publish(path: Path, server: ClockServer, token: str) -> None:
    """Writes the address of node 0's clock server to `clock.json`. Raises RunError if it cannot be written."""
    content = {"address": server.address, "port": server.port, "token": token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


class ClockFollower:
    """Compares clocks with node 0 in a thread: at the start, every minute, at the end. `path` is `clock.json`."""

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token
        self._every_s = EVERY_S
        self._ending = threading.Event()
        self._estimates: list[OffsetEstimate] = []
        self._failure = "the run ended before clocks were compared"
        self._thread = threading.Thread(target=self._run, name="clock follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float = END_TIMEOUT_S + 1) -> tuple[tuple[OffsetEstimate, ...], str]:
        """Compares a last time; returns the useful estimates, and the problem if there are less than two."""
        self._ending.set()
        self._thread.join(timeout_s)
        estimates = worth_keeping(list(self._estimates))
        if self._thread.is_alive():
            self._failure = f"the last comparison took longer than {timeout_s:g} s"
        if len(estimates) > 1:
            return estimates, ""
        return estimates, self._failure

    def _run(self) -> None:
        place = self._await_place()
        if place is None:
            return
        self._burst(place, BURST_ROUNDS, START_TIMEOUT_S)
        # A last burst directly after the first is useless: it gives no slope.
        is_over = self._ending.is_set() and bool(self._estimates)
        retry_s = 1.0
        while True:
            rounds, pause_s = BURST_ROUNDS, retry_s
            if self._estimates:
                rounds, pause_s = SHORT_ROUNDS, self._every_s
            if self._ending.wait(pause_s):
                break
            retry_s = min(2 * retry_s, self._every_s)
            self._burst(place, rounds, START_TIMEOUT_S)
            if len(self._estimates) > MAX_ESTIMATES:
                self._estimates = every_second(self._estimates)
                self._every_s *= 2
        if not is_over:
            self._burst(place, BURST_ROUNDS, END_TIMEOUT_S)

    def _await_place(self) -> tuple[str, int] | None:
        deadline = time.monotonic() + WAIT_S
        while True:
            # Polls once more after the end was requested, so that a run of seconds has at least one estimate.
            is_last = self._ending.is_set() or time.monotonic() > deadline
            content = read_published(self._path, self._token)
            if content is not None:
                return str(content["address"]), int(content["port"])
            if is_last:
                self._failure = f"node 0 did not write the address of its clock server to {self._path.name}"
                return None
            self._ending.wait(0.1)

    def _burst(self, place: tuple[str, int], rounds: int, timeout_s: float) -> None:
        try:
            point = estimate(compare(*place, self._token, rounds, timeout_s=timeout_s))
        except (OSError, ValueError) as error:
            self._failure = f"node 0's clock at {place[0]} port {place[1]}: {error}"
            return
        if not self._estimates or point.local_ns > self._estimates[-1].local_ns:
            self._estimates.append(point)
            self._failure = "clocks were compared only once"
