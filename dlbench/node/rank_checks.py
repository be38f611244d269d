"""Conditions that abort a run silently: checked by every rank before any library starts, and said with the remedy."""

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
from dlbench.units import format_bytes

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the C library has it, and torch with it)


_PAGE_BYTES = 4096
_MAX_TENSORS = 7  # Of a batch; each takes whole pages.
_INDEX_ARRAYS = 3  # Besides them, for each part that is computed unpadded.


def require_version(planned: object) -> None:
    """Checks that the plan was made by this version of dlbench: another may do other work by the same keys."""
    if isinstance(planned, str) and planned != dlbench.__version__:
        raise EnvironmentLacksError(
            f"python: {sys.executable} has dlbench {dlbench.__version__}, and {planned} made the plan: set "
            "system.python to a Python with that version, or submit from one with this"
        )


def require_machine(plan: RunPlan | CommPlan, place: RankPlace) -> None:
    """Checks what the plan needs of this machine. Raises EnvironmentLacksError: it is not there."""
    require_version(plan.dlbench_version)
    if needs_host_name(plan) and (problem := host_name_problem()):
        raise EnvironmentLacksError(f"engine horovod: {problem}, and Horovod's Gloo dies of that; {HOST_NAME_REMEDY}")
    if isinstance(plan, RunPlan):
        require_shared_memory(plan, place)


def needs_host_name(plan: RunPlan | CommPlan) -> bool:
    """Whether Horovod runs over Gloo, which resolves the host's own name and ends by SIGSEGV where it cannot."""
    if plan.system.launch.by_mpi:
        return False
    return isinstance(plan, RunPlan) and plan.engine.name == "horovod"


def require_shared_memory(plan: RunPlan, place: RankPlace, folder: Path = SHARED_MEMORY) -> None:
    """Checks that the batches which loader processes hold ready fit into shared memory."""
    needed = place.local_size * loader_bytes(plan)
    if not needed:
        return
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise EnvironmentLacksError(f"{folder}: {error.strerror}; loader processes need it") from None
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if needed > free:
        raise EnvironmentLacksError(
            f"{folder}: {format_bytes(free)} of {format_bytes(size)} free, the loader processes of "
            f"{place.local_size} rank{'s' if place.local_size > 1 else ''} hold up to {format_bytes(needed)} of "
            "batches there; make it larger (containers: --shm-size), or lower data.loader_workers"
        )


def loader_bytes(plan: RunPlan) -> int:
    """Bytes that the loader processes of one rank put into shared memory at most; 0 where none run."""
    workload = plan.workload
    if workload.data.is_synthetic or not plan.most_loader_workers:
        return 0
    # Of each process those that it reads ahead and one that is being trained with (see node/data/slots), and those that
    # are on their way to a GPU.
    batches = plan.most_loader_workers * (plan.most_prefetch_batches + 1) + workload.data.device_prefetch
    own = workload.train.batch_per_rank * plan.ranks_per_replica
    train = batches * _batch_bytes(workload, own)
    if plan.measure.until != "quality":
        return train
    return train + batches * _batch_bytes(workload, own // workload.train.gradient_accumulation)


def _batch_bytes(workload: Workload, num: int) -> int:
    tensors = _MAX_TENSORS
    if workload.model.padding == "unpadded":
        tensors += _INDEX_ARRAYS * workload.train.gradient_accumulation
    return num * workload.model.sample_bytes(workload.data) + tensors * _PAGE_BYTES
