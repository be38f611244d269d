"""Which GPUs the ranks of a run used."""

from __future__ import annotations

import re

from dlbench.records.scan import Run

_GPU = re.compile(r"^cuda:\d+ \((.*)\)$")


def gpu_names(run: Run) -> set[str]:
    """Names of the GPUs of a run's ranks, as torch tells them; empty on CPUs."""
    devices = {rank.device for rank in run.record.ranks} if run.record else set()
    return {match[1] for device in devices if (match := _GPU.match(device))}


def gpus_per_rank(run: Run) -> float:
    """GPUs of a rank; below 1 where ranks share one, as far as the system declares its GPUs."""
    gpus = run.plan.system.node.gpus
    return min(1.0, gpus / run.plan.layout.ranks_per_node) if gpus else 1.0
