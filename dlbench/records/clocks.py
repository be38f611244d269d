"""How the clock of one node stands to that of node 0: points of known offset, and the line through them.

All times are nanoseconds of CLOCK_MONOTONIC, which starts anywhere on each machine. Between two points the offset is
interpolated, which takes up a constant drift; outside of them the nearest line goes on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from dlbench.specs.base import Count, CountOrZero, Spec

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

    node_rank: CountOrZero = Field(description="The node, from 0.")
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
        """Whether times of this node can be set beside those of node 0."""
        return self.node_rank == 0 or bool(self.points)

    @property
    def drift(self) -> float | None:
        """Change of the offset in a unit of time (1), from the first to the last point; None with fewer than two."""
        if len(self.points) < 2:
            return None
        first, last = self.points[0], self.points[-1]
        return (last.offset_ns - first.offset_ns) / (last.local_ns - first.local_ns)

    @property
    def bound_ns(self) -> int | None:
        """Largest of the points' error bounds; 0 on node 0, None where nothing is known."""
        if self.node_rank == 0:
            return 0
        return max((point.bound_ns for point in self.points), default=None)

    def offset_at(self, local_ns: int) -> int:
        """What to add to a local time to have node 0's; 0 where nothing is known."""
        points = self.points
        if self.node_rank == 0 or not points:
            return 0
        if len(points) == 1:
            return points[0].offset_ns
        number = next((n for n in range(1, len(points) - 1) if local_ns < points[n].local_ns), len(points) - 1)
        one, other = points[number - 1], points[number]
        slope = (other.offset_ns - one.offset_ns) / (other.local_ns - one.local_ns)
        return one.offset_ns + round(slope * (local_ns - one.local_ns))
