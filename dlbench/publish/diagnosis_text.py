"""A diagnosis for a person: sections of sentences and tables, as plain text of 80 columns or in rich's tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.publish.diagnosis_model import (
    CauseShare,
    DiagnosedGroup,
    DiagnosedPoint,
    Diagnosis,
    NodeHistory,
    Straggler,
)
from dlbench.publish.diagnosis_words import CAUSE_TITLES, bound_text, gain_text
from dlbench.publish.figure import Figure
from dlbench.publish.tabular import Table, aligned
from dlbench.publish.terminal import WIDTH, shorten
from dlbench.publish.wording import (
    basis_text,
    figure_text,
    lost_text,
    number_text,
    percent,
    place_text,
    ranks_text,
    runs_text,
)

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "dlbench diagnosis"

MOST_STRAGGLERS = 5
"""Rows of the table of late ranks."""


NOT_MEASURED = "not measured"
"""Instead of a figure where no run tells of a cause: that is not no time at all."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of a section: sentences to be wrapped, then a table, then lines as they are."""

    words: tuple[str, ...] = ()
    rows: Table | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """Something under a heading."""

    heading: str
    blocks: tuple[Block, ...]


def sections(found: Diagnosis, width: int, further: Sequence[tuple[str, Sequence[str]]] = ()) -> list[Section]:
    """Everything in order.

    Args:
        found: the diagnosis.
        width: columns.
        further: headings and lines of sections that are made elsewhere; those without lines are left out.
    """
    made = [Section(heading=group.label, blocks=tuple(_group(group, width))) for group in found.groups]
    if found.num_variants:
        text = (
            f"{found.num_variants} more group{'s' * (found.num_variants > 1)} of runs with something taken away on "
            "purpose (run --decompose, run --watch-cost): they are not diagnosed by themselves."
        )
        made.append(Section(heading="Runs to compare with", blocks=(Block(words=(text,)),)))
    if found.groups:
        made.append(Section(heading="Slow nodes, over all runs", blocks=tuple(_nodes(found.nodes))))
    made += [Section(heading=name, blocks=(Block(lines=tuple(lines)),)) for name, lines in further if lines]
    return [*made, *_endings(found)]


def to_text(found: Diagnosis, further: Sequence[tuple[str, Sequence[str]]] = (), width: int = WIDTH) -> str:
    """Plain lines of at most `width` columns; a longer word, and lines made elsewhere, stay whole."""
    lines = [TITLE, ""]
    for section in sections(found, width, further):
        lines += [*textwrap.wrap(section.heading, width)]
        for block in section.blocks:
            lines += [line for text in block.words for line in _wrapped(text, width)]
            for rows in [] if block.rows is None else _chunks(block.rows, width):
                lines += ["", *aligned(rows)]
            lines += [*block.lines]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def show(found: Diagnosis, console: Console, further: Sequence[tuple[str, Sequence[str]]] = ()) -> None:
    """The same on a terminal, in rich's tables; no markup is read from any text."""
    from rich.table import Table as RichTable
    from rich.text import Text

    width = min(console.width, 100)
    console.print(Text(TITLE, style="bold"))
    for section in sections(found, width, further):
        console.print()
        console.print(Text("\n".join(textwrap.wrap(section.heading, width)), style="bold cyan"))
        for block in section.blocks:
            for text in block.words:
                console.print(Text("\n".join(_wrapped(text, width))))
            for rows in [] if block.rows is None else _chunks(block.rows, width):
                table = RichTable(box=None, pad_edge=False, header_style="bold")
                for title in rows[0]:
                    table.add_column(Text(title), justify="right", no_wrap=True)
                for row in rows[1:]:
                    table.add_row(*map(Text, row))
                console.print()
                console.print(table)
            for line in block.lines:
                console.print(Text(line))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  " if text[:1] in "-!123456789" else "") or [""]


def _chunks(rows: Table, width: int) -> Iterator[Table]:
    """A table that is too wide as several, each with the first column and as many others as fit."""
    start = 1
    while start < len(rows[0]):
        end = start + 1
        while end < len(rows[0]) and _width(rows, start, end + 1) <= width:
            end += 1
        yield [(row[0], *row[start:end]) for row in rows]
        start = end


