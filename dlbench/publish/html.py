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
from dlbench.publish import delimited, drawing, json_tables, tabular, wording
from dlbench.publish.model import Report
from dlbench.publish.views import VIEWS

MAX_CHARTED_GROUPS = 12
"""Further groups are shown as tables only, so that the page stays below two megabytes."""


def to_html(report: Report) -> str:
    """The page; equal reports give equal bytes."""
    charts, specs = _charts(report)
    scripts = [_script(drawing.script_bundle())] if specs else []
    scripts.append(_script((bundled.folder("reports") / "page.js").read_text(encoding="utf-8")))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            views=[view for view in VIEWS if view.is_shown(report)],
            charts=charts,
            specs=_json_block(specs),
            max_charted_groups=MAX_CHARTED_GROUPS,
            style=Markup((bundled.folder("reports") / "style.css").read_text(encoding="utf-8")),
            scripts=scripts,
            policy=_policy(scripts),
            downloads=_downloads(report),
        )
    )


def _charts(report: Report) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[str, Any]]:
    """Charts by group and view, drawn; and the specifications by chart id."""
    charts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    specs: dict[str, Any] = {}
    for group in report.groups[:MAX_CHARTED_GROUPS]:
        for view in VIEWS:
            for chart in view.charts(group):
                # vl-convert escapes text; everything else in the SVG is its own.
                drawn = {"chart": chart, "svg": Markup(drawing.to_svg(chart.spec, chart.id))}
                charts.setdefault((group.id, view.id), []).append(drawn)
                specs[chart.id] = chart.spec
    return charts, specs


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(bundled.folder("reports")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(tabular=tabular, wording=wording)
    return environment


def _script(source: str) -> Markup:
    """A script as it stands between its tags: nothing in it can end the element early."""
    return Markup(re.sub(r"<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE))


def _policy(scripts: list[Markup]) -> str:
    digests = [base64.b64encode(hashlib.sha256(str(script).encode("utf-8")).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json_block(value: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _downloads(report: Report) -> list[dict[str, str]]:
    """Links that hold the data themselves."""
    csv = "text/csv"
    files = [
        ("points.csv", "scaling points (CSV)", csv, delimited.to_csv(report, "points")),
        ("parts.csv", "parts of a step (CSV)", csv, delimited.to_csv(report, "parts")),
        ("runs.csv", "runs (CSV)", csv, delimited.to_csv(report, "runs")),
        ("report.json", "everything (JSON)", "application/json", json_tables.to_json(report)),
    ]
    return [
        {
            "name": f"dlbench-{name}",
            "title": title,
            "href": f"data:{kind};charset=utf-8;base64,{base64.b64encode(content.encode('utf-8')).decode()}",
        }
        for name, title, kind, content in files
    ]
