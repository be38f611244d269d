"""Tensor parallelism: neighbouring ranks share the work of each layer (Shoeybi et al., Megatron-LM (2019), section 3).

What is divided is in the network's table of layers (`Layer.tensor`): a product by its outputs (`ColwiseParallel` of
torch) or by its inputs (`RowwiseParallel`), attention by its heads. The ranks of a replica read the same samples and
hold all that is not divided (embeddings, norms) whole; activations between layers are whole and equal on them. A layer
of BERT takes two all-reduces of its activations forward and two backward: the input of query, key and value becomes
one `DTensor`, so that its three gradients are summed here before they are summed over ranks.

Ranks of a replica are seeded alike, so that dropout of whole tensors is the same on each. Within attention each rank
has random numbers of its own, so that dropout differs from head to head as it does on one rank: which probabilities
are dropped is another draw than on one rank, of the same distribution, and a step depends on nothing but seed and step
as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dlbench.node.sync.timing import Clock
from dlbench.specs.layers import Layer

_STYLES: dict[str, type[ParallelStyle]] = {"column": ColwiseParallel, "row": RowwiseParallel}


class SharedLayers:
    """The layers of one rank of a replica, and what their all-reduces take."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, clock: Clock) -> None:
        """`mesh`: of one dimension, the ranks of a replica."""
        self._mesh, self._clock = mesh, clock
        self._generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self._step_seed, self._draws = 0, 0
        self._whole: torch.Tensor | None = None  # State of the generator outside of the heads.

    def divide(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        """Leaves this rank its part of `layers`. The parameters, equal on all ranks, become `DTensor` on the mesh."""
        styles: dict[str, ParallelStyle] = {}
        by_head = set()
        for layer in layers:
            if layer.tensor == "head":
                by_head.add(layer.name.rpartition(".")[0])
            elif layer.tensor:
                styles[layer.name] = _STYLES[layer.tensor]()
        parallelize_module(model, self._mesh, styles, src_data_rank=None)
        for name in sorted(by_head):
            attention: Any = model.get_submodule(name)
            attention.num_heads //= self._mesh.size()
            attention.register_forward_pre_hook(self._enter_heads)
            attention.register_forward_hook(self._leave_heads)

    def _enter_heads(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if module.training:
            seed = self._generator.initial_seed()
            if seed != self._step_seed:
                self._step_seed, self._draws = seed, 0
            self._draws += 1
            self._whole = self._generator.get_state()
            own = seed + self._draws * self._mesh.size() + self._mesh.get_local_rank()
            self._generator.manual_seed(own % 2**63)
        return (DTensor.from_local(args[0], self._mesh, [Replicate()], run_check=False), *args[1:])

    def _leave_heads(self, module: nn.Module, args: object, output: object) -> None:
        if self._whole is not None:
            self._generator.set_state(self._whole)
            self._whole = None


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of an optimizer in parts of parameters on one mesh: foreach kernels take no others together."""
    parts: dict[DeviceMesh | None, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [group | {"params": parameters} for parameters in parts.values()]


@dataclass(kw_only=True)
class _WatchedReduce:
    """One all-reduce of activations."""

    phase: str  # forward or backward
    num_bytes: int
    waited: list[tuple[Any, Any]]  # In which computing stood still for it: handing over, and until it was back.


class WatchedReduces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the all-reduces of a replica's activations while it is in force, forward and backward; not those of norms.

    torch hands them over and waits for each where its result is read.
    """

    def __init__(self, mesh: DeviceMesh, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group, self._clock = mesh.get_group().group_name, clock
        self._on_way: dict[int, _WatchedReduce] = {}
        self.seen: list[_WatchedReduce] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they come here again with what they are made of
        operations, kwargs = torch.ops._c10d_functional, kwargs or {}
        if func is operations.all_reduce.default and args[2] == self._group:
            phase = "backward" if torch._C._current_graph_task_id() >= 0 else "forward"
            begin = self._clock.mark()
            result = func(*args, **kwargs)
            one = _WatchedReduce(phase=phase, num_bytes=args[0].nbytes, waited=[(begin, self._clock.mark())])
            self._on_way[result.untyped_storage().data_ptr()] = one
            self.seen.append(one)
            return result
        if func is operations.wait_tensor.default:
            found = self._on_way.pop(args[0].untyped_storage().data_ptr(), None)
            begin = self._clock.mark()
            result = func(*args, **kwargs)
            if found is not None:
                found.waited.append((begin, self._clock.mark()))
            return result
        return func(*args, **kwargs)
