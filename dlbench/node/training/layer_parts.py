"""Times one layer of a network, whole and at 1/p of its filters, channels and extent, on the device of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from dlbench.node.models.build import AUTOCAST_TYPES
from dlbench.records.out_of_core import LayerOrder, LayerPartTimes, LayerPhase, PartTimes
from dlbench.specs.layers import Layer
from dlbench.specs.workload import Workload

_SAMPLE_S = 0.02  # A sample repeats a call for about this time.

Part = tuple[Literal["whole", "filters", "channels", "extent"], int, Layer]
"""What is divided, by how many ranks, and the share of one, whose inputs and outputs are those of the whole layer."""


def time_parts(order: LayerOrder, device: torch.device, device_name: str) -> LayerPartTimes:
    """Times the phases of all parts; each repeat times every part, so that a slow moment does not meet one alone."""
    workload, threads = order.plan.workload, torch.get_num_threads()
    torch.backends.cudnn.benchmark = device.type == "cuda" and workload.train.cudnn_benchmark != "off"
    layers = {layer.name: layer for layer in workload.model.layer_table(workload.data)}
    timers: list[tuple[Timer, list[float]]] = []
    parts = []
    for cut, count, share in _parts_of(layers[order.layer], order.counts):
        seconds: dict[LayerPhase, list[float]] = {}
        for phase, call in _calls_of(cut, count, share, workload, device).items():
            seconds[phase] = []
            timers.append((Timer("call()", globals={"call": call}, num_threads=threads), seconds[phase]))
        parts.append({"cut": cut, "count": count, "seconds": seconds})
    for _ in range(order.repeats):
        for timer, samples in timers:
            samples.append(timer.blocked_autorange(min_run_time=_SAMPLE_S).mean)
    return LayerPartTimes(device=device_name, parts=tuple(map(PartTimes.model_validate, parts)))


def _parts_of(layer: Layer, counts: Sequence[int]) -> Iterator[Part]:
    if layer.kind == "linear":
        layer = replace(layer, extents=(layer.inputs // layer.channels,))  # vectors per sample
    yield "whole", 1, layer
    first, *others = layer.extents
    for count in counts:
        if layer.filters % count == 0:
            yield "filters", count, replace(layer, filters=layer.filters // count)
        if layer.channels % count == 0:
            yield "channels", count, replace(layer, channels=layer.channels // count)
        if first % (count * layer.stride) == 0:
            yield "extent", count, replace(layer, extents=(first // count, *others))


def _calls_of(
    cut: str, count: int, layer: Layer, workload: Workload, device: torch.device
) -> dict[LayerPhase, Callable[[], object]]:
    """Returns the phases of a part; its tensors have the type and memory format in which the network computes."""
    batch, dtype = workload.train.batch_per_rank, AUTOCAST_TYPES.get(workload.train.precision)
    memory_format = torch.contiguous_format
    if workload.model.order == "channels-last" and layer.kind != "linear":
        memory_format = torch.channels_last if layer.kind == "conv2d" else torch.channels_last_3d

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format).requires_grad_()

    extents, padding = list(layer.extents), [layer.kernel // 2] * len(layer.extents)
    if cut == "extent":  # a part between two others, with the halos that they sent
        extents[0] += layer.kernel - layer.stride
        padding[0] = 0
    if layer.kind == "linear":
        inputs, weight = new(batch, *extents, layer.channels), new(layer.filters, layer.channels)
        compute: Callable[..., torch.Tensor] = functional.linear
    else:
        inputs = new(batch, layer.channels, *extents)
        weight = new(layer.filters, layer.channels, *[layer.kernel] * len(extents))
        convolve = functional.conv2d if layer.kind == "conv2d" else functional.conv3d
        compute = partial(convolve, stride=layer.stride, padding=padding)
    output = compute(inputs, weight)
    wanted = [weight, inputs] if layer.has_gradient else [weight]
    gradient = torch.randn_like(output)
    calls: dict[LayerPhase, Callable[[], object]] = {
        "forward": partial(compute, inputs, weight),
        "backward": partial(torch.autograd.grad, output, wanted, gradient, retain_graph=True),
    }
    if cut != "whole":
        # By filters, a rank takes its part of the output's gradient, and outputs are joined. By channels, it takes its
        # part of the input, and gradients of the input are joined; by extent, a part with halos, and outputs.
        taken = output if cut == "filters" else inputs
        joined = inputs if cut == "channels" else output
        has_features_last = layer.kind == "linear"
        dimension = 2 if has_features_last != (cut == "extent") else 1
        whole = torch.cat([taken.detach()] * count, dimension)
        share = whole.narrow(dimension, 0, taken.shape[dimension])
        pieces = [joined.detach().clone() for _ in range(count)]
        calls["split"] = partial(torch.clone, share, memory_format=memory_format)
        calls["join"] = partial(torch.cat, pieces, dimension)
    return calls
