"""ResNet v1.5 with bottleneck blocks: images to class logits. He et al., "Deep Residual Learning for Image Recognition"
(2015), table 1; in v1.5 the stride of a stage's first block is that of its 3x3 convolution, not of its first 1x1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.build import Accuracy, Batch, Criterion, Network, Outputs, autocast_type
from dlbench.specs.workload import DataSpec, ResNetModel

# Mean and standard deviation of ImageNet's pixels in [0, 1], as commonly used.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

EXPANSION = 4  # Output channels of a bottleneck block over its width.


class Bottleneck(nn.Module):
    """1x1 reduce, 3x3, 1x1 expand, plus the shortcut: (N, C, H, W) -> (N, 4 width, ceil(H / stride), ...)."""

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
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = functional.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y)) + self.shortcut(x)
        return functional.relu(y, inplace=True)


class GlobalMean(nn.Module):
    """Mean over height and width, (N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class ResNet(nn.Module):
    """ResNet v1.5; the defaults give ResNet-50 with 25,557,032 parameters. `base_width` is the number of channels of
    the stem and the width of the first stage. Convolutions start from He's normal distribution, fan-out, the classifier
    from N(0, 0.01) (Goyal et al. 2017, section 5.1), from torch's global generator.
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
        # Activation and pooling are modules, too, so that the whole network is a chain of modules.
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
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and zero_init_residual:
                nn.init.zeros_(module.norm3.weight)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    @property
    def blocks(self) -> list[nn.Module]:
        return [module for module in self.stages.modules() if isinstance(module, Bottleneck)]

    def forward(self, image: Tensor) -> Tensor:
        """Maps normalised pixels, (N, 3, H, W) with H and W at least 32, to logits (N, num_classes)."""
        x = self.stem_pool(self.stem_activation(self.stem_norm(self.stem_conv(image))))
        logits: Tensor = self.classifier(self.mean(self.stages(x)))
        return logits


def normalised(image: Tensor, *, channels_last: bool) -> Tensor:
    """Normalises pixels by ImageNet's mean and deviation on the device, (N, H, W, 3) uint8 -> (N, 3, H, W)."""
    device = image.device
    kind = autocast_type(device) or torch.float32
    shift, scale = _pixel_constants(device)
    pixels = image.permute(0, 3, 1, 2)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    normalised_pixels = torch.empty(pixels.shape, dtype=kind, device=device, memory_format=memory_format)
    return torch.addcmul(shift, pixels, scale, out=normalised_pixels)


@lru_cache(maxsize=8)
def _pixel_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns -mean / deviation and 1 / (255 deviation), each (3, 1, 1); cached, as a copy would make the host wait."""
    shift = [-mean / deviation for mean, deviation in zip(MEAN, STD, strict=True)]
    scale = [1 / (255 * deviation) for deviation in STD]
    return torch.tensor(shift, device=device).view(3, 1, 1), torch.tensor(scale, device=device).view(3, 1, 1)


class Top1(Accuracy):
    """Share of images whose most likely class is right."""

    name = "top1"
    predictor = "always the most frequent class"

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        label = batch["label"]
        self._tally(label, torch.ones_like(label), outputs[0].shape[1])
        right = outputs[0].argmax(1) == label
        return right.sum(), torch.tensor(label.numel())


class ResNetNetwork(Network[ResNetModel]):
    """ResNet, with batches of image (N, H, W, 3) uint8 and label (N,) int64."""

    meter = Top1
    channels_last = torch.channels_last

    def build(self, spec: ResNetModel) -> nn.Module:
        return ResNet(spec.num_classes, spec.stage_blocks, spec.base_width, spec.zero_init_residual)

    def outputs(self, spec: ResNetModel) -> Callable[[nn.Module, Batch], Outputs]:
        channels_last = spec.memory_format == "channels-last"
        return lambda model, batch: (model(normalised(batch["image"], channels_last=channels_last)),)

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        return lambda outputs, batch: functional.cross_entropy(
            outputs[0].float(), batch["label"], label_smoothing=label_smoothing
        )

    def synthetic(
        self, spec: ResNetModel, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool
    ) -> Batch:
        size = spec.image_size
        return {
            "image": torch.randint(256, (num, size, size, 3), dtype=torch.uint8, generator=generator),
            "label": torch.randint(spec.num_classes, (num,), generator=generator),
        }

    def one_sample(self, spec: ResNetModel, data: DataSpec) -> tuple[Tensor, ...]:
        return (torch.empty(1, 3, spec.image_size, spec.image_size),)


NETWORK = ResNetNetwork()
