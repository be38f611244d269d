"""Precision of a step (fp32, tf32, or autocast to bf16 or fp16) and choice of kernels (cuDNN's search, memory format).
With fp16 the loss is scaled (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2), and a step whose
gradients overflow is skipped on all ranks, because the exchange gives an infinity to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.arithmetic import native_precisions, no_arithmetic
from dlbench.node.devices import lacking_tf32, set_tf32
from dlbench.node.models.build import AUTOCAST_TYPES, Loss, network_of
from dlbench.node.models.optimizers import update_evidence
from dlbench.node.part import TrainingPart
from dlbench.records.record import RankSummary, Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import TrainSpec


class Precision(TrainingPart):
    """Autocast and loss scaling of one rank, as set by a plan."""

    def __init__(self, spec: TrainSpec, device: torch.device) -> None:
        # fp32 means fp32: by default torch lets cuDNN compute convolutions in TF32 on an A100 and newer.
        set_tf32(spec.precision == "tf32")
        self._device = device
        self._type = AUTOCAST_TYPES.get(spec.precision)
        lacking = _lacking(spec.precision, device)
        self._has_tf32 = spec.precision == "tf32"
        if lacking and (device.type == "cuda" or self._has_tf32 or not spec.allow_emulation):
            remedy = "use fp32"
            if device.type != "cuda" and not self._has_tf32:
                remedy = (
                    "torch would emulate it, slower than fp32; use fp32, or set train.allow_emulation=true to test its "
                    "numerics"
                )
            raise EnvironmentLacksError(f"train.precision {spec.precision}: {lacking}; {remedy}")
        self.is_emulated = bool(lacking)  # torch emulates the precision in fp32 (`train.allow_emulation`).
        self._early_warnings = []
        if lacking:
            self._early_warnings.append(f"{spec.precision} was emulated, so its speed is not meaningful: {lacking}")
        self._overflows: torch.Tensor | None = None
        self._scaler: torch.amp.GradScaler | None = None
        if spec.precision == "fp16":
            self._scaler = torch.amp.GradScaler(
                device.type, init_scale=spec.initial_loss_scale, growth_interval=spec.loss_scale_growth_steps
            )

    @property
    def early_warnings(self) -> list[str]:
        return self._early_warnings

    @property
    def text(self) -> str:
        if self._has_tf32:
            return "fp32, its matrix products and convolutions in TF32"
        if self._type is None:
            return "fp32, TF32 off"
        parts = [f"autocast to {str(self._type).removeprefix('torch.')}"]
        if self.is_emulated:
            parts.append("emulated in fp32 arithmetic")
        parts.append("weights and optimizer in fp32")
        if self._scaler is not None:
            parts.append("loss scaled")
        return ", ".join(parts)

    @property
    def is_scaled(self) -> bool:
        return self._scaler is not None

    def autocast(self, *, is_cached: bool = True) -> AbstractContextManager[object]:
        """Returns the context of a forward pass; with `is_cached` each parameter is cast once in it."""
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._type, cache_enabled=is_cached)

    def backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        # 1 or 0, added on the device: to read it here would make the host wait for the device in every step.
        overflow = next(iter(self._scaler._found_inf_per_device(optimizer).values()))
        if self._overflows is None:
            self._overflows = overflow.clone()
        else:
            self._overflows.add_(overflow)
        self._scaler.update()

    @property
    def overflow_steps(self) -> int:
        """Steps skipped so far; waits for the device."""
        return 0 if self._overflows is None else int(self._overflows.item())

    @property
    def scale_in_force(self) -> torch.Tensor | None:
        """The scale of this step's losses, a scalar on the device; None if losses are not scaled."""
        return None if self._scaler is None else self._scaler._get_scale_async()

    @property
    def scale(self) -> float:
        """The loss scale of the next step; 1 if losses are not scaled. Waits for the device."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def record(self, summaries: Sequence[RankSummary]) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "precision": self.text,
            "emulates_precision": any(rank.emulates_precision for rank in summaries),
            "overflow_steps": None,
            "final_loss_scale": None,
        }
        if self.is_scaled:
            fields |= {"overflow_steps": self.overflow_steps, "final_loss_scale": self.scale}
        return fields

    def state(self) -> dict[str, float]:
        """Returns the state of loss scaling for a checkpoint; empty if losses are not scaled."""
        if self._scaler is None:
            return {}
        return {name: float(number) for name, number in self._scaler.state_dict().items()}

    def restore(self, state: dict[str, float]) -> None:
        """Restores the state of loss scaling from a checkpoint, if both have it."""
        if self._scaler is not None and state:
            counts = {name: int(state[name]) for name in ("growth_interval", "_growth_tracker") if name in state}
            self._scaler.load_state_dict(state | counts)


def _lacking(precision: str, device: torch.device) -> str:
    """Returns why a device would have to emulate a precision; empty if it has the arithmetic."""
    if precision == "fp32":
        return ""
    if precision == "tf32":
        return lacking_tf32(device)
    if device.type != "cuda":
        return "" if precision in (native_precisions() or ()) else no_arithmetic(precision)
    if precision == "fp16":
        # Since compute capability 5.3 (CUDA C++ Programming Guide, "Arithmetic Instructions").
        is_native = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (5, 3)
    else:
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    if is_native:
        return ""
    return f"{torch.cuda.get_device_name(device)} has no {precision} arithmetic"


class Kernels(TrainingPart):
    """The choice of kernels on one rank: cuDNN's search, memory format, fused update, attention."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._model = plan.workload.model
        benchmark = plan.workload.train.cudnn_benchmark
        if device.type != "cuda" and benchmark == "on":
            raise EnvironmentLacksError(
                "train.cudnn_benchmark on: this rank computes on a CPU, and cuDNN is NVIDIA's library for GPUs; leave "
                "it at auto"
            )
        # Shapes are the same in each step, so that the search of the first step is valid for all.
        torch.backends.cudnn.benchmark = device.type == "cuda" and benchmark != "off" and self._model.has_convolutions
        # Some engines take only contiguous tensors; then one rank has them too, for comparable runs.
        self._weights = "contiguous" if plan.engine.kind.contiguous_only else self._model.order
        self._observed: Callable[[], list[Setting]] = list

    def placed(self, model: nn.Module) -> nn.Module:
        """Moves a network to its device, with its weights in the memory format of its activations if possible."""
        placed = model.to(self._device)
        if self._weights == "channels-last":
            placed.to(memory_format=network_of(self._model).channels_last)  # type: ignore[call-overload]  # in place
        return placed

    def around_loss(self, loss: Loss) -> Loss:
        """Returns the same loss, whose calls are observed if the network has settings to record."""
        loss, self._observed = network_of(self._model).observed(loss, self._plan, self._device)
        return loss

    def settings(self) -> list[Setting]:
        settings = []
        if self._device.type == "cuda" and self._model.has_convolutions:
            is_on = torch.backends.cudnn.benchmark
            effective = "on" if is_on else "off"
            settings.append(
                Setting(
                    key="train.cudnn_benchmark",
                    requested=self._plan.workload.train.cudnn_benchmark,
                    effective=effective,
                    evidence=f"torch.backends.cudnn.benchmark is {is_on}",
                )
            )
        optimizer = self._plan.workload.train.optimizer
        if optimizer.implementation == "fused":
            key, evidence = "train.optimizer.implementation", update_evidence(optimizer)
            settings.append(Setting(key=key, requested="fused", effective="fused", evidence=evidence))
        if self._model.order == "channels-last":
            evidence = "weights and gradients have the memory format of activations"
            if self._weights == "contiguous":
                evidence = f"{self._plan.engine.kind.title} takes only contiguous tensors"
            key = "model.memory_format.weights"
            settings.append(Setting(key=key, requested=None, effective=self._weights, evidence=evidence))
        return settings + self._observed()
