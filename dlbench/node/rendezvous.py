"""Rendezvous of ranks without MPI: rank 0 writes the address at which it listens to the run's folder. A token per start
keeps a requeued run from reading its predecessor's address. torch's FileStore is not used: it needs file locks between
nodes, which Lustre and BeeGFS may not have. Ranks of one node also meet at abstract Unix sockets, which leave no file
behind, however ranks end.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlbench.errors import PeerLostError, RunError
from dlbench.opening import read_json
from dlbench.records.files import write_json

if TYPE_CHECKING:
    from dlbench.node.ranks import RankPlace  # imports pydantic, which samplers must not load

FORMAT, VERSION = "dlbench.rendezvous", 1
MAX_BYTES = 1 << 16  # Most bytes of the file, which holds an address.
PATIENCE = (
    0.95  # Share of the stall timeout that ranks wait for each other, so that the error can name the missing one.
)
GRACE_S = 60.0  # Seconds added to the stall timeout for libraries: NCCL's watchdog ends a process without a message.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # Seconds between two polls of the file, increasing, for many ranks.
LOOPBACK = "127.0.0.1"
# Interfaces of containers and virtual machines on this node, which other nodes cannot reach.
_INNER = re.compile(r"^(lo|docker|br-|virbr|veth|vnet|cni|flannel|cali|podman|lxc|lxd|tap|dummy)")
_UNUSED_ADDRESS = ("192.0.2.1", 9)  # A documentation address (RFC 5737), to query the route of outgoing packets.


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address and port at which rank 0 listens."""

    address: str  # IPv4.
    port: int


def publish(path: Path, place: RankPlace, endpoint: Endpoint) -> None:
    """Writes the address at which rank 0 listens."""
    content = {"address": endpoint.address, "port": endpoint.port, "token": place.token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


def read_published(path: Path, token: str) -> dict[str, Any] | None:
    """Returns the content of an address file; None if it was not written in this start of the run."""
    try:
        content = read_json(path, MAX_BYTES)
    except (OSError, ValueError):  # not there yet, or replaced under the reader on NFS
        return None
    if isinstance(content, dict) and content.get("token") == token:
        return content
    return None


def await_address(path: Path, place: RankPlace, wait_s: float) -> Endpoint:
    """Waits for rank 0's address, which NFS may show 60 s late. Raises PeerLostError after `wait_s`."""
    deadline = time.monotonic() + wait_s
    chance, longest_s = random.Random(place.rank), FIRST_PAUSE_S
    while time.monotonic() < deadline:
        content = read_published(path, place.token)
        if content is not None:
            return Endpoint(address=str(content["address"]), port=int(content["port"]))
        # Shortened by up to half at random, so that ranks do not poll at the same time.
        time.sleep(longest_s * (1 - chance.random() / 2))
        longest_s = min(LONGEST_PAUSE_S, longest_s * 1.5)
    raise PeerLostError(
        f"rank {place.rank} waited {wait_s:.0f} s for rank 0's address in {path.name}; did rank 0 start, and do "
        "all nodes see the run's folder?"
    )


def own_address(single_machine: bool, interface: str | None = None) -> str:
    """Returns the address at which other nodes reach this one; loopback if there are none."""
    if single_machine:
        return LOOPBACK
    if interface is not None:
        import psutil

        for item in psutil.net_if_addrs().get(interface, []):
            if item.family == socket.AF_INET:
                return str(item.address)
        raise RunError(f"launch.interface {interface}: this node has no such interface with an IPv4 address")
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]
    except OSError:
        raise RunError(f"the host name {name} does not resolve on the node itself; check /etc/hosts or DNS") from None
    # Debian maps the host's name to 127.0.1.1, some sites to a bridge on the node: other nodes cannot reach these.
    return str(address) if _is_reachable(str(address)) else _routed_address()


def gloo_interface(single_machine: bool, planned: str | None, endpoint: Endpoint) -> str:
    """Returns the network interface for Gloo on this rank; loopback if there are no other nodes."""
    if planned is not None and not single_machine:
        return planned
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.address, endpoint.port))  # of a datagram socket: chooses the route, sends nothing
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.family == socket.AF_INET and item.address == local for item in addresses):
            return str(name)
    raise RunError(f"no network interface has the address {local} used to reach {endpoint.address}")


def _is_reachable(address: str) -> bool:
    """Tells whether other nodes may reach an address: it is neither loopback nor of a bridge on this node."""
    inner = [addresses for name, addresses in _addresses() if _INNER.match(name)]
    return not address.startswith("127.") and all(address not in addresses for addresses in inner)


def _addresses() -> Iterator[tuple[str, list[str]]]:
    """Yields each interface that is up, with its IPv4 addresses."""
    import psutil

    states = psutil.net_if_stats()
    for name, items in sorted(psutil.net_if_addrs().items()):
        if name not in states or states[name].isup:
            yield name, [str(item.address) for item in items if item.family == socket.AF_INET]


def _routed_address() -> str:
    """Returns the address of outgoing packets; without a route, the first of an interface to other nodes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(_UNUSED_ADDRESS)  # of a datagram socket: chooses the route, sends nothing
        if _is_reachable(address := str(probe.getsockname()[0])):
            return address
    for name, addresses in _addresses():
        outer = [address for address in addresses if not address.startswith("127.")]
        if outer and not _INNER.match(name):
            return outer[0]
    raise RunError("this node has only addresses of loopback and local bridges: set launch.interface")


def socket_address(name: str) -> bytes:
    """Returns the address of an abstract Unix socket for a name of any length."""
    return b"\0dlbench-" + hashlib.sha256(name.encode()).hexdigest()[:40].encode()


def is_own_user(connection: socket.socket) -> bool:
    """Tells whether the other end belongs to this user; abstract sockets have no permissions."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[1]) == os.geteuid()
