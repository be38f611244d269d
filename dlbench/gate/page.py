"""A comparison as a `Document`, and as JUnit XML, the test results that CI servers show.

In JUnit, regressed and missed are failures; inconclusive and insufficient are errors, because an undecided test must
not look like a pass; a case is skipped if only the reference lacks runs. Elements and attributes are those of
junit-10.xsd of Jenkins' xUnit plugin. GitLab shows an element's text and not its message; Jenkins shows both, and for a
skipped case the text only if there is no message.
"""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Iterator
from xml.etree import ElementTree

from dlbench.analysis.metrics import DEFAULT_METRICS
from dlbench.errors import DlbenchError
from dlbench.gate.report import (
    ComparisonReport,
    MetricResult,
    PointResult,
    change_text,
    p_against,
    power_text,
    ratio_cell,
    share_text,
)
from dlbench.gate.sides import VALUE_WIDTH, KeyDifference
from dlbench.gate.verdicts import Rule
from dlbench.records.scan import Scan
from dlbench.report.document import Document, Mark, Section, methods_section
from dlbench.report.formats.terminal import WIDTH, shorten, to_text
from dlbench.report.table import Cell, Column, Sheet, unit_cell
from dlbench.report.wording import DASH, basis_text, clean, place_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.verdict_words import GATE_TONES
from dlbench.units import counted, first_of

MAX_ENVIRONMENT = 6  # Differing keys of the environment that are shown; JSON has all.
MAX_LEFT_OUT = 5

ComparisonRow = tuple[PointResult, MetricResult]

# What XML 1.0, section 2.2, does not allow in a document, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: ComparisonReport, name: str = "dlbench check") -> str:
    """Returns one test suite with a case for each point and metric with a verdict, and for each damaged file."""
    cases = [_case(point, metric) for point, metric in report.each()]
    for line in report.damaged:
        cases.append(_element("testcase", {"classname": "dlbench", "name": f"data: {line[:120]}"}))
        cases[-1].append(_text("error", {"type": "damaged"}, [line]))
    counts = {"tests": str(len(cases))}
    for tag, count in (("failure", "failures"), ("error", "errors")):
        counts[count] = str(sum(case.find(tag) is not None for case in cases))
    seconds = _time_attribute([point.wall_s for point in report.points if point.gated])
    root = _element("testsuites", {"name": name, **counts, **seconds})
    counts["skipped"] = str(sum(case.find("skipped") is not None for case in cases))
    suite = _element("testsuite", {"name": f"{report.b} against {report.a}", **counts, **seconds})
    finished = max((point.finished_b[1] for point in report.points), default="")
    if finished:
        suite.set("timestamp", _legal(finished.removesuffix("Z")))
    root.append(suite)
    properties = _element("properties", {})
    facts = {
        "verdict": report.verdict,
        "headline": report.headline,
        "tolerance": f"{report.tolerance:.6g}",
        "level": f"{report.level:.6g}",
        "paired": str(report.paired).lower(),
        "dlbench_version": report.dlbench_version,
    }
    properties.extend(_element("property", {"name": name, "value": value}) for name, value in facts.items())
    suite.append(properties)
    suite.extend(cases)
    warnings = list(remarks(report))
    if warnings:
        suite.append(_text("system-out", {}, warnings))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(point: PointResult, metric: MetricResult) -> ElementTree.Element:
    # All cases of a point judge the same runs: each case has its share of their time, so that sums are right.
    share = len(point.gated)
    time = _time_attribute([point.wall_s], share)
    case = _element("testcase", {"classname": point.label, "name": f"{metric.title} ({metric.name})", **time})
    message = f"{metric.verdict}: {change_text(metric)}"
    tone = GATE_TONES[metric.verdict]
    attributes = {"type": metric.verdict, "message": message}
    if tone == "good":
        tag, attributes, lines = "system-out", {}, [message, metric.reason]
    elif tone == "bad":
        tag, lines = "failure", [metric.reason]
    elif metric.reference_incomplete:
        tag, attributes, lines = "skipped", {"type": metric.verdict}, [f"{metric.verdict}: {metric.reason}"]
    else:
        tag, lines = "error", [metric.reason]
    case.append(_text(tag, attributes, [*lines, *_evidence(point, metric)]))
    return case


def _time_attribute(seconds: list[float | None], share: int = 1) -> dict[str, str]:
    """Returns the sum of the seconds over `share`; nothing if some run does not know its start."""
    if None in seconds or not seconds:
        return {}
    return {"time": f"{sum(duration for duration in seconds if duration is not None) / share:.3f}"}


def _text(tag: str, attributes: dict[str, str], lines: list[str]) -> ElementTree.Element:
    element = _element(tag, attributes)
    element.text = _legal("\n".join(lines))
    return element


def _evidence(point: PointResult, metric: MetricResult) -> Iterator[str]:
    a, b, both = metric.sides
    sides = f"{a} {_amount(metric.a)}; {b} {_amount(metric.b)}"
    if metric.ratio is not None:
        sides += f"; {both} {ratio_cell(metric.ratio)}"
    yield sides
    yield point.caption
    if metric.tested:
        yield f"p worse {p_against(metric.tested, 'worse')}; {metric.tested.method}"
        yield power_text(metric)
    yield from (f"allowed difference: {difference.text}" for difference in point.allowed)
    yield from remarks(point)


