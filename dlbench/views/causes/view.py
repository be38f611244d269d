"""The view `causes`: what the lost percent is lost to, and what to try next."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.specs.collectives.network import NetworkModel
from dlbench.views.causes.charts import cause_charts
from dlbench.views.causes.numbers import LostPercent, lost_percent
from dlbench.views.causes.tables import experiment_sheet, lost_sheet, seconds_sheet
from dlbench.views.causes.words import findings, remarks
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView

VARIANT = (
    "not shown: in these runs something was taken away on purpose; the plain runs beside them have this view, and "
    "dlbench diagnose says what the difference is."
)
"""Why a group has no causes."""


class CausesView(GroupView):
    """What the lost percent is lost to."""

    id = "causes"
    title = "The lost percent, by cause"
    key = "causes"

    def __init__(self, network: NetworkModel | None = None) -> None:
        """The view; with fitted costs of the network it forecasts what other exchanges would give."""
        self.network = network

    def numbers(self, source: GroupSource) -> LostPercent | None:
        """Factors and causes of each rank count, and who was waited for."""
        return lost_percent(source.group, source.table, self.network)

    def section(self, group: Group) -> Section | None:
        """Points and seconds lost to each cause, and experiments."""
        found = group.of(LostPercent)
        if found is None:
            return None
        points = found.diagnosed.points
        has_loss = len(points) > 1
        experiments = experiment_sheet(points)
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.parts_caption}.",
            words=tuple(findings(found.diagnosed)),
            charts=lambda: cause_charts(group, points),
            sheets=(
                *((lost_sheet(points),) if has_loss else ()),
                seconds_sheet(points, has_data=not has_loss),
                *((experiments,) if experiments.rows else ()),
            ),
            notes=tuple(remarks(found.diagnosed)),
        )

    def remedy(self, group: Group) -> str:
        """Why runs with something taken away have none."""
        return VARIANT
