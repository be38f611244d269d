"""The view `energy`: joules per sample and by stage, GPUs and processors apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import place_text, value_text
from dlbench.views.energy.charts import energy_charts
from dlbench.views.energy.numbers import DetailedEnergy, Energy, detailed_energy, energy
from dlbench.views.energy.tables import energy_sheet, slurm_sheet, sources_sheet, stages_sheet
from dlbench.views.model import Group
from dlbench.views.telemetry.view import not_sampled
from dlbench.views.view import GroupSource, GroupView

MAX_DOUBTS = 6
"""That a report prints; the diagnosis prints all of them."""


class EnergyView(GroupView):
    """What a sample costs."""

    id = "energy"
    title = "Energy"
    key = "energy"

    def numbers(self, source: GroupSource) -> Energy | None:
        """By rank count."""
        return energy(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        """Joules per sample, and by stage."""
        found = group.of(Energy)
        if found is None:
            return None
        sheets: list[Sheet[Any]] = [energy_sheet(found.points), stages_sheet(found.points)]
        if isinstance(found, DetailedEnergy):
            sheets += [slurm_sheet(found.slurm), sources_sheet(found.runs)]
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found),
            words=tuple(_words(found)),
            charts=lambda: energy_charts(group, found),
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: Group) -> str:
        """What would make runs whose energy can be read."""
        if group.views.get("telemetry") is None:
            return not_sampled(group)
        return (
            "neither a GPU's power nor a processor's energy counter could be read; dlbench doctor says what is missing."
        )


class DetailedEnergyView(EnergyView):
    """The same over the samples of all runs, with every source of every run, and what Slurm counted."""

    def __init__(self, slurm: Mapping[str, float] | None = None) -> None:
        """The view; `slurm`: joules that Slurm counted for the jobs of runs, by run id."""
        self.slurm = slurm or {}

    def numbers(self, source: GroupSource) -> DetailedEnergy:
        """By rank count, and by run."""
        return detailed_energy(source.group, source.table, self.slurm)


def _headline(found: Energy) -> str:
    last = found.points[-1]
    known = [f"{value_text(kind.energy_per_sample)} J of {kind.kind}" for kind in last.kinds if kind.energy_per_sample]
    return f"{' and '.join(known) or 'too little sampled'} per sample at {place_text(last.ranks, last.nodes)}"


def _words(found: Energy) -> Iterator[str]:
    is_detailed = isinstance(found, DetailedEnergy)
    for point in found.points if is_detailed else ():
        for kind in point.kinds:
            why = "; ".join(reason for name, reason in point.why if name == kind.kind)
            if why:
                where = place_text(point.ranks, point.nodes)
                yield f"At {where} some runs have no figure of {kind.kind}: {why}."
    unread = sum(point.num_unread for point in found.points)
    if unread:
        yield f"Samples of {unread} more runs were not read; dlbench diagnose reads them all."
    doubts = list(dict.fromkeys(text for point in found.points for text in point.doubts))
    shown = len(doubts) if is_detailed else MAX_DOUBTS
    yield from (f"Warning: {text}." for text in doubts[:shown])
    if len(doubts) > shown:
        yield f"{len(doubts) - shown} more warnings: dlbench diagnose prints them."
    yield from (f"{note[0].upper()}{note[1:]}." for note in found.notes)
