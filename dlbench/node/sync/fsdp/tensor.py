"""Tensor parallelism: neighbouring ranks share the work of each layer (Shoeybi et al., Megatron-LM 2019, section 3)."""
# The all-reduces of activations are made here and not by torch, so that they can be counted and timed.

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
    """The divided layers of one rank of a replica; `mesh` has one dimension, the ranks of the replica."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, watch: CommWatch, plan: RunPlan) -> None:
        self._mesh, self._watch = mesh, watch
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._step_seed, self._draws = 0, 0
        self._outer_state: Tensor | None = None  # State of the generator before the heads of a layer.
        model, data, train = plan.workload.model, plan.workload.data, plan.workload.train
        self._layers = [layer for layer in model.layer_table(data) if layer.tensor]
        samples = train.batch_per_rank * plan.ranks_per_replica
        # An all-reduce after each product divided by its inputs, and in the backward pass one before its producers.
        elements = 2 * samples * sum(layer.outputs for layer in self._layers if layer.tensor == "row")
        self._activation_bytes: int | None = elements * torch.float32.itemsize
        if train.precision not in ("fp32", "tf32") or model.padding == "unpadded":
            self._activation_bytes = None  # other types, or the number of tokens differs between batches

    def divide(self, model: nn.Module) -> None:
        """Reduces each layer to this rank's part, of parameters that are equal on all ranks."""
        attentions = dict.fromkeys(layer.name.rpartition(".")[0] for layer in self._layers if layer.tensor == "head")
        styles: dict[str, ParallelStyle] = {}
        for layer in self._layers:
            if layer.tensor == "column":
                styles[layer.name] = ColwiseParallel()
                if layer.name.rpartition(".")[0] not in attentions:
                    model.get_submodule(layer.name).register_forward_pre_hook(self._input_hook(layer.name))
            elif layer.tensor == "row":
                styles[layer.name] = RowwiseParallel(output_layouts=Partial())
        for name in attentions:
            attention: Any = model.get_submodule(name)
            attention.num_heads //= self._mesh.size()
            attention.register_forward_pre_hook(self._input_hook(name))
            attention.register_forward_pre_hook(self._enter_heads)
            attention.register_forward_hook(self._leave_heads)
        parallelize_module(model, self._mesh, styles, src_data_rank=None)
        for name, style in styles.items():
            if isinstance(style, RowwiseParallel):
                model.get_submodule(name).register_forward_hook(self._output_hook(name))

    def _input_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        """Returns a hook that makes a module's input a `DTensor` whose gradient is summed once this rank's is whole."""

        def replicate(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            replicated = self._sum(args[0], "backward", name)
            return (DTensor.from_local(replicated, self._mesh, [Replicate()], grad_placements=[Partial()]), *args[1:])

        return replicate

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:

        def add(module: nn.Module, args: Any, partial_output: Tensor) -> Tensor:
            return self._sum(partial_output, "forward", name)

        return add

    def _sum(self, tensor: Tensor, phase: Literal["forward", "backward"], name: str) -> Tensor:
        group = self._mesh.get_group()

        def add(part: Tensor) -> None:
            call = partial(dist.all_reduce, part, group=group)
            self._watch.run_collective(call, part, group, method=ACTIVATIONS, phase=phase, module=name, num_tensors=1)

        output: Tensor = _Sum.apply(tensor, add, phase)  # type: ignore[no-untyped-call]
        return output

    def evidence(self) -> tuple[bool, str]:
        """Returns whether the bytes counted in every step are those of the formula, and both in words."""
        size, counted = self._mesh.size(), sorted(self._watch.bytes_of_activations)
        text = f"a rank sent {' or '.join(map(str, counted))} bytes of activations in a step by count"
        if self._activation_bytes is None:
            return bool(counted) and counted[0] > 0, text
        expected = round(2 * (size - 1) / size * self._activation_bytes)
        return counted == [expected], f"{text}, {expected} expected for {len(self._layers)} divided layers"

    def _enter_heads(self, module: nn.Module, args: object) -> None:
        if module.training:
            seed = self._generator.initial_seed()
            if seed != self._step_seed:
                self._step_seed, self._draws = seed, 0
            self._draws += 1
            self._outer_state = self._generator.get_state()
            rank_seed = seed + self._draws * self._mesh.size() + self._mesh.get_local_rank()
            self._generator.manual_seed(rank_seed % 2**63)

    def _leave_heads(self, module: nn.Module, args: object, output: object) -> None:
        if self._outer_state is not None:
            self._generator.set_state(self._outer_state)
            self._outer_state = None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, add: Callable[[Tensor], None], phase: str) -> Tensor:
        if phase == "backward":
            ctx.add = add
            return tensor.view_as(tensor)
        ctx.add = None
        return _summed(tensor, add)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0]
        if ctx.add is not None:
            gradient = _summed(gradient, ctx.add)
        return gradient, None, None


def _summed(part: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    add(total)
    return total


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Splits a group of an optimizer by the mesh of its parameters: foreach kernels take one mesh at a time."""
    parts: dict[DeviceMesh | None, list[Any]] = {}
    for parameter in group["params"]:
        parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [group | {"params": parameters} for parameters in parts.values()]
