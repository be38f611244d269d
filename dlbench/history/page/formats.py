"""Trends as Markdown, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dlbench.history.page import tables
from dlbench.history.page.model import NodesOverTime, TrendsReport
from dlbench.history.page.words import host_sentence, newest_text
from dlbench.report.formats.csv import write_table
from dlbench.report.formats.markdown import escape
from dlbench.report.model import as_plain
from dlbench.report.tabular import Table
from dlbench.report.wording import runs_text


def to_json(report: TrendsReport | NodesOverTime) -> str:
    """The whole structure of `trends_model`; `format` and `version` come first."""
    return json.dumps(as_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(report: TrendsReport, table: tables.TableName = "changes") -> str:
    """One table as CSV: raw numbers, units in a column of their own (see `delimited.write_table`)."""
    if table == "hosts":
        return hosts_csv(report.nodes)
    columns, rows = {
        "changes": (tables.CHANGE_COLUMNS, tables.change_rows),
        "series": (tables.SERIES_COLUMNS, tables.series_records),
        "nights": (tables.NIGHT_COLUMNS, tables.night_rows),
    }[table]
    return write_table(columns, rows(report))


def hosts_csv(nodes: NodesOverTime) -> str:
    """Hosts by month as CSV."""
    return write_table(tables.HOST_COLUMNS, tables.host_rows(nodes))


def to_markdown(report: TrendsReport) -> str:
    """The report; headings from level 1."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: TrendsReport) -> Iterator[str]:
    yield from (f"# {escape(report.title)}", "")
    if report.as_of:
        yield f"Newest run finished {escape(report.as_of)}. Made by dlbench {escape(report.dlbench_version)}."
        yield ""
    yield from (f"{runs_text(report.num_runs)} with figures, {report.num_without} without.", "")
    found = report.changes
    if found:
        yield from _section("## Change points, newest first", tables.changes(found))
    else:
        yield from ("## Change points", "", "None.", "")
    newest = [one for one in report.series if one.newest]
    if newest:
        yield from ("## Newest nights", "")
        for one in newest:
            assert one.newest is not None
            yield f"- {escape(one.label)}: {escape(newest_text(one.newest, one.title, one.unit))}"
        yield ""
    if report.series:
        yield from _section("## Series", tables.series_rows(report.series))
    if report.nodes.hosts:
        yield from _section("## Nodes over months", tables.hosts(report.nodes))
        slow = [host for host in report.nodes.hosts if host.verdict == "slow"]
        yield from (f"- {escape(host_sentence(host))}" for host in slow)
        yield ""
    if report.damaged:
        yield from ("## Damaged", "", *(f"- {escape(line)}" for line in report.damaged), "")
    yield from ("## How the numbers are made", "")
    yield from (f"- {escape(f'{name}. {text}')}" for name, text in report.methods)


def _section(title: str, table: Table) -> Iterator[str]:
    header, *rows = table
    yield from (title, "", "| " + " | ".join(map(escape, header)) + " |", "|" + " --- |" * len(header))
    yield from ("| " + " | ".join(map(escape, row)) + " |" for row in rows)
    yield ""
