"""The report of the collective benchmark as one HTML page, in the frame of `dlbench.report.formats.html`."""

from __future__ import annotations

from typing import Any

from dlbench.collectives.page import formats as comm_formats
from dlbench.collectives.page import tabular as comm_tabular
from dlbench.collectives.page import wording as comm_wording
from dlbench.collectives.page.charts import comm_charts
from dlbench.collectives.page.model import CommReport
from dlbench.report.formats.html import MAX_CHARTED_GROUPS, MAX_LISTED_RUNS, download, draw, render_page

_DOWNLOADS: tuple[tuple[comm_formats.TableName, str], ...] = (
    ("points", "measured points"),
    ("ratios", "ratios to libraries"),
    ("fits", "fitted costs"),
    ("runs", "runs"),
)


def to_html(report: CommReport) -> str:
    """The page; equal reports give equal bytes. It reads without scripts, and loads nothing."""
    drawn: dict[str, list[dict[str, Any]]] = {}
    specs: dict[str, Any] = {}
    for group in report.groups[:MAX_CHARTED_GROUPS]:
        for chart in comm_charts(group):
            drawn.setdefault(group.id, []).append(draw(chart))
            specs[chart.id] = chart.spec
    return render_page(
        "comm.html.j2",
        specs=specs,
        downloads=[
            download(f"comm-{table}", title, comm_formats.to_csv(report, table))
            for table, title in _DOWNLOADS
            if table != "runs" or len(report.runs) <= MAX_LISTED_RUNS
        ],
        report=report,
        charts=drawn,
        comm_tabular=comm_tabular,
        comm_wording=comm_wording,
        max_charted_groups=MAX_CHARTED_GROUPS,
        max_listed_runs=MAX_LISTED_RUNS,
    )
