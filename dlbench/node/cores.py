"""Binds a rank to cores, before any thread pool is created."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import BY_BUS, ORDER, VISIBLE, Gpu, gpus_of_node, nvidia_buses, place_of, slices_listed
from dlbench.node.ranks import RankPlace
from dlbench.specs.plan import YIELD, LaunchPlan
from dlbench.units import counted


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

    In the order of their numbers, two ranks would often share physical cores. `siblings` returns the text of a
    processor's `thread_siblings_list`, e.g. ``0,4`` or ``0-1``; by default it is read from /sys.
    """
    read = siblings or _read_siblings

    def order(cpu: int) -> tuple[int, int]:
        first_sibling = re.match(r"\d+", read(cpu))
        if first_sibling is None:
            return cpu, cpu
        return int(first_sibling[0]), cpu

    return sorted(cpus, key=order)


def _read_siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return ""


def bind(plan: LaunchPlan, place: RankPlace, root: Path = Path("/")) -> CoreBinding:
    """Pins this process as planned, close to its GPU, and sets environment variables for threads and order of GPUs.

    Must run before numpy, torch or Horovod are imported, which read the variables. If the launcher has bound the rank,
    only `check_sharing` can tell whether other ranks share its cores.
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
    """Returns the index of this rank's GPU, None if it is not known, and the GPUs of the ranks of its node.

    If the launcher shows each rank one GPU, a rank does not see those of others: then all GPUs of the machine are
    returned, also those that no rank uses.
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


_BINDING = re.compile(r"(quiet,|verbose,|[qv],)?(cores|threads|rank|map_|mask_)")
"""Kinds of srun's --cpu-bind that give no rank all cores of a node, unless it needs all."""


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


@dataclass(frozen=True, kw_only=True)
class CoreSharing:
    """The result of comparing the cores of all ranks."""

    pinned: frozenset[int]  # Ranks that are bound to cores on which no other rank of their node may run.
    warnings: tuple[str, ...]  # One for each set of ranks with fewer cores than threads.


def check_sharing(ranks: Sequence[RankCores]) -> CoreSharing:
    """Finds the ranks that share no cores with others, and those that share too few.

    A rank alone on its node counts as pinned if it was bound. Of several ranks those do whose masks do not overlap with
    others, whatever their size: Slurm rounds up to whole cores, or gives sockets. Ranks whose masks overlap, directly
    or through other ranks, share the cores of all of them.
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
    return CoreSharing(pinned=frozenset(pinned), warnings=tuple(warnings))


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
