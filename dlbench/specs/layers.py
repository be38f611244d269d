"""The layers of a network without torch: elements, weights and multiply-adds per sample.

A layer is a module that computes; names are those of the torch half. Dropout, reshaping, sums and what is called as a
function (activations within blocks) are not listed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

FLOPS_PER_MAC = 2  # One multiplication and one addition.
TRAINING_PASSES = 3
"""Forward, and backward twice: one product for the gradient of the weight, one for that of the input (Kaplan et al.,
"Scaling Laws for Neural Language Models" (2020), section 2.1)."""

Extents = tuple[int, ...]
Divided = Literal["", "column", "row", "head"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer; x, y and w follow Kahira et al., HPDC 2021, table 3: elements per sample."""

    name: str  # Of the module, with `scores` and `mixture` for the two products of attention.
    kind: str  # conv2d, conv3d, linear, embedding, attention, norm, activation, pool.
    block: int  # Number of the block it belongs to: a pipeline may be cut between blocks.
    inputs: int  # x
    outputs: int  # y; 0 for attention's scores, which a fused kernel does not store.
    weights: int = 0  # w: parameters.
    shared_weights: int = 0  # Parameters of an earlier layer that it uses as well.
    macs: int = 0  # Multiply-adds of the forward pass.
    channels: int = 0  # C: input channels or features; 0 where there are none to divide.
    filters: int = 0  # F: output channels or features.
    extents: Extents = ()  # Of the input, without channels; empty where it is no image or volume.
    kernel: int = 1  # Edge of the window that an output element sees.
    stride: int = 1  # Input elements between two windows, along each extent.
    tensor: Divided = ""
    """How tensor parallelism divides it: its outputs, its inputs, or head by head (Shoeybi et al., Megatron-LM (2019),
    section 3); empty: not at all."""
    heads: int = 0  # Of attention.
    has_gradient: bool = True  # Whether anybody computes the gradient of its input.

    @property
    def is_product(self) -> bool:
        """Whether the layer has weights that can be divided by filters or channels."""
        return self.kind in ("conv2d", "conv3d", "linear")

    def passes(self, *, backward: bool) -> int:
        return self.macs * ((1 + self.has_gradient) if backward else 1)


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
        self.append(
            Layer(
                name=name,
                kind="linear",
                block=self.block,
                inputs=rows * channels,
                outputs=rows * filters,
                weights=filters + (0 if tied else matrix),
                shared_weights=matrix if tied else 0,
                macs=rows * matrix,
                channels=channels,
                filters=filters,
                tensor=tensor,
            )
        )

    def other(self, name: str, kind: str, inputs: int, outputs: int | None = None, **form: Any) -> None:
        """Appends any other layer; `outputs`: None for as many elements as inputs; `form`: further fields of
        `Layer`.
        """
        outputs = inputs if outputs is None else outputs
        self.append(Layer(name=name, kind=kind, block=self.block, inputs=inputs, outputs=outputs, **form))
