"""The clocks of all nodes on one axis: nanoseconds since the earliest thing the run's files tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from dlbench.errors import IncompleteDataError
from dlbench.records.clocks import MAX_DRIFT_PPM, ClockLine, ClockPoint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.int64]

Basis = Literal["reference", "exchanges", "wall clock", "own start"]
"""How a node's times came onto the axis: they are node 0's; by comparing clocks during the run; by the two nodes' wall
clocks, whose error nobody knows; not at all, the node's own beginning was put at zero."""

LARGEST_NS = 1 << 60
"""A time or a length that is as large (36 years) is damage."""
_LARGEST_DRIFT = 0.01
"""No kernel corrects its clock faster in a run: beyond that, and beyond their bounds, two points contradict."""


@dataclass(frozen=True, kw_only=True)
class NodeClock:
    """One node's clock; can be sent to other processes."""

    node: int
    host: str
    basis: Basis
    points: tuple[tuple[int, int], ...] = ()
    """Local time and what to add there to have node 0's, nanoseconds: `ClockLine.used_points`."""
    shift_ns: int = 0
    """What to add everywhere, beyond the points."""
    bound_ns: int | None = None
    """Largest possible error from the first thing that the node's files tell to the last comparison of clocks; what
    happened later is off by up to `MAX_DRIFT_PPM` of the time since more. None where it is unknown."""
    problem: str = ""

    @property
    def is_known(self) -> bool:
        """Whether clocks were compared, so that the error is bounded."""
        return self.basis in ("reference", "exchanges")

    def align(self, local_ns: Times) -> Times:
        """Times of CLOCK_MONOTONIC of this node on the axis; the order of times is kept.

        The same numbers as `ClockLine.offset_at`, for arrays of any shape.
        """
        import numpy as np

        if not self.points:
            return local_ns + self.shift_ns
        at = np.array([point[0] for point in self.points], dtype=np.int64)
        offsets = np.array([point[1] for point in self.points], dtype=np.int64)
        limit = MAX_DRIFT_PPM / 1_000_000
        inside = np.diff(offsets) / np.diff(at)
        outside = np.clip(inside if len(inside) else [0.0], -limit, limit)
        slopes = np.concatenate([outside[:1], inside, outside[-1:]])
        part = np.searchsorted(at, local_ns, side="right")
        start = np.maximum(part - 1, 0)
        turned = np.rint(slopes[part] * (local_ns - at[start])).astype(np.int64)
        aligned: Times = local_ns + offsets[start] + turned + self.shift_ns
        return aligned


@dataclass(frozen=True, kw_only=True)
class Axis:
    """All clocks, and where zero is."""

    clocks: tuple[NodeClock, ...]
    """By node."""
    zero_ns: int
    """Zero on node 0's CLOCK_MONOTONIC."""
    wall_zero_ns: int | None
    """Zero on node 0's wall clock, nanoseconds since 1970; None where it was not told."""


def make_axis(lines: Mapping[int, ClockLine], hosts: Mapping[int, str], earliest: Mapping[int, int]) -> Axis:
    """The axis on which every time is zero or more.

    Args:
        lines: what is known of clocks, by node.
        hosts: of all nodes.
        earliest: first time in the files of a node, on its own clock; nodes without any are missing.

    Raises:
        IncompleteDataError: points of a clock contradict each other, or there is no time at all.
    """
    import numpy as np

    if not earliest:
        raise IncompleteDataError("no rank left step times or spans, and no node samples")
    clocks = {node: _node_clock(node, host, lines, earliest.get(node)) for node, host in hosts.items()}
    firsts = {node: int(clocks[node].align(np.array([time]))[0]) for node, time in earliest.items()}
    placed = [first for node, first in firsts.items() if clocks[node].basis != "own start"]
    zero = min(placed or firsts.values())
    done = []
    for node, clock in sorted(clocks.items()):
        begin = firsts.get(node, zero) if clock.basis == "own start" else zero
        done.append(replace(clock, shift_ns=clock.shift_ns - begin))
    wall = lines[0].wall_offset_ns if 0 in lines else 0
    return Axis(clocks=tuple(done), zero_ns=zero, wall_zero_ns=wall + zero if wall else None)


def _node_clock(node: int, host: str, lines: Mapping[int, ClockLine], first_ns: int | None) -> NodeClock:
    line = lines.get(node)
    problem = line.problem if line is not None else "the run's record says nothing of this node's clock"
    if node == 0:
        return NodeClock(node=node, host=host, basis="reference", bound_ns=0)
    if line is not None and line.points:
        _check(node, [point.offset_ns for point in line.points])
        _check_drift(node, line.points)
        points = tuple((point.local_ns, point.offset_ns) for point in line.used_points)
        bound = max((line.bound_at(at) or 0) for at in (*(at for at, _ in points), first_ns) if at is not None)
        return NodeClock(node=node, host=host, basis="exchanges", points=points, bound_ns=bound, problem=problem)
    # Wall clocks start at 1970; a zero means that nobody read one.
    walls = (line.wall_offset_ns, lines[0].wall_offset_ns) if line is not None and 0 in lines else (0, 0)
    if line is not None and all(walls):
        shift = walls[0] - walls[1]
        _check(node, [shift])
        return NodeClock(node=node, host=host, basis="wall clock", shift_ns=shift, problem=problem)
    return NodeClock(node=node, host=host, basis="own start", problem=problem)


def _check(node: int, offsets: list[int]) -> None:
    if any(abs(offset) >= LARGEST_NS for offset in offsets):
        raise IncompleteDataError(f"record.json: damaged: watch.nodes: the clock of node {node} has an offset of years")


def _check_drift(node: int, points: tuple[ClockPoint, ...]) -> None:
    """Refuses points of which no clock can have shown both."""
    for one, other in combinations(points, 2):
        possible = one.bound_ns + other.bound_ns + _LARGEST_DRIFT * (other.local_ns - one.local_ns)
        if abs(other.offset_ns - one.offset_ns) > possible:
            raise IncompleteDataError(
                f"record.json: damaged: watch.nodes: the clock of node {node} drifts as no clock does"
            )
