"""A report for the terminal: verdicts, a table for each group, what is doubtful. Fits 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlbench.report.model import Group, Report
from dlbench.report.tabular import aligned
from dlbench.report.wording import PART_TITLES, basis_text, figure_text, lost_text, place_text, runs_text, value_text
from dlbench.views import sheets
from dlbench.views.exchange import tables as exchange_tables
from dlbench.views.quality import tables as training_tables
from dlbench.views.quality.numbers import Quality
from dlbench.views.sweep import tables as sweep_tables
from dlbench.views.utilisation.numbers import Utilisation

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80


def to_text(report: Report, width: int = WIDTH) -> str:
    """The summary as plain lines of at most `width` columns (a single longer word stays whole)."""
    lines = [report.title, *(line for notice in report.notices for line in _wrapped(notice, width)), ""]
    for heading, rows, words in _sweeps(report, width):
        lines += [*_wrapped(heading, width), *(aligned(rows) if rows else [])]
        lines += [*(line for text in words for line in _wrapped(text, width)), ""]
    for group in report.groups:
        lines += [*_wrapped(group.label, width), *_wrapped(group.verdict, width), ""]
        lines += [*aligned(_rows(group, width)), ""]
        lines += [line for text in _told(group) for line in _wrapped(text, width)]
        for rows, words in _tables(group, width):
            lines += ["", *aligned(rows), *(line for text in words for line in _wrapped(text, width))]
        lines += [*_doubts(group, width), ""]
    return "\n".join([*lines, *_endings(report, width)]).rstrip() + "\n"


def show(report: Report, console: Console) -> None:
    """The summary on a terminal: the same words as `to_text`, in rich's tables; no markup is read from any text."""
    from rich.text import Text

    width = min(console.width, 100)
    console.print(Text(report.title, style="bold"))
    for notice in report.notices:
        console.print(Text(notice, style="italic"))
    for heading, found, told in _sweeps(report, width):
        console.print()
        console.print(Text("\n".join(_wrapped(heading, width)), style="bold cyan"))
        _print_table(found, told, console, width)
    for group in report.groups:
        console.print()
        console.print(Text(group.label, style="bold cyan"))
        console.print(Text("\n".join(_wrapped(group.verdict, width))))
        for rows, words in ((_rows(group, width), _told(group)), *_tables(group, width)):
            _print_table(rows, words, console, width)
        for line in _doubts(group, width):
            console.print(Text(line, style="yellow"))
    console.print()
    for line in _endings(report, width):
        console.print(Text(line))


