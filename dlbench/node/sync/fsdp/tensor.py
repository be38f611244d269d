"""Tensor parallelism: neighbouring ranks share the work of each layer (Shoeybi et al., Megatron-LM (2019), section 3).

What is divided is in the network's table of layers (`Layer.tensor`): a product by its outputs (`ColwiseParallel` of
torch) or by its inputs (`RowwiseParallel`), attention by its heads. The ranks of a replica read the same samples and
hold all that is not divided (embeddings, norms) whole; activations between layers are whole and equal on them. A layer
of BERT takes four all-reduces of its activations: of the partial sums behind output and reduce in the forward pass, of
the gradients of what query, key and value read, and expand, in the backward pass. torch would order them itself, those
of query, key and value one by one; here they are made where they can be counted and timed.

Ranks of a replica are seeded alike, so that dropout of whole tensors is the same on each. Within attention each rank
has random numbers of its own, so that dropout differs from head to head as it does on one rank: which probabilities
are dropped is another draw than on one rank, of the same distribution, and depends on nothing but seed and step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from dlbench.node.sync.fsdp.watched_comm import ACTIVATIONS, CommWatch
from dlbench.specs.plan import RunPlan


class SharedLayers:
    """The layers of one rank of a replica. `mesh`: of one dimension, the ranks of the replica."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, watch: CommWatch, plan: RunPlan) -> None:
        self._mesh, self._watch = mesh, watch
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._step_seed, self._draws = 0, 0
        self._whole: Tensor | None = None  # State of the generator outside of the heads.
        model, data, train = plan.workload.model, plan.workload.data, plan.workload.train
        self._layers = [layer for layer in model.layer_table(data) if layer.tensor]
        samples = train.batch_per_rank * plan.ranks_per_replica
        # Forward behind each product that is divided by its inputs, backward before those that it is fed by.
        elements = 2 * samples * sum(layer.outputs for layer in self._layers if layer.tensor == "row")
        self._activation_bytes: int | None = elements * torch.float32.itemsize
        if train.precision not in ("fp32", "tf32") or model.padding == "unpadded":
            self._activation_bytes = None  # Of other types, or of as many tokens as a batch has.

    def divide(self, model: nn.Module) -> None:
        """Leaves this rank its part of each layer, of parameters that are equal on all ranks."""
        by_head = dict.fromkeys(layer.name.rpartition(".")[0] for layer in self._layers if layer.tensor == "head")
        styles: dict[str, ParallelStyle] = {}
        for layer in self._layers:
            if layer.tensor == "column":
                styles[layer.name] = ColwiseParallel()
                if layer.name.rpartition(".")[0] not in by_head:
                    model.get_submodule(layer.name).register_forward_pre_hook(self._reader(layer.name))
            elif layer.tensor == "row":
                styles[layer.name] = RowwiseParallel(output_layouts=Partial())
        for name in by_head:
            attention: Any = model.get_submodule(name)
            attention.num_heads //= self._mesh.size()
            attention.register_forward_pre_hook(self._reader(name))
            attention.register_forward_pre_hook(self._enter_heads)
            attention.register_forward_hook(self._leave_heads)
        parallelize_module(model, self._mesh, styles, src_data_rank=None)
        for name, style in styles.items():
            if isinstance(style, RowwiseParallel):
                hook = partial(self._sum, phase="forward", name=name)
                model.get_submodule(name).register_forward_hook(lambda module, args, part, hook=hook: hook(part))

    def _reader(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        """A hook that makes a module's input one `DTensor`, whose gradients are summed when this rank has all of it."""

        def share(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = self._sum(args[0], "backward", name)
            shared = DTensor.from_local(whole, self._mesh, [Replicate()], grad_placements=[Partial()])
            return (shared, *args[1:])

        return share

    def _sum(self, tensor: Tensor, phase: Literal["forward", "backward"], name: str) -> Tensor:
        """The tensor; over the ranks of the replica it is summed in the forward pass, or its gradient in the other."""
        group, what = self._mesh.get_group(), {"method": ACTIVATIONS, "phase": phase, "module": name, "num_tensors": 1}

        def add(part: Tensor) -> None:
            self._watch.carry(lambda: dist.all_reduce(part, group=group), part, group, **what)

        found: Tensor = _Sum.apply(tensor, add, phase)  # type: ignore[no-untyped-call]
        return found

    def evidence(self) -> tuple[bool, str]:
        """Whether the bytes that were counted in every step are those of the formula, and both in words."""
        size, counted = self._mesh.size(), sorted(self._watch.bytes_of_activations)
        text = f"{' or '.join(map(str, counted))} bytes of activations that a rank sends were counted in a step"
        if self._activation_bytes is None:
            return bool(counted) and counted[0] > 0, text
        wanted = round(2 * (size - 1) / size * self._activation_bytes)
        return counted == [wanted], f"{text}, {wanted} expected of {len(self._layers)} divided layers"

    def _enter_heads(self, module: nn.Module, args: object) -> None:
        if module.training:
            seed = self._generator.initial_seed()
            if seed != self._step_seed:
                self._step_seed, self._draws = seed, 0
            self._draws += 1
            self._whole = self._generator.get_state()
            own = seed + self._draws * self._mesh.size() + self._mesh.get_local_rank()
            self._generator.manual_seed(own % 2**63)

    def _leave_heads(self, module: nn.Module, args: object, output: object) -> None:
        if self._whole is not None:
            self._generator.set_state(self._whole)
            self._whole = None


class _Sum(torch.autograd.Function):
    """Sums over ranks what they have in one of the passes; in the other it is whole on each of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, add: Callable[[Tensor], None], phase: str) -> Tensor:
        ctx.add = add if phase == "backward" else None
        return tensor.view_as(tensor) if phase == "backward" else _summed(tensor, add)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] if ctx.add is None else _summed(gradients[0], ctx.add), None, None


def _summed(part: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    add(whole)
    return whole


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of an optimizer in parts of parameters on one mesh: foreach kernels take no others together."""
    parts: dict[DeviceMesh | None, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [group | {"params": parameters} for parameters in parts.values()]
