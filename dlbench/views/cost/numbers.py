"""Allocated time per sample: what a scaling point costs, beside how fast it is.

A rank that waits is allocated all the same. With Thr samples per second over p ranks, a million samples take
p 10^6 / (3,600 Thr) rank-hours, so the cost grows by 1 / efficiency over the baseline's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.reading.scaling import Group
from dlbench.stats.estimates import Estimate

SAMPLES = 1_000_000
HOUR_S = 3_600


@dataclass(frozen=True, kw_only=True)
class CostPoint:
    """One rank count."""

    ranks: int
    nodes: int
    rank_hours: Estimate
    """Of a million samples, `rank-h`."""
    node_hours: Estimate
    """The same of whole nodes, as centres bill them, `node-h`."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Allocated time of a group of runs, at the measured rate: steps alone, without start, evaluation, checkpoints."""

    points: tuple[CostPoint, ...]
    """By rank count, the baseline first."""


def cost(group: Group) -> Cost:
    """The cost of each scaling point."""
    return Cost(
        points=tuple(
            CostPoint(
                ranks=point.ranks,
                nodes=point.nodes,
                rank_hours=point.throughput_per_rank.inverted("s").scaled(SAMPLES / HOUR_S, "rank-h"),
                node_hours=point.throughput.inverted("s").scaled(point.nodes * SAMPLES / HOUR_S, "node-h"),
            )
            for point in group.points
        )
    )
