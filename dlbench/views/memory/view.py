"""The view `memory`: peak memory of the ranks, and which batches fitted."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.wording import place_text, value_text
from dlbench.units import format_bytes
from dlbench.views.memory.charts import memory_charts
from dlbench.views.memory.numbers import Memory, memory
from dlbench.views.memory.tables import batches_sheet, points_sheet
from dlbench.views.model import Group
from dlbench.views.view import GroupSource, GroupView


class MemoryView(GroupView):
    """Memory of ranks and nodes."""

    id = "memory"
    title = "Memory"
    key = "memory"

    def numbers(self, source: GroupSource) -> Memory | None:
        """By rank count, and by batch."""
        return memory(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """By rank count, and by batch and precision where several ran."""
        found = group.of(Memory)
        if found is None:
            return None
        by_batch = (batches_sheet(found.batches),) if len(found.batches) > 1 else ()
        return Section(
            id=self.id,
            title=self.title,
            headline=_peak(found),
            notes=(found.limit, *found.notes),
            charts=lambda: memory_charts(group, found),
            sheets=(points_sheet(found), *by_batch),
        )


def _peak(found: Memory) -> str:
    """What the largest point needs."""
    last = found.points[-1]
    on = "allocated on the fullest GPU" if found.on_gpu else "resident in the largest rank"
    of = f", of {format_bytes(found.host_bytes)} of the node" if found.host_bytes and not found.on_gpu else ""
    return f"{place_text(last.ranks, last.nodes)}: {value_text(last.peak)} {on}{of}"
