"""The clock of a node relative to node 0: measured offsets (nanoseconds of CLOCK_MONOTONIC), and the line through them.
Outside of the points the nearest line continues, with a slope of at most `MAX_DRIFT_PPM`.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from dlbench.lazy import Times, np
from dlbench.specs.base import Count, CountOrZero, RankNumber, Spec

MAX_DRIFT_PPM = 500  # Difference of the speed of two clocks, millionths: MAXFREQ, RFC 5905, appendix A.1.1.

# The range of an 8-byte clock.
Nanoseconds = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ClockPoint(Spec):
    """A measured offset."""

    local_ns: Nanoseconds = Field(description="Time by the node's clock.")
    offset_ns: Nanoseconds = Field(description="Clock of node 0 minus the node's.")
    bound_ns: CountOrZero = Field(description="Largest error: half of the shortest round trip, and drift in it.")
    num_exchanges: Count = Field(description="Number of round trips; the shortest counts.")


class ClockLine(Spec):
    """The clock of a node."""

    node_rank: RankNumber = Field(description="The node, from 0.")
    host: str = Field(description="Its host name.")
    points: tuple[ClockPoint, ...] = Field((), description="Offsets by time; none on node 0 (exact), or not measured.")
    wall_offset_ns: Nanoseconds = Field(description="Wall clock (since 1970) minus the node's clock, when read.")
    problem: str = Field("", description="Why there is no point, or only one; empty: none.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        times = [point.local_ns for point in self.points]
        if any(earlier >= later for earlier, later in pairwise(times)):
            raise ValueError("points: must be in the order of time, no two at the same")
        return self

    @property
    def is_known(self) -> bool:
        """Returns whether times of this node can be compared with those of node 0."""
        return self.node_rank == 0 or bool(self.points)

    @cached_property
    def used_points(self) -> tuple[ClockPoint, ...]:
        """Returns the points of the line: of points too close for a slope only the narrowest; none on node 0."""
        used: list[ClockPoint] = []
        for point in self.points if self.node_rank else ():
            while used and _too_close(used[-1], point) and point.bound_ns < used[-1].bound_ns:
                used.pop()
            if not used or not _too_close(used[-1], point):
                used.append(point)
        return tuple(used)

    def offsets_at(self, local_ns: Times) -> Times:
        """Returns what to add to local times, in an array of any shape, for those of node 0; 0 without points."""
        used = self.used_points
        if not used:
            return np.zeros_like(local_ns)
        point_times_ns = np.array([point.local_ns for point in used], dtype=np.int64)
        offsets = np.array([point.offset_ns for point in used], dtype=np.int64)
        limit = MAX_DRIFT_PPM / 1_000_000
        inside = np.diff(offsets) / np.diff(point_times_ns)
        outside = np.clip(inside if len(inside) else [0.0], -limit, limit)
        slopes = np.concatenate([outside[:1], inside, outside[-1:]])
        segments = np.searchsorted(point_times_ns, local_ns, side="right")
        start = np.maximum(segments - 1, 0)
        total: Times = offsets[start] + np.rint(slopes[segments] * (local_ns - point_times_ns[start])).astype(np.int64)
        return total

    def bounds_at(self, local_ns: Times) -> Times:
        """Returns the largest errors of `offsets_at`, ns, for a constant drift, of a clock that is known; 0 on node 0.

        Between points it is the larger of their bounds, beyond it grows by `MAX_DRIFT_PPM`; 1 is added for rounding.
        """
        used = self.used_points
        if not used:
            return np.zeros_like(local_ns)
        point_times_ns = np.array([point.local_ns for point in used], dtype=np.int64)
        bounds = np.array([point.bound_ns for point in used], dtype=np.int64)
        near = np.maximum(np.append(bounds, bounds[-1]), np.append(bounds[:1], bounds))
        outside = np.maximum(np.maximum(point_times_ns[0] - local_ns, local_ns - point_times_ns[-1]), 0)
        drift = -(-outside // (1_000_000 // MAX_DRIFT_PPM))
        total: Times = near[np.searchsorted(point_times_ns, local_ns, side="right")] + drift + 1
        return total

    def bound_at(self, local_ns: int) -> int | None:
        """Returns `bounds_at` one time; None without points."""
        return int(self.bounds_at(np.array([local_ns], dtype=np.int64))[0]) if self.is_known else None


def _too_close(first: ClockPoint, second: ClockPoint) -> bool:
    """Returns whether the error of the slope between two points may exceed the drift of clocks."""
    return (first.bound_ns + second.bound_ns) * 1_000_000 > MAX_DRIFT_PPM * (second.local_ns - first.local_ns)
