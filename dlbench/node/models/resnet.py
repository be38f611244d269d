"""ResNet v1.5 with bottleneck blocks: images become class logits.

He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, with the one change known as v1.5: the
stride of a stage's first block sits in its 3x3 convolution, not in its first 1x1. Parameter names are our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

EXPANSION = 4
"""Channels leaving a bottleneck block, in units of its width."""


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3 (with the stride), 1x1 expand, plus the shortcut.

    Shapes: (N, in_channels, H, W) -> (N, 4 width, ceil(H / stride), ceil(W / stride)).
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """One block; shapes as in the class."""
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = functional.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y)) + self.shortcut(x)
        return functional.relu(y, inplace=True)


class GlobalMean(nn.Module):
    """Mean over height and width, (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes as in the class."""
        return x.mean(dim=(2, 3))


class ResNet(nn.Module):
    """ResNet v1.5; the defaults give ResNet-50 with 25,557,032 parameters.

    Args:
        num_classes: width of the classifier.
        stage_blocks: blocks in each stage; every stage but the first halves the image.
        base_width: channels of the stem and width of the first stage, doubled from stage to stage.
        zero_init_residual: start the last batch-norm scale of each block at 0, so that each block starts as the
            identity (Goyal et al. 2017, section 5.1).

    Convolutions start from He's normal distribution, fan-out; the classifier from N(0, 0.01) and zero bias
    (Goyal et al. 2017, section 5.1). Weights come from torch's global generator: seed it before.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        stage_blocks: Sequence[int] = (3, 4, 6, 3),
        base_width: int = 64,
        zero_init_residual: bool = True,
    ) -> None:
        super().__init__()
        self.stem_conv = nn.Conv2d(3, base_width, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(base_width)
        # What has no parameters is a module as well, so that the whole network is a chain of modules.
        self.stem_activation = nn.ReLU(inplace=True)
        self.stem_pool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = base_width
        stages = []
        for index, num_blocks in enumerate(stage_blocks):
            width = base_width * 2**index
            blocks = []
            for position in range(num_blocks):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = width * EXPANSION
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.mean = GlobalMean()
        self.classifier = nn.Linear(channels, num_classes)
        self._initialise(zero_init_residual)

    def _initialise(self, zero_init_residual: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.norm3.weight)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) normalised pixels, H and W at least 32 -> (N, num_classes) logits."""
        x = self.stem_pool(self.stem_activation(self.stem_norm(self.stem_conv(image))))
        logits: Tensor = self.classifier(self.mean(self.stages(x)))
        return logits
