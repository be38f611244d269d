"""Rank sums: intervals that hold whatever the shape of the noise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.stats.estimates import rank_sum_level, rank_sums


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
