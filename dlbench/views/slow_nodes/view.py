"""The view `slow-nodes`: hosts whose ranks take longer than those of other hosts, over all runs."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.reading.hosts.slow_nodes import ACCUSED, SlowNodes, slow_nodes
from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.report.document import Section
from dlbench.report.wording import clean, runs_text, slow_link_text
from dlbench.views.model import Report
from dlbench.views.slow_nodes.charts import slow_node_charts
from dlbench.views.slow_nodes.tables import host_sheet, sessions_text
from dlbench.views.view import ReportSource, ReportView


class SlowNodesView(ReportView):
    """Slow nodes, as an option for sbatch."""

    id = "slow-nodes"
    title = "Slow nodes"
    key = "slow_nodes"

    def numbers(self, source: ReportSource) -> SlowNodes:
        """All hosts of all runs."""
        return slow_nodes(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """The option, and every host."""
        found = report.of(SlowNodes)
        if found is None or not found.hosts:
            return ()
        section = Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            words=tuple(_words(found)),
            charts=lambda: slow_node_charts(found),
            sheets=(host_sheet(found),),
        )
        return (section,)

    def remedy(self, report: Report) -> str:
        """Runs on two hosts."""
        found = report.of(SlowNodes)
        faulty = f" {runs_text(found.num_faulty)} with a planted fault left out." if found and found.num_faulty else ""
        return f"unknown: no run had ranks on two hosts or more.{faulty}"


def _headline(found: SlowNodes) -> str:
    accused = [f"{clean(one.host, 30)} ({one.verdict})" for one in found.hosts if one.verdict in ACCUSED]
    if not accused:
        return f"none of {len(found.hosts)} hosts is shown to be slow ({sessions_text(found.num_sessions)})"
    more = f" and {len(accused) - 2} more" if len(accused) > 2 else ""
    return f"{', '.join(accused[:2])}{more}, of {len(found.hosts)} hosts"


def _words(found: SlowNodes) -> Iterator[str]:
    """The option for Slurm, slow links, and what weakens the comparison."""
    if found.option:
        yield found.option
    for one in found.hosts:
        if one.later is not None and one.verdict in ("slow link", "slow and slow link"):
            yield f"Slow link or NIC at host {clean(one.host, 253)}: {slow_link_text(one.later)}."
    yield from (f"Left out of the list, no name for an option: {host}" for host in found.unsafe)
    if found.num_faulty:
        yield f"{runs_text(found.num_faulty)} with a planted fault left out."
    if found.num_sessions < MIN_SESSIONS:
        yield (
            f"Suspected at most: {sessions_text(found.num_sessions)}, and {MIN_SESSIONS} are needed (other jobs or "
            "days)."
        )
