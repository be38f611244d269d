"""All clocks of a run on one axis: nanoseconds since the earliest thing that its files say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times
from dlbench.records.clocks import ClockLine, ClockPoint

LARGEST_NS = 1 << 60  # A time or a length that is as large (36 years) is damage.
_LARGEST_DRIFT = 0.01  # No kernel corrects a clock faster: beyond that and their bounds, two points contradict.

Basis = Literal["reference", "exchanges", "wall clock", "own start"]
"""How a node's times came onto the axis: they are node 0's; by comparing clocks during the run; by the two nodes' wall
clocks, whose error nobody knows; not at all, the node's own beginning was put at zero."""


@dataclass(frozen=True, kw_only=True)
class NodeClock:
    """One node's clock."""

    node: int
    host: str
    basis: Basis
    line: ClockLine | None = None  # Through comparisons with node 0's; None where it is not on the axis by these.
    shift_ns: int = 0  # What to add everywhere, beyond the line.
    bound_ns: int | None = None
    """Largest possible error from the first thing in the node's files to the last comparison of clocks; what
    happened later is off by up to `MAX_DRIFT_PPM` of the time since more. None where it is unknown."""
    problem: str = ""

    @property
    def unknown(self) -> str:
        """What a title says of a clock that was not compared, so that its error has no bound; else empty."""
        return "" if self.basis in ("reference", "exchanges") else ", clock unknown"

    def align(self, local_ns: Times) -> Times:
        """Times of CLOCK_MONOTONIC of this node on the axis; the order of times is kept."""
        aligned: Times = local_ns + self.shift_ns
        return aligned if self.line is None else aligned + self.line.offsets_at(local_ns)


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """All clocks, and where zero is."""

    clocks: tuple[NodeClock, ...]  # By node.
    zero_ns: int  # Zero on node 0's CLOCK_MONOTONIC.
    wall_zero_ns: int | None  # Zero on node 0's wall clock, nanoseconds since 1970; None where it is unknown.


def make_axis(lines: Mapping[int, ClockLine], hosts: Mapping[int, str], earliest: Mapping[int, int]) -> TimeAxis:
    """The axis on which every time is zero or more.

    `earliest`: first time in the files of a node, on its own clock; nodes without any are missing. Raises
    IncompleteDataError: points of a clock contradict each other, or there is no time at all.
    """
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
    return TimeAxis(clocks=tuple(done), zero_ns=zero, wall_zero_ns=wall + zero if wall else None)


def _node_clock(node: int, host: str, lines: Mapping[int, ClockLine], first_ns: int | None) -> NodeClock:
    line = lines.get(node)
    problem = line.problem if line is not None else "the run's record says nothing of this node's clock"
    if node == 0:
        return NodeClock(node=node, host=host, basis="reference", bound_ns=0)
    if line is not None and line.points:
        _check(node, [point.offset_ns for point in line.points], line.points)
        moments = [point.local_ns for point in line.used_points]
        if first_ns is not None:
            moments.append(first_ns)
        bound = max(line.bound_at(moment) or 0 for moment in moments)
        return NodeClock(node=node, host=host, basis="exchanges", line=line, bound_ns=bound, problem=problem)
    # Wall clocks start at 1970; a zero means that nobody read one.
    walls = (line.wall_offset_ns, lines[0].wall_offset_ns) if line is not None and 0 in lines else (0, 0)
    if line is not None and all(walls):
        shift = walls[0] - walls[1]
        _check(node, [shift])
        return NodeClock(node=node, host=host, basis="wall clock", shift_ns=shift, problem=problem)
    return NodeClock(node=node, host=host, basis="own start", problem=problem)


def _check(node: int, offsets: Sequence[int], points: Sequence[ClockPoint] = ()) -> None:
    if any(abs(offset) >= LARGEST_NS for offset in offsets):
        raise IncompleteDataError(f"record.json: damaged: watch.nodes: the clock of node {node} has an offset of years")
    for one, other in combinations(points, 2):
        possible = one.bound_ns + other.bound_ns + _LARGEST_DRIFT * (other.local_ns - one.local_ns)
        if abs(other.offset_ns - one.offset_ns) > possible:
            raise IncompleteDataError(
                f"record.json: damaged: watch.nodes: the clock of node {node} drifts as no clock does"
            )
