"""The view of memory."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import basis_text, figure_text, place_text
from dlbench.units import format_bytes
from dlbench.views.memory.charts import memory_charts
from dlbench.views.memory.tables import memory_sheets


def _memory_words(group: Group) -> tuple[str, ...]:
    found = group.memory
    if found is None:
        return ()
    last = found.points[-1]
    held = "allocates" if found.on_gpu else "holds"
    on = " on its GPU" if found.on_gpu else " resident"
    of = f", of {format_bytes(found.host_bytes)} of a node" if found.host_bytes and not found.on_gpu else ""
    return (
        f"At {place_text(last.ranks, last.nodes)} the rank that needs most {held} {figure_text(last.peak)}{on}{of} "
        f"({basis_text(last.peak)}). Parameters in fp32 are {format_bytes(found.model_bytes)}, gradients "
        f"{format_bytes(found.gradient_bytes)}.",
        f"Batch limit: {found.limit}",
        *found.notes,
    )


VIEWS: tuple[View, ...] = (
    View(
        id="memory",
        title="Memory",
        place="group",
        is_for=lambda group: group.memory is not None,
        words=_memory_words,
        charts=memory_charts,
        sheets=memory_sheets,
        template="sheets.html.j2",
    ),
)
