"""Clocks compared over TCP: node 0's sampler answers with the time, the others ask, through the whole run.

Messages are of fixed size. A connection begins with a greeting (mark, SHA-256 of the run's token); a wrong one is
closed. Then each request, a number, is answered by the number and two readings of node 0's clock: right after the
request came, right before the answer goes. Bursts are served one after the other: 127 nodes that asked at the same
time would otherwise all measure each other's queue.

How far a clock stands from another, and a bound on the error that holds always:
Cristian, Probabilistic Clock Synchronization, Distributed Computing 3, 1989; four time stamps as in RFC 5905, section
8. The request leaves at t0 (own clock), comes at t1 (the other's); the answer leaves at t2 (the other's), comes at t3
(own). Neither message goes back in time, so the other clock less the own lies between t2 - t3 and t1 - t0, however
unlike the two ways are. The middle is the estimate, half the width its bound, and the exchange with the shortest
round trip the best of many.
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
from pathlib import Path

from dlbench.node.rendezvous import read_published
from dlbench.records.files import write_json

Clock = Callable[[], int]  # Reads a clock, nanoseconds.

GREETING_S = 1.0  # How long a connection may take to greet; others wait for their turn.
BURST_S = 2.0  # How long one connection is served.
PAUSE_S = 0.2  # How long it may pause between two requests; others wait for their turn.
MAX_ROUNDS = 1000  # Requests answered on one connection.
_MARK = b"DLBCLK01"
_GREETING = struct.Struct("<8s32s")
_REQUEST = struct.Struct("<q")
_ANSWER = struct.Struct("<qqq")

FORMAT, VERSION = "dlbench.clock", 1
MAX_BYTES = 1 << 16  # Of `clock.json` at most: it holds an address.
BURST_ROUNDS = 200  # Exchanges at the start and at the end of a run.
SHORT_ROUNDS = 20  # Exchanges in between.
EVERY_S = 60.0
MAX_ESTIMATES = 64  # With more of them every second one is forgotten, and the time between two doubles.
WAIT_S = 180.0  # How long node 0's address is waited for during sampling; shared file systems show new files late.
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0

MAX_DRIFT_PPM = 500
"""How much faster or slower than another a clock may run, millionths: MAXFREQ, RFC 5905, appendix A.1.1.

