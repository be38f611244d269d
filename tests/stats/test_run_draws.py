"""Runs drawn again: as wide as Student's t, drift cancels, what is lost is not made up."""

from __future__ import annotations

import numpy as np
import pytest

from dlbench.stats.multiplicity import student_quantile
from dlbench.stats.resampling import LEAST_RUNS, resampled


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
