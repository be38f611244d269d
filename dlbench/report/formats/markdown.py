"""A report as Markdown (GitHub's dialect), for pull requests, wikis and step summaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from dlbench.report.document import Card, Document, Section
from dlbench.report.table import Sheet
from dlbench.report.wording import harmless
from dlbench.units import counted

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$])")
_LINE_START = re.compile(r"^(\s*\d*)([-+=#.)])(?=\s|#|$)")

MAX_LEVEL = 6


def escape(text: str) -> str:
    """Returns text that Markdown and HTML print as it was."""
    return _LINE_START.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", harmless(text)))


def to_markdown(document: Document) -> str:
    """Returns the report with every table; headings begin at level 1."""
    return "\n".join(_lines(document)).rstrip() + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"# {escape(document.title)}"
    yield ""
    meta = [*document.meta, f"Made by dlbench {document.dlbench_version}."]
    if document.as_of:
        meta.insert(0, f"Newest run finished {document.as_of}.")
    yield escape(" ".join(meta))
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
        yield from _paragraphs(["; ".join(f"{name}: {text}" for name, text in section.facts) + "."])
    if section.marks:
        for mark in section.marks:
            label = f"**{mark.label}:** " if mark.label else ""
            yield f"- {label}{escape(mark.text)}"
        yield ""
    yield from _paragraphs(section.words)
    if section.cards:
        yield from map(_card, section.cards)
        yield ""
    if section.caption not in ("", *(sheet.caption for sheet in section.sheets)):
        yield f"*{escape(section.caption)}*"
        yield ""
    for sheet in section.sheets:
        yield from _sheet(sheet, level + 1)
    yield from _paragraphs(section.notes)
    if section.log:
        yield from (f"    {line}" for line in section.log)
        yield "    "
    for inner in section.sections:
        yield from _section(inner, level + 1)
    if section.missing:
        yield f"{'#' * min(level + 1, MAX_LEVEL)} {section.missing_title}"
        yield ""
        yield from _items(f"{missing.title}: {missing.text}" for missing in section.missing)


def _card(card: Card) -> str:
    number = f"{card.big} {' '.join(card.small)}"
    if card.facts:
        parts = [number]
        if card.rating:
            parts.append(card.rating.text)
        parts += [f"{name.lower()}: {text}" for name, text in card.facts]
        if card.warnings:
            parts.append(counted(len(card.warnings), "warning"))
        text = f"**{escape(card.title)}:** {escape('; '.join(parts))}."
    else:
        text = " ".join(map(escape, card.words)) or escape(f"{card.title}: {number}")
    if card.next_step:
        text += f" **Next:** {escape(card.next_step)}"
    return f"- {text}"


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
        yield escape(text)
        yield ""


def _items(texts: Iterable[str]) -> Iterator[str]:
    yield from (f"- {escape(text)}" for text in texts)
    yield ""
