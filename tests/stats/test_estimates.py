"""Estimates over runs, their draws, exact and adjusted p values, factors and verdicts."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.truth.intervals import KINDS, NOISES, agreement, attained
from dlbench.report.wording import basis_text
from dlbench.stats.estimates import (
    Estimate,
    between_and_within,
    difference_estimate,
    difference_p,
    gain_of_best,
    geometric_mean_estimate,
    mean_estimate,
    median_estimate,
    placed,
    places,
    rank_sum_level,
    rank_sums,
    ratio_estimate,
)
from dlbench.stats.multiplicity import LEAST_RUNS, LEVEL, POWER, repeats_for, resampled, student_quantile
from dlbench.stats.pairing import KnownKey, RunKey, pairing
from dlbench.stats.verdict import Combination, Verdict, contrasts, family_of, judge, judge_tests, key_effect, levels_of


def _keyed(values: list[float], block: str = "s") -> dict[RunKey, float]:
    return {(block, repeat): value for repeat, value in enumerate(values)}


def _covers(found: Estimate, truth: float) -> bool:
    return found.low <= truth <= found.high


# What an estimate is


def test_median_of_five_runs_is_bounded_by_their_range() -> None:
    found = median_estimate([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found == Estimate(3.0, 1.0, 5.0, 5, "order statistics", "", 0.9375)
    assert found == median_estimate([5.0, 4.0, 3.0, 2.0, 1.0])


def test_few_runs_have_a_range_with_its_level_and_one_has_nothing() -> None:
    assert median_estimate([2.0, 1.0, 4.0]) == Estimate(2.0, 1.0, 4.0, 3, "range", "", 0.75)
    assert median_estimate([2.0]) == Estimate(2.0, None, None, 1, "single run")
    assert mean_estimate([2.0, 1.0, 6.0]) == Estimate(3.0, 1.0, 6.0, 3, "range", "", 0.75)
    assert ratio_estimate(_keyed([1.0]), _keyed([2.0, 3.0])).kind == "single run"
    apart = difference_estimate(_keyed([5.0, 7.0]), _keyed([1.0, 2.0], "t"))
    assert apart == Estimate(4.5, 3.0, 6.0, 2, "range", "", 0.5)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_no_estimate_of_what_is_not_there(values: list[float]) -> None:
    for made in (median_estimate, mean_estimate, geometric_mean_estimate):
        with pytest.raises(ValueError, match="finite"):
            made(values)


positive = st.floats(0.01, 100.0)


@settings(max_examples=60, deadline=None)
@given(
    top=st.lists(positive, min_size=1, max_size=14),
    bottom=st.lists(positive, min_size=1, max_size=14),
    same=st.booleans(),
)
def test_ratio_lies_in_its_interval_and_is_that_of_geometric_means(
    top: list[float], bottom: list[float], same: bool
) -> None:
    a, b = _keyed(top), _keyed(bottom, "s" if same else "t")
    pairs = pairing(a, b)
    found = ratio_estimate(a, b)
    wanted = statistics.geometric_mean(pairs.of(a)) / statistics.geometric_mean(pairs.of(b))
    assert found.value == pytest.approx(wanted)
    assert found.unpaired == (abs(len(top) - len(bottom)) if pairs.is_paired else 0)
    if found.n == 1:
        assert found.low is None
    else:
        assert _covers(found, found.value)
    turned = ratio_estimate(b, a)
    assert found.value * turned.value == pytest.approx(1)
    assert (found.low is None) or found.low * (turned.high or 0.0) == pytest.approx(1)


@settings(max_examples=40, deadline=None)
@given(
    factors=st.lists(st.tuples(positive, positive), min_size=5, max_size=14),
    others=st.lists(st.tuples(positive, positive), min_size=5, max_size=14),
)
def test_ratios_multiply(factors: list[tuple[float, float]], others: list[tuple[float, float]]) -> None:
    """Where x = y z in each run, the ratios of x, y and z keep it, pairs or no pairs, runs left out or not."""
    mine, theirs = ([_keyed([f(y, z) for y, z in side]) for f in _PARTS] for side in (factors, others))
    whole, *parts = (ratio_estimate(a, b).value for a, b in zip(mine, theirs, strict=True))
    assert whole == pytest.approx(parts[0] * parts[1])


_PARTS = (lambda y, z: y * z, lambda y, z: y, lambda y, z: z)


# Pairs


def test_pairing_removes_the_drift_of_the_machine() -> None:
    """Both sides slow down by 20 % over the repeats; their ratio is 1.5 throughout."""
    drift = [1.0, 0.95, 0.9, 0.85, 0.8, 0.82]
    top, bottom = ([factor * scale for factor in drift] for scale in (150.0, 100.0))
    paired, free = ratio_estimate(_keyed(top), _keyed(bottom)), ratio_estimate(_keyed(top), _keyed(bottom, "t"))
    assert paired.value == pytest.approx(free.value)
    assert (paired.value, paired.low, paired.high) == (pytest.approx(1.5),) * 3
    assert free.low < 1.4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(6, 14), side=st.booleans(), drift=st.floats(0, 0.3))
def test_losing_one_run_moves_a_ratio_less_than_its_interval(seed: int, n: int, side: bool, drift: float) -> None:
    """Interleaved pairs under a drift of the machine: its partner is left out with it, and that is said."""
    rng = np.random.default_rng(seed)
    machine = 1 + drift * np.linspace(0, 1, n)
    a, b = (_keyed((machine * scale * rng.lognormal(0, 0.005, n)).tolist()) for scale in (1.05, 1.0))
    whole = ratio_estimate(a, b)
    for key in list(a):
        sides = [dict(a), dict(b)]
        del sides[side][key]
        found = ratio_estimate(*sides, unit="ratio")
        assert _covers(whole, found.value)
        assert (found.n, found.unpaired) == (n - 1, 1)


# Coverage


@pytest.mark.parametrize("n", range(5, 13))
def test_the_median_attains_the_level_that_is_printed(n: int) -> None:
    """Each run lies below the median or above it, equally likely: all outcomes are counted."""
    outcomes = list(itertools.product((-1.0, 1.0), repeat=n))
    k, level = places(n)
    hits = sum(sorted(outcome)[k - 1] < 0 < sorted(outcome)[n - k] for outcome in outcomes)
    assert hits / len(outcomes) == pytest.approx(level)
    assert level >= 0.95 or (n, level) == (5, 0.9375)
    assert median_estimate(list(range(n))).level == level


# Sessions


def _in_sessions(values: list[float], sessions: str, block: str = "s") -> dict[RunKey, float]:
    """A letter for the session of each run."""
    return {KnownKey.of(block, i, name): value for i, (value, name) in enumerate(zip(values, sessions, strict=True))}


def test_intervals_of_one_session_say_so_and_are_over_its_runs() -> None:
    values = [1.0, 2.0, 4.0, 3.0, 5.0]
    for made in (mean_estimate, median_estimate, geometric_mean_estimate):
        found = made(_in_sessions(values, "aaaaa"))
        assert replace(found, sessions=None) == made(values)
        assert found.sessions == 1
        assert basis_text(found).endswith("5 runs, within one session")


def test_a_ratio_of_one_session_and_others_says_that_their_difference_is_not_in_it() -> None:
    values = [1.0, 2.0, 4.0, 3.0, 5.0]
    one = _in_sessions(values, "aaaaa", "top")
    for sessions, told in (
        ("aaaaa", "within one session"),
        ("bbbbb", "one session per side: differences between sessions are not included"),
        ("bbccd", "one session per side: differences between sessions are not included"),
    ):
        other = _in_sessions(values[::-1], sessions, "bottom")
        for top, bottom in ((one, other), (other, one)):
            found = ratio_estimate(top, bottom)
            assert (found.sessions, found.kind) == (1, "Student t")
            assert basis_text(found) == f"95 % Student t, 5 runs, {told}"
            assert basis_text(found.inverted("ratio")) == basis_text(found)


def test_an_interval_of_several_sessions_is_that_of_their_means() -> None:
    rng = np.random.default_rng(1)
    values = (1 + rng.normal(0, 0.02, (5, 1)) + rng.normal(0, 0.01, (5, 4))).ravel().tolist()
    sessions = "".join(name * 4 for name in "abcde")
    found, of_means = mean_estimate(_in_sessions(values, sessions)), mean_estimate(np.reshape(values, (5, 4)).mean(1))
    assert (found.value, found.low, found.high) == pytest.approx((of_means.value, of_means.low, of_means.high))
    assert basis_text(found) == "95 % Student t, 5 sessions of 20 runs"
    few = mean_estimate(_in_sessions(values[:12], sessions[:12]))
    assert (few.kind, few.level, few.sessions, few.n) == ("range", 0.75, 3, 12)
    assert placed(few, 2.0, 2.0) == "insufficient"
    assert basis_text(few) == "range of 3 sessions of 12 runs, 75 %"
    # The median of the medians of its sessions, of which two are left out at either end.
    assert median_estimate(_in_sessions(values, sessions)).kind == "order statistics"


def test_a_ratio_of_pairs_counts_sessions_and_what_all_its_runs_share_is_no_scatter() -> None:
    rng = np.random.default_rng(2)
    state = np.repeat(rng.normal(0, 0.1, 5), 4)
    top, bottom = (np.exp(state + rng.normal(0, 0.01, 20) + shift).tolist() for shift in (0.5, 0.0))
    sessions = "".join(name * 4 for name in "abcde")
    found = ratio_estimate(_in_sessions(top, sessions), _in_sessions(bottom, sessions))
    assert (found.sessions, found.n, found.kind) == (5, 20, "Student t")
    assert found.low < math.exp(0.5) < found.high < 1.02 * found.low
    apart = ratio_estimate(_in_sessions(top, sessions), _in_sessions(bottom, sessions, "t"))
    assert apart.value == pytest.approx(found.value)
    assert (apart.high or 0) > 1.1 * (apart.low or 1)
    # One session a side: what it says holds within it.
    assert ratio_estimate(_in_sessions(top, "a" * 20), _in_sessions(bottom, sessions, "t")).sessions == 1


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.floats(0.5, 2), st.sampled_from("abcdefg")), min_size=1, max_size=20),
    others=st.lists(st.tuples(st.floats(0.5, 2), st.sampled_from("abcdefg")), min_size=1, max_size=20),
)
def test_sessions_move_no_value_and_p_fits_the_interval(
    runs: list[tuple[float, str]], others: list[tuple[float, str]]
) -> None:
    top, bottom = (
        _in_sessions([value for value, _ in side], [name for _, name in side], block)  # type: ignore[arg-type]
        for side, block in ((runs, "s"), (others, "t"))
    )
    plain = ({tuple(key): value for key, value in side.items()} for side in (top, bottom))
    found = difference_estimate(top, bottom)
    assert found.value == pytest.approx(difference_estimate(*plain).value)  # type: ignore[arg-type]
    if found.low is not None and found.high is not None:
        assert found.low <= found.value <= found.high
        assert found.level is not None
        if found.kind == "Student t" and len({*top.values(), *bottom.values()}) > 1:
            p = difference_p(top, bottom)
            if abs(p - 0.05) > 1e-3 and min(abs(found.low), abs(found.high)) > 1e-4:
                assert (p < 0.05) == (not found.low <= 0 <= found.high)


def test_both_scatters_are_found_again() -> None:
    rng = np.random.default_rng(1)
    groups = [(rng.normal(0, 0.03) + rng.normal(0, 0.01, rng.integers(2, 9))).tolist() for _ in range(400)]
    assert between_and_within(groups) == pytest.approx((0.03, 0.01), rel=0.08)


def test_equal_groups_of_equal_size_by_hand() -> None:
    """Means 1 and 3, squares of 4 x 0.25 within two degrees of freedom: (2 - 0.5 / 2)^0.5 and 0.5^0.5."""
    assert between_and_within([[0.5, 1.5], [2.5, 3.5]]) == pytest.approx((1.75**0.5, 0.5**0.5))
    assert between_and_within([[1.0, 3.0], [1.5, 2.5]]) == pytest.approx((0.0, 1.25**0.5))


TRIALS = 2000


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_the_truth_as_often_as_they_say(kind: str, noise: str) -> None:
    for n in (3, 5, 7, 8):
        hits, level = attained(kind, noise, n, TRIALS)
        # 1.5 points, and three standard errors of so few trials.
        assert hits / TRIALS >= level - 0.015 - 3 * (level * (1 - level) / TRIALS) ** 0.5, n


def test_many_experiments_at_once_are_the_single_ones() -> None:
    assert agreement().met


@settings(max_examples=60, deadline=None)
@given(
    a=st.lists(st.floats(-100, 100), min_size=2, max_size=5, unique=True),
    b=st.lists(st.floats(-100, 100), min_size=2, max_size=5, unique=True),
    level=st.sampled_from([0.5, 0.9, 0.9375]),
)
def test_the_rank_interval_lies_within_the_differences(a: list[float], b: list[float], level: float) -> None:
    """Between the smallest and the largest difference, and the other way round where the sides change places."""
    found = [float(end) for end in rank_sums(np.array(a), np.array(b), level)]
    assert min(x - y for x in a for y in b) <= found[0] <= found[1] <= max(x - y for x in a for y in b)
    assert [-end for end in reversed(found)] == pytest.approx(np.array(rank_sums(np.array(b), np.array(a), level)))


@pytest.mark.parametrize(("na", "nb"), [(2, 2), (3, 4), (5, 5), (4, 7)])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.9375])
def test_ranks_of_equal_sides_are_covered_as_often_as_said(na: int, nb: int, level: float) -> None:
    covered = 0
    orders = list(itertools.combinations(range(na + nb), na))
    for chosen in orders:
        a = np.array(chosen, dtype=float)
        b = np.array([place for place in range(na + nb) if place not in chosen], dtype=float)
        low, high = rank_sums(a, b, level)
        covered += low <= 0 <= high
    attained = covered / len(orders)
    assert attained >= min(level, rank_sum_level(na, nb, level)) - 1e-12
    assert attained <= level + 2 * max(0.1, 2 / math.comb(na + nb, na))


def test_rank_sums_of_many_runs_are_as_good_as_normal() -> None:
    """On both sides of the size above which the distribution is not counted any more."""
    rng = np.random.default_rng(3)
    widths = []
    for n in (20, 21):
        low, high = rank_sums(rng.normal(size=(1000, n)), rng.normal(size=(1000, n)), 0.9)
        assert 0.87 < np.mean((low <= 0) & (high >= 0)) < 0.93
        widths.append(np.mean(high - low))
    assert widths[0] == pytest.approx(widths[1], rel=0.06)


FACTORS = {(1, "x"): 1.0, (2, "x"): 1.1, (1, "y"): 2.0, (2, "y"): 2.2}


def test_a_repeat_that_lacks_a_combination_would_compare_something_else() -> None:
    combinations = [
        Combination(
            values={"a": a, "b": b},
            acting=frozenset("ab"),
            rates={("", repeat): rate for repeat in range(1 if (a, b) == (2, "y") else 2)},
        )
        for (a, b), rate in FACTORS.items()
    ]
    levels = levels_of(combinations, {"a": 2, "b": "x"})
    assert levels == {"a": [2, 1], "b": ["x", "y"]}
    logs = contrasts(combinations, levels)
    assert logs["a", 2, 1] == {("", 0): pytest.approx(-math.log(1.1))}


def test_a_key_has_no_effect_only_where_all_its_values_could_be_compared() -> None:
    equal = Verdict(outcome="equal", estimate=Estimate(1.0, 0.99, 1.01, 5, "Student t"), margin=0.02)
    pairs = [("a", 1, 2), ("a", 1, 3), ("a", 2, 3)]
    assert key_effect("a", [1, 2, 3], dict.fromkeys(pairs, equal)).outcome == "equal"
    assert key_effect("a", [1, 2, 3], {**dict.fromkeys(pairs, equal), pairs[2]: None}).outcome == "undecided"
    assert key_effect("a", [1, 2, 3], dict.fromkeys(pairs)).outcome == "insufficient"


def test_ends_are_those_of_students_t() -> None:
    generator = np.random.default_rng(3)
    for n in (5, 10):
        ratios = []
        for _ in range(20):
            logs = generator.normal(0, 0.05, n)
            found = resampled([dict(enumerate(np.exp(logs).tolist()))], centre="geometric mean", resamples=2000)
            low, high = np.log(np.percentile(found[:, 0], [2.5, 97.5]))
            ratios.append((high - low) / (2 * student_quantile(0.975, n - 1) * logs.std(ddof=1) / n**0.5))
        assert np.mean(ratios) == pytest.approx(1, abs=0.1)


def test_runs_of_one_repeat_are_drawn_together() -> None:
    """Drift that hits two points alike leaves their ratio alone; runs of different names are drawn apart."""
    drift = np.exp(np.random.default_rng(1).normal(0, 0.2, 6)).tolist()
    together = resampled([dict(enumerate(drift)), {k: 2 * v for k, v in enumerate(drift)}], centre="median")
    apart = resampled([dict(enumerate(drift)), {k + 10: 2 * v for k, v in enumerate(drift)}], centre="median")
    assert together[:, 1] / together[:, 0] == pytest.approx(2)
    assert np.ptp(apart[:, 1] / apart[:, 0]) > 0.2
    lost = resampled([dict(enumerate(drift)), {k: 2 * v for k, v in enumerate(drift[:-1])}], centre="geometric mean")
    assert np.corrcoef(np.log(lost).T)[0, 1] > 0.8


def test_few_runs_say_nothing_of_scatter() -> None:
    few: list[dict[int, float]] = [{0: 1.0, 1: 1.1, 2: 1.2}, dict(enumerate([1.0] * (LEAST_RUNS - 1)))]
    assert resampled(few, centre="median") is None
    assert resampled(few[:1], centre="median") is not None


SETTINGS, REPEATS, SCATTER = 15, 5, 0.02


def chosen(truth: list[float], generator: np.random.Generator) -> tuple[float, float, float, float]:
    """The true log gain of what looks best, and the low end, value and high end that are printed of it."""
    noise = generator.normal(0, SCATTER, (len(truth) + 1, REPEATS))
    logs = (np.array(truth)[:, None] + noise[1:] - noise[0]).tolist()
    best = max(range(len(logs)), key=lambda i: fmean(logs[i]))
    found = gain_of_best(logs, best)
    return truth[best], math.log(found.low), math.log(found.value), math.log(found.high)


@pytest.mark.parametrize(
    "truth", [[math.log(1.03)] * SETTINGS, [0.0] * 14 + [0.06], [0.0] * 59 + [0.06]], ids=["equal", "one", "one of 60"]
)
def test_the_interval_of_the_best_holds_its_true_gain(truth: list[float]) -> None:
    """Student's t alone holds it in 87 % where all are equal; shrinkage toward the mean in half where one is not."""
    generator = np.random.default_rng(1)
    found = [chosen(truth, generator) for _ in range(250)]
    assert fmean(low <= true <= high for true, low, _, high in found) >= 0.94
    assert fmean(value - true for true, _, value, _ in found) < 0.01  # what was measured of equals flatters by 0.015


