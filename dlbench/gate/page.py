"""A comparison as a `Document`: the verdict, one table of all comparisons, and each point with its evidence.

The same as JUnit XML, the form of test results that CI servers show. Regressed and missed are failures. Inconclusive
and insufficient are errors: the test could not decide, and what is undecided must not look like a pass; only where
the reference is not there yet a case is skipped, because there is nothing to mend. The others pass. Metrics that do not
decide are no test cases.

Elements and attributes are those that junit-10.xsd of Jenkins' xUnit plugin allows. GitLab shows an element's text and
not its message; Jenkins shows both, and for a skipped case the text only where there is no message.
"""

from __future__ import annotations

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
from dlbench.units import first_of

MAX_ENVIRONMENT = 6  # Differing keys of the environment that are shown; JSON has all.
MAX_LEFT_OUT = 5

ComparisonRow = tuple[PointResult, MetricResult]

# What XML 1.0, section 2.2, does not allow in a document, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: ComparisonReport, name: str = "dlbench check") -> str:
    """One test suite, a test case for each point and metric that decides, and one for damaged data, if there is any."""
    cases = [_case(point, metric) for point, metric in report.each()]
    for line in report.damaged:
        cases.append(_element("testcase", {"classname": "dlbench", "name": f"data: {line[:120]}"}))
        cases[-1].append(_text("error", {"type": "damaged"}, [line]))
    counts = {"tests": str(len(cases))}
    for tag, count in (("failure", "failures"), ("error", "errors")):
        counts[count] = str(sum(case.find(tag) is not None for case in cases))
    seconds = _time([point.wall_s for point in report.points if point.gated])
    root = _element("testsuites", {"name": name, **counts, **seconds})
    counts["skipped"] = str(sum(case.find("skipped") is not None for case in cases))
    suite = _element("testsuite", {"name": f"{report.b} against {report.a}", **counts, **seconds})
    if moments := [point.finished_b[1] for point in report.points if point.finished_b[1]]:
        suite.set("timestamp", _legal(max(moments).removesuffix("Z")))
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
    if said := [*remarks(report)]:
        suite.append(_text("system-out", {}, said))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(point: PointResult, metric: MetricResult) -> ElementTree.Element:
    # The time is that of runs, which all cases of a point judge: each has its part, so that sums are what they took.
    time = _time([None if point.wall_s is None else point.wall_s / len(point.gated)])
    case = _element("testcase", {"classname": point.label, "name": f"{metric.title} ({metric.name})", **time})
    attributes = {"type": metric.verdict, "message": f"{metric.verdict}: {change_text(metric)}"}
    tag, lines = {"bad": "failure", "open": "error", "good": "system-out"}[GATE_TONES[metric.verdict]], [metric.reason]
    if tag == "system-out":
        attributes, lines = {}, [attributes["message"], metric.reason]
    elif tag == "error" and metric.awaits_reference:
        tag, attributes, lines = "skipped", {"type": metric.verdict}, [f"{metric.verdict}: {metric.reason}"]
    case.append(_text(tag, attributes, [*lines, *_evidence(point, metric)]))
    return case


def _time(seconds: list[float | None]) -> dict[str, str]:
    """The attribute; none where it is not known when runs began."""
    known = [one for one in seconds if one is not None]
    return {"time": f"{sum(known):.3f}"} if known and len(known) == len(seconds) else {}


def _text(tag: str, attributes: dict[str, str], lines: list[str]) -> ElementTree.Element:
    found = _element(tag, attributes)
    found.text = _legal("\n".join(lines))
    return found


def _evidence(point: PointResult, metric: MetricResult) -> Iterator[str]:
    a, b, both = metric.sides
    sides = f"{a} {_amount(metric.a)}; {b} {_amount(metric.b)}"
    yield sides if metric.ratio is None else f"{sides}; {both} {ratio_cell(metric.ratio)}"
    yield point.caption
    if metric.tested:
        yield f"p worse {p_against(metric.tested, 'worse')}; {metric.tested.method}"
    yield from filter(None, [power_text(metric)])
    yield from (f"differs on purpose: {one.text}" for one in point.allowed)
    yield from remarks(point)


