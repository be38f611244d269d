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
from typing import Any

import pytest

from dlbench.machine.arithmetic import has_gpu

_ASK = """
import json, os
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
import torch
found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
uuids = [str(getattr(one, "uuid", "")) for one in found]
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda or torch.version.hip,
    "gpus": len(found) if torch.cuda.is_available() else 0,
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
        return {"gpus": 0, "why": f"torch gives no answer: {last}"}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if facts["gpus"]:
        return {**facts, "why": ""}
    built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built for CPUs"
    driver = "too new for the driver, or hidden by CUDA_VISIBLE_DEVICES" if has_gpu(environment={}) else "no GPU here"
    return {
        **facts,
        "why": f"torch {facts['torch']}, {built}, sees no GPU: {driver if facts['cuda'] else 'wrong wheel'}",
    }
