"""Horovod, as it comes: DistributedOptimizer with tensor fusion, over Gloo, MPI or NCCL.

Traps handled here: controller and CPU operations must name the same library (mixing them aborts or
crashes); fp16 sums overflow above 65,504; bfloat16 tensors do not exist for Horovod; at one rank it
registers no hooks at all, so its 1-rank baseline holds no Horovod cost.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.node import rendezvous
from dlbench.node.ranks import RankPlace
from dlbench.records.exchange import ExchangeResult
from dlbench.records.record import Setting
from dlbench.specs.engine import HorovodSettings

REMEDY = "run `dlbench setup horovod` in the Python environment of the compute nodes"


class HorovodEngine:
    """Horovod's DistributedOptimizer."""

    marks_backward = False

    def __init__(
        self,
        settings: HorovodSettings,
        place: RankPlace,
        device: torch.device,
        *,
        use_mpi: bool,
        address_file: Path,
        interface: str | None,
    ) -> None:
        """`use_mpi`: the launcher is an MPI one; otherwise ranks meet through `address_file` and Gloo."""
        self._settings = settings
        self._place = place
        self._device = device
        self._use_mpi = use_mpi
        self._address_file = address_file
        self._interface = interface
        self._optimizer: Any = None
        self._hvd: Any = None

    def start(self) -> None:
        """Sets Horovod's variables, starts it, and checks that it sees the planned ranks."""
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(self._settings.fusion_threshold_bytes)
        os.environ["HOROVOD_CYCLE_TIME"] = str(self._settings.cycle_time_ms)
        library = "mpi" if self._use_mpi else "gloo"
        # Also on GPUs, where small objects still travel by the CPU operations.
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = library
        try:
            import horovod.torch as hvd
        except ImportError as error:
            raise EnvironmentLacksError(f"engine horovod: Horovod cannot be imported ({error}); {REMEDY}") from None
        self._hvd = hvd
        if self._use_mpi and not hvd.mpi_built():
            raise EnvironmentLacksError(
                f"engine horovod: this Horovod was built without MPI; install Open MPI and {REMEDY}"
            )
        if self._device.type == "cuda" and not hvd.nccl_built():
            raise EnvironmentLacksError(
                f"engine horovod: this Horovod was built without NCCL and would copy gradients by the host; {REMEDY}"
            )
        if not self._use_mpi:
            if not hvd.gloo_built():
                raise EnvironmentLacksError(f"engine horovod: this Horovod was built without Gloo; {REMEDY}")
            self._meet()
        hvd.init()
        if hvd.size() != self._place.size or hvd.rank() != self._place.rank:
            raise RunError(
                f"Horovod sees rank {hvd.rank()} of {hvd.size()}, the launcher says rank {self._place.rank} of "
                f"{self._place.size}; nothing was measured"
            )

    def _meet(self) -> None:
        """Gloo's rendezvous: rank 0 serves it on a free port and tells where."""
        place = self._place
        if place.rank == 0:
            from horovod.runner.http.http_server import RendezvousServer

            server = RendezvousServer()
            port = server.start()
            server.init([])
            address = rendezvous.own_address(place.num_nodes == 1)
            rendezvous.publish(self._address_file, place, address, port)
        else:
            address, port = rendezvous.await_address(self._address_file, place)
        os.environ |= {
            "HOROVOD_RANK": str(place.rank),
            "HOROVOD_SIZE": str(place.size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_size),
            "HOROVOD_CROSS_RANK": str(place.node_rank),
            "HOROVOD_CROSS_SIZE": str(place.num_nodes),
            "HOROVOD_HOSTNAME": f"node-{place.node_rank}",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": self._interface or rendezvous.interface_towards(address, port),
        }

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Broadcasts rank 0's parameters and wraps the optimiser."""
        compression = self._hvd.Compression.fp16 if self._settings.compression == "fp16" else self._hvd.Compression.none
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self._optimizer = self._hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=compression,
            backward_passes_per_step=accumulation,
        )
        return model, self._optimizer

    def hold_exchange(self) -> AbstractContextManager[None]:
        """Horovod counts the backward passes itself (backward_passes_per_step)."""
        return nullcontext()

    def begin_backward(self) -> None:
        """Not noted."""

    def watch(self, on: bool) -> None:
        """Nothing to watch."""

    def exchange_result(self) -> ExchangeResult | None:
        """Nothing is exchanged."""
        return None

    def finish_exchange(self) -> None:
        """Waits for every gradient's all-reduce."""
        self._optimizer.synchronize()

    def step(self, update: Callable[[torch.optim.Optimizer], object]) -> None:
        """The update, without Horovod's second wait."""
        with self._optimizer.skip_synchronize():
            update(self._optimizer)

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """One grouped all-reduce."""
        if tensors and self._place.size > 1:
            self._hvd.grouped_allreduce_(list(tensors), op=self._hvd.Average, name="dlbench.average")

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank."""
        result: list[Any] = self._hvd.allgather_object(value)
        return result

    def barrier(self) -> None:
        """Returns when every rank is here."""
        self._hvd.barrier()

    def settings(self) -> list[Setting]:
        """Fusion threshold and cycle time read back from the running library; the library that carries them."""
        library = _loaded_library()
        carrier = "nccl" if self._device.type == "cuda" and self._hvd.nccl_built() else os.environ["HOROVOD_CONTROLLER"]
        requested = self._settings
        return [
            _read_back(
                library,
                "horovod_effective_fusion_threshold_bytes",
                ctypes.c_longlong,
                "engine.horovod.fusion_threshold_bytes",
                requested.fusion_threshold_bytes,
            ),
            _read_back(
                library,
                "horovod_effective_cycle_time_ms",
                ctypes.c_double,
                "engine.horovod.cycle_time_ms",
                requested.cycle_time_ms,
            ),
            Setting(
                key="engine.horovod.compression",
                requested=requested.compression,
                effective=requested.compression if self._place.size > 1 else "none",
                evidence="compressor given to DistributedOptimizer; at one rank nothing is exchanged",
            ),
            Setting(
                key="engine.horovod.operations",
                requested=None,
                effective=carrier,
                evidence="controller started, operations built",
            ),
        ]

    def stop(self) -> None:
        """Shuts Horovod down on all ranks."""
        if self._hvd is not None and self._hvd.is_initialized():
            self._hvd.shutdown()


def _loaded_library() -> ctypes.CDLL | None:
    """Horovod's own shared library, already in memory."""
    try:
        from horovod.torch import mpi_lib_v2

        return ctypes.CDLL(mpi_lib_v2.__file__)
    except (ImportError, OSError, AttributeError):
        return None


def _read_back(library: ctypes.CDLL | None, symbol: str, kind: Any, key: str, requested: float) -> Setting:
    """One value in force, by the function that dlbench's build adds to Horovod."""
    function = getattr(library, symbol, None) if library is not None else None
    if function is None:
        return Setting(
            key=key,
            requested=requested,
            effective=None,
            evidence="cannot be read back: this Horovod was not built by dlbench; its variable was set as requested",
        )
    function.restype = kind
    function.argtypes = []
    return Setting(key=key, requested=requested, effective=function(), evidence="read back from Horovod")
