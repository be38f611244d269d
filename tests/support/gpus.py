"""Which tests see this machine's GPUs: those of `pytest -m gpu`, and no others.

A run of pytest either hides all GPUs from its tests and from what they start, or it is for the GPU tests alone: a
process that has begun with CUDA can neither hide a GPU any more nor fork, as tests of ranks do.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlbench.machine.arithmetic import has_gpu

_ASK = "import torch; print(torch.__version__, torch.cuda.is_available())"


def is_for_gpus(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def hide_gpus() -> None:
    """No process started from now on sees a GPU, nor this one, where CUDA has not begun."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def why_without_gpu(config: pytest.Config) -> str:
    """Why tests marked `gpu` do not run in this run of pytest; empty where they do."""
    # Whether this run hides GPUs is no matter here, nor whether the one that started it did.
    if not has_gpu(environment={}):
        return "no GPU here: no device file of its driver"
    return _why_torch_sees_none() if is_for_gpus(config) else "GPUs are hidden from this run: pytest -m gpu shows them"


@functools.cache
def _why_torch_sees_none() -> str:
    """Empty where torch sees a GPU; asked in a process of its own, as whoever asks has begun with CUDA."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        return "torch does not import: " + (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    version, sees = done.stdout.split()
    if sees == "True":
        return ""
    return f"torch {version} sees no GPU: built for CPUs, too new for the driver, or hidden by CUDA_VISIBLE_DEVICES"


def gpu_files(root: Path, boards: int = 1, driver: str = "NVIDIA UNIX x86_64 Kernel Module  535.183.01  x") -> Path:
    """Files of a machine with NVIDIA GPUs: of its driver's devices, its kernel module and its PCI bus."""
    files = {"dev/nvidiactl": "", "proc/driver/nvidia/version": f"NVRM version: {driver}\nGCC version:  gcc 12.2\n"}
    for number in range(boards):
        device = f"sys/bus/pci/devices/0000:{0x10 + number:02x}:00.0"
        files |= {f"dev/nvidia{number}": "", f"{device}/class": "0x030200", f"{device}/vendor": "0x10de"}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root
