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
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
from markupsafe import Markup

from dlbench import bundled
from dlbench.report import tabular, wording
from dlbench.report.charts import svg as drawing
from dlbench.report.charts.chart import Chart
from dlbench.report.charts.style import CONFIG
from dlbench.report.formats import csv as delimited
from dlbench.report.model import Group, Report
from dlbench.report.view import Sheet, View
from dlbench.views.layers.tables import layers as layers_table
from dlbench.views.quality import tables as training_tables
from dlbench.views.registry import VIEWS

DRAWERS = 2
"""Charts drawn at a time: Vega runs outside Python's lock, and a login node has little to spare."""

MAX_CHARTED_GROUPS = 10
"""Further groups are shown as tables only, so that the page stays small and is made in little time."""

CHART_BYTES = 1_600_000
"""Charts of further groups are left out once those drawn take so much of the page."""

MAX_GROUPS = 25
"""Further groups get a line each, for the same reason."""

MAX_LISTED_RUNS = 500
"""Further runs are counted but not listed, for the same reason."""

DOWNLOAD_BYTES = 700_000
"""Files in the page, together; what does not fit is left to the command."""

_UNIT = re.compile(r"(?<=\d) (?=(%|points|ms|s|µs|ns|min|h|[kMGT]MAC|[KMGTP]iB|B|GB/s|ranks?)\b|%)")


def to_html(report: Report) -> str:
    """The page; equal reports give equal bytes."""
    groups = report.groups[:MAX_GROUPS]
    with ThreadPoolExecutor(DRAWERS) as drawers, drawing.unchecked():
        # Bundling the charting script takes as long as drawing many charts, so it goes beside it.
        bundle = drawers.submit(drawing.script_bundle)
        charts, specs, num_charted = _charts(report, groups, drawers)
        bundle.result()
    return render_page(
        "page.html.j2",
        specs=specs,
        downloads=_downloads(report),
        report=report,
        views=[view for view in VIEWS if view.is_shown(report)],
        groups=groups,
        further=report.groups[MAX_GROUPS:],
        charts=charts,
        contents=_contents(report, groups),
        num_charted=num_charted,
        max_listed_runs=MAX_LISTED_RUNS,
    )


def render_page(template: str, *, specs: dict[str, Any], downloads: list[dict[str, str]], **content: Any) -> str:
    """A page in the frame that all reports share (`frame.html.j2`): style, policy, scripts, charts, links to data.

    Args:
        template: of the page, which extends the frame; it finds `report` in its content.
        specs: Vega-Lite specifications by chart id; without any, the page carries no charting script.
        downloads: as `download` makes them.
        content: what else the template reads.
    """
    scripts = [_script(drawing.script_bundle())] if specs else []
    scripts.append(_script((bundled.folder("reports") / "page.js").read_text(encoding="utf-8")))
    return (
        _environment()
        .get_template(template)
        .render(
            specs=_json_block({"config": CONFIG, "charts": specs}),
            style=_trusted((bundled.folder("reports") / "style.css").read_text(encoding="utf-8")),
            scripts=scripts,
            policy=_policy(scripts),
            downloads=downloads,
            **content,
        )
    )


def draw(chart: Chart) -> dict[str, Any]:
    """A chart with its static SVG, as the macro `charts_of` takes it."""
    # vl-convert escapes text; everything else in the SVG is its own.
    return {"chart": chart, "svg": _trusted(drawing.to_svg(chart.spec, chart.id))}


def download(table: str, title: str, content: str, command: str = "") -> dict[str, str]:
    """A link that holds the CSV itself, or names the command that writes it if the file is too large for the page.

    Args:
        table: its name.
        title: what it holds.
        content: the file.
        command: given for a file that is to be left out.
    """
    return {
        "table": table,
        "name": f"dlbench-{table}.csv",
        "title": title,
        "href": "" if command else "data:text/csv;charset=utf-8;base64," + _base64(content.encode("utf-8")),
        "command": command,
    }


Drawn = dict[tuple[str, str], list[dict[str, Any]]]
"""Drawn charts by group (empty: of the whole report) and view."""


