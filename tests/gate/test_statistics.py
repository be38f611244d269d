"""The gate's statistics: exact tests against brute force, verdicts that mirror, what may be compared."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dlbench.errors import IncompleteDataError, UserError
from dlbench.gate.baseline import read_baseline
from dlbench.gate.content import Content, differences, named, parse_allowed, without
from dlbench.gate.difference import paired_difference, unpaired_difference
from dlbench.gate.estimates import equivalence_interval, ratio_of_sides, shift_ratio
from dlbench.gate.power import power_of
from dlbench.gate.verdicts import Judgement, Rule, Sample, Verdict, judge, overall
from dlbench.stats.multiplicity import student_p, student_quantile
from dlbench.stats.resampling import resample_weights

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


# --- tests of a difference --------------------------------------------------------------------------------------------


def p_by_hand(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Every division of the pool, counted one by one with exact sums."""
    pool = [math.log(value) for value in (*a, *b)]
    seen = math.fsum(pool[len(a) :])
    sums = [math.fsum(chosen) for chosen in itertools.combinations(pool, len(b))]
    worse = sum(one >= seen - 1e-10 for one in sums) / len(sums)
    return worse, sum(one <= seen + 1e-10 for one in sums) / len(sums)


@given(sides())
def test_the_exact_p_is_that_of_counting_every_division(found: tuple[list[float], list[float]]) -> None:
    a, b = found
    test = unpaired_difference(a, b)
    assert (test.p_worse, test.p_better) == pytest.approx(p_by_hand(a, b))
    assert test.smallest_p == 1 / math.comb(len(a) + len(b), len(a))
    assert min(test.p_worse, test.p_better) >= test.smallest_p * 0.999


@given(pairs(7, 9))
def test_the_exact_paired_p_is_that_of_counting_every_sign(found: tuple[list[float], list[float]]) -> None:
    a, b = found
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    sums = [
        math.fsum(s * log for s, log in zip(signs, logs, strict=True))
        for signs in itertools.product((1, -1), repeat=len(logs))
    ]
    test = paired_difference(a, b, level=0.01)
    assert test.p_worse == pytest.approx(sum(one >= math.fsum(logs) - 1e-10 for one in sums) / len(sums))
    assert test.p_better == pytest.approx(sum(one <= math.fsum(logs) + 1e-10 for one in sums) / len(sums))
    assert test.method.startswith("exact sign-flip test")


def test_divisions_of_separate_sides_give_the_smallest_p_there_is() -> None:
    test = unpaired_difference([1.0, 1.01, 1.02, 1.03, 1.04], [1.1, 1.11, 1.12, 1.13, 1.14])
    assert test.p_worse == pytest.approx(1 / 252)
    assert test.p_better == 1.0
    assert "252 divisions" in test.method


@pytest.mark.parametrize("num_pairs", [5, 6])
def test_so_few_pairs_that_signs_cannot_tell_are_tested_by_student(num_pairs: int) -> None:
    generator = np.random.default_rng(num_pairs)
    a = list(generator.normal(1.0, 0.01, num_pairs))
    b = list(generator.normal(1.02, 0.01, num_pairs))
    test = paired_difference(a, b, level=0.01)
    expected = stats.ttest_rel(np.log(b), np.log(a), alternative="greater").pvalue
    assert test.p_worse == pytest.approx(expected)
    assert test.p_better == pytest.approx(1 - expected)
    assert "Student" in test.method
    assert "Student" not in paired_difference(a, b, level=0.05).method


def test_what_cannot_be_counted_is_drawn_and_close_to_student() -> None:
    generator = np.random.default_rng(4)
    a, b = generator.normal(1.0, 0.02, 15), generator.normal(1.015, 0.02, 15)
    drawn = unpaired_difference(list(a), list(b))
    assert "20,000 random" in drawn.method
    assert drawn.smallest_p == 1 / 20_001
    assert drawn.p_worse == pytest.approx(stats.ttest_ind(np.log(b), np.log(a), alternative="greater").pvalue, rel=0.2)
    a, b = generator.normal(1.0, 0.02, 25), generator.normal(1.01, 0.02, 25)
    paired = paired_difference(list(a), list(b), level=0.01)
    assert "20,000 random" in paired.method
    assert paired.p_worse == pytest.approx(stats.ttest_rel(np.log(b), np.log(a), alternative="greater").pvalue, rel=0.3)


@pytest.mark.parametrize("size", [6, 15])
def test_the_permutation_test_agrees_with_scipys(size: int) -> None:
    generator = np.random.default_rng(size)
    a, b = generator.normal(1.0, 0.02, size), generator.normal(1.012, 0.02, size)
    found = stats.permutation_test(
        (np.log(b), np.log(a)),
        lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis),
        alternative="greater",
        n_resamples=20_000,
        vectorized=True,
        rng=np.random.default_rng(1),
    )
    assert unpaired_difference(list(a), list(b)).p_worse == pytest.approx(found.pvalue, rel=1e-9 if size == 6 else 0.2)


