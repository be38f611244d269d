"""Estimates: values with intervals that cover what they say, and that a lost run does not move."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.report.wording import basis_text
from dlbench.stats.estimates import (
    Estimate,
    difference_estimate,
    difference_p,
    geometric_mean_estimate,
    mean_estimate,
    median_estimate,
    placed,
    places,
    ratio_estimate,
)
from dlbench.stats.pairing import KnownKey, RunKey, pairing


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