def _width(rows: Table, start: int, end: int) -> int:
    return max(map(len, aligned([(row[0], *row[start:end]) for row in rows])))


def _group(group: DiagnosedGroup, width: int) -> Iterator[Block]:
    told = []
    if group.fault:
        told.append(f"! A fault was planted on purpose: {group.fault}.")
    told += [f"{_place(point)}: {point.verdict.line}." for point in group.points]
    yield Block(words=tuple(told))
    step = _bases([(point, point.whole.seconds) for point in group.points])
    yield Block(words=("", f"Mean step by cause; intervals: {step}."), rows=_seconds(group))
    if len(group.points) == 1:
        yield Block(words=("", "Shares of the ideal need a second rank count."))
    else:
        lost = _bases([(point, point.whole.lost) for point in group.points[1:]])
        yield Block(words=("", f"Share of the ideal that is lost, by cause; intervals: {lost}."), rows=_lost(group))
    yield Block(words=("", *_remarks(group)))
    largest = group.points[-1]
    if largest.waiting_ranks:
        text = f"Waiting for whom, at {_place(largest)} (means over {runs_text(len(largest.run_ids))}):"
        yield Block(words=("", text), rows=_stragglers(largest))
        if largest.num_hosts > 1:
            yield Block(words=("", "The same by host; late by: mean over its ranks."), rows=_late_hosts(largest))
    if largest.verdict.experiments:
        yield Block(words=("", f"To try at {_place(largest)}:", *_experiments(largest)))


def _bases(figures: Iterable[tuple[DiagnosedPoint, Figure]]) -> str:
    """What the intervals of a table are, each kind once, with the places where they are not all alike."""
    places: dict[str, list[str]] = {}
    for point, figure in figures:
        places.setdefault(basis_text(figure), []).append(_place(point))
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{basis} ({', '.join(where)})" for basis, where in places.items())


def _place(point: DiagnosedPoint) -> str:
    return place_text(point.ranks, point.nodes)


def _seconds(group: DiagnosedGroup) -> Table:
    rows: Table = [("cause", *map(_place, group.points))]
    for index, share in enumerate(group.points[0].causes):
        rows.append((CAUSE_TITLES[share.name], *(_time(point.causes[index]) for point in group.points)))
    rows.append(("sum: mean step", *(figure_text(point.whole.seconds) for point in group.points)))
    return rows


def _time(share: CauseShare) -> str:
    return figure_text(share.seconds) if share.is_measured else NOT_MEASURED


def _lost(group: DiagnosedGroup) -> Table:
    others = group.points[1:]
    rows: Table = [("cause", *map(_place, others))]
    for index, share in enumerate(group.points[0].causes):
        cells = [
            lost_text(point.causes[index].lost) if point.causes[index].is_measured else NOT_MEASURED for point in others
        ]
        rows.append((CAUSE_TITLES[share.name], *cells))
    rows.append(("sum: lost", *(lost_text(point.whole.lost) for point in others)))
    rows.append(("efficiency (of means)", *(percent(1 - point.whole.lost.value) for point in others)))
    return rows


def _remarks(group: DiagnosedGroup) -> Iterator[str]:
    for index, cause in enumerate(group.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        silent = [point for point in group.points if not point.causes[index].is_measured]
        if silent:
            where = "" if len(silent) == len(group.points) else f" at {', '.join(map(_place, silent))}"
            reasons = _first(reason for point in silent for reason in point.causes[index].not_measured)
            yield f"- {title}: not measured{where}: {reasons}; compute includes it."
        notes = [note for point in group.points for note in point.causes[index].notes]
        if notes:
            yield f"- {title}: {_first(notes)}."
    for point in group.points:
        if point.planted:
            added = ", ".join(f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:8])
            more = f" and {len(point.planted) - 8} more ranks" if len(point.planted) > 8 else ""
            yield f"- Planted at {_place(point)}: {added}{more} a step."
    if (cost := group.watch_cost) is not None:
        share = f"{percent(cost.value, 2)} [{percent(cost.low, 2)}, {percent(cost.high, 2)}]"
        where = f" at {ranks_text(cost.ranks)}" if cost.ranks is not None else f", {runs_text(cost.num_runs)}"
        yield f"- Watching ({group.watching}) cost {share} of a step ({cost.method}{where})."
    else:
        yield f"- Watching: {group.watching}."
    yield from (f"- {text}" for text in group.limits)


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    found = list(dict.fromkeys(texts))
    return found[0] + (f" (other runs tell {len(found) - 1} more)" if len(found) > 1 else "")


