"""Abstract Unix sockets between ranks of one node; they leave no file behind, however ranks end."""

from __future__ import annotations

import hashlib
import os
import socket
import struct


def socket_address(name: str) -> bytes:
    """Returns the address of an abstract Unix socket for a name of any length."""
    return b"\0dlbench-" + hashlib.sha256(name.encode()).hexdigest()[:40].encode()


def is_own_user(connection: socket.socket) -> bool:
    """Tells whether the other end belongs to this user; abstract sockets have no permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1]) == os.geteuid()
