"""The layers of a network without torch: elements, weights and multiply-adds per sample; without functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

WEIGHT_BYTES = 4  # Weights, gradients and the optimizer's values are fp32 in every precision of dlbench.
FLOPS_PER_MAC = 2  # One multiplication and one addition.
TRAINING_PASSES = 3
"""Forward, and backward twice: one product for the gradient of the weight, one for that of the input (Kaplan et al.,
"Scaling Laws for Neural Language Models" (2020), section 2.1)."""

INPUT_BYTES = 4  # Bytes of a value of the first input, which is fp32 in every precision.

Extents = tuple[int, ...]
Divided = Literal["", "column", "row", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer; x, y and w follow Kahira et al., HPDC 2021, table 3: elements per sample."""

    name: str  # Name of the module; `scores` and `mixture` are the two products of attention.
    kind: str  # conv2d, conv3d, linear, embedding, attention, norm, activation, pool.
    block: int  # Number of its block; a pipeline can be divided between blocks.
    inputs: int  # x
    outputs: int  # y; 0 for attention's scores, which a fused kernel does not store.
    weights: int = 0  # w: parameters.
    shared_weights: int = 0  # Parameters of an earlier layer that this layer uses too.
    macs: int = 0  # Multiply-adds of the forward pass.
    channels: int = 0  # C: input channels or features; 0 if there are none.
    filters: int = 0  # F: output channels or features.
    extents: Extents = ()  # Extents of the input without channels; empty if it is not an image or volume.
    kernel: int = 1  # Edge length of the window of an output element.
    stride: int = 1  # Input elements between neighbouring windows, in each dimension.
    tensor: Divided = ""
    """Division by tensor parallelism (Shoeybi et al., Megatron-LM (2019), section 3); empty: none."""
    heads: int = 0  # Attention heads.
    has_gradient: bool = True  # Whether the gradient of its input is computed.

    @property
    def is_product(self) -> bool:
        """Returns whether the layer has weights that can be divided by filters or channels."""
        return self.kind in ("conv2d", "conv3d", "linear")

    @property
    def reach(self) -> int:
        """Planes beyond a slab of its input on either side that its windows need."""
        return (self.kernel - 1) // 2

    def slab_inputs(self, slabs: int) -> float:
        """Returns the elements of a slab of its input with the planes beyond."""
        return self.inputs * (1 / slabs + 2 * self.reach / self.extents[0])

    def passes(self, *, backward: bool) -> int:
        """Returns multiply-adds of the forward or backward pass; backward has one product or two."""
        if backward and self.has_gradient:
            return 2 * self.macs
        return self.macs


class Layers(list[Layer]):
    """A list of layers under construction: each call appends a layer, whose input is the output of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.block = 0

    def conv(
        self, name: str, channels: int, filters: int, extents: Extents, kernel: int, stride: int = 1, bias: bool = False
    ) -> Extents:
        """Appends a padded convolution and returns the extents of its output, which only the stride changes."""
        out = tuple(-(-extent // stride) for extent in extents)
        weights = kernel ** len(extents) * channels * filters
        self.append(
            Layer(
                name=name,
                kind=f"conv{len(extents)}d",
                block=self.block,
                inputs=channels * math.prod(extents),
                outputs=filters * math.prod(out),
                weights=weights + filters * bias,
                macs=weights * math.prod(out),
                channels=channels,
                filters=filters,
                extents=extents,
                kernel=kernel,
                stride=stride,
                has_gradient=bool(self),  # the first one reads the sample itself
            )
        )
        return out

    def linear(
        self, name: str, channels: int, filters: int, rows: int = 1, *, tied: bool = False, tensor: Divided = ""
    ) -> None:
        """Appends a dense layer on `rows` vectors per sample; `tied`: its matrix belongs to an earlier layer."""
        matrix = channels * filters
        shared = matrix if tied else 0
        self.append(
            Layer(
                name=name,
                kind="linear",
                block=self.block,
                inputs=rows * channels,
                outputs=rows * filters,
                weights=filters + matrix - shared,
                shared_weights=shared,
                macs=rows * matrix,
                channels=channels,
                filters=filters,
                tensor=tensor,
            )
        )

    def other(self, name: str, kind: str, inputs: int, outputs: int | None = None, **form: Any) -> None:
        """Appends any other layer; `outputs`: None if equal to `inputs`; `form`: further fields of `Layer`."""
        if outputs is None:
            outputs = inputs
        self.append(Layer(name=name, kind=kind, block=self.block, inputs=inputs, outputs=outputs, **form))


def cut_layers(layers: Sequence[Layer], ranks: int) -> tuple[Layer, ...]:
    """Returns the leading layers, in whole blocks, whose depth `ranks` slabs divide without cutting a pooled window."""
    cut: list[Layer] = []
    for _, block in groupby(layers, key=attrgetter("block")):
        members = list(block)
        if not all(layer.extents and layer.extents[0] % (ranks * layer.stride) == 0 for layer in members):
            break
        cut += members
    return tuple(cut)


def cut_bytes(layers: Sequence[Layer], ranks: int, *, neighbours: float, element_bytes: int) -> tuple[float, float]:
    """Returns the bytes of halos, and of the last slabs when all are gathered, that a rank sends for a sample in both
    passes. `neighbours`: 1 at an end, otherwise 2. `element_bytes`: those of an activation; the first input is fp32.
    """
    cut = cut_layers(layers, ranks)
    halo_bytes = 0.0
    for layer in cut:
        plane = layer.inputs / layer.extents[0]
        if layer.has_gradient:
            halo_bytes += 2 * neighbours * layer.reach * plane * element_bytes
        else:
            halo_bytes += neighbours * layer.reach * plane * INPUT_BYTES
    return halo_bytes, (ranks - 1) / ranks * cut[-1].outputs * element_bytes
