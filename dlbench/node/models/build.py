"""What the torch half of a network is: a `Network`; and what is asked of any: its loss, its quality, its multiply-adds.

A meter holds the sums of one rank. Its `sums` are plain Python, so that any engine can gather it; `combine` makes
one result of all ranks' sums, in which every sample (masked token, parameter) weighs the same, wherever it was counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from dlbench.records.record import LayerMacs, Setting
from dlbench.specs.layers import FLOPS_PER_MAC, TRAINING_PASSES
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import DataSpec, Model, ModelSpec

Batch = dict[str, Tensor]
"""Tensors by name, the first dimension N is the sample.

- resnet: image (N, H, W, 3) uint8; label (N,) int64.
- bert: input_ids, token_type_ids, attention_mask (N, S) int64; masked_positions, masked_ids (N, P) int64;
  masked_weights (N, P) float32, 0 for an unused place; next_sentence (N,) int64, 0 if B follows A, 1 if it is random.
  Without attention_mask where nothing is padding, or where `dlbench.node.data.text` gives index arrays.
- cosmoflow: volume (N, C, S, S, S) float32, or on its way to a GPU counts (N, S, S, S, C) int16, whose logarithm is
  taken there; target (N, T) float32.
"""

Outputs = tuple[Tensor, ...]
"""ResNet: class logits (N, classes). BERT: masked-LM logits (N, P, vocabulary), next-sentence logits (N, 2). CosmoFlow:
parameters (N, T)."""

Criterion = Callable[[Outputs, Batch], Tensor]  # To a scalar loss, the mean over the batch, in float32.

Loss = Callable[[nn.Module, Batch], Tensor]  # Forward pass and loss: a scalar, the mean over the batch, in float32.

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes products in, by precision; others have no autocast."""

