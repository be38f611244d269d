"""JUnit XML of a comparison, read as a CI server reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase

from dlbench.gate.page import to_junit
from dlbench.gate.report import ComparisonReport, MetricResult, PointResult
from dlbench.gate.verdicts import TTest
from dlbench.stats.estimates import Estimate

TESTED = TTest(
    method="Welch's t test of 5 and 5 sessions", p_worse=0.004, p_better=1.0, level_worse=0.005, level_better=0.005,
    equivalence=(1.04, 1.06), unit="session", scatter=0.01, detectable=0.025, wanted=0.03, repeats=5,
)  # fmt: skip


def metric(verdict: str, **changes: Any) -> MetricResult:
    side = Estimate(value=0.1, unit="s", low=0.099, high=0.101, n=5, kind="Student t")
    ratio = Estimate(value=1.05, unit="ratio", low=1.04, high=1.06, n=5, kind="Student t")
    made = MetricResult(
        name="step_median_s", title="Step time", about="median", gated=verdict != "information", verdict=verdict,
        reason="why", reference_incomplete=False, a=side, b=side, ratio=ratio, tested=TESTED, values_a=(0.1,) * 5,
        values_b=(0.105,) * 5,
    )  # fmt: skip
    return replace(made, **changes)


def report(
    *metrics: MetricResult, text: str = "net, ci preset, 2 ranks", damaged: tuple[str, ...] = ()
) -> ComparisonReport:
    point = PointResult(
        label=text, caption=text, workload=text, ranks=2, nodes=1, runs_a=(text,), runs_b=(text,), sessions_a=1,
        sessions_b=1, sessions_history=0, finished_a=("", ""), wall_s=90.0, tags_a=(("commit", text),), tags_b=(),
        finished_b=("2026-03-01T12:00:00Z", "2026-03-01T13:00:00Z"), allowed=(), environment=(), cautions=(text,),
        metrics=metrics,
    )  # fmt: skip
    return ComparisonReport(
        dlbench_version="0", a=text, b=text, paired=False, history="", verdict="regressed", headline=text,
        tolerance=0.02, level=0.01, num_compared=len(metrics), points=(point,), environment=(), cautions=(),
        points_only_in_b=(), left_out=(), damaged=damaged, notices=(), methods=(),
    )  # fmt: skip


def cases(found: ComparisonReport) -> list[TestCase]:
    (suite,) = list(JUnitXml.fromstring(to_junit(found).encode("utf-8")))
    return list(suite)


# Elements, with their attributes and children, that junit-10.xsd of Jenkins' xUnit plugin allows.
SHAPE = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        {"properties", "testcase", "system-out"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "testcase": ({"name", "classname", "time"}, {"failure", "error", "skipped", "system-out"}),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"type", "message"}, set()),
    "system-out": (set(), set()),
}


def assert_shaped(element: ElementTree.Element) -> None:
    attributes, children = SHAPE[element.tag]
    assert set(element.keys()) <= attributes
    assert {child.tag for child in element} <= children
    for child in element:
        assert_shaped(child)


@pytest.mark.parametrize(
    ("verdict", "reference_incomplete", "kind"),
    [
        ("regressed", False, Failure),
        ("missed", False, Failure),
        ("inconclusive", False, Error),
        ("insufficient", False, Error),
        ("inconclusive", True, Skipped),
        ("insufficient", True, Skipped),
        ("improved", False, None),
        ("equivalent", False, None),
        ("met", False, None),
    ],
)
def test_a_verdict_is_a_pass_a_failure_an_error_or_skipped(
    verdict: str, reference_incomplete: bool, kind: type | None
) -> None:
    (case,) = cases(report(metric(verdict, reference_incomplete=reference_incomplete)))
    assert case.name == "Step time (step_median_s)"
    assert case.classname == "net, ci preset, 2 ranks"
    assert [type(result) for result in case.result] == ([] if kind is None else [kind])
    for result in case.result:
        assert result.type == verdict


@pytest.mark.parametrize("verdict", ["regressed", "inconclusive", "equivalent"])
@pytest.mark.parametrize("reference_incomplete", [False, True])
def test_what_a_server_shows_says_all_once(verdict: str, reference_incomplete: bool) -> None:
    """GitLab shows the text alone, Jenkins the message above it, and of a skipped case what is there."""
    text = to_junit(report(metric(verdict, reason="because", reference_incomplete=reference_incomplete)))
    assert_shaped(ElementTree.fromstring(text))
    (case,) = ElementTree.fromstring(text).iter("testcase")
    (shown,) = list(case)
    assert shown.text.count("because") == 1
    assert "B / A 1.050x [1.040, 1.060]" in shown.text
    assert "because" not in shown.get("message", "")
    assert "".join(case.itertext()).count("because") == 1


def test_counts_times_and_damage() -> None:
    found = report(
        metric("regressed"),
        metric("inconclusive"),
        metric("insufficient", reference_incomplete=True),
        metric("information"),
        damaged=("file: torn",),
    )
    text = to_junit(found, "gate")
    assert_shaped(ElementTree.fromstring(text))
    document = JUnitXml.fromstring(text.encode("utf-8"))
    assert document.name == "gate"
    (suite,) = list(document)
    # The metric without verdict is no test case; damage is one of its own.
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 1, 2, 1)
    assert suite.timestamp == "2026-03-01T13:00:00"
    assert {prop.name: prop.value for prop in suite.properties()}["verdict"] == "regressed"
    # The runs took 90 s, however many cases judge them.
    assert suite.time == 90
    assert [case.time for case in suite] == [30, 30, 30, None]
