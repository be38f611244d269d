"""A comparison as a `Document`: the verdict, one table of all comparisons, and each point with its evidence."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlbench.errors import DlbenchError
from dlbench.gate.content import KeyDifference
from dlbench.gate.page.model import ComparisonReport, MetricResult, PointResult
from dlbench.gate.page.words import p_text, power_text, ratio_cell, ratio_text, share_text
from dlbench.report.document import Document, Mark, Section
from dlbench.report.formats.terminal import WIDTH, shorten, to_text
from dlbench.report.table import Column, Sheet, unit_cell
from dlbench.report.wording import basis_text, clean, place_text

if TYPE_CHECKING:
    from dlbench.records.scan import Scan

TITLE = "dlbench comparison of B against A"

MAX_ENVIRONMENT = 6
"""Differing keys of the environment that are shown; JSON has all."""
MAX_LEFT_OUT = 5
_VALUE_WIDTH = 30


@dataclass(frozen=True)
class Comparison:
    """One line of the table of all comparisons."""

    point: PointResult
    metric: MetricResult


def document_of(report: ComparisonReport) -> Document:
    """The comparison, ready for every format."""
    rows = [Comparison(point, metric) for point in report.points for metric in point.gated]
    verdict = Section(
        id="verdict",
        title=f"Verdict: {report.verdict}",
        words=(report.headline,),
        facts=(("A", report.a), ("B", report.b)),
        sheets=(_comparisons(rows),),
    )
    methods = Section(id="methods", title="How the verdicts are made", facts=report.methods, are_methods=True)
    return Document(
        title=f"{TITLE}: {report.verdict}",
        dlbench_version=report.dlbench_version,
        notices=report.notices,
        sections=(
            verdict,
            *(_point(number, point, report) for number, point in enumerate(report.points)),
            *_cautions(report),
            methods,
        ),
        data=report,
    )


def paired_lines(scan: Scan) -> list[str]:
    """What the paired comparisons of some runs say, or why they say nothing: for the end of `dlbench run --ab`."""
    from dlbench.gate.comparison import compare_pairs
    from dlbench.gate.page.assemble import assemble
    from dlbench.gate.pairs import paired_points
    from dlbench.gate.verdicts import Rule
    from dlbench.reading.metrics import DEFAULT_METRICS

    try:
        points, both = paired_points(scan, str(scan.root), {}, "--where")
    except DlbenchError as error:
        return textwrap.wrap(f"No comparison of the sides: {clean(str(error))}", WIDTH)
    report = assemble(compare_pairs(points, both=both, metrics=DEFAULT_METRICS, rule=Rule()))
    return to_text(document_of(report), full=True).splitlines()


def remarks(found: PointResult | ComparisonReport) -> Iterator[str]:
    """Cautions at a point, or at all: environments that differ, and reasons to read verdicts with care."""
    if found.environment:
        keys = _keys(found.environment)
        more = f"; and {len(keys) - MAX_ENVIRONMENT} more" if len(keys) > MAX_ENVIRONMENT else ""
        yield f"Environments of A and B differ: {'; '.join(keys[:MAX_ENVIRONMENT])}{more}."
    yield from found.cautions


def _comparisons(rows: list[Comparison]) -> Sheet[Comparison]:
    columns: tuple[Column[Comparison], ...] = (
        Column("", "Verdict", lambda row: row.metric.verdict),
        Column("", "B / A", lambda row: row.metric.ratio, lambda row: ratio_cell(row.metric.ratio)),
        Column("", "Metric", lambda row: row.metric.title),
        Column("", "At", lambda row: place_text(row.point.ranks, row.point.nodes)),
        Column("", "A", lambda row: row.metric.a, lambda row: unit_cell(row.metric.a)),
        Column("", "B", lambda row: row.metric.b, lambda row: unit_cell(row.metric.b)),
        Column("", "p worse (Holm)", lambda row: p_text(row.metric.p_worse_adjusted)),
        Column("", "Point", lambda row: row.point.label),
    )
    return Sheet(
        name="comparisons", title="All comparisons", columns=columns, rows=rows, caption="B / A: above 1 is worse."
    )


def _information(metrics: list[MetricResult]) -> Sheet[MetricResult]:
    columns: tuple[Column[MetricResult], ...] = (
        Column("", "Metric", lambda metric: metric.title),
        Column("", "A", lambda metric: metric.a, lambda metric: unit_cell(metric.a)),
        Column("", "B", lambda metric: metric.b, lambda metric: unit_cell(metric.b)),
        Column("", "B / A", lambda metric: metric.ratio, lambda metric: ratio_cell(metric.ratio)),
    )
    return Sheet(name="information", title="For information, without verdict", columns=columns, rows=metrics)


def _point(number: int, point: PointResult, report: ComparisonReport) -> Section:
    return Section(
        id=f"point-{number}",
        title=point.label,
        about=(point.caption, f"Differs on purpose: {'; '.join(_keys(point.allowed))}" if point.allowed else ""),
        facts=(("Pairs" if report.paired else "Runs", _sides(point)),),
        marks=tuple(Mark(severity="note", text=text) for text in remarks(point)),
        sheets=(_information([metric for metric in point.metrics if not metric.gated]),),
        sections=tuple(_metric(f"point-{number}", metric, report) for metric in point.gated),
    )


def _metric(where: str, metric: MetricResult, report: ComparisonReport) -> Section:
    """The evidence behind one verdict."""
    facts = [
        (name, "no run tells" if figure is None else f"{unit_cell(figure)}; {basis_text(figure)}")
        for name, figure in (("A", metric.a), ("B", metric.b))
    ]
    if metric.ratio is not None:
        facts.append(("B / A", f"{ratio_text(metric.ratio)}; above 1 is worse"))
    if metric.p_worse is not None:
        facts.append(("p worse", f"{_p(metric.p_worse, metric.p_worse_adjusted, report)}; {metric.test}"))
        facts.append(("p better", _p(metric.p_better, metric.p_better_adjusted, report)))
    if metric.ratio_low_90 is not None and metric.ratio_high_90 is not None:
        ends = f"[{metric.ratio_low_90:.3f}, {metric.ratio_high_90:.3f}]"
        facts.append(("90 %", f"{ends}, tolerance {share_text(report.tolerance)}"))
    power = power_text(metric)
    return Section(
        id=f"{where}-{metric.name}",
        title=f"{metric.title}: {metric.verdict}{f' ({metric.reason})' if metric.reason else ''}",
        facts=tuple(facts),
        words=(power,) if power else (),
    )


def _p(p: float | None, adjusted: float | None, report: ComparisonReport) -> str:
    return p_text(p) + (f", {p_text(adjusted)} after Holm" if report.num_compared > 1 else "")


def _cautions(report: ComparisonReport) -> tuple[Section, ...]:
    marks = [Mark(severity="note", text=text) for text in remarks(report)]
    marks += [Mark(severity="note", text=f"Only in B, compared with nothing: {label}.") for label in report.only_b]
    if report.left_out:
        shown = "; ".join(report.left_out[:MAX_LEFT_OUT])
        more = len(report.left_out) - MAX_LEFT_OUT
        text = f"Left out: {shown}{f'; and {more} more' if more > 0 else ''}."
        marks.append(Mark(severity="note", text=text))
    marks += [Mark(severity="serious", text=f"damaged: {line}") for line in report.damaged]
    return (Section(id="cautions", title="Cautions", marks=tuple(marks)),) if marks else ()


def _sides(point: PointResult) -> str:
    texts = []
    for name, runs, sessions, (first, last), tags in (
        ("A", point.runs_a, point.sessions_a, point.finished_a, point.tags_a),
        ("B", point.runs_b, point.sessions_b, point.finished_b, point.tags_b),
    ):
        when = "" if not first else f" ({first})" if first == last else f" ({first} to {last})"
        tagged = "".join(f", {key} {value}" for key, value in tags)
        held = f" in {sessions} session{'s' * (sessions > 1)}" if runs else ""
        texts.append(f"{len(runs)} of {name}{held}{when}{tagged}")
    if point.sessions_history:
        texts.append(f"scatter also of {point.sessions_history} sessions of the history")
    return ", ".join(texts)


def _keys(pairs: tuple[KeyDifference, ...]) -> list[str]:
    return [
        f"{one.title}: {shorten(one.a or 'none', _VALUE_WIDTH)} against {shorten(one.b or 'none', _VALUE_WIDTH)}"
        for one in pairs
    ]
