"""How ranks find each other without MPI: rank 0 listens and says where in the run's folder, the others read it.

The folder is on a file system that all nodes share, so neither ssh nor a fixed port is needed. A
token per start keeps a requeued run from reading its predecessor's address.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from dlbench.errors import RunError
from dlbench.node.ranks import RankPlace
from dlbench.opening import read_json
from dlbench.records.files import write_json

FORMAT, VERSION = "dlbench.rendezvous", 1

MAX_BYTES = 1 << 16
"""Of the file at most: it holds an address."""
WAIT_S = 180.0
"""How long ranks wait for rank 0. Shared file systems show new files late (NFS: up to 60 s by default)."""


def publish(path: Path, place: RankPlace, address: str, port: int) -> None:
    """Says where rank 0 listens.

    Raises:
        RunError: the file cannot be written.
    """
    content = {"address": address, "port": port, "token": place.token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


def await_address(path: Path, place: RankPlace, wait_s: float = WAIT_S) -> tuple[str, int]:
    """Address and port of rank 0, as soon as it has published them for this start.

    Raises:
        RunError: nothing was published in time.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            content = read_json(path, MAX_BYTES)
        except (OSError, ValueError):  # not there yet, or replaced under the reader on NFS
            content = None
        if isinstance(content, dict) and content.get("token") == place.token:
            return str(content["address"]), int(content["port"])
        time.sleep(0.02)
    raise RunError(
        f"rank {place.rank} waited {wait_s:.0f} s for rank 0's address in {path.name}; did rank 0 start, and do "
        "all nodes see the run's folder?"
    )


def own_address(single_machine: bool) -> str:
    """The address others reach this machine at: loopback if there are no others."""
    if single_machine:
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]
    except OSError:
        raise RunError(f"the host name {name} does not resolve on the node itself; check /etc/hosts or DNS") from None
    if str(address).startswith("127."):
        # Debian maps the own name to 127.0.1.1, which no other node reaches.
        return _first_routable_address()
    return str(address)


def _first_routable_address() -> str:
    import psutil

    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127.") and name != "lo":
                return str(item.address)
    raise RunError("this node has no network address but loopback")


def interface_towards(address: str, port: int) -> str:
    """The network interface whose address is used to reach `address`.

    Raises:
        RunError: no interface has that address.
    """
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a datagram socket: chooses the route, sends nothing
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.family == socket.AF_INET and item.address == local for item in addresses):
            return str(name)
    raise RunError(f"no network interface has the address {local} used to reach {address}")
