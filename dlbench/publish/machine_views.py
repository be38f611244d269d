"""Views of the machine while it trained: data path, memory, telemetry, energy."""

from __future__ import annotations

from dlbench.publish.view import View

VIEWS: tuple[View, ...] = (
    View(
        id="data-path",
        title="Data path",
        place="group",
        is_for=lambda group: group.data_path is not None,
        template="sheets.html.j2",
    ),
    View(
        id="memory",
        title="Memory",
        place="group",
        is_for=lambda group: group.memory is not None,
        template="sheets.html.j2",
    ),
    View(
        id="telemetry",
        title="Telemetry",
        place="group",
        is_for=lambda group: group.telemetry is not None,
        template="sheets.html.j2",
    ),
    View(
        id="energy",
        title="Energy",
        place="group",
        is_for=lambda group: group.energy is not None,
        template="sheets.html.j2",
    ),
)
