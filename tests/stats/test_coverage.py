"""The cheap form of `make bench AREA=truth.intervals`: fewer trials, and room for what they cannot tell."""

from __future__ import annotations

import pytest

from benchmarks.truth.intervals import KINDS, NOISES, agreement, attained

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
