"""CosmoFlow: 3-D density maps become cosmological parameters.

Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale" (SC18), in the form of the MLPerf HPC
reference (v1.0 to v3.0; kernels had an edge of 2 before): five blocks of convolution, leaky ReLU and pooling, then two
hidden dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LEAKY_SLOPE = 0.3
"""Keras's default, which the reference relies on; torch's default is 0.01."""
OUTPUT_SCALE = 1.2
"""The targets lie in [-1, 1]; the scaled tanh reaches their ends with a finite input."""


class CosmoFlow(nn.Module):
    """CosmoFlow; the defaults give 8,907,556 parameters.

    Args:
        input_size: edge of the input cube, voxels; a multiple of 2 ** len(conv_channels).
        input_channels: density maps per sample.
        conv_channels: channels of each convolution (3x3x3, padding 1); each is followed by a pooling of 2.
        dense_sizes: widths of the hidden dense layers.
        dropout: probability behind each hidden dense layer.
        num_targets: regressed parameters.

    Weights start from Glorot's uniform distribution, biases at 0 (Keras's defaults), from torch's global generator.

    Raises:
        ValueError: input_size cannot be halved once per convolution.
    """

    def __init__(
        self,
        input_size: int = 128,
        input_channels: int = 4,
        conv_channels: Sequence[int] = (32, 64, 128, 256, 512),
        dense_sizes: Sequence[int] = (128, 64),
        dropout: float = 0.5,
        num_targets: int = 4,
    ) -> None:
        super().__init__()
        factor = 2 ** len(conv_channels)
        if input_size % factor:
            raise ValueError(f"input_size {input_size} is not a multiple of {factor} (one halving a convolution)")
        blocks: list[nn.Module] = []
        channels = input_channels
        for out_channels in conv_channels:
            blocks += [nn.Conv3d(channels, out_channels, 3, padding=1), nn.LeakyReLU(LEAKY_SLOPE), nn.MaxPool3d(2)]
            channels = out_channels
        self.features = nn.Sequential(*blocks)
        dense: list[nn.Module] = [nn.Flatten()]
        width = channels * (input_size // factor) ** 3
        for size in dense_sizes:
            dense += [nn.Linear(width, size), nn.LeakyReLU(LEAKY_SLOPE), nn.Dropout(dropout)]
            width = size
        dense.append(nn.Linear(width, num_targets))
        self.regressor = nn.Sequential(*dense)
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, volume: Tensor) -> Tensor:
        """(N, input_channels, S, S, S) of log(counts + 1) -> (N, num_targets) in (-1.2, 1.2)."""
        return torch.tanh(self.regressor(self.features(volume))) * OUTPUT_SCALE
