"""Large batches across groups: epochs and time over the batch, the law of the noise scale, rates that diverged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlbench.analysis.table import tabulate
from dlbench.records.scan import scan
from dlbench.specs.plan import RunPlan
from dlbench.views.quality.numbers import LargeBatch, large_batches
from dlbench.views.quality.view import batch_verdict
from tests.support.run_factory import Story, Training, constant, quality_plans, write_run

BATCHES = {"train.batch_per_rank": (4, 8, 16), "train.optimizer.learning_rate": (0.1, 0.8)}
EVALUATIONS = {(4, 0.1): 4, (8, 0.1): 5, (8, 0.8): 6, (16, 0.1): 8, (16, 0.8): 6}
"""Until the target, 80 samples apart, half an epoch; the greatest rate diverges at the smallest batch."""


def write(out: Path, ends: dict[tuple[int, float], int] = EVALUATIONS, **request: Any) -> None:
    for plan in quality_plans(**{"points": (1,), "sweep": BATCHES, **request}):
        train = plan.workload.train
        count = ends.get((plan.global_batch, train.optimizer.learning_rate))
        values = (0.1, None) if count is None else (*[0.1] * (count - 1), 0.9)
        drift = 1 + 0.01 * plan.series.repeat
        story = Story(training=Training(values=values), state="invalid" if count is None else "valid")
        story.of_rank = lambda rank, count=count: {"losses_finite": count is not None}
        write_run(out, plan, constant([0, 0, 0, 20 * train.batch_per_rank * drift, 0, 0]), story)


def found_in(out: Path) -> LargeBatch:
    (found,) = large_batches(tabulate(scan(out)))
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("batches")
    write(out)
    return out


def test_epochs_and_time_stand_over_the_batch_across_groups(swept: Path) -> None:
    points = found_in(swept).points
    assert [(one.global_batch, one.learning_rate) for one in points] == [(b, r) for b in (4, 8, 16) for r in (0.1, 0.8)]
    assert [one.epochs and round(one.epochs.value, 6) for one in points] == [2, None, 2.5, 3, 4, 3]
    # Of several rates the one that needed fewest epochs stands for its batch.
    assert [one.is_best for one in points] == [True, False, True, False, False, True]
    assert [one.ratio and round(one.ratio.value, 6) for one in points] == [None, None, 1.25, 1.5, 2, 1.5]
    by_hand = 1.0
    for repeat in range(5):
        by_hand *= (5 * (80 * 0.02 * (1 + 0.01 * repeat) + 0.5)) ** 0.2
    assert points[2].time is not None
    assert points[2].time.value == pytest.approx(by_hand)
    assert points[2].ratio is not None
    assert points[2].ratio.n == 5
    assert "of several rates the best by these same runs: the interval is not corrected, certainty is" in batch_verdict(
        found_in(swept)
    )
    assert "for certain" not in batch_verdict(found_in(swept))


def test_the_critical_batch_of_the_noise_scale_stands_beside(tmp_path: Path) -> None:
    """With B_n = 8 samples: E(16) / E(4) = (1 + 2) / (1 + 1/2) = 2."""
    write(tmp_path)
    noise = {"gradient_norm2": 1.0, "covariance_trace": 8.0, "small_batch": 4, "large_batch": 8, "steps": 10}
    for plan in quality_plans(points=(2,), overrides={"measure.noise_scale": True}, series="noise"):
        record = {"noise_scale": {**noise, "noise_scale": 8.0}}
        write_run(tmp_path, plan, constant([0, 0, 0, 10, 0, 0]), Story(training=Training(values=(0.9,)), record=record))
    found = found_in(tmp_path)
    assert found.critical is not None
    assert found.critical.value == pytest.approx(8)
    assert found.points[-1].expected is not None
    assert found.points[-1].expected.value == pytest.approx(2)
    assert "critical batch by the gradient noise scale: 8" in batch_verdict(found)


def test_ranks_that_share_a_batch_and_ranks_that_enlarge_it_are_one_set(tmp_path: Path) -> None:
    """Weak scaling from 4 to 8, and 8 on one rank in another series."""

    def ends(plan: RunPlan) -> int:
        return 4 if plan.global_batch == 4 else 6

    for request in ({"points": (1, 2)}, {"points": (1,), "sweep": {"train.batch_per_rank": (8,)}, "series": "s2"}):
        for plan in quality_plans(repeats=3, **request):
            story = Story(training=Training(values=(*[0.1] * (ends(plan) - 1), 0.9)))
            write_run(tmp_path, plan, constant([0, 0, 0, 50, 0, 0]), story)
    points = found_in(tmp_path).points
    assert [(one.global_batch, one.ranks) for one in points] == [(4, 1), (8, 1), (8, 2)]
    assert [one.ratio and one.ratio.value for one in points] == [None, pytest.approx(1.5), pytest.approx(1.5)]