MetricName = Literal["top1", "masked_lm_accuracy", "mae"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One evaluation over all ranks."""

    value: float  # The metric.
    loss: float  # Mean loss over samples.
    samples: int
    predictor_value: float  # The metric of a predictor that knows only the evaluated targets' frequencies (or mean).


class Meter:
    """Sums over one rank's share of a validation set; `add` a batch at a time, on the batch's device."""

    name: ClassVar[MetricName]
    higher_is_better: ClassVar[bool]
    predictor: ClassVar[str]

    def __init__(self) -> None:
        self._hits: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._loss: Tensor | float = 0.0
        self._samples = 0

    def add(self, outputs: Outputs, batch: Batch, loss: Tensor) -> None:
        hits, weight = self._count(outputs, batch)
        num = len(next(iter(batch.values())))
        self._hits, self._weight = self._hits + hits.double(), self._weight + weight.double()
        self._loss, self._samples = self._loss + loss.double() * num, self._samples + num

    def sums(self) -> dict[str, Any]:
        return {
            "hits": float(self._hits),
            "weight": float(self._weight),
            "loss": float(self._loss),
            "samples": self._samples,
            "targets": self._targets(),
        }

    @classmethod
    def combine(cls, parts: Sequence[dict[str, Any]]) -> Quality:
        weight = sum(part["weight"] for part in parts)
        samples = sum(part["samples"] for part in parts)
        if not weight:
            raise ValueError("no sample was evaluated")
        return Quality(
            value=sum(part["hits"] for part in parts) / weight,
            loss=sum(part["loss"] for part in parts) / samples,
            samples=samples,
            predictor_value=cls._predicted([part["targets"] for part in parts]),
        )

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _targets(self) -> list[Any]:
        raise NotImplementedError

    @classmethod
    def _predicted(cls, targets: list[list[Any]]) -> float:
        raise NotImplementedError


class Accuracy(Meter):
    """Share of right answers; the predictor always gives the most frequent one."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: Tensor | None = None

    def _tally(self, targets: Tensor, used: Tensor, num_classes: int) -> None:
        """Counts each target that is used (0 or 1 each) on the device."""
        if self._counts is None:
            self._counts = torch.zeros(num_classes, dtype=torch.int64, device=targets.device)
        self._counts.index_add_(0, targets.flatten(), used.flatten().long())

    def _targets(self) -> list[Any]:
        counts = [] if self._counts is None else self._counts.tolist()
        return [(value, count) for value, count in enumerate(counts) if count]

    @classmethod
    def _predicted(cls, targets: list[list[Any]]) -> float:
        total: dict[int, int] = {}
        for value, count in (item for part in targets for item in part):
            total[value] = total.get(value, 0) + count
        return max(total.values()) / sum(total.values())


Products = list[tuple[str, str, int]]  # Of a module's call: part of its name (or nothing), kind, multiply-adds.

Spec = TypeVar("Spec", bound=Model)


class Network(Generic[Spec]):
    """The torch half of a family of networks; its module holds one as `NETWORK`, see `dlbench.specs.workload.Model`."""

    meter: ClassVar[type[Meter]]  # What its quality is measured with.
    channels_last: ClassVar[torch.memory_format] = torch.channels_last_3d
    """The order of memory that model.memory_format channels-last is."""

    def build(self, spec: Spec) -> nn.Module:
        """The network, on the CPU, in fp32, with weights from torch's global generator."""
        raise NotImplementedError

    def outputs(self, spec: Spec) -> Callable[[nn.Module, Batch], Outputs]:
        raise NotImplementedError

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        raise NotImplementedError

    def synthetic(self, spec: Spec, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool) -> Batch:
        """`num` made samples of the shapes that it takes, on the CPU; `counts`: volumes are counts."""
        raise NotImplementedError

    def one_sample(self, spec: Spec, data: DataSpec) -> tuple[Tensor, ...]:
        """Arguments of the network's forward pass, N = 1, without values."""
        raise NotImplementedError

    def products(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> Products:
        """Products of tensors in a module's call that its convolutions, dense layers and look-ups do not show."""
        return []

    def observed(self, loss: Loss, plan: RunPlan, device: torch.device) -> tuple[Loss, Callable[[], list[Setting]]]:
        """The loss as it is trained with, and what its calls show of the settings in force."""
        return loss, list


def autocast_type(device: torch.device) -> torch.dtype | None:
    """What autocast computes products in on a device; None where it is off."""
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def network_of(spec: ModelSpec) -> Network[Any]:
    """The torch half of a specification."""
    found: Network[Any] = import_module(spec.network).NETWORK
    return found


def build_model(spec: ModelSpec) -> nn.Module:
    """The network of a specification, on the CPU, in fp32, with weights from torch's global generator."""
    return network_of(spec).build(spec)


def loss_for(spec: ModelSpec, label_smoothing: float = 0.0) -> Loss:
    """Forward pass and loss of a specification in one; `label_smoothing`: share of the target spread over classes."""
    network = network_of(spec)
    outputs, criterion = network.outputs(spec), network.criterion(label_smoothing)
    return lambda model, batch: criterion(outputs(model, batch), batch)


# --- multiply-adds of one sample, counted on the network itself; no data, no memory, no device (torch's meta tensors)


def forward_macs(spec: ModelSpec, data: DataSpec) -> list[LayerMacs]:
    """Every layer of the network with its multiply-adds for one sample, in the order of the forward pass.

    Counted are the products of tensors: convolutions, dense layers, the two products of attention. Norms, activations,
    pooling, softmax and look-ups are not, as in MLPerf and in Chowdhery et al., "PaLM" (2022), appendix B: model FLOPs,
    nothing that is computed again. Kinds are conv2d, conv3d, linear, embedding (0: it looks up) and attention (the two
    products, each a row).

    The masked-LM head is counted for max_predictions positions, which is what it computes, however many are used.
    """
    layers: list[LayerMacs] = []
    network = network_of(spec)

    def count(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
        def note(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> None:
            products = network.products(module, arguments, output)
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
                dimensions = "conv2d" if isinstance(module, nn.Conv2d) else "conv3d"
                products.append(("", dimensions, output.numel() * per_output))
            elif isinstance(module, nn.Linear):
                products.append(("", "linear", output.numel() * module.in_features))
            elif isinstance(module, nn.Embedding):
                products.append(("", "embedding", 0))
            for part, kind, macs in products:
                layers.append(LayerMacs(name=f"{name}.{part}".strip("."), kind=kind, macs=macs))

        return note

    with torch.device("meta"), torch.no_grad():
        # Batch norm in training would refuse one sample where a map has shrunk to one place.
        model = network.build(spec).eval()
        for name, module in model.named_modules():
            module.register_forward_hook(count(name))
        model(*network.one_sample(spec, data))
    return layers


def training_flops_per_sample(layers: Sequence[LayerMacs]) -> int:
    """Floating-point operations of training on one sample: 3 passes x 2 operations x multiply-adds.

    A first convolution reads the image or the volume itself, whose gradient nobody computes: it has 2 passes.
    """
    unneeded = layers[0].macs if layers and layers[0].kind in ("conv2d", "conv3d") else 0
    return FLOPS_PER_MAC * (TRAINING_PASSES * sum(layer.macs for layer in layers) - unneeded)
