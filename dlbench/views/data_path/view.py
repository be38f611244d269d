"""The view `data-path`: how long ranks wait for their samples, and what is known of reading."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.views.data_path.charts import data_charts
from dlbench.views.data_path.numbers import DataPath, data_path
from dlbench.views.data_path.tables import facts_sheet, input_sheet
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView


class DataPathView(GroupView):
    """From the data source to the device."""

    id = "data-path"
    title = "Data path"
    key = "data_path"

    def numbers(self, source: GroupSource) -> DataPath:
        """Every run has them."""
        return data_path(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """Waits by rank count, then what is known."""
        found = group.of(DataPath)
        if found is None:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=found.verdict,
            words=found.notes,
            charts=lambda: data_charts(group, found),
            sheets=(input_sheet(found.points, on_gpu=group.on_gpu), facts_sheet(found.facts)),
        )
