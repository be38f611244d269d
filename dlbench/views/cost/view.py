"""The view `cost`: rank-hours of a million samples, by rank count."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import place_text, value_text
from dlbench.views.cost.numbers import Cost, CostPoint, cost
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView, place_columns


class CostView(GroupView):
    """What a sample costs in allocated time."""

    id = "cost"
    title = "Allocated time"
    key = "cost"

    def numbers(self, source: GroupSource) -> Cost:
        """By rank count."""
        return cost(source.group)

    def section(self, group: Group) -> Section | None:
        """One table."""
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
