"""How the clock of one node stands to that of node 0: points of known offset, and the line through them.

All times are nanoseconds of CLOCK_MONOTONIC, which starts anywhere on each machine. Between two points the offset is
interpolated, which takes up a constant drift; outside of them the nearest line goes on, as far as clocks drift at all.
The error of a line grows with its length beyond the points, and without end where they are close: of two points whose
bounds, divided by the time between them, exceed what a clock may drift, only the narrower one is used.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from dlbench.lazy import Times, np
from dlbench.specs.base import Count, CountOrZero, RankNumber, Spec

MAX_DRIFT_PPM = 500  # Difference of the speed of two clocks, millionths: MAXFREQ, RFC 5905, appendix A.1.1.

# What the 8 bytes of a clock hold; more would be no time.
Nanoseconds = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ClockPoint(Spec):
    """One estimate of the offset."""

    local_ns: Nanoseconds = Field(description="When, by the node's own clock.")
    offset_ns: Nanoseconds = Field(description="Clock of node 0 less the node's own.")
    bound_ns: CountOrZero = Field(
        description="Largest possible error: half of the shortest round trip, and what clocks may drift apart in it."
    )
    num_exchanges: Count = Field(description="Round trips it was chosen from.")


class ClockLine(Spec):
    """One node's clock."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    points: tuple[ClockPoint, ...] = Field(
        (),
        description="Estimates in the order of time; none where nothing was exchanged. Node 0 has none and is exact.",
    )
    wall_offset_ns: Nanoseconds = Field(
        description="Wall clock (since 1970) less the node's own clock, when it was read."
    )
    problem: str = Field("", description="Why there is no point, or only one; empty if all went well.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        times = [point.local_ns for point in self.points]
        if any(one >= other for one, other in pairwise(times)):
            raise ValueError("points: must be in the order of time, no two at the same")
        return self

    @property
    def is_known(self) -> bool:
        """Whether times of this node can be compared with those of node 0."""
        return self.node_rank == 0 or bool(self.points)

    @cached_property
    def used_points(self) -> tuple[ClockPoint, ...]:
        """Points that the line goes through: of those that are too close for a slope, the narrowest; none on node 0."""
        used: list[ClockPoint] = []
        for point in self.points if self.node_rank else ():
            while used and _too_close(used[-1], point) and point.bound_ns < used[-1].bound_ns:
                used.pop()
            if not used or not _too_close(used[-1], point):
                used.append(point)
        return tuple(used)

    def offsets_at(self, local_ns: Times) -> Times:
        """Returns what to add to local times, in an array of any shape, to have node 0's; 0 where nothing is known."""
        used = self.used_points
        if not used:
            return np.zeros_like(local_ns)
        at = np.array([point.local_ns for point in used], dtype=np.int64)
        offsets = np.array([point.offset_ns for point in used], dtype=np.int64)
        limit = MAX_DRIFT_PPM / 1_000_000
        inside = np.diff(offsets) / np.diff(at)
        outside = np.clip(inside if len(inside) else [0.0], -limit, limit)
        slopes = np.concatenate([outside[:1], inside, outside[-1:]])
        part = np.searchsorted(at, local_ns, side="right")
        start = np.maximum(part - 1, 0)
        total: Times = offsets[start] + np.rint(slopes[part] * (local_ns - at[start])).astype(np.int64)
        return total

    def offset_at(self, local_ns: int) -> int:
        """Returns what `offsets_at` says of one time."""
        return int(self.offsets_at(np.array([local_ns], dtype=np.int64))[0])

    def bound_at(self, local_ns: int) -> int | None:
        """Largest possible error of `offset_at`, nanoseconds; 0 on node 0, None where nothing is known.

        It holds for a clock whose drift against node 0's is constant and at most `MAX_DRIFT_PPM`. Between two points
        the error is a mean of theirs; outside of them the bound of the nearest grows by `MAX_DRIFT_PPM`: neither the
        slope of two used points nor no slope at all is further from the truth. 1 more, as offsets are whole numbers.
        """
        used = self.used_points
        if not used:
            return 0 if self.node_rank == 0 else None
        number = sum(point.local_ns <= local_ns for point in used)
        near = used[max(0, number - 1) : number + 1]
        outside = max(used[0].local_ns - local_ns, local_ns - used[-1].local_ns, 0)
        return max(point.bound_ns for point in near) - (-outside * MAX_DRIFT_PPM // 1_000_000) + 1


def _too_close(one: ClockPoint, other: ClockPoint) -> bool:
    """Whether the slope between two points may be wrong by more than a clock drifts."""
    return (one.bound_ns + other.bound_ns) * 1_000_000 > MAX_DRIFT_PPM * (other.local_ns - one.local_ns)
