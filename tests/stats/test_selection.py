"""The best of many settings: what is printed of its gain holds the true one, however it was chosen."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest

from dlbench.stats.estimates import gain_of_best

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