def _element(tag: str, attributes: dict[str, str]) -> ElementTree.Element:
    return ElementTree.Element(tag, {key: _legal(value) for key, value in attributes.items()})


def _legal(text: str) -> str:
    return "\n".join(_ILLEGAL.sub("", clean(line)) for line in text.split("\n"))


def document_of(report: ComparisonReport) -> Document:
    """Returns the comparison, ready for every format."""
    rows = list(report.each())
    title, a, b = "dlbench comparison of B against A", "A", "B"
    if report.is_of_floors:
        title, a, b = "dlbench check against a floor", "Against", "Runs"
    verdict = Section(
        id="verdict",
        title=f"Verdict: {report.verdict}",
        level="answer",
        words=(report.headline,),
        facts=((a, report.a), (b, report.b)),
        sheets=(_comparisons(rows),),
        marks=tuple(_cautions(report)),
        sections=tuple(_point(number, point, report) for number, point in enumerate(report.points)),
        next_step=next_step(report),
        brief=(report.headline, f"{a}: {report.a}", f"{b}: {report.b}"),
        is_group=True,
    )
    return Document(
        title=f"{title}: {report.verdict}",
        dlbench_version=report.dlbench_version,
        notices=report.notices,
        sections=(verdict, *methods_section(report.methods, "How the verdicts are made", "docs/comparing.md")),
        data=report,
        command="dlbench compare A B",
    )


def next_step(report: ComparisonReport) -> str:
    """Returns what would give a verdict, or the command that finds the cause; empty if nothing is to be done."""
    gated = [metric for point in report.points for metric in point.gated if metric.verdict == report.verdict]
    if not gated:
        return ""
    if report.verdict in ("insufficient", "inconclusive"):
        reasons = dict.fromkeys(metric.reason for metric in gated if metric.reason)
        if report.verdict == "insufficient":
            return f"{next(iter(reasons), '')}: repeat with --repeats {MIN_RUNS} or more."
        # The units that find a slowdown would not decide on a floor: throughput may be arbitrarily near to it.
        needed = [
            (metric.tested.repeats, metric.repeats_text, share_text(metric.tested.wanted))
            for metric in gated
            if metric.tested and metric.tested.repeats and not metric.is_floor and not metric.quality
        ]
        if needed:
            _, repeats, slowdown = max(needed, key=operator.itemgetter(0))
            return f"{repeats} would show {slowdown} (--detect)."
        return f"{next(iter(reasons), '')}."
    if report.verdict == "missed":
        return f"dlbench diagnose {report.b} shows where the time is spent."
    if report.verdict == "regressed":
        return "dlbench diagnose on both sides shows where the time was lost."
    return ""


def paired_lines(scan: Scan) -> list[str]:
    """Returns the result of the paired comparisons of some runs, or the error, for the end of `dlbench run --ab`."""
    from dlbench.gate.comparison import compare_pairs, paired_points

    try:
        points, both = paired_points(scan, str(scan.root), {})
    except DlbenchError as error:
        return textwrap.wrap(f"No comparison of the sides: {clean(str(error))}", WIDTH)
    report = compare_pairs(points, both=both, metrics=DEFAULT_METRICS, rule=Rule())
    return to_text(document_of(report)).splitlines()


def remarks(result: PointResult | ComparisonReport) -> Iterator[str]:
    """Yields the warnings of a point, or of all points: different environments first."""
    if result.environment:
        keys = first_of(_keys(result.environment), MAX_ENVIRONMENT, "; ")
        yield f"Environments of A and B differ: {keys}."
    yield from result.cautions


def _comparisons(rows: list[ComparisonRow]) -> Sheet[ComparisonRow]:
    settings = {point.setting for point, _ in rows}
    places = {(point.ranks, point.nodes) for point, _ in rows}
    # On 80 columns the ratio keeps its interval if there are several points, and the sides are left to the full form;
    # of floors the throughput keeps its interval.
    kinds = {metric.is_floor for _, metric in rows}
    are_floors = kinds == {True}
    show_sides = len(places) == 1 or are_floors
    a, b, both = "A", "B", "B / A"
    caption = "B / A: above 1 is worse. "
    if are_floors:
        a, b, both = rows[0][1].sides
        caption = "missed: the whole interval of the throughput is below the floor; met: it is above."
    else:
        if True in kinds:
            caption = "B / A: above 1 is worse, of a throughput floor below 1. "
        caption += "With a test, regressed means that the whole interval is above the tolerance."

    def side(title: str, name: str, *, with_interval: bool) -> Column[ComparisonRow]:
        def cell(row: ComparisonRow) -> Cell:
            return unit_cell(getattr(row[1], name), with_interval=with_interval)

        return Column("", title, lambda row: getattr(row[1], name), cell, is_brief=show_sides)

    columns: list[Column[ComparisonRow]] = [
        Column("", "Verdict", lambda row: row[1].verdict, is_brief=True),
        Column("", both, lambda row: None, lambda row: ratio_cell(row[1].ratio), is_brief=not are_floors),
        Column("", "Metric", lambda row: row[1].title, is_brief=not are_floors),
        Column("", "At", lambda row: place_text(row[0].ranks, row[0].nodes), is_brief=len(places) > 1),
        side(a, "a", with_interval=False),
        side(b, "b", with_interval=are_floors),
        Column("", "p worse", lambda row: p_against(row[1].tested, "worse") if row[1].tested else "none"),
    ]
    if len(settings) > 1:
        columns.insert(4, Column("", "Setting", lambda row: row[0].setting, is_brief=True))
    return Sheet(
        name="comparisons",
        title="All comparisons",
        columns=tuple(columns),
        rows=rows,
        caption=caption,
        in_terminal=True,
    )


