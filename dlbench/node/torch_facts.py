"""What torch computes with on this rank: versions in the process, and switches that decide which kernels run.

For TF32 of NVIDIA GPUs torch has two interfaces, `allow_tf32` and newer `fp32_precision`, and reading either raises
where only the other was written. Both are written here, the old one first and with the same meaning, so that both can
be read: torch's own compiler still reads the old one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda, cudnn

from dlbench.machine.arithmetic import TF32_NEEDS

_CAPABILITY = (8, 0)  # Ampere: NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions".
OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # 0: NVIDIA's libraries never use TF32, whatever is set (cuBLAS documentation).


def set_tf32(is_on: bool) -> None:
    """Lets this process's GPU compute fp32 products in TF32, or keeps them in fp32."""
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = is_on
    convolutions: Any = cudnn
    for part in (cuda.matmul, convolutions.conv, convolutions.rnn):
        part.fp32_precision = "tf32" if is_on else "ieee"


def tf32_products() -> dict[str, bool]:
    """Whether products of matrices (`matmul`) and convolutions (`cudnn`) may use TF32; raises nothing."""
    convolutions: Any = cudnn
    parts = {"matmul": cuda.matmul, "cudnn": convolutions.conv}
    return {name: part.fp32_precision == "tf32" for name, part in parts.items()}


def lacking_tf32(device: torch.device) -> str:
    """Why a device has no TF32, in a clause; empty where it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return TF32_NEEDS
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older: {TF32_NEEDS}"
    return f"{OVERRIDE}=0 switches it off" if os.environ.get(OVERRIDE) == "0" else ""


def torch_facts(problems: list[str], device: torch.device) -> dict[str, str]:
    """Facts by name, as `dlbench.machine.environment.capture` has them; what does not act on the device is left out."""
    asked: dict[str, Callable[[], object]] = {
        "torch.cuda": lambda: torch.version.cuda,
        "torch.hip": lambda: torch.version.hip,
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability,
    }
    if device.type == "cuda":
        asked |= {
            "torch.cudnn": cudnn.version,
            "torch.nccl": _nccl,
            "torch.tf32.matmul": lambda: _on(tf32_products()["matmul"]),
            "torch.tf32.cudnn": lambda: _on(tf32_products()["cudnn"]),
            "torch.cudnn.benchmark": lambda: _on(cudnn.benchmark),
            "torch.deterministic": lambda: _on(cudnn.deterministic or torch.are_deterministic_algorithms_enabled()),
            "torch.sdpa": _attention,
        }
    facts = {}
    for name, ask in asked.items():
        try:
            facts[name] = ask()
        except Exception as error:
            problems.append(f"environment: {name} is not known: {type(error).__name__}: {error}"[:300])
    return {name: str(value) for name, value in facts.items() if value is not None}


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _nccl() -> str | None:
    """Version of the NCCL that torch is linked with; Horovod may have another one."""
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _attention() -> str:
    """Back-ends of attention that torch may choose from; which one it takes depends on the shapes."""
    allowed = {
        "flash": cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "cudnn": cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
        "math": cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
    }
    return ", ".join(name for name, is_on in allowed.items() if is_on) or "none"