def _print_table(rows: list[tuple[str, ...]], words: list[str], console: Console, width: int) -> None:
    """A table with the sentences under it."""
    from rich.table import Table
    from rich.text import Text

    if rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in rows[0]:
            table.add_column(Text(title), justify="right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
    for line in (line for text in words for line in _wrapped(text, width)):
        console.print(Text(line))


def _sweeps(report: Report, width: int) -> Iterator[tuple[str, list[tuple[str, ...]], list[str]]]:
    """Heading, table and sentences of each rank count of each sweep."""
    for sweep in report.sweeps:
        for cell in sweep.cells:
            rows = [(shorten(row[0], 36), *row[1:]) for row in sweep_tables.short(sweep, cell)]
            words = [cell.verdict, *([cell.interaction] if cell.interaction else []), *cell.notes]
            words += [*sweep_tables.remark_lines(cell), f"Next: {cell.advice}"]
            heading = f"{sweep.label}, {place_text(cell.ranks, cell.nodes)}; baseline: {cell.baseline}"
            yield heading, _fitting(rows, width), words
        if sweep.idle:
            yield sweep.label, [], list(sweep.idle)


def _rows(group: Group, width: int) -> list[tuple[str, ...]]:
    """The table of a group; the step's interval is left out where the width does not hold it."""
    rows = _all_rows(group, step_interval=True)
    return rows if max(map(len, aligned(rows))) <= width else _all_rows(group, step_interval=False)


def _all_rows(group: Group, *, step_interval: bool) -> list[tuple[str, ...]]:
    spread = any(point.nodes > 1 for point in group.points)
    rows = [
        ("ranks", *(("nodes",) if spread else ()), f"{shorten(group.sample_unit, 20)}/s", "efficiency", "step", "runs")
    ]
    rows += [
        (
            str(point.ranks),
            *((str(point.nodes),) if spread else ()),
            figure_text(point.throughput),
            "baseline" if point.is_baseline else figure_text(point.efficiency),
            figure_text(point.step) if step_interval else value_text(point.step),
            str(point.throughput.n),
        )
        for point in group.points
    ]
    return rows


def _losses(group: Group) -> str:
    """The largest losses of the largest point, in one sentence."""
    if len(group.points) == 1:
        return f"Intervals: {basis_text(group.baseline.throughput)}."
    last = group.largest
    worst = sorted((part for part in last.parts if part.lost.value > 0), key=lambda part: -part.lost.value)[:3]
    parts = ", ".join(f"{PART_TITLES[part.name]} {lost_text(part.lost)}" for part in worst)
    total = lost_text(last.whole.lost)
    lost = f" Lost at {place_text(last.ranks, last.nodes)} on average: {total} ({parts})." if worst else ""
    return f"Intervals: {basis_text(last.throughput)}.{lost}"


def _told(group: Group) -> list[str]:
    """Sentences under the table of a group."""
    return [_losses(group), *([f"Next: {group.next_step}"] if group.next_step else [])]


def _tables(group: Group, width: int) -> Iterator[tuple[list[tuple[str, ...]], list[str]]]:
    """Tables on the exchange, quality, noise scale and the hardware, and the short ones of other views, with the
    sentences under them.
    """
    if group.exchange:
        told = [f"At {place_text(p.ranks, p.nodes)}: {exchange_tables.ways_text(p)}." for p in group.exchange]
        told += [
            f"At {place_text(p.ranks, p.nodes)}, least possible exposed communication: {p.why}."
            for p in group.exchange
            if p.prediction is None
        ]
        yield _fitting(exchange_tables.short(group), width), told
    if group.quality is not None:
        yield _fitting(_quality(group.quality), width), [training_tables.quality_goal(group.quality) + "."]
        factors = training_tables.factors(group.quality)
        if len(factors) > 1:
            yield _fitting([row[:-1] for row in factors], width), []
    if group.noise:
        rows = [row[:4] for row in training_tables.noise(group.noise)]
        words = [f"At {row[0]}: {row[5]}." for row in training_tables.noise(group.noise)[1:]]
        yield _fitting(rows, width), words
    for _, said, found in sheets.told_of(group):
        short = [sheet for sheet in found if sheet.in_terminal]
        for sheet in short:
            yield _fitting(sheet.text, width), [*said] if sheet is short[-1] else []
    if group.utilisation is not None:
        yield _fitting(_use(group, group.utilisation), width), [training_tables.utilisation_caption(group.utilisation)]


def _quality(found: Quality) -> list[tuple[str, ...]]:
    table = training_tables.quality(found)
    return [(row[0], row[2], row[3], row[5], row[7].replace("Best ", "best ")) for row in table]


def _use(group: Group, found: Utilisation) -> list[tuple[str, ...]]:
    return [(row[0], *row[2:-1]) for row in training_tables.utilisation(group, found)]


def _fitting(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """The rows, without intervals where the width does not hold them; where that is not enough shortened, then cut."""
    if max(map(len, aligned(rows))) <= width:
        return rows
    rows = [tuple(cell.partition(" [")[0] for cell in row) for row in rows]
    for longest in (width, 20, 12):
        short = [tuple(shorten(cell, longest) for cell in row) for row in rows]
        if max(map(len, aligned(short))) <= width:
            return short
    # Columns on the right go: every format but this one prints them all.
    while max(map(len, aligned(short))) > width and len(short[0]) > 1:
        short = [row[:-1] for row in short]
    return short


def _doubts(group: Group, width: int) -> Iterator[str]:
    for doubt in group.doubts:
        mark = "! " if doubt.severity == "serious" else "- "
        where = f" ({runs_text(len(doubt.runs))})" if doubt.runs else ""
        yield from textwrap.wrap(doubt.text + where, width, initial_indent=mark, subsequent_indent="  ")


def _endings(report: Report, width: int) -> list[str]:
    lines: list[str] = []
    if not report.groups:
        lines.append("No run has figures.")
    if report.without_figures:
        lines += [f"{runs_text(len(report.without_figures))} without figures:"]
        for run in report.without_figures:
            text = f"{run.run_id}: {run.state}: {run.story}"
            lines += textwrap.wrap(text, width, initial_indent="- ", subsequent_indent="  ")
    for line in report.damaged:
        lines += textwrap.wrap(f"damaged: {line}", width, initial_indent="! ", subsequent_indent="  ")
    return lines


def shorten(text: str, width: int) -> str:
    """The text, cut where it is longer than a column may be."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)
