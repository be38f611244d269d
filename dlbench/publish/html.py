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
from typing import Any

import jinja2
from markupsafe import Markup

from dlbench import bundled
from dlbench.publish import delimited, drawing, tabular, training_tables, wording
from dlbench.publish.chart_style import CONFIG
from dlbench.publish.charts import Chart
from dlbench.publish.model import Report
from dlbench.publish.views import VIEWS

MAX_CHARTED_GROUPS = 10
"""Further groups are shown as tables only, so that the page stays below two megabytes."""

MAX_LISTED_RUNS = 300
"""Further runs are counted but not listed, and their CSV left to the command, for the same reason."""

_TABLE_TITLES = {
    "points": "scaling points",
    "parts": "parts of a step",
    "runs": "runs",
    "quality": "training to a quality",
    "evaluations": "evaluations",
    "exchange": "gradient exchange",
    "sweep": "settings of sweeps",
}

_UNIT = re.compile(r"(?<=\d) (?=(%|points|ms|s|µs|ns|min|h|[kMGT]MAC|[KMGTP]iB|B|GB/s|ranks?)\b|%)")


def to_html(report: Report) -> str:
    """The page; equal reports give equal bytes."""
    charts, specs = _charts(report)
    return render_page(
        "page.html.j2",
        specs=specs,
        downloads=_downloads(report),
        report=report,
        views=[view for view in VIEWS if view.is_shown(report)],
        charts=charts,
        max_charted_groups=MAX_CHARTED_GROUPS,
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


def download(table: str, title: str, content: str) -> dict[str, str]:
    """A link that holds the CSV itself."""
    return {
        "name": f"dlbench-{table}.csv",
        "title": title,
        "href": "data:text/csv;charset=utf-8;base64," + _base64(content.encode("utf-8")),
    }


def _charts(report: Report) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[str, Any]]:
    """Charts by group (empty: of the whole report) and view, drawn; and the specifications by chart id."""
    found = [("", view.id, chart) for view in VIEWS for chart in view.report_charts(report)]
    for group in report.groups[:MAX_CHARTED_GROUPS]:
        found += [(group.id, view.id, chart) for view in VIEWS for chart in view.charts(group)]
    charts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group_id, view_id, chart in found:
        charts.setdefault((group_id, view_id), []).append(draw(chart))
    return charts, {chart.id: chart.spec for _, _, chart in found}


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
    environment.globals.update(tabular=tabular, training_tables=training_tables, wording=wording)
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
    """Links that hold the data themselves."""
    tables: list[delimited.TableName] = ["points"]
    if len(report.runs) <= MAX_LISTED_RUNS:
        tables += ["parts", "runs"]
    if any(group.quality for group in report.groups):
        tables += ["quality", "evaluations"]
    if any(group.exchange for group in report.groups):
        tables.append("exchange")
    if report.sweeps:
        tables.append("sweep")
    return [download(table, _TABLE_TITLES[table], delimited.to_csv(report, table)) for table in tables]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
