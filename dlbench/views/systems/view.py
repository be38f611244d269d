"""The view `systems`: the systems that the runs ran on, in one table, for people a column each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.document import Section
from dlbench.report.table import Column, Pivot, Sheet
from dlbench.views.model import Report
from dlbench.views.systems.numbers import SystemDescription, systems
from dlbench.views.view import ReportSource, ReportView

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One property of one system."""

    system: SystemDescription
    what: str
    text: str
    is_data: bool = True
    """Whether it is a field of the description; others are counts and lists, for people only."""


class SystemsView(ReportView):
    """What the runs ran on."""

    id = "systems"
    title = "Systems"
    level = "appendix"
    key = "systems"

    def numbers(self, source: ReportSource) -> tuple[SystemDescription, ...]:
        """Systems by name."""
        return systems(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """One table; nothing without a run that has a record."""
        found = report.all_of(SystemDescription)
        if not found:
            return ()
        hosts = sum(system.num_hosts for system in found)
        headline = f"{len(found)} system{'s' * (len(found) != 1)}, {hosts} host{'s' * (hosts != 1)}"
        return (Section(id=self.id, title=self.title, headline=headline, sheets=(_sheet(found),)),)


def _sheet(found: Sequence[SystemDescription]) -> Sheet[_Row]:
    known = list(dict.fromkeys(title for system in found for title, _ in system.fields))
    lines = ["Runs", "Hosts", *known, "Not recorded"]
    columns: tuple[Column[_Row], ...] = (
        Column("system", "", lambda row: row.system.name, limit=100),
        Column("title", "", lambda row: row.system.title, limit=300),
        Column("runs", "", lambda row: row.system.num_runs),
        Column("hosts", "", lambda row: row.system.num_hosts),
        Column("what", "", lambda row: row.what),
        Column("value", "", lambda row: row.text, limit=1000),
    )
    return Sheet(
        name="systems",
        title="Systems",
        columns=columns,
        rows=[row for system in found for row in _rows(system)],
        pivot=Pivot(
            corner="What",
            down=lambda row: row.what,
            across=lambda row: f"{row.system.name}: {row.system.title}",
            cell=lambda row: row.text,
        ),
        is_data=lambda row: row.is_data,
        is_shown=lambda row: row.what in lines,
        order=lambda row: lines.index(row.what),
        caption="Fields as in MLPerf's system descriptions; dlbench export system RUN writes them.",
    )


def _rows(system: SystemDescription) -> list[_Row]:
    more = f" and {system.num_hosts - len(system.hosts)} more" if system.num_hosts > len(system.hosts) else ""
    hosts = f"{system.num_hosts}: {', '.join(system.hosts)}{more}"
    return [
        _Row(system=system, what="Runs", text=str(system.num_runs), is_data=False),
        _Row(system=system, what="Hosts", text=hosts, is_data=False),
        *(_Row(system=system, what=title, text=text) for title, text in system.fields),
        *(_Row(system=system, what=title, text=NOT_RECORDED) for title in system.unknown),
        _Row(system=system, what="Not recorded", text=", ".join(system.unknown) or "nothing", is_data=False),
    ]
