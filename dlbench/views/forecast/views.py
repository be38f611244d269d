"""Views of what is not measured: scaling laws, published anchors, forecasts."""

from __future__ import annotations

from dlbench.report.view import View
from dlbench.views.forecast.charts import outlook_charts
from dlbench.views.forecast.tables import outlook_sheets, outlook_words
from dlbench.views.scaling.verdict import more_ranks

VIEWS: tuple[View, ...] = (
    View(
        id="outlook",
        title="Laws, anchors and forecasts",
        place="group",
        is_for=lambda group: group.outlook is not None,
        remedy=lambda group: f"one rank count only: the same workload with --ranks {more_ranks(group)} gives a law.",
        words=outlook_words,
        charts=outlook_charts,
        sheets=outlook_sheets,
        template="sheets.html.j2",
    ),
)
"""Forecasts never share a line style, a column or a headline with measurements."""
