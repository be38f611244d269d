"""The history of a report's runs as one of its views: what has changed over time, and which nodes are slow."""

from __future__ import annotations

from collections.abc import Callable

from dlbench.history.page import tables
from dlbench.history.page.charts import host_charts, series_chart
from dlbench.history.page.model import TrendsReport
from dlbench.history.page.words import host_sentence, newest_text, telling_first
from dlbench.report.charts.chart import Chart
from dlbench.report.model import Report
from dlbench.report.view import Sheet, View
from dlbench.report.wording import runs_text

MAX_CHARTED = 6
"""Series drawn in a report; `dlbench history trends` draws more."""

MAX_HOSTS = 50

REMEDY = (
    "Changes over time, and slow nodes over months: bring runs into a history (dlbench history import RUNS --store "
    "DIR), and report with --history DIR."
)


def history_view(of: Callable[[Report], TrendsReport | None]) -> View:
    """The view of a report that was made with a history; `of` finds it in the report."""

    def told(report: Report) -> TrendsReport:
        found = of(report)
        assert found is not None
        return found

    return View(
        id="history",
        title="Over time",
        place="closing",
        template="sheets.html.j2",
        is_shown=lambda report: of(report) is not None,
        report_remedy=lambda report: REMEDY,
        report_words=lambda report: words(told(report)) if of(report) else (),
        report_charts=lambda report: charts(told(report)) if of(report) else [],
        report_sheets=lambda report: sheets(told(report)) if of(report) else [],
    )


def words(found: TrendsReport) -> tuple[str, ...]:
    """The finding in sentences."""
    worse = [series for series, change in found.changes if change.kind == "regression"]
    better = len(found.changes) - len(worse)
    long_enough = sum(series.is_long_enough for series in found.series)
    told = [
        f"In {runs_text(found.num_runs)} of the history, {long_enough} of {len(found.series)} series are long enough "
        f"to tell changes: {len(worse)} regressions and {better} improvements."
    ]
    told += [f"{one.label}: {one.verdict}" for one in telling_first(found) if one.changes][:MAX_CHARTED]
    told += [f"{one.label}: {newest_text(one.newest, one.title, one.unit)}" for one in found.series if one.newest]
    told += [f"Slow now: {host_sentence(host)}." for host in found.nodes.hosts if host.verdict == "slow"]
    return tuple(told)


def charts(found: TrendsReport) -> list[Chart]:
    """Series with the newest changes, then slow hosts."""
    return [*map(series_chart, telling_first(found)[:MAX_CHARTED]), *host_charts(found.nodes)]


def sheets(found: TrendsReport) -> list[Sheet]:
    """Change points, series, and hosts by month."""
    basis = "levels are medians over nights, a night is the median of its runs; in brackets 95 % bootstrap over nights"
    made = [
        Sheet(
            name="history-changes",
            title="Change points",
            text=tables.changes(found.changes),
            caption=f"Newest first; {basis}. What differs is a place to look, not a proven cause.",
            columns=tables.CHANGE_COLUMNS,
            rows=tuple(tables.change_rows(found)),
            in_terminal=True,
        ),
        Sheet(
            name="history-series",
            title="Series",
            text=tables.series_rows(found.series),
            caption=f"{basis.capitalize()}.",
            columns=tables.SERIES_COLUMNS,
            rows=tuple(tables.series_records(found)),
        ),
    ]
    if found.nodes.hosts:
        made.append(
            Sheet(
                name="history-hosts",
                title="Nodes over months",
                text=tables.hosts(found.nodes, MAX_HOSTS),
                caption="Own work of a host's slowest rank over that of the other hosts' slowest ranks, medians over "
                "runs; in brackets 95 % bootstrap over runs, or ranges of fewer than five.",
                columns=tables.HOST_COLUMNS,
                rows=tuple(tables.host_rows(found.nodes)),
            )
        )
    return [sheet for sheet in made if len(sheet.text) > 1]
