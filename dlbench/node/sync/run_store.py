"""Connections of ranks: stores over which they meet (key-value stores on rank 0: torch's TCPStore or Horovod's
rendezvous server), groups over torch.distributed, and the common part of the engines over it. The stores answer anyone
who reaches their interface, like Gloo, NCCL and MPI: see docs/security.md.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.node import rendezvous
from dlbench.node.devices import require_own_gpu
from dlbench.node.ranks import RankPlace
from dlbench.node.rendezvous import Endpoint
from dlbench.node.sync.engine import Communicators, Engine, RankGroup, settings_of
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu, Setting
from dlbench.specs.plan import RunPlan

_TAG = 17  # Tag of point-to-point messages; those of a pair of ranks arrive in the order of sending.
MAX_BYTES = 2**30  # Largest value of one rank; more is a mistake, or damaged data from the network.
_ARRIVED, _COMPLETE = "dlbench/arrived", "dlbench/complete"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_BACKLOG = 1024  # Connections that may wait: all ranks connect at once.


@dataclass(frozen=True, kw_only=True)
class GroupRanks:
    """The ranks of each group, laid out in blocks: rank = group x group size + index in the group."""

    size: int  # Ranks of the run.
    group_size: int  # Ranks of a group; divides `size`.

    @property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        step = self.group_size
        return tuple(tuple(range(first, first + step)) for first in range(0, self.size, step))

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each index in a group, the ranks with that index; the first are the leaders."""
        return tuple(tuple(range(index, self.size, self.group_size)) for index in range(self.group_size))


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups that one rank is in."""

    world: RankGroup
    inside: RankGroup  # Ranks of its group.
    across: RankGroup  # Ranks with its index in every group; with index 0 it is the group of leaders.


def make_world(communicators: Communicators, group_ranks: GroupRanks) -> RankGroup:
    """Makes the group of all ranks."""
    world = communicators.group(range(group_ranks.size))
    assert world is not None  # every rank is in it
    return world


def make_groups(communicators: Communicators, group_ranks: GroupRanks) -> RankGroups:
    """Makes every group of the run, on all ranks in the same order; returns those of this rank."""
    world = make_world(communicators, group_ranks)
    inside = [communicators.group(ranks) for ranks in group_ranks.inside]
    across = [communicators.group(ranks) for ranks in group_ranks.across]
    return RankGroups(world=world, inside=next(filter(None, inside)), across=next(filter(None, across)))


class TorchGroup:
    """A process group of torch.distributed."""

    def __init__(self, ranks: tuple[int, ...], index: int, carrier: str, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.index = index
        self.carrier = carrier
        self.process_group = group  # None: all ranks of the run
        self._receive_buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def sum(self, vector: torch.Tensor) -> None:
        dist.all_reduce(vector, group=self.process_group)

    def begin_sum(self, vector: torch.Tensor) -> Callable[[], object]:
        return partial(_wait, dist.all_reduce(vector, group=self.process_group, async_op=True))

    def reduce_scatter(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the sum; over gloo a view of `vector`, whose other parts do not change."""
        length = vector.numel() // len(self.ranks)
        if self.carrier != "gloo":
            share = torch.empty(length, dtype=vector.dtype, device=vector.device)
            dist.reduce_scatter_tensor(share, vector, group=self.process_group)
            return share
        # PyTorch's ProcessGroupGloo sums the whole vector on every rank, with twice the bytes of the shares sent here.
        key = (length, vector.dtype)
        if key not in self._receive_buffers:  # reused: fresh memory for every message would cost page faults
            self._receive_buffers[key] = torch.empty(len(self.ranks) - 1, length, dtype=vector.dtype)
        received = self._receive_buffers[key]
        parts = vector.view(len(self.ranks), length)
        others = [i for i in range(len(self.ranks)) if i != self.index]
        receiving = [self._receive(row, i) for row, i in zip(received, others, strict=True)]
        sending = [self._send(parts[i], i) for i in self._others_onward()]
        for work, row in zip(receiving, received, strict=True):
            _wait(work)
            parts[self.index].add_(row)
        for work in sending:
            _wait(work)
        return parts[self.index]

    def all_gather(self, share: torch.Tensor, vector: torch.Tensor) -> None:
        if self.carrier != "gloo":
            dist.all_gather_into_tensor(vector, share, group=self.process_group)
            return
        parts = vector.view(len(self.ranks), share.numel())
        receiving = [self._receive(parts[i], i) for i in range(len(self.ranks)) if i != self.index]
        sending = [self._send(share, i) for i in self._others_onward()]
        if parts[self.index].data_ptr() != share.data_ptr():
            parts[self.index].copy_(share)
        for work in (*receiving, *sending):
            _wait(work)

    def _send(self, tensor: torch.Tensor, index: int) -> dist.Work | None:
        return dist.isend(tensor, dst=self.ranks[index], group=self.process_group, tag=_TAG)

    def _receive(self, tensor: torch.Tensor, index: int) -> dist.Work | None:
        return dist.irecv(tensor, src=self.ranks[index], group=self.process_group, tag=_TAG)

    def _others_onward(self) -> list[int]:
        """Returns the other indices, beginning after this rank's, so that not all ranks send to the same rank first."""
        size = len(self.ranks)
        return [(self.index + step) % size for step in range(1, size)]

    def reduce(self, vector: torch.Tensor, root: int) -> None:
        dist.reduce(vector, dst=self.ranks[root], group=self.process_group)

    def broadcast(self, vector: torch.Tensor, root: int) -> None:
        dist.broadcast(vector, src=self.ranks[root], group=self.process_group)

    def gather_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(gathered, tensor, group=self.process_group)
        return gathered

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.process_group)
        return received


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # None only for ranks outside of the group
    work.wait()


