"""TF32 of NVIDIA GPUs: whether fp32 products of matrices and convolutions use it, set and told.

torch has two interfaces for it, `allow_tf32` and since 2.9 `fp32_precision`, and reading either raises where only the
other was written. Both are written here, the old one first and with the same meaning, so that both can be read: torch's
own compiler still reads the old one.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.backends import cuda, cudnn

from dlbench.machine.arithmetic import TF32_NEEDS

_CAPABILITY = (8, 0)
"""Ampere: NVIDIA, CUDA C++ Programming Guide, "Arithmetic Instructions"."""
OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""0: NVIDIA's libraries never use TF32, whatever is set (cuBLAS documentation)."""


def set_tf32(is_on: bool) -> None:
    """Lets this process's GPU compute fp32 products in TF32, or keeps them in fp32."""
    cuda.matmul.allow_tf32 = cudnn.allow_tf32 = is_on
    for part in _parts().values():
        part.fp32_precision = "tf32" if is_on else "ieee"


def tf32_products() -> dict[str, bool]:
    """Whether products of matrices (`matmul`) and convolutions (`cudnn`) may use TF32; raises nothing."""
    new = {name: part.fp32_precision == "tf32" for name, part in _parts().items() if name != "rnn"}
    return new or {"matmul": bool(cuda.matmul.allow_tf32), "cudnn": bool(cudnn.allow_tf32)}


def _parts() -> dict[str, Any]:
    """What has a precision of its own in the new interface; nothing before torch 2.9."""
    if not hasattr(cuda.matmul, "fp32_precision"):
        return {}
    convolutions: Any = cudnn
    return {"matmul": cuda.matmul, "cudnn": convolutions.conv, "rnn": convolutions.rnn}


def lacking_tf32(device: torch.device) -> str:
    """Why a device has no TF32, in a clause; empty where it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return TF32_NEEDS
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older: {TF32_NEEDS}"
    return f"{OVERRIDE}=0 switches it off" if os.environ.get(OVERRIDE) == "0" else ""
