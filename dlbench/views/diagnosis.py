"""The diagnosis of all runs under a folder: the views of the scaling report that explain losses, in full."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from dlbench.records.scan import Scan
from dlbench.report.document import Document, Section
from dlbench.views.causes.view import CausesView
from dlbench.views.decomposition import DecompositionView
from dlbench.views.energy import DetailedEnergy, DetailedEnergyView
from dlbench.views.model import Report, Views
from dlbench.views.runs import WithoutFiguresView
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stalls import StallsView
from dlbench.views.stragglers import SlowNodesView, StragglersView
from dlbench.views.telemetry import DetailedTelemetryView

FORMAT = "dlbench.diagnosis"
TITLE = "dlbench diagnosis"


def views_of() -> Views:
    """Returns the views of a diagnosis."""
    return Views(
        group=(CausesView(), StragglersView(), DetailedTelemetryView(), DetailedEnergyView()),
        closing=(SlowNodesView(), DecompositionView(), StallsView(), WithoutFiguresView()),
    )


def diagnosis(scan: Scan) -> tuple[Report, Document]:
    """Returns the diagnosis as plain data, and ready for every format."""
    views = views_of()
    report = assemble(scan, views=views, with_digests=False, samples="all")
    damaged = list(report.damaged)
    for group in report.groups:
        energy = group.of(DetailedEnergy)
        if energy is not None:  # Samples of all runs are read here alone.
            damaged += energy.damaged
    report = dataclasses.replace(
        report,
        format=FORMAT,
        title=TITLE,
        methods=(),
        damaged=tuple(dict.fromkeys(damaged)),
        missing=views.missing_of_report(report),
    )
    document = document_of(report, views)
    # Notes and captions of several groups, in order: they are printed once.
    counts: Counter[str] = Counter()
    for section in document.sections:
        if section.is_group:
            counts.update(dict.fromkeys(_small_print(section), 1))
    repeated = tuple(text for text, count in counts.items() if count > 1)
    sections = [_without_repeated(section, repeated) for section in document.sections]
    if repeated:
        common = Section(
            id="all-groups", title="For all groups", level="appendix", notes=repeated, brief=(), in_contents=False
        )
        sections.append(common)
    meta = document.meta
    if not report.groups:
        meta = (*meta, "No run has figures.")
    return report, dataclasses.replace(document, meta=meta, sections=tuple(sections), command="dlbench diagnose RUNS")


def _small_print(group: Section) -> Iterator[str]:
    for section in group.sections:
        yield from section.notes
        yield from (sheet.caption for sheet in section.sheets if sheet.caption)


def _without_repeated(group: Section, repeated: Sequence[str]) -> Section:
    if not group.is_group:
        return group
    sections = []
    findings: list[str] = []
    for section in group.sections:
        sheets = []
        for sheet in section.sheets:
            caption = "" if sheet.caption in repeated else sheet.caption
            sheets.append(dataclasses.replace(sheet, caption=caption))
        notes = tuple(text for text in section.notes if text not in repeated)
        sections.append(dataclasses.replace(section, notes=notes, sheets=tuple(sheets)))
        if section.id.startswith(CausesView.id):
            findings += section.words
    # The findings end with the next step.
    next_step = "" if findings else group.next_step
    return dataclasses.replace(
        group, about=(), facts=(), brief=tuple(findings), next_step=next_step, sections=tuple(sections)
    )
