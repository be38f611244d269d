"""What a step computes in: fp32, or autocast to bf16 or fp16 with weights, gradients and optimiser in fp32.

fp16 has a narrow range: the loss is scaled up before the backward pass and gradients are scaled down after the
exchange (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). A step whose gradients overflow is left
out on every rank alike, because the exchange carries an infinity to all of them; such steps are counted. What gradients
travel in is another setting (`engine.horovod.compression`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from dlbench.errors import EnvironmentLacksError
from dlbench.specs.training import TrainSpec

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and loss scaling of one rank, as a plan asks for them.

    Raises:
        EnvironmentLacksError: the device does not compute in this precision.
    """

    def __init__(self, spec: TrainSpec, device: torch.device) -> None:
        # fp32 means fp32: by default torch lets cuDNN compute convolutions in TF32 on an A100 and newer.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self._device = device
        self._type = _TYPES.get(spec.precision)
        self.warnings = _require(spec, device)
        self.overflow_steps = 0
        self._scaler: torch.amp.GradScaler | None = None
        if spec.precision == "fp16":
            self._scaler = torch.amp.GradScaler(
                device.type, init_scale=spec.initial_loss_scale, growth_interval=spec.loss_scale_growth_steps
            )

    @property
    def text(self) -> str:
        """What is in force, in words."""
        if self._type is None:
            return "fp32, TF32 off"
        scaled = "" if self._scaler is None else ", loss scaled"
        return f"autocast to {self._type}".replace("torch.", "") + f", weights and optimiser in fp32{scaled}"

    @property
    def is_scaled(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext() if self._type is None else torch.autocast(self._device.type, dtype=self._type)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of a loss, scaled where losses are."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Brings exchanged gradients back to their true size; once a step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step, or none if a gradient overflowed."""
        if self._scaler is None:
            optimizer.step()
            return
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        # An overflow is the only reason for a smaller scale.
        self.overflow_steps += self._scaler.get_scale() < before

    @property
    def scale(self) -> float:
        """The loss scale of the next step; 1 where losses are not scaled."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {} if self._scaler is None else {k: float(v) for k, v in self._scaler.state_dict().items()}

    def restore(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint's state; one without loss scaling changes nothing."""
        if self._scaler is not None and state:
            whole = {k: int(v) if k in ("growth_interval", "_growth_tracker") else v for k, v in state.items()}
            self._scaler.load_state_dict(whole)


def _require(spec: TrainSpec, device: torch.device) -> list[str]:
    if spec.precision == "fp32":
        return []
    if device.type == "cuda":
        if spec.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise EnvironmentLacksError(
                f"train.precision bf16: {torch.cuda.get_device_name(device)} has no bf16 arithmetic; use fp16 or fp32"
            )
        return []
    if _is_native(spec.precision):
        return []
    wanted = "AVX512 or AMX" if spec.precision == "bf16" else "AVX512-FP16 or AMX-FP16"
    lacks = (
        f"train.precision {spec.precision}: this CPU has no {spec.precision} arithmetic ({wanted}; torch sees "
        f"{torch.backends.cpu.get_cpu_capability()})"
    )
    if not spec.allow_emulation:
        raise EnvironmentLacksError(
            f"{lacks}: torch would emulate it many times slower than fp32; use fp32, or set train.allow_emulation to "
            "true to test its numerics"
        )
    return [f"{lacks}: it was emulated (train.allow_emulation), so speed says nothing"]


def _is_native(precision: str) -> bool:
    """Whether oneDNN, which computes torch's CPU kernels, finds instructions for it."""
    operations = torch.ops.mkldnn
    supported = operations._is_mkldnn_bf16_supported if precision == "bf16" else operations._is_mkldnn_fp16_supported
    return bool(supported())
