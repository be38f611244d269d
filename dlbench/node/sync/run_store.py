"""Where ranks meet: rank 0 serves keys and values, by torch's TCPStore or by Horovod's rendezvous server.

Both are bound to one interface; by themselves they listen on every one. They answer whoever reaches them there, as
Gloo, NCCL and MPI do, whose addresses they hold: docs/security.md says what a stranger on that network can do.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store, TCPStore

from dlbench.errors import RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import Endpoint
from dlbench.records.record import Setting

_ARRIVED, _COMPLETE = "dlbench/arrived", "dlbench/complete"
_OF_NCCL = "NCCL_SOCKET_IFNAME"
_BACKLOG = 1024  # All ranks come at once.


def open_endpoint(
    path: Path, place: RankPlace, interface: str | None, wait_s: float, serve: Callable[[str], int]
) -> Endpoint:
    """Returns where rank 0 serves: there made and published, on other ranks waited for."""
    if interface is not None and place.num_nodes > 1 and torch.cuda.is_available():
        # NCCL starts over it, and sends over it what no faster network takes. `=`: this name, not all that begin so
        # (NCCL's documentation, environment variables).
        os.environ.setdefault(_OF_NCCL, f"={interface}")
    if place.rank != 0:
        return rendezvous.await_address(path, place, wait_s)
    address = rendezvous.own_address(place.num_nodes == 1, interface)
    try:
        endpoint = Endpoint(address=address, port=serve(address))
    except OSError as error:
        raise RunError(f"rank 0 cannot listen at {address}: {error.strerror or error}") from None
    rendezvous.publish(path, place, endpoint)
    return endpoint


def meet(path: Path, place: RankPlace, interface: str | None, timeout: datetime.timedelta) -> TCPStore:
    """Returns the store of this run once all ranks are there; Gloo and NCCL learn what goes with it."""
    listeners: list[socket.socket] = []

    def serve(address: str) -> int:
        listeners.append(socket.create_server((address, 0), backlog=_BACKLOG))
        return int(listeners[0].getsockname()[1])

    endpoint = open_endpoint(path, place, interface, timeout.total_seconds(), serve)
    listening = listeners[0].detach() if listeners else None
    try:
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=listening is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        if store.add(_ARRIVED, 1) == place.size:
            store.set(_COMPLETE, "1")
        store.wait([_COMPLETE])
    except RuntimeError as error:
        raise RunError(f"rank {place.rank}: not all {place.size} ranks met: {error}") from None
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.gloo_interface(place.num_nodes == 1, interface, endpoint)
    if torch.cuda.is_available():
        # NCCL's monitor would ask the store every second from every rank whether to write its flight recorder: work for
        # rank 0 while it is measured. dlbench's own watchdog ends runs that hang.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return store


def of_node(store: Store, name: str, value: Any, *, place: RankPlace) -> list[Any]:
    """`value` (what JSON can hold) of every rank of this rank's node, by rank; before there is a group to ask."""
    store.set(f"dlbench/{name}/{place.rank}", json.dumps(value))
    first = place.rank - place.local_rank
    return [json.loads(store.get(f"dlbench/{name}/{rank}")) for rank in range(first, first + place.local_size)]


def serve_horovod(address: str) -> int:
    """Serves what Horovod's Gloo asks for, to the end of the process; returns the port."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):  # type: ignore[misc]  # Horovod has no types
        daemon_threads = True
        request_queue_size = _BACKLOG

        def server_bind(self) -> None:
            # Not HTTPServer's, which asks the name service for the name of the address.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def do_HEAD(self) -> None:  # noqa: N802
            """Not the standard library's, which answers about files of the working directory."""
            self.send_error(405)

    server = Server((address, 0), Handler, 0)
    threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
    return int(server.server_port)


def interface_settings(interface: str | None, place: RankPlace) -> list[Setting]:
    """What became of `launch.interface`, by the variables that Gloo and NCCL read; nothing where none was asked for."""
    if interface is None or place.num_nodes == 1:
        return []
    names = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", _OF_NCCL)
    found = {name: os.environ[name] for name in names if name in os.environ}
    how = ", ".join(f"{name}={value}" for name, value in found.items()) or "no library that reads a variable was used"
    by_user = found.get(_OF_NCCL, f"={interface}") != f"={interface}"
    how += "; NCCL's was set before, and dlbench left it" * by_user
    gloo = [value for name, value in found.items() if name != _OF_NCCL]
    effective = gloo[0] if gloo else None
    return [Setting(key="system.launch.interface", requested=interface, effective=effective, evidence=how)]
