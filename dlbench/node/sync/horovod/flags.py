"""Horovod's own exchanges beside the flat one: variables that most builds ignore without a word."""

from __future__ import annotations

from typing import Any

from dlbench.errors import EnvironmentLacksError, UserError
from dlbench.node.ranks import RankPlace


def base_variables(exchange: str, *, is_watched: bool) -> dict[str, str]:
    """Variables of every run, so that those of the caller's shell do not act.

    Args:
        exchange: flat, horovod-hierarchical or horovod-torus.
        is_watched: whether the timeline can be opened later. All ranks must agree, because what they negotiate in
            depends on it.
    """
    found = {
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(exchange == "horovod-hierarchical")),
        "HOROVOD_TORUS_ALLREDUCE": str(int(exchange == "horovod-torus")),
    }
    return {**found, "HOROVOD_TIMELINE": "DYNAMIC"} if is_watched else found


def require_flag(hvd: Any, exchange: str, place: RankPlace, *, use_mpi: bool) -> None:
    """Whether this Horovod obeys the flag of the asked exchange (nccl_operations.cc and operations.cc of 0.28).

    Raises:
        EnvironmentLacksError: its build does not.
        UserError: the layout is one on which it does not.
    """
    asked = f"sync.exchange {exchange}"
    if not hvd.nccl_built():
        raise EnvironmentLacksError(
            f"{asked}: this Horovod was built without NCCL, and such builds ignore the flag without a word; use "
            "sync.exchange hierarchical, which dlbench itself does on any back-end"
        )
    if exchange == "horovod-hierarchical" and not use_mpi:
        raise EnvironmentLacksError(
            f"{asked}: Horovod goes across nodes by MPI here and ignores the flag without it; use an MPI launcher, or "
            "sync.exchange hierarchical"
        )
    if place.num_nodes == 1 and place.size > 1:
        raise UserError(f"{asked}: Horovod ignores the flag on a single node; use more nodes")