class TorchCommunicators:
    """torch.distributed, its default process group joined already."""

    reduce_is_sum = False

    def __init__(self) -> None:
        self.carrier = str(dist.get_backend())
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()

    def group(self, ranks: Sequence[int]) -> TorchGroup | None:
        members = tuple(ranks)
        process_group = None if len(members) == self._size else dist.new_group(list(members))
        if self._rank not in members:
            return None
        return TorchGroup(members, members.index(self._rank), self.carrier, process_group)

    def broadcast_parameters(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def gather_json(value: Any, num_ranks: int, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Returns the `value` of every rank, by rank; tuples come back as lists, keys as text."""
    # The libraries' functions for objects unpickle data of other ranks: one of them could run code in all.
    encoded = json.dumps(value).encode()
    sizes = all_gather(torch.tensor([len(encoded)], dtype=torch.int64)).tolist()
    if len(sizes) != num_ranks or not all(0 < size <= MAX_BYTES for size in sizes):
        raise RunError(
            f"ranks sent values of {sizes[:8]} bytes to each other; expected {num_ranks} of 1 to {MAX_BYTES}"
        )
    padded = torch.frombuffer(bytearray(encoded.ljust(max(sizes))), dtype=torch.uint8)
    gathered = all_gather(padded).reshape(num_ranks, -1).numpy()
    try:
        return [json.loads(gathered[rank, :size].tobytes()) for rank, size in enumerate(sizes)]
    except ValueError:
        raise RunError("a rank sent bytes that are not JSON") from None


def gather_over_torch(value: Any, num_ranks: int, device: torch.device | None = None) -> list[Any]:
    """Gathers `value` over torch.distributed's default group, in tensors on `device` (None: the CPU)."""

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None:
            tensor = tensor.to(device)
        gathered = [torch.empty_like(tensor) for _ in range(num_ranks)]
        dist.all_gather(gathered, tensor)
        return torch.cat(gathered).cpu()

    return gather_json(value, num_ranks, all_gather)


def open_endpoint(
    path: Path, place: RankPlace, interface: str | None, wait_s: float, serve: Callable[[str], int]
) -> Endpoint:
    """Returns the address of rank 0's server; `serve` starts it at an address and returns its port."""
    if interface is not None and place.num_nodes > 1 and torch.cuda.is_available():
        # NCCL starts over it, and uses it if there is no faster network. `=` selects this name only, not all that begin
        # with it (NCCL's documentation, environment variables).
        os.environ.setdefault(_NCCL_INTERFACE, f"={interface}")
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
    """Returns the store of this run once all ranks are connected; sets the variables of Gloo and NCCL."""
    listen_fd: int | None = None  # on rank 0

    def serve(address: str) -> int:
        nonlocal listen_fd
        server = socket.create_server((address, 0), backlog=_BACKLOG)
        port = int(server.getsockname()[1])
        listen_fd = server.detach()
        return port

    endpoint = open_endpoint(path, place, interface, timeout.total_seconds(), serve)
    try:
        store = TCPStore(
            endpoint.address,
            endpoint.port,
            is_master=listen_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        if store.add(_ARRIVED, 1) == place.size:
            store.set(_COMPLETE, "1")
        store.wait([_COMPLETE])
    except RuntimeError as error:
        raise RunError(f"rank {place.rank}: not all {place.size} ranks connected: {error}") from None
    os.environ["GLOO_SOCKET_IFNAME"] = rendezvous.gloo_interface(place.num_nodes == 1, interface, endpoint)
    if torch.cuda.is_available():
        # Every rank's NCCL monitor would ask the store every second whether to write its flight recorder: work for rank
        # 0 while it is measured. dlbench's own watchdog ends runs that hang.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    return store


def of_node(store: Store, name: str, value: Any, *, place: RankPlace) -> list[Any]:
    """Returns the JSON-serialisable `value` of every rank of this node, by rank, before there is a process group."""
    store.set(f"dlbench/{name}/{place.rank}", json.dumps(value))
    first = place.rank - place.local_rank
    return [json.loads(store.get(f"dlbench/{name}/{rank}")) for rank in range(first, first + place.local_size)]


def serve_horovod(address: str) -> int:
    """Starts a rendezvous server for Horovod's Gloo until the end of the process; returns the port."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):  # type: ignore[misc]  # Horovod has no types
        daemon_threads = True
        request_queue_size = _BACKLOG

        def server_bind(self) -> None:
            # HTTPServer's own would ask the name service for the name of the address.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def do_HEAD(self) -> None:  # noqa: N802
            """Refuses: the standard library's answers about files of the working directory."""
            self.send_error(405)

    server = Server((address, 0), Handler, 0)
    threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True).start()
    return int(server.server_port)


def interface_settings(interface: str | None, place: RankPlace) -> list[Setting]:
    """Returns `launch.interface` with the variables that Gloo and NCCL read; nothing if no interface was requested."""
    if interface is None or place.num_nodes == 1:
        return []
    names = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", _NCCL_INTERFACE)
    variables = {name: os.environ[name] for name in names if name in os.environ}
    how = ", ".join(f"{name}={value}" for name, value in variables.items())
    if not variables:
        how = "no library that reads a variable was used"
    nccl_interface = variables.pop(_NCCL_INTERFACE, f"={interface}")
    if nccl_interface != f"={interface}":
        how += "; NCCL's was set before, and dlbench did not change it"
    effective = next(iter(variables.values()), None)
    return [Setting(key="system.launch.interface", requested=interface, effective=effective, evidence=how)]


class TorchRanks(Engine):
    """An engine over torch.distributed's default process group (gloo or NCCL) without its exchange of gradients."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        self._stall_timeout_s = plan.measure.stall_timeout_s
        self._gpu = gpu
        self._place = place
        self._device = device
        self._address_file = folder.rendezvous
        self._interface = plan.system.launch.interface
        self._backend_key = f"engine.{plan.engine.name}.backend"
        self._requested: str = getattr(plan.engine.settings, "backend")  # noqa: B009  (each of these engines has one)
        self._backend = self._requested
        if self._requested == "auto":
            self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._wire = plan.sync.library_wire
        self._destroyed_group: object = None

    def start(self) -> None:
        if self._backend == "nccl" and self._device.type != "cuda":
            raise EnvironmentLacksError(f"{self._backend_key}: nccl needs a GPU on every rank; use gloo or auto")
        if self._backend == "nccl" and not dist.is_nccl_available():
            raise EnvironmentLacksError(f"{self._backend_key}: this torch was built without NCCL; use gloo or auto")
        patience = datetime.timedelta(seconds=self._stall_timeout_s * rendezvous.PATIENCE)
        self._store = store = meet(self._address_file, self._place, self._interface, patience)
        by_nccl = self._backend == "nccl"
        # Before NCCL starts: its error for two ranks on one GPU has a bus number at best.
        gather = partial(of_node, store, "gpu", place=self._place)
        require_own_gpu(self._gpu, self._place, gather, by_nccl=by_nccl)
        dist.init_process_group(
            self._backend,
            store=store,
            rank=self._place.rank,
            world_size=self._place.size,
            timeout=datetime.timedelta(seconds=self._stall_timeout_s + rendezvous.GRACE_S),
            # NCCL then starts here and not in the first step, and a hang shows where it is.
            device_id=self._device if by_nccl else None,
        )
        require_sum(self._wire, self._backend, self._device, self._place.size)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """All-reduces each tensor separately; outside of training steps the cost does not matter."""
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self._place.size

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def gather(self, value: Any) -> list[Any]:
        device = self._device if self._backend == "nccl" else None
        return gather_over_torch(value, self._place.size, device)

    def barrier(self) -> None:
        dist.barrier()

    def settings(self) -> list[Setting]:
        requested = self._requested if self._requested != "auto" else None
        how = "torch.distributed.get_backend()"
        return settings_of((self._backend_key, requested, str(dist.get_backend()), how))

    def communicators(self) -> TorchCommunicators:
        return TorchCommunicators()

    def stop(self) -> None:
        if dist.is_initialized():
            # Gloo's worker thread may still hold the last callback, and with it the group. If that were the last
            # reference, the thread would wait for its own end, which ends the process (std::system_error).
            self._destroyed_group = dist.distributed_c10d._get_default_group()
            dist.destroy_process_group()


def require_sum(wire: str, backend: str, device: torch.device, ranks: int) -> None:
    """Checks on all ranks that the back-end sums this format; raises `EnvironmentLacksError` if it does not."""
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(wire)
    if kind is None:
        return
    ones = torch.full((8,), 1.5, dtype=kind, device=device)
    try:
        dist.all_reduce(ones)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentLacksError(
            f"sync.wire {wire}: {backend} of this torch does not sum it ({reason}); use fp32"
        ) from None
    if not torch.equal(ones.float().cpu(), torch.full((8,), 1.5 * ranks)) and ranks <= 64:
        raise EnvironmentLacksError(f"sync.wire {wire}: {backend} of this torch sums it wrongly; use fp32")
