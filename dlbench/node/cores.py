"""Binds a rank to cores of its own, before any thread pool is made."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dlbench.node.ranks import RankPlace
from dlbench.specs.plan import LaunchPlan


@dataclass(frozen=True, kw_only=True)
class CoreBinding:
    """The cores of a rank and what is doubtful about them."""

    cores: tuple[int, ...]
    pinned: bool
    threads: int
    warnings: tuple[str, ...]


def by_physical_core(cpus: Iterable[int], siblings: Callable[[int], str] | None = None) -> list[int]:
    """Processors in such an order that an even share holds whole physical cores, hyper-threads side by side.

    In the order of their numbers, two ranks of a machine with hyper-threads would often get the same physical cores.

    Args:
        cpus: numbers of processors.
        siblings: text of a processor's `thread_siblings_list`, e.g. ``0,4`` or ``0-1``; default: from /sys.
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


def bind(plan: LaunchPlan, place: RankPlace) -> CoreBinding:
    """Pins this process as planned and sets the thread counts that libraries read at import.

    Must run before numpy, torch or Horovod are imported.
    """
    allowed = by_physical_core(os.sched_getaffinity(0))
    wanted = plan.layout.cores_per_rank
    needed = wanted * place.local_size
    warnings = []
    pinned = False
    cores = allowed
    if plan.system.launch.pin:
        if len(allowed) == wanted and place.local_size > 1 and plan.system.launch.launcher != "local":
            pinned = True  # the launcher has bound each rank to its own share already
        elif needed <= len(allowed):
            cores = allowed[place.local_rank * wanted : (place.local_rank + 1) * wanted]
            os.sched_setaffinity(0, cores)
            pinned = True
        else:
            warnings.append(
                f"{place.local_size} ranks of {wanted} cores on {len(allowed)} cores: ranks share cores and were not "
                "pinned; figures say nothing about scaling"
            )
    elif needed > len(allowed):
        warnings.append(f"{place.local_size} ranks of {wanted} cores on {len(allowed)} cores: ranks share cores")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(wanted)
    return CoreBinding(cores=tuple(cores), pinned=pinned, threads=wanted, warnings=tuple(warnings))
