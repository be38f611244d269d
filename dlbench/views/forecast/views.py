"""Views of what is not measured: scaling laws, published anchors, forecasts."""

from __future__ import annotations

from dlbench.report.view import View
from dlbench.views.forecast.charts import forecast_charts
from dlbench.views.forecast.tables import forecast_sheets, forecast_words
from dlbench.views.scaling.verdict import more_ranks

VIEWS: tuple[View, ...] = (
    View(
        id="forecast",
        title="Laws, anchors and forecasts",
        place="group",
        is_for=lambda group: group.outlook is not None,
        remedy=lambda group: f"one rank count only: the same workload with --ranks {more_ranks(group)} gives a law.",
        words=forecast_words,
        charts=forecast_charts,
        sheets=forecast_sheets,
        template="sheets.html.j2",
    ),
)
"""Forecasts never share a line style, a column or a headline with measurements."""
