"""The view `parts`: where the time of a step goes, phase by phase."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.views.model import Group
from dlbench.views.parts.charts import part_charts
from dlbench.views.parts.tables import lost_sheet, parts_sheet
from dlbench.views.view import GroupView

NOTE = (
    "Parts are means, so that they sum to the step; efficiency above is of geometric means. Waiting for slower ranks "
    "is part of the exchange."
)


class PartsView(GroupView):
    """Phases of a step, as each rank times them."""

    id = "parts"
    title = "Where the time goes"

    def section(self, group: Group) -> Section:
        """Seconds of each part, and what is lost to it."""
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.parts_caption}. In brackets: the interval.",
            charts=lambda: part_charts(group),
            sheets=(parts_sheet(group.points), lost_sheet(group)),
            notes=(NOTE,),
            where={
                "sample_unit": group.sample_unit,
                "scaling": group.scaling,
                "baseline_ranks": group.baseline.ranks,
            },
        )
