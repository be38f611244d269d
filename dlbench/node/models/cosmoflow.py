"""CosmoFlow: 3-D density maps to cosmological parameters.

Mathuriya et al., "CosmoFlow: Using Deep Learning to Learn the Universe at Scale" (SC18), in the form of the MLPerf HPC
reference (v1.0 to v3.0; kernels had an edge of 2 before). The input is log(counts + 1) of particle counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dlbench.node.models.build import Batch, Criterion, Loss, Meter, Network, Outputs, autocast_type
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import CosmoFlowModel, DataSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAKY_SLOPE = 0.3  # Keras's default, which the reference relies on; torch's default is 0.01.
OUTPUT_SCALE = 1.2  # Targets lie in [-1, 1]; the scaled tanh reaches both ends with a finite input.
# On a CPU, torch 2.13 gives a wrong gradient of the weight in bf16 at this depth of the input, without an error: see
# findings/conv3d-bf16-weight-gradient.sh. Other depths, heights, widths and fp16 are right.
WRONG_DEPTH = 2


class Convolution(nn.Conv3d):
    """A convolution that computes in fp32 under autocast where torch's gradient in bf16 would be wrong."""

    is_kept_in_fp32 = False  # Whether a pass under autocast did so.

    def forward(self, volume: Tensor) -> Tensor:
        is_bf16_on_cpu = volume.device.type == "cpu" and autocast_type(volume.device) == torch.bfloat16
        if volume.shape[2] != WRONG_DEPTH or not is_bf16_on_cpu:
            return super().forward(volume)
        self.is_kept_in_fp32 = True
        with torch.autocast("cpu", enabled=False):
            return super().forward(volume.float())


