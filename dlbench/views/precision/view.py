"""The view `precision`: groups that differ in nothing but precision, side by side."""

from __future__ import annotations

from dlbench.report.model import Report
from dlbench.report.view import View
from dlbench.views.precision.charts import precision_charts
from dlbench.views.precision.tables import precision_sheets
from dlbench.views.rerun import rerun


def _precision_words(report: Report) -> tuple[str, ...]:
    return tuple(
        f"{found.label}. {text}" for found in report.precisions for text in (found.verdict, *_sentences(found.notes))
    )


def _sentences(notes: tuple[str, ...]) -> list[str]:
    return [f"{note[0].upper()}{note[1:]}." for note in notes]


def _no_precision(report: Report) -> str:
    if not report.groups:
        return ""
    return (
        "No two groups differ in nothing but precision. One sweep runs them interleaved: "
        f"{rerun(report.groups[0], '--sweep train.precision=fp32,bf16')}."
    )


VIEWS: tuple[View, ...] = (
    View(
        id="precision",
        title="Precision compared",
        place="closing",
        is_shown=lambda report: bool(report.precisions),
        report_remedy=_no_precision,
        report_words=_precision_words,
        report_charts=precision_charts,
        report_sheets=precision_sheets,
        template="sheets.html.j2",
    ),
)
