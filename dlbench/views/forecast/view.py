"""The view `forecast`: scaling laws, published figures and forecasts; none of them is measured.

Forecasts never share a line style, a column or a headline with measurements.
"""

from __future__ import annotations

from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import figure_text, percent, points
from dlbench.views.forecast.charts import forecast_charts
from dlbench.views.forecast.laws import Law
from dlbench.views.forecast.numbers import Forecast, forecast
from dlbench.views.forecast.tables import anchor_sheet, coefficients_text, forecast_sheet, law_sheet
from dlbench.views.model import Group
from dlbench.views.scaling.verdict import more_ranks
from dlbench.views.view import GroupSource, GroupView


class ForecastView(GroupView):
    """What the measured points let expect of more ranks."""

    id = "forecast"
    title = "Scaling laws and forecast"
    key = "forecast"

    def numbers(self, source: GroupSource) -> Forecast | None:
        """None for a group of one point."""
        return forecast(source.group, source.table, is_crowded=source.is_crowded)

    def section(self, group: Group) -> Section | None:
        """The fit, the forecast and the published figures, each a table of its own."""
        found = group.of(Forecast)
        if found is None or (found.law is None and not found.same_work):
            return None
        sheets: list[Sheet[Any]] = []
        if found.law is not None:
            sheets.append(law_sheet(found.law))
            if found.forecasts:
                sheets.append(forecast_sheet(group, found))
        if found.same_work:
            sheets.append(anchor_sheet(found.same_work))
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            words=_words(found),
            charts=lambda: forecast_charts(group, found),
            sheets=tuple(sheets),
        )

    def remedy(self, group: Group) -> str:
        """More rank counts."""
        found = group.of(Forecast)
        if found is not None:
            return found.why_no_law
        return f"one rank count only: run the same workload with --ranks {more_ranks(group)}."


def _headline(found: Forecast) -> str:
    """The forecast that reaches furthest, or why there is none."""
    if found.forecasts:
        last = found.forecasts[-1]
        return f"forecast, not measured: {figure_text(last.efficiency)} efficiency at {last.ranks:,} ranks"
    if found.law is not None:
        return "no law fits the measured points" if found.law.is_ruled_out else f"{found.law.name} fits; no forecast"
    one = found.same_work[0]
    return f"published for the same work: {percent(one.efficiency)} at {one.ranks:,} ranks"


def _words(found: Forecast) -> tuple[str, ...]:
    """What the law says, and whether anything follows from it."""
    words = [found.why_no_law] if found.law is None else [_law_text(found.law), found.why_no_forecast]
    return tuple(words)


def _law_text(law: Law) -> str:
    """The law, its coefficients, and how well it holds, in one or two sentences."""
    missed = points(law.worst_residual)
    text = f"{law.name}: {law.formula} with {coefficients_text(law)} (k: ranks over the baseline's); within {missed}."
    if law.is_ruled_out:
        text = f"No law fits; the nearest, {law.name}, misses a measured point by {missed}."
    return f"{text} Fitted without {law.hindcast_ranks} ranks it misses them by {points(abs(law.hindcast_error))}."
