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


def socket_address(name: str) -> bytes:
    """The abstract Unix socket of a name, which may be of any length."""
    return b"\0dlbench-" + hashlib.sha256(name.encode()).hexdigest()[:40].encode()


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user; abstract sockets have no permissions of their own."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1]) == os.geteuid()


_PAUSE_S = 0.02  # Between two tries to reach a rank that does not listen yet.


def decided(
    name: str, number: int, size: int, own: Any, decide: Callable[[list[Any]], Any], wait_s: float = 30.0
) -> Any:
    """What the first rank of a node decides by what each of its ranks says; the same on all of them.

    `name`: of this question, in this start of the run, on this node. `number`: of this rank on its node, of `size`.
    `own`: what it says; JSON, as is the answer. None: not all have said something within `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    address = socket_address(name)
    with ExitStack() as open_ones, suppress(OSError, ValueError):
        if number:
            while time.monotonic() < deadline:
                connection = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(max(_PAUSE_S, deadline - time.monotonic()))
                try:
                    connection.connect(address)
                except ConnectionRefusedError:
                    time.sleep(_PAUSE_S)
                    continue
                connection.sendall(json.dumps([number, own]).encode() + b"\n")
                return json.loads(open_ones.enter_context(connection.makefile()).readline())
            return None
        server = open_ones.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen(size)
        said, others = {0: own}, list[socket.socket]()
        while len(said) < size and (left_s := deadline - time.monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(TimeoutError):
                connection = open_ones.enter_context(server.accept()[0])
                if is_own_user(connection):
                    connection.settimeout(left_s)
                    other, value = json.loads(open_ones.enter_context(connection.makefile()).readline())
                    said[other] = value
                    others.append(connection)
        answer = decide([said[other] for other in range(size)]) if len(said) == size else None
        for connection in others:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        return answer
    return None
