"""The view `telemetry`: what samplers saw of the nodes, and one run over time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import percent
from dlbench.units import format_seconds
from dlbench.views.model import Group
from dlbench.views.rerun import rerun
from dlbench.views.telemetry.charts import MIN_SAMPLES, telemetry_charts
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
            headline=_headline(found, on_gpu=group.on_gpu),
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
    sampling = found.sampling
    if sampling is not None:
        if sampling.late_max_s > sampling.period_s:
            yield (
                f"Samples came up to {format_seconds(sampling.late_max_s)} late (one every "
                f"{format_seconds(sampling.period_s)} was asked for)."
            )
        if sampling.dropped:
            yield f"{sampling.dropped:,} samples did not fit into their share of bytes."
    yield from found.notes


def _headline(found: Telemetry, *, on_gpu: bool) -> str:
    """How busy the nodes of the largest rank count are, and whether a clock was throttled."""
    last = (found.nodes[-1].ranks, found.nodes[-1].nodes) if found.nodes else (0, 0)
    own = [node for node in found.nodes if (node.ranks, node.nodes) == last]
    throttling = _throttling(found, on_gpu=on_gpu)
    if sum(node.num_samples for node in own) < MIN_SAMPLES:
        few = f"fewer than {MIN_SAMPLES} samples in the measured steps: too short a run"
        return throttling if any(node.throttled for node in found.nodes) else few
    gpus = [node.gpu_utilisation for node in own if node.gpu_utilisation is not None]
    cpus = [node.cpu_busy for node in own if node.cpu_busy is not None]
    means = (("GPUs", gpus), ("CPU", cpus))
    busy = (f"{name} busy {percent(statistics.fmean(shares), 0)}" for name, shares in means if shares)
    return ", ".join([*busy, throttling])


def _throttling(found: Telemetry, *, on_gpu: bool) -> str:
    known = [node for node in found.nodes if node.throttled is not None]
    worst = max(found.nodes, key=lambda node: (node.throttled or 0.0, node.ranks), default=None)
    if worst is not None and worst.throttled:
        return f"throttled {percent(worst.throttled)} of the time: {worst.host[:20]}, {worst.throttled_by}"
    if known:
        return "no throttling seen"
    return "clock throttling unknown: no GPU was sampled" if on_gpu else "no GPU whose clocks could be read"
