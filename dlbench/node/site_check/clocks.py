"""The time of day of every node beside the first node's, by messages there and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dlbench.errors import RunError
from dlbench.machine.clock_offset import estimate
from dlbench.node.rendezvous import own_address
from dlbench.node.watching.clocks import FORMAT, MAX_BYTES, ClockServer, compare, publish
from dlbench.opening import read_json
from dlbench.records.answers.preflight import SeenClock

ROUNDS = 50
WAIT_S = 20.0
"""How long the first node's address is waited for, and it for the others: the job lasts a minute."""
_PAUSE_S = 0.1


def answer(
    path: Path, token: str, interface: str | None, others_are_done: Callable[[], bool], wait_s: float = WAIT_S
) -> str:
    """On the first node: tells the time of day until the others are done; why it cannot, or nothing."""
    try:
        server = ClockServer(own_address(single_machine=False, interface=interface), token, clock=time.time_ns)
    except (OSError, RunError) as error:
        return f"the first node cannot answer about its clock: {error}"
    server.start()
    try:
        publish(path, server, token)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not others_are_done():
            time.sleep(_PAUSE_S)
    except RunError as error:
        return str(error)
    finally:
        server.close()
    return server.problem


def ask(
    path: Path, token: str, is_lost: Callable[[], bool] = lambda: False, wait_s: float = WAIT_S
) -> tuple[SeenClock | None, str]:
    """On any other node: how far the first node's clock is ahead; or why that is not known.

    Args:
        path: where the first node says where it answers.
        token: of this start.
        is_lost: whether the first node cannot say so any more.
        wait_s: how long that is waited for.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            content = read_json(path, MAX_BYTES)
            if content["token"] == token and content["format"] == FORMAT:
                break
        except (OSError, ValueError, LookupError, TypeError):  # not there yet, or not as the first node writes it
            pass
        if is_lost():
            return None, "the first node could not look, and its clock is not known"
        if time.monotonic() > deadline:
            return None, f"the first node did not say within {wait_s:g} s where it answers about its clock"
        time.sleep(_PAUSE_S)
    place = str(content["address"]), int(content["port"])
    try:
        found = estimate(compare(*place, token, ROUNDS, timeout_s=wait_s / 2, clock=time.time_ns))
    except (OSError, ValueError) as error:
        return None, f"the first node's clock at {place[0]} port {place[1]}: {error}"
    return SeenClock(offset_s=found.offset_ns / 1e9, bound_s=found.bound_ns / 1e9), ""
