"""Binds a rank to cores of its own, before any thread pool is made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlbench.machine.arithmetic import has_gpu
from dlbench.machine.gpus import BY_BUS, ORDER, VISIBLE, Gpu, gpus_of_node, nvidia_buses, place_of, slices_listed
from dlbench.node.ranks import RankPlace
from dlbench.specs.plan import YIELD, LaunchPlan


@dataclass(frozen=True, kw_only=True)
class CoreBinding:
    """The cores of a rank and what is doubtful about how it uses them."""

    cores: tuple[int, ...]
    pinned: bool
    """Whether it was bound, by itself or by its launcher; to cores of its own, if no other rank may run there."""
    threads: int
    warnings: tuple[str, ...]
    gpu: Gpu | None = None  # The GPU that this rank will compute on, as far as that is known before torch is imported.


def by_physical_core(cpus: Iterable[int], siblings: Callable[[int], str] | None = None) -> list[int]:
    """Processors in such an order that an even share holds whole physical cores, hyper-threads side by side.

    In the order of their numbers, two ranks of a machine with hyper-threads would often get the same physical cores.

    `siblings`: text of a processor's `thread_siblings_list`, e.g. ``0,4`` or ``0-1``; default: from /sys.
    """
    read = siblings or _read_siblings

    def first(cpu: int) -> int:
        found = re.match(r"\d+", read(cpu))
        return int(found[0]) if found else cpu

    return sorted(cpus, key=lambda cpu: (first(cpu), cpu))


def _read_siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return ""


def bind(plan: LaunchPlan, place: RankPlace, root: Path = Path("/")) -> CoreBinding:
    """Pins this process as planned, next to its GPU, and sets what libraries read at import: threads, order of GPUs.

    Must run before numpy, torch or Horovod are imported. Whether a mask that the launcher gave is this rank's own shows
    only when ranks have met: see `settle`.
    """
    allowed = by_physical_core(os.sched_getaffinity(0))
    wanted = plan.layout.cores_per_rank
    needed = wanted * place.local_size
    seat, seats = _seats_by_gpu(place, root)
    pinned = False
    cores = allowed
    if plan.system.launch.pin:
        if len(allowed) == wanted and place.local_size > 1 and plan.system.launch.launcher != "local":
            pinned = True  # the launcher has bound each rank to its own share already
        elif needed <= len(allowed):
            if seat is None or wanted * len(seats) > len(allowed):
                cores = allowed[place.local_rank * wanted : (place.local_rank + 1) * wanted]
            else:
                cores = list(deal(allowed, wanted, [gpu.cores for gpu in seats])[seat])
            os.sched_setaffinity(0, cores)
            pinned = True
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(wanted)
    warnings = _unbound(plan, len(allowed), os.cpu_count() or len(allowed))
    if plan.system.launch.by_mpi and os.environ.get(YIELD) == "1":
        slow = "as if ranks shared cores: messages take longer than where it spins"
        warnings.insert(0, f"Open MPI yields its core while it waits ({YIELD}=1), {slow}")
    return CoreBinding(
        cores=tuple(cores),
        pinned=pinned,
        threads=wanted,
        warnings=tuple(warnings),
        gpu=None if seat is None else seats[seat],
    )


def _seats_by_gpu(place: RankPlace, root: Path) -> tuple[int | None, list[Gpu]]:
    """This rank's GPU among those of the ranks of its node, as a number, and these; None where that is not known.

    A rank that is shown one GPU, as its launcher chose, does not see the others' GPUs: all GPUs of the machine count
    then, also those of no rank.
    """
    if not has_gpu(root):
        return None, []
    os.environ.setdefault(ORDER, BY_BUS)
    slices = slices_listed(os.environ.get(VISIBLE))
    if len(slices) > 1 and place.local_size <= len(slices):
        # CUDA shows a process the first slice alone: each rank is given its own.
        os.environ[VISIBLE] = slices[place.local_rank]
    seen = list(gpus_of_node(os.environ, root))
    if len(seen) == 1 and place.local_size > 1:
        buses = list(nvidia_buses(root))
        if seen[0].is_slice or seen[0].pci_bus_id not in buses:
            return None, seen
        others = [place_of(bus, root) for bus in buses]
        seats = [
            Gpu(uuid="", pci_bus_id=bus, numa_node=node, cores=cores)
            for bus, (node, cores) in zip(buses, others, strict=True)
        ]
        own = buses.index(seen[0].pci_bus_id)
        seats[own] = seen[0]
        return own, seats
    if place.local_size > len(seen):
        return None, seen
    return place.local_rank, seen[: place.local_size]


def deal(cores: Sequence[int], wanted: int, near: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """Gives each rank of a node N cores of its own, those next to its GPU first.

    Ranks with the same cores next to them share these evenly where they do not suffice, and take the rest from what the
    others leave over.
    """
    left = list(cores)
    dealt: list[list[int]] = [[] for _ in near]
    groups: dict[frozenset[int], list[int]] = {}
    for rank, close in enumerate(near):
        groups.setdefault(frozenset(close), []).append(rank)
    for close, ranks in groups.items():
        own = [core for core in left if core in close]
        share, more = divmod(len(own), len(ranks))
        for place, rank in enumerate(ranks):
            take = min(wanted, share + (place < more))
            dealt[rank], own = own[:take], own[take:]
        taken = {core for rank in ranks for core in dealt[rank]}
        left = [core for core in left if core not in taken]
    for rank in range(len(near)):
        missing = wanted - len(dealt[rank])
        dealt[rank] += left[:missing]
        left = left[missing:]
    return [tuple(own) for own in dealt]


_FINE = re.compile(r"(quiet,|verbose,|[qv],)?(cores|threads|rank|map_|mask_)")
"""Kinds of srun's --cpu-bind that leave no rank all of a node, unless it needs all of it."""


