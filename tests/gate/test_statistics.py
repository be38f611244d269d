"""The gate's statistics against scipy's, verdicts that fit their interval, what may be compared; its JUnit XML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase
from scipy import stats

from dlbench.errors import IncompleteDataError, UserError
from dlbench.gate.baseline import read_baseline
from dlbench.gate.page import to_junit
from dlbench.gate.report import ComparisonReport, MetricResult, PointResult
from dlbench.gate.sides import Content, differences, named, parse_allowed, without
from dlbench.gate.verdicts import Evidence, Judgement, MetricSample, Rule, TTest, evidence_of, judge
from dlbench.stats.estimates import Estimate

# Step times as they are: whole nanoseconds of some milliseconds, near each other, with ties and with outliers.
TIMES = st.one_of(st.integers(90_000_000, 112_000_000), st.integers(99, 102).map(lambda ms: ms * 1_000_000)).map(
    lambda ns: ns / 1e9
)


def sides(least: int = 2, most: int = 6) -> st.SearchStrategy[tuple[list[float], list[float]]]:
    side = st.lists(TIMES, min_size=least, max_size=most)
    return st.tuples(side, side)


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[list[float], list[float]]]:
    return st.lists(st.tuples(TIMES, TIMES), min_size=least, max_size=most).map(
        lambda found: ([a for a, _ in found], [b for _, b in found])
    )


# --- the test ---------------------------------------------------------------------------------------------------------


def evidence_between(a: Sequence[float], b: Sequence[float], *, paired: bool = False) -> Evidence:
    """Each run is a session of its own."""
    return evidence_of(MetricSample(a=tuple(a), b=tuple(b), paired=paired))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("count", [5, 12])
def test_p_and_interval_are_scipys(paired: bool, count: int) -> None:
    generator = np.random.default_rng(count)
    a, b = generator.normal(1.0, 0.01, count), generator.normal(1.03, 0.02, count)
    found, margin = evidence_between(list(a), list(b), paired=paired), math.log(1.02)
    logs = np.log(a), np.log(b)
    if paired:
        worse = stats.ttest_rel(logs[1] - margin, logs[0], alternative="greater")
        ends = stats.ttest_rel(logs[1], logs[0]).confidence_interval(0.98)
    else:
        worse = stats.ttest_ind(logs[1] - margin, logs[0], alternative="greater", equal_var=False)
        ends = stats.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.98)
    assert found.p_values(margin)[0] == pytest.approx(worse.pvalue)
    assert found.ends(0.01, 0.01) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))


@given(sides(5, 9))
def test_beside_a_larger_side_the_error_is_never_smaller_than_that_of_a_pooled_variance(
    found: tuple[list[float], list[float]],
) -> None:
    a, b = found
    logs = np.log(a), np.log(b)
    pooled = sum(((side - side.mean()) ** 2).sum() for side in logs) / (len(a) + len(b) - 2)
    wanted = max(sum(side.var(ddof=1) / len(side) for side in logs), pooled * (1 / len(a) + 1 / len(b)))
    # Scatter below a millionth is rounding.
    assert evidence_between(a, b).error == pytest.approx(math.sqrt(wanted), abs=2e-6)


def against(values: Sequence[float], floor: float) -> MetricSample:
    """Runs of one session against a floor."""
    return MetricSample(a=(), b=tuple(values), paired=False, sessions_b=("one",) * len(values), floor=floor)


@pytest.mark.parametrize("count", [5, 12])
def test_a_floor_is_tested_as_scipy_tests_one_sample(count: int) -> None:
    values = np.random.default_rng(count).normal(1.0, 0.02, count)
    found = evidence_of(against(list(values), 1.01))
    worse = stats.ttest_1samp(np.log(values), math.log(1.01), alternative="greater")
    ends = stats.ttest_1samp(np.log(values), math.log(1.01)).confidence_interval(0.98)
    assert found.p_values(0.0)[0] == pytest.approx(worse.pvalue)
    low, high = found.ends(0.01, 0.01)
    assert (low * 1.01, high * 1.01) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))


def test_a_floor_that_is_just_reached_is_missed_and_met_at_most_at_the_level() -> None:
    """The tolerance of the rule is none of a floor's."""
    times = np.exp(np.random.default_rng(5).normal(0.0, 0.02, (2000, 5)))
    found = [judge([against(row, 1.0)], Rule())[0] for row in times.tolist()]
    for verdict in ("missed", "met"):
        # 1 % of 2,000, and three standard deviations.
        assert sum(one.verdict == verdict for one in found) <= 20 + 14
    assert all(one.estimate is not None and one.estimate.low is not None for one in found)


