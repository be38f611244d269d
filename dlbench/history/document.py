"""Trends and slow nodes as `Document`s."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from dlbench.history.charts import MAX_NIGHTS, host_charts, series_chart
from dlbench.history.report import ChangeOfSeries, TrendsReport
from dlbench.history.series import Trend
from dlbench.history.slow_months import SlowMonths
from dlbench.history.tables import changes_sheet, hosts_sheet, nights_sheet, series_sheet
from dlbench.history.words import change_cell, day, evidence_text, level_text, nights_text, percent_change
from dlbench.report.charts import Chart
from dlbench.report.document import Card, Document, Level, Mark, Section, methods_section
from dlbench.report.wording import clean, runs_text
from dlbench.units import counted

MAX_CHARTED = 20  # Series with a chart, those with the newest changes; all are in the tables.
MIN_DRAWN = 2  # Minimum nights of a series with a chart.
MAX_LINES = 20  # Unchanged series that the terminal names; all are in the tables.
MAX_NAMED = 3  # Slow hosts in a headline.
MAX_HEADLINE = 80
MAX_CARDS = 4


def trends_document(report: TrendsReport) -> Document:
    """Returns the changes over months, the series, and the slow nodes."""
    followed = [series for series in report.by_newest_change if len(series.nights) >= MIN_DRAWN]
    sections = [_series(series, is_drawn=number < MAX_CHARTED) for number, series in enumerate(followed)]
    return report.document(
        _changes(report),
        *(section for section in sections if section.level == "answer"),
        _all_series(report),
        *(section for section in sections if section.level != "answer"),
        nodes_section(report.nodes),
        *_damaged(report.damaged),
        *methods_section(report.methods, docs_page="docs/history.md"),
        meta=(f"{runs_text(report.num_runs)} with figures, {report.num_without} without.",),
        file_prefix="trends-",
        command="dlbench history trends",
    )


def nodes_document(nodes: SlowMonths) -> Document:
    """Returns the slow nodes by month."""
    return Document(
        title="dlbench history: slow nodes",
        as_of=nodes.as_of,
        sections=(nodes_section(nodes), *_damaged(nodes.damaged)),
        data=nodes,
        command="dlbench history slow-nodes",
    )


def nodes_section(nodes: SlowMonths) -> Section:
    """Returns the nodes over months: which are slow now, and the option that excludes them from jobs."""
    level: Level = "answer"
    if not nodes.hosts:
        headline = ""
        words = [
            f"No run compares hosts: {runs_text(nodes.num_without)} on one host, or with an injected fault. Run on "
            "two nodes or more, for example dlbench submit WORKLOAD --system SYSTEM --nodes 2."
        ]
        brief = words
    else:
        headline = _slow_hosts(nodes)
        about = (
            f"{runs_text(nodes.num_runs)} on two hosts or more, {counted(len(nodes.hosts), 'host')}; "
            f"{runs_text(nodes.num_without)} that compare no hosts."
        )
        words, brief = (
            [],
            [
                about,
                "Ratio: own work of a host's slowest rank, other hosts of the same runs = 1; mean over nights.",
            ],
        )
        if not nodes.exclude and not nodes.unsafe:
            words.append("No node is shown to be slow now.")
            brief.append("No node is shown to be slow now.")
        if nodes.exclude:
            command = f"sbatch {nodes.exclude_option}"
            words.append(f"To exclude the slow nodes from jobs: {command}")
            brief.append(command)
        words.append(about)
        if not nodes.slow:
            level = "evidence"
    slow_texts = ["; ".join([host.sentence, *map(str, host.changes)]) + "." for host in nodes.slow]
    return Section(
        id="nodes",
        title="Slow nodes",
        level=level,
        headline=headline,
        marks=tuple(Mark(severity="serious", text=line) for line in (*slow_texts, *nodes.unsafe_lines)),
        words=tuple(words),
        charts=lambda: host_charts(nodes),
        charts_per_row=1,
        sheets=(hosts_sheet(nodes, nodes.hosts),),
        brief=tuple(brief),
    )


def _slow_hosts(nodes: SlowMonths) -> str:
    if not nodes.slow:
        return "no host is shown to be slow"
    names = ", ".join(host.host for host in nodes.slow[:MAX_NAMED])
    headline = clean(f"{len(nodes.slow)} of {len(nodes.hosts)} hosts slow now: {names}", MAX_HEADLINE)
    if len(nodes.slow) > MAX_NAMED:
        headline += f" and {len(nodes.slow) - MAX_NAMED} more"
    return headline


def _changes(report: TrendsReport) -> Section:
    marks = []
    for series in report.series:
        if series.newest is not None:
            severity: Literal["serious", "note"] = "serious" if series.newest.is_worse else "note"
            marks.append(Mark(severity=severity, text=f"{series.label}: {series.newest_nights_text}"))
    return Section(
        id="changes",
        title="What changed",
        level="answer",
        marks=tuple(marks),
        words=(report.finding,),
        cards=tuple(_card(row) for row in report.changes[:MAX_CARDS]),
        # Few changes are completely described by their cards.
        sheets=(dataclasses.replace(changes_sheet(report), is_folded=len(report.changes) <= MAX_CARDS),),
        brief=(report.finding,),
    )


def _card(row: ChangeOfSeries) -> Card:
    series, change = row
    return Card(
        title=f"{change.words.capitalize()} {change.when}",
        link=f"series-{series.id}",
        big=percent_change(change.ratio.value),
        small=(f"{series.subject}, {change_cell(change.ratio)}", change.basis, evidence_text(change.evidence)),
        words=(
            f"{series.label}: {level_text(change.before)} before, {level_text(change.after)} since; changed "
            f"{change.between}.",
            *(f"{line}." for line in series.details(change)),
        ),
        is_bad=change in series.open_regressions,
    )


def _all_series(report: TrendsReport) -> Section:
    notes = []
    count = sum(len(series.nights) >= MIN_DRAWN for series in report.series)
    if count > MAX_CHARTED:
        notes.append(
            f"{MAX_CHARTED} of {count} trends are drawn, those with the newest changes first; --where and --metric "
            "choose others."
        )
    changed = sum(bool(series.changes) for series in report.series)
    unchanged = [series for series in report.by_newest_change if not series.changes]
    lines = [
        f"- {series.short_verdict}, level {level_text(series.level.value)}: {series.label}"
        for series in unchanged[:MAX_LINES]
    ]
    if len(unchanged) > MAX_LINES:
        lines.append(f"... and {counted(len(unchanged) - MAX_LINES, 'more trend')}")
    return Section(
        id="series",
        title="All trends",
        headline=f"{counted(len(report.series), 'trend')}, {changed} with changes",
        words=() if report.series else ("None.",),
        sheets=(series_sheet(report), nights_sheet(report.series, is_for_people=False)),
        notes=tuple(notes),
        brief=tuple(lines),
    )


def _series(series: Trend, *, is_drawn: bool) -> Section:
    lines: list[str] = []
    for change in reversed(series.changes):
        lines += _lines(ChangeOfSeries(series, change))
    notes = [
        f"{series.caption}. {runs_text(series.num_runs)}, {nights_text(len(series.nights))}. Bands: interval of each "
        "level over nights (order statistics)."
    ]
    if is_drawn and len(series.nights) > MAX_NIGHTS:
        notes.append(
            f"About {MAX_NIGHTS} nights are drawn, the fastest and slowest of every few; the CSV contains all."
        )

    def charts() -> list[Chart]:
        return [series_chart(series)] if is_drawn else []

    return Section(
        id=f"series-{series.id}",
        title=f"{series.label} (system {clean(series.system)})",
        level="answer" if series.changes else "evidence",
        headline=series.short_verdict,
        words=(series.verdict, series.newest_nights_text),
        charts=charts,
        charts_per_row=1,
        notes=tuple(notes),
        # Series without a change are lines of `_all_series`.
        brief=(series.verdict, *lines) if lines else (),
        in_contents=is_drawn,
    )


def _lines(row: ChangeOfSeries) -> Iterator[str]:
    """Yields a change for the terminal: the finding, then the differences as items."""
    series, change = row
    mark = "!" if change.kind == "regression" else "+"
    levels = f"{level_text(change.before)} to {level_text(change.after)}"
    yield (
        f"{mark} {day(change.time)} {change.words}: {change_cell(change.ratio)}, {levels}; {change.basis}; "
        f"{evidence_text(change.evidence)}"
    )
    for line in (change.between, *series.details(change)):
        yield f"- {line}"


def _damaged(runs: Sequence[str]) -> tuple[Section, ...]:
    if not runs:
        return ()
    marks = tuple(Mark(severity="serious", text=line) for line in runs)
    return (Section(id="damaged", title="Damaged", level="answer", marks=marks),)
