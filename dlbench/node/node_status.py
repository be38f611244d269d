"""One status file for a node: its first rank collects what the others say at an abstract Unix socket, and writes it.

Files are written between stages of a run and never in measured steps: a thousand ranks that each renew a file are
hundreds of operations a second on one metadata server, beside the very steps that are measured. What a rank was doing
when it ended without a word is written by its supervisor (`dlbench.final_status`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from dlbench.node.local_sockets import is_own_user, socket_address
from dlbench.node.ranks import RankPlace
from dlbench.records.folder import RunFolder
from dlbench.records.status import NodeStatuses, RankStatus, write_node_statuses, write_status

_MESSAGE_BYTES = 1 << 16
_LOOK_S = 0.002
_MEET_S = {"measuring": 0.5, "done": 2.0}
"""How long the first rank waits for the others' word of a stage into which all go together. None of it is measured: a
barrier follows the one, the other is the end."""
ALONE_AFTER_S = 5.0
"""When a rank that does not reach the first of its node writes a file of its own: containers part networks."""
ENDED = ("done", "failed")


class NodeStatus:
    """What one rank says of itself.

    Args:
        place: this rank; the one with local rank 0 writes.
    """

    def __init__(self, folder: RunFolder, place: RankPlace) -> None:
        self._folder, self._place = folder, place
        self._is_first = place.local_rank == 0
        self._known: dict[int, RankStatus] = {}
        self._unsent: tuple[float, RankStatus] | None = None
        self._connection: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._listener = self._listen() if self._is_first and place.local_size > 1 else None

    def say(self, status: RankStatus) -> None:
        """The first rank writes; others tell it, and write a file of their own if they cannot and it counts.

        Raises RunError: the file cannot be written.
        """
        if self._is_first:
            self._known[status.rank] = status
            self._meet(status.stage)
            self._write()
        elif not self._sent(status):
            self._unsent = (time.monotonic(), status)
            if status.stage in _MEET_S:
                self._write_alone()

    def tick(self) -> None:
        """What was left undone, outside of measured steps; about once a second.

        Raises RunError: the file cannot be written.
        """
        if self._is_first:
            if self._collect():
                self._write()
        elif self._unsent is not None:
            since, status = self._unsent
            if self._sent(status):
                self._unsent = None
            elif time.monotonic() - since > ALONE_AFTER_S:
                self._write_alone()

    def close(self) -> None:
        """Nothing more is said, and nobody heard."""
        for one in (self._listener, self._connection, *self._others):
            if one is not None:
                one.close()
        self._listener, self._connection, self._others = None, None, []

    def _write(self) -> None:
        ranks = tuple(self._known[rank] for rank in sorted(self._known))
        write_node_statuses(self._folder, NodeStatuses(node=self._place.node_rank, ranks=ranks))

    def _write_alone(self) -> None:
        assert self._unsent is not None
        write_status(self._folder, self._unsent[1])
        self._unsent = None

    def _address(self) -> bytes:
        place = self._place
        return socket_address(f"status {os.geteuid()} {place.token} {self._folder.path} {place.node_rank}")

    def _listen(self) -> socket.socket | None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._address())
            listener.listen(self._place.local_size)
        except OSError:  # then the others reach nobody, and write by themselves
            listener.close()
            return None
        listener.setblocking(False)
        return listener

    def _meet(self, stage: str) -> None:
        """Hears the others, and waits for them where all enter a stage together."""
        deadline = time.monotonic() + _MEET_S.get(stage, 0.0)
        self._collect()
        if self._listener is None:
            return
        while time.monotonic() < deadline and self._lacks(stage):
            time.sleep(_LOOK_S)
            self._collect()

    def _lacks(self, stage: str) -> bool:
        said = [one for one in self._known.values() if one.stage == stage or one.stage in ENDED]
        return len(said) < self._place.local_size

    def _collect(self) -> bool:
        """Takes what others have said; whether there was anything."""
        if self._listener is None:
            return False
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if is_own_user(connection):
                    self._others.append(connection)
                else:
                    connection.close()
        return sum(self._hear(connection) for connection in tuple(self._others)) > 0

    def _hear(self, connection: socket.socket) -> bool:
        is_new = False
        while True:
            try:
                message = connection.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return is_new
            except OSError:
                message = b""
            if not message:  # it has ended
                self._others.remove(connection)
                connection.close()
                return is_new
            with suppress(ValueError):
                status = RankStatus.model_validate_json(message)
                self._known[status.rank] = status
                is_new = True

    def _sent(self, status: RankStatus) -> bool:
        message = _packed(status.model_dump(mode="json"))
        if self._connection is None:
            self._connection = self._connect()
        if self._connection is None:
            return False
        try:
            self._connection.send(message)
        except OSError:  # the first rank has ended, or hangs
            self._connection.close()
            self._connection = None
            return False
        return True

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            connection.connect(self._address())
            if is_own_user(connection):
                return connection
        except OSError:  # not there yet, or never
            pass
        connection.close()
        return None


def _packed(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()
