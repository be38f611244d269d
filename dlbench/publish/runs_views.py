"""Views of runs beside each other: precision, differences, systems."""

from __future__ import annotations

from dlbench.publish.view import View

VIEWS: tuple[View, ...] = (
    View(
        id="precision",
        title="Precision compared",
        place="closing",
        is_shown=lambda report: bool(report.precisions),
        template="sheets.html.j2",
    ),
    View(
        id="differences",
        title="Differences between runs",
        place="closing",
        is_shown=lambda report: bool(report.differences),
        template="sheets.html.j2",
    ),
    View(
        id="systems",
        title="Systems",
        place="closing",
        is_shown=lambda report: bool(report.systems),
        template="sheets.html.j2",
    ),
)
