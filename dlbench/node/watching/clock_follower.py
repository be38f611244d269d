"""How a node's clock is followed through a run: where node 0 answers, and when the others ask it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from dlbench.machine.clock_offset import OffsetEstimate, estimate, every_second, worth_keeping
from dlbench.node.watching.clock_exchange import Clock, ClockServer, compare
from dlbench.opening import read_json
from dlbench.records.files import write_json

FORMAT, VERSION = "dlbench.clock", 1

MAX_BYTES = 1 << 16
"""Of `clock.json` at most: it holds an address."""
BURST_ROUNDS = 200
"""Exchanges at the start and at the end of a run."""
SHORT_ROUNDS = 20
"""Exchanges in between."""
EVERY_S = 60.0
MAX_ESTIMATES = 64
"""With more of them every second one is forgotten, and the time between two doubles."""
WAIT_S = 180.0
"""How long node 0's address is waited for, beside the sampling; shared file systems show new files late."""
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


def publish(path: Path, server: ClockServer, token: str) -> None:
    """Says where node 0 answers, in `clock.json`.

    Raises:
        RunError: the file cannot be written.
    """
    content = {"address": server.address, "port": server.port, "token": token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


class ClockFollower:
    """Asks node 0 for the time now and then, on a thread of its own: at the start, every minute, at the end.

    Args:
        path: `clock.json`.
        token: of the run.
        clock: what is read; for tests.
    """

    def __init__(self, path: Path, token: str, *, clock: Clock = time.monotonic_ns) -> None:
        self._path = path
        self._token = token
        self._clock = clock
        self._every_s = EVERY_S
        self._ending = threading.Event()
        self._estimates: list[OffsetEstimate] = []
        self._failure = "the run ended before clocks were compared"
        self._thread = threading.Thread(target=self._run, name="clock follower", daemon=True)

    def start(self) -> None:
        """Begins to wait for node 0."""
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
        # Directly behind the first burst another tells nothing more: no slope can be drawn between the two.
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
            try:
                content = read_json(self._path, MAX_BYTES)
                if content["token"] == self._token and content["format"] == FORMAT:
                    return str(content["address"]), int(content["port"])
            except (OSError, ValueError, LookupError, TypeError):  # not there yet, or not as node 0 writes it
                pass
            if is_last:
                self._failure = f"node 0 did not say in {self._path.name} where it answers about its clock"
                return None
            self._ending.wait(0.1)

    def _burst(self, place: tuple[str, int], rounds: int, timeout_s: float) -> None:
        try:
            one = estimate(compare(*place, self._token, rounds, timeout_s=timeout_s, clock=self._clock))
        except (OSError, ValueError) as error:
            self._failure = f"node 0's clock at {place[0]} port {place[1]}: {error}"
            return
        if not self._estimates or one.local_ns > self._estimates[-1].local_ns:
            self._estimates.append(one)
            self._failure = "clocks were compared once only"
