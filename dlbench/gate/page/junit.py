"""A comparison as JUnit XML, the form of test results that CI servers show.

Regressed is a failure. Inconclusive and insufficient are errors: the test could not tell, and what could not be told
must not look like a pass. Improved and equivalent pass. Metrics that do not decide are no test cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from dlbench.gate.page.document import remarks
from dlbench.gate.page.model import ComparisonReport, MetricResult, PointResult
from dlbench.gate.page.words import change_text, p_against, power_text
from dlbench.report.wording import clean

# What XML 1.0, section 2.2, does not allow in a document, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: ComparisonReport, name: str = "dlbench check") -> str:
    """One test suite, a test case for each point and metric that decides, and one for damaged data, if there is any.

    Args:
        report: the comparison.
        name: of the suites as a whole.
    """
    cases = [_case(report, point, metric) for point, metric in report.each()]
    cases += [_damaged(line) for line in report.damaged]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
        "skipped": "0",
        "time": "0",
    }
    root = _element("testsuites", {"name": name, **counts})
    suite = _element("testsuite", {"name": f"{report.b} against {report.a}", **counts})
    root.append(suite)
    suite.append(
        _properties(
            [
                ("verdict", report.verdict),
                ("headline", report.headline),
                ("tolerance", f"{report.tolerance:.6g}"),
                ("level", f"{report.level:.6g}"),
                ("paired", str(report.paired).lower()),
                ("dlbench_version", report.dlbench_version),
            ]
        )
    )
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(report: ComparisonReport, point: PointResult, metric: MetricResult) -> ElementTree.Element:
    case = _element("testcase", {"classname": point.label, "name": f"{metric.title} ({metric.name})", "time": "0"})
    case.append(_properties(_numbers(metric)))
    tag = {"regressed": "failure", "inconclusive": "error", "insufficient": "error"}.get(metric.verdict)
    message = f"{metric.verdict}: {change_text(metric)}: {metric.reason}"
    if tag is not None:
        found = _element(tag, {"type": metric.verdict, "message": message})
        found.text = _legal("\n".join([message, point.caption, *_evidence(report, point, metric)]))
        case.append(found)
    out = _element("system-out", {})
    out.text = _legal("\n".join([message, *_evidence(report, point, metric)]))
    case.append(out)
    return case


def _evidence(report: ComparisonReport, point: PointResult, metric: MetricResult) -> Iterator[str]:
    if metric.tested:
        yield f"p worse {p_against(metric.tested.p_worse, metric.tested.level_worse)}; {metric.tested.method}"
    yield from filter(None, [power_text(metric)])
    yield from (
        f"differs on purpose: {one.title}: {one.a or 'none'} against {one.b or 'none'}" for one in point.allowed
    )
    yield from (*remarks(point), *remarks(report))


def _numbers(metric: MetricResult) -> Iterator[tuple[str, str]]:
    yield "verdict", metric.verdict
    for name, figure in (("a", metric.a), ("b", metric.b), ("ratio", metric.ratio)):
        if figure is None:
            continue
        yield name, f"{figure.value:.9g}"
        yield f"{name}_unit", figure.unit
        yield f"{name}_runs", str(figure.n)
        if figure.low is not None and figure.high is not None:
            yield f"{name}_low", f"{figure.low:.9g}"
            yield f"{name}_high", f"{figure.high:.9g}"
    if metric.tested is not None:
        for name in ("p_worse", "level_worse", "detectable"):
            yield name, f"{getattr(metric.tested, name):.6g}"


def _damaged(line: str) -> ElementTree.Element:
    case = _element("testcase", {"classname": "dlbench", "name": f"data: {line[:120]}", "time": "0"})
    found = _element("error", {"type": "damaged", "message": line})
    found.text = _legal(line)
    case.append(found)
    return case


def _properties(pairs: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> ElementTree.Element:
    properties = _element("properties", {})
    for name, value in pairs:
        properties.append(_element("property", {"name": name, "value": value}))
    return properties


def _element(tag: str, attributes: dict[str, str]) -> ElementTree.Element:
    return ElementTree.Element(tag, {key: _legal(value) for key, value in attributes.items()})


def _legal(text: str) -> str:
    return "\n".join(_ILLEGAL.sub("", clean(line)) for line in text.split("\n"))
