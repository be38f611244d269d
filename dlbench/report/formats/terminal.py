"""A report for the terminal, plain or in colours. Fits 80 columns.

The brief form prints of each section what it marks as brief, and of a group its answers alone, on one screen; the full
form prints all words and tables.
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
WIDEST = 100  # Lines are not made longer on a wider terminal: long lines are hard to read.
SCREEN = 38  # Lines of a group in the brief form: with the prompt they fill a screen of 40.
MAX_MARKS = 3  # Warnings and notes of a group that the brief form prints; it counts the others.
MARK_LINES = 2

LONG_CELL = 24  # Characters to which cells are shortened before columns are left out.
_TRIMMED = ((None, MAX_MARKS), (None, 1), (8, 1), (6, 1), (4, 1))
"""Rows of a table and marks, tried in this order until a group fits a screen."""

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


def to_text(document: Document, *, full: bool = False) -> str:
    """Plain lines of at most `WIDTH` columns (a single longer word stays whole)."""
    return "\n".join(line for block in _blocks(document, WIDTH, full) for line in block.lines).rstrip() + "\n"


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
        if section.is_group and not full:
            found = _screen(section, width)
        else:
            found = list(_section(section, width, full, is_outer=True))
        if found:
            yield Block(("",))
            yield from found
    inner = [one for group in document.sections if group.is_group for one in group.sections]
    if not full and any(one.level != "answer" or one.sections for one in inner):
        yield Block(("", *_wrapped("All evidence: the same command with --full.", width)))


def _screen(group: Section, width: int) -> list[Block]:
    """A group in the brief form: label, conditions, finding, answers, warnings, the next step."""
    heading = Block(tuple(_wrapped(group.title, width)), "heading")
    found: list[Block] = []
    for max_rows, max_marks in _TRIMMED:
        found = [
            heading,
            *_brief(group, width, max_rows),
            *(
                block
                for section in group.sections
                if section.level == "answer"
                for block in _brief(section, width, max_rows)
            ),
            *_marks(group, width, max_marks),
            *_sentences([f"Next: {group.next_step}"] if group.next_step else [], width),
        ]
        if sum(len(block.lines) for block in found) <= SCREEN:
            break
    return found


def _marks(group: Section, width: int, most: int) -> Iterator[Block]:
    """The first marks of a group and of its answers, serious ones first, and how many more there are."""
    answers = (section for section in group.sections if section.level == "answer")
    marks = [*group.marks, *(mark for section in answers for mark in section.marks)]
    marks.sort(key=lambda mark: mark.severity != "serious")
    for mark in marks[:most]:
        block = _mark(mark, width)
        if len(block.lines) > MARK_LINES:
            kept = block.lines[:MARK_LINES]
            last = textwrap.shorten(kept[-1], width - 6, placeholder="") if len(kept[-1]) > width - 4 else kept[-1]
            block = Block((*kept[:-1], f"  {last.strip()} ..."), block.style)
        yield block
    left = marks[most:]
    if left:
        warnings = sum(mark.severity == "serious" for mark in left)
        notes = len(left) - warnings
        counts = [f"{n} more {word}{'s' * (n > 1)}" for n, word in ((warnings, "warning"), (notes, "note")) if n]
        yield Block((f"... and {' and '.join(counts)}",))


def _section(section: Section, width: int, full: bool, *, is_outer: bool) -> Iterator[Block]:
    inner = [block for one in section.sections for block in _section(one, width, full, is_outer=False)]
    marks = [_mark(mark, width) for mark in section.marks]
    content = list(_full(section, width) if full else _brief(section, width))
    if not full and section.headline and any(sheet.in_terminal for sheet in section.sheets):
        content = [*_sentences([section.headline], width), *content]
    own = [*content, *inner, *([Block(("",))] if full and marks and inner else []), *marks]
    if full and section.missing:
        texts = [f"{section.missing_title}:", *(f"- {one.title}: {one.text}" for one in section.missing)]
        own.append(Block(("", *(line for text in texts for line in _wrapped(text, width)))))
    if not own:
        return
    if is_outer or full:
        yield Block(("",) * (not is_outer) + tuple(_wrapped(section.title, width)), "heading")
    yield from own


def _full(section: Section, width: int) -> Iterator[Block]:
    """All words and tables of a section by itself, the finding first."""
    yield from _sentences([section.headline] if section.headline else [], width)
    yield from _sentences(section.about, width)
    if section.facts:
        yield Block(tuple(_named(section.facts, width)))
    yield from _sentences(section.words, width)
    for sheet in section.sheets:
        table = sheet.to_display()
        if table.rows:
            title = _wrapped(sheet.title, width) if sheet.title != section.title else []
            yield Block(("", *title, *whole(table, width), *_wrapped(sheet.caption, width)))
    if section.notes:
        yield Block(("", *(line for text in section.notes for line in _wrapped(f"- {text}", width))))
    if section.log:
        yield Block(("", *section.log))


def _brief(section: Section, width: int, most: int | None = None) -> Iterator[Block]:
    """What a section marks as brief: words under tables of at most `most` rows, those of a group above them."""
    tables = list(_brief_tables(section, width, most))
    says = section.brief
    if says is None:
        says = section.words if tables else ()
    if section.is_group:
        yield from _sentences(says, width)
        yield from tables
    else:
        yield from tables
        yield from _sentences(says, width)


def _brief_tables(section: Section, width: int, most: int | None) -> Iterator[Block]:
    shown = [sheet for sheet in section.sheets if sheet.in_terminal]
    for sheet in shown:
        table = sheet.to_display(brief=True)
        if table.rows:
            title = _wrapped(sheet.title, width) if len(shown) > 1 and sheet.title != section.title else []
            kept = TextTable(table.header, table.rows[: sheet.max_rows])
            first = len(table.rows) - len(kept.rows)
            trimmed = kept
            if most is not None and len(kept.rows) > most:
                # The first row, which others are measured against, and the last ones.
                trimmed = TextTable(kept.header, (kept.rows[0], *kept.rows[1 - most :]))
            between = len(kept.rows) - len(trimmed.rows)
            lines = fitted(trimmed, width)
            if between:
                lines.insert(2, f"... {between} rows left out")
            yield Block(("", *title, *lines, *([f"... and {first} more rows"] if first else [])))


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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines of text, columns to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]


def fitted(table: TextTable, width: int) -> list[str]:
    """A table as lines, header first; where the width does not hold all, intervals are left out, from the right.

    Where that is not enough long cells are shortened, and then columns on the right go, until one is left: headers stay
    whole, and every other format prints all columns.
    """
    rows = _texts(table, len(table.header))
    for kept in reversed(range(len(table.header))):
        if _width(rows) <= width:
            return aligned(rows)
        rows = _texts(table, kept)
    short = rows
    for longest in (width, LONG_CELL):
        short = [rows[0], *(tuple(shorten(cell, longest) for cell in row) for row in rows[1:])]
        if _width(short) <= width:
            return aligned(short)
    while _width(short) > width and len(short[0]) > 1:
        short = [row[:-1] for row in short]
    return aligned([tuple(shorten(cell, width) for cell in row) for row in short])


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
