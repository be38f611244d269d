"""Spatial parallelism: ranks of a replica share each volume, cut along its depth (Dryden et al., IPDPS 2019).

Each rank computes the first layers on its slab. Before a convolution it gets the planes at the cuts from its
neighbours; their gradients go back. Where slabs become too thin to be pooled, all ranks gather them and compute the
other layers on whole volumes, so that all have equal gradients there.
"""
# Never by convolutions of DTensors, which torch 2.13 computes without these planes: see findings/.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlbench.node.ranks import RankPlace
from dlbench.node.sync.fsdp.watched_comm import HALO, SLABS, CommWatch, Phase
from dlbench.node.sync.timing import median
from dlbench.records.exchange import Message
from dlbench.records.record import CollectiveWaits
from dlbench.specs.layers import cut_bytes, cut_layers
from dlbench.specs.plan import RunPlan

DEPTH = 2  # Dimension of a batch of volumes (N, C, depth, height, width) that is cut.


class SlabLayers:
    """The layers of one rank of a replica that computes on a slab of each volume."""

    def __init__(self, plan: RunPlan, place: RankPlace, device: torch.device, beat: Callable[[str], None]) -> None:
        train = plan.workload.train
        # DDP's hook marks the end of the backward pass.
        self._watch = CommWatch(device, lambda: None, beat, str(dist.get_backend()))
        self.end_step, self.evaluating = self._watch.end_step, self._watch.paused
        self._ranks = place.replica(plan.ranks_per_replica).ranks
        self._number = place.rank - self._ranks.start
        self._table = plan.workload.model.layer_table(plan.workload.data)
        self._cut = cut_layers(self._table, len(self._ranks))
        for first in range(0, place.size, len(self._ranks)):
            group = dist.new_group(list(range(first, first + len(self._ranks))))
            if first == self._ranks.start:
                self._group: Any = group
        neighbours = (place.rank - 1, place.rank + 1)
        self._neighbours = [rank if rank in self._ranks else None for rank in neighbours]
        self._samples = train.batch_per_rank * len(self._ranks)
        self._element_bytes = torch.float32.itemsize  # Of an activation; autocast decides by device.

    def divide(self, model: nn.Module) -> None:
        """Makes the first layers compute on slabs, and the others on gathered slabs."""
        for layer in self._cut:
            if layer.reach:
                convolution: Any = model.get_submodule(layer.name)
                convolution.padding = (0, *convolution.padding[1:])
                halo = _Halo(self._watch, self._group, self._neighbours, layer.name, layer.reach)
                convolution.register_forward_pre_hook(partial(_with_halo, halo))
        last = self._cut[-1].name
        model.get_submodule(last).register_forward_hook(partial(_gathered, partial(self._gather, last)))

    def _gather(self, name: str, slab: Tensor) -> Tensor:
        whole: Tensor = _Gathered.apply(slab, partial(self._all_gather, name), self._number)  # type: ignore[no-untyped-call]
        return whole

    def _all_gather(self, name: str, slab: Tensor) -> Tensor:
        self._element_bytes = slab.element_size()
        slabs = [torch.empty_like(slab, memory_format=torch.contiguous_format) for _ in self._ranks]
        whole = slab.new_empty([*slab.shape[:DEPTH], slab.shape[DEPTH] * len(slabs), *slab.shape[DEPTH + 1 :]])

        def run() -> None:
            dist.all_gather(slabs, slab.contiguous(), group=self._group)
            torch.cat(slabs, DEPTH, out=whole)

        self._watch.run_collective(run, whole, self._group, method=SLABS, phase="forward", module=name, num_tensors=1)
        return whole

    def waits(self) -> CollectiveWaits:
        """Returns this rank's time for halos and slabs in measured steps, with their copies, by phase."""
        exchange_s = defaultdict[str, float](float)
        for (_, phase), seconds in self._watch.seconds().items():
            exchange_s[phase] += seconds
        how = "each exchange of planes and slabs in the measured steps timed, with cutting and joining"
        if not self._watch.clock.marks_are_free:
            how = f"CUDA events of {len(self._watch.steps)} watched warm-up steps, scaled to the measured steps"
        return CollectiveWaits(exchange_s=exchange_s, evidence=how)

    def messages(self) -> list[Message]:
        """Returns the messages of the last step, with medians over watched steps."""
        between, messages = self._watch.clock.between, []
        watched_steps = [step.calls for step in self._watch.steps if len(step.calls) == len(self._watch.last)]
        for number, call in enumerate(self._watch.last):
            exchange_s = median(between(calls[number].handed, calls[number].done) for calls in watched_steps)
            messages.append(Message(num_bytes=call.num_bytes, num_tensors=1, method=call.method, exchange_s=exchange_s))
        return messages

    def watch(self, on: bool) -> None:
        """Begins or ends timing of single exchanges."""
        if on:
            self._watch.open({})
        else:
            self._watch.close()

    def result(self) -> tuple[float, bool]:
        """Returns the bytes that this rank sent in the last step, and whether they were as expected in every step."""
        sent_bytes = sum(call.sent_bytes for call in self._watch.last)
        return sent_bytes, list(self._watch.bytes_of_activations) == [self._expected_bytes]

    @property
    def _expected_bytes(self) -> int:
        """The bytes of planes and slabs that this rank sends in a step."""
        neighbours = sum(rank is not None for rank in self._neighbours)
        size, element_bytes = len(self._ranks), self._element_bytes
        return round(
            self._samples * sum(cut_bytes(self._table, size, neighbours=neighbours, element_bytes=element_bytes))
        )

    @property
    def text(self) -> str:
        """The slabs, and the counted and expected bytes of planes, in words."""
        depth, counted = self._cut[0].extents[0], sorted(self._watch.bytes_of_activations)
        return (
            f"slabs of {depth // len(self._ranks)} of {depth} planes through {len(self._cut)} layers; a rank sent "
            f"{' or '.join(map(str, counted))} bytes of planes and slabs in a step by count, {self._expected_bytes} "
            "expected"
        )


