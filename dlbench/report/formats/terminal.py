"""A report for the terminal, plain or in colours. Fits 80 columns.

The summary prints of each section what it marks as brief; the full form prints all words and tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from dlbench.report.document import Document, Mark, Section
from dlbench.report.table import TextTable
from dlbench.report.wording import DASH, harmless

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
WIDEST = 100
"""Lines are not made longer on a wider terminal: long lines are hard to read."""

Style = Literal["", "title", "notice", "heading", "warning"]
_RICH = {"": "", "title": "bold", "notice": "italic", "heading": "bold cyan", "warning": "yellow"}
# A command or a path that is cut at a hyphen cannot be copied.
_wrap = partial(textwrap.wrap, break_on_hyphens=False)
_SIGNS = {"serious": "! ", "note": "- ", "good": "+ "}


@dataclass(frozen=True)
class Block:
    """Lines that belong together."""

    lines: tuple[str, ...]
    style: Style = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(map(harmless, self.lines)))


def to_text(document: Document, width: int = WIDTH, *, full: bool = False) -> str:
    """Plain lines of at most `width` columns (a single longer word stays whole)."""
    return "\n".join(line for block in _blocks(document, width, full) for line in block.lines).rstrip() + "\n"


def show(document: Document, console: Console, *, full: bool = False) -> None:
    """The same lines on a terminal, in colours; no markup is read from any text."""
    from rich.text import Text

    for block in _blocks(document, min(console.width, WIDEST), full):
        console.print(Text("\n".join(block.lines), style=_RICH[block.style]), soft_wrap=True)


def _blocks(document: Document, width: int, full: bool) -> Iterator[Block]:
    yield Block(tuple(_wrapped(document.title, width)), "title")
    for text in document.meta if full else ():
        yield Block(tuple(_wrapped(text, width)))
    for text in document.notices:
        yield Block(tuple(_wrapped(text, width)), "notice")
    for section in document.sections:
        found = list(_section(section, width, full, is_outer=True))
        if found:
            yield Block(("",))
            yield from found


def _section(section: Section, width: int, full: bool, *, is_outer: bool) -> Iterator[Block]:
    inner = [block for one in section.sections for block in _section(one, width, full, is_outer=False)]
    marks = [_mark(mark, width) for mark in section.marks]
    own = [*_content(section, width, full), *inner, *([Block(("",))] if full and marks and inner else []), *marks]
    if full and section.missing:
        own.append(_listed((section.missing_title, *(f"{one.title}: {one.text}" for one in section.missing)), width))
    if not own:
        return
    if is_outer or full:
        yield Block(("",) * (not is_outer) + tuple(_wrapped(section.title, width)), "heading")
    yield from own


def _content(section: Section, width: int, full: bool) -> Iterator[Block]:
    """Words and tables of a section by itself; in the summary the words stand under the tables."""
    tables = []
    num_shown = sum(sheet.in_terminal for sheet in section.sheets)
    for sheet in section.sheets:
        if full or sheet.in_terminal:
            table = sheet.people(brief=not full)
            if table.rows:
                is_titled = sheet.title != section.title if full else num_shown > 1
                title = _wrapped(sheet.title, width) if is_titled else []
                lines = whole(table, width) if full else fitted(_first_rows(table, sheet.max_rows), width)
                more = 0 if full else len(table.rows) - len(table.rows[: sheet.max_rows])
                lines += [f"... and {more} more rows"] if more else []
                about = _wrapped(sheet.caption, width) if full else []
                tables.append(Block(("", *title, *lines, *about)))
    if full:
        yield from _sentences(section.about, width)
        if section.facts:
            yield Block(tuple(_named(section.facts, width)))
        yield from _sentences(section.words, width)
        yield from tables
        if section.notes:
            yield Block(("", *(line for text in section.notes for line in _wrapped(f"- {text}", width))))
        return
    says = section.brief
    if says is None:
        says = section.words if tables else ()
    if section.is_group:
        yield from _sentences(says, width)
        yield from tables
    else:
        yield from tables
        yield from _sentences(says, width)


def _first_rows(table: TextTable, most: int | None) -> TextTable:
    return TextTable(table.header, table.rows[:most])


def _named(pairs: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Names and values, a line each; further lines of a value stand under its begin."""
    size = min(max((len(name) for name, _ in pairs), default=0), width // 4)
    lines = []
    for name, text in pairs:
        head = f"  {name.ljust(size)}  "
        lines += _wrap(text, width, initial_indent=head, subsequent_indent=" " * (size + 4)) or [head.rstrip()]
    return lines


def _sentences(texts: Sequence[str], width: int) -> Iterator[Block]:
    for text in texts:
        yield Block(tuple(_wrapped(text, width)))


def _mark(mark: Mark, width: int) -> Block:
    lines = _wrap(mark.text, width, initial_indent=_SIGNS[mark.severity], subsequent_indent="  ")
    return Block(tuple(lines), "warning" if mark.severity == "serious" else "")


def _listed(texts: Sequence[str], width: int) -> Block:
    first, *items = texts
    lines = ["", *_wrapped(f"{first}:", width)]
    for text in items:
        lines += _wrap(text, width, initial_indent="- ", subsequent_indent="  ")
    return Block(tuple(lines))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines of text, columns to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def fitted(table: TextTable, width: int) -> list[str]:
    """A table as lines, header first; where the width does not hold all, intervals are left out, from the right.

    Where that is not enough cells are shortened, and then columns on the right go: every other format prints them all.
    """
    short = rows = _texts(table, len(table.header))
    for kept in reversed(range(len(table.header))):
        if _width(rows) <= width:
            return aligned(rows)
        rows = _texts(table, kept)
    for longest in (width, 20, 12):
        short = [tuple(shorten(cell, longest) for cell in row) for row in rows]
        if _width(short) <= width:
            return aligned(short)
    while _width(short) > width and len(short[0]) > 1:
        short = [row[:-1] for row in short]
    return aligned(short)


def _texts(table: TextTable, kept: int) -> list[tuple[str, ...]]:
    """Header and cells, the first `kept` columns with their intervals."""
    return [
        table.header,
        *(
            tuple(str(cell) if place < kept else cell.text for place, cell in enumerate(row.cells))
            for row in table.rows
        ),
    ]


def whole(table: TextTable, width: int) -> list[str]:
    """A table as lines of which nothing is left out.

    One that is too wide becomes several below each other, each with the first column; where that is not enough, each
    row becomes names and values, without those that are missing.
    """
    count = len(table.header)
    rows = _texts(table, count)
    if max([_width([(row[0], row[place]) for row in rows]) for place in range(1, count)], default=0) > width:
        known = [
            [(name, text) for name, text in zip(table.header, row, strict=True) if text != DASH] for row in rows[1:]
        ]
        return [line for pairs in known for line in (*_named(pairs, width), "")][:-1]
    lines: list[str] = []
    start = 1
    while start < count or not lines:
        end = start + 1
        while end < count and _width([(row[0], *row[start : end + 1]) for row in rows]) <= width:
            end += 1
        lines += [*([""] if lines else []), *aligned([(row[0], *row[start:end]) for row in rows])]
        start = end
    return lines


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, aligned(rows)))


def shorten(text: str, width: int) -> str:
    """The text, cut where it is longer than a column may be."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrapped(text: str, width: int) -> list[str]:
    """Lines; those of a list item stand under its text."""
    return _wrap(text, width, subsequent_indent="  " if text[:2] in _SIGNS.values() else "")
