"""A diagnosis for a person: sections of sentences and tables, as plain text of 80 columns or in rich's tables."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.reading.slow_nodes import SlowNodes
from dlbench.report.formats.terminal import WIDTH, aligned, shorten
from dlbench.report.tabular import Table
from dlbench.report.wording import runs_text
from dlbench.views.causes.diagnosis import bound_text, gain_text
from dlbench.views.causes.numbers import CausePoint, GroupCauses
from dlbench.views.causes.tables import bases, lost, seconds
from dlbench.views.causes.words import place, remarks
from dlbench.views.diagnosis.document import Diagnosis
from dlbench.views.slow_nodes.tables import exclude_lines, history_words, host_rows
from dlbench.views.stragglers.numbers import Straggler
from dlbench.views.stragglers.tables import late_hosts, late_ranks

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "dlbench diagnosis"

MOST_STRAGGLERS = 5
"""Rows of the table of late ranks."""


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


def _group(group: GroupCauses, width: int) -> Iterator[Block]:
    told = []
    if group.fault:
        told.append(f"! A fault was planted on purpose: {group.fault}.")
    told += [f"{place(point)}: {point.verdict.line}." for point in group.points]
    yield Block(words=tuple(told))
    step = bases([(point, point.whole.seconds) for point in group.points])
    yield Block(words=("", f"Mean step by cause; intervals: {step}."), rows=seconds(group))
    if len(group.points) == 1:
        yield Block(words=("", "Shares of the ideal need a second rank count."))
    else:
        intervals = bases([(point, point.whole.lost) for point in group.points[1:]])
        text = f"Share of the ideal that is lost, by cause; intervals: {intervals}."
        yield Block(words=("", text), rows=lost(group))
    yield Block(words=("", *(f"- {text}" for text in remarks(group))))
    largest = group.points[-1]
    if largest.waiting_ranks:
        text = f"Waiting for whom, at {place(largest)} (means over {runs_text(len(largest.run_ids))}):"
        yield Block(words=("", text), rows=late_ranks(_shown(largest.waiting_ranks)))
        if largest.num_hosts > 1:
            rows = late_hosts(_shown(largest.waiting_hosts))
            yield Block(words=("", "The same by host; late by: mean over its ranks."), rows=rows)
    if largest.verdict.experiments:
        yield Block(words=("", f"To try at {place(largest)}:", *_experiments(largest)))


def _shown(found: Sequence[Straggler]) -> list[Straggler]:
    """The first of them, with hosts short enough for a line."""
    return [dataclasses.replace(late, host=shorten(late.host, 20)) for late in found[:MOST_STRAGGLERS]]


def _experiments(point: CausePoint) -> Iterator[str]:
    for number, one in enumerate(point.verdict.experiments, start=1):
        gain = f": forecast {gain_text(one.forecast_gain)} ({one.basis})" if one.forecast_gain is not None else ""
        why = f" (no forecast: {one.basis})" if one.forecast_gain is None and one.basis else ""
        yield f"{number}. {one.text}{gain}{why}"
    if point.verdict.bound is not None:
        yield f"A limit, no forecast: {bound_text(point.verdict.bound)}."


def _nodes(found: SlowNodes) -> Iterator[Block]:
    told = history_words(found)
    if not found.hosts:
        yield Block(words=told)
        return
    shown = [one for number, one in enumerate(found.hosts) if number < MOST_STRAGGLERS or one.verdict == "slow"]
    short = [dataclasses.replace(one, host=shorten(one.host, 20)) for one in shown]
    yield Block(words=told, rows=host_rows(short))
    yield Block(lines=("", *exclude_lines(found)))


def _endings(found: Diagnosis) -> Iterator[Section]:
    words = [] if found.has_figures else ["No run has figures."]
    words += [f"- {run_id}: {state}: {why}" for run_id, state, why in found.without_figures]
    words += [f"! damaged: {line}" for line in found.damaged]
    if words:
        heading = f"{runs_text(len(found.without_figures))} without figures"
        yield Section(heading=heading, blocks=(Block(words=tuple(words)),))
