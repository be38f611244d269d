"""The table of slow nodes, over all runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from dlbench.reading.hosts.slow_nodes import ACCUSED, FALSE_SHARE, HostHistory, SlowNodes, slow_nodes
from dlbench.reading.sessions import MIN_SESSIONS
from dlbench.report.charts.chart import Chart, Rows, Subject, finish
from dlbench.report.charts.style import MEASURED, MUTED, PART_COLOURS, WIDE
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, unit_cell
from dlbench.report.wording import clean, percent, runs_text, sessions_text, shown, slow_link_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.view import short
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

MAX_SHOWN = 10
"""Hosts in a table for people, which has all slow ones, and in a chart."""


def host_sheet(found: SlowNodes) -> Sheet[HostHistory]:
    """Hosts over all runs of the folder."""
    slowest = found.hosts[:MAX_SHOWN]
    left = sum(one.verdict not in ACCUSED for one in found.hosts[MAX_SHOWN:])
    columns: tuple[Column[HostHistory], ...] = (
        Column("host", "Host", lambda one: one.host, limit=64),
        Column(
            "own_work_ratio", "Own work", lambda one: one.ratio, lambda one: ratio_cell(one.ratio), has_interval=True
        ),
        Column(
            "leaves_later_fraction",
            "Leaves later",
            lambda one: one.later,
            lambda one: None if one.later is None else unit_cell(one.later),
            has_interval=True,
        ),
        Column("sessions", "Sessions", lambda one: one.ratio.n),
        Column("runs", "Runs", lambda one: one.num_runs),
        Column("interval", "", lambda one: one.ratio.kind),
        Column("last_share_fraction", "Last in", lambda one: one.last_share, lambda one: percent(one.last_share, 0)),
        Column("fair_share_fraction", "Fair share", lambda one: one.fair_share, lambda one: percent(one.fair_share, 0)),
        Column("verdict", "Verdict", lambda one: one.verdict, verdict_text),
    )
    return Sheet(
        name="slow-nodes",
        title="Hosts, over all runs of the folder",
        columns=columns,
        rows=found.hosts,
        is_shown=lambda one: one.verdict in ACCUSED or one in slowest,
        caption=(
            f"Own work: the slowest rank's step without exchange, over the other hosts'; slow: above "
            f"{found.threshold:g} by a t test over sessions (false discovery rate {FALSE_SHARE * 100:.0f} %)."
            + (f" The {left} fastest hosts are left out." if left else "")
        ),
    )


def ratio_cell(ratio: Estimate) -> Cell:
    """A ratio near 1 with its interval."""
    number, interval, _ = shown(ratio, 3)
    return Cell(number, interval, number=ratio.value)


def ratio_text(ratio: Estimate) -> str:
    """The same as text."""
    return str(ratio_cell(ratio))


def verdict_text(one: HostHistory) -> str:
    """With fewer than five sessions a host is suspected at most."""
    if one.verdict == "suspected":
        return f"suspected ({sessions_text(one.ratio.n)}: insufficient)"
    return one.verdict.replace("slow link", "slow link or NIC")


class _Folder:
    """All runs of the report."""

    id = "folder"
    label = "all runs of the folder, of any workload"


def slow_node_charts(found: SlowNodes) -> list[Chart]:
    """The slowest hosts over all runs, with their intervals."""
    import altair as alt

    shown = found.hosts[:MAX_SHOWN]
    rows: Rows = [
        {
            "host": one.host,
            "ratio": short(one.ratio.value),
            "low": short(one.ratio.low),
            "high": short(one.ratio.high),
            "shown": ratio_text(one.ratio),
            "verdict": verdict_text(one),
            "colour": PART_COLOURS["exchange"] if one.verdict in ACCUSED else MEASURED,
        }
        for one in shown
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("host:N", title=None, sort=[row["host"] for row in rows]).axis(labelLimit=200),
        color=alt.Color("host:N", legend=None).scale(
            domain=[row["host"] for row in rows], range=[row["colour"] for row in rows]
        ),
    )

    def x_of(channel: Any) -> Any:
        return channel.scale(zero=False).axis(tickCount=6, format=".2~f").title("own work over that of the other hosts")

    line = alt.Chart(alt.InlineData(values=[{"ratio": found.threshold}])).mark_rule(color=MUTED, strokeDash=[4, 3])
    layers = [line.encode(x=x_of(alt.X("ratio:Q")))]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.55).encode(x=x_of(alt.X("low:Q")), x2="high:Q"))
    tooltip = [
        alt.Tooltip("host:N", title="host"),
        alt.Tooltip("shown:N", title="own work"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    layers.append(base.mark_point(filled=True, size=80, opacity=1).encode(x=x_of(alt.X("ratio:Q")), tooltip=tooltip))
    words = "; ".join(f"{row['host']} {row['shown']}, {row['verdict']}" for row in rows)
    subject: Subject = _Folder()
    return [
        finish(
            alt.layer(*layers),
            subject,
            name="slow-nodes",
            title=f"Own work by host (dashed: slow is above {found.threshold:g})",
            alt=f"Own work of each host's slowest rank over that of the other hosts, slowest first. {words}.",
            table=host_sheet(dataclasses.replace(found, hosts=shown)),
            size=(WIDE, max(60, 26 * len(rows))),
        )
    ]


class SlowNodesView(ReportView):
    """Slow nodes, as an option for sbatch."""

    id = "slow-nodes"
    title = "Slow nodes"
    key = "slow_nodes"

    def numbers(self, source: ReportSource) -> SlowNodes:
        return slow_nodes(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
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