# --- units ------------------------------------------------------------------------------------------------------------


def of_sessions(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], history: Sequence[Sequence[float]] = ()
) -> MetricSample:
    return MetricSample(
        a=tuple(value for session in a for value in session),
        b=tuple(value for session in b for value in session),
        paired=False,
        sessions_a=tuple(f"a{i}" for i, session in enumerate(a) for _ in session),
        sessions_b=tuple(f"b{i}" for i, session in enumerate(b) for _ in session),
        history=tuple(map(tuple, history)),
    )


def nights(generator: np.random.Generator, count: int, *, runs: int = 5, level: float = 0.0) -> list[list[float]]:
    """Sessions that differ by 3 %, their runs by 1 %."""
    states = generator.normal(level, 0.03, (count, 1)) + generator.normal(0, 0.01, (count, runs))
    return [list(row) for row in np.exp(states)]


def test_runs_are_the_unit_where_one_job_or_command_ran_both_sides_and_not_where_only_a_session_did() -> None:
    sample = MetricSample(
        a=tuple(STEADY), b=tuple(STEADY), paired=False, sessions_a=("s",) * 10, sessions_b=("s",) * 10
    )
    evidence = evidence_of(replace(sample, together=True))
    assert (evidence.unit, len(evidence.a)) == ("run", 10)
    assert evidence_of(sample) is None


def test_five_sessions_a_side_are_tested_as_five_values() -> None:
    generator = np.random.default_rng(2)
    a, b = nights(generator, 5), nights(generator, 5, level=0.4)
    (found,) = judge([of_sessions(a, b)], Rule())
    assert found.verdict == "regressed"
    assert found.tested.method == "Welch's t test of 5 and 5 sessions"
    means = [[np.log(session).mean() for session in side] for side in (a, b)]
    assert math.log(found.estimate.value) == pytest.approx(np.mean(means[1]) - np.mean(means[0]))


@pytest.mark.parametrize("earlier", [False, True])
def test_one_session_is_tested_against_the_scatter_of_earlier_ones(earlier: bool) -> None:
    generator = np.random.default_rng(3)
    known, new = nights(generator, 6), nights(generator, 1, level=0.2)
    means = [float(np.log(session).mean()) for session in known]
    centre, count = (means[0], 1) if earlier else (np.mean(means), 6)
    sample = of_sessions(known[:1], new, known[1:]) if earlier else of_sessions(known, new)
    evidence = evidence_of(sample)
    # Crawford and Howell, by scipy.
    spread = np.std(means[1:] if earlier else means, ddof=1)
    t = (np.log(new).mean() - centre - math.log(1.02)) / (spread * math.sqrt(1 + 1 / count))
    assert evidence.p_values(math.log(1.02))[0] == pytest.approx(stats.t.sf(t, 4 if earlier else 5))
    assert "on sessions (" in evidence.test


def test_a_side_of_smaller_sessions_scatters_more() -> None:
    generator = np.random.default_rng(4)
    known = nights(generator, 6, runs=20)
    large, small = (evidence_of(of_sessions(known, [[1.0] * runs])) for runs in (20, 2))
    within = np.mean([np.var(np.log(session), ddof=1) for session in known])
    assert small.error**2 - large.error**2 == pytest.approx((19 * 6 * within / (19 * 6 + 1)) * (1 / 2 - 1 / 20))


