"""The view of telemetry."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import percent, place_text
from dlbench.units import format_seconds
from dlbench.views.rerun import rerun
from dlbench.views.telemetry.charts import finding, telemetry_charts
from dlbench.views.telemetry.tables import telemetry_sheets


def _telemetry_words(group: Group) -> tuple[str, ...]:
    found = group.telemetry
    if found is None:
        return ()
    words = []
    worst = max(found.nodes, key=lambda node: (node.throttled or 0.0, node.ranks))
    told = [node for node in found.nodes if node.throttled is not None]
    if worst.throttled:
        words.append(
            f"Most throttled: {worst.host}, {worst.throttled_by}, at {place_text(worst.ranks, worst.nodes)}, in "
            f"{percent(worst.throttled)} of the measured window."
        )
    elif told:
        words.append(f"No GPU of the {len(told)} sampled nodes was throttled in the measured window.")
    else:
        words.append("Nothing tells whether clocks were held down: no GPU was sampled.")
    if found.timeline is not None:
        words.append(finding(found.timeline))
    sampling = found.sampling
    if sampling is not None:
        late = f"late by {format_seconds(sampling.late_median_s)} in the median, {format_seconds(sampling.late_max_s)}"
        dropped = f"; {sampling.dropped:,} samples did not fit into their share of bytes" if sampling.dropped else ""
        words.append(f"Sampled every {format_seconds(sampling.period_s)}, {late} at worst{dropped}.")
    return (*words, *found.notes)


def not_sampled(group: Group) -> str:
    """What makes runs with samples."""
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: "
        f"{rerun(group, '--set watch.sampler=true')}."
    )


VIEWS: tuple[View, ...] = (
    View(
        id="telemetry",
        title="Telemetry",
        place="group",
        is_for=lambda group: group.telemetry is not None,
        remedy=not_sampled,
        words=_telemetry_words,
        charts=telemetry_charts,
        sheets=telemetry_sheets,
        template="sheets.html.j2",
    ),
)
