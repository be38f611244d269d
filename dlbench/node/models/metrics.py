"""What a workload is trained for: top-1 accuracy, masked-LM accuracy or mean absolute error, over batches and ranks.

A meter holds the sums of one rank. What it tells is plain Python, so that any engine can gather it; `combine` makes
one result of all ranks' sums, in which every sample (masked token, parameter) weighs the same, wherever it was counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dlbench.node.models.build import Batch, Outputs
from dlbench.specs.workload import BertModel, ModelSpec, ResNetModel

MetricName = Literal["top1", "masked_lm_accuracy", "mae"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One evaluation over all ranks."""

    value: float
    """The metric."""
    loss: float
    """Mean loss over samples."""
    samples: int
    predictor_value: float
    """The metric of a predictor that knows nothing but the evaluated targets' frequencies (or mean)."""


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
        """Counts one batch; `loss` is its mean loss."""
        hits, weight = self._count(outputs, batch)
        num = len(next(iter(batch.values())))
        self._hits, self._weight = self._hits + hits.double(), self._weight + weight.double()
        self._loss, self._samples = self._loss + loss.double() * num, self._samples + num

    def told(self) -> dict[str, Any]:
        """The sums as plain Python; waits for the device."""
        return {
            "hits": float(self._hits),
            "weight": float(self._weight),
            "loss": float(self._loss),
            "samples": self._samples,
            "targets": self._targets(),
        }

    @classmethod
    def combine(cls, parts: Sequence[dict[str, Any]]) -> Quality:
        """The quality from all ranks' sums.

        Raises:
            ValueError: nothing was counted.
        """
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


class _Accuracy(Meter):
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


class Top1(_Accuracy):
    """Share of images whose most likely class is right."""

    name = "top1"
    predictor = "always the most frequent class"

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        label = batch["label"]
        self._tally(label, torch.ones_like(label), outputs[0].shape[1])
        right = outputs[0].argmax(1) == label
        return right.sum(), torch.tensor(label.numel())


class MaskedLmAccuracy(_Accuracy):
    """Share of masked places whose most likely token is right."""

    name = "masked_lm_accuracy"
    predictor = "always the most frequent token"

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        used = batch["masked_weights"] > 0
        self._tally(batch["masked_ids"], used, outputs[0].shape[2])
        right = (outputs[0].argmax(2) == batch["masked_ids"]) & used
        return right.sum(), used.sum()


class MeanAbsoluteError(Meter):
    """Mean over samples and parameters of |prediction - target|."""

    name = "mae"
    higher_is_better = False
    predictor = "always the mean of the targets"

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def _count(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        target = batch["target"]
        self._seen.append(target)
        return (outputs[0].float() - target).abs().sum(), torch.tensor(target.numel())

    def _targets(self) -> list[Any]:
        return torch.cat(self._seen).cpu().tolist() if self._seen else []

    @classmethod
    def _predicted(cls, targets: list[list[Any]]) -> float:
        values = torch.tensor([row for part in targets for row in part], dtype=torch.float64)
        return float((values - values.mean(0)).abs().mean())


def meter_for(spec: ModelSpec) -> type[Meter]:
    """The meter that a specification's quality is measured with."""
    if isinstance(spec, ResNetModel):
        return Top1
    return MaskedLmAccuracy if isinstance(spec, BertModel) else MeanAbsoluteError
