"""What a step computes in: fp32, tf32 (fp32 whose products use TF32), or autocast to bf16 or fp16; and which kernels
compute it besides: cuDNN's search, order of weights, mask, fused update.

Under autocast weights, gradients and optimizer stay in fp32.

fp16 has a narrow range: the loss is scaled up before the backward pass and gradients are scaled down after the
exchange (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). A step whose gradients overflow is left
out on every rank alike, because the exchange carries an infinity to all of them; such steps are counted. What gradients
travel in is another setting (`sync.wire`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dlbench.errors import EnvironmentLacksError
from dlbench.machine.arithmetic import native_precisions, no_arithmetic
from dlbench.node.models.build import AUTOCAST_TYPES, Loss, network_of
from dlbench.node.models.optimizers import update_evidence
from dlbench.node.part import TrainingPart
from dlbench.node.torch_facts import lacking_tf32, set_tf32
from dlbench.records.rank_summary import RankSummary
from dlbench.records.record import Setting
from dlbench.specs.plan import RunPlan
from dlbench.specs.training import TrainSpec


class Precision(TrainingPart):
    """Autocast and loss scaling of one rank, as a plan asks for them."""

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
                    "torch would emulate it, slower than fp32; use fp32, or test its numerics with "
                    "train.allow_emulation=true"
                )
            raise EnvironmentLacksError(f"train.precision {spec.precision}: {lacking}; {remedy}")
        self.is_emulated = bool(lacking)
        """Whether fp32 arithmetic stands in for that of the precision, as `train.allow_emulation` allows."""
        self._doubts = [f"{spec.precision} was emulated, its speed says nothing: {lacking}"] if lacking else []
        self._overflows: torch.Tensor | None = None
        self._scaler: torch.amp.GradScaler | None = None
        if spec.precision == "fp16":
            self._scaler = torch.amp.GradScaler(
                device.type, init_scale=spec.initial_loss_scale, growth_interval=spec.loss_scale_growth_steps
            )

    @property
    def doubts(self) -> list[str]:
        return self._doubts

    @property
    def text(self) -> str:
        if self._type is None:
            return "fp32, its matrix products and convolutions in TF32" if self._has_tf32 else "fp32, TF32 off"
        scaled = "" if self._scaler is None else ", loss scaled"
        emulated = ", emulated in fp32 arithmetic" if self.is_emulated else ""
        kind = str(self._type).removeprefix("torch.")
        return f"autocast to {kind}{emulated}, weights and optimizer in fp32{scaled}"

    @property
    def is_scaled(self) -> bool:
        return self._scaler is not None

    def autocast(self, *, is_cached: bool = True) -> AbstractContextManager[object]:
        """The context of a forward pass; `is_cached`: each parameter is cast once in it."""
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._type, cache_enabled=is_cached)

    def backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        # 1 or 0. Counted where it lies: to read it here would make the host wait for the device in every step.
        found = next(iter(self._scaler._found_inf_per_device(optimizer).values()))
        self._overflows = found.clone() if self._overflows is None else self._overflows.add_(found)
        self._scaler.update()

    @property
    def overflow_steps(self) -> int:
        """Steps left out so far; waits for the device."""
        return 0 if self._overflows is None else int(self._overflows.item())

    @property
    def scale_in_force(self) -> torch.Tensor | None:
        """The scale of this step's losses, a scalar on the device; None where losses are not scaled."""
        return None if self._scaler is None else self._scaler._get_scale_async()

    @property
    def scale(self) -> float:
        """The loss scale of the next step; 1 where losses are not scaled. Waits for the device."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def record(self, everyone: Sequence[RankSummary]) -> dict[str, Any]:
        return {
            "precision": self.text,
            "emulates_precision": any(rank.emulates_precision for rank in everyone),
            "overflow_steps": self.overflow_steps if self.is_scaled else None,
            "final_loss_scale": self.scale if self.is_scaled else None,
        }

    def state(self) -> dict[str, float]:
        return {} if self._scaler is None else {k: float(v) for k, v in self._scaler.state_dict().items()}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint's state; one without loss scaling changes nothing."""
        if self._scaler is not None and state:
            whole = {k: int(v) if k in ("growth_interval", "_growth_tracker") else v for k, v in state.items()}
            self._scaler.load_state_dict(whole)


def _lacking(precision: str, device: torch.device) -> str:
    """Why a device would have to emulate a precision, in a clause; empty where it has the arithmetic."""
    if precision == "fp32":
        return ""
    if precision == "tf32":
        return lacking_tf32(device)
    if device.type != "cuda":
        return "" if precision in (native_precisions() or ()) else no_arithmetic(precision)
    # fp16: since compute capability 5.3 (CUDA C++ Programming Guide, "Arithmetic Instructions").
    is_fp16 = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (5, 3)
    if is_fp16 if precision == "fp16" else torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return f"{torch.cuda.get_device_name(device)} has no {precision} arithmetic"


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
