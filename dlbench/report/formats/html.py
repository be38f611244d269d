"""A report as one HTML page that needs nothing else: no network, no server, no scripts to read it.

Charts are static SVG. Where scripts run, the bundled Vega replaces each by its interactive form when
it comes into sight, from the same specification. The page's security policy allows exactly the two
scripts written here, by their digests, and no connection to anywhere; all text from runs goes
through autoescaping.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup

from dlbench import bundled
from dlbench.report.charts import svg
from dlbench.report.charts.chart import Chart
from dlbench.report.charts.style import CONFIG, WIDE
from dlbench.report.document import FEW_CARDS, Card, Document, Section, walk
from dlbench.report.formats.csv import write_table
from dlbench.report.table import Sheet, TextTable
from dlbench.report.wording import harmless

DRAWERS = 2  # Charts drawn at a time: Vega runs outside Python's lock, and a login node has little to spare.
MAX_CHARTED_GROUPS = 10  # Further groups are tables only, so that the page stays small and is quickly made.
CHART_BYTES = 1_600_000  # Charts of further groups are left out once those drawn take so much of the page.
MAX_GROUPS = 25  # Further groups get a line each, for the same reason.
DOWNLOAD_BYTES = 700_000  # Files in the page, together; what does not fit is left to the command.
HEADLINE = 100  # Characters of a line that stands for a folded section.
PAIR_COLUMNS = 5  # Columns of a table that has room next to a chart.
_UNIT = re.compile(r"(?<=\d) (?=(%|points|ms|s|µs|ns|min|h|[kMGT]MAC|MHz|W|[KMGTP]iB|B|GB/s|(?:rank|node)s?)\b|%)")


class Drawn(NamedTuple):
    """A chart with its static SVG."""

    chart: Chart
    svg: Markup


@dataclass(frozen=True)
class ShownSheet:
    """A table as the page prints it."""

    sheet: Sheet[Any]
    id: str
    table: TextTable
    num_left_out: int
    has_file: bool
    is_folded: bool  # Whether it is closed: its sheet says so, or a chart above it shows the same.


@dataclass(frozen=True)
class Glances:
    """Many cards as lines of a list."""

    common: tuple[tuple[str, str], ...]  # What is the same in all of them: name and value.
    columns: tuple[str, ...]
    rows: tuple[tuple[Card, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Shown:
    """A section as the page prints it."""

    section: Section
    charts: tuple[Drawn, ...]
    sheets: tuple[ShownSheet, ...]
    inner: tuple[Shown, ...]
    without_charts: bool  # Whether it would have charts but the page already has enough of them.
    has_numbers: bool  # Whether tables or cards of the section hold the numbers of its charts.
    headline: str  # What stands for it where it is folded.
    words: tuple[str, ...]
    is_pair: bool  # Whether its one chart and its narrow tables stand side by side.
    glances: Glances | None  # Its cards with facts, if they are many.


@dataclass(frozen=True)
class Panel:
    """What a page shows at a time where it shows one group at a time."""

    id: str
    title: str
    shown: tuple[Shown, ...]
    kind: Literal["overview", "group", "across", "appendix"]


def to_html(document: Document) -> str:
    """The page; equal documents give equal bytes."""
    groups = [section for section in document.sections if section.is_group]
    in_full = [section for section in document.sections if section not in groups[MAX_GROUPS:]]
    with ThreadPoolExecutor(DRAWERS) as drawers, svg.unchecked():
        # Bundling the charting script takes as long as drawing many charts, so both run at once.
        bundle = drawers.submit(svg.script_bundle)
        charts, charted = _charts(in_full, drawers)
        bundle.result()
    ids: Counter[str] = Counter()
    shown = [_shown(section, charts, charted, ids) for section in in_full]
    specs = {one.chart.id: one.chart.spec for drawn in charts.values() for one in drawn}
    hidden = [one.chart for outer in shown for one in _without_table(outer)]
    tables = {
        one.id: [list(one.table.header), *([str(cell) for cell in row.cells] for row in one.table.rows)]
        for one in hidden
    }
    scripts = [_script(svg.script_bundle())] if specs else []
    scripts.append(_script((bundled.folder("reports") / "page.js").read_text(encoding="utf-8")))
    digests = [_base64(hashlib.sha256(str(script).encode("utf-8")).digest()) for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    json_block = json.dumps(
        {"config": CONFIG, "charts": specs, "tables": tables}, allow_nan=False, separators=(",", ":")
    )
    json_block = json_block.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        _environment()
        .get_template("document.html.j2")
        .render(
            document=document,
            shown=shown,
            panels=_panels(shown) if document.one_group_at_a_time and groups else (),
            folds=any(section.level == "answer" for section, _ in document.walk()),
            linked={section.id for section in in_full},
            num_groups=len(groups),
            further=groups[MAX_GROUPS:],
            num_charted=len(charted),
            downloads=_downloads(document),
            specs=_trusted(json_block),
            style=_trusted((bundled.folder("reports") / "style.css").read_text(encoding="utf-8")),
            scripts=scripts,
            policy=f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'",
        )
    )


def _panels(shown: Sequence[Shown]) -> tuple[Panel, ...]:
    """What stands before the groups, each group, what compares groups, and what is only looked up."""
    places = [place for place, one in enumerate(shown) if one.section.is_group]
    before, behind = shown[: places[0]], shown[places[-1] + 1 :]
    groups = [one for one in shown if one.section.is_group]
    across = tuple(one for one in behind if one.section.level != "appendix")
    looked_up = tuple(one for one in behind if one.section.level == "appendix")
    return (
        Panel("overview", "Overview", tuple(before), "overview"),
        *(Panel(one.section.id, one.section.short_title or one.section.title, (one,), "group") for one in groups),
        *([Panel("across", "Across groups", across, "across")] if across else []),
        Panel("runs-and-methods", "Runs and methods", looked_up, "appendix"),
    )


def _without_table(shown: Shown) -> Iterator[Drawn]:
    """Charts whose own numbers are not printed."""
    if shown.has_numbers:
        yield from shown.charts
    for inner in shown.inner:
        yield from _without_table(inner)


def _charts(sections: Sequence[Section], drawers: ThreadPoolExecutor) -> tuple[dict[str, tuple[Drawn, ...]], set[str]]:
    """Charts by the id of their section, and the ids of the groups that have theirs drawn."""
    found: dict[str, tuple[Drawn, ...]] = {}
    charted: set[str] = set()
    used = 0
    for outer in sections:
        if outer.is_group:
            if len(charted) >= MAX_CHARTED_GROUPS or (charted and used > CHART_BYTES):
                continue
            charted.add(outer.id)
        # Charts are drawn while the next ones are made.
        coming = [
            (section.id, chart, drawers.submit(_svg, chart, has_subtitle=not outer.is_group))
            for section, _ in walk((outer,), {})
            for chart in section.charts()
        ]
        for section_id, chart, drawing in coming:
            found[section_id] = (*found.get(section_id, ()), Drawn(chart, drawing.result()))
            used += len(drawing.result()) + len(json.dumps(chart.spec))
    return found, charted


def _svg(chart: Chart, *, has_subtitle: bool) -> Markup:
    """The static SVG; a group says in its heading what the subtitles of its charts say."""
    spec = dict(chart.spec)
    if chart.still_width is not None:
        spec["width"] = chart.still_width
    if not has_subtitle:
        spec["title"] = {"text": chart.title}
    # vl-convert escapes text; everything else in the SVG is its own.
    return _trusted(svg.to_svg(spec, chart.id))


def _shown(
    section: Section, charts: dict[str, tuple[Drawn, ...]], charted: set[str], ids: Counter[str], group: str = ""
) -> Shown:
    drawn = charts.get(section.id, ())
    if section.is_group and section.where:
        group = str(section.where.get("group", ""))
    sheets = []
    for sheet in section.sheets:
        table = sheet.to_display()
        if table.rows:
            kept = table.rows[: sheet.max_rows]
            sheet_id = f"table-{sheet.name}-{group}" if group else f"table-{sheet.name}"
            ids[sheet_id] += 1
            if ids[sheet_id] > 1:
                sheet_id = f"{sheet_id}-{ids[sheet_id]}"
            sheets.append(
                ShownSheet(
                    sheet,
                    sheet_id,
                    TextTable(table.header, kept),
                    num_left_out=len(table.rows) - len(kept),
                    has_file=bool(sheet.names) and any(map(sheet.is_data, sheet.rows)),
                    is_folded=sheet.is_folded or (sheet.is_drawn and bool(drawn)),
                )
            )
    headline, words = _headline(section)
    # Whether most numbers of charts stand in tables; a chart also draws what tables leave out, such as the ideal.
    in_tables = {cell.text for one in sheets for row in one.table.rows for cell in row.cells}
    in_charts = [cell.text for one in drawn for row in one.chart.table.rows for cell in row.cells[1:]]
    are_in_tables = 2 * sum(text in in_tables for text in in_charts) > len(in_charts)
    is_narrow = bool(sheets) and all(len(one.table.header) <= PAIR_COLUMNS for one in sheets)
    is_small = len(drawn) == 1 and drawn[0].chart.spec.get("width", 0) <= WIDE
    return Shown(
        section,
        drawn,
        tuple(sheets),
        tuple(_shown(inner, charts, charted, ids, group) for inner in section.sections),
        without_charts=section.is_group and section.id not in charted,
        has_numbers=bool(section.cards) or any(one.sheet.is_drawn for one in sheets) or are_in_tables,
        headline=headline,
        words=words,
        is_pair=is_small and is_narrow and not section.cards,
        glances=_glances([card for card in section.cards if card.facts]),
    )


def _glances(cards: Sequence[Card]) -> Glances | None:
    if len(cards) <= FEW_CARDS:
        return None
    facts = [dict(card.facts) | ({"Next": card.next_step} if card.next_step else {}) for card in cards]
    names = list(dict.fromkeys(name for one in facts for name in one))
    common = {name: facts[0].get(name, "") for name in names if len({one.get(name, "") for one in facts}) == 1}
    columns = tuple(name for name in names if name not in common)
    return Glances(
        common=tuple(common.items()),
        columns=columns,
        rows=tuple(
            (card, tuple(one.get(name, "") for name in columns)) for card, one in zip(cards, facts, strict=True)
        ),
    )


def _headline(section: Section) -> tuple[str, tuple[str, ...]]:
    """The line that stands for a folded section, and the words that are left to say below it."""
    if section.headline or not section.words:
        return section.headline, tuple(text for text in section.words if text.rstrip(".") != section.headline)
    first = section.words[0]
    if len(first) <= HEADLINE:
        return first, section.words[1:]
    return first[:HEADLINE].rsplit(" ", 1)[0].rstrip(",;:") + " \N{HORIZONTAL ELLIPSIS}", section.words


def _downloads(document: Document) -> list[dict[str, str]]:
    """Links that hold the data themselves, as far as they fit; others name the command that writes the file."""
    left = DOWNLOAD_BYTES
    links = []
    for name, table in document.tables().items():
        # Base64 has four characters for three bytes: a longer text does not fit, so its rest is not made.
        content = write_table(table.columns, table.records(), most=left * 3 // 4)
        if content.count("\n") <= 1:
            continue
        href = "data:text/csv;charset=utf-8;base64," + _base64(content.encode("utf-8"))
        fits = len(href) <= left
        left -= len(href) if fits else 0
        command = f"{document.command} --format csv --table {name}"
        links.append(
            {
                "table": name,
                "name": f"dlbench-{document.file_prefix}{name}.csv",
                "title": table.title,
                "href": href if fits else "",
                "command": "" if fits else command,
            }
        )
    return links


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundled.folder("reports")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A number and its unit stay on one line; nothing that is no mark-up of dlbench's own passes unclean.
        finalize=lambda value: _UNIT.sub("\N{NO-BREAK SPACE}", harmless(value)) if type(value) is str else value,
    )


def _trusted(text: str) -> Markup:
    """Text of dlbench's own making, or escaped by its maker: autoescaping lets it pass."""
    return Markup(text)  # noqa: S704  # the one place; every caller says why


def _script(source: str) -> Markup:
    """A script as it stands between its tags: nothing in it can end the element early."""
    return _trusted(re.sub(r"<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
