"""What torch computes with on this rank: versions in the process, and switches that decide which kernels run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.backends import cuda, cudnn

from dlbench.node.tf32 import tf32_products


def torch_facts(problems: list[str], device: torch.device) -> dict[str, str]:
    """Facts by name, as `dlbench.machine.environment.capture` has them; what does not act on the device is left out.

    Args:
        problems: gets a line for each thing that could not be asked: no fact is worth a finished run.
        device: where this rank computes.
    """
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
