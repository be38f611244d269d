"""The view `history`: changes over months, and slow nodes, next to the runs of a report."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dlbench.lazy import LazyModule
from dlbench.report.document import Section
from dlbench.units import counted, plural
from dlbench.views.model import Report, ReportSource, ReportView

if TYPE_CHECKING:
    from dlbench.history import document as history_document
    from dlbench.history import tables
else:
    history_document, tables = LazyModule("dlbench.history.document"), LazyModule("dlbench.history.tables")

MAX_CHARTED = 6  # Number of series that are drawn and named; `dlbench history trends` shows more.


class HistoryView(ReportView):
    """The changes, series and nodes of a history."""

    id = "history"
    title = "Over time"
    key = "history"
    after = "systems"
    lack = "dlbench history import RUNS --store DIR, then report with --history DIR."

    def numbers(self, source: ReportSource) -> tables.TrendsReport | None:
        if source.history is not None and isinstance(source.history, tables.TrendsReport):
            return source.history
        return None

    def shown(self, report: Report, trends: tables.TrendsReport) -> Section:
        changed = [series for series in trends.by_newest_change if series.changes]
        words = (
            trends.finding,
            *(f"{series.label}: {series.verdict}" for series in changed[:MAX_CHARTED]),
            *(f"{series.label}: {series.newest_nights_text}" for series in trends.series if series.newest),
            *(f"Slow now: {host.sentence}." for host in trends.nodes.slow),
        )
        num_slow = len(trends.nodes.slow)
        sheets = (
            tables.changes_sheet(trends),
            tables.series_sheet(trends),
            tables.hosts_sheet(trends.nodes, trends.nodes.hosts),
        )
        return Section(
            headline=f"{len(changed)} of {counted(len(trends.series), 'trend')} changed; {num_slow or 'no'} "
            f"{plural('slow host', num_slow)}",
            words=words,
            charts=lambda: [
                *map(history_document.series_chart, trends.by_newest_change[:MAX_CHARTED]),
                *history_document.host_charts(trends.nodes),
            ],
            charts_per_row=1,
            # Other tables of the report have the names without the prefix.
            sheets=tuple(
                dataclasses.replace(sheet, name=f"history-{sheet.name}", in_terminal=False) for sheet in sheets
            ),
            brief=words,
        )
