"""Horovod's own exchanges beside the flat one: variables that most builds ignore without a word."""

from __future__ import annotations


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