The clock moves on while a message travels. Allowing for it adds a thousandth to the bound, and makes it hold.
"""

WIDE = 10  # A point whose bound is this many times the narrowest one makes the line worse, not better.


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One message there and back; nanoseconds of two clocks."""

    sent_ns: int  # t0, own clock.
    received_ns: int  # t1, the other's clock.
    answered_ns: int  # t2, the other's clock.
    returned_ns: int  # t3, own clock.

    def __post_init__(self) -> None:
        if self.returned_ns < self.sent_ns or self.answered_ns < self.received_ns or self.bound_ns < 0:
            raise ValueError(f"no possible exchange: {self}; a clock was set while messages were under way")

    @property
    def offset_ns(self) -> int:
        """The other clock less the own: ((t1 - t0) + (t2 - t3)) / 2."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2

    @property
    def bound_ns(self) -> int:
        """Returns the largest error of `offset_ns`: half the round trip, drift meanwhile, and 1 for whole numbers."""
        passed_ns = self.returned_ns - self.sent_ns
        round_trip_ns = passed_ns - (self.answered_ns - self.received_ns)  # without the other side's work
        return _rounded_up(round_trip_ns, 2) + _rounded_up(passed_ns * MAX_DRIFT_PPM, 1_000_000) + 1


@dataclass(frozen=True, kw_only=True)
class OffsetEstimate:
    """How far the other clock was ahead at one moment."""

    local_ns: int  # When, by the own clock.
    offset_ns: int  # The other clock less the own.
    bound_ns: int  # Largest possible error.
    num_exchanges: int  # Exchanges it was chosen from.


def estimate(exchanges: Sequence[Exchange]) -> OffsetEstimate:
    """The estimate of the exchange with the narrowest bound, which is the one with the shortest round trip."""
    best = min(exchanges, key=lambda exchange: exchange.bound_ns)
    return OffsetEstimate(
        local_ns=(best.sent_ns + best.returned_ns) // 2,
        offset_ns=best.offset_ns,
        bound_ns=best.bound_ns,
        num_exchanges=len(exchanges),
    )


def worth_keeping(estimates: Sequence[OffsetEstimate]) -> tuple[OffsetEstimate, ...]:
    """Returns the first, the last, and those between that a busy network did not make much wider than the narrowest."""
    if len(estimates) < 3:
        return tuple(estimates)
    limit = WIDE * min(one.bound_ns for one in estimates)
    return (estimates[0], *(one for one in estimates[1:-1] if one.bound_ns <= limit), estimates[-1])


def every_second(estimates: Sequence[OffsetEstimate]) -> list[OffsetEstimate]:
    """Half of them, the first and the last among those kept."""
    kept = list(estimates[::2])
    if len(estimates) % 2 == 0:
        kept.extend(estimates[-1:])
    return kept


def _rounded_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def greeting(token: str) -> bytes:
    """What a connection says first, 40 bytes."""
    return _GREETING.pack(_MARK, hashlib.sha256(token.encode()).digest())


class ClockServer:
    """Answers with the time, on a thread of its own, one connection after the other; `clock`: what is read."""

    def __init__(self, address: str, token: str, *, clock: Clock = time.monotonic_ns) -> None:
        self._greeting = greeting(token)
        self._clock = clock
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="clock server", daemon=True)
        self.address, self.port = self._listener.getsockname()[:2]
        self.problem = ""  # Why it answers no longer; empty while it does.

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
                self.problem = "" if self._is_closed else f"answers about the clock ended: {error.strerror or error}"
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
    """Returns exchanges with node 0, fewer if the connection ended; `timeout_s`: for all of it."""
    deadline = time.monotonic() + timeout_s
    found: list[Exchange] = []
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(greeting(token))
        try:
            for number in range(rounds):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                found.append(_ask(connection, number, clock))
        except OSError:
            if not found:
                raise
    return found


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
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def publish(path: Path, server: ClockServer, token: str) -> None:
    """Says where node 0 answers, in `clock.json`. Raises RunError: the file cannot be written."""
    content = {"address": server.address, "port": server.port, "token": token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


class ClockFollower:
    """Asks node 0 for the time, on a thread: at the start, every minute, at the end; `path`: `clock.json`."""

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
        """A last burst; then all estimates that are worth keeping, and why there is none or only one."""
        self._ending.set()
        self._thread.join(timeout_s)
        found = worth_keeping(list(self._estimates))
        if self._thread.is_alive():
            self._failure = f"the last comparison took longer than {timeout_s:g} s"
        return found, "" if len(found) > 1 else self._failure

    def _run(self) -> None:
        place = self._await_place()
        if place is None:
            return
        self._burst(place, BURST_ROUNDS, START_TIMEOUT_S)
        # Directly behind the first burst another shows nothing more: no slope can be drawn between the two.
        is_over = self._ending.is_set() and bool(self._estimates)
        retry_s = 1.0
        while not self._ending.wait(self._every_s if self._estimates else retry_s):
            retry_s = min(2 * retry_s, self._every_s)
            self._burst(place, SHORT_ROUNDS if self._estimates else BURST_ROUNDS, START_TIMEOUT_S)
            if len(self._estimates) > MAX_ESTIMATES:
                self._estimates = every_second(self._estimates)
                self._every_s *= 2
        if not is_over:
            self._burst(place, BURST_ROUNDS, END_TIMEOUT_S)

    def _await_place(self) -> tuple[str, int] | None:
        """Node 0's address and port, as soon as it has published them for this start of the run."""
        deadline = time.monotonic() + WAIT_S
        while True:
            # Looked at once more after the end was asked for: a run of seconds has one point at least.
            is_last = self._ending.is_set() or time.monotonic() > deadline
            content = read_published(self._path, self._token)
            if content is not None:
                return str(content["address"]), int(content["port"])
            if is_last:
                self._failure = f"node 0 did not say in {self._path.name} where it answers about its clock"
                return None
            self._ending.wait(0.1)

    def _burst(self, place: tuple[str, int], rounds: int, timeout_s: float) -> None:
        try:
            one = estimate(compare(*place, self._token, rounds, timeout_s=timeout_s))
        except (OSError, ValueError) as error:
            self._failure = f"node 0's clock at {place[0]} port {place[1]}: {error}"
            return
        if not self._estimates or one.local_ns > self._estimates[-1].local_ns:
            self._estimates.append(one)
            self._failure = "clocks were compared once only"
