"""Abstract Unix sockets, at which ranks of one node find each other: no file, so nothing stays, however ranks end."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from dlbench.errors import PeerLostError


def socket_address(name: str) -> bytes:
    """The abstract Unix socket of a name, which may be of any length."""
    return b"\0dlbench-" + hashlib.sha256(name.encode()).hexdigest()[:40].encode()


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user; abstract sockets have no permissions of their own."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1]) == os.geteuid()


_PAUSE_S = 0.02  # Between two tries to reach a rank that does not listen yet.


def decided(
    name: str, number: int, size: int, own: Any, decide: Callable[[list[Any]], Any], wait_s: float = 300.0
) -> Any:
    """What the first rank of a node decides by what each of its ranks says: a rank gets this answer, or fails.

    `name`: of this question, in this start of the run, on this node. `number`: of this rank on its node, of `size`.
    `own`: what it says; JSON, as is the answer. `wait_s`: for all to start, seconds; each reads Python's files first,
    often from a shared file system. Raises PeerLostError: not all have said something by then, or one is gone.
    """
    deadline = time.monotonic() + wait_s
    address, said = socket_address(name), {number: own}
    try:
        with ExitStack() as open_ones:
            if number:
                connection = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(wait_s)
                while connection.connect_ex(address):
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    time.sleep(_PAUSE_S)
                connection.sendall(json.dumps([number, own]).encode() + b"\n")
                return json.loads(open_ones.enter_context(connection.makefile()).readline())
            server = open_ones.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen(size)
            others = []
            while len(said) < size:
                server.settimeout(max(_PAUSE_S, deadline - time.monotonic()))
                connection = open_ones.enter_context(server.accept()[0])
                if is_own_user(connection):
                    connection.settimeout(wait_s)
                    other, value = json.loads(open_ones.enter_context(connection.makefile()).readline())
                    said[other] = value
                    others.append(connection)
            answer = decide([said[other] for other in range(size)])
            for connection in others:
                with suppress(OSError):  # One that is gone fails by itself, and must not keep the others from theirs.
                    connection.sendall(json.dumps(answer).encode() + b"\n")
            return answer
    except (OSError, ValueError) as error:
        missing = ", ".join(str(other) for other in range(size) if other not in said)
        who = f"ranks {missing}" if number == 0 else "the first rank"
        why = "it ended" if isinstance(error, ValueError) else str(error) or "timed out"
        raise PeerLostError(
            f"{name}: rank {number} of the node has no answer from {who} within {wait_s:.0f} s ({why}); did all start?"
        ) from None
