"""Trends and slow nodes for the terminal. Fits 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from dlbench.history.page.model import ChangeRow, NodesOverTime, TrendSeries, TrendsReport
from dlbench.history.page.words import (
    basis_text,
    between_text,
    change_text,
    commits_text,
    day,
    differences_text,
    host_sentence,
    level_text,
    newest_text,
    nights_text,
    p_text,
    telling_first,
    times_text,
)
from dlbench.report.formats.terminal import WIDTH, shorten
from dlbench.report.tabular import Table, aligned
from dlbench.report.wording import DASH, runs_text

MOST_HOSTS = 20
"""Hosts listed; CSV and JSON hold all."""


def to_text(report: TrendsReport, width: int = WIDTH) -> str:
    """The report as plain lines of at most `width` columns (a single longer word stays whole)."""
    count = len(report.series)
    newest = f", newest {report.as_of}" if report.as_of else ""
    lines = [
        report.title,
        f"{runs_text(report.num_runs)} with figures, {report.num_without} without; {count} series{newest}",
        "",
    ]
    if not report.series:
        lines += ["No run has figures: there is nothing to follow.", ""]
    for series in telling_first(report):
        lines += [*_series(series, width), ""]
    if report.nodes.hosts:
        lines += [*_hosts(report.nodes, width), ""]
    lines += [line for text in report.damaged for line in _item("! ", f"damaged: {text}", width)]
    return "\n".join(lines).rstrip() + "\n"


def nodes_text(nodes: NodesOverTime, width: int = WIDTH) -> str:
    """Slow nodes as plain lines of at most `width` columns (a single longer word stays whole)."""
    lines = ["dlbench history: slow nodes", *_hosts(nodes, width)]
    lines += [line for text in nodes.damaged for line in _item("! ", f"damaged: {text}", width)]
    return "\n".join(lines).rstrip() + "\n"


def exclude_option(nodes: NodesOverTime) -> str:
    """Slurm's option that keeps jobs off the nodes that are slow now; empty if none is."""
    return f"--exclude={','.join(nodes.exclude)}" if nodes.exclude else ""


def _series(series: TrendSeries, width: int) -> Iterator[str]:
    yield from _wrapped(f"{series.label} (system {series.system})", width)
    yield from _wrapped(series.verdict, width)
    for change in reversed(series.changes):
        yield from _change(change, width)
    if series.newest is not None:
        yield from _item("! ", newest_text(series.newest, series.title, series.unit), width)


def _change(change: ChangeRow, width: int) -> Iterator[str]:
    mark = "! " if change.kind == "regression" else "+ "
    text = (
        f"{day(change.time)} {change.kind}: {change_text(change.ratio)}, {level_text(change.before)} to "
        f"{level_text(change.after)}; {basis_text(change.before)} before, {nights_text(change.after.n)} after; "
        f"{p_text(change.p)}"
    )
    yield from _item(mark, text, width)
    for line in (between_text(change), commits_text(change), *differences_text(change)):
        yield from textwrap.wrap(line, width, initial_indent="    ", subsequent_indent="      ")


def _hosts(nodes: NodesOverTime, width: int) -> Iterator[str]:
    yield from _wrapped(
        f"Nodes over months: {runs_text(nodes.num_runs)} on two hosts or more, {len(nodes.hosts)} hosts; "
        f"{runs_text(nodes.num_without)} that compare no hosts.",
        width,
    )
    if not nodes.hosts:
        yield from _wrapped("To compare hosts, run on two or more: dlbench submit WORKLOAD --nodes 2 ...", width)
        return
    yield from _wrapped("Ratio: own work of a host's slowest rank, other hosts of the same runs = 1.", width)
    rows: Table = [("host", "now", "ratio", "interval", "since", "months")]
    rows += [
        (
            shorten(host.host, 20),
            host.verdict,
            DASH if host.current is None else times_text(host.current).partition(" ")[0],
            DASH if host.current is None else times_text(host.current).partition(" ")[2] or "none",
            day(host.since) or DASH,
            str(len(host.months)),
        )
        for host in nodes.hosts[:MOST_HOSTS]
    ]
    yield from aligned(rows)
    if len(nodes.hosts) > MOST_HOSTS:
        yield f"... and {len(nodes.hosts) - MOST_HOSTS} more hosts"
    for host in nodes.hosts:
        if host.verdict == "slow":
            yield from _item("! ", host_sentence(host), width)
        for change in host.changes if host.verdict == "slow" else ():
            text = f"changed on {day(change.time)} by {change_text(change.ratio)}, {p_text(change.p)}"
            yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="      ")
    if nodes.exclude:
        yield from _item("", f"sbatch {exclude_option(nodes)}", width)
    for name in nodes.unsafe:
        yield from _item("! ", f"{name}: slow, but its name cannot stand in an option of Slurm", width)


def _item(mark: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=mark, subsequent_indent="  ")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)