# --- power ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "freedom"), [(0.01, 4), (0.005, 8.5), (0.01, 18), (0.0025, 40), (0.0001, 1998)])
def test_what_is_found_with_80_percent_is_by_scipys_noncentral_t(level: float, freedom: float) -> None:
    evidence = Evidence(unit="pair", a=(), b=(), scatter=1.0, error=1.0, freedom=freedom)
    shift = math.log1p(evidence.detectable(level, 0.0))
    assert stats.nct.sf(stats.t.ppf(1 - level, freedom), freedom, shift) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize(("count", "paired"), [(5, False), (6, False), (10, False), (5, True), (7, True), (10, True)])
def test_the_slowdown_told_to_be_found_with_80_percent_is(count: int, paired: bool) -> None:
    scatter, generator = 0.01, np.random.default_rng([7, count, paired])
    error = scatter * math.sqrt((1 if paired else 2) / count)
    evidence = Evidence(
        unit="pair" if paired else "session",
        a=(0.0,) * count,
        b=(0.0,) * count,
        scatter=scatter,
        error=error,
        freedom=count - 1 if paired else 2 * count - 3,
    )
    told = evidence.detectable(0.01, math.log1p(0.02))
    own = scatter / math.sqrt(2) if paired else scatter
    found = 0
    for _ in range(300):
        a, b = np.exp(generator.normal(0, own, (2, count)))
        found += one(a.tolist(), (b * (1 + told)).tolist(), paired=paired).verdict == "regressed"
    # 240 expected, within three standard deviations.
    assert 219 <= found <= 261


def test_repeats_suffice_for_the_slowdown_that_is_asked_for() -> None:
    side = [math.exp(0.01 * x) for x in (-1.2, -0.6, 0.0, 0.6, 1.2)]

    def needed(wanted: float) -> int | None:
        tested = one(side, side, wanted=wanted).tested
        assert tested.scatter == pytest.approx(np.std(np.log(side), ddof=1))
        return tested.repeats

    count = needed(0.04)
    scatter, power = np.std(np.log(side), ddof=1), []
    for units in (count, count - 1):
        shift = math.log(1.04 / 1.02) / (scatter * math.sqrt(2 / units))
        power.append(stats.nct.sf(stats.t.ppf(0.99, 2 * units - 3), 2 * units - 3, shift))
    assert power[0] >= 0.8 > power[1]
    # What is tolerated is never to be found; what is much smaller than the scatter takes very many.
    assert needed(0.02) is None
    assert 400 < (needed(0.022) or 0) < 700
    assert needed(0.0201) is None


# --- verdicts ---------------------------------------------------------------------------------------------------------

MIRROR: dict[str, str] = {
    "regressed": "improved",
    "improved": "regressed",
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "insufficient": "insufficient",
}


def one(a: Sequence[float], b: Sequence[float], *, paired: bool = False, **rule: float) -> Judgement:
    (found,) = judge([MetricSample(a=tuple(a), b=tuple(b), paired=paired)], Rule(**rule))
    return found


@given(st.one_of(sides(3, 8), pairs(4, 8)), st.booleans(), st.sampled_from([0.005, 0.02, 0.1]))
def test_exchanged_sides_get_the_mirrored_verdict(
    found: tuple[list[float], list[float]], paired: bool, tolerance: float
) -> None:
    a, b = found
    paired = paired and len(a) == len(b)
    there, back = one(a, b, paired=paired, tolerance=tolerance), one(b, a, paired=paired, tolerance=tolerance)
    assert back.verdict == MIRROR[there.verdict]
    if there.tested is not None:
        assert back.tested.p_worse == pytest.approx(there.tested.p_better)
    assert there.estimate.value * back.estimate.value == pytest.approx(1)


