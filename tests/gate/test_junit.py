"""JUnit XML of a comparison, read as a CI server reads it."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Properties, TestCase, TestSuite

from dlbench.gate.page.assemble import ComparisonReport, MetricResult, PointResult
from dlbench.gate.page.document import to_junit
from dlbench.gate.verdicts import TTest
from dlbench.stats.estimates import Estimate


def metric(verdict: str, **changes: Any) -> MetricResult:
    side = Estimate(value=0.1, unit="s", low=0.099, high=0.101, n=5, kind="Student t")
    told: dict[str, Any] = {
        "name": "step_median_s",
        "title": "Step time",
        "about": "median",
        "gated": verdict != "information",
        "verdict": verdict,
        "reason": "why",
        "a": side,
        "b": side,
        "ratio": Estimate(value=1.05, unit="ratio", low=1.04, high=1.06, n=5, kind="Student t"),
        "tested": TTest(
            method="Welch's t test of 5 and 5 sessions",
            p_worse=0.004,
            p_better=1.0,
            level_worse=0.005,
            level_better=0.005,
            equivalence=(1.04, 1.06),
            unit="session",
            scatter=0.01,
            detectable=0.025,
            wanted=0.03,
            repeats=5,
        ),
        "values_a": (0.1,) * 5,
        "values_b": (0.105,) * 5,
        **changes,
    }
    return MetricResult(**told)


def report(
    *metrics: MetricResult, text: str = "net, ci preset, 2 ranks", damaged: tuple[str, ...] = ()
) -> ComparisonReport:
    point = PointResult(
        label=text,
        caption=text,
        workload=text,
        ranks=2,
        nodes=1,
        runs_a=(text,),
        runs_b=(text,),
        sessions_a=1,
        sessions_b=1,
        sessions_history=0,
        finished_a=("", ""),
        finished_b=("", ""),
        tags_a=(("commit", text),),
        tags_b=(),
        allowed=(),
        environment=(),
        cautions=(text,),
        metrics=metrics,
    )
    return ComparisonReport(
        dlbench_version="0",
        a=text,
        b=text,
        paired=False,
        history="",
        verdict="regressed",
        headline=text,
        tolerance=0.02,
        level=0.01,
        num_compared=len(metrics),
        points=(point,),
        environment=(),
        cautions=(),
        only_b=(),
        left_out=(),
        damaged=damaged,
        notices=(),
        methods=(),
    )


def cases(found: ComparisonReport) -> list[TestCase]:
    document = JUnitXml.fromstring(to_junit(found).encode("utf-8"))
    (suite,) = list(document)
    assert isinstance(suite, TestSuite)
    return list(suite)


def numbers_of(case: TestCase) -> dict[str, str]:
    return {one.name: one.value for one in case.child(Properties)}


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        ("regressed", Failure),
        ("inconclusive", Error),
        ("insufficient", Error),
        ("improved", None),
        ("equivalent", None),
    ],
)
def test_a_verdict_is_a_pass_a_failure_or_an_error(verdict: str, kind: type | None) -> None:
    (case,) = cases(report(metric(verdict)))
    assert case.name == "Step time (step_median_s)"
    assert case.classname == "net, ci preset, 2 ranks"
    assert [type(result) for result in case.result] == ([] if kind is None else [kind])
    for result in case.result:
        assert result.type == verdict
        assert "5.0 % worse, 1.050x [1.040, 1.060]" in result.message
    assert verdict in str(case.system_out)


def test_counts_numbers_and_damage() -> None:
    found = report(metric("regressed"), metric("inconclusive"), metric("information"), damaged=("file: torn",))
    document = JUnitXml.fromstring(to_junit(found, "gate").encode("utf-8"))
    assert document.name == "gate"
    (suite,) = list(document)
    # The metric without verdict is no test case; damage is one of its own.
    assert (suite.tests, suite.failures, suite.errors) == (3, 1, 2)
    assert {prop.name: prop.value for prop in suite.properties()}["verdict"] == "regressed"
    case = next(iter(suite))
    numbers = numbers_of(case)
    assert float(numbers["ratio"]) == 1.05
    assert (numbers["a_unit"], numbers["a_runs"]) == ("s", "5")
    assert float(numbers["p_worse"]) == 0.004
    assert float(numbers["level_worse"]) == 0.005


def test_a_side_without_runs_is_told_without_numbers() -> None:
    empty = metric("insufficient", **dict.fromkeys(["a", "b", "ratio", "tested"]))
    (case,) = cases(report(empty))
    assert numbers_of(case).keys() == {"verdict"}
    assert "no ratio" in case.result[0].message


@given(st.text(max_size=60))
def test_any_text_gives_a_document_that_can_be_read(text: str) -> None:
    # Surrogates never get past `clean`; whatever else there is must not break the XML.
    document = to_junit(report(metric("regressed", reason=text), text=text, damaged=(text,)))
    ElementTree.fromstring(document.encode("utf-8"))
    assert len(cases(report(metric("regressed", reason=text), text=text))) == 1
