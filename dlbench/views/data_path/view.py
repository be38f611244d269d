"""The view of the data path."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.views.data_path.charts import data_charts
from dlbench.views.data_path.tables import data_sheets


def _data_words(group: Group) -> tuple[str, ...]:
    return () if group.data_path is None else (group.data_path.verdict, *group.data_path.notes)


VIEWS: tuple[View, ...] = (
    View(
        id="data-path",
        title="Data path",
        place="group",
        is_for=lambda group: group.data_path is not None,
        words=_data_words,
        charts=data_charts,
        sheets=data_sheets,
        template="sheets.html.j2",
    ),
)
