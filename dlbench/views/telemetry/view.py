"""The view `telemetry`: what samplers saw of the nodes, and one run over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import percent, place_text
from dlbench.units import format_seconds
from dlbench.views.model import Group
from dlbench.views.rerun import rerun
from dlbench.views.telemetry.charts import finding, telemetry_charts
from dlbench.views.telemetry.numbers import DetailedTelemetry, Telemetry, detailed_telemetry, telemetry
from dlbench.views.telemetry.tables import fields_sheet, means_sheet, missing_sheet
from dlbench.views.view import GroupSource, GroupView


class TelemetryView(GroupView):
    """Power, clocks, utilisation, memory and traffic of the nodes."""

    id = "telemetry"
    title = "Telemetry"
    key = "telemetry"

    def numbers(self, source: GroupSource) -> Telemetry | None:
        """By node, and one run over time."""
        return telemetry(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """Means by node, and what is missing."""
        found = group.of(Telemetry)
        if found is None:
            return None
        sheets: list[Sheet[Any]] = [means_sheet(found), missing_sheet(found.unavailable)]
        if isinstance(found, DetailedTelemetry):
            sheets.append(fields_sheet(found.runs))
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.caption}.",
            words=tuple(_words(found)),
            charts=lambda: telemetry_charts(group, found),
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: Group) -> str:
        """What makes runs with samples."""
        return not_sampled(group)


class DetailedTelemetryView(TelemetryView):
    """The same over the samples of all runs, with every field of every node."""

    def numbers(self, source: GroupSource) -> DetailedTelemetry:
        """By node, one run over time, and by run."""
        return detailed_telemetry(source.group, source.table)


def not_sampled(group: Group) -> str:
    """What makes runs with samples."""
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: "
        f"{rerun(group, '--set watch.sampler=true')}."
    )


def _words(found: Telemetry) -> Iterator[str]:
    yield _throttling(found)
    if found.timeline is not None:
        yield finding(found.timeline)
    sampling = found.sampling
    if sampling is not None:
        late = f"late by {format_seconds(sampling.late_median_s)} in the median, {format_seconds(sampling.late_max_s)}"
        dropped = f"; {sampling.dropped:,} samples did not fit into their share of bytes" if sampling.dropped else ""
        yield f"Sampled every {format_seconds(sampling.period_s)}, {late} at worst{dropped}."
    yield from found.notes


def _throttling(found: Telemetry) -> str:
    known = [node for node in found.nodes if node.throttled is not None]
    worst = max(found.nodes, key=lambda node: (node.throttled or 0.0, node.ranks), default=None)
    if worst is not None and worst.throttled:
        return (
            f"Most throttled: {worst.host}, {worst.throttled_by}, at {place_text(worst.ranks, worst.nodes)}, in "
            f"{percent(worst.throttled)} of the measured window."
        )
    if known:
        nodes = "node" if len(known) == 1 else "nodes"
        return f"No GPU was throttled in the measured window of {len(known)} sampled {nodes}."
    return "Whether clocks were held down is not known: no GPU was sampled."
