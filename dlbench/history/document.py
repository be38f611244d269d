"""Trends and slow nodes as `Document`s: findings first, a section for each series, nodes, methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from dlbench.history.change_points import MIN_NIGHTS
from dlbench.history.report import (
    TrendsReport,
    acknowledged_text,
    between_text,
    change_basis,
    change_lines,
    change_text,
    commits_text,
    day,
    differences_text,
    evidence_text,
    host_sentence,
    kind_text,
    level_text,
    newest_text,
    nights_text,
    percent_change,
    point_text,
    short_verdict,
    since_text,
)
from dlbench.history.series import Change, Trend
from dlbench.history.slow_months import SlowMonths
from dlbench.history.tables import (
    MAX_NIGHTS,
    changes_sheet,
    host_charts,
    hosts_sheet,
    nights_sheet,
    series_chart,
    series_sheet,
)
from dlbench.report.document import Card, Document, Mark, Section, methods_section, no_charts
from dlbench.report.wording import clean, runs_text
from dlbench.specs.hostlist import compressed

MAX_CHARTED = 20  # Series drawn: those with the newest changes; all stand in the tables.
MIN_DRAWN = 2  # Nights of a series that has a chart: one night is a line of the table.
MAX_LINES = 20  # Unchanged series that the terminal names; all stand in the tables.
MAX_NAMED = 3  # Slow hosts in a headline.
MAX_HEADLINE = 80
MAX_CARDS = 4


def trends_document(report: TrendsReport) -> Document:
    """What changed over months, and which nodes are slow."""
    followed = [one for one in report.by_newest_change if len(one.nights) >= MIN_DRAWN]
    series = [_series(one, is_drawn=number < MAX_CHARTED) for number, one in enumerate(followed)]
    return report.document(
        _changes(report),
        *(one for one in series if one.level == "answer"),
        _all_series(report),
        *(one for one in series if one.level != "answer"),
        nodes_section(report.nodes),
        *_damaged(report.damaged),
        *methods_section(report.methods),
        meta=(f"{runs_text(report.num_runs)} with figures, {report.num_without} without.",),
        file_prefix="trends-",
        command="dlbench history trends",
    )


def nodes_document(nodes: SlowMonths) -> Document:
    """Which nodes are slow, by month."""
    return Document(
        title="dlbench history: slow nodes",
        as_of=nodes.as_of,
        sections=(nodes_section(nodes), *_damaged(nodes.damaged)),
        data=nodes,
        command="dlbench history slow-nodes",
    )


def finding(report: TrendsReport) -> str:
    """What changed, in a sentence or two; or that nothing did, or why nobody can say."""
    import_runs = "dlbench history import RUNS"
    if not report.series:
        return f"No run has figures. Bring runs in with {import_runs}."
    long_enough = sum(series.is_long_enough for series in report.series)
    count = f"{len(report.series)} series"
    if not long_enough:
        most = max(len(series.nights) for series in report.series)
        return (
            f"{count}, none long enough: a change point needs {MIN_NIGHTS} nights, the longest has {most}. Bring in "
            f"further nights with {import_runs}."
        )
    short = len(report.series) - long_enough
    others = f" {short} series more: fewer than {MIN_NIGHTS} nights." * bool(short)
    if not report.changes:
        return f"Nothing changed in {long_enough} series.{others}"
    kinds = [change.kind for _, change in report.changes]
    counts = [f"{kinds.count(kind)} {kind}{'' if kinds.count(kind) == 1 else 's'}" for kind in dict.fromkeys(kinds)]
    found = " and ".join(sorted(counts, key=lambda text: "regression" not in text))
    newest, change = report.changes[0]
    open_ones = sum(len(series.open_regressions) for series in report.series)
    known = f" Not acknowledged: {open_ones}." * bool(open_ones)
    return (
        f"{found[:1].upper()}{found[1:]} in {long_enough} series. Newest: {newest.title.lower()} "
        f"{change_text(change.ratio)} {since_text(change)}, {point_text(newest)}.{known}{others}"
    )


def nodes_section(nodes: SlowMonths) -> Section:
    """Nodes over months: which are slow now, and the option that keeps jobs off them."""
    counts = f"{runs_text(nodes.num_runs)} on two hosts or more, {len(nodes.hosts)} hosts; "
    about = f"{counts}{runs_text(nodes.num_without)} that compare no hosts."
    option = exclude_option(nodes)
    slow = () if nodes.exclude or nodes.unsafe else ("No node is shown to be slow now.",)
    excluding = (f"sbatch {option}",) if option else ()
    ratio = "Ratio: own work of a host's slowest rank, other hosts of the same runs = 1; mean over nights."
    said: tuple[str, ...] = (*slow, *(f"To keep jobs off the slow nodes: {one}" for one in excluding), about)
    brief: tuple[str, ...] = (about, ratio, *slow, *excluding)
    if not nodes.hosts:
        said = brief = (
            f"No run compares hosts: {runs_text(nodes.num_without)} on one host, or with an injected fault. Run on "
            "two nodes or more, for example dlbench submit WORKLOAD --system SYSTEM --nodes 2.",
        )
    headline = ""
    if nodes.hosts:
        names = ", ".join(host.host for host in nodes.slow[:MAX_NAMED])
        more = f" and {len(nodes.slow) - MAX_NAMED} more" if len(nodes.slow) > MAX_NAMED else ""
        slow_now = clean(f"{len(nodes.slow)} of {len(nodes.hosts)} hosts slow now: {names}", MAX_HEADLINE) + more
        headline = slow_now if nodes.slow else "no host shown to be slow"
    return Section(
        id="nodes",
        title="Slow nodes",
        level="answer" if nodes.slow or not nodes.hosts else "evidence",
        headline=headline,
        marks=tuple(_slow_marks(nodes)),
        words=said,
        charts=lambda: host_charts(nodes),
        charts_per_row=1,
        sheets=(hosts_sheet(nodes, nodes.hosts),),
        brief=brief,
    )


def exclude_option(nodes: SlowMonths) -> str:
    """Slurm's option that keeps jobs off the nodes that are slow now; empty if none is."""
    return f"--exclude={compressed(nodes.exclude)}" if nodes.exclude else ""