def _charts(
    report: Report, groups: tuple[Group, ...], drawers: ThreadPoolExecutor
) -> tuple[Drawn, dict[str, Any], int]:
    """Charts, the specifications by chart id, and how many groups have theirs drawn."""
    drawn: Drawn = {}
    specs: dict[str, Any] = {}
    used = 0
    whole = ((view.id, chart) for view in VIEWS for chart in view.report_charts(report))
    for number, (group_id, found) in enumerate(itertools.chain([("", whole)], _group_charts(groups))):
        if number > 1 and used > CHART_BYTES:
            return drawn, specs, number - 1
        # Charts are drawn while the next ones are made.
        coming = [(view_id, chart, drawers.submit(draw, chart)) for view_id, chart in found]
        for view_id, chart, one in coming:
            drawn.setdefault((group_id, view_id), []).append(one.result())
            specs[chart.id] = chart.spec
            used += len(one.result()["svg"]) + len(json.dumps(chart.spec))
    return drawn, specs, min(len(groups), MAX_CHARTED_GROUPS)


def _group_charts(groups: tuple[Group, ...]) -> Iterator[tuple[str, Iterator[tuple[str, Chart]]]]:
    for group in groups[:MAX_CHARTED_GROUPS]:
        shown = [view for view in VIEWS if view.place == "group" and view.is_for(group)]
        yield group.id, ((view.id, chart) for view in shown for chart in view.charts(group))


Content = tuple[tuple[str, ...], list[Sheet], list[str]]
"""Words of a view, its sheets, and their ids in the page."""


def _contents(report: Report, groups: tuple[Group, ...]) -> dict[tuple[str, str], Content]:
    """What each view shown says in words and tables, by group (empty: of the whole report) and view."""
    found: dict[tuple[str, str], Content] = {}
    ids: Counter[str] = Counter()

    def add(group_id: str, view: View, words: tuple[str, ...], sheets: list[Sheet]) -> None:
        found[group_id, view.id] = (words, sheets, [_sheet_id(sheet.name, group_id, ids) for sheet in sheets])

    for view in VIEWS:
        if view.place != "group" and view.is_shown(report):
            add("", view, view.report_words(report), view.report_sheets(report))
    for group in groups:
        for view in VIEWS:
            if view.place == "group" and view.is_for(group):
                add(group.id, view, view.words(group), view.sheets(group))
    return found


def _sheet_id(name: str, group_id: str, taken: Counter[str]) -> str:
    """The anchor of a table; a second one of the same name gets a number."""
    wanted = f"table-{name}-{group_id}" if group_id else f"table-{name}"
    taken[wanted] += 1
    return wanted if taken[wanted] == 1 else f"{wanted}-{taken[wanted]}"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundled.folder("reports")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_keep_units,
    )
    environment.globals.update(
        tabular=tabular, training_tables=training_tables, layers_table=layers_table, wording=wording
    )
    return environment


def _keep_units(value: Any) -> Any:
    """A number and its unit stay on one line."""
    return _UNIT.sub("\N{NO-BREAK SPACE}", value) if type(value) is str else value


def _trusted(text: str) -> Markup:
    """Text of dlbench's own making, or escaped by its maker: autoescaping lets it pass."""
    return Markup(text)  # noqa: S704  # the one place; every caller says why


def _script(source: str) -> Markup:
    """A script as it stands between its tags: nothing in it can end the element early."""
    return _trusted(re.sub(r"<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE))


def _policy(scripts: list[Markup]) -> str:
    digests = [_base64(hashlib.sha256(str(script).encode("utf-8")).digest()) for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json_block(value: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return _trusted(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _downloads(report: Report) -> list[dict[str, str]]:
    """Links that hold the data themselves, as far as they fit; the tables of the shown views come after those of all
    reports.
    """
    has: dict[str, bool] = {
        "quality": any(group.quality for group in report.groups),
        "evaluations": any(group.quality for group in report.groups),
        "exchange": any(group.exchange for group in report.groups),
        "sweep": bool(report.sweeps),
    }
    left = DOWNLOAD_BYTES
    links = []
    for name, (title, content) in delimited.all_tables(report).items():
        if not has.get(name, True):
            continue
        link = download(name, title, content)
        if len(link["href"]) > left:
            link = download(name, title, "", f"dlbench report RUNS --format csv --table {name}")
        left -= len(link["href"])
        links.append(link)
    return links


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
