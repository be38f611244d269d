"""PyTorch's FSDP2 (`fully_shard`): each rank keeps a share of every parameter, its gradient and its optimizer state.

Blocks of the network (`model.blocks`, or what `blocks_of` finds) are gathered before they compute and freed behind.
The optimizer, made before with whole parameters, is pointed at the shares by name, so that training keeps its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.torch_ranks import TorchRanks
from dlbench.records.folder import RunFolder
from dlbench.records.record import RankGpu
from dlbench.specs.plan import RunPlan


class FsdpEngine(TorchRanks):
    """Sharded parameters, gradients and optimizer state."""

    def __init__(
        self, plan: RunPlan, folder: RunFolder, place: RankPlace, device: torch.device, gpu: RankGpu | None
    ) -> None:
        super().__init__(plan, folder, place, device, gpu)
        self._settings = plan.engine.fsdp
        self._root: FSDPModule | None = None
        self._planned: list[list[str]] = []  # Names of the parameters in each group, before any was shared out.

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mark_backward: Callable[[], None],
        *,
        accumulation: int = 1,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Broadcasts rank 0's parameters, shards blocks and the rest, and points the optimizer at the shares."""
        self.communicators().broadcast_parameters(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        mesh = self._mesh()
        keeps = self._settings.shard == "gradients"
        blocks = blocks_of(model) if self._settings.wrap == "blocks" else []
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
        # None: what is in no block stays gathered from forward to backward pass, as they follow each other there.
        fully_shard(model, mesh=mesh, reshard_after_forward=False if keeps else None if blocks else True)
        self._root = cast(FSDPModule, model)
        self._planned = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        shares = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [shares[names[parameter]] for parameter in group["params"]]
        self._optimizer = optimizer
        return model, optimizer

    def planned_groups(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        shares = dict(model.named_parameters())
        return [[shares[name] for name in group] for group in self._planned]

    def _mesh(self) -> DeviceMesh:
        if self._settings.shard_ranks == "node" and self._place.num_nodes > 1:
            shape, names = (self._place.num_nodes, self._place.local_size), ("replicate", "shard")
            return init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        return init_device_mesh(self._device.type, (self._place.size,), mesh_dim_names=("shard",))

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._held()

    @contextmanager
    def _held(self) -> Iterator[None]:
        assert self._root is not None
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def evaluating(self) -> AbstractContextManager[None]:
        return self._unsharded()

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        assert self._root is not None
        modules = [module for module in cast(nn.Module, self._root).modules() if isinstance(module, FSDPModule)]
        frees = self._settings.shard == "parameters"
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)  # a batch would end with shares alone
        try:
            yield
        finally:
            for module in modules:
                is_last = module is self._root and len(modules) > 1
                module.set_reshard_after_forward(frees and not is_last, recurse=False)
                module.reshard()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one at a time, in the order in which they compute."""
    return list(getattr(model, "blocks", ()))
