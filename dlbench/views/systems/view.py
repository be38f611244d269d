"""The view `systems`: all systems in one table, a column each."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet, View


def _system_words(report: Report) -> tuple[str, ...]:
    count = len(report.systems)
    hosts = sum(system.num_hosts for system in report.systems)
    return (f"The runs ran on {count} system{'s' * (count != 1)} and {hosts} host{'s' * (hosts != 1)}.",)


def system_sheets(report: Report) -> list[Sheet]:
    """All systems in one table, a column each."""
    if not report.systems:
        return []
    titles = list(dict.fromkeys(title for system in report.systems for title, _ in system.fields))
    told = [dict(system.fields) for system in report.systems]
    rows: Table = [("What", *(f"{system.name}: {system.title}" for system in report.systems))]
    rows.append(("Runs", *(str(system.num_runs) for system in report.systems)))
    rows.append(("Hosts", *(_hosts(system.hosts, system.num_hosts) for system in report.systems)))
    rows += [(title, *(own.get(title, "not recorded") for own in told)) for title in titles]
    rows.append(("Not recorded", *(", ".join(system.unknown) or "nothing" for system in report.systems)))
    return [
        Sheet(
            name="systems",
            title="Systems",
            text=rows,
            caption="In the fields of MLPerf's system descriptions, from plans and records; figures of a node are "
            "those of rank 0's node. What nobody recorded is named, and a person may fill it in: dlbench export "
            "system RUN writes all fields.",
            columns=("system", "title", "runs", "hosts", "what", "value"),
            rows=tuple(
                {
                    "system": system.name,
                    "title": system.title,
                    "runs": system.num_runs,
                    "hosts": system.num_hosts,
                    "what": title,
                    "value": text,
                }
                for system in report.systems
                for title, text in (*system.fields, *((name, "not recorded") for name in system.unknown))
            ),
        )
    ]


def _hosts(hosts: tuple[str, ...], count: int) -> str:
    more = f" and {count - len(hosts)} more" if count > len(hosts) else ""
    return f"{count}: {', '.join(hosts)}{more}"


VIEWS: tuple[View, ...] = (
    View(
        id="systems",
        title="Systems",
        place="closing",
        is_shown=lambda report: bool(report.systems),
        report_words=_system_words,
        report_sheets=system_sheets,
        template="sheets.html.j2",
    ),
)
