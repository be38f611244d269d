"""Times one layer of a network, whole and at 1/p of its filters, channels and extent, on the device of a rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dlbench.node.models.build import AUTOCAST_TYPES
from dlbench.node.training.precision import Precision
from dlbench.records.layer_parts import LayerOrder, LayerTimes, Phase
from dlbench.specs.layers import LayerPart, parts_of
from dlbench.specs.plan import RunPlan

_LEAST_SAMPLE_S = 0.02  # A sample repeats a call for at least this time.
_MAX_CALLS = 1000
_WARMUP_CALLS = 2  # Memory is allocated, and libraries choose their algorithms.

Call = Callable[[], object]


def time_parts(order: LayerOrder, device: torch.device, device_name: str) -> LayerTimes:
    """Times the phases of all parts; each repeat times every part, so that a slow moment does not meet one alone."""
    workload = order.plan.workload
    precision = Precision(workload.train, device)
    torch.backends.cudnn.benchmark = device.type == "cuda" and workload.train.cudnn_benchmark != "off"
    torch.manual_seed(workload.train.seed)
    (layer,) = (layer for layer in workload.model.layer_table(workload.data) if layer.name == order.layer)
    timers = [PartTimer(part, order.plan, device) for part in parts_of(layer, order.counts)]
    for _ in range(order.repeats):
        for timer in timers:
            timer.repeat()
    return LayerTimes(
        device=device_name,
        parts=tuple({phase: tuple(seconds) for phase, seconds in timer.samples_s.items()} for timer in timers),
        warnings=tuple(precision.early_warnings),
    )


class PartTimer:
    """The tensors, calls and times of a part; inputs and weights have the type in which the layer computes."""

    def __init__(self, part: LayerPart, plan: RunPlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._memory_format = torch.contiguous_format
        if plan.workload.model.order == "channels-last" and part.layer.extents:
            is_flat = len(part.layer.extents) == 2
            self._memory_format = torch.channels_last if is_flat else torch.channels_last_3d
        self._calls = self._phases(part)
        self._counts = {phase: self._count(call) for phase, call in self._calls.items()}
        self.samples_s: dict[Phase, list[float]] = {phase: [] for phase in self._calls}

    def repeat(self) -> None:
        """Times every phase once."""
        for phase, call in self._calls.items():
            self.samples_s[phase].append(self._mean_seconds(call, self._counts[phase]))

    def _phases(self, part: LayerPart) -> dict[Phase, Call]:
        layer, batch, rank = part.layer, self._plan.workload.train.batch_per_rank, len(part.layer.extents)
        if layer.kind == "linear":
            inputs = self._new(batch, layer.inputs // layer.channels, layer.channels)
            weight, dimensions = self._new(layer.filters, layer.channels), {"filters": 2, "channels": 2, "extent": 1}
            compute: Callable[..., Tensor] = functional.linear
        else:
            extents, padding = list(layer.extents), [layer.kernel // 2] * rank
            if part.cut == "extent":  # a part between two others, with the halos that they sent
                extents[0] += layer.kernel - layer.stride
                padding[0] = 0
            inputs = self._new(batch, layer.channels, *extents)
            weight = self._new(layer.filters, layer.channels, *[layer.kernel] * rank)
            dimensions = {"filters": 1, "channels": 1, "extent": 2}
            convolve = functional.conv2d if rank == 2 else functional.conv3d
            compute = partial(convolve, stride=layer.stride, padding=tuple(padding))
        output = compute(inputs, weight)
        wanted = [weight, inputs] if layer.has_gradient else [weight]
        gradient = torch.randn_like(output)
        calls: dict[Phase, Call] = {
            "forward": partial(compute, inputs, weight),
            "backward": partial(torch.autograd.grad, output, wanted, gradient, retain_graph=True),
        }
        if part.cut == "whole":
            return calls
        # By filters, a rank takes its part of the output's gradient, and outputs are joined. By channels, it takes its
        # part of the input, and gradients of the input are joined; by extent, a part with halos, and outputs.
        taken = output if part.cut == "filters" else inputs
        joined = inputs if part.cut == "channels" else output
        dimension = dimensions[part.cut]
        shape = list(taken.shape)
        shape[dimension] *= part.count
        share = self._new(*shape).detach().narrow(dimension, 0, taken.shape[dimension])
        pieces = [joined.detach().clone() for _ in range(part.count)]
        calls["split"] = partial(torch.clone, share, memory_format=self._memory_format)
        calls["join"] = partial(torch.cat, pieces, dimension)
        return calls

    def _new(self, *shape: int) -> Tensor:
        dtype = AUTOCAST_TYPES.get(self._plan.workload.train.precision, torch.float32)
        values = torch.randn(shape, device=self._device, dtype=dtype)
        return values.to(memory_format=self._memory_format).requires_grad_()

    def _count(self, call: Call) -> int:
        """Returns the number of calls of a sample, after warming up."""
        self._mean_seconds(call, _WARMUP_CALLS)
        seconds = self._mean_seconds(call, 1)
        return min(_MAX_CALLS, max(1, math.ceil(_LEAST_SAMPLE_S / max(seconds, 1e-9))))

    def _mean_seconds(self, call: Call, count: int) -> float:
        begun = self._now()
        for _ in range(count):
            call()
        return (self._now() - begun) / count

    def _now(self) -> float:
        """Returns a time in seconds, once the device has nothing left to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
