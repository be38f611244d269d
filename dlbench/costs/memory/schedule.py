"""What the simulator says of a pass: its operations in three lanes, how long it takes and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlbench.specs.memory import Prediction

Lane = Literal["compute", "out", "in"]
Kind = Literal["forward", "recompute", "backward", "outside", "wait", "swap out", "swap in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Something that one lane does."""

    lane: Lane
    kind: Kind
    """outside: what is not of the chain (before it, head and loss, after it). wait: computing stands still."""
    block: int | None
    """Number of the block, from 0; for wait the block that waits. None: outside."""
    start_s: float
    """From the start of the pass."""
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A simulated pass."""

    operations: tuple[Operation, ...]
    """In the order of their start."""
    makespan: float
    """The pass, seconds."""
    useful_s: float
    """The pass in core, seconds."""
    recompute_s: float
    """Recomputing, seconds; what transfers slow down included."""
    room_wait_s: float
    """Forward passes waited for room, seconds."""
    swap_wait_s: float
    """Backward passes waited for what comes back, or for its room, seconds."""
    peak_bytes: int
    """The most that is held at a time: `chain.fixed_bytes` and activations."""
    swapped_bytes: int
    """What leaves the device; as much comes back."""
    over_bytes: int
    """By how much the capacity is too small; 0: it fits."""
    held: tuple[tuple[float, int], ...]
    """What is held (as `peak_bytes`) from each of these times on; times ascend."""

    @property
    def fits(self) -> bool:
        """Whether the pass can be executed within the capacity."""
        return self.over_bytes == 0

    @property
    def stall_s(self) -> float:
        """Computing stands still for a transfer or for room, seconds."""
        return self.room_wait_s + self.swap_wait_s

    @property
    def occupancy(self) -> float:
        """Share of the pass in which something is computed, recomputing included."""
        return _share(self.makespan - self.stall_s, self.makespan)

    @property
    def efficiency(self) -> float:
        """Useful time over the pass."""
        return _share(self.useful_s, self.makespan)


def predicted(schedule: Schedule) -> Prediction:
    """The schedule in the numbers that a plan and a record hold."""
    return Prediction(
        pass_s=schedule.makespan,
        useful_s=schedule.useful_s,
        recompute_s=schedule.recompute_s,
        stall_s=schedule.stall_s,
        occupancy=schedule.occupancy,
        efficiency=schedule.efficiency,
        peak_bytes=schedule.peak_bytes,
        swapped_bytes=schedule.swapped_bytes,
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0
