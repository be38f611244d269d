"""Views of the machine while it trained: data path, memory, telemetry, energy."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import basis_text, figure_text, percent, place_text, times_text
from dlbench.units import format_bytes, format_seconds
from dlbench.views.energy.tables import energy_sheets
from dlbench.views.machine.charts import data_charts, energy_charts, memory_charts
from dlbench.views.machine.tables import data_sheets, memory_sheets
from dlbench.views.telemetry.charts import finding, telemetry_charts
from dlbench.views.telemetry.tables import telemetry_sheets


def _data_words(group: Group) -> tuple[str, ...]:
    return () if group.data_path is None else (group.data_path.verdict, *group.data_path.notes)


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
    if found.course is not None:
        words.append(finding(found.course))
    sampling = found.sampling
    if sampling is not None:
        late = f"late by {format_seconds(sampling.late_median_s)} in the median, {format_seconds(sampling.late_max_s)}"
        dropped = f"; {sampling.dropped:,} samples did not fit into their share of bytes" if sampling.dropped else ""
        words.append(f"Sampled every {format_seconds(sampling.period_s)}, {late} at worst{dropped}.")
    return (*words, *found.notes)


def _energy_words(group: Group) -> tuple[str, ...]:
    found = group.energy
    if found is None:
        return ()
    words = []
    last = found.points[-1]
    for kind in last.kinds:
        joules = kind.energy_per_sample
        if joules is None:
            continue
        against = ""
        if kind.efficiency is not None and len(found.points) > 1:
            against = f"; energy efficiency against the baseline {times_text(kind.efficiency)}"
        words.append(
            f"At {place_text(last.ranks, last.nodes)} a sample takes {figure_text(joules)} J of "
            f"{kind.kind} ({basis_text(joules)}){against}."
        )
    unread = sum(point.num_unread for point in found.points)
    if unread:
        words.append(
            f"Samples of {unread} more runs were not read, to keep reports quick; dlbench diagnose reads them all."
        )
    doubts = dict.fromkeys(text for point in found.points for text in point.doubts)
    words += [f"Doubt: {text}." for text in list(doubts)[:6]]
    if len(doubts) > 6:
        words.append(f"And {len(doubts) - 6} doubts more: dlbench diagnose prints them.")
    return (*words, *(f"{note[0].upper()}{note[1:]}." for note in found.notes))


def _sampled(group: Group) -> str:
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: dlbench run "
        f"{_workload(group)} --set watch.sampler=true."
    )


def _no_energy(group: Group) -> str:
    if group.telemetry is None:
        return _sampled(group)
    return (
        "Samplers ran, but neither a GPU's power nor a processor's energy counter could be read: dlbench doctor says "
        "what is missing on a node (NVML for GPUs, readable /sys/class/powercap for processors)."
    )


def _workload(group: Group) -> str:
    """As `dlbench run` takes it."""
    preset = next(condition.value for condition in group.conditions if condition.name == "preset")
    return f"{group.label.partition(',')[0]} --preset {preset}"


VIEWS: tuple[View, ...] = (
    View(
        id="data-path",
        title="Data path",
        place="group",
        is_for=lambda group: group.data_path is not None,
        words=_data_words,
        charts=data_charts,
        sheets=data_sheets,
        template="sheets.html.j2",
    ),
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
    View(
        id="telemetry",
        title="Telemetry",
        place="group",
        is_for=lambda group: group.telemetry is not None,
        remedy=_sampled,
        words=_telemetry_words,
        charts=telemetry_charts,
        sheets=telemetry_sheets,
        template="sheets.html.j2",
    ),
    View(
        id="energy",
        title="Energy",
        place="group",
        is_for=lambda group: group.energy is not None,
        remedy=_no_energy,
        words=_energy_words,
        charts=energy_charts,
        sheets=energy_sheets,
        template="sheets.html.j2",
    ),
)
