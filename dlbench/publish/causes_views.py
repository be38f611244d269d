"""Views of the lost percent: waterfall of efficiency, causes, stragglers."""

from __future__ import annotations

from dlbench.publish.view import View

VIEWS: tuple[View, ...] = (
    View(
        id="waterfall",
        title="Efficiency, factor by factor",
        place="group",
        is_for=lambda group: group.causes is not None,
        template="sheets.html.j2",
    ),
    View(
        id="causes",
        title="The lost percent, by cause",
        place="group",
        is_for=lambda group: group.causes is not None,
        template="sheets.html.j2",
    ),
    View(
        id="stragglers",
        title="Who is waited for",
        place="group",
        is_for=lambda group: group.causes is not None,
        template="sheets.html.j2",
    ),
)
