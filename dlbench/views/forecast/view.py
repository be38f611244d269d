"""The view `forecast`: scaling laws, published figures and forecasts; none of them is measured.

Forecasts never share a line style, a column or a headline with measurements.
"""

from __future__ import annotations

from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import percent, points
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
    title = "Laws, anchors and forecasts"
    key = "forecast"

    def numbers(self, source: GroupSource) -> Forecast | None:
        """None for a group of one point."""
        return forecast(source.group, source.table, is_crowded=source.is_crowded)

    def section(self, group: Group) -> Section | None:
        """The fit, the forecast and the published figures, each a table of its own."""
        found = group.of(Forecast)
        if found is None:
            return None
        sheets: list[Sheet[Any]] = []
        if found.law is not None:
            sheets.append(law_sheet(group, found.law))
            if found.forecasts:
                sheets.append(forecast_sheet(group, found, found.law))
        if found.same_work:
            sheets.append(anchor_sheet(found.same_work))
        return Section(
            id=self.id,
            title=self.title,
            words=_words(found),
            charts=lambda: forecast_charts(group, found),
            sheets=tuple(sheets),
        )

    def remedy(self, group: Group) -> str:
        """More rank counts."""
        return f"one rank count only: the same workload with --ranks {more_ranks(group)} gives a law."


def _words(found: Forecast) -> tuple[str, ...]:
    """What the law says, whether anything follows from it, and what was published of the same work."""
    words = [found.why_no_law] if found.law is None else [_law_text(found.law), found.why_no_forecast]
    words += [
        f"Published of the same work: {anchor.title}, {percent(anchor.efficiency)} at {anchor.ranks:,} ranks "
        f"({anchor.hardware}; baseline: {anchor.baseline}; {anchor.source})."
        for anchor in found.same_work
    ]
    return (*words, found.why_no_anchor)


def _law_text(law: Law) -> str:
    """The law, its coefficients, and how well it holds, in one or two sentences."""
    named = f"Law: {law.name}, {law.formula} (k: ranks over the baseline's, T: time of a step's work)"
    missed = f"{points(law.worst_residual)} of efficiency"
    text = f"{named}, with {coefficients_text(law)}; it misses no measured point by more than {missed}."
    if law.is_ruled_out:
        text = f"No law of the family fits; the nearest misses a measured point by {missed}. {named}."
    if law.hindcast_error is not None:
        text += (
            f" Fitted without the largest point, it would have missed {law.hindcast_ranks} ranks by "
            f"{points(abs(law.hindcast_error))}."
        )
    return text