def _unbound(plan: LaunchPlan, allowed: int, there: int) -> list[str]:
    """What shows that srun did not bind this rank, though the system asks for it: it only warns of that itself."""
    asked = plan.system.slurm.cpu_bind
    by_srun = plan.system.launch.launcher in ("srun-mpi", "srun-gloo")
    if asked is None or not by_srun or not _FINE.match(asked):
        return []
    if allowed < there or plan.layout.cores_per_rank >= there:
        return []
    return [
        f"slurm.cpu_bind {asked} did not act: Slurm let the rank run on all {there} processors of its node; it needs "
        "TaskPlugin task/affinity (slurm.conf)"
    ]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The cores of one rank, as the others know them."""

    rank: int
    host: str
    cores: Collection[int]  # Those that it may run on.
    threads: int  # Compute threads, as planned.
    pinned: bool  # Whether it was bound, by itself or by its launcher.


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What the masks of all ranks say together."""

    pinned: frozenset[int]  # Ranks bound to cores of their own: no other rank of their node may run there.
    warnings: tuple[str, ...]  # One for each set of ranks with fewer cores than threads.


def settle(seats: Sequence[Seat]) -> Settled:
    """Which ranks have cores of their own, and which share too few.

    A rank alone on its node is bound if it says so. Of several those are whose mask meets no other one's, whatever its
    size: Slurm rounds up to whole cores, or gives sockets. Ranks whose masks meet, also by way of a third rank, share
    the cores of all of them.
    """
    pinned: set[int] = set()
    warnings: list[str] = []
    for host in dict.fromkeys(seat.host for seat in seats):
        here = [seat for seat in seats if seat.host == host]
        for group in _sharing(here):
            if len(group) == 1 and (len(here) > 1 or group[0].pinned):
                pinned.add(group[0].rank)
            cores = set().union(*(seat.cores for seat in group))
            threads = sum(seat.threads for seat in group)
            if threads > len(cores):
                warnings.append(_shared(group, host, threads, len(cores)))
    return Settled(pinned=frozenset(pinned), warnings=tuple(warnings))


def _sharing(seats: Sequence[Seat]) -> list[list[Seat]]:
    """Sets of ranks that cores connect."""
    groups: list[tuple[set[int], list[Seat]]] = []
    for seat in seats:
        meeting = [group for group in groups if group[0].intersection(seat.cores)]
        groups = [group for group in groups if group not in meeting]
        cores = set(seat.cores).union(*(group[0] for group in meeting))
        groups.append((cores, [*(one for group in meeting for one in group[1]), seat]))
    return [sorted(members, key=lambda seat: seat.rank) for _, members in groups]


def _shared(group: Sequence[Seat], host: str, threads: int, cores: int) -> str:
    on = f"{cores} core{'s' * (cores > 1)} of {host}"
    if len(group) == 1:
        return f"rank {group[0].rank} computes with {threads} threads on {on}"
    return (
        f"{len(group)} ranks of {group[0].threads} core{'s' * (group[0].threads > 1)} on {on}: ranks share cores; "
        "figures say nothing about scaling"
    )
