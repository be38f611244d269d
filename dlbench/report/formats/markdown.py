"""A report as Markdown (GitHub's dialect), for pull requests, wikis and step summaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from dlbench.report.document import Card, Document, Section
from dlbench.report.table import Sheet
from dlbench.report.wording import harmless

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$])")
_LINE_START = re.compile(r"^(\s*\d*)([-+=#.)])(?=\s|#|$)")

MAX_LEVEL = 6


def escape(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    return _LINE_START.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", harmless(text)))


def to_markdown(document: Document) -> str:
    """The report; headings from level 1, every table."""
    return "\n".join(_lines(document)).rstrip() + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {escape(document.title)}"
    yield ""
    newest = (f"Newest run finished {document.as_of}.",) if document.as_of else ()
    yield escape(" ".join((*newest, *document.meta, f"Made by dlbench {document.dlbench_version}.")))
    yield ""
    for notice in document.notices:
        yield f"**{escape(notice)}**"
        yield ""
    for section in document.sections:
        yield from _section(section, 2)


def _section(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * min(level, MAX_LEVEL)} {escape(section.title)}"
    yield ""
    yield from _paragraphs(section.about)
    if section.facts and section.are_methods:
        yield from _items(f"{name}. {text}" for name, text in section.facts)
    elif section.facts:
        yield from _paragraphs(("; ".join(f"{name}: {text}" for name, text in section.facts) + ".",))
    if section.marks:
        for mark in section.marks:
            yield f"- **{mark.label}:** {escape(mark.text)}" if mark.label else f"- {escape(mark.text)}"
        yield ""
    yield from _paragraphs(section.words)
    yield from (line for card in section.cards for line in _card(card))
    if section.cards:
        yield ""
    captions = {sheet.caption for sheet in section.sheets}
    if section.caption and section.caption not in captions:
        yield f"*{escape(section.caption)}*"
        yield ""
    for sheet in section.sheets:
        yield from _sheet(sheet, level + 1)
    yield from _paragraphs(section.notes)
    yield from (f"    {line}" for line in (*section.log, *([""] if section.log else [])))
    for inner in section.sections:
        yield from _section(inner, level + 1)
    if section.missing:
        yield f"{'#' * min(level + 1, MAX_LEVEL)} {section.missing_title}"
        yield ""
        yield from _items(f"{one.title}: {one.text}" for one in section.missing)


def _card(card: Card) -> Iterator[str]:
    number = f"{card.big} {' '.join(card.small)}"
    if card.facts:
        rating = (card.rating.text,) if card.rating else ()
        count = len(card.warnings)
        warnings = (f"{count} warning{'s' * (count > 1)}",) if count else ()
        said = (number, *rating, *(f"{name.lower()}: {text}" for name, text in card.facts), *warnings)
        text = f"**{escape(card.title)}:** {escape('; '.join(said))}."
    else:
        text = " ".join(map(escape, card.words)) or escape(f"{card.title}: {number}")
    yield f"- {text}" + (f" **Next:** {escape(card.next_step)}" if card.next_step else "")


def _sheet(sheet: Sheet[object], level: int) -> Iterator[str]:
    table = sheet.to_display()
    if not table.rows:
        return
    yield f"{'#' * min(level, MAX_LEVEL)} {escape(sheet.title)}"
    yield ""
    yield "| " + " | ".join(map(escape, table.header)) + " |"
    yield "|" + " --- |" * len(table.header)
    for row in table.rows:
        yield "| " + " | ".join(escape(str(cell)) for cell in row.cells) + " |"
    yield ""
    if sheet.caption:
        yield f"*{escape(sheet.caption)}*"
        yield ""


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (escape(text), "")


def _items(texts: Iterable[str]) -> Iterator[str]:
    yield from (f"- {escape(text)}" for text in texts)
    yield ""
