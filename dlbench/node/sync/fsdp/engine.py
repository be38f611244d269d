"""PyTorch's FSDP2 (`fully_shard`): each rank keeps a share of every parameter, its gradient and its optimizer state.

Blocks of the network (`model.blocks`, or what `blocks_of` finds) are gathered before they compute and freed behind.
The optimizer, made before with whole parameters, is pointed at the shares by name, so that training keeps its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.fsdp.tensor import SharedLayers, by_mesh
from dlbench.node.sync.timing import clock_for
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
        self._layers = plan.workload.model.layer_table(plan.workload.data)
        self._tensor: SharedLayers | None = None  # Where ranks share each layer's work.
        self._root: FSDPModule | None = None  # None where they share nothing else.
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
        if "tensor" in (dimensions := mesh.mesh_dim_names or ()):
            self._tensor = SharedLayers(mesh["tensor"], self._device, clock_for(self._device))
            self._tensor.divide(model, self._layers)
            dimensions = dimensions[:-1]
        if dimensions:
            self._shard(model, mesh[dimensions])
        self._planned = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        shares = dict(model.named_parameters())
        groups = [
            group | {"params": [shares[name] for name in of_group]}
            for group, of_group in zip(optimizer.param_groups, self._planned, strict=True)
        ]
        optimizer.param_groups[:] = [part for group in groups for part in by_mesh(group)]
        self._optimizer = optimizer
        return model, optimizer

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        keeps = self._settings.shard == "gradients"
        blocks = blocks_of(model) if self._settings.wrap == "blocks" else []
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
        # None: what is in no block stays gathered from forward to backward pass, as they follow each other there.
        fully_shard(model, mesh=mesh, reshard_after_forward=False if keeps else None if blocks else True)
        self._root = cast(FSDPModule, model)

    def planned_groups(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        shares = dict(model.named_parameters())
        return [[shares[name] for name in group] for group in self._planned]

    def _mesh(self) -> DeviceMesh:
        """Ranks by what they share, the innermost dimension that of neighbours; what only one rank would share is left
        out, but for one rank alone.
        """
        tensor, size = self._settings.tensor_ranks, self._place.size
        nodes = self._place.num_nodes if self._settings.shard_ranks == "node" else 1
        shape = {"replicate": nodes, "shard": size // nodes // tensor, "tensor": tensor}
        names = tuple(name for name in shape if shape[name] > 1 or (name == "shard" and (tensor < size or size == 1)))
        return init_device_mesh(self._device.type, tuple(shape[name] for name in names), mesh_dim_names=names)

    @torch.no_grad()
    def clip(self, parameters: Iterable[nn.Parameter], norm: float) -> None:
        """As torch's, which takes one mesh: squares of shares are summed over the ranks that hold the others."""
        shares: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for gradient in (parameter.grad for parameter in parameters):
            if isinstance(gradient, DTensor):
                sharded = [number for number, placed in enumerate(gradient.placements) if not placed.is_replicate()]
                groups = tuple(gradient.device_mesh.get_group(number) for number in sharded)
                shares.setdefault(groups, []).append(gradient.to_local())
            elif gradient is not None:
                shares.setdefault((), []).append(gradient)
        total = torch.zeros((), device=self._device)
        for groups, gradients in shares.items():
            square = nn.utils.get_total_norm(gradients).to(total).square_()
            for group in groups:
                dist.all_reduce(square, group=group)
            total += square
        factor = (norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradients in shares.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def hold_exchange(self) -> AbstractContextManager[None]:
        return self._held()

    @contextmanager
    def _held(self) -> Iterator[None]:
        if self._root is None:
            yield
            return
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def evaluating(self) -> AbstractContextManager[None]:
        return self._unsharded()

    @contextmanager
    def _unsharded(self) -> Iterator[None]:
        root = cast(nn.Module | None, self._root)
        modules = [module for module in root.modules() if isinstance(module, FSDPModule)] if root is not None else []
        frees = self._settings.shard == "parameters"
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)  # a batch would end with shares alone
        try:
            yield
        finally:
            for module in modules:
                is_last = module is root and len(modules) > 1
                module.set_reshard_after_forward(frees and not is_last, recurse=False)
                module.reshard()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one at a time, in the order in which they compute."""
    return list(getattr(model, "blocks", ()))