STEADY = [1.000, 1.002, 0.998, 1.001, 0.999, 1.003, 0.997, 1.0, 1.001, 0.999]


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (STEADY, [x * 1.05 for x in STEADY], "regressed"),
        (STEADY, [x / 1.05 for x in STEADY], "improved"),
        (STEADY, STEADY[::-1], "equivalent"),
        (STEADY, [x * 1.01 for x in STEADY], "equivalent"),
        (STEADY, [x * 1.0195 for x in STEADY], "inconclusive"),
        ([1.0, 1.1, 0.9, 1.2, 0.8], [1.05, 1.15, 0.95, 0.85, 1.2], "inconclusive"),
        (STEADY[:4], [x * 2 for x in STEADY], "insufficient"),
        (STEADY, [], "insufficient"),
    ],
)
def test_verdicts(a: list[float], b: list[float], verdict: str) -> None:
    assert one(a, b).verdict == verdict


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [5, 10])
def test_a_change_smaller_than_the_tolerance_fails_at_most_at_the_level(count: int, paired: bool) -> None:
    generator = np.random.default_rng([19, count])
    own = 0.005 / math.sqrt(2) if paired else 0.005
    fails = 0
    for _ in range(300):
        a, b = np.exp(generator.normal(0, own, (2, count)))
        fails += one(a.tolist(), (b * 1.019).tolist(), paired=paired).verdict == "regressed"
    # 1 % at +2 %: more than 8 of 300 has a chance of 0.4 %. It was 40 %.
    assert fails <= 8


