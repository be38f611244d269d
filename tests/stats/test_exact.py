"""Exact intervals: those values that the exact test does not reject, nothing else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.stats.exact import rank_sum_level, rank_sums, range_level, sign_flips

values = st.lists(st.integers(-1000, 1000).map(lambda n: n / 7), min_size=2, max_size=8)


def _flip_p(data: list[float], centre: float) -> float:
    """Two-sided p of the sign-flip test: how often flipped deviations sum to as much as they do."""
    deviations = [value - centre for value in data]
    sums = [
        abs(sum(sign * d for sign, d in zip(signs, deviations, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(data))
    ]
    return sum(one >= abs(sum(deviations)) - 1e-9 for one in sums) / len(sums)


@settings(max_examples=60, deadline=None)
@given(data=values, level=st.sampled_from([0.5, 0.9, 0.9375, 0.95]))
def test_the_sign_flip_interval_holds_what_the_test_does_not_reject(data: list[float], level: float) -> None:
    low, high = sign_flips(np.array(data), level)
    within = (max(data) - min(data)) * 1e-6 + 1e-9
    for outside in (float(low) - within, float(high) + within):
        # The range is all that so few runs can bound.
        assert _flip_p(data, outside) <= max(1 - level, 1 - range_level(len(data))) + 1e-12
    if high - low > 4 * within:
        assert all(_flip_p(data, inside) > 1 - level for inside in (float(low) + within, float(high) - within))


@pytest.mark.parametrize("n", [11, 16, 20])
def test_some_subsets_of_many_runs_keep_the_level(n: int) -> None:
    """Above ten runs not all subsets are taken; for symmetric noise the level is still the one asked for."""
    low, high = sign_flips(np.random.default_rng(n).standard_t(3, (4000, n)), 0.9)
    assert 0.885 < np.mean((low <= 0) & (high >= 0)) < 0.915


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
    for places in orders:
        a = np.array(places, dtype=float)
        b = np.array([place for place in range(na + nb) if place not in places], dtype=float)
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
