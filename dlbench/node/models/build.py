"""`Network`, the torch half of a family of networks, with loss, quality (`Meter`) and multiply-adds.

A meter sums over the samples of one rank. Its `sums` are ready for JSON, so that any engine can gather them; `combine`
computes one result from those of all ranks, with equal weight for each sample (masked token, parameter).
"""

from __future__ import annotations

import math
from collections import Counter
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
"""Tensors by name; the first dimension N is the sample.

- resnet: image (N, H, W, 3) uint8; label (N,) int64.
- bert: input_ids, token_type_ids, attention_mask (N, S) int64; masked_positions, masked_ids (N, P) int64;
  masked_weights (N, P) float32, 0 for an unused place; next_sentence (N,) int64, 0 if B follows A, 1 if it is random.
  attention_mask is missing if there is no padding, or with index arrays of `dlbench.node.data.text`.
- cosmoflow: volume (N, C, S, S, S) float32, or counts (N, S, S, S, C) int16, whose logarithm is taken on the device;
  target (N, T) float32.
"""

Outputs = tuple[Tensor, ...]
"""ResNet: class logits (N, classes). BERT: masked-LM logits (N, P, vocabulary), next-sentence logits (N, 2). CosmoFlow:
parameters (N, T)."""

Criterion = Callable[[Outputs, Batch], Tensor]  # Returns the loss, a float32 scalar, the mean over the batch.

Loss = Callable[[nn.Module, Batch], Tensor]  # Runs a forward pass; returns the loss like `Criterion`.

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # Type of autocast; other precisions have none.

MetricName = Literal["top1", "masked_lm_accuracy", "mae"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The result of one evaluation over all ranks."""

    value: float  # The metric.
    loss: float  # Mean loss over samples.
    samples: int
    predictor_value: float  # The metric of a predictor that uses only the targets' frequencies (or mean).


class Meter:
    """Sums over one rank's share of a validation set, on the device of its batches."""

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
    """Share of right predictions; the trivial predictor always gives the most frequent target."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: Tensor | None = None

    def _tally(self, targets: Tensor, used: Tensor, num_classes: int) -> None:
        """Counts targets on the device; `used` is 1 for those that count and 0 for others."""
        if self._counts is None:
            self._counts = torch.zeros(num_classes, dtype=torch.int64, device=targets.device)
        self._counts.index_add_(0, targets.flatten(), used.flatten().long())

    def _targets(self) -> list[Any]:
        if self._counts is None:
            return []
        return [(target, count) for target, count in enumerate(self._counts.tolist()) if count]

    @classmethod
    def _predicted(cls, targets: list[list[Any]]) -> float:
        total: Counter[int] = Counter()
        for rank_targets in targets:
            for target, count in rank_targets:
                total[target] += count
        return max(total.values()) / total.total()


Products = list[tuple[str, str, int]]  # Products in a module's call: suffix of its name or "", kind, multiply-adds.

Spec = TypeVar("Spec", bound=Model)


class Network(Generic[Spec]):
    """The torch half of a family of networks. Its module has an instance `NETWORK`; see `specs.workload.Model`."""

    meter: ClassVar[type[Meter]]
    channels_last: ClassVar[torch.memory_format] = torch.channels_last_3d  # For model.memory_format channels-last.

    def build(self, spec: Spec) -> nn.Module:
        """Returns the network on the CPU, in fp32, with weights from torch's global generator."""
        raise NotImplementedError

    def outputs(self, spec: Spec) -> Callable[[nn.Module, Batch], Outputs]:
        raise NotImplementedError

    def criterion(self, label_smoothing: float = 0.0) -> Criterion:
        raise NotImplementedError

    def synthetic(self, spec: Spec, data: DataSpec, num: int, generator: torch.Generator, *, counts: bool) -> Batch:
        """Returns `num` random samples of the network's shapes, on the CPU; with `counts`, volumes are counts."""
        raise NotImplementedError

    def one_sample(self, spec: Spec, data: DataSpec) -> tuple[Tensor, ...]:
        """Returns arguments of the network's forward pass for one sample, with any values."""
        raise NotImplementedError

    def products(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> Products:
        """Returns the products in a module's call, except those of convolutions, dense layers and look-ups."""
        return []

    def observed(self, loss: Loss, plan: RunPlan, device: torch.device) -> tuple[Loss, Callable[[], list[Setting]]]:
        """Returns the loss for training, and a function that returns settings which its calls showed."""
        return loss, list


def autocast_type(device: torch.device) -> torch.dtype | None:
    """Returns the type in which autocast computes products on a device; None if autocast is off."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def network_of(spec: ModelSpec) -> Network[Any]:
    """Returns the torch half of a specification."""
    network: Network[Any] = import_module(spec.network).NETWORK
    return network


def build_model(spec: ModelSpec) -> nn.Module:
    """Builds the network of a specification, like `Network.build`."""
    return network_of(spec).build(spec)


def loss_for(spec: ModelSpec, label_smoothing: float = 0.0) -> Loss:
    """Returns forward pass and loss as one function; `label_smoothing` is the share of the target over all classes."""
    network = network_of(spec)
    outputs, criterion = network.outputs(spec), network.criterion(label_smoothing)
    return lambda model, batch: criterion(outputs(model, batch), batch)


def forward_macs(spec: ModelSpec, data: DataSpec) -> list[LayerMacs]:
    """Counts the multiply-adds of each layer for one sample, in a forward pass of meta tensors, which needs no memory.

    Convolutions, dense layers and the two products of attention count; norms, activations, pooling, softmax, look-ups
    and recomputing do not, as in MLPerf and in Chowdhery et al., "PaLM" (2022), appendix B. Kinds are conv2d, conv3d,
    linear, embedding (0 multiply-adds) and attention (a row for each product). The masked-LM head counts for
    max_predictions positions, which it always computes.
    """
    layers: list[LayerMacs] = []
    network = network_of(spec)

    def count(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Any], None]:
        def note(module: nn.Module, arguments: tuple[Tensor, ...], output: Any) -> None:
            products = network.products(module, arguments, output)
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                per_output = module.in_channels // module.groups * math.prod(module.kernel_size)
                kind = "conv2d" if isinstance(module, nn.Conv2d) else "conv3d"
                products.append(("", kind, output.numel() * per_output))
            elif isinstance(module, nn.Linear):
                products.append(("", "linear", output.numel() * module.in_features))
            elif isinstance(module, nn.Embedding):
                products.append(("", "embedding", 0))
            for part, kind, macs in products:
                layers.append(LayerMacs(name=f"{name}.{part}".strip("."), kind=kind, macs=macs))

        return note

    with torch.device("meta"), torch.no_grad():
        # In training, batch norm would refuse one sample if a feature map has shrunk to one pixel.
        model = network.build(spec).eval()
        for name, module in model.named_modules():
            module.register_forward_hook(count(name))
        model(*network.one_sample(spec, data))
    return layers


def training_flops_per_sample(layers: Sequence[LayerMacs]) -> int:
    """Returns 3 passes x 2 operations x multiply-adds; 2 passes of a first convolution, whose input needs none."""
    passes_macs = TRAINING_PASSES * sum(layer.macs for layer in layers)
    if layers and layers[0].kind in ("conv2d", "conv3d"):
        passes_macs -= layers[0].macs
    return FLOPS_PER_MAC * passes_macs
