"""The torch half of `vgg16`; batches, loss and quality are those of dlbench's ResNet."""

from __future__ import annotations

import itertools

import torch
from dlbench_workloads.vgg16 import STAGES, Vgg16Model
from torch import Tensor, nn

from dlbench.node.models.resnet import ResNetNetwork


class Vgg16(nn.Module):
    """(N, 3, H, W) -> class logits (N, classes); weights as in torchvision: He's normal distribution, fan-out."""

    def __init__(self, spec: Vgg16Model) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        channels = 3
        for factors in STAGES:
            for factor in factors:
                modules += [nn.Conv2d(channels, factor * spec.base_width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = factor * spec.base_width
            modules.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*modules)
        modules = []
        for before, after in itertools.pairwise(spec.dense_widths):
            modules += [nn.Linear(before, after), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        self.classifier = nn.Sequential(*modules[:-2])  # none behind the logits
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(image), 1))


class Vgg16Network(ResNetNetwork):
    """VGG-16, with batches of image (N, H, W, 3) uint8 and label (N,) int64."""

    def build(self, spec: Vgg16Model) -> nn.Module:
        return Vgg16(spec)


NETWORK = Vgg16Network()