def _amount(figure: Estimate | None) -> str:
    return DASH if figure is None else str(unit_cell(figure))


def _point(number: int, point: PointResult, report: ComparisonReport) -> Section:
    sections = [_metric(f"point-{number}", metric, report) for metric in point.gated]
    information = tuple(
        (metric.title, f"B / A {ratio_cell(metric.ratio)}; A {_amount(metric.a)}; B {_amount(metric.b)}")
        for metric in point.metrics
        if not metric.gated
    )
    if information:
        sections.append(
            Section(id=f"point-{number}-information", title="For information, without verdict", facts=information)
        )
    about = [point.caption]
    if point.allowed:
        about.append(f"Allowed differences: {'; '.join(_keys(point.allowed))}")
    return Section(
        id=f"point-{number}",
        title=point.label,
        level="answer",
        brief=(),
        about=tuple(about),
        facts=(("Pairs" if report.paired else "Runs", _sides(point)),),
        marks=tuple(Mark(severity="note", text=text) for text in remarks(point)),
        sections=tuple(sections),
    )


def _metric(section_id: str, metric: MetricResult, report: ComparisonReport) -> Section:
    tested = metric.tested
    a, b, both = metric.sides
    facts = []
    for name, figure in ((a, metric.a), (b, metric.b)):
        if figure is None:
            facts.append((name, "not measured"))
            continue
        basis = "--at-least" if name == "Floor" else basis_text(figure)
        facts.append((name, f"{unit_cell(figure)}; {basis}"))
    if metric.ratio is not None:
        basis = basis_text(metric.ratio, tested.unit if tested else "run")
        worse = "below" if metric.is_floor else "above"
        facts.append((both, f"{ratio_cell(metric.ratio)}; {worse} 1 is worse; {basis}"))
    if tested is not None:
        facts.append(("p worse", f"{p_against(tested, 'worse')}; {tested.method}"))
        facts.append(("p better", p_against(tested, "better")))
    if tested is not None and not metric.is_floor:
        ends = f"[{tested.equivalence[0]:.3f}, {tested.equivalence[1]:.3f}]"
        facts.append(("90 %", f"{ends}, tolerance {share_text(report.tolerance)}"))
    title = f"{metric.title}: {metric.verdict}"
    if metric.reason:
        title += f" ({metric.reason})"
    return Section(
        id=f"{section_id}-{metric.name}",
        title=title,
        facts=tuple(facts),
        words=tuple(filter(None, [power_text(metric)])),
    )


def _cautions(report: ComparisonReport) -> Iterator[Mark]:
    yield from (Mark(severity="serious", text=f"damaged: {line}") for line in report.damaged)
    yield from (Mark(severity="note", text=text) for text in remarks(report))
    points_only_in_b = "No floor applies to" if report.is_of_floors else "Only in B, not compared"
    for head, names in ((points_only_in_b, report.points_only_in_b), ("Left out", report.left_out)):
        if names:
            yield Mark(severity="note", text=f"{head}: {first_of(names, MAX_LEFT_OUT, '; ')}.")


def _sides(point: PointResult) -> str:
    texts, side_b = [], ""
    if point.runs_a:
        texts.append(_side_text(len(point.runs_a), " of A", point.sessions_a, point.finished_a, point.tags_a))
        side_b = " of B"
    texts.append(_side_text(len(point.runs_b), side_b, point.sessions_b, point.finished_b, point.tags_b))
    if point.sessions_history:
        texts.append(f"scatter also of {point.sessions_history} sessions of the history")
    return ", ".join(texts)


def _side_text(
    num_runs: int, side: str, sessions: int, finished: tuple[str, str], tags: tuple[tuple[str, str], ...]
) -> str:
    text = f"{num_runs}{side}"
    if num_runs:
        text += f" in {counted(sessions, 'session')}"
    first, last = finished
    if first and first == last:
        text += f" ({first})"
    elif first:
        text += f" ({first} to {last})"
    return ", ".join([text, *(f"{key} {value}" for key, value in tags)])


def _keys(pairs: tuple[KeyDifference, ...]) -> list[str]:
    texts = []
    for difference in pairs:
        a, b = shorten(difference.a or "none", VALUE_WIDTH), shorten(difference.b or "none", VALUE_WIDTH)
        texts.append(f"{difference.title}: {a} against {b}")
    return texts
