"""The common part of the engines over torch.distributed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlbench.errors import EnvironmentLacksError
from dlbench.node import rendezvous
from dlbench.node.devices import require_own_gpu
from dlbench.node.ranks import RankPlace
from dlbench.node.sync.engine import Engine, settings_of
from dlbench.node.sync.groups import TorchCommunicators, gather_over_torch
from dlbench.node.sync.run_store import meet, of_node
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu, Setting
from dlbench.specs.plan import RunPlan


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