@given(
    st.lists(sides(5, 8), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([0.005, 0.02]),
    st.sampled_from([0.01, 0.2]),
    st.floats(0.85, 1.25),
)
def test_the_verdict_is_where_its_own_interval_lies(
    family: list[tuple[list[float], list[float]]], paired: bool, tolerance: float, level: float, factor: float
) -> None:
    """Never again "regressed, 1.068x [0.982, 1.165]": verdict, p and the interval that is printed are one test."""
    shortest = [(a[: min(len(a), len(b))], b[: min(len(a), len(b))]) if paired else (a, b) for a, b in family]
    samples = [MetricSample(a=tuple(a), b=tuple(x * factor for x in b), paired=paired) for a, b in shortest]
    for found, sample in zip(judge(samples, Rule(tolerance=tolerance, level=level)), samples, strict=True):
        ratio, tested = found.estimate, found.tested
        assert ratio.value == pytest.approx(stats.gmean(sample.b) / stats.gmean(sample.a))
        edge = 1 + tolerance
        for side, end, p, own in (
            ("regressed", ratio.low / edge, tested.p_worse, tested.level_worse),
            ("improved", 1 / (ratio.high * edge), tested.p_better, tested.level_better),
        ):
            if abs(end - 1) > 1e-9:
                assert (found.verdict == side) == (end > 1) == (p <= own)
        low, high = tested.equivalence
        if found.verdict == "equivalent":
            assert 1 / edge <= low <= ratio.value <= high <= edge
        assert ratio.level == pytest.approx(1 - tested.level_worse - tested.level_better)
        assert level / len(samples) <= tested.level_worse <= level


def test_many_comparisons_are_corrected_together() -> None:
    a, b = STEADY[:5], [x * 1.05 for x in STEADY[5:]]
    sample = MetricSample(a=tuple(a), b=tuple(b), paired=False)
    (alone,) = judge([sample], Rule())
    assert alone.verdict == "regressed"
    levels = [[found.tested.level_worse for found in judge([sample] * m, Rule()) if found.tested] for m in (1, 2, 3)]
    # Holm: the smallest p against a third of the level, the next against half of it, the last against all of it.
    assert sorted(levels[2]) == pytest.approx([0.01 / 3, 0.01 / 2, 0.01])
    quiet = MetricSample(a=tuple(a), b=tuple(a), paired=False)
    told = [found.tested.level_worse for found in judge([quiet, sample, quiet], Rule()) if found.tested]
    assert told == pytest.approx([0.01 / 2, 0.01 / 3, 0.01 / 2])


def test_false_alarms_stay_below_the_level_with_outliers() -> None:
    generator = np.random.default_rng(12)
    alarms = 0
    for _ in range(400):
        values = generator.lognormal(0, 0.02, 10) * (1 + (generator.random(10) < 0.1) * generator.exponential(0.1, 10))
        alarms += evidence_between(list(values[:5]), list(values[5:])).p_values(0.0)[0] <= 0.01
    # Level 1 %: more than 9 of 400 has a chance of 0.6 % at the level itself.
    assert alarms <= 9


# --- what may be compared ---------------------------------------------------------------------------------------------


def content(registered: dict[str, str] | None = None, **plan: str | float | None) -> Content:
    return Content(
        registered={"workload": "net", "precision": "fp32", "system": "one", "launcher": "local", **(registered or {})},
        plan={"train.precision": "fp32", "train.seed": 0, "system.launch.launcher": "local", **plan},
    )


def test_differing_keys_are_named_once_with_both_values() -> None:
    a = content()
    b = content({"precision": "bf16"}, **{"train.precision": "bf16", "train.seed": 1, "variant": "unwatched"})
    found = differences(a, b)
    assert [one.key for one in found] == ["precision", "train.seed", "variant"]
    assert named(found) == "Precision: fp32 against bf16; train.seed: 0 against 1; variant: not set against unwatched"
    assert differences(a, a) == []


@pytest.mark.parametrize("allow", ["precision", "train.precision"])
def test_an_allowed_key_covers_what_speaks_of_the_same(allow: str) -> None:
    a, b = content(), content({"precision": "bf16"}, **{"train.precision": "bf16"})
    allowed = parse_allowed([allow], [a, b])
    assert differences(without(a, allowed), without(b, allowed)) == []


def test_another_system_may_launch_otherwise() -> None:
    a, b = content(), content({"system": "two", "launcher": "mpirun"}, **{"system.launch.launcher": "mpirun"})
    allowed = parse_allowed(["system"], [a, b])
    assert differences(without(a, allowed), without(b, allowed)) == []
    assert differences(without(a, {"precision"}), without(b, {"precision"})) != []


@pytest.mark.parametrize(
    ("allow", "words"),
    [("precison", "did you mean precision"), ("workload", "never compared"), ("train.sed", "did you mean train.seed")],
)
def test_keys_that_cannot_be_allowed(allow: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_allowed([f"system,{allow}"], [content()])


def test_a_baseline_names_its_work_and_holds_each_run_once(tmp_path: Path) -> None:
    run = {
        "run_id": "r1",
        "finished": "2026-03-01T12:00:00Z",
        "job": "c/1",
        "boot": "host 1234",
        "figures": {"step_median_s": 0.1},
    }
    point = {
        "ranks": 1,
        "nodes": 1,
        "registered": {"workload": "w", "preset": "p", "engine": "ddp", "scaling": "weak", "later": "x"},
        "plan": {},
        "sample_unit": "images",
        "notice": "",
        "tags": {},
        "environment": {},
        "runs": [run],
    }
    file = tmp_path / "baseline.json"

    def written(**changes: object) -> Path:
        content = {"format": "dlbench.baseline", "version": 1, "dlbench_version": "0", "points": [{**point, **changes}]}
        file.write_text(json.dumps(content), encoding="utf-8")
        return file

    assert len(read_baseline(written()).points) == 1
    with pytest.raises(IncompleteDataError, match="lacks engine"):
        read_baseline(written(registered={"workload": "w", "preset": "p", "scaling": "weak"}))
    with pytest.raises(IncompleteDataError, match="holds a run twice"):
        read_baseline(written(runs=[run, run]))


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
