"""Reports as who reads them finds them: a page in a browser, a table in a program."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser

from dlbench.report.document import Document
from dlbench.report.formats.data import to_csv


class Outline(HTMLParser):
    """Open elements, ids, and everything an element would load."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr", "path", "rect", "line"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.unnamed = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "srcset")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.unnamed += values.get("role") in ("img", "region") and not values.get("aria-label")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag


def assert_well_formed(page: str) -> set[str]:
    """Everything is closed and named, ids are unique, and nothing is loaded; returns the ids."""
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.stack == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.handlers == []
    assert outline.unnamed == 0
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert [link for link in outline.links if not link.startswith(("#", "data:text/csv;", "data:,"))] == []
    return set(outline.ids)


def csv_rows(document: Document, table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(document, table))))
