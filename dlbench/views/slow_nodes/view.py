"""The view of slow nodes, over all runs of a report."""

from __future__ import annotations

import dataclasses

from dlbench.reading.slow_nodes import SlowNodes
from dlbench.report.charts.chart import Chart
from dlbench.report.model import Report
from dlbench.report.view import Sheet, View
from dlbench.views.slow_nodes.charts import slow_node_charts
from dlbench.views.slow_nodes.tables import exclude_lines, history_words, slow_node_sheet


def history(report: Report) -> SlowNodes | None:
    """All hosts of the report: every group tells of its own, with the same figures; None where no group has any."""
    known = [group.causes.nodes for group in report.groups if group.causes is not None]
    if not known:
        return None
    hosts = {one.host: one for nodes in known for one in nodes.hosts}
    ordered = sorted(hosts.values(), key=lambda one: (-one.ratio.value, one.host))
    return dataclasses.replace(known[0], hosts=tuple(ordered))


def _has_hosts(report: Report) -> bool:
    found = history(report)
    return found is not None and bool(found.hosts)


def _history_words(report: Report) -> tuple[str, ...]:
    found = history(report)
    return () if found is None else (*exclude_lines(found), *history_words(found))


def _history_charts(report: Report) -> list[Chart]:
    found = history(report)
    return slow_node_charts(found) if found is not None and found.hosts else []


def _history_sheets(report: Report) -> list[Sheet]:
    found = history(report)
    return [slow_node_sheet(found)] if found is not None and found.hosts else []


VIEW = View(
    id="slow-nodes",
    title="Slow nodes",
    place="closing",
    is_shown=_has_hosts,
    report_remedy=lambda report: "not known: no counted run had ranks on two hosts or more.",
    report_words=_history_words,
    report_charts=_history_charts,
    report_sheets=_history_sheets,
    template="sheets.html.j2",
)
