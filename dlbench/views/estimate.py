"""How many GPUs (or ranks) the trainings of some runs are worth: one view of the scaling report, by itself."""

from __future__ import annotations

import dataclasses

from dlbench.records.scan import Scan
from dlbench.report.document import Document, remark
from dlbench.views.model import Report
from dlbench.views.quality.view import QualityView
from dlbench.views.scaling_report import assemble
from dlbench.views.time_to_train import Asked, TimeToTrainView
from dlbench.views.view import Views

FORMAT = "dlbench.estimate"


def views_of(asked: Asked | None = None) -> Views:
    """The views of an estimate; arguments as of `estimate`."""
    return Views(group=(QualityView(), TimeToTrainView(asked)))


def estimate(scan: Scan, asked: Asked) -> tuple[Report, Document]:
    """How many GPUs (or ranks) the training of each group of runs is worth: as plain data, and ready to be printed.
    Raises UserError: as `estimated`.
    """
    views = views_of(asked)
    found = assemble(scan, views=views, with_digests=False, samples="none")
    found = dataclasses.replace(found, format=FORMAT, title="dlbench estimate", methods=(), missing=())
    sections = (
        dataclasses.replace(
            section,
            id=f"{section.id}-{group.id}",
            title=f"{section.title} {group.label}",
            about=(f"{group.title}, {group.condition('preset')} preset: {group.about}", *section.about),
            sheets=tuple(dataclasses.replace(sheet, caption=group.caption) for sheet in section.sheets),
            marks=tuple(remark(doubt.severity, doubt.text, len(doubt.runs)) for doubt in group.doubts),
        )
        for group in found.groups
        if (section := views.group[-1].section(group)) is not None
    )
    return found, found.document(*sections, notices=found.notices, command="dlbench estimate RUNS")
