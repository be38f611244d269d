"""Layers that ranks of a replica compute together: tensor parallelism, in which neighbouring ranks share the work of
each layer (Shoeybi et al., Megatron-LM 2019, section 3), and spatial parallelism, in which they share each volume, cut
along its depth (Dryden et al., IPDPS 2019).

In the latter each rank computes the first layers on its slab. Before a convolution it gets the planes at the cuts from
its neighbours; their gradients go back. Where slabs become too thin to be pooled, all ranks gather them and compute the
other layers on whole volumes, so that all have equal gradients there.
"""
# The all-reduces of activations are made here and not by torch, so that they can be counted and timed. Slabs are never
# computed by convolutions of DTensors, which torch 2.13 computes without the neighbours' planes: see findings/.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.fsdp.watched_comm import ACTIVATIONS, HALO, SLABS, CommWatch, Phase
from dlbench.node.sync.timing import messages_of
from dlbench.records.exchange import Message
from dlbench.records.record import CollectiveWaits
from dlbench.specs.layers import Layer, cut_bytes, cut_layers
from dlbench.specs.plan import RunPlan

DEPTH = 2  # Dimension of a batch of volumes (N, C, depth, height, width) that is cut.


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


class SlabLayers:
    """The layers of one rank of a replica that computes on a slab of each volume."""

    def __init__(self, plan: RunPlan, place: RankPlace, device: torch.device, beat: Callable[[str], None]) -> None:
        # DDP's hook marks the end of the backward pass.
        self.watch = CommWatch(device, lambda: None, beat, str(dist.get_backend()))
        self.ranks = place.replica(plan.ranks_per_replica).ranks
        self.number = place.rank - self.ranks.start
        for first in range(0, place.size, len(self.ranks)):
            group = dist.new_group(list(range(first, first + len(self.ranks))))
            if first == self.ranks.start:
                self.group: Any = group
        neighbours = (place.rank - 1, place.rank + 1)
        self.neighbours = [rank if rank in self.ranks else None for rank in neighbours]
        self.num_neighbours = sum(rank is not None for rank in self.neighbours)
        self._layers = plan.workload.model.layer_table(plan.workload.data)
        self._cut = cut_layers(self._layers, len(self.ranks))
        self._samples = plan.workload.train.batch_per_rank * len(self.ranks)
        self.element_bytes = torch.float32.itemsize  # Of an activation; autocast decides by device.

    def divide(self, model: nn.Module) -> None:
        """Makes the first layers compute on slabs, and the others on gathered slabs."""
        for layer in self._cut:
            if layer.reach:
                convolution: Any = model.get_submodule(layer.name)
                convolution.padding = (0, *convolution.padding[1:])
                convolution.register_forward_pre_hook(partial(self._extend, layer))
        model.get_submodule(self._cut[-1].name).register_forward_hook(self._gather)

    def _extend(self, layer: Layer, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (_WithHalo.apply(args[0], self, layer),)  # type: ignore[no-untyped-call]

    def _gather(self, module: nn.Module, args: object, slab: Tensor) -> Tensor:
        whole: Tensor = _Gathered.apply(slab, self)  # type: ignore[no-untyped-call]
        return whole

    def swap(self, layer: Layer, phase: Phase, run: Callable[[], Tensor], planes: Tensor) -> Tensor:
        """Returns what `run` returns, which sends `planes` to each neighbour once, and times it."""
        num_bytes = self.num_neighbours * planes.nbytes
        fields = {"method": HALO, "phase": phase, "module": layer.name, "num_tensors": self.num_neighbours}
        swapped: Tensor = self.watch.run_collective(run, planes, self.group, num_bytes=num_bytes, **fields)
        return swapped

    def received(self, planes: Sequence[Tensor]) -> list[Tensor | None]:
        """Sends planes to the neighbours before and after; returns what these sent, None where there is none."""
        operations: list[dist.P2POp] = []
        buffers: list[Tensor | None] = [None, None]
        for side, rank in enumerate(self.neighbours):
            if rank is not None:
                buffer = torch.empty_like(planes[side], memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.isend, planes[side].contiguous(), rank, group=self.group))
                operations.append(dist.P2POp(dist.irecv, buffer, rank, group=self.group))
                buffers[side] = buffer
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return buffers

    def waits(self) -> CollectiveWaits:
        """Returns this rank's time for planes and slabs in measured steps, with their copies, by phase."""
        how = "each exchange of planes and slabs in the measured steps timed, with cutting and joining"
        return self.watch.waits(how, "")

    def messages(self) -> list[Message]:
        """Returns the messages of the last step, with medians over watched steps."""
        steps = [(None, step.calls) for step in self.watch.steps]
        return list(messages_of(self.watch.last, steps, self.watch.clock))

    def evidence(self) -> tuple[float, bool, str]:
        """Returns the bytes that this rank sent in the last step, whether every step had those expected, and both."""
        size, depth, counted = len(self.ranks), self._cut[0].extents[0], sorted(self.watch.bytes_of_activations)
        sent = cut_bytes(self._layers, size, neighbours=self.num_neighbours, element_bytes=self.element_bytes)
        expected = round(self._samples * sum(sent))
        text = (
            f"slabs of {depth // size} of {depth} planes through {len(self._cut)} layers; a rank sent "
            f"{' or '.join(map(str, counted))} bytes of planes and slabs in a step by count, {expected} expected"
        )
        return sum(call.sent_bytes for call in self.watch.last), counted == [expected], text


