"""A comparison as plain text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlbench.errors import DlbenchError
from dlbench.gate.page.model import ComparisonReport, KeyPair, MetricResult, PointResult
from dlbench.gate.page.words import p_text, power_text, ratio_text, share_text
from dlbench.report.formats.terminal import WIDTH, shorten
from dlbench.report.tabular import Table, aligned
from dlbench.report.wording import DASH, basis_text, clean, figure_text

if TYPE_CHECKING:
    from dlbench.records.scan import Scan

TITLE = "dlbench comparison of B against A"

MAX_ENVIRONMENT = 6
"""Differing keys of the environment that the text shows; JSON has all."""
_VALUE_WIDTH = 30


def to_text(report: ComparisonReport, width: int = WIDTH) -> str:
    """Plain lines of at most `width` columns; a longer word stays whole."""
    lines = [TITLE, *_wrapped(f"A: {report.a}", width), *_wrapped(f"B: {report.b}", width), ""]
    lines += [f"Verdict: {report.verdict}", *_wrapped(report.headline, width)]
    for point in report.points:
        lines += ["", *_point(point, report, width)]
    ends = list(endings(report))
    lines += ["", "To mind:"] if ends else []
    lines += [line for text in ends for line in _wrapped(f"- {text}", width)]
    lines += ["", *(line for name, text in report.methods for line in _wrapped(f"{name}: {text}", width))]
    return "\n".join(lines).rstrip() + "\n"


def paired_lines(scan: Scan) -> list[str]:
    """What the paired comparisons of some runs say, or why they say nothing: for the end of `dlbench run --ab`."""
    from dlbench.gate.comparison import compare_pairs
    from dlbench.gate.page.assemble import assemble
    from dlbench.gate.pairs import paired_points
    from dlbench.gate.verdicts import Rule
    from dlbench.reading.run_metrics import DEFAULT_METRIC

    try:
        points, both = paired_points(scan, str(scan.root), {}, "--where")
    except DlbenchError as error:
        return _wrapped(f"No comparison of the sides: {clean(str(error))}", WIDTH)
    report = assemble(compare_pairs(points, both=both, metrics=(DEFAULT_METRIC,), rule=Rule()))
    return to_text(report).splitlines()


def endings(report: ComparisonReport) -> Iterator[str]:
    """What stands behind the points, in sentences."""
    yield from remarks(report)
    for label in report.only_b:
        yield f"Only in B, compared with nothing: {label}."
    if report.left_out:
        shown = "; ".join(report.left_out[:5])
        more = f"; and {len(report.left_out) - 5} more" if len(report.left_out) > 5 else ""
        yield f"Left out: {shown}{more}."
    for line in report.damaged:
        yield f"! damaged: {line}"


def _point(point: PointResult, report: ComparisonReport, width: int) -> Iterator[str]:
    yield from _wrapped(point.label, width)
    yield from _wrapped(point.caption, width)
    yield from _wrapped(f"{'Pairs' if report.paired else 'Runs'}: {_sides(point)}", width)
    if point.allowed:
        yield from _wrapped(f"Differs on purpose: {'; '.join(_keys(point.allowed))}", width)
    for metric in point.gated:
        yield ""
        yield from _metric(metric, report, width)
    others = [metric for metric in point.metrics if not metric.gated]
    if others:
        yield ""
        yield "For information, without verdict:"
        yield from _information(others, width)
    yield from (line for text in remarks(point) for line in _wrapped(f"- {text}", width))


def remarks(found: PointResult | ComparisonReport) -> Iterator[str]:
    """What to mind of a point, or of all: environments that differ, and cautions."""
    if found.environment:
        keys = _keys(found.environment)
        more = f"; and {len(keys) - MAX_ENVIRONMENT} more" if len(keys) > MAX_ENVIRONMENT else ""
        yield f"Environments of A and B differ: {'; '.join(keys[:MAX_ENVIRONMENT])}{more}."
    yield from found.cautions


def _sides(point: PointResult) -> str:
    texts = []
    for name, runs, (first, last), tags in (
        ("A", point.runs_a, point.finished_a, point.tags_a),
        ("B", point.runs_b, point.finished_b, point.tags_b),
    ):
        when = "" if not first else f" ({first})" if first == last else f" ({first} to {last})"
        told = "".join(f", {key} {value}" for key, value in tags)
        texts.append(f"{len(runs)} of {name}{when}{told}")
    return ", ".join(texts)


def _keys(pairs: tuple[KeyPair, ...]) -> list[str]:
    return [
        f"{one.title}: {shorten(one.a or 'none', _VALUE_WIDTH)} against {shorten(one.b or 'none', _VALUE_WIDTH)}"
        for one in pairs
    ]


def _metric(metric: MetricResult, report: ComparisonReport, width: int) -> Iterator[str]:
    reason = f" ({metric.reason})" if metric.reason else ""
    yield from _wrapped(f"{metric.title}: {metric.verdict}{reason}", width)
    rows = []
    for name, figure in (("A", metric.a), ("B", metric.b)):
        rows.append((name, "no run tells" if figure is None else f"{_united(metric, name)}; {basis_text(figure)}"))
    if metric.ratio is not None:
        rows.append(("B / A", f"{ratio_text(metric.ratio)}; above 1 is worse"))
    if metric.p_worse is not None:
        holm = f", {p_text(metric.p_worse_adjusted)} after Holm" if report.num_compared > 1 else ""
        rows.append(("p worse", f"{p_text(metric.p_worse)}{holm}; {metric.test}"))
        holm = f", {p_text(metric.p_better_adjusted)} after Holm" if report.num_compared > 1 else ""
        rows.append(("p better", f"{p_text(metric.p_better)}{holm}"))
    if metric.ratio_low_90 is not None and metric.ratio_high_90 is not None:
        ends = f"[{metric.ratio_low_90:.3f}, {metric.ratio_high_90:.3f}]"
        rows.append(("90 %", f"{ends}, tolerance {share_text(report.tolerance)}"))
    size = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield from textwrap.wrap(
            text, width, initial_indent=f"  {name.ljust(size)}  ", subsequent_indent=" " * (size + 4)
        )
    power = power_text(metric)
    yield from textwrap.wrap(power, width, initial_indent="  ", subsequent_indent="  ") if power else ()


def _united(metric: MetricResult, side: str) -> str:
    """A side's figure with a unit even where the numbers themselves bear none."""
    figure = metric.a if side == "A" else metric.b
    if figure is None:
        return DASH
    text = figure_text(figure)
    return text if figure.unit == "s" else f"{text} {figure.unit}"


def _information(metrics: list[MetricResult], width: int) -> Iterator[str]:
    rows: Table = [("metric", "A", "B", "B / A")]
    for one in metrics:
        ratio = DASH if one.ratio is None else ratio_text(one.ratio)
        rows.append((one.title, _united(one, "A"), _united(one, "B"), ratio))
    lines = aligned(rows)
    if max(map(len, lines)) <= width:
        yield from lines
        return
    for row in rows[1:]:
        yield from _wrapped(f"{row[0]}: A {row[1]}, B {row[2]}, B / A {row[3]}", width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ") or [""]
