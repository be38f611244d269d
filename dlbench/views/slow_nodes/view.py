"""The view `slow-nodes`: hosts whose ranks take longer than those of other hosts, over all runs."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.reading.slow_nodes import FALSE_SHARE, SlowNodes, slow_nodes
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
            words=tuple(_words(found)),
            charts=lambda: slow_node_charts(found),
            sheets=(host_sheet(found),),
        )
        return (section,)

    def remedy(self, report: Report) -> str:
        """Runs on two hosts."""
        found = report.of(SlowNodes)
        faulty = f" {runs_text(found.num_faulty)} with a planted fault left out." if found and found.num_faulty else ""
        return f"not known: no counted run had ranks on two hosts or more.{faulty}"


def _words(found: SlowNodes) -> Iterator[str]:
    """The option for Slurm, or that there is none to give; then what the comparison is, and over which runs."""
    yield found.option or "No host is shown to be slow."
    for one in found.hosts:
        if one.later is not None and one.verdict in ("slow link", "slow and slow link"):
            yield f"Slow link or NIC at host {clean(one.host, 253)}: {slow_link_text(one.later)}."
    yield from (f"Left out of the list, no name for an option: {host}" for host in found.unsafe)
    if found.num_faulty:
        yield f"{runs_text(found.num_faulty)} with a planted fault left out."
    if found.num_sessions < MIN_SESSIONS:
        yield (
            "A host is suspected at most: what slows it for one job (a neighbour, heat) is no property of it. "
            f"{sessions_text(found.num_sessions).capitalize()} here; {MIN_SESSIONS} are needed (other jobs or nights)."
        )
    rest = f", {found.num_single_host} on one" if found.num_single_host else ""
    yield (
        "Own work (no exchange) of a host's slowest rank relative to the other hosts' in the same run; slow: above "
        f"{found.threshold:g} by a t test over sessions, all hosts together (false discovery rate {FALSE_SHARE:.0%}). "
        f"{len(found.hosts)} hosts, {runs_text(found.num_runs)} on several hosts{rest}, "
        f"{sessions_text(found.num_sessions)}."
    )
