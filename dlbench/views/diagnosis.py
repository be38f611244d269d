"""The diagnosis of everything found under one folder: the views of the scaling report that say why, in full."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from dlbench.records.scan import Scan
from dlbench.report.document import Document, Section
from dlbench.views.causes.view import CausesView
from dlbench.views.decomposition import DecompositionView
from dlbench.views.energy import DetailedEnergy, DetailedEnergyView
from dlbench.views.model import Report
from dlbench.views.runs import WithoutFiguresView
from dlbench.views.scaling_report import assemble, document_of
from dlbench.views.stalls import StallsView
from dlbench.views.stragglers import SlowNodesView, StragglersView
from dlbench.views.telemetry import DetailedTelemetryView
from dlbench.views.view import Views

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
    # Samples of all runs are read here alone.
    energies = (group.of(DetailedEnergy) for group in report.groups)
    damaged = [line for energy in energies if energy is not None for line in energy.damaged]
    report = dataclasses.replace(
        report,
        format=FORMAT,
        title=TITLE,
        methods=(),
        damaged=tuple(dict.fromkeys([*report.damaged, *damaged])),
        missing=views.missing_of_report(report),
    )
    document = document_of(report, views)
    empty = () if report.groups else ("No run has figures.",)
    # Notes and captions that stand in several groups, in order: they are said once.
    printed = [list(_small_print(section)) for section in document.sections if section.is_group]
    counts = Counter(text for texts in printed for text in {*texts})
    repeated = {text: None for texts in printed for text in texts if counts[text] > 1}
    groups = (_group(one, repeated) if one.is_group else one for one in document.sections)
    once = Section(
        id="all-groups", title="For all groups", level="appendix", notes=tuple(repeated), brief=(), in_contents=False
    )
    return report, dataclasses.replace(
        document,
        meta=(*document.meta, *empty),
        sections=(*groups, *((once,) if repeated else ())),
        command="dlbench diagnose RUNS",
    )


def _small_print(group: Section) -> Iterator[str]:
    for section in group.sections:
        yield from section.notes
        yield from (sheet.caption for sheet in section.sheets if sheet.caption)


def _group(group: Section, repeated: Mapping[str, None]) -> Section:
    sections = tuple(
        dataclasses.replace(
            section,
            notes=tuple(text for text in section.notes if text not in repeated),
            sheets=tuple(
                dataclasses.replace(sheet, caption="") if sheet.caption in repeated else sheet
                for sheet in section.sheets
            ),
        )
        for section in group.sections
    )
    found = [text for section in sections for text in (section.words if section.id.startswith(CausesView.id) else ())]
    # The finding ends with the next step.
    left = "" if found else group.next_step
    return dataclasses.replace(group, about=(), facts=(), brief=tuple(found), next_step=left, sections=sections)