def test_one_setting_alone_has_students_interval() -> None:
    logs = [0.01, 0.03, 0.02, 0.05, 0.04]
    found = gain_of_best([logs], 0)
    error = math.sqrt(0.00025 / 5) * 2.776445
    assert found.value == pytest.approx(math.exp(0.03))
    assert (found.low, found.high) == (pytest.approx(math.exp(0.03 - error)), pytest.approx(math.exp(0.03 + error)))
    assert (found.n, found.kind, found.level) == (5, "Student t", 0.95)


def test_too_few_pairs_have_none() -> None:
    with pytest.raises(ValueError, match="fewer than 5"):
        gain_of_best([[0.1] * 5, [0.2] * 4], 1)


ends = st.floats(-10, 10)


def estimate(low: float, high: float, n: int = 5) -> Estimate:
    return Estimate((low + high) / 2, low, high, n, "range" if n < 5 else "Student t")


@given(ends, ends, ends, ends)
def test_a_verdict_needs_the_whole_interval(a: float, b: float, c: float, d: float) -> None:
    (low, high), (begin, end) = sorted((a, b)), sorted((c, d))
    found = placed(estimate(low, high), begin, end)
    sides = {"below" if value < begin else "above" if value > end else "within" for value in (low, high)}
    assert found == (sides.pop() if len(sides) == 1 else "undecided")


