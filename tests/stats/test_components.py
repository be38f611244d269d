"""Scatter between groups and within them."""

from __future__ import annotations

import numpy as np
import pytest

from dlbench.stats.estimates import between_and_within


def test_both_scatters_are_found_again() -> None:
    rng = np.random.default_rng(1)
    groups = [(rng.normal(0, 0.03) + rng.normal(0, 0.01, rng.integers(2, 9))).tolist() for _ in range(400)]
    assert between_and_within(groups) == pytest.approx((0.03, 0.01), rel=0.08)


def test_equal_groups_of_equal_size_by_hand() -> None:
    """Means 1 and 3, squares of 4 x 0.25 within two degrees of freedom: (2 - 0.5 / 2)^0.5 and 0.5^0.5."""
    assert between_and_within([[0.5, 1.5], [2.5, 3.5]]) == pytest.approx((1.75**0.5, 0.5**0.5))
    assert between_and_within([[1.0, 3.0], [1.5, 2.5]]) == pytest.approx((0.0, 1.25**0.5))
