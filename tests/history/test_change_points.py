"""Change points of nightly histories: found where planted, nothing found where nothing is, honest about few nights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.history.trends.change_points import (
    LEVEL,
    MIN_EFFECT,
    MIN_NIGHTS,
    NAMED,
    ODD_NIGHTS,
    change_points,
    detect,
    detect_together,
    newest,
    nights_needed,
    segments,
)
from dlbench.history.trends.rank_sums import MIN_SEGMENT, p_value, rank_sums, ranks_of

Array = npt.NDArray[np.float64]


def nights(
    seed: int | Sequence[int], count: int, steps: Sequence[tuple[int, float]] = (), scatter: float = 0.02
) -> list[float]:
    """Values around 0.1 s, from each place on times a factor."""
    logs = np.random.default_rng(seed).normal(0, scatter, count)
    for place, factor in steps:
        logs[place:] += math.log(factor)
    return list(0.1 * np.exp(logs))


def test_planted_steps_are_found_with_their_size() -> None:
    values = nights(1, 160, [(50, 1.05), (110, 0.93)])
    found = change_points(values)
    assert len(found) == 2
    for point, place, factor in zip(found, (50, 110), (1.05, 0.93), strict=True):
        assert abs(point.index - place) <= 5
        assert point.earliest <= place <= point.latest
        assert point.ratio.low is not None
        assert point.ratio.high is not None
        assert point.ratio.low <= factor <= point.ratio.high
        assert point.ratio.kind == "rank sums"
        assert 0 < point.p <= LEVEL
    assert found[0].before.start == 0
    assert found[0].after == found[1].before
    assert found[1].after.end == 160


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_found_where_nothing_changed(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    heavy = 0.1 * np.exp(0.012 * generator.standard_t(3, 200))
    assert change_points(nights(seed, 200)) == []
    assert change_points(list(heavy)) == []


@pytest.mark.parametrize("length", range(1, ODD_NIGHTS + 1))
@pytest.mark.parametrize("factor", [1.5, 0.6, 10.0])
def test_few_odd_nights_are_no_change(length: int, factor: float) -> None:
    values = nights(3, 80)
    for night in range(40, 40 + length):
        values[night] *= factor
    assert change_points(values) == []


def test_a_short_episode_is_two_changes() -> None:
    found = change_points(nights(4, 100, [(40, 1.1), (52, 1 / 1.1)]))
    assert [abs(point.index - place) <= 2 for point, place in zip(found, (40, 52), strict=True)] == [True, True]


def test_autocorrelated_nights_are_not_taken_for_changes() -> None:
    """First-order autoregression of 0.5: a test that takes nights for independent is wrong in every second history."""
    alarms = 0
    for seed in range(30):
        noise = np.random.default_rng(seed).normal(0, 0.02, 250)
        course = np.zeros(250)
        for night in range(1, 250):
            course[night] = 0.5 * course[night - 1] + noise[night]
        alarms += bool(detect(list(np.exp(course[50:]))))
    assert alarms <= 3


def test_large_steps_are_found_in_autocorrelated_nights() -> None:
    found = change_points([1.0 + 1e-9 * math.sin(night) + 0.06 * (night >= 13) for night in range(28)])
    assert [point.index for point in found] == [13]


def test_levels_closer_than_the_least_effect_are_one() -> None:
    values = nights(5, 300, [(150, 1.012)], scatter=0.002)
    assert change_points(values) == []
    assert [point.index for point in change_points(values, min_effect=0.005)] == [150]
    assert math.log(1.012) < math.log1p(MIN_EFFECT)


def test_too_few_nights_say_nothing() -> None:
    clear = [1.0 + night / 1000 for night in range(6)] + [2.0 + night / 1000 for night in range(6)]
    assert len(clear) == MIN_NIGHTS
    assert [point.index for point in change_points(clear)] == [6]
    assert change_points(clear[:-1]) == []
    assert change_points([]) == []


def brute_p(values: Sequence[float], place: int) -> float:
    """By definition: how often shuffled nights have a place with as clear a rank sum."""
    n = len(values)

    def clearness(order: Sequence[int], k: int) -> float:
        return float(abs(sum(order[:k]) - k * (n + 1) / 2) / math.sqrt(k * (n - k) * (n + 1) / 12))

    ranks = [sorted(values).index(value) + 1 for value in values]
    seen = clearness(ranks, place)
    generator = np.random.default_rng(7)
    splits = range(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    shuffled = (list(generator.permutation(ranks)) for _ in range(5_000))
    return float(np.mean([max(clearness(order, k) for k in splits) >= seen - 1e-9 for order in shuffled]))


def test_p_is_that_of_permutations() -> None:
    values = [1.0, 1.3, 1.1, 1.35, 1.2, 1.15, 1.5, 1.6, 1.55, 1.7, 1.32, 1.65, 1.8, 1.45]
    ((place, p),) = detect(values, level=1.0)
    assert place == 6
    plain = p_value(float(rank_sums(ranks_of(np.array(values)))[6 - MIN_SEGMENT]), len(values))
    assert plain == pytest.approx(brute_p(values, 6), abs=0.01)
    # So few nights may resemble their neighbours for all that they say.
    assert p > plain


def test_the_smallest_p_of_twelve_nights_is_two_arrangements() -> None:
    """Six low nights, then six high ones, or the other way round: 2 of C(12, 6) arrangements."""
    clear = [1.0 + night / 1000 for night in range(6)] + [2.0 + night / 1000 for night in range(6)]
    exact = 2 / len(list(combinations(range(12), 6)))
    assert detect(clear)[0][1] == pytest.approx(exact, abs=0.002)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=0, max_size=60),
    st.floats(1e-6, 1e6),
)
def test_units_do_not_matter_and_points_are_in_order(values: list[float], unit: float) -> None:
    found = [index for index, _ in detect(values)]
    # Rounding of a product may part values that were equal.
    exact = 2.0 ** round(math.log2(unit))
    assert [index for index, _ in detect([value * exact for value in values])] == found
    ends = [0, *found, len(values)]
    assert all(after - before >= MIN_SEGMENT for before, after in pairwise(ends)) or not found
    pieces = segments(values, found)
    assert [piece.start for piece in pieces] == ends[: len(pieces)]


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_history_backwards_has_the_same_changes(seed: int) -> None:
    values = nights(seed, 60, [(25, 1.2)], scatter=0.01)
    forwards = [index for index, _ in detect(values)]
    assert [60 - index for index, _ in detect(values[::-1])][::-1] == forwards == [25]


def test_equal_histories_give_equal_numbers() -> None:
    values = nights(9, 90, [(30, 1.06)])
    assert change_points(values) == change_points(list(values))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_values_must_be_positive_and_finite(wrong: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        detect([*([1.0] * 20), wrong])


def test_equal_nights_have_no_change() -> None:
    assert change_points([0.1] * 50) == []


def test_rounded_nights_change_where_they_change() -> None:
    values = [0.1] * 20 + [0.11] * 20
    assert [point.index for point in change_points(values)] == [20]


# Several histories, and nights that resemble their neighbours


def moods(seed: Sequence[int], count: int, correlation: float, scatter: float) -> list[float]:
    """A level of 0.1 s; each night hands on so much of its deviation."""
    shocks = np.random.default_rng(seed).normal(0, scatter, count)
    shocks[1:] *= math.sqrt(1 - correlation**2)
    for night in range(1, count):
        shocks[night] += correlation * shocks[night - 1]
    return list(0.1 * np.exp(shocks))


def test_a_history_without_change_is_silent_however_often_it_is_looked_at() -> None:
    """Autocorrelation 0.5, looked at every fourth night to 60: where nearly all false alarms used to be, 4 of 20."""
    alarms = 0
    for seed in range(20):
        values = moods([seed], 60, 0.5, 0.03)
        alarms += any(detect(values[:seen]) for seen in range(12, 61, 4))
    assert alarms <= 1


def test_of_many_histories_each_must_be_clearer() -> None:
    """One p just below the level is nothing among twenty histories; what is clear stays, with its p adjusted."""
    level = 0.005
    quiet = [nights([30, seed], 40) for seed in range(20)]
    weak = next(
        values
        for values in (nights(seed, 40, [(25, 1.03)]) for seed in range(100, 300))
        if len(found := detect(values)) == 1 and level / 4 < found[0][1] <= level
    )
    clear = nights(1, 40, [(20, 1.3)])
    ((alone,),) = detect_together([weak])
    assert alone == detect(weak)[0]
    together = detect_together([weak, clear, *quiet])
    assert together[0] == []
    ((place, p),) = together[1]
    assert place == 20
    assert detect(clear)[0][1] < p <= level
    assert together[2:] == [[]] * 20


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1_000), min_size=1, max_size=6), st.integers(0, 3))
def test_together_nothing_is_found_that_is_not_found_alone(seeds: list[int], changes: int) -> None:
    histories = [nights(seed, 60, [(30, 1.05)] if number < changes else []) for number, seed in enumerate(seeds)]
    for values, found in zip(histories, detect_together(histories), strict=True):
        assert len(found) <= len(detect(values))
        assert all(p <= LEVEL for _, p in found)
    assert detect_together([]) == []


# The newest nights


def test_a_single_newest_night_asks_to_wait() -> None:
    values = [*nights(11, 40), 0.125]
    told = newest(values)
    assert told is not None
    assert told.num_beyond == 1
    assert told.ratio == pytest.approx(1.25, rel=0.02)
    assert told.low < 0.1 < told.high < 0.125
    assert told.wait_for == nights_needed(40) - 1


def test_an_ordinary_newest_night_is_ordinary() -> None:
    told = newest([*nights(11, 40), 0.1])
    assert told is not None
    assert (told.num_beyond, told.wait_for) == (0, 0)


@pytest.mark.parametrize("count", [6, 12, 30])
def test_ordinary_nights_are_named_as_often_as_is_said(count: int) -> None:
    """The median and 3 scaled deviations named 15, 5 and 1.5 % of them."""
    named = 0
    for seed in range(600):
        told = newest(nights([31, seed], count))
        assert told is not None
        named += told.num_beyond > 0
    assert 0.2 * NAMED <= named / 600 <= 2 * NAMED


def test_an_odd_night_of_old_does_not_hide_a_new_one() -> None:
    values = [*nights(12, 40), 0.13]
    values[11] *= 3
    told = newest(values)
    assert told is not None
    assert told.num_beyond == 1


def test_too_few_nights_before_the_newest_say_nothing() -> None:
    assert newest(nights(1, MIN_SEGMENT)) is None
    assert newest([]) is None


@pytest.mark.parametrize("before", [5, 8, 12, 30, 100])
def test_nights_needed_are_enough_and_no_fewer_are(before: int) -> None:
    def course(count: int) -> list[float]:
        return nights(21, before + count, [(before, 1.5)])

    needed = nights_needed(before)
    assert [index for index, _ in detect(course(needed))] == [before]
    assert detect(course(needed - 1)) == []


def test_the_wait_ends_in_a_change_point() -> None:
    values = nights(13, 60)
    waits = []
    while not detect(values):
        values.append(0.115 + 0.0005 * (len(values) % 3))
        told = newest(values)
        assert told is not None
        waits.append(told.wait_for)
    assert waits[:4] == [4, 3, 2, 1]
    assert len(waits) in (5, 6)


def test_a_step_is_found_after_a_drift_too_small_to_tell() -> None:
    values = [1.0 + 0.01 * (night % 2) + 1e-5 * night for night in range(100)] + [
        1.5 + night / 100 for night in range(6)
    ]
    assert [index for index, _ in detect(values)] == [100]
