"""Versions of torch's libraries in this process, and switches that decide which kernels run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda, cudnn

from dlbench.machine.arithmetic import TF32_NEEDS

_CAPABILITY = (8, 0)  # Ampere: NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions".
OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # 0: NVIDIA's libraries never use TF32, whatever is set (cuBLAS documentation).
_SWITCH = {True: "on", False: "off"}


def set_tf32(is_on: bool) -> None:
    """Lets this process's GPU compute fp32 products in TF32, or not, by torch's old interface and then by the new one.
    Reading one raises if only the other was set, and torch's compiler reads the old one.
    """
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = is_on
    convolutions: Any = cudnn
    precision = "tf32" if is_on else "ieee"
    for part in (cuda.matmul, convolutions.conv, convolutions.rnn):
        part.fp32_precision = precision


def tf32_products() -> dict[str, bool]:
    """Tells whether matrix products (`matmul`) and convolutions (`cudnn`) may use TF32."""
    convolutions: Any = cudnn
    parts = {"matmul": cuda.matmul, "cudnn": convolutions.conv}
    return {name: part.fp32_precision == "tf32" for name, part in parts.items()}


def lacking_tf32(device: torch.device) -> str:
    """Returns why a device has no TF32; empty if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return TF32_NEEDS
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older: {TF32_NEEDS}"
    if os.environ.get(OVERRIDE) == "0":
        return f"{OVERRIDE}=0 switches it off"
    return ""


def torch_facts(problems: list[str], device: torch.device) -> dict[str, str]:
    """Returns facts by name, as `dlbench.machine.environment.capture` does; adds errors to `problems`."""
    facts: dict[str, object] = {"torch.cuda": torch.version.cuda, "torch.hip": torch.version.hip}
    readers: dict[str, Callable[[], object]] = {"torch.cpu_capability": torch.backends.cpu.get_cpu_capability}
    if device.type == "cuda":
        facts["torch.cudnn.benchmark"] = _SWITCH[cudnn.benchmark]
        facts["torch.deterministic"] = _SWITCH[cudnn.deterministic or torch.are_deterministic_algorithms_enabled()]
        readers |= {"torch.cudnn": cudnn.version, "torch.nccl": _nccl, "torch.sdpa": _attention}
        readers |= {"torch.tf32.matmul": lambda: _SWITCH[tf32_products()["matmul"]]}
        readers |= {"torch.tf32.cudnn": lambda: _SWITCH[tf32_products()["cudnn"]]}
    for name, read in readers.items():
        try:
            facts[name] = read()
        except Exception as error:
            problems.append(f"environment: {name} is not known: {type(error).__name__}: {error}"[:300])
    return {name: str(value) for name, value in facts.items() if value is not None}


def _nccl() -> str | None:
    """Returns the version of the NCCL that torch is linked with; Horovod may use another one."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _attention() -> str:
    """Returns the back-ends of attention that torch may choose from; the choice depends on the shapes."""
    allowed = {
        "flash": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "cudnn": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name, is_on in allowed.items() if is_on) or "none"
