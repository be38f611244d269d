"""VGG-16 (Simonyan and Zisserman, 2014, configuration D) as front ends know it; its torch half is `vgg16_network`."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count
from dlbench.specs.layers import Layer, Layers
from dlbench.specs.training import TrainSpec
from dlbench.specs.workload import DataSpec, MemoryFormat, Model

STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Filters of the 3x3 convolutions over `base_width`; each stage ends with a pooling, which halves height and width."""


class Vgg16Model(Model):
    """VGG-16: most of its 138 million parameters are in the first dense layer, so that gradients are long."""

    network = "dlbench_workloads.vgg16_network"
    sample_unit = "images"
    formats = ("images", "jpeg-tree")
    takes_label_smoothing = True

    family: Literal["vgg16"] = Field(description="Selects this network.")
    image_size: Count = Field(224, description="Height and width of the input, pixels: a multiple of 32.")
    num_classes: Count = Field(1000, description="Number of classes.")
    base_width: Count = Field(64, description="Channels of the first stage.")
    hidden_width: Count = Field(4096, description="Width of the two hidden dense layers.")
    memory_format: MemoryFormat = Field("contiguous", description="Memory format: contiguous or channels-last.")

    @property
    def dense_widths(self) -> tuple[int, ...]:
        """The widths in front of, between and behind the dense layers."""
        features = STAGES[-1][-1] * self.base_width * (self.image_size // 2 ** len(STAGES)) ** 2
        return features, self.hidden_width, self.hidden_width, self.num_classes

    def layer_table(self, data: DataSpec) -> tuple[Layer, ...]:
        """Returns the layers; a stage with its pooling is a block, and so is each dense layer."""
        layers, edge, channels, number = Layers(), self.image_size, 3, 0
        for layers.block, factors in enumerate(STAGES):
            square = (edge, edge)
            for factor in factors:
                filters = factor * self.base_width
                layers.conv(f"features.{number}", channels, filters, square, 3, bias=True)
                layers.other(f"features.{number + 1}", "activation", filters * edge**2, extents=square)
                channels, number = filters, number + 2
            elements = channels * edge**2
            layers.other(f"features.{number}", "pool", elements, elements // 4, extents=square, kernel=2, stride=2)
            edge, number = edge // 2, number + 1
        for position, (before, after) in enumerate(itertools.pairwise(self.dense_widths)):
            layers.block += 1
            layers.linear(f"classifier.{3 * position}", before, after)
            if after != self.dense_widths[-1]:
                layers.other(f"classifier.{3 * position + 1}", "activation", after)
        return tuple(layers)

    def require(self, data: DataSpec, train: TrainSpec) -> None:
        if self.image_size % 2 ** len(STAGES):
            raise ValueError(f"model.image_size: must be a multiple of 32, got {self.image_size}")

    def sample_bytes(self, data: DataSpec) -> int:
        return 3 * self.image_size**2 + 8
