"""How ranks find each other without MPI: rank 0 listens and says where in the run's folder, the others read it.

The folder is on a file system that all nodes share, so neither ssh nor a fixed port is needed. A token per start keeps
a requeued run from reading its predecessor's address; it is no secret (Slurm's is made of the job's number).

The folder itself is not used to exchange keys (torch's FileStore): that needs locks that hold between nodes, which
Lustre and BeeGFS may have switched off or hold on one node only, and every look at a key opens a file on their metadata
server.
"""

from __future__ import annotations

import random
import re
import socket
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
    from dlbench.node.ranks import RankPlace  # loads pydantic, which samplers do without

FORMAT, VERSION = "dlbench.rendezvous", 1

MAX_BYTES = 1 << 16  # Of the file at most: it holds an address.
PATIENCE = 0.95
"""Share of the run's stall time-out for which ranks wait for each other: who is missing is said before the watchdog
ends them."""
GRACE_S = 60.0  # Libraries' own time-outs beyond the stall time-out: NCCL's watchdog ends a process without a word.

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between two looks at the file, longer each time: 1,000 ranks are 1,000 opens a second on one metadata server."""

LOOPBACK = "127.0.0.1"

_INNER = re.compile(r"^(lo|docker|br-|virbr|veth|vnet|cni|flannel|cali|podman|lxc|lxd|tap|dummy)")
"""Interfaces of containers and virtual machines on this node, which no other node reaches."""
_SOMEWHERE = ("192.0.2.1", 9)  # An address of nobody (RFC 5737), for asking which way packets would leave.


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where rank 0 listens."""

    address: str  # IPv4.
    port: int


def publish(path: Path, place: RankPlace, endpoint: Endpoint) -> None:
    """Says where rank 0 listens."""
    content = {"address": endpoint.address, "port": endpoint.port, "token": place.token}
    write_json(path, {"format": FORMAT, "version": VERSION, **content})


def read_published(path: Path, token: str) -> dict[str, Any] | None:
    """Returns what the file of an address holds; None if nothing has been published in this start of the run."""
    try:
        content = read_json(path, MAX_BYTES)
    except (OSError, ValueError):  # not there yet, or replaced under the reader on NFS
        return None
    return content if isinstance(content, dict) and content.get("token") == token else None


def await_address(path: Path, place: RankPlace, wait_s: float) -> Endpoint:
    """Where rank 0 listens, as soon as it has published it for this start; NFS shows new files up to 60 s late."""
    deadline = time.monotonic() + wait_s
    chance, longest_s = random.Random(place.rank), FIRST_PAUSE_S
    while time.monotonic() < deadline:
        content = read_published(path, place.token)
        if content is not None:
            return Endpoint(address=str(content["address"]), port=int(content["port"]))
        # Shortened by up to half at random: ranks do not look in step.
        time.sleep(longest_s * (1 - chance.random() / 2))
        longest_s = min(LONGEST_PAUSE_S, longest_s * 1.5)
    raise PeerLostError(
        f"rank {place.rank} waited {wait_s:.0f} s for rank 0's address in {path.name}; did rank 0 start, and do "
        "all nodes see the run's folder?"
    )


def own_address(single_machine: bool, interface: str | None = None) -> str:
    """The address others reach this machine at: loopback if there are no others."""
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
    # Debian maps the own name to 127.0.1.1, some sites to a bridge of the node's own: no other node reaches these.
    return str(address) if _is_reachable(str(address)) else _routed_address()


def gloo_interface(single_machine: bool, planned: str | None, endpoint: Endpoint) -> str:
    """The network interface at which Gloo of this rank listens: loopback if there are no other machines."""
    if planned is not None and not single_machine:
        return planned
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.address, endpoint.port))  # a datagram socket: chooses the route, sends nothing
        local = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.family == socket.AF_INET and item.address == local for item in addresses):
            return str(name)
    raise RunError(f"no network interface has the address {local} used to reach {endpoint.address}")


def _is_reachable(address: str) -> bool:
    """Whether other nodes may reach it: no loopback, and no bridge of this node's own."""
    inner = (found for name, found in _addresses() if _INNER.match(name))
    return not address.startswith("127.") and all(address not in found for found in inner)


def _addresses() -> Iterator[tuple[str, list[str]]]:
    """IPv4 addresses of each interface that is up, by name."""
    import psutil

    states = psutil.net_if_stats()
    for name, items in sorted(psutil.net_if_addrs().items()):
        if name not in states or states[name].isup:
            yield name, [str(item.address) for item in items if item.family == socket.AF_INET]


def _routed_address() -> str:
    """The address from which packets leave this node; without a route, the first of an interface to the outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(_SOMEWHERE)  # a datagram socket: chooses the route, sends nothing
        if _is_reachable(address := str(probe.getsockname()[0])):
            return address
    for name, found in _addresses():
        outside = [address for address in found if not address.startswith("127.")]
        if outside and not _INNER.match(name):
            return outside[0]
    raise RunError("this node has no network address but loopback and bridges of its own: set launch.interface")
