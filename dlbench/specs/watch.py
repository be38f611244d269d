"""How a run is watched while it trains: the sampler of each node, and the window in which single layers are seen."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dlbench.specs.base import Count, CountOrZero, Flag, Spec

WINDOW_STEPS = 3
"""Last warm-up steps that are watched closely, unless the plan says otherwise."""

MAX_TRACE_BYTES = 20_000_000
"""Default of `watch.max_bytes`. With step files of about 27 bytes a step and rank, 1,024 ranks of 1,000 steps leave
less than 50 MB behind."""


class WatchSpec(Spec):
    """What is watched besides the phases of every step, which every run records."""

    sampler: Flag = Field(
        True, description="One sampler a node reads NVML, host counters and clocks; in a process of its own."
    )
    period_s: Annotated[float, Field(ge=0.1, le=60)] = Field(
        1.0, description="Seconds between two samples; slow sources are read every tenth time."
    )
    window_steps: CountOrZero = Field(
        WINDOW_STEPS,
        description="Last warm-up steps in which layers, messages and reading of batches are watched one by one; "
        "0: none. Measured steps are never watched so.",
    )
    window_ranks: Count = Field(64, description="Ranks that keep such a window, spread evenly over the run.")
    max_bytes: Count = Field(
        MAX_TRACE_BYTES,
        description="Size limit of all spans and samples of the run, shared out over ranks and nodes; what does not "
        "fit is counted and left out.",
    )
    profiler: Flag = Field(
        False, description="torch.profiler on rank 0 in the window; its operators and kernels join the trace."
    )
