"""A report as a self-contained HTML page: it needs no network, and charts are static SVG where no scripts run. Its
security policy allows exactly the two scripts written here; all text goes through autoescaping.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, NamedTuple

import jinja2
from markupsafe import Markup

from dlbench import bundled
from dlbench.report.chart_style import CONFIG, FONT, WIDE
from dlbench.report.charts import Chart
from dlbench.report.document import FEW_CARDS, Card, Document, Section, walk
from dlbench.report.formats.data import write_table
from dlbench.report.formats.drawing import VEGALITE_VERSION, require_address_space, to_svg
from dlbench.report.table import Sheet, TextTable
from dlbench.report.wording import harmless

MAX_CHARTED_GROUPS = 10  # Further groups are tables only, so that the page stays small and is quickly made.
CHART_BYTES = 1_600_000  # Charts of further groups are left out once those drawn take so much of the page.
MAX_GROUPS = 25  # Further groups get a line each, for the same reason.
DOWNLOAD_BYTES = 700_000  # Of all files in the page; the others are named with the command that writes them.
HEADLINE = 100  # Characters of the line that a folded section shows.
PAIR_COLUMNS = 5  # Columns of a table that has room next to a chart.
_UNIT = re.compile(r"(?<=\d) (?=(%|points|ms|s|µs|ns|min|h|[kMGT]MAC|MHz|W|[KMGTP]iB|B|GB/s|(?:rank|node)s?)\b|%)")


@functools.cache
def script_bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as a script that loads nothing, without `unsafe-eval`; cached on disk."""
    script = "window.vegaEmbed = vegaEmbed;"

    def bundle() -> str:
        import vl_convert

        require_address_space()
        return str(vl_convert.javascript_bundle(script, vl_version=VEGALITE_VERSION))

    return (
        bundled.cached("scripts", script, f"{metadata.version('vl-convert-python')}, {VEGALITE_VERSION}", bundle) or ""
    )


Drawing = tuple[str, Chart, Future[Markup]]  # The section's id, a chart, and the chart's SVG when it is drawn.


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
    is_folded: bool  # Whether it is closed, because its sheet says so or a chart above it shows the same.