def test_a_test_of_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="two runs per side"):
        unpaired_difference([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="two pairs"):
        paired_difference([1.0, 2.0], [1.0], level=0.01)


# --- estimates --------------------------------------------------------------------------------------------------------


@given(sides(1, 8))
def test_the_shift_is_the_median_of_all_differences(found: tuple[list[float], list[float]]) -> None:
    a, b = found
    expected = median(math.log(y / x) for x in a for y in b)
    assert math.log(shift_ratio(a, b, paired=False)) == pytest.approx(expected, abs=1e-12)


@given(pairs(1, 8))
def test_the_paired_shift_is_the_median_of_walsh_averages(found: tuple[list[float], list[float]]) -> None:
    a, b = found
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    expected = median((x + y) / 2 for x, y in itertools.combinations_with_replacement(logs, 2))
    assert math.log(shift_ratio(a, b, paired=True)) == pytest.approx(expected, abs=1e-12)


@given(sides(5, 8), st.booleans())
@settings(max_examples=20)
def test_the_interval_of_equivalence_is_of_the_same_resamples_as_the_ratio(
    found: tuple[list[float], list[float]], paired: bool
) -> None:
    a, b = found
    if paired:
        a, b = a[: min(map(len, found))], b[: min(map(len, found))]
    picked = []
    for side, stream in ((a, 0), (b, 0 if paired else 1)):
        ordered = side if paired else sorted(side)
        counts = np.rint(resample_weights(len(side), stream=stream)[:200] * len(side)).astype(int)
        picked.append([median(np.repeat(ordered, row).tolist()) for row in counts])
    low, high = equivalence_interval(a, b, paired=paired)
    whole = ratio_of_sides(a, b, paired=paired)
    assert whole.low is not None
    assert whole.high is not None
    # The 90 % interval lies in the 95 % one (but for the order of unpaired sides, which draws other resamples).
    assert low >= whole.low * 0.97
    assert high <= whole.high * 1.03
    ratios = np.array(picked[1]) / np.array(picked[0])
    if paired or (len(a), sorted(a)) <= (len(b), sorted(b)):
        assert ratios.min() <= high
        assert low <= ratios.max()


# --- power ------------------------------------------------------------------------------------------------------------


@given(st.floats(0.001, 0.999), st.integers(1, 60))
def test_quantiles_of_student(probability: float, freedom: int) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(
        stats.t.ppf(probability, freedom), rel=1e-6, abs=1e-9
    )


def test_a_quantile_undoes_the_p() -> None:
    assert student_p(student_quantile(0.995, 8), 8) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(1.0, 5)


def test_the_smallest_slowdown_is_that_of_the_formula() -> None:
    generator = np.random.default_rng(8)
    a, b = generator.lognormal(0, 0.03, 10), generator.lognormal(0, 0.03, 10)
    found = power_of(list(a), list(b), paired=False, level=0.01, tolerance=0.0, wanted=0.03)
    pooled = math.sqrt((np.var(np.log(a), ddof=1) + np.var(np.log(b), ddof=1)) / 2)
    assert found.scatter == pytest.approx(pooled)
    error = pooled * math.sqrt(2 / 10)
    expected = math.expm1((stats.t.ppf(0.99, 18) + stats.t.ppf(0.8, 18)) * error)
    assert found.detectable == pytest.approx(expected, rel=1e-4)
    assert found.repeats is not None
    assert found.repeats > 10
    # Within the tolerance nothing is ever called a slowdown.
    tolerant = power_of(list(a), list(b), paired=False, level=0.01, tolerance=0.5, wanted=0.03)
    assert tolerant.detectable is not None
    assert tolerant.detectable > 0.5
    assert tolerant.repeats is None


def test_no_slowdown_can_be_found_where_the_exact_test_cannot_reach_the_level() -> None:
    a, b = [1.0, 1.01, 1.02, 0.99, 1.0], [1.0, 1.02, 1.01, 0.98, 1.0]
    assert power_of(a, b, paired=False, level=0.01, tolerance=0.02, wanted=0.05).detectable is not None
    strict = power_of(a, b, paired=False, level=0.01 / 3, tolerance=0.02, wanted=0.05)
    assert strict.detectable is None
    assert strict.repeats is not None
    assert strict.repeats >= 6


def test_the_told_number_of_repeats_finds_the_slowdown_as_often_as_told() -> None:
    # Two sides whose logarithms have a standard deviation of 2 %.
    side = [math.exp(0.02 * x) for x in (-1.0, 0.0, 1.0)]
    told = power_of(side, side, paired=False, level=0.01, tolerance=0.0, wanted=0.04)
    assert told.scatter == pytest.approx(0.02)
    assert told.repeats == 7
    generator = np.random.default_rng(21)
    found = 0
    for _ in range(200):
        a, b = (generator.lognormal(shift, 0.02, told.repeats) for shift in (0.0, math.log(1.04)))
        found += unpaired_difference(list(a), list(b)).p_worse <= 0.01
    assert 137 <= found <= 183  # 160 expected, within four standard deviations


# --- verdicts ---------------------------------------------------------------------------------------------------------

MIRROR: dict[Verdict, Verdict] = {
    "regressed": "improved",
    "improved": "regressed",
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "insufficient": "insufficient",
}


def one(a: Sequence[float], b: Sequence[float], *, paired: bool = False, **rule: float) -> Judgement:
    (found,) = judge([Sample(a=tuple(a), b=tuple(b), paired=paired)], Rule(**rule))
    return found


@given(st.one_of(sides(3, 8), pairs(4, 8)), st.booleans(), st.sampled_from([0.005, 0.02, 0.1]))
def test_exchanged_sides_get_the_mirrored_verdict(
    found: tuple[list[float], list[float]], paired: bool, tolerance: float
) -> None:
    a, b = found
    paired = paired and len(a) == len(b)
    there, back = one(a, b, paired=paired, tolerance=tolerance), one(b, a, paired=paired, tolerance=tolerance)
    assert back.verdict == MIRROR[there.verdict]
    assert back.p_worse == (None if there.p_better is None else pytest.approx(there.p_better))
    assert there.ratio is not None
    assert back.ratio is not None
    assert there.ratio.value * back.ratio.value == pytest.approx(1)


@given(sides(5, 8), st.sampled_from([1e-3, 7.0, 3600.0]))
@settings(max_examples=20)
def test_another_unit_changes_nothing(found: tuple[list[float], list[float]], factor: float) -> None:
    a, b = found
    here, there = one(a, b), one([x * factor for x in a], [x * factor for x in b])
    assert there.verdict == here.verdict
    assert there.p_worse == pytest.approx(here.p_worse)
    assert here.ratio is not None
    assert there.ratio is not None
    assert there.ratio.value == pytest.approx(here.ratio.value)


@given(sides(5, 7))
@settings(max_examples=20)
def test_the_order_of_unpaired_runs_changes_nothing(found: tuple[list[float], list[float]]) -> None:
    a, b = found
    assert one(a[::-1], sorted(b)).verdict == one(a, b).verdict


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
def test_verdicts(a: list[float], b: list[float], verdict: Verdict) -> None:
    assert one(a, b).verdict == verdict


def test_a_certain_change_within_the_tolerance_never_fails() -> None:
    found = one(STEADY, [x * 1.01 for x in STEADY])
    assert found.p_worse is not None
    assert found.p_worse <= 0.01
    assert "a change within it is certain" in found.reason
    assert one(STEADY, [x * 1.01 for x in STEADY], tolerance=0.005).verdict == "regressed"


def test_pairs_see_through_a_drift_that_hides_the_change_from_separate_sides() -> None:
    drift = [1 + 0.03 * k for k in range(8)]
    a = [x * d for x, d in zip(STEADY, drift, strict=False)]
    b = [x * d * 1.05 for x, d in zip(STEADY[2:], drift, strict=True)]
    assert one(a, b).verdict == "inconclusive"
    assert one(a, b, paired=True).verdict == "regressed"


def test_many_comparisons_are_corrected_together() -> None:
    a, b = STEADY[:5], [x * 1.05 for x in STEADY[5:]]
    sample = Sample(a=tuple(a), b=tuple(b), paired=False)
    (alone,) = judge([sample], Rule())
    assert alone.verdict == "regressed"
    assert alone.p_worse == pytest.approx(1 / 252)
    three = judge([sample] * 3, Rule())
    assert [found.p_worse for found in three] == pytest.approx([3 / 252] * 3)
    assert {found.verdict for found in three} == {"inconclusive"}
    assert three[0].power is not None
    assert three[0].power.detectable is None


def test_one_verdict_of_many() -> None:
    assert overall(["equivalent", "improved", "inconclusive", "regressed", "insufficient"]) == "regressed"
    assert overall(["equivalent", "improved", "inconclusive", "insufficient"]) == "insufficient"
    assert overall(["equivalent", "improved", "inconclusive"]) == "inconclusive"
    assert overall(["equivalent", "improved"]) == "improved"
    assert overall(["equivalent"]) == "equivalent"
    assert overall([]) == "insufficient"


def test_false_alarms_stay_below_the_level_with_outliers() -> None:
    generator = np.random.default_rng(12)
    alarms = 0
    for _ in range(400):
        values = generator.lognormal(0, 0.02, 10) * (1 + (generator.random(10) < 0.1) * generator.exponential(0.1, 10))
        alarms += unpaired_difference(list(values[:5]), list(values[5:])).p_worse <= 0.01
    # Level 1 % (1/252 is the one step below it): more than 9 of 400 has a chance of 0.6 % at the level itself.
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


def test_many_differing_keys_are_counted() -> None:
    a, b = (content(**{f"train.key{i}": side for i in range(11)}) for side in (1.0, 2.0))
    assert named(differences(a, b)).endswith("; and 3 more")


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
    run = {"run_id": "r1", "finished": "2026-03-01T12:00:00Z", "figures": {"step_median_s": 0.1}}
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
