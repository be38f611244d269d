"""`dlbench estimate`: the view of the scaling report that says how many GPUs (or ranks) a training is worth."""

from __future__ import annotations

import dataclasses

from dlbench.records.scan import Scan
from dlbench.report.document import Document, Section, remark
from dlbench.views.model import Report, ReportGroup, Views
from dlbench.views.quality.view import QualityView
from dlbench.views.scaling_report import assemble
from dlbench.views.time_to_train import TimeToTrainView, TrainingQuestion

FORMAT = "dlbench.estimate"


def views_of(question: TrainingQuestion | None = None) -> Views:
    """Returns the views of an estimate."""
    return Views(group=(QualityView(), TimeToTrainView(question)))


def estimate(scan: Scan, question: TrainingQuestion) -> tuple[Report, Document]:
    """Returns how many GPUs (or ranks) the training of each group is worth, as data and as a document."""
    views = views_of(question)
    report = assemble(scan, views=views, with_digests=False, samples="none")
    report = dataclasses.replace(report, format=FORMAT, title="dlbench estimate", methods=(), missing=())
    sections = []
    for group in report.groups:
        section = views.group[-1].section(group)
        if section is not None:
            sections.append(_with_conditions(section, group))
    return report, report.document(*sections, notices=report.notices, command="dlbench estimate RUNS")


def _with_conditions(section: Section, group: ReportGroup) -> Section:
    return dataclasses.replace(
        section,
        id=f"{section.id}-{group.id}",
        title=f"{section.title} {group.label}",
        about=(f"{group.title}, {group.condition('preset')} preset: {group.about}", *section.about),
        sheets=tuple(dataclasses.replace(sheet, caption=group.caption) for sheet in section.sheets),
        marks=tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts),
    )
