"""The view `sweep`: settings compared. Its modules are imported if a series was swept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlbench.lazy import LazyModule
from dlbench.report.document import Section
from dlbench.views.model import Report, ReportSource, ReportView

if TYPE_CHECKING:
    from dlbench.views.sweep import numbers as swept
    from dlbench.views.sweep import view
else:
    swept, view = LazyModule("dlbench.views.sweep.numbers"), LazyModule("dlbench.views.sweep.view")


class SweepView(ReportView):
    """Settings compared."""

    id = "sweep"
    title = "Settings compared"
    key = "sweeps"
    after = "summary"
    lack = "no series was swept: --sweep KEY=A,B with five repeats or more compares settings."

    def numbers(self, source: ReportSource) -> tuple[swept.Sweep, ...]:
        if not any(run.plan.series.named for run in source.scan.runs):
            return ()
        return swept.sweeps(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.views.get(self.key):
            return ()
        return tuple(view.sweep_section(sweep, report, self.title) for sweep in report.all_of(swept.Sweep))
