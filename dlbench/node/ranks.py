"""Rank, world size and node of this process, from the environment variables of the planned launcher alone; its cores,
bound before any thread pool is created; and checks of every rank before any library starts, for conditions that would
abort a run without a message.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import dlbench
from dlbench.errors import EnvironmentLacksError, RunError
from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.environment import HOST_NAME_REMEDY, host_name_problem
from dlbench.machine.gpus import BY_BUS, ORDER, VISIBLE, Gpu, gpus_of_node, nvidia_buses, place_of, slices_listed
from dlbench.specs.comm import CommPlan
from dlbench.specs.launch import LauncherName
from dlbench.specs.plan import YIELD, LaunchPlan, RunPlan
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
# Kinds of srun's --cpu-bind that give no rank all cores of a node, unless it needs all.
_BINDING = re.compile(r"(quiet,|verbose,|[qv],)?(cores|threads|rank|map_|mask_)")


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


@dataclass(frozen=True, kw_only=True)
class CoreBinding:
    """The cores of a rank, and warnings about them."""

    cores: tuple[int, ...]
    pinned: bool  # True if the rank was bound, by itself or by its launcher.
    threads: int
    warnings: tuple[str, ...]
    gpu: Gpu | None = None  # The GPU of this rank, if it is known before torch is imported.


def by_physical_core(cpus: Iterable[int], siblings: Callable[[int], str] | None = None) -> list[int]:
    """Sorts processors so that hyper-threads of a core are neighbours and equal shares are whole physical cores.
    `siblings` returns the text of a processor's `thread_siblings_list`, e.g. ``0,4``; by default it is read from /sys.
    """
    read = siblings or _read_siblings

    def order(cpu: int) -> tuple[int, int]:
        first_sibling = re.match(r"\d+", read(cpu))
        return (cpu if first_sibling is None else int(first_sibling[0])), cpu

    return sorted(cpus, key=order)


def _read_siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return ""


def bind(plan: LaunchPlan, place: RankPlace, root: Path = Path("/")) -> CoreBinding:
    """Pins this process as planned, close to its GPU, and sets environment variables for threads and order of GPUs.
    Must run before numpy, torch or Horovod are imported, which read the variables.
    """
    allowed = by_physical_core(os.sched_getaffinity(0))
    num_cores = plan.layout.cores_per_rank
    number, gpus = _gpus_of_ranks(place, root)
    pinned = False
    cores = allowed
    if plan.system.launch.pin:
        if len(allowed) == num_cores and place.local_size > 1 and plan.system.launch.launcher != "local":
            pinned = True  # the launcher has bound each rank to its own share already
        elif num_cores * place.local_size <= len(allowed):
            if number is None or num_cores * len(gpus) > len(allowed):
                cores = allowed[place.local_rank * num_cores : (place.local_rank + 1) * num_cores]
            else:
                cores = list(deal(allowed, num_cores, [gpu.cores for gpu in gpus])[number])
            os.sched_setaffinity(0, cores)
            pinned = True
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(num_cores)
    warnings = _unbound(plan, len(allowed), os.cpu_count() or len(allowed))
    if plan.system.launch.by_mpi and os.environ.get(YIELD) == "1":
        warnings.insert(
            0,
            f"Open MPI yields its core while it waits ({YIELD}=1), as if ranks shared cores: messages take longer than "
            "with busy waiting",
        )
    gpu = gpus[number] if number is not None else None
    return CoreBinding(cores=tuple(cores), pinned=pinned, threads=num_cores, warnings=tuple(warnings), gpu=gpu)


def _gpus_of_ranks(place: RankPlace, root: Path) -> tuple[int | None, list[Gpu]]:
    """Returns the index of this rank's GPU, None if it is not known, and the GPUs of the ranks of its node. If the
    launcher shows each rank one GPU, these are all GPUs of the machine, also those that no rank uses.
    """
    if not has_gpu(root):
        return None, []
    os.environ.setdefault(ORDER, BY_BUS)
    slices = slices_listed(os.environ.get(VISIBLE))
    if len(slices) > 1 and place.local_size <= len(slices):
        # CUDA shows a process only the first slice of the list, so each rank gets a list of one.
        os.environ[VISIBLE] = slices[place.local_rank]
    visible = list(gpus_of_node(os.environ, root))
    if len(visible) == 1 and place.local_size > 1:
        buses = list(nvidia_buses(root))
        if visible[0].is_slice or visible[0].pci_bus_id not in buses:
            return None, visible
        gpus = []
        for bus in buses:
            node, cores = place_of(bus, root)
            gpus.append(Gpu(uuid="", pci_bus_id=bus, numa_node=node, cores=cores))
        number = buses.index(visible[0].pci_bus_id)
        gpus[number] = visible[0]
        return number, gpus
    if place.local_size > len(visible):
        return None, visible
    return place.local_rank, visible[: place.local_size]


def deal(cores: Sequence[int], num_cores: int, near: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """Gives each rank `num_cores` cores, those of `near` first, which ranks divide if they share them."""
    free = list(cores)
    dealt: list[list[int]] = [[] for _ in near]
    ranks_by_cores: dict[frozenset[int], list[int]] = {}
    for rank, near_cores in enumerate(near):
        ranks_by_cores.setdefault(frozenset(near_cores), []).append(rank)
    for near_cores, ranks in ranks_by_cores.items():
        free_near = [core for core in free if core in near_cores]
        share, num_larger = divmod(len(free_near), len(ranks))
        for position, rank in enumerate(ranks):
            num_dealt = min(num_cores, share + int(position < num_larger))
            dealt[rank], free_near = free_near[:num_dealt], free_near[num_dealt:]
        used = set().union(*(dealt[rank] for rank in ranks))
        free = [core for core in free if core not in used]
    for rank in range(len(near)):
        missing = num_cores - len(dealt[rank])
        dealt[rank] += free[:missing]
        free = free[missing:]
    return [tuple(rank_cores) for rank_cores in dealt]


def _unbound(plan: LaunchPlan, allowed: int, num_processors: int) -> list[str]:
    """Returns a warning if srun did not bind this rank although the system requests it; srun itself only warns."""
    cpu_bind = plan.system.slurm.cpu_bind
    by_srun = plan.system.launch.launcher in ("srun-mpi", "srun-gloo")
    if cpu_bind is None or not by_srun or not _BINDING.match(cpu_bind):
        return []
    if allowed < num_processors or plan.layout.cores_per_rank >= num_processors:
        return []
    return [
        f"slurm.cpu_bind {cpu_bind} had no effect: Slurm let the rank run on all {num_processors} processors of its "
        "node; it needs TaskPlugin task/affinity (slurm.conf)"
    ]


@dataclass(frozen=True, kw_only=True)
class RankCores:
    """The cores on which one rank may run."""

    rank: int
    host: str
    cores: Collection[int]
    threads: int  # Compute threads, as planned.
    pinned: bool  # True if the rank was bound, by itself or by its launcher.


def check_sharing(ranks: Sequence[RankCores]) -> tuple[set[int], tuple[str, ...]]:
    """Returns the ranks that share no cores with others, directly or through other ranks, and a warning for each set of
    ranks with fewer cores than threads. Masks of any size count as pinned if they do not overlap: Slurm rounds up to
    whole cores, or gives sockets.
    """
    pinned: set[int] = set()
    warnings: list[str] = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        on_host = [rank for rank in ranks if rank.host == host]
        for group in _overlapping(on_host):
            if len(group) == 1 and (len(on_host) > 1 or group[0].pinned):
                pinned.add(group[0].rank)
            cores = set().union(*(rank.cores for rank in group))
            threads = sum(rank.threads for rank in group)
            if threads > len(cores):
                warnings.append(_sharing_warning(group, host, threads, len(cores)))
    return pinned, tuple(warnings)


def _overlapping(ranks: Sequence[RankCores]) -> list[list[RankCores]]:
    """Returns the sets of ranks that are connected by common cores."""
    groups: list[tuple[set[int], list[RankCores]]] = []
    for rank in ranks:
        merged_cores, merged_ranks = set(rank.cores), [rank]
        separate = []
        for cores, members in groups:
            if cores.isdisjoint(rank.cores):
                separate.append((cores, members))
            else:
                merged_cores |= cores
                merged_ranks += members
        groups = [*separate, (merged_cores, merged_ranks)]
    return [sorted(members, key=attrgetter("rank")) for _, members in groups]


def _sharing_warning(group: Sequence[RankCores], host: str, threads: int, num_cores: int) -> str:
    cores = f"{counted(num_cores, 'core')} of {host}"
    if len(group) == 1:
        return f"rank {group[0].rank} computes with {threads} threads on {cores}"
    return (
        f"{len(group)} ranks of {counted(group[0].threads, 'core')} on {cores}: ranks share cores; "
        "figures say nothing about scaling"
    )
