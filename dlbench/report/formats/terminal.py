"""A report for the terminal, in 80 columns: the brief form on one screen per group, or the full form."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dlbench.report.document import Document, Mark, Section
from dlbench.report.table import Sheet, TextRow, TextTable
from dlbench.report.wording import DASH, harmless
from dlbench.units import counted

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
WIDEST = 100  # Lines are not made longer on a wider terminal: long lines are hard to read.
SCREEN = 38  # Lines of a group in the brief form: with the prompt they fill a screen of 40.
MAX_MARKS = 3  # Warnings and notes of a group that the brief form prints; it counts the others.
MARK_LINES = 2

MAX_METHODS = 5  # Definitions that the full form prints, the first sentence of each.
MAX_MISSING = 4  # Subjects that a whole report lacks up to which the full form says what would produce each.
MAX_PARTS = 2  # Tables below each other that a wide table of evidence may take in the full form.
MAX_LOOKED_UP = 20  # Rows of an appendix' table in the full form.
LONG_CELL = 24  # Characters to which cells are shortened before columns are left out.
NARROWEST = 14  # Characters to which a column is wrapped before rows are printed as names and values.
_TRIMMED = ((None, MAX_MARKS), (None, 1), (8, 1), (6, 1), (4, 1))  # Rows and marks, tried in this order.

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


_BLANK = Block(("",))


def to_text(document: Document, *, full: bool = False) -> str:
    """Returns plain lines of at most `WIDTH` columns (a single longer word is not broken)."""
    lines: list[str] = []
    for block in _blocks(document, WIDTH, full):
        lines += block.lines
    return "\n".join(lines).rstrip() + "\n"


def show(document: Document, console: Console, *, full: bool = False) -> None:
    """Prints the same lines on a terminal, in colours; no markup is read from any text."""
    from rich.text import Text

    for block in _blocks(document, min(console.width, WIDEST), full):
        console.print(Text("\n".join(block.lines), style=_RICH[block.style]), soft_wrap=True)


def _blocks(document: Document, width: int, full: bool) -> Iterator[Block]:
    yield Block(tuple(_wrapped(document.title, width)), "title")
    if full:
        yield from _sentences(document.meta, width)
    for text in document.notices:
        yield Block(tuple(_wrapped(text, width)), "notice")
    for section in document.sections:
        if section.is_group and not full:
            blocks = _screen(section, width)
        else:
            blocks = list(_section(section, width, full, is_outer=True))
        if blocks:
            yield _BLANK
            yield from blocks
    if full:
        yield from _further_tables(document, width)
        return
    shown = itertools.chain.from_iterable(section.sections for section in document.sections if section.is_group)
    if any(section.level != "answer" or section.sections for section in shown):
        yield _BLANK
        yield from _sentences(["All evidence: the same command with --full."], width)


def _further_tables(document: Document, width: int) -> Iterator[Block]:
    names: dict[str, None] = {}
    for section, _ in document.walk():
        for sheet in section.sheets:
            if sheet.to_display().rows and (_is_left_out(sheet) or _is_shortened(section, sheet, width)):
                title = f"{sheet.title} ({sheet.name})" if sheet.names else sheet.title
                names[title] = None
    if names:
        yield _BLANK
        command = document.command
        csv = f"`{command} --format csv --table NAME` writes one in brackets"
        texts = (
            f"Not printed here, or not whole: {'; '.join(names)}.",
            f"`{command} -o report.html` has all tables; {csv}.",
        )
        yield from _sentences(texts, width)


def _is_left_out(sheet: Sheet[Any]) -> bool:
    """Returns whether the full form leaves a table to other formats: a page folds it, or draws it."""
    return (sheet.is_folded or sheet.is_drawn) and not sheet.in_terminal


def _is_whole(section: Section, sheet: Sheet[Any]) -> bool:
    """Returns whether the full form prints a whole table: CSV lacks it, or its columns are compared."""
    is_pivot = sheet.pivot is not None and section.level != "appendix"
    return section.level == "answer" or is_pivot or not sheet.names


def _is_shortened(section: Section, sheet: Sheet[Any], width: int) -> bool:
    if _is_whole(section, sheet):
        return False
    table = sheet.to_display()
    if section.level == "evidence":
        return _last_column(table, width) < len(table.header)
    return len(table.header) > 2


def _screen(group: Section, width: int) -> list[Block]:
    blocks: list[Block] = []
    for max_rows, max_marks in _TRIMMED:
        blocks = [Block(tuple(_wrapped(group.title, width)), "heading"), *_brief(group, width, max_rows)]
        for section in group.sections:
            if section.level == "answer":
                blocks += _brief(section, width, max_rows)
        blocks += _marks(group, width, max_marks)
        if group.next_step:
            blocks += _sentences([f"Next: {group.next_step}"], width)
        if sum(len(block.lines) for block in blocks) <= SCREEN:
            break
    return blocks


def _marks(group: Section, width: int, max_marks: int) -> Iterator[Block]:
    marks = list(group.marks)
    for section in group.sections:
        if section.level == "answer":
            marks += section.marks
    marks.sort(key=lambda mark: mark.severity != "serious")
    for mark in marks[:max_marks]:
        yield _shortened_mark(mark, width)
    hidden = [mark.severity for mark in marks[max_marks:]]
    num_warnings = hidden.count("serious")
    numbers = {"more warning": num_warnings, "more note": len(hidden) - num_warnings}
    if hidden:
        yield Block((f"... and {' and '.join(counted(number, noun) for noun, number in numbers.items() if number)}",))


def _shortened_mark(mark: Mark, width: int) -> Block:
    block = _mark(mark, width)
    if len(block.lines) <= MARK_LINES:
        return block
    *first_lines, last = block.lines[:MARK_LINES]
    if len(last) > width - 4:
        last = textwrap.shorten(last, width - 6, placeholder="")
    return Block((*first_lines, f"  {last.strip()} ..."), block.style)


def _section(section: Section, width: int, full: bool, *, is_outer: bool) -> Iterator[Block]:
    inner: list[Block] = []
    for inner_section in section.sections:
        inner += _section(inner_section, width, full, is_outer=False)
    marks = [_mark(mark, width) for mark in section.marks]
    if full:
        blocks = [*_full(section, width), *inner]
        if marks and inner:
            blocks.append(_BLANK)
        blocks += marks
        blocks += _missing(section, width)
    else:
        blocks = []
        if section.headline and any(sheet.in_terminal for sheet in section.sheets):
            blocks += _sentences([section.headline], width)
        blocks += [*_brief(section, width), *inner, *marks]
    if not blocks:
        return
    if full and not is_outer:
        yield Block(("", *_wrapped(section.title, width)), "heading")
    elif full or is_outer:
        yield Block(tuple(_wrapped(section.title, width)), "heading")
    yield from blocks


def _missing(section: Section, width: int) -> Iterator[Block]:
    """Yields what is not measured and what would measure it; of a whole report with many subjects these alone."""
    if not section.missing:
        return
    if section.level == "appendix" and len(section.missing) > MAX_MISSING:
        titles = "; ".join(missing.title for missing in section.missing)
        yield from _sentences([f"{titles}. The HTML page and Markdown say what would produce each."], width)
        return
    yield _BLANK
    yield from _sentences([f"{section.missing_title}:"], width)
    yield from _sentences([f"- {missing.title}: {missing.text}" for missing in section.missing], width)


def _full(section: Section, width: int) -> Iterator[Block]:
    if section.headline:
        yield from _sentences([section.headline], width)
    yield from _sentences(section.about, width)
    if section.are_methods:
        yield from _methods(section, width)
    elif section.facts and section.is_group:
        yield from _sentences(["; ".join(f"{name}: {text}" for name, text in section.facts) + "."], width)
    elif section.facts:
        yield Block(tuple(_named(section.facts, width)))
    yield from _sentences(section.words, width)
    sheets = [sheet for sheet in section.sheets if not _is_left_out(sheet)]
    for sheet in sheets:
        if sheet.to_display().rows:
            lines = []
            if section.about or section.words or len(sheets) > 1:  # A single table follows a headline directly.
                lines.append("")
            if len(sheets) > 1 and sheet.title != section.title:
                lines += _wrapped(sheet.title, width)
            lines += _full_table(section, sheet, width)
            yield Block((*lines, *_wrapped(sheet.caption, width)))
    if section.notes:
        yield _BLANK
        yield from _sentences([f"- {text}" for text in section.notes], width)
    if section.log:
        yield Block(("", *section.log))


def _full_table(section: Section, sheet: Sheet[Any], width: int) -> list[str]:
    table = sheet.to_display()
    if _is_whole(section, sheet):
        return whole_table(table, width)
    if section.level == "evidence":
        end = _last_column(table, width)
        return whole_table(TextTable(table.header[:end], tuple(TextRow(row.cells[:end]) for row in table.rows)), width)
    if len(table.header) == 2:
        return _wrapped("; ".join(f"{row.cells[0]}: {row.cells[1]}" for row in table.rows) + ".", width)
    rows = table.rows[:MAX_LOOKED_UP]
    lines = aligned(_without_last([table.header, *(tuple(map(str, row.cells)) for row in rows)], width))
    if len(rows) < len(table.rows):
        lines.append(f"... and {counted(len(table.rows) - len(rows), 'more row')}")
    return lines


def _last_column(table: TextTable, width: int) -> int:
    """Returns the end of the columns that the first `MAX_PARTS` parts of a split table hold."""
    _, end = _column_ranges(_widths(_texts(table, len(table.header))), width)[:MAX_PARTS][-1]
    return end


def _methods(section: Section, width: int) -> Iterator[Block]:
    for name, text in section.facts[:MAX_METHODS]:
        first_sentence = re.split(r"(?<=\w\w\.) (?=[A-Z])", text, maxsplit=1)[0]
        yield from _sentences([f"- {name}: {first_sentence}"], width)
    num_others = len(section.facts[MAX_METHODS:])
    text = f"{section.docs_page} and the HTML page have the whole definitions"
    if num_others:
        text += f", and {num_others} more"
    yield from _sentences([f"{text}."], width)


def _brief(section: Section, width: int, max_rows: int | None = None) -> Iterator[Block]:
    """Yields the brief words of a section under its tables; in a group, above them."""
    tables = list(_brief_tables(section, width, max_rows))
    texts = section.brief
    if texts is None and tables:
        texts = section.words
    sentences = list(_sentences(texts or (), width))
    if section.is_group:
        yield from sentences
    yield from tables
    if not section.is_group:
        yield from sentences


def _brief_tables(section: Section, width: int, max_rows: int | None) -> Iterator[Block]:
    sheets = [sheet for sheet in section.sheets if sheet.in_terminal]
    for sheet in sheets:
        table = sheet.to_display(brief=True)
        if not table.rows:
            continue
        lines = [""]
        if len(sheets) > 1 and sheet.title != section.title:
            lines += _wrapped(sheet.title, width)
        rows = table.rows[: sheet.max_rows]
        num_between = 0
        num_further = len(table.rows) - len(rows)
        if max_rows is not None and len(rows) > max_rows:
            # The first row, which others are measured against, and the last ones.
            num_between = len(rows) - max_rows
            rows = (rows[0], *rows[1 - max_rows :])
        lines += fitted(TextTable(table.header, rows), width)
        if num_between:
            lines.insert(len(lines) - len(rows) + 1, f"... {num_between} rows left out")
        if num_further:
            lines.append(f"... and {num_further} more rows")
        yield Block(tuple(lines))


def _named(pairs: Sequence[tuple[str, str]], width: int) -> list[str]:
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
    lines = tuple(_wrap(mark.text, width, initial_indent=_SIGNS[mark.severity], subsequent_indent="  "))
    return Block(lines, "warning") if mark.severity == "serious" else Block(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of equal length as lines of text, columns aligned to the right."""
    widths = _widths(rows)
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(*rows, strict=True)]