def _element(tag: str, attributes: dict[str, str]) -> ElementTree.Element:
    return ElementTree.Element(tag, {key: _legal(value) for key, value in attributes.items()})


def _legal(text: str) -> str:
    return "\n".join(_ILLEGAL.sub("", clean(line)) for line in text.split("\n"))


def document_of(report: ComparisonReport) -> Document:
    """The comparison, ready for every format."""
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
    """What would bring a verdict, or what to look at; empty where there is nothing to do."""
    gated = [metric for point in report.points for metric in point.gated if metric.verdict == report.verdict]
    if not gated:
        return ""
    if report.verdict in ("insufficient", "inconclusive"):
        reasons = dict.fromkeys(metric.reason for metric in gated if metric.reason)
        # How many units show a slowdown says nothing of how near a floor a machine may lie.
        compared = [metric for metric in gated if not metric.is_floor and not metric.quality]
        tests = [(metric.tested, metric) for metric in compared if metric.tested and metric.repeats_text]
        if report.verdict == "insufficient":
            return f"{next(iter(reasons), '')}: repeat with --repeats {MIN_RUNS} or more."
        if tests:
            most = max(tests, key=lambda one: one[0].repeats or 0)
            return f"{most[1].repeats_text} would show {share_text(most[0].wanted)} (--detect)."
        return f"{next(iter(reasons), '')}."
    if report.verdict == "missed":
        return f"dlbench diagnose {report.b} says where the time goes."
    return "dlbench diagnose on both sides says where the time went." if report.verdict == "regressed" else ""


def paired_lines(scan: Scan) -> list[str]:
    """What the paired comparisons of some runs say, or why they say nothing: for the end of `dlbench run --ab`."""
    from dlbench.gate.comparison import compare_pairs, paired_points

    try:
        points, both = paired_points(scan, str(scan.root), {})
    except DlbenchError as error:
        return textwrap.wrap(f"No comparison of the sides: {clean(str(error))}", WIDTH)
    report = compare_pairs(points, both=both, metrics=DEFAULT_METRICS, rule=Rule())
    return to_text(document_of(report)).splitlines()


def remarks(found: PointResult | ComparisonReport) -> Iterator[str]:
    """Cautions at a point, or at all: environments that differ, and reasons to read verdicts with care."""
    if found.environment:
        keys = first_of(_keys(found.environment), MAX_ENVIRONMENT, "; ")
        yield f"Environments of A and B differ: {keys}."
    yield from found.cautions


def _comparisons(rows: list[ComparisonRow]) -> Sheet[ComparisonRow]:
    settings = {_setting(point) for point, _ in rows}
    places = {(point.ranks, point.nodes) for point, _ in rows}
    # On 80 columns of several points the ratio keeps its interval, and the sides stand in the full form; of floors the
    # throughput keeps it.
    kinds = {metric.is_floor for _, metric in rows}
    are_floors = kinds == {True}
    of_floors = ", of a throughput floor below 1" if True in kinds else ""
    is_one = len(places) == 1 or are_floors
    a, b, both = rows[0][1].sides if are_floors else ("A", "B", "B / A")

    def side(title: str, name: str, *, with_interval: bool) -> Column[ComparisonRow]:
        def cell(row: ComparisonRow) -> Cell:
            return unit_cell(getattr(row[1], name), with_interval=with_interval)

        return Column("", title, lambda row: getattr(row[1], name), cell, is_brief=is_one)

    columns: tuple[Column[ComparisonRow], ...] = (
        Column("", "Verdict", lambda row: row[1].verdict, is_brief=True),
        Column("", both, lambda row: None, lambda row: ratio_cell(row[1].ratio), is_brief=not are_floors),
        Column("", "Metric", lambda row: row[1].title, is_brief=not are_floors),
        Column("", "At", lambda row: place_text(row[0].ranks, row[0].nodes), is_brief=len(places) > 1),
        *((Column("", "Setting", lambda row: _setting(row[0]), is_brief=True),) if len(settings) > 1 else ()),
        side(a, "a", with_interval=False),
        side(b, "b", with_interval=are_floors),
        Column("", "p worse", lambda row: p_against(row[1].tested, "worse") if row[1].tested else "none"),
    )
    return Sheet(
        name="comparisons",
        title="All comparisons",
        columns=columns,
        rows=rows,
        caption="missed: the whole interval of the throughput lies below the floor; met: it lies above."
        if are_floors
        else f"B / A: above 1 is worse{of_floors}. "
        "Of a test, regressed means that the whole interval lies above the tolerance.",
        in_terminal=True,
    )