class CosmoFlow(nn.Module):
    """CosmoFlow; the defaults give 8,907,556 parameters. `input_size` is the edge of the input cube in voxels. Weights
    start from Glorot's uniform distribution, biases at 0 (Keras's defaults), from torch's global generator.
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
        blocks: list[nn.Module] = []
        channels = input_channels
        for out_channels in conv_channels:
            blocks += [Convolution(channels, out_channels, 3, padding=1), nn.LeakyReLU(LEAKY_SLOPE), nn.MaxPool3d(2)]
            channels = out_channels
        self.features = nn.Sequential(*blocks)
        dense: list[nn.Module] = [nn.Flatten()]
        width = channels * (input_size // 2 ** len(conv_channels)) ** 3
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

    @property
    def blocks(self) -> list[nn.Module]:
        layers = (*self.features, *self.regressor)
        return [layer for layer in layers if next(layer.parameters(), None) is not None]

    def forward(self, volume: Tensor) -> Tensor:
        """Maps log(counts + 1), (N, input_channels, S, S, S), to (N, num_targets) in (-1.2, 1.2)."""
        return torch.tanh(self.regressor(self.features(volume))) * OUTPUT_SCALE


@lru_cache(maxsize=1)
def logarithms() -> NDArray[np.float32]:
    """Returns log(n + 1) of each count of int16, (32768,), rounded from float64, equal on every machine."""
    return np.log1p(np.arange(np.iinfo(np.int16).max + 1, dtype=np.float64)).astype(np.float32)


@lru_cache(maxsize=1)
def _logarithms_on(device: torch.device) -> Tensor:
    return torch.from_numpy(logarithms()).to(device)


def network_volume(volume: Tensor, *, channels_last: bool) -> Tensor:
    """Returns log(counts + 1), (N, C, S, S, S) float32, of counts (N, S, S, S, C) int16 or of itself."""
    if volume.dtype != torch.int16:
        memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
        return volume.contiguous(memory_format=memory_format)
    # Not log1p, which may differ between devices in the last bit; the table of 128 KiB stays in the cache.
    table = _logarithms_on(volume.device)
    if channels_last:
        logarithm = table.index_select(0, volume.flatten().int()).view(volume.shape)
        return logarithm.permute(0, 4, 1, 2, 3)
    counts = volume.permute(0, 4, 1, 2, 3).contiguous()  # reorders two bytes per voxel, not four
    return table.index_select(0, counts.flatten().int()).view(counts.shape)


def slab(batch: Batch, *, number: int, parts: int) -> Batch:
    """Returns a batch with part `number` of the planes of its volumes, in memory of its own; an empty one unchanged."""
    if "volume" not in batch:
        return batch
    volume = batch["volume"]
    depth = 1 if volume.dtype == torch.int16 else 2
    planes = volume.shape[depth] // parts
    part = volume.narrow(depth, number * planes, planes)
    return {**batch, "volume": part.clone(memory_format=torch.contiguous_format)}


class MeanAbsoluteError(Meter):
    """Mean over samples and parameters of |prediction - target|."""

    name = "mae"
    higher_is_better = False
    predictor = "always the mean of the targets"

    def __init__(self) -> None:
        super().__init__()
        self._evaluated: list[Tensor] = []

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        target = batch["target"]
        self._evaluated.append(target)
        return (outputs[0].float() - target).abs().sum(), torch.tensor(target.numel())

    def _targets(self) -> list[Any]:
        return [] if not self._evaluated else torch.cat(self._evaluated).cpu().tolist()

    @classmethod
    def _predicted(cls, targets: list[list[Any]]) -> float:
        all_targets = torch.tensor(list(chain.from_iterable(targets)), dtype=torch.float64)
        return float((all_targets - all_targets.mean(0)).abs().mean())


def _kept_in_fp32(models: Iterable[nn.Module]) -> list[Setting]:
    """Returns how many convolutions bf16 did not reach; empty if it reached all."""
    modules = set(chain.from_iterable(model.modules() for model in models))
    is_kept = [module.is_kept_in_fp32 for module in modules if isinstance(module, Convolution)]
    if not any(is_kept):
        return []
    effective = f"fp32 in {sum(is_kept)} of {len(is_kept)}"
    evidence = "passes that left autocast: on a CPU torch's gradient in bf16 is wrong for an input 2 voxels deep"
    return [Setting(key="train.precision.convolutions", requested=None, effective=effective, evidence=evidence)]


class CosmoFlowNetwork(Network[CosmoFlowModel]):
    """CosmoFlow, with batches of target (N, T) float32 and volume (N, C, S, S, S) float32 or (N, S, S, S, C) int16."""

    meter = MeanAbsoluteError

    def build(self, spec: CosmoFlowModel) -> nn.Module:
        return CosmoFlow(
            spec.input_size, spec.input_channels, spec.conv_channels, spec.dense_sizes, spec.dropout, spec.num_targets
        )

    def outputs(self, spec: CosmoFlowModel) -> Callable[[nn.Module, Batch], Outputs]:
        channels_last = spec.memory_format == "channels-last"
        return lambda model, batch: (model(network_volume(batch["volume"], channels_last=channels_last)),)

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        return lambda outputs, batch: functional.mse_loss(outputs[0].float(), batch["target"])

    def synthetic(
        self, spec: CosmoFlowModel, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool
    ) -> Batch:
        size, channels = spec.input_size, spec.input_channels
        # A few particles per voxel; int16 holds the exponentials of all normal numbers that torch draws.
        volume = torch.randn(num, size, size, size, channels, generator=generator).exp_().round_().to(torch.int16)
        if not counts:
            volume = network_volume(volume, channels_last=False)
        return {"volume": volume, "target": torch.rand(num, spec.num_targets, generator=generator) * 2 - 1}

    def observed(self, loss: Loss, plan: RunPlan, device: torch.device) -> tuple[Loss, Callable[[], list[Setting]]]:
        requested, types = getattr(plan.workload.data, "volumes", "auto"), dict[str, None]()
        is_bf16_on_cpu = plan.workload.train.precision == "bf16" and device.type == "cpu"
        if requested == "auto" and not is_bf16_on_cpu:
            return loss, list
        models = dict[nn.Module, None]()

        def watched(model: nn.Module, batch: Batch) -> Tensor:
            models[model] = None
            if requested != "auto":
                types[str(batch["volume"].dtype).removeprefix("torch.")] = None
            return loss(model, batch)

        def settings() -> list[Setting]:
            evidence = "type of the volumes in the network's batches"
            volumes = [Setting(key="data.volumes", requested=requested, effective=t, evidence=evidence) for t in types]
            return volumes + _kept_in_fp32(models)

        return watched, settings

    def one_sample(self, spec: CosmoFlowModel, data: DataSpec) -> tuple[Tensor, ...]:
        return (torch.empty(1, spec.input_channels, *[spec.input_size] * 3),)


NETWORK = CosmoFlowNetwork()
