"""What decides, besides the precision, which kernels compute: cuDNN's search, order of weights, mask, fused update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.node.models.build import Loss, network_of
from dlbench.node.models.optimizers import update_evidence
from dlbench.node.part import TrainingPart
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan


class Kernels(TrainingPart):
    """These choices on one rank, as a plan asks for them."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._model = plan.workload.model
        asked = plan.workload.train.cudnn_benchmark
        if device.type != "cuda" and asked == "on":
            raise EnvironmentLacksError(
                "train.cudnn_benchmark on: this rank computes on a CPU: cuDNN is NVIDIA's library for GPUs; leave it "
                "at auto"
            )
        # Shapes are the same in each step, so that what is found in the first serves all.
        torch.backends.cudnn.benchmark = device.type == "cuda" and asked != "off" and self._model.has_convolutions
        self._observed: Callable[[], list[Setting]] = list

    def placed(self, model: nn.Module) -> nn.Module:
        """The network on its device, its weights in the order of its activations where gradients may have it too."""
        placed = model.to(self._device)
        if self._weights == "channels-last":
            placed.to(memory_format=network_of(self._model).channels_last)  # type: ignore[call-overload]  # in place
        return placed

    @property
    def _weights(self) -> str:
        return "contiguous" if self._is_kept else self._model.order

    @property
    def _is_kept(self) -> bool:
        """As the engine takes contiguous tensors alone; at one rank too, which more ranks are compared with."""
        return self._plan.engine.kind.contiguous_only

    def around_loss(self, loss: Loss) -> Loss:
        """Returns the same loss, whose calls are observed where the network has something to show."""
        loss, self._observed = network_of(self._model).observed(loss, self._plan, self._device)
        return loss

    def settings(self) -> list[Setting]:
        found = []
        if self._device.type == "cuda" and self._model.has_convolutions:
            is_on = torch.backends.cudnn.benchmark
            found.append(
                Setting(
                    key="train.cudnn_benchmark",
                    requested=self._plan.workload.train.cudnn_benchmark,
                    effective="on" if is_on else "off",
                    evidence=f"torch.backends.cudnn.benchmark is {is_on}",
                )
            )
        optimizer = self._plan.workload.train.optimizer
        if optimizer.implementation == "fused":
            key, how = "train.optimizer.implementation", update_evidence(optimizer)
            found.append(Setting(key=key, requested="fused", effective="fused", evidence=how))
        if self._model.order == "channels-last":
            why = (
                f"{self._plan.engine.kind.title} takes contiguous tensors alone"
                if self._is_kept
                else "weights and gradients lie as activations"
            )
            key = "model.memory_format.weights"
            found.append(Setting(key=key, requested=None, effective=self._weights, evidence=why))
        return found + self._observed()