class _Halo:
    """The exchange of planes at the cuts of one layer with the neighbours of this rank."""

    def __init__(self, watch: CommWatch, group: Any, neighbours: list[int | None], name: str, reach: int) -> None:
        self._watch, self._group, self._neighbours = watch, group, neighbours
        self._name, self._reach = name, reach

    def extended(self, slab: Tensor) -> Tensor:
        """Returns the slab between the planes of the neighbours, or between zeros at the ends of the volume."""
        reach, planes = self._reach, slab.shape[DEPTH]
        shape = [*slab.shape[:DEPTH], planes + 2 * reach, *slab.shape[DEPTH + 1 :]]
        padded = torch.empty(shape, dtype=slab.dtype, device=slab.device, memory_format=_order(slab))
        beyond = padded.narrow(DEPTH, 0, reach), padded.narrow(DEPTH, planes + reach, reach)
        edges = slab.narrow(DEPTH, 0, reach), slab.narrow(DEPTH, planes - reach, reach)

        def run() -> None:
            padded.narrow(DEPTH, reach, planes).copy_(slab)
            for side, received in enumerate(self._swapped(edges)):
                if received is None:
                    beyond[side].zero_()
                else:
                    beyond[side].copy_(received)

        self._timed(run, "forward", edges[0])
        return padded

    def reduced(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of a slab, with what the neighbours add to it, from that of the extended slab."""
        reach = self._reach
        planes = gradient.shape[DEPTH] - 2 * reach
        inner = gradient.narrow(DEPTH, reach, planes).clone(memory_format=_order(gradient))
        beyond = gradient.narrow(DEPTH, 0, reach), gradient.narrow(DEPTH, planes + reach, reach)
        edges = inner.narrow(DEPTH, 0, reach), inner.narrow(DEPTH, planes - reach, reach)

        def run() -> None:
            for side, received in enumerate(self._swapped(beyond)):
                if received is not None:
                    edges[side].add_(received)

        self._timed(run, "backward", beyond[0])
        return inner

    def _swapped(self, planes: tuple[Tensor, Tensor]) -> list[Tensor | None]:
        """Sends planes to the neighbours before and after; returns what these sent, None where there is none."""
        operations: list[dist.P2POp] = []
        received: list[Tensor | None] = [None, None]
        for side, rank in enumerate(self._neighbours):
            if rank is not None:
                buffer = torch.empty_like(planes[side], memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.isend, planes[side].contiguous(), rank, group=self._group))
                operations.append(dist.P2POp(dist.irecv, buffer, rank, group=self._group))
                received[side] = buffer
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def _timed(self, run: Callable[[], None], phase: Phase, planes: Tensor) -> None:
        sends = sum(rank is not None for rank in self._neighbours)
        fields = {"method": HALO, "phase": phase, "module": self._name}
        self._watch.run_collective(
            run, planes, self._group, num_tensors=sends, num_bytes=sends * planes.nbytes, **fields
        )


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slab: Tensor, halo: _Halo) -> Tensor:
        ctx.halo = halo
        return halo.extended(slab)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.halo.reduced(gradients[0]), None


class _Gathered(torch.autograd.Function):
    # All ranks of a replica compute the same loss of the whole volume. The sum of their gradients, of which each keeps
    # its slab, is thus a multiple; DDP's mean over all ranks then is the gradient of the mean loss of the replicas.

    @staticmethod
    def forward(ctx: Any, slab: Tensor, gather: Callable[[Tensor], Tensor], number: int) -> Tensor:
        ctx.first, ctx.planes = number * slab.shape[DEPTH], slab.shape[DEPTH]
        return gather(slab)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ranks = gradients[0].shape[DEPTH] // ctx.planes
        return gradients[0].narrow(DEPTH, ctx.first, ctx.planes) * ranks, None, None


def _with_halo(halo: _Halo, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    padded: Tensor = _WithHalo.apply(args[0], halo)  # type: ignore[no-untyped-call]
    return (padded,)


def _gathered(gather: Callable[[Tensor], Tensor], module: nn.Module, args: object, output: Tensor) -> Tensor:
    return gather(output)


def _order(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.contiguous_format
    return torch.channels_last_3d
