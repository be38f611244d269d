"""The torch half of `unet3d`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from dlbench_workloads.unet3d import UNet3DModel
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.build import Batch, Criterion, Network, Outputs
from dlbench.node.models.cosmoflow import MeanAbsoluteError
from dlbench.specs.workload import DataSpec


class UNet3D(nn.Module):
    """(N, C, S, S, S) -> (N, 1, S, S, S), each value in (0, 1)."""

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        befores = [channels, *widths[:-1]]
        self.down = nn.ModuleList(nn.Conv3d(a, b, 3, padding=1) for a, b in zip(befores, widths, strict=True))
        self.up = nn.ModuleList(nn.Conv3d(3 * one, one, 3, padding=1) for one in reversed(widths[:-1]))
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, volume: Tensor) -> Tensor:
        beside = []
        for number, convolution in enumerate(self.down):
            volume = functional.relu(convolution(functional.max_pool3d(volume, 2) if number else volume))
            beside.append(volume)
        volume = beside.pop()
        for convolution in self.up:
            wide = functional.interpolate(volume, scale_factor=2.0)
            volume = functional.relu(convolution(torch.cat([wide, beside.pop()], 1)))
        return torch.sigmoid(self.head(volume))


class UNet3DNetwork(Network[UNet3DModel]):
    """Batches hold volume (N, C, S, S, S) float32 and target (N, 1, S, S, S) float32, 1 inside of a body."""

    meter = MeanAbsoluteError

    def build(self, spec: UNet3DModel) -> nn.Module:
        return UNet3D(spec.input_channels, spec.base_width, spec.levels)

    def outputs(self, spec: UNet3DModel) -> Callable[[nn.Module, Batch], Outputs]:
        return lambda model, batch: (model(batch["volume"]),)

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        return lambda outputs, batch: functional.binary_cross_entropy(outputs[0].float(), batch["target"])

    def synthetic(
        self, spec: UNet3DModel, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool
    ) -> Batch:
        volume = torch.randn(num, spec.input_channels, *[spec.input_size] * 3, generator=generator)
        return {"volume": volume, "target": (volume.mean(1, keepdim=True) > 0).float()}

    def one_sample(self, spec: UNet3DModel, data: DataSpec) -> tuple[Tensor, ...]:
        return (torch.empty(1, spec.input_channels, *[spec.input_size] * 3),)


NETWORK = UNet3DNetwork()