def _setting(point: PointResult) -> str:
    return point.label.rpartition(", ")[0]


def _amount(figure: Estimate | None) -> str:
    return DASH if figure is None else str(unit_cell(figure))


def _point(number: int, point: PointResult, report: ComparisonReport) -> Section:
    others = tuple(
        (one.title, f"B / A {ratio_cell(one.ratio)}; A {_amount(one.a)}; B {_amount(one.b)}")
        for one in point.metrics
        if not one.gated
    )
    information = Section(id=f"point-{number}-information", title="For information, without verdict", facts=others)
    return Section(
        id=f"point-{number}",
        title=point.label,
        level="answer",
        brief=(),
        about=(point.caption, f"Differs on purpose: {'; '.join(_keys(point.allowed))}" if point.allowed else ""),
        facts=(("Pairs" if report.paired else "Runs", _sides(point)),),
        marks=tuple(Mark(severity="note", text=text) for text in remarks(point)),
        sections=(
            *(_metric(f"point-{number}", metric, report) for metric in point.gated),
            *((information,) if others else ()),
        ),
    )


def _metric(where: str, metric: MetricResult, report: ComparisonReport) -> Section:
    tested = metric.tested
    a, b, both = metric.sides
    facts = []
    for name, figure in ((a, metric.a), (b, metric.b)):
        basis = "" if figure is None else "--at-least" if name == "Floor" else basis_text(figure)
        facts.append((name, "not measured" if figure is None else f"{unit_cell(figure)}; {basis}"))
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
    power = power_text(metric)
    return Section(
        id=f"{where}-{metric.name}",
        title=f"{metric.title}: {metric.verdict}{f' ({metric.reason})' if metric.reason else ''}",
        facts=tuple(facts),
        words=(power,) if power else (),
    )


def _cautions(report: ComparisonReport) -> Iterator[Mark]:
    yield from (Mark(severity="serious", text=f"damaged: {line}") for line in report.damaged)
    yield from (Mark(severity="note", text=text) for text in remarks(report))
    alone = "No floor is for" if report.is_of_floors else "Only in B, compared with nothing"
    for head, found in ((alone, report.only_b), ("Left out", report.left_out)):
        if found:
            yield Mark(severity="note", text=f"{head}: {first_of(found, MAX_LEFT_OUT, '; ')}.")


def _sides(point: PointResult) -> str:
    texts = []
    for name, runs, sessions, (first, last), tags in (
        ("A", point.runs_a, point.sessions_a, point.finished_a, point.tags_a),
        ("B", point.runs_b, point.sessions_b, point.finished_b, point.tags_b),
    ):
        when = "" if not first else f" ({first})" if first == last else f" ({first} to {last})"
        tagged = "".join(f", {key} {value}" for key, value in tags)
        if name == "A" and not runs:
            continue
        held = f" in {sessions} session{'s' * (sessions > 1)}" if runs else ""
        of = f" of {name}" if point.runs_a else ""
        texts.append(f"{len(runs)}{of}{held}{when}{tagged}")
    if point.sessions_history:
        texts.append(f"scatter also of {point.sessions_history} sessions of the history")
    return ", ".join(texts)


def _keys(pairs: tuple[KeyDifference, ...]) -> list[str]:
    return [
        f"{one.title}: {shorten(one.a or 'none', VALUE_WIDTH)} against {shorten(one.b or 'none', VALUE_WIDTH)}"
        for one in pairs
    ]
