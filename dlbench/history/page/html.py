"""Trends as one HTML page, in the frame of `dlbench.report.formats.html`."""

from __future__ import annotations

from typing import Any

from dlbench.history.page import formats as trends_formats
from dlbench.history.page import tables as trends_tables
from dlbench.history.page import words as trends_words
from dlbench.history.page.charts import host_charts, series_chart
from dlbench.history.page.model import TrendsReport
from dlbench.history.page.words import telling_first
from dlbench.report.formats.html import download, draw, render_page

MAX_CHARTED = 20
"""Series drawn: those with changes first; all stand in the tables."""

MAX_HOSTS = 50
"""Hosts listed; the CSV holds all."""

_DOWNLOADS: tuple[tuple[trends_tables.TableName, str], ...] = (
    ("changes", "change points"),
    ("series", "series"),
    ("nights", "nights"),
    ("hosts", "hosts by month"),
)


def to_html(report: TrendsReport) -> str:
    """The page; equal reports give equal bytes. It reads without scripts, and loads nothing."""
    charts: dict[str, list[dict[str, Any]]] = {}
    specs: dict[str, Any] = {}
    told = telling_first(report)[:MAX_CHARTED]
    drawn = [(series.id, series_chart(series)) for series in told]
    drawn += [("nodes", chart) for chart in host_charts(report.nodes)]
    for place, chart in drawn:
        charts.setdefault(place, []).append(draw(chart))
        specs[chart.id] = chart.spec
    return render_page(
        "trends.html.j2",
        specs=specs,
        downloads=[
            download(f"trends-{table}", title, trends_formats.to_csv(report, table)) for table, title in _DOWNLOADS
        ],
        report=report,
        told=told,
        charts=charts,
        max_hosts=MAX_HOSTS,
        trends_tables=trends_tables,
        trends_words=trends_words,
    )