def fitted(table: TextTable, width: int) -> list[str]:
    """Returns a table as lines that fit: without intervals, then with short cells, then with fewer columns."""
    for num_intervals in range(len(table.header), -1, -1):
        rows = _texts(table, num_intervals)
        if _width(rows) <= width:
            return aligned(rows)
    for longest in (width, LONG_CELL):
        rows[1:] = [tuple(map(partial(shorten, width=longest), row)) for row in rows[1:]]
        if _width(rows) <= width:
            return aligned(rows)
    rows = _without_last(rows, width)
    if len(rows[0]) == 1:
        rows = [(shorten(cell, width),) for (cell,) in rows]
    return aligned(rows)


def _without_last(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Returns rows without the columns from the right that do not fit; the first one stays."""
    while _width(rows) > width and len(rows[0]) > 1:
        rows = [row[:-1] for row in rows]
    return rows


def _texts(table: TextTable, num_intervals: int) -> list[tuple[str, ...]]:
    rows = [table.header]
    for row in table.rows:
        texts = [str(cell) for cell in row.cells[:num_intervals]]
        texts += [cell.text for cell in row.cells[num_intervals:]]
        rows.append(tuple(texts))
    return rows


def whole_table(table: TextTable, width: int) -> list[str]:
    """Returns a whole table as lines: if it is too wide, transposed, split, wrapped, or as names and values."""
    rows = _texts(table, len(table.header))
    first, *others = _widths(rows)
    if first + 2 + max(others, default=-2) > width:
        return _wrapped_table(rows, width) or _names_and_values(rows, width)
    lines: list[str] = []
    for start, end in _column_ranges(_widths(rows), width):
        lines += ["", *aligned([(row[0], *row[start:end]) for row in rows])]
    del lines[0]
    transposed = list(zip(*rows, strict=True))
    if len(transposed) < len(lines) and _width(transposed) <= width:
        return aligned(transposed)
    return lines


def _column_ranges(widths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Returns first and end of the columns that fit next to the first one, for each table of a split one."""
    ranges = []
    start, used = 1, widths[0]
    for index, size in enumerate(widths[1:], 1):
        if index > start and used + 2 + size > width:
            ranges.append((start, index))
            start, used = index, widths[0]
        used += 2 + size
    return [*ranges, (start, len(widths))]


def _wrapped_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns a table whose widest columns are wrapped, aligned to the left; empty if they would be too narrow."""
    widths = _widths(rows)
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(range(len(widths)), key=widths.__getitem__)
        widths[widest] -= 1
        if widths[widest] < NARROWEST:
            return []
    lines = []
    for row in rows:
        cells = [_wrap(text, size) for text, size in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = ["".join(cell[number : number + 1]).ljust(size) for cell, size in zip(cells, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
    return lines


def _names_and_values(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    header, *value_rows = rows
    lines: list[str] = []
    for row in value_rows:
        lines += ["", *_named([(name, text) for name, text in zip(header, row, strict=True) if text != DASH], width)]
    return lines[1:]


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, aligned(rows)))


def shorten(text: str, width: int) -> str:
    """Returns the text, cut if it is longer than a column may be."""
    return text if len(text) <= width else text[: width - 3] + "..."


def _wrapped(text: str, width: int) -> list[str]:
    indent = "  " if text[:2] in _SIGNS.values() else ""
    return _wrap(text, width, subsequent_indent=indent)