@pytest.mark.parametrize(
    ("low", "high", "p", "outcome"),
    [
        (0.99, 1.01, None, "equal"),
        (1.005, 1.03, 0.04, "better"),
        (1.005, 1.03, 0.06, "undecided"),
        (0.95, 0.99, 0.04, "worse"),
        (0.97, 1.03, 0.04, "undecided"),
    ],
)
def test_a_difference_needs_the_interval_and_the_family(low: float, high: float, p: float, outcome: str) -> None:
    found = judge(estimate(low, high), 0.02, centre=1.0, none_at=1.0, adjusted_p=p)
    assert (found.outcome, found.units_wanted) == (outcome, 10)
    few = judge(estimate(low, high, n=4), 0.02, centre=1.0, none_at=1.0, adjusted_p=p, higher_is_worse=True)
    assert (few.outcome, few.units_wanted) == ("insufficient", 5)


def test_a_single_run_decides_nothing() -> None:
    assert placed(Estimate(2.0, None, None, 1, "single run"), 0.0, 1.0) == "insufficient"


def test_without_a_value_of_no_difference_the_whole_interval_must_leave_the_margin() -> None:
    outcomes = [judge(estimate(low, 0.03), 0.02, higher_is_worse=True).outcome for low in (0.015, 0.021)]
    assert outcomes == ["undecided", "worse"]