def unsafe_text(host: str) -> str:
    """Why a slow host is not among those to exclude."""
    return f"{host}: slow, but its name cannot stand in an option of Slurm"


def _slow_marks(nodes: SlowMonths) -> Iterator[Mark]:
    for host in nodes.slow:
        changed = "".join(
            f"; changed on {day(change.time)} by {change_text(change.ratio)}, {evidence_text(change.evidence)}"
            for change in host.changes
        )
        yield Mark(severity="serious", text=f"{host_sentence(host)}{changed}.")
    for name in nodes.unsafe:
        yield Mark(severity="serious", text=unsafe_text(name))


def _changes(report: TrendsReport) -> Section:
    return Section(
        id="changes",
        title="What changed",
        level="answer",
        marks=tuple(
            Mark(severity="serious" if one.newest.is_worse else "note", text=f"{one.label}: {newest_text(one)}")
            for one in report.series
            if one.newest is not None
        ),
        words=(finding(report),),
        cards=tuple(_card(series, change) for series, change in report.changes[:MAX_CARDS]),
        # Cards say all of a few changes.
        sheets=(dataclasses.replace(changes_sheet(report), is_folded=len(report.changes) <= MAX_CARDS),),
        brief=(finding(report),),
    )


def _card(series: Trend, change: Change) -> Card:
    kind = kind_text(change)
    when = since_text(change) if change.shape == "drift" else f"on {day(change.time)}"
    details = (commits_text(change), *differences_text(change), acknowledged_text(series, change))
    return Card(
        title=f"{kind[:1].upper()}{kind[1:]} {when}",
        link=f"series-{series.id}",
        big=percent_change(change.ratio.value),
        small=(
            f"{series.title.lower()}, {change_text(change.ratio)}",
            change_basis(change),
            evidence_text(change.evidence),
        ),
        words=(
            f"{series.label}: {level_text(change.before)} before, {level_text(change.after)} since; changed "
            f"{between_text(change)}.",
            *(f"{line}." for line in details if line),
        ),
        is_bad=change in series.open_regressions,
    )


def _all_series(report: TrendsReport) -> Section:
    count = sum(len(one.nights) >= MIN_DRAWN for one in report.series)
    drawn = (
        f"Drawn are {MAX_CHARTED} of {count} series, those with the newest changes first; --where and --metric "
        "choose others."
    )
    changed = sum(bool(one.changes) for one in report.series)
    unchanged = [one for one in report.by_newest_change if not one.changes]
    more = [f"... and {len(unchanged) - MAX_LINES} more series"] if len(unchanged) > MAX_LINES else []
    lines = (
        f"- {short_verdict(one)}, level {level_text(one.levels[-1].value)}: {one.label}"
        for one in unchanged[:MAX_LINES]
    )
    return Section(
        id="series",
        title="All series",
        headline=f"{len(report.series)} series, {changed} with changes",
        words=() if report.series else ("None.",),
        sheets=(series_sheet(report), nights_sheet(report.series, is_for_people=False)),
        notes=(drawn,) if count > MAX_CHARTED else (),
        brief=(*lines, *more),
    )


def _series(series: Trend, *, is_drawn: bool) -> Section:
    lines = tuple(line for change in reversed(series.changes) for line in change_lines(series, change))
    return Section(
        id=f"series-{series.id}",
        title=f"{series.label} (system {clean(series.system)})",
        level="answer" if series.changes else "evidence",
        headline=short_verdict(series),
        words=(series.verdict, newest_text(series)),
        charts=(lambda: [series_chart(series)]) if is_drawn else no_charts,
        charts_per_row=1,
        notes=(
            f"{series.caption}. {runs_text(series.num_runs)}, {nights_text(len(series.nights))}. Bands: interval "
            "of each level over nights (order statistics).",
            *(
                (f"Drawn are the fastest and slowest of every few nights, about {MAX_NIGHTS}; the CSV holds each.",)
                if is_drawn and len(series.nights) > MAX_NIGHTS
                else ()
            ),
        ),
        # Series without a change are lines of `_all_series`.
        brief=(series.verdict, *lines) if lines else (),
        in_contents=is_drawn,
    )


def _damaged(runs: Sequence[str]) -> tuple[Section, ...]:
    marks = tuple(Mark(severity="serious", text=line) for line in runs)
    return (Section(id="damaged", title="Damaged", level="answer", marks=marks),) if marks else ()
