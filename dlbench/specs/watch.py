"""How a run is watched while it trains: the sampler of each node, and the window in which single layers are seen."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dlbench.specs.base import Bytes, Flag, Ranks, Spec

WINDOW_STEPS = 3
"""Warm-up steps whose layers are watched, unless the plan says otherwise."""

MAX_WINDOW_STEPS = 64
"""Largest window: what it sees is held in memory until the warm-up is over."""

MAX_TRACE_BYTES = 20_000_000
"""Default of `watch.max_bytes`. With step files of about 27 bytes per step and rank, 1,024 ranks of 1,000 steps leave
less than 50 MB behind."""


class WatchSpec(Spec):
    """Monitoring and profiling besides the phases of every step, which every run records."""

    sampler: Flag = Field(
        True, description="One sampler per node, a process of its own, reads NVML, host counters and clocks."
    )
    period_s: Annotated[float, Field(ge=0.1, le=60)] = Field(
        1.0, description="Seconds between two samples; slow sources are read every tenth time."
    )
    window_steps: Annotated[int, Field(strict=True, ge=0, le=MAX_WINDOW_STEPS)] = Field(
        WINDOW_STEPS,
        description="Warm-up steps in which layers are profiled one by one, before those from which the engine takes "
        "the times of its exchange where the warm-up has room for both; reading and messages from there to the end of "
        "the warm-up. 0: none. Measured steps are never profiled.",
    )
    window_ranks: Ranks = Field(64, description="Ranks that keep such a window, spread evenly over the run.")
    max_bytes: Bytes = Field(
        MAX_TRACE_BYTES,
        description="Size limit of all spans and samples of the run, shared out over ranks and nodes; what does not "
        "fit is counted and left out.",
    )
    profiler: Flag = Field(
        False, description="torch.profiler on rank 0 in the window; its operators and kernels join the trace."
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is watched; where not, nothing is written and the record says nothing of it."""
        return self.sampler or self.window_steps > 0
