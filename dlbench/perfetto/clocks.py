"""Aligns all clocks of a run on one axis: nanoseconds since the earliest time in its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from dlbench.errors import IncompleteDataError
from dlbench.lazy import Times
from dlbench.records.clocks import ClockLine, ClockPoint

LARGEST_NS = 1 << 60  # Times or durations from here on (36 years) are damage.
_LARGEST_DRIFT = 0.01  # Largest rate at which a kernel corrects a clock; points that drift more contradict each other.

Basis = Literal["reference", "exchanges", "wall clock", "own start"]
"""Alignment of a node's times: node 0's own; by comparing clocks; by wall clocks, of unknown error; none, from zero."""


@dataclass(frozen=True, kw_only=True)
class NodeClock:
    """One node's clock."""

    node: int
    host: str
    basis: Basis
    line: ClockLine | None = None  # Offsets to node 0's clock by comparisons; None with another `basis`.
    shift_ns: int = 0  # Added to all times, in addition to the line.
    bound_ns: int | None = None
    """Largest error until the last comparison of clocks, growing by `MAX_DRIFT_PPM` after it; None if unknown."""
    problem: str = ""

    @property
    def unknown(self) -> str:
        """Suffix of a title for a clock that was not compared, so that its error has no bound; otherwise empty."""
        return "" if self.basis in ("reference", "exchanges") else ", clock unknown"

    def align(self, local_ns: Times) -> Times:
        """Returns times of CLOCK_MONOTONIC of this node on the axis; their order does not change."""
        aligned: Times = local_ns + self.shift_ns
        if self.line is not None:
            aligned = aligned + self.line.offsets_at(local_ns)
        return aligned


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """All clocks, and the zero of the axis."""

    clocks: tuple[NodeClock, ...]  # By node.
    zero_ns: int  # Zero on node 0's CLOCK_MONOTONIC.
    wall_zero_ns: int | None  # Zero on node 0's wall clock, nanoseconds since 1970; None if unknown.


def make_axis(lines: Mapping[int, ClockLine], hosts: Mapping[int, str], earliest: Mapping[int, int]) -> TimeAxis:
    """Returns an axis from each node's `earliest` time; raises `IncompleteDataError` for contradictory or no times."""
    if not earliest:
        raise IncompleteDataError("no rank left step times or spans, and no node samples")
    clocks = {node: _node_clock(node, host, lines, earliest.get(node)) for node, host in hosts.items()}
    first_times = {node: int(clocks[node].align(np.array([time]))[0]) for node, time in earliest.items()}
    aligned_times = [time for node, time in first_times.items() if clocks[node].basis != "own start"]
    zero = min(aligned_times or first_times.values())
    shifted = []
    for node, clock in sorted(clocks.items()):
        begin = first_times.get(node, zero) if clock.basis == "own start" else zero
        shifted.append(replace(clock, shift_ns=clock.shift_ns - begin))
    wall_zero_ns: int | None = None
    if 0 in lines and lines[0].wall_offset_ns:
        wall_zero_ns = lines[0].wall_offset_ns + zero
    return TimeAxis(clocks=tuple(shifted), zero_ns=zero, wall_zero_ns=wall_zero_ns)


def _node_clock(node: int, host: str, lines: Mapping[int, ClockLine], first_ns: int | None) -> NodeClock:
    line = lines.get(node)
    problem = line.problem if line is not None else "the run's record has no data of this node's clock"
    if node == 0:
        return NodeClock(node=node, host=host, basis="reference", bound_ns=0)
    if line is not None and line.points:
        _check(node, [point.offset_ns for point in line.points], line.points)
        moments = [point.local_ns for point in line.used_points]
        if first_ns is not None:
            moments.append(first_ns)
        bound = max(line.bound_at(moment) or 0 for moment in moments)
        return NodeClock(node=node, host=host, basis="exchanges", line=line, bound_ns=bound, problem=problem)
    # Wall clocks start at 1970; a zero means that the clock was not read.
    if line is not None and line.wall_offset_ns and 0 in lines and lines[0].wall_offset_ns:
        shift = line.wall_offset_ns - lines[0].wall_offset_ns
        _check(node, [shift])
        return NodeClock(node=node, host=host, basis="wall clock", shift_ns=shift, problem=problem)
    return NodeClock(node=node, host=host, basis="own start", problem=problem)


def _check(node: int, offsets: Sequence[int], points: Sequence[ClockPoint] = ()) -> None:
    if any(abs(offset) >= LARGEST_NS for offset in offsets):
        raise IncompleteDataError(f"record.json: damaged: watch.nodes: the clock of node {node} has an offset of years")
    for first, second in combinations(points, 2):
        possible_ns = first.bound_ns + second.bound_ns + _LARGEST_DRIFT * (second.local_ns - first.local_ns)
        if abs(second.offset_ns - first.offset_ns) > possible_ns:
            raise IncompleteDataError(
                f"record.json: damaged: watch.nodes: the clock of node {node} drifts as no clock does"
            )
