"""PyTorch's DistributedDataParallel, as it comes, with its exposed exchange made visible.

DDP waits for its last bucket inside `backward()`. The communication hook used here is PyTorch's own
averaging all-reduce; it only notes when the last bucket is handed over, which is when the backward
pass of this rank has computed its last gradient. What `backward()` takes from there is exposed exchange.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dlbench.errors import EnvironmentLacksError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.engine import DdpSettings

TIMEOUT = datetime.timedelta(minutes=10)


class DdpEngine:
    """torch.distributed over gloo or NCCL."""

    marks_backward = True

    def __init__(
        self, settings: DdpSettings, place: RankPlace, device: torch.device, address_file: Path, interface: str | None
    ) -> None:
        """`address_file` is where rank 0 tells its address; `interface` the network interface, None to find it."""
        self._settings = settings
        self._place = place
        self._device = device
        self._address_file = address_file
        self._interface = interface
        self._backend = settings.backend
        if self._backend == "auto":
            self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._module: nn.parallel.DistributedDataParallel | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def start(self) -> None:
        """Joins the process group."""
        if self._backend == "nccl" and self._device.type != "cuda":
            raise EnvironmentLacksError("engine.ddp.backend: nccl needs a GPU on every rank; use gloo or auto")
        if self._backend == "nccl" and not dist.is_nccl_available():
            raise EnvironmentLacksError("engine.ddp.backend: this torch was built without NCCL; use gloo or auto")
        store = self._store()
        dist.init_process_group(
            self._backend, store=store, rank=self._place.rank, world_size=self._place.size, timeout=TIMEOUT
        )

    def _store(self) -> TCPStore:
        single_machine = self._place.num_nodes == 1
        if self._place.rank == 0:
            address = rendezvous.own_address(single_machine)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            rendezvous.publish(self._address_file, self._place, address, store.port)
            port = store.port
        else:
            address, port = rendezvous.await_address(self._address_file, self._place)
            store = TCPStore(address, port, is_master=False, timeout=TIMEOUT)
        interface = self._interface or rendezvous.interface_towards(address, port)
        # For Gloo alone: NCCL finds the fast network itself, under DDP as under Horovod.
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        return store

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wraps the model; DDP broadcasts rank 0's parameters and buffers itself."""
        device_ids = [self._device.index or 0] if self._device.type == "cuda" else None
        # Left out, DDP begins with a small first bucket (1 MiB); given, even its own default makes that one as large.
        cap = self._settings.bucket_cap_bytes
        is_default = cap == DdpSettings().bucket_cap_bytes
        module = nn.parallel.DistributedDataParallel(
            model,
            device_ids=device_ids,
            bucket_cap_mb=None if is_default else cap / 2**20,
            # BatchNorm statistics stay local to a rank, as Horovod leaves them: equal work for both engines.
            broadcast_buffers=False,
        )

        group = dist.distributed_c10d._get_default_group()

        def average_and_mark(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.is_last():
                mark_backward()
            return default_hooks.allreduce_hook(group, bucket)

        # DDP compares the annotations themselves, which are texts under `from __future__ import annotations`.
        average_and_mark.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[torch.Tensor]})

        module.register_comm_hook(None, average_and_mark)
        self._module = module
        self._optimizer = optimizer
        return module, optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        """DDP's own no_sync()."""
        assert self._module is not None
        return self._module.no_sync()

    def begin_backward(self) -> None:
        """Not noted."""

    def watch(self, on: bool) -> None:
        """Nothing to watch."""

    def exchange_result(self) -> ExchangeResult | None:
        """Nothing is exchanged."""
        return None

    def finish_exchange(self) -> None:
        """Done inside `backward()`."""

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """The update."""
        assert self._optimizer is not None
        update(self._optimizer)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """One all-reduce a tensor; outside of training steps its cost does not matter."""
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= self._place.size

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank."""
        result: list[Any] = [None] * self._place.size
        dist.all_gather_object(result, value)
        return result

    def barrier(self) -> None:
        """Returns when every rank is here."""
        dist.barrier()

    def settings(self) -> list[Setting]:
        """Back-end and bucket size; the latter as DDP itself reports it."""
        found = [
            Setting(
                key="engine.ddp.backend",
                requested=None if self._settings.backend == "auto" else self._settings.backend,
                effective=str(dist.get_backend()),
                evidence="torch.distributed.get_backend()",
            )
        ]
        if self._module is not None:
            logged = self._module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            found.append(
                Setting(
                    key="engine.ddp.bucket_cap_bytes",
                    requested=self._settings.bucket_cap_bytes,
                    effective=int(logged["bucket_cap_bytes"]),
                    evidence="DDP's logging data",
                )
            )
        return found

    def stop(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
