"""The schedulers that dlbench knows, by the names that system files have for them."""

from __future__ import annotations

from collections.abc import Callable

from dlbench.errors import UserError, nearest
from dlbench.jobs.scheduler import Scheduler


def _slurm() -> Scheduler:
    from dlbench.jobs.slurm.scheduler import Slurm

    return Slurm()


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {"slurm": _slurm}


def scheduler_named(name: str) -> Scheduler:
    """The scheduler of a name. Raises `UserError`: there is none."""
    if name not in SCHEDULERS:
        raise UserError(f"no scheduler {name}; {nearest(name, SCHEDULERS)}")
    return SCHEDULERS[name]()
