"""Views of what is not measured: scaling laws, published anchors, forecasts."""

from __future__ import annotations

from dlbench.publish.view import View

VIEWS: tuple[View, ...] = (
    View(
        id="outlook",
        title="Laws, anchors and forecasts",
        place="group",
        is_for=lambda group: group.outlook is not None,
        template="sheets.html.j2",
    ),
)