class _WithHalo(torch.autograd.Function):
    # A slab between the planes of the neighbours, or between zeros at the ends of the volume.

    @staticmethod
    def forward(ctx: Any, slab: Tensor, layers: SlabLayers, layer: Layer) -> Tensor:
        ctx.layers, ctx.layer = layers, layer
        edges = _outermost(slab, layer.reach)

        def run() -> Tensor:
            extended = functional.pad(slab, (0, 0, 0, 0, layer.reach, layer.reach))
            for planes, received in zip(_outermost(extended, layer.reach), layers.received(edges), strict=True):
                if received is not None:
                    planes.copy_(received)
            return extended

        return layers.swap(layer, "forward", run, edges[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        layers, reach, gradient = ctx.layers, ctx.layer.reach, gradients[0]
        beyond = _outermost(gradient, reach)

        def run() -> Tensor:
            inner = gradient.narrow(DEPTH, reach, gradient.shape[DEPTH] - 2 * reach).clone()
            for planes, received in zip(_outermost(inner, reach), layers.received(beyond), strict=True):
                if received is not None:
                    planes.add_(received)
            return inner

        return layers.swap(ctx.layer, "backward", run, beyond[0]), None, None


class _Gathered(torch.autograd.Function):
    # All ranks of a replica compute the same loss of the whole volume. The sum of their gradients, of which each keeps
    # its slab, is thus a multiple; DDP's mean over all ranks then is the gradient of the mean loss of the replicas.

    @staticmethod
    def forward(ctx: Any, slab: Tensor, layers: SlabLayers) -> Tensor:
        ctx.layers, ctx.planes, layers.element_bytes = layers, slab.shape[DEPTH], slab.element_size()
        slabs = [torch.empty_like(slab, memory_format=torch.contiguous_format) for _ in layers.ranks]
        whole = slab.new_empty([*slab.shape[:DEPTH], ctx.planes * len(slabs), *slab.shape[DEPTH + 1 :]])

        def run() -> None:
            dist.all_gather(slabs, slab.contiguous(), group=layers.group)
            torch.cat(slabs, DEPTH, out=whole)

        fields = {"method": SLABS, "phase": "forward", "module": "", "num_tensors": 1}
        layers.watch.run_collective(run, whole, layers.group, **fields)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = ctx.layers.number * ctx.planes
        return gradients[0].narrow(DEPTH, first, ctx.planes) * len(ctx.layers.ranks), None


def _outermost(tensor: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Returns the first and the last planes of a tensor, as views."""
    return tensor.narrow(DEPTH, 0, planes), tensor.narrow(DEPTH, tensor.shape[DEPTH] - planes, planes)
