"""Checks of every rank before any library starts, for conditions that would abort a run without a message."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dlbench
from dlbench.errors import EnvironmentLacksError
from dlbench.machine.environment import HOST_NAME_REMEDY, host_name_problem
from dlbench.node.ranks import RankPlace
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.specs.workload import Workload
from dlbench.units import counted, format_bytes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the C library uses it, and so does torch)

_PAGE_BYTES = 4096
_MAX_TENSORS = 7  # Most tensors of a batch; each occupies whole pages.
_INDEX_ARRAYS = 3  # Additional index arrays of each part of a batch that is computed without padding.


def require_version(planned: object) -> None:
    """Checks that this version of dlbench made the plan; another may interpret the same keys differently."""
    if isinstance(planned, str) and planned != dlbench.__version__:
        raise EnvironmentLacksError(
            f"python: {sys.executable} has dlbench {dlbench.__version__}, but version {planned} made the plan: set "
            "system.python to a Python with that version, or submit again with this version"
        )


def require_machine(plan: RunPlan | CommPlan, place: RankPlace) -> None:
    """Raises EnvironmentLacksError if this machine lacks something that the plan needs."""
    require_version(plan.dlbench_version)
    if needs_host_name(plan) and (problem := host_name_problem()):
        raise EnvironmentLacksError(f"engine horovod: {problem}, which crashes Horovod's Gloo; {HOST_NAME_REMEDY}")
    if isinstance(plan, RunPlan):
        require_shared_memory(plan, place)


def needs_host_name(plan: RunPlan | CommPlan) -> bool:
    """Tells whether Horovod runs over Gloo, which ends by SIGSEGV if it cannot resolve the host's own name."""
    if plan.system.launch.by_mpi:
        return False
    return isinstance(plan, RunPlan) and plan.engine.name == "horovod"


def require_shared_memory(plan: RunPlan, place: RankPlace, folder: Path = SHARED_MEMORY) -> None:
    """Checks that shared memory is large enough for the batches of the loader processes."""
    needed = place.local_size * loader_bytes(plan)
    if not needed:
        return
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        raise EnvironmentLacksError(f"{folder}: {error.strerror}; loader processes need it") from None
    free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    if needed > free:
        raise EnvironmentLacksError(
            f"{folder}: {format_bytes(free)} of {format_bytes(size)} are free, but the loader processes of "
            f"{counted(place.local_size, 'rank')} need up to {format_bytes(needed)} for batches; make it larger "
            "(containers: --shm-size), or lower data.loader_workers"
        )


def loader_bytes(plan: RunPlan) -> int:
    """Returns the most bytes of shared memory that the loader processes of one rank use; 0 without any."""
    workload = plan.workload
    if workload.data.is_synthetic or not plan.most_loader_workers:
        return 0
    # For each process, the batches that it prefetches and one in use (`node_sharing`); then those being copied to
    # a GPU.
    batches = plan.most_loader_workers * (plan.most_prefetch_batches + 1) + workload.data.device_prefetch
    batch_size = workload.train.batch_per_rank * plan.ranks_per_replica
    train_bytes = batches * _batch_bytes(workload, batch_size)
    if plan.measure.until != "quality":
        return train_bytes
    return train_bytes + batches * _batch_bytes(workload, batch_size // workload.train.gradient_accumulation)


def _batch_bytes(workload: Workload, num: int) -> int:
    tensors = _MAX_TENSORS
    if workload.model.padding == "unpadded":
        tensors += _INDEX_ARRAYS * workload.train.gradient_accumulation
    return num * workload.model.sample_bytes(workload.data) + tensors * _PAGE_BYTES
