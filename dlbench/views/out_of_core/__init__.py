"""The view `out-of-core`: methods for activations side by side. Its modules are imported if a run has such a method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlbench.lazy import LazyModule
from dlbench.report.document import Section
from dlbench.views.model import Report, ReportSource, ReportView
from dlbench.views.next_step import rerun

if TYPE_CHECKING:
    from dlbench.views.out_of_core import numbers as methods
    from dlbench.views.out_of_core import view
else:
    methods, view = LazyModule("dlbench.views.out_of_core.numbers"), LazyModule("dlbench.views.out_of_core.view")


class OutOfCoreView(ReportView):
    """The cost of recomputing and swapping, and the batches that they make possible."""

    id = "out-of-core"
    title = "Out of core"
    key = "out_of_core"
    after = "large-batch"

    def numbers(self, source: ReportSource) -> tuple[methods.MethodComparison, ...]:
        if not any(group.sample.plan.workload.train.saves_memory for group in source.groups):
            return ()
        return methods.out_of_core(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        if not report.views.get(self.key):
            return ()
        comparisons = report.all_of(methods.MethodComparison)
        return tuple(view.method_section(item, self.title, number) for number, item in enumerate(comparisons, 1))

    def remedy(self, report: Report) -> str:
        if not report.groups:
            return ""
        group = report.groups[0]
        batch = group.baseline.batch_per_rank
        settings = "--set train.recompute=planned --set train.swap=planned --set train.memory.capacity=50%"
        command = rerun(group, f"{settings} --sweep train.batch_per_rank={batch},{2 * batch}")
        return f"no run recomputes or swaps activations; {command} does."
