"""Times one layer of a network, whole and at 1/p of its filters, channels and extent, on the device of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from dlbench.node.models.build import AUTOCAST_TYPES
from dlbench.records.out_of_core import LayerOrder, LayerPhase, LayerTimes
from dlbench.specs.layers import LayerPart
from dlbench.specs.workload import Workload

_SAMPLE_S = 0.02  # A sample repeats a call for about this time.


def time_parts(order: LayerOrder, device: torch.device, device_name: str) -> LayerTimes:
    """Times the phases of all parts; each repeat times every part, so that a slow moment does not meet one alone."""
    workload, threads = order.plan.workload, torch.get_num_threads()
    torch.backends.cudnn.benchmark = device.type == "cuda" and workload.train.cudnn_benchmark != "off"
    timers = []
    for part in order.parts():
        calls = _calls_of(part, workload, device)
        timers.append({phase: Timer("call()", globals={"call": calls[phase]}, num_threads=threads) for phase in calls})
    repeats = []
    for _ in range(order.repeats):
        seconds: list[dict[LayerPhase, float]] = []
        for phases in timers:
            measured = {phase: timer.blocked_autorange(min_run_time=_SAMPLE_S) for phase, timer in phases.items()}
            seconds.append({phase: measured[phase].mean for phase in measured})
        repeats.append(tuple(seconds))
    return LayerTimes(device=device_name, repeats=tuple(repeats))


def _calls_of(part: LayerPart, workload: Workload, device: torch.device) -> dict[LayerPhase, Callable[[], object]]:
    """Returns the phases of a part; its tensors have the type and memory format in which the network computes."""
    layer, batch, dtype = part.layer, workload.train.batch_per_rank, AUTOCAST_TYPES.get(workload.train.precision)
    memory_format = torch.contiguous_format
    if workload.model.order == "channels-last" and layer.kind != "linear":
        memory_format = torch.channels_last if layer.kind == "conv2d" else torch.channels_last_3d

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format).requires_grad_()

    extents, padding = list(layer.extents), [layer.kernel // 2] * len(layer.extents)
    if part.cut == "extent":  # a part between two others, with the halos that they sent
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
    if part.cut != "whole":
        # By filters, a rank takes its part of the output's gradient, and outputs are joined. By channels, it takes its
        # part of the input, and gradients of the input are joined; by extent, a part with halos, and outputs.
        taken = output if part.cut == "filters" else inputs
        joined = inputs if part.cut == "channels" else output
        has_features_last = layer.kind == "linear"
        dimension = 2 if has_features_last != (part.cut == "extent") else 1
        whole = torch.cat([taken.detach()] * part.count, dimension)
        share = whole.narrow(dimension, 0, taken.shape[dimension])
        pieces = [joined.detach().clone() for _ in range(part.count)]
        calls["split"] = partial(torch.clone, share, memory_format=memory_format)
        calls["join"] = partial(torch.cat, pieces, dimension)
    return calls
