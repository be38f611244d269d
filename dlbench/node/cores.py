"""Binds a rank to cores of its own, before any thread pool is made."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dlbench.node.ranks import RankPlace
from dlbench.specs.plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class CoreBinding:
    """The cores of a rank and what is doubtful about them."""

    cores: tuple[int, ...]
    pinned: bool
    threads: int
    warnings: tuple[str, ...]


def bind(plan: RunPlan, place: RankPlace) -> CoreBinding:
    """Pins this process as planned and sets the thread counts that libraries read at import.

    Must run before numpy, torch or Horovod are imported.
    """
    allowed = sorted(os.sched_getaffinity(0))
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
