"""Monitoring of a run, and faults of known size that test whether reports detect them."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from dlbench.specs.base import ActsIf, Bytes, Flag, NonNegative, RankNumber, Ranks, Spec

WINDOW_STEPS = 3  # Default number of warm-up steps whose layers are profiled.
MAX_WINDOW_STEPS = 64  # Largest number of them: the profiles stay in memory until the warm-up ends.

MAX_TRACE_BYTES = 20_000_000
"""Default of `watch.max_bytes`. With step files of about 27 bytes per step and rank, 1,024 ranks of 1,000 steps leave
less than 50 MB behind."""


class WatchSpec(Spec):
    """Monitoring and profiling, in addition to the phase times that every run records."""

    acting = (
        ActsIf("period_s", "watch.sampler", why="watch.sampler is off, and nothing else uses a period"),
        ActsIf(
            "window_ranks profiler", "watch.window_steps", why="watch.window_steps is 0: no step is watched closely"
        ),
        ActsIf(
            "window_steps", "has_room_for_window", why="the window lies in the warm-up, and measure.warmup_steps is 0"
        ),
        ActsIf("max_bytes", "watch.is_on", why="nothing is watched: watch.sampler is off and watch.window_steps is 0"),
    )

    sampler: Flag = Field(True, description="Sample NVML, host counters and clocks by a process on each node.")
    period_s: Annotated[float, Field(ge=0.1, le=60)] = Field(
        1.0, description="Sampling interval, seconds; slow sources are read every tenth time."
    )
    window_steps: Annotated[int, Field(strict=True, ge=0, le=MAX_WINDOW_STEPS)] = Field(
        WINDOW_STEPS,
        description="Number of warm-up steps in which layers are profiled one by one; input and messages are profiled "
        "from there to the end of the warm-up. If the warm-up is long enough, the steps lie before those in which the "
        "engine times its exchange. 0: none. Measured steps are never profiled.",
    )
    window_ranks: Ranks = Field(64, description="Number of ranks that are profiled, spread evenly over the run.")
    max_bytes: Bytes = Field(
        MAX_TRACE_BYTES,
        description="Size limit of all spans and samples of the run, bytes, divided over ranks and nodes; entries that "
        "do not fit are counted and left out.",
    )
    profiler: Flag = Field(
        False, description="Run torch.profiler on rank 0 in these steps, with a trace in the run's folder."
    )

    @property
    def is_on(self) -> bool:
        """Returns whether anything is monitored; if not, no files are written and the record has no such entry."""
        return self.sampler or self.window_steps > 0


class FaultSpec(Spec):
    """A fault that slows chosen ranks. A run with a fault is compared only with runs of the same fault."""

    ranks: tuple[RankNumber, ...] | None = Field(
        None, min_length=1, description="Ranks with the fault, a list or text: 1, or 0,3; none: all ranks."
    )
    compute_factor: Annotated[float, Field(strict=True, ge=1)] = Field(
        1.0,
        description="Factor by which forward and backward pass together are slowed: after each forward pass the rank "
        "sleeps (factor - 1) x 3 x its duration, because a backward pass counts as two forward passes.",
    )
    input_delay_s: NonNegative = Field(0.0, description="Delay of each batch, seconds.")
    step_delay_s: NonNegative = Field(0.0, description="Delay at the end of each step, outside of all phases, seconds.")

    def acts_on(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_from_text(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if isinstance(value, str):
            if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
                raise ValueError("must be ranks separated by commas, e.g. 1 or 0,3")
            return tuple(int(part) for part in value.split(","))
        return value

    @field_validator("ranks", mode="after")
    @classmethod
    def _ranks_once(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("a rank is given twice")
        return None if value is None else tuple(sorted(value))

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.compute_factor == 1.0 and self.input_delay_s == 0.0 and self.step_delay_s == 0.0:
            raise ValueError("sets no fault: set compute_factor above 1, input_delay_s or step_delay_s")
        return self
