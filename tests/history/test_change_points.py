"""Change points of nightly histories: found where planted, nothing found where nothing is, honest about few nights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from scipy.special import logsumexp

from dlbench.history.change_points import (
    MAX_OUTLIERS,
    MIN_EFFECT,
    MIN_EVIDENCE,
    MIN_NIGHTS,
    MIN_SEGMENT,
    NAMED,
    ChangePoint,
    Segment,
    described,
    detect,
    detect_together,
    newest,
    segments,
)

Array = npt.NDArray[np.float64]


def nights(
    seed: int | Sequence[int], count: int, steps: Sequence[tuple[int, float]] = (), scatter: float = 0.02
) -> list[float]:
    """Values around 0.1 s, from each place on times a factor."""
    logs = np.random.default_rng(seed).normal(0, scatter, count)
    for place, factor in steps:
        logs[place:] += math.log(factor)
    return list(0.1 * np.exp(logs))


def change_points(values: Sequence[float], min_effect: float = MIN_EFFECT) -> list[ChangePoint]:
    return described(values, detect(values, min_effect=min_effect))


def test_planted_steps_are_found_with_their_size() -> None:
    values = nights(1, 160, [(50, 1.05), (110, 0.93)])
    found = change_points(values)
    assert len(found) == 2
    for point, place, factor in zip(found, (50, 110), (1.05, 0.93), strict=True):
        assert abs(point.index - place) <= 5
        assert point.earliest <= place <= point.latest
        assert point.ratio.low <= factor <= point.ratio.high
        assert point.ratio.kind == "rank sums"
        assert point.evidence >= MIN_EVIDENCE
        assert point.shape != "drift"
    assert found[0].before.start == 0
    assert found[0].after == found[1].before
    assert found[1].after.end == 160


@pytest.mark.parametrize("seed", range(3))
def test_a_step_behind_a_drift_has_a_date_of_its_own(seed: int) -> None:
    """The night before it is one of the drift, and the first night after it is one of the new level."""
    logs = np.random.default_rng(seed).normal(0, 0.01, 140)
    logs[40:80] += np.linspace(0, math.log(1.15), 40)
    found = change_points(list(0.1 * np.exp(logs)))
    assert [point.shape == "drift" for point in found] == [True, False]
    assert found[-1].earliest <= found[-1].index == 80 <= found[-1].latest


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_found_where_nothing_changed(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    heavy = 0.1 * np.exp(0.012 * generator.standard_t(3, 200))
    assert change_points(nights(seed, 200)) == []
    assert change_points(list(heavy)) == []


@pytest.mark.parametrize("length", range(1, MAX_OUTLIERS + 1))
@pytest.mark.parametrize("factor", [1.5, 0.6, 10.0])
def test_few_odd_nights_are_no_change(length: int, factor: float) -> None:
    values = nights(3, 80)
    for night in range(40, 40 + length):
        values[night] *= factor
    assert change_points(values) == []


def among_slow(seed: int, count: int, steps: Sequence[tuple[int, float]] = (), factor: float = 1.2) -> list[float]:
    """Nights of which every fourth, by chance, is slower; the others scatter by 1 %."""
    is_slow = np.random.default_rng([seed, 4]).random(count) < 0.25
    return list(np.where(is_slow, factor, 1.0) * nights([seed, 5], count, steps, scatter=0.01))


@pytest.mark.parametrize("factor", [1.3, 0.85])
def test_a_share_of_odd_nights_is_no_change_however_often_it_is_looked_at(factor: float) -> None:
    """One night in four: by the height of the nights alone every third history showed a change or a drift."""
    alarms = 0
    for seed in range(20):
        values = among_slow(seed, 110, factor=factor)
        alarms += any(detect(values[:seen]) for seen in range(14, 111, 8))
    assert alarms <= 1


def test_a_level_among_odd_nights_is_found() -> None:
    """All nights are slow from the 80th on, by less than the odd nights before, or by as much: seen after 20 nights."""
    for factor in (1.1, 1.2):
        found = [detect(among_slow(seed, 100, [(80, factor)])) for seed in range(10)]
        assert sum(any(abs(one.index - 80) <= 5 for one in changes) for changes in found) >= 7


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


def brute_evidence(values: Sequence[float]) -> float:
    """By definition: densities of the nights with a step anywhere and with none, every unknown summed out by hand."""
    logs = np.log(values)
    n = len(logs)
    scale = float(np.median(np.abs(np.diff(logs)))) / (0.67449 * math.sqrt(2))
    y = (logs - np.median(logs)) / scale
    rs = np.linspace(0, 0.95, 20)
    changed, unchanged = rs**9 * (1 - rs) ** 9, 1 + 4 * rs
    changed[0] = 0.01**9
    scales = np.exp(np.linspace(-4, 4, 400))

    def density(covariance: Array) -> float:
        # The level has a normal prior so wide that its width cancels.
        whole = covariance + 1e7
        sign, size = np.linalg.slogdet(whole)
        assert sign > 0
        square = float(y @ np.linalg.solve(whole, y))
        return float(logsumexp(-(n - 1) * np.log(scales) - size / 2 - square / 2 / scales**2))

    moods = [toeplitz(r ** np.arange(n)) for r in rs]
    without = [density(one) for one in moods]
    steps = [np.arange(n) >= place for place in range(MIN_SEGMENT, n - MIN_SEGMENT + 1)]
    with_step = [[density(one + 2.0 * np.outer(step, step)) for step in steps] for one in moods]
    upper = logsumexp(np.array(with_step) + np.log(changed / changed.sum())[:, None])
    return float(upper - logsumexp(np.array(without) + np.log(unchanged / unchanged.sum())))


def test_the_evidence_is_a_bayes_factor() -> None:
    """No night of these is drawn in: they lie within three scatters of the nights around them."""
    values = [1.0, 1.03, 1.01, 1.035, 1.02, 1.015, 1.04, 1.06, 1.055, 1.07, 1.032, 1.065, 1.08, 1.045]
    (found,) = detect(values, evidence=1.0)
    assert math.log(found.evidence) == pytest.approx(brute_evidence(values), abs=0.02)


# Slow changes


def drifting(seed: int, count: int, begin: int, correlation: float, total: float = 0.1) -> list[float]:
    """Level 0.1 s, from `begin` on rising evenly by `total` to the last night; scatter 2 %."""
    rise = math.log1p(total) * np.clip((np.arange(count) - begin) / (count - 1 - begin), 0, 1)
    return list(np.array(moods([seed], count, correlation, 0.02)) * np.exp(rise))


@pytest.mark.parametrize(("begin", "correlation"), [(0, 0.0), (0, 0.5), (60, 0.0)])
def test_a_slow_drift_is_no_dated_step(begin: int, correlation: float) -> None:
    """10 % over 120 nights was told as dated steps, with commits beside them, in 15 of 15."""
    found = [change_points(drifting(seed, begin + 120, begin, correlation)) for seed in range(15)]
    shapes = [point.shape for points in found for point in points]
    assert "step" not in shapes
    assert shapes.count("drift") >= 10
    for points in found:
        for point in points:
            if point.shape == "drift":
                assert point.ratio.low > 1.02
                assert point.after.end - point.index >= 40
                assert point.after.rise > 0


def test_a_step_is_no_drift() -> None:
    found = [detect(nights(seed, 120, [(60, 1.1)])) for seed in range(15)]
    shapes = [one.shape for changes in found for one in changes]
    assert len(shapes) == 15
    assert shapes.count("step") >= 13
    assert "drift" not in shapes


def test_a_weak_step_among_nights_that_resemble_each_other_is_found() -> None:
    """3 % at 2 % scatter and autocorrelation 0.5, 30 nights on: with rank sums 25 % ever, in 60 nights."""
    hits = 0
    for seed in range(20):
        values = np.array(moods([seed, 3], 150, 0.5, 0.02))
        values[120:] *= 1.03
        hits += any(one.index >= 110 for one in detect(list(values)))
    assert hits >= 13


@given(st.lists(st.floats(0.5, 2.0), min_size=0, max_size=60), st.floats(1e-6, 1e6))
def test_units_do_not_matter_and_points_are_in_order(values: list[float], unit: float) -> None:
    found = [one.index for one in detect(values)]
    # Rounding of a product may part values that were equal.
    exact = 2.0 ** round(math.log2(unit))
    assert [one.index for one in detect([value * exact for value in values])] == found
    ends = [0, *found, len(values)]
    assert all(after - before >= MIN_SEGMENT for before, after in pairwise(ends)) or not found
    pieces = segments(values, detect(values))
    assert [piece.start for piece in pieces][:1] == ends[: min(1, len(values))]
    assert all(before.end == after.start for before, after in pairwise(pieces))


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_history_backwards_has_the_same_changes(seed: int) -> None:
    values = nights(seed, 60, [(25, 1.2)], scatter=0.01)
    forwards = [one.index for one in detect(values)]
    assert [60 - one.index for one in detect(values[::-1])][::-1] == forwards == [25]


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
    """What is just evidence enough alone is none among twenty histories; what is clear stays, and costs as much."""
    quiet = [nights([30, seed], 40) for seed in range(20)]
    weak = next(
        values
        for values in (nights(seed, 40, [(25, 1.04)]) for seed in range(100, 400))
        if len(found := detect(values)) == 1 and found[0].evidence < 4 * MIN_EVIDENCE
    )
    clear = nights(1, 40, [(20, 1.3)])
    ((alone,),) = detect_together([weak])
    assert alone == detect(weak)[0]
    together = detect_together([weak, clear, *quiet])
    assert together[0] == []
    ((one,),) = (together[1],)
    assert one.index == 20
    assert one.evidence == pytest.approx(detect(clear)[0].evidence / 22)
    assert together[2:] == [[]] * 20


# The newest nights


def test_a_single_newest_night_asks_to_wait() -> None:
    values = [*nights(11, 40), 0.125]
    told = newest(values)
    assert told.num_outside == 1
    assert told.ratio == pytest.approx(1.25, rel=0.02)
    assert told.low < 0.1 < told.high < 0.125
    assert told.wait_for == MIN_SEGMENT - 1


def test_an_ordinary_newest_night_is_ordinary() -> None:
    told = newest([*nights(11, 40), 0.1])
    assert (told.num_outside, told.wait_for) == (0, 0)


@pytest.mark.parametrize("freedom", [2, 100])
@pytest.mark.parametrize("count", [12, 30])
def test_ordinary_nights_are_named_no_more_often_than_is_said(count: int, freedom: int) -> None:
    """Of Student's t with 2 degrees of freedom 3 to 6 % used to be named."""
    generator = np.random.default_rng(31)
    named = 0
    for _ in range(150):
        told = newest(list(0.1 * np.exp(0.02 * generator.standard_t(freedom, count))))
        named += told.num_outside > 0
    assert named / 150 <= 2.7 * NAMED