@dataclass(frozen=True)
class Glances:
    """Many cards as lines of a list."""

    common: tuple[tuple[str, str], ...]  # Names and values of facts that are equal in all cards.
    columns: tuple[str, ...]
    rows: tuple[tuple[Card, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Shown:
    """A section as the page prints it."""

    section: Section
    charts: tuple[Drawn, ...]
    sheets: tuple[ShownSheet, ...]
    inner: tuple[Shown, ...]
    without_charts: bool  # Whether its charts are left out because the page has enough of them.
    has_numbers: bool  # Whether tables or cards of the section hold the numbers of its charts.
    headline: str  # The line that is shown while the section is folded.
    words: tuple[str, ...]
    is_pair: bool  # Whether its one chart and its narrow tables are placed side by side.
    glances: Glances | None  # Its cards with facts, if they are many.


@dataclass(frozen=True)
class Panel:
    """Sections that a page shows together if it shows one group at a time."""

    id: str
    title: str
    shown: tuple[Shown, ...]
    kind: Literal["overview", "group", "across", "appendix"]


def to_html(document: Document) -> str:
    """Returns the page; equal documents give equal bytes."""
    groups = [section for section in document.sections if section.is_group]
    in_full = [section for section in document.sections if section not in groups[MAX_GROUPS:]]
    with ThreadPoolExecutor(1) as drawers:
        drawings = _drawings(in_full, drawers)
        # Done while charts are drawn.
        downloads = list(_downloads(document))
        template = _environment().get_template("document.html.j2")
        if any(inside for _, inside in drawings):
            script_bundle()
        charts, charted_ids = _charts(drawings)
    ids: Counter[str] = Counter()
    sections = [_shown(section, charts, charted_ids, ids) for section in in_full]
    specs = {}
    for drawn in itertools.chain.from_iterable(charts.values()):
        specs[drawn.chart.id] = drawn.chart.spec
    tables = {}
    for drawn in itertools.chain.from_iterable(map(_without_table, sections)):
        table = drawn.chart.table
        tables[drawn.chart.id] = [table.header, *(tuple(map(str, row.cells)) for row in table.rows)]
    scripts = [_script((bundled.folder("reports") / "page.js").read_text(encoding="utf-8"))]
    if specs:
        scripts.insert(0, _script(script_bundle()))
    digests = [_base64(hashlib.sha256(str(script).encode("utf-8")).digest()) for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    data = {"config": CONFIG, "charts": specs, "tables": tables}
    json_block = json.dumps(data, allow_nan=False, separators=(",", ":"))
    json_block = json_block.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    panels: tuple[Panel, ...] = ()
    if document.one_group_at_a_time and groups:
        panels = _panels(sections)
    return template.render(
        document=document,
        shown=sections,
        panels=panels,
        folds=any(section.level == "answer" for section, _ in document.walk()),
        linked={section.id for section in in_full},
        num_groups=len(groups),
        further=groups[MAX_GROUPS:],
        num_charted=len(charted_ids),
        downloads=downloads,
        specs=_trusted(json_block),
        style=_trusted((bundled.folder("reports") / "style.css").read_text(encoding="utf-8")),
        scripts=scripts,
        policy=f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    )


def _panels(sections: Sequence[Shown]) -> tuple[Panel, ...]:
    group_indices = [index for index, shown_section in enumerate(sections) if shown_section.section.is_group]
    before, behind = sections[: group_indices[0]], sections[group_indices[-1] + 1 :]
    panels = [Panel("overview", "Overview", tuple(before), "overview")]
    for index in group_indices:
        group = sections[index].section
        panels.append(Panel(group.id, group.short_title or group.title, (sections[index],), "group"))
    across = tuple(shown_section for shown_section in behind if shown_section.section.level != "appendix")
    if across:
        panels.append(Panel("across", "Across groups", across, "across"))
    appendices = tuple(shown_section for shown_section in behind if shown_section.section.level == "appendix")
    return (*panels, Panel("runs-and-methods", "Runs and methods", appendices, "appendix"))


def _without_table(shown_section: Shown) -> Iterator[Drawn]:
    if shown_section.has_numbers:
        yield from shown_section.charts
    for inner in shown_section.inner:
        yield from _without_table(inner)


def _drawings(sections: Sequence[Section], drawers: ThreadPoolExecutor) -> list[tuple[Section, list[Drawing]]]:
    """Has the charts of the page drawn, for groups of the first ones only, and returns them by outermost section."""
    further_groups = [section for section in sections if section.is_group][MAX_CHARTED_GROUPS:]
    drawings = []
    for outer in sections:
        if outer in further_groups:
            continue
        draw = functools.partial(_svg, has_subtitle=not outer.is_group)
        inside: list[Drawing] = []
        for section, _ in walk((outer,), {}):
            inside += [(section.id, chart, drawers.submit(draw, chart)) for chart in section.charts()]
        drawings.append((outer, inside))
    return drawings


def _charts(drawings: Sequence[tuple[Section, Sequence[Drawing]]]) -> tuple[dict[str, tuple[Drawn, ...]], set[str]]:
    charts: dict[str, tuple[Drawn, ...]] = {}
    charted_ids: set[str] = set()
    used_bytes = 0
    for outer, inside in drawings:
        if outer.is_group:
            if charted_ids and used_bytes > CHART_BYTES:
                for _, _, svg in inside:
                    svg.cancel()
                continue
            charted_ids.add(outer.id)
        for section_id, chart, svg in inside:
            charts[section_id] = (*charts.get(section_id, ()), Drawn(chart, svg.result()))
            used_bytes += len(svg.result()) + len(json.dumps(chart.spec))
    return charts, charted_ids


def _svg(chart: Chart, *, has_subtitle: bool) -> Markup:
    spec = {**chart.spec, "config": CONFIG}
    if chart.still_width is not None:
        spec["width"] = chart.still_width
    if not has_subtitle:
        spec["title"] = {"text": chart.title}
    # vl-convert escapes text; everything else in the SVG is its own.
    return _trusted(to_svg(spec, chart.id).replace("<svg ", f'<svg font-family="{FONT}" ', 1))


def _shown(
    section: Section, charts: dict[str, tuple[Drawn, ...]], charted_ids: set[str], ids: Counter[str], group: str = ""
) -> Shown:
    section_charts = charts.get(section.id, ())
    if section.is_group and section.where:
        group = str(section.where.get("group", ""))
    sheets = []
    for sheet in section.sheets:
        table = sheet.to_display()
        if table.rows:
            rows = table.rows[: sheet.max_rows]
            shown_sheet = ShownSheet(
                sheet,
                _sheet_id(sheet, group, ids),
                TextTable(table.header, rows),
                num_left_out=len(table.rows) - len(rows),
                has_file=bool(sheet.names) and any(map(sheet.is_data, sheet.rows)),
                is_folded=sheet.is_folded or (sheet.is_drawn and bool(section_charts)),
            )
            sheets.append(shown_sheet)
    headline, words = _headline(section)
    is_narrow = bool(sheets) and all(len(shown_sheet.table.header) <= PAIR_COLUMNS for shown_sheet in sheets)
    is_small = len(section_charts) == 1 and section_charts[0].chart.spec.get("width", 0) <= WIDE
    has_drawn_sheet = any(shown_sheet.sheet.is_drawn for shown_sheet in sheets)
    return Shown(
        section,
        section_charts,
        tuple(sheets),
        tuple(_shown(inner, charts, charted_ids, ids, group) for inner in section.sections),
        without_charts=section.is_group and section.id not in charted_ids,
        has_numbers=bool(section.cards) or has_drawn_sheet or _are_in_tables(section_charts, sheets),
        headline=headline,
        words=words,
        is_pair=is_small and is_narrow and not section.cards,
        glances=_glances([card for card in section.cards if card.facts]),
    )


def _sheet_id(sheet: Sheet[Any], group: str, ids: Counter[str]) -> str:
    sheet_id = "-".join(filter(None, ("table", sheet.name, group)))
    ids[sheet_id] += 1
    if ids[sheet_id] == 1:
        return sheet_id
    return f"{sheet_id}-{ids[sheet_id]}"


def _are_in_tables(section_charts: Sequence[Drawn], sheets: Sequence[ShownSheet]) -> bool:
    """Returns whether tables hold most numbers of charts, which also draw what tables lack, such as the ideal."""
    texts: set[str] = set()
    for shown_sheet in sheets:
        for row in shown_sheet.table.rows:
            texts.update(cell.text for cell in row.cells)
    in_tables = []  # Of each cell of the charts' tables.
    for drawn in section_charts:
        for row in drawn.chart.table.rows:
            in_tables += [cell.text in texts for cell in row.cells[1:]]
    return 2 * sum(in_tables) > len(in_tables)


def _glances(cards: Sequence[Card]) -> Glances | None:
    if len(cards) <= FEW_CARDS:
        return None
    facts = []
    names: dict[str, None] = {}  # Of facts, in their order.
    for card in cards:
        card_facts = dict(card.facts)
        if card.next_step:
            card_facts["Next"] = card.next_step
        facts.append(card_facts)
        names |= dict.fromkeys(card_facts)
    common = {}
    columns = []
    for name in names:
        values = {card_facts.get(name, "") for card_facts in facts}
        if len(values) == 1:
            common[name] = values.pop()
        else:
            columns.append(name)
    rows = []
    for card, card_facts in zip(cards, facts, strict=True):
        rows.append((card, tuple(card_facts.get(name, "") for name in columns)))
    return Glances(common=tuple(common.items()), columns=tuple(columns), rows=tuple(rows))


def _headline(section: Section) -> tuple[str, tuple[str, ...]]:
    if section.headline or not section.words:
        return section.headline, tuple(text for text in section.words if text.rstrip(".") != section.headline)
    first = section.words[0]
    if len(first) <= HEADLINE:
        return first, section.words[1:]
    return first[:HEADLINE].rsplit(" ", 1)[0].rstrip(",;:") + " \N{HORIZONTAL ELLIPSIS}", section.words


def _downloads(document: Document) -> Iterator[dict[str, str]]:
    free_bytes = DOWNLOAD_BYTES
    for name, table in document.tables().items():
        # Base64 has four characters for three bytes: a longer text does not fit and is cut.
        content = write_table(table.columns, table.records(), max_characters=free_bytes * 3 // 4)
        if content.count("\n") <= 1:
            continue
        link = {
            "table": name,
            "name": f"dlbench-{document.file_prefix}{name}.csv",
            "title": table.title,
            "href": "data:text/csv;charset=utf-8;base64," + _base64(content.encode("utf-8")),
            "command": "",
        }
        if len(link["href"]) <= free_bytes:
            free_bytes -= len(link["href"])
        else:
            link |= {"href": "", "command": f"{document.command} --format csv --table {name}"}
        yield link


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundled.folder("reports")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )


def _finalize(value: Any) -> Any:
    if type(value) is not str:
        return value
    return _UNIT.sub("\N{NO-BREAK SPACE}", harmless(value))


def _trusted(text: str) -> Markup:
    """Returns text that dlbench made itself, or that its maker escaped, as mark-up that autoescaping leaves alone."""
    return Markup(text)  # noqa: S704  # the one place; every caller says why


def _script(source: str) -> Markup:
    """Returns a script that can stand between script tags: nothing in it can end the element early."""
    return _trusted(re.sub(r"<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
