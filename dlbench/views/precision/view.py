"""The view `precision`: groups that differ in nothing but precision, side by side."""

from __future__ import annotations

from dlbench.report.document import Section
from dlbench.report.wording import place_text, times_value
from dlbench.views.model import Report
from dlbench.views.precision.charts import precision_charts
from dlbench.views.precision.numbers import PrecisionComparison, precisions
from dlbench.views.precision.tables import precision_sheet
from dlbench.views.rerun import rerun
from dlbench.views.view import ReportSource, ReportView


class PrecisionView(ReportView):
    """What a lower precision gains, and what it costs."""

    id = "precision"
    title = "Precision compared"
    key = "precisions"

    def numbers(self, source: ReportSource) -> tuple[PrecisionComparison, ...]:
        """Comparisons, each with its reference."""
        return precisions(source.groups, source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """A table and a chart per comparison."""
        found = report.all_of(PrecisionComparison)
        if not found:
            return ()
        return (
            Section(
                id=self.id,
                title=self.title,
                headline=_headline(found[0]),
                words=tuple(f"{one.label}. {text}" for one in found for text in _sentences(one)),
                charts=lambda: precision_charts(found),
                sheets=tuple(map(precision_sheet, found)),
            ),
        )

    def remedy(self, report: Report) -> str:
        """A sweep over precisions."""
        if not report.groups:
            return ""
        command = rerun(report.groups[0], "--sweep train.precision=fp32,bf16")
        return f"no two groups differ in precision alone; {command} runs two interleaved."


def _headline(found: PrecisionComparison) -> str:
    """The largest ratio at the largest rank count."""
    last = (found.rows[-1].ranks, found.rows[-1].nodes)
    rows = [(row.ratio, row.precision) for row in found.rows if (row.ranks, row.nodes) == last and row.ratio]
    if not rows:
        return f"nothing to compare with {found.reference}"
    ratio, precision = max(rows, key=lambda row: row[0].value)
    return f"{precision} {times_value(ratio)} the throughput of {found.reference} at {place_text(*last)}"


def _sentences(found: PrecisionComparison) -> tuple[str, ...]:
    return (found.verdict, *(f"{note[0].upper()}{note[1:]}." for note in found.notes))
