"""A comparison as Markdown (GitHub's dialect), for pull requests and the summary of a CI step."""

from __future__ import annotations

from collections.abc import Iterator

from dlbench.gate.page.model import ComparisonReport, MetricResult, PointResult
from dlbench.gate.page.text import endings, remarks
from dlbench.gate.page.words import p_text, power_text, ratio_text
from dlbench.report.formats.markdown import escape
from dlbench.report.wording import DASH, basis_text, figure_text
from dlbench.stats.estimates import Estimate

_HEADER = ("Point", "Metric", "A", "B", "B / A (above 1 is worse)", "p worse (Holm)", "Verdict")


def to_markdown(report: ComparisonReport) -> str:
    """Heading, verdict, one table of all comparisons, and what to mind."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: ComparisonReport) -> Iterator[str]:
    yield f"## dlbench: {escape(report.verdict)}"
    yield ""
    yield escape(report.headline)
    yield ""
    yield f"- A: {escape(report.a)}"
    yield f"- B: {escape(report.b)}"
    yield ""
    yield "| " + " | ".join(_HEADER) + " |"
    yield "|" + " --- |" * len(_HEADER)
    for point in report.points:
        for metric in point.metrics:
            yield "| " + " | ".join(escape(cell) for cell in _row(point, metric)) + " |"
    for point in report.points:
        words = list(_words(point))
        if words:
            yield ""
            yield f"### {escape(point.label)}"
            yield ""
            yield escape(point.caption)
            yield ""
            yield from (f"- {escape(text)}" for text in words)
    ends = list(endings(report))
    if ends:
        yield ""
        yield "### To mind"
        yield ""
        yield from (f"- {escape(text)}" for text in ends)
    yield ""
    yield "<details><summary>How the verdicts are made</summary>"
    yield ""
    yield from (f"- {escape(name)}: {escape(text)}" for name, text in report.methods)
    yield ""
    yield "</details>"


def _row(point: PointResult, metric: MetricResult) -> tuple[str, ...]:
    p = p_text(metric.p_worse_adjusted) if metric.gated else DASH
    verdict = metric.verdict if metric.gated else "for information"
    ratio = DASH if metric.ratio is None else ratio_text(metric.ratio)
    return (point.label, metric.title, _figure(metric.a), _figure(metric.b), ratio, p, verdict)


def _figure(figure: Estimate | None) -> str:
    if figure is None:
        return DASH
    unit = "" if figure.unit == "s" else f" {figure.unit}"
    return f"{figure_text(figure)}{unit} ({basis_text(figure)})"


def _words(point: PointResult) -> Iterator[str]:
    for metric in point.gated:
        test = f" {metric.test}." if metric.test else ""
        power = power_text(metric)
        yield f"{metric.title}: {metric.verdict}: {metric.reason}.{test}{' ' + power if power else ''}"
    for side, tags in (("A", point.tags_a), ("B", point.tags_b)):
        if tags:
            yield f"{side}: {', '.join(f'{key} {value}' for key, value in tags)}"
    for one in point.allowed:
        yield f"Differs on purpose: {one.title}: {one.a or 'none'} against {one.b or 'none'}"
    yield from remarks(point)
