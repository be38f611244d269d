"""Reports as who reads them finds them: a page in a browser, what a visit asks for and complains of, and a table."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dlbench.report.document import Document
from dlbench.report.formats.data import to_csv

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of a module; each visit has a context of its own."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=FLAGS, timeout=120_000)
        yield started
        started.close()


class Visit:
    """One page in the browser, with everything it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, anchor: str = "", **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)  # four times playwright's own: the machine may be busy
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url[:200]))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri() + anchor)

    def see_all_charts(self) -> None:
        """Opens everything, scrolls to every chart and waits until it answers the pointer."""
        self.open_all()
        for figure in self.page.locator("figure[data-chart]").all():
            figure.scroll_into_view_if_needed()
            self.page.wait_for_function(
                "id => document.getElementById(id).matches('.is-live') && document.querySelector(`#${id} .live svg`)",
                arg=figure.get_attribute("id"),
            )

    def open_all(self) -> None:
        self.page.evaluate("""() => {
            for (const one of document.querySelectorAll("main details")) one.open = true;
            for (const one of document.querySelectorAll("main > .panel")) one.hidden = false;
        }""")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def violations(visit: Visit) -> list[str]:
    """What axe-core finds wrong with a page, a line each; the visit's context must have `bypass_csp`."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(visit.page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for one in found
        for node in one["nodes"][:3]
    ]


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
