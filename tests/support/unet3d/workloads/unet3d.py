"""U-Net 3D (Cicek et al., "3D U-Net" (2016)), small, as front ends know it; its torch half is `unet3d_network`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dlbench.specs.base import Count
from dlbench.specs.workload import DataSpec, Model


class UNet3DModel(Model):
    """U-Net 3D: each voxel of a volume gets a value."""

    network = "dlbench_workloads.unet3d_network"
    sample_unit = "volumes"
    formats = ("density", "hdf5-density")
    has_share = False

    family: Literal["unet3d"] = Field(description="Chooses this network.")
    input_size: Count = Field(16, description="Edge of the cubic input, voxels; halved once a level.")
    input_channels: Count = Field(1, description="Values of a voxel.")
    base_width: Count = Field(8, description="Channels of the first level, doubled from level to level.")
    levels: Count = Field(2, description="Levels below the first.")

    def forward_macs(self, data: DataSpec) -> tuple[int, int]:
        """Each level has a convolution on the way down and one on the way up, of edge 3; the head has edge 1."""
        edge, width, down, up = self.input_size, self.base_width, self.input_channels, 0
        macs = []
        for level in range(self.levels + 1):
            size, channels = (edge // 2**level) ** 3, width * 2**level
            macs.append(27 * down * channels * size)
            if level < self.levels:
                up += 27 * 3 * channels * channels * size  # what comes from below and beside: 2 + 1 times the channels
            down = channels
        return macs[0], sum(macs[1:]) + up + width * edge**3

    def sample_bytes(self, data: DataSpec) -> int:
        return 4 * (self.input_channels + 1) * self.input_size**3
