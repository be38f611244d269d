"""Views of single steps: distribution and outliers, ranks by steps."""

from __future__ import annotations

from dlbench.publish.view import View

VIEWS: tuple[View, ...] = (
    View(
        id="steps",
        title="Step times",
        place="group",
        is_for=lambda group: group.step_times is not None,
        template="sheets.html.j2",
    ),
    View(
        id="ranks",
        title="Ranks and steps",
        place="group",
        is_for=lambda group: group.step_times is not None,
        template="sheets.html.j2",
    ),
)