def _stragglers(point: DiagnosedPoint) -> Table:
    rows: Table = [("rank", "host", *_STRAGGLER_TITLES)]
    rows += [(str(late.rank), *_straggler(late)) for late in point.waiting_ranks[:MOST_STRAGGLERS]]
    return rows


def _late_hosts(point: DiagnosedPoint) -> Table:
    return [("host", *_STRAGGLER_TITLES), *map(_straggler, point.waiting_hosts[:MOST_STRAGGLERS])]


_STRAGGLER_TITLES = ("last in", "waited a step", "of all waiting", "late by")


def _straggler(late: Straggler) -> tuple[str, ...]:
    seconds = {"input": late.input_s, "compute": late.compute_s, "host": late.host_s}
    own = f"{late.late_by} {number_text(seconds[late.late_by], 's')}" if late.late_by in seconds else late.late_by
    return (
        shorten(late.host, 20),
        percent(late.last_share, 0),
        number_text(late.waited_s, "s"),
        percent(late.waited_share, 0),
        own,
    )


def _experiments(point: DiagnosedPoint) -> Iterator[str]:
    for number, one in enumerate(point.verdict.experiments, start=1):
        gain = f": forecast {gain_text(one.forecast_gain)} ({one.basis})" if one.forecast_gain is not None else ""
        why = f" (no forecast: {one.basis})" if one.forecast_gain is None and one.basis else ""
        yield f"{number}. {one.text}{gain}{why}"
    if point.verdict.bound is not None:
        yield f"A limit, no forecast: {bound_text(point.verdict.bound)}."


def _nodes(found: NodeHistory) -> Iterator[Block]:
    told = []
    if not found.hosts:
        told.append("Nothing to compare: no counted run had ranks on two hosts or more.")
    if found.num_faulty:
        told.append(f"{runs_text(found.num_faulty)} with a planted fault left out.")
    rows: Table = [("host", "own work", "runs", "last in", "fair share", "verdict")]
    for one in (one for number, one in enumerate(found.hosts) if number < MOST_STRAGGLERS or one.verdict == "slow"):
        cells = (str(one.ratio.n), percent(one.last_share, 0), percent(one.fair_share, 0), one.verdict)
        rows.append((shorten(one.host, 20), _ratio(one.ratio), *cells))
    if not found.hosts:
        yield Block(words=tuple(told))
        return
    told.append(
        f"Own work (no exchange) of a host's slowest rank relative to the other hosts' in the same run; slow: interval "
        f"above {found.threshold:g}. {len(found.hosts)} hosts, {runs_text(found.num_runs)} on several hosts"
        + (f", {found.num_single_host} on one." if found.num_single_host else ".")
    )
    yield Block(words=tuple(told), rows=rows)
    lines = [found.option] if found.option else ["No host is shown to be slow."]
    lines += [f"Left out of the list, no name for an option: {host}" for host in found.unsafe]
    yield Block(lines=("", *lines))


def _ratio(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def _endings(found: Diagnosis) -> Iterator[Section]:
    words = [] if found.has_figures else ["No run has figures."]
    words += [f"- {run_id}: {state}: {why}" for run_id, state, why in found.without_figures]
    words += [f"! damaged: {line}" for line in found.damaged]
    if words:
        heading = f"{runs_text(len(found.without_figures))} without figures"
        yield Section(heading=heading, blocks=(Block(words=tuple(words)),))