def test_two_tests_and_the_tests_of_equivalence_decide() -> None:
    within, beyond = (0.99, 1.01), (0.99, 1.03)
    assert judge_tests(0.01, 1.0, (0.01, 0.01), within, 1.02) == "worse"
    assert judge_tests(1.0, 0.01, (0.01, 0.01), within, 1.02) == "better"
    assert judge_tests(1.0, 0.02, (0.01, 0.01), within, 1.02) == "equal"
    assert judge_tests(1.0, 0.02, (0.01, 0.01), beyond, 1.02) == "undecided"
    assert judge_tests(1.0, 0.02, (0.01, 0.01), (1.0, 1.0), 1.0) == "undecided"  # a floor has no equivalence


def test_a_family_counts_what_is_the_same_once_and_claims_nothing_of_four_pairs() -> None:
    logs = {("", repeat): 0.1 + 0.001 * repeat for repeat in range(5)}
    few = dict(list(logs.items())[:4])
    family = family_of([logs, {key: -value for key, value in logs.items()}, few, {}])
    assert family.size == 2
    assert family.adjusted_p(logs) < LEVEL < family.adjusted_p(few) == 1
    assert family.judge({}, 0.02) is None
    assert family.judge(few, 0.02).outcome == "insufficient"


@pytest.mark.parametrize("comparisons", [1, 15, 100])
@pytest.mark.parametrize("scatter", [0.01, 0.02, 0.05])
def test_advised_repeats_are_the_fewest_that_reach_the_power(scatter: float, comparisons: int) -> None:
    """Against scipy's non-central t. The normal approximation gave 15 repeats and 62 % at a scatter of 2 % of 15."""

    def power(pairs: int) -> float:
        critical = stats.t.ppf(1 - LEVEL / (2 * comparisons), pairs - 1)
        return float(stats.nct.sf(critical, pairs - 1, math.sqrt(pairs) * math.log(1.02) / scatter))

    found = repeats_for(scatter, 0.02, comparisons)
    assert power(found) >= POWER - 1e-3
    assert power(found - 1) < POWER + 1e-3


def test_a_scatter_known_from_few_runs_asks_for_more() -> None:
    known, guessed = (repeats_for(0.02, 0.02, 15, freedom) for freedom in (None, 4))
    assert guessed > known
    assert repeats_for(0.02, 0.02, 15, 10_000) == pytest.approx(known, abs=1)