def test_the_usual_range_of_a_drift_goes_on_with_it() -> None:
    values = drifting(1, 140, 0, 0.0, total=0.3)
    (found,) = detect(values)
    last = segments(values, [found])[-1]
    told = newest(values, last)
    assert told.num_outside == 0
    assert told.low > newest(values, Segment(start=0, end=140, level=last.level)).low


def test_an_odd_night_of_old_does_not_hide_a_new_one() -> None:
    values = [*nights(12, 40), 0.13]
    values[11] *= 3
    assert newest(values).num_outside == 1


def test_too_few_nights_before_the_newest_say_nothing() -> None:
    assert newest(nights(1, MIN_SEGMENT)) is None
    assert newest([]) is None


def test_the_wait_ends_in_a_change_point() -> None:
    values = nights(13, 60)
    waits = []
    while not detect(values):
        values.append(0.115 + 0.0005 * (len(values) % 3))
        told = newest(values)
        waits.append(told.wait_for)
    assert waits[:4] == [4, 3, 2, 1]
    assert len(waits) in (4, 5, 6)


def test_a_step_is_found_after_a_drift_too_small_to_tell() -> None:
    values = [1.0 + 0.01 * (night % 2) + 1e-5 * night for night in range(100)] + [
        1.5 + night / 100 for night in range(6)
    ]
    assert [one.index for one in detect(values)] == [100]
