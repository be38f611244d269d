"""The view `cost`: rank-hours of a million samples, by rank count."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import basis_text, figure_text, place_text
from dlbench.views.cost.numbers import Cost, CostPoint, cost
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView, place_columns

CAPTION = (
    "Allocated time of a million samples at the measured rate: ranks x time. Steps alone, without start, evaluations "
    "and checkpoints."
)


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
        return Section(
            id=self.id, title=self.title, words=(_finding(found),), sheets=(_sheet(found.points, group.caption),)
        )


def _finding(found: Cost) -> str:
    last = found.points[-1]
    return (
        f"At {place_text(last.ranks, last.nodes)} a million samples take {figure_text(last.rank_hours)} rank-hours "
        f"({basis_text(last.rank_hours)})."
    )


def _sheet(points: tuple[CostPoint, ...], conditions: str) -> Sheet[CostPoint]:
    columns: tuple[Column[CostPoint], ...] = (
        *place_columns(),
        Column("rank_hours_per_million_samples", "Rank-hours", lambda point: point.rank_hours, has_interval=True),
        Column("node_hours_per_million_samples", "Node-hours", lambda point: point.node_hours, has_interval=True),
    )
    return Sheet(
        name="cost",
        title="Rank-hours of a million samples",
        columns=columns,
        rows=points,
        caption=f"{CAPTION} {conditions}.",
    )
