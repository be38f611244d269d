"""Rank, world size and node of this process, from the environment variables of the planned launcher alone; and checks
of every rank before any library starts, for conditions that would abort a run without a message.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import dlbench
from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.environment import HOST_NAME_REMEDY, host_name_problem
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import LauncherName
from dlbench.specs.plan import LaunchPlan, RunPlan
from dlbench.specs.workload import Workload
from dlbench.units import counted, format_bytes, utf8_text

# Variables of rank, size and local rank; the first complete set is used. Those of other launchers may be left over.
_VARIABLES: dict[LauncherName, tuple[tuple[str, str, str], ...]] = {
    "local": (("DLBENCH_RANK", "DLBENCH_WORLD_SIZE", "DLBENCH_LOCAL_RANK"),),
    "srun-mpi": (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),),
    "srun-gloo": (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),),
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ),
}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (the C library uses it, and so does torch)
_PAGE_BYTES = 4096
_MAX_TENSORS = 7  # Most tensors of a batch; each occupies whole pages.
_INDEX_ARRAYS = 3  # Additional index arrays of each part of a batch that is computed without padding.


class Replica(NamedTuple):
    """A copy of the network, which one rank or several neighbouring ones train."""

    number: int  # Index of the copy, from 0.
    replicas: int  # Copies in the run.
    ranks: range  # The ranks that share the copy and read the same samples.


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Rank, world size and node of a rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    host: str
    token: str  # The same for all ranks of one start of the run, different for the next start.
    switch: str = ""  # Path of switches from the root to its node, as Slurm gives it; empty if it gives none.

    def replica(self, ranks_each: int) -> Replica:
        """Returns the replica of this rank, if `ranks_each` neighbouring ranks share one."""
        number = self.rank // ranks_each
        ranks = range(number * ranks_each, (number + 1) * ranks_each)
        return Replica(number=number, replicas=self.size // ranks_each, ranks=ranks)


def switch_of(variables: Mapping[str, str]) -> str:
    """Returns the path of switches to this process's node, ``root.leaf1`` (srun(1), SLURM_TOPOLOGY_ADDR), or ""."""
    address = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if "node" not in pattern:
        return ""
    return utf8_text(".".join(address[: pattern.index("node")]))


def detect(plan: LaunchPlan, variables: Mapping[str, str] = os.environ) -> RankPlace:
    """Returns the place of this process in the run."""
    launcher = plan.system.launch.launcher
    names = next((names for names in _VARIABLES[launcher] if variables.keys() >= set(names)), None)
    if names is None:
        expected = " or ".join(map("/".join, _VARIABLES[launcher]))
        raise EnvironmentLacksError(
            f"launcher {launcher}: {expected} not set; start the run with `dlbench run` or its script"
        )
    rank, size, local_rank = (int(variables[name]) for name in names)
    if size != plan.layout.ranks:
        raise RunError(f"the launcher started {size} ranks, but the plan has {plan.layout.ranks}; nothing was measured")
    local_size = plan.layout.ranks_per_node
    if rank % local_size != local_rank:
        raise RunError(
            f"rank {rank} has local rank {local_rank}, expected {rank % local_size}: ranks must be laid out in blocks "
            f"of {local_size} per node (srun --distribution=block)"
        )
    token = variables.get("DLBENCH_LAUNCH_TOKEN") or "-".join(
        variables.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    return RankPlace(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=rank // local_size,
        num_nodes=plan.layout.nodes,
        host=utf8_text(variables.get("SLURMD_NODENAME") or platform.node()),
        token=token,
        switch=switch_of(variables),
    )


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
