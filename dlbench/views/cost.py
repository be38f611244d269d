"""Allocated time per sample: what a scaling point costs, beside how fast it is.

A rank that waits is allocated all the same. With Thr samples per second over p ranks, a million samples take
p 10^6 / (3,600 Thr) rank-hours, so the cost grows by 1 / efficiency over the baseline's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlbench.reading import scaling
from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView, place_columns

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


def cost(group: scaling.Group) -> Cost:
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


class CostView(GroupView):
    """What a sample costs in allocated time."""

    id = "cost"
    title = "Allocated time"
    key = "cost"

    def numbers(self, source: GroupSource) -> Cost:
        return cost(source.group)

    def section(self, group: Group) -> Section | None:
        found = group.of(Cost)
        if found is None:
            return None
        return Section(id=self.id, title=self.title, headline=_headline(found), sheets=(_sheet(found.points),))


def _headline(found: Cost) -> str:
    last = found.points[-1]
    return (
        f"{value_text(last.rank_hours)} rank-hours per million samples at {place_text(last.ranks, last.nodes)}, "
        "training steps alone"
    )


def _sheet(points: tuple[CostPoint, ...]) -> Sheet[CostPoint]:
    columns: tuple[Column[CostPoint], ...] = (
        *place_columns(),
        Column("rank_hours_per_million_samples", "Rank-hours", lambda point: point.rank_hours, has_interval=True),
        Column("node_hours_per_million_samples", "Node-hours", lambda point: point.node_hours, has_interval=True),
    )
    return Sheet(
        name="cost",
        title="Per million samples",
        columns=columns,
        rows=points,
    )
