"""The view `history`: what has changed over months, and which nodes are slow, next to the runs of a report."""

from __future__ import annotations

import dataclasses

from dlbench.history.charts import host_charts, series_chart
from dlbench.history.report import TrendsReport
from dlbench.history.tables import changes_sheet, hosts_sheet, series_sheet
from dlbench.report.document import Section
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

MAX_CHARTED = 6  # Series drawn and named; `dlbench history trends` shows more.


class HistoryView(ReportView):
    """A history next to the runs: its changes, series and nodes."""

    id = "history"
    title = "Over time"
    key = "history"
    after = "systems"

    def numbers(self, source: ReportSource) -> TrendsReport | None:
        return source.history if isinstance(source.history, TrendsReport) else None

    def shown(self, report: Report, found: TrendsReport) -> Section:
        words = (
            found.finding,
            *[f"{one.label}: {one.verdict}" for one in found.by_newest_change if one.changes][:MAX_CHARTED],
            *(f"{one.label}: {one.newest_nights_text}" for one in found.series if one.newest),
            *(f"Slow now: {host.sentence}." for host in found.nodes.slow),
        )
        changed, slow = sum(bool(one.changes) for one in found.series), len(found.nodes.slow)
        sheets = (changes_sheet(found), series_sheet(found), hosts_sheet(found.nodes, found.nodes.hosts))
        return Section(
            headline=f"{changed} of {len(found.series)} series changed; {slow or 'no'} slow host{'s' * (slow != 1)}",
            words=words,
            charts=lambda: [*map(series_chart, found.by_newest_change[:MAX_CHARTED]), *host_charts(found.nodes)],
            charts_per_row=1,
            # Other tables of the report have such names.
            sheets=tuple(
                dataclasses.replace(sheet, name=f"history-{sheet.name}", in_terminal=False) for sheet in sheets
            ),
            brief=words,
        )

    def remedy(self, report: Report) -> str:
        return "dlbench history import RUNS --store DIR, then report with --history DIR."
