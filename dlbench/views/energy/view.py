"""The view of energy."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.view import View
from dlbench.report.wording import basis_text, figure_text, place_text, times_text
from dlbench.views.energy.charts import energy_charts
from dlbench.views.energy.tables import energy_sheets
from dlbench.views.telemetry.view import not_sampled


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


def _no_energy(group: Group) -> str:
    if group.telemetry is None:
        return not_sampled(group)
    return (
        "Samplers ran, but neither a GPU's power nor a processor's energy counter could be read: dlbench doctor says "
        "what is missing on a node (NVML for GPUs, readable /sys/class/powercap for processors)."
    )


VIEWS: tuple[View, ...] = (
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
