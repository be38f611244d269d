"""Which tests see this machine's GPUs: those of `pytest -m gpu`, and no others.

A run of pytest either hides all GPUs from its tests and from what they start, or it is for the GPU tests alone: a
process that has begun with CUDA can neither hide a GPU any more nor fork, as tests of ranks do.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import VISIBLE, hidden_gpus, unusable

_ASK = """
import json, os
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
import torch
# NVML counts GPUs, too, that CUDA does not begin on.
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(number) for number in range(count)]
uuids = [str(getattr(one, "uuid", "")) for one in found]
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "hip": torch.version.hip,
    "gpus": len(found),
    "name": found[0].name if found else "",
    "uuids": [f"MIG-{one}" if "MIG" in found[0].name else f"GPU-{one}" for one in uuids if one],
    "memory_bytes": min((one.total_memory for one in found), default=0),
    "capability": min(((one.major, one.minor) for one in found), default=(0, 0)),
}))
"""


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
    return gpu_facts()["why"] if is_for_gpus(config) else "GPUs are hidden from this run: pytest -m gpu shows them"


@functools.cache
def gpu_facts() -> dict[str, Any]:
    """What torch says of the GPUs here, the smallest of them where they differ; `why` it sees none, else empty.

    Asked in a process of its own, as whoever asks has begun with CUDA.
    """
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        return {"gpus": 0, "why": f"torch does not answer: {last}"}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts | {"why": "" if facts["gpus"] else _why_none(facts)}


def _why_none(facts: dict[str, Any]) -> str:
    known = hidden_gpus()
    if known is None and has_gpu():
        known = unusable(facts["torch"], facts["cuda"], facts["hip"])
    if known is not None:
        return f"{known.reason}; {known.remedy}"
    hidden = os.environ.get(VISIBLE) if has_gpu(environment={}) else None
    why = f"{VISIBLE}={hidden} hides it" if hidden is not None else "there is no device file of a driver"
    return f"torch {facts['torch']} sees no GPU: {why}"


def amd_files(root: Path, *versions: int) -> Path:
    """Files of a machine with AMD GPUs of these `gfx_target_version`, and of its processor, in AMD's driver."""
    for number, version in enumerate((0, *versions)):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}/properties"
        node.parent.mkdir(parents=True)
        node.write_text(f"simd_count {64 * bool(version)}\nmem_banks_count 1\ngfx_target_version {version}\n", "ascii")
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/kfd").touch()
    return root


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
