"""Seconds of warm-up and measurement become numbers of steps that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dlbench.node.step_schedule import HELD_STEPS, WATCHED_STEPS, Pacing, StepSchedule, plan_schedule
from tests.support.run_factory import plans


def course_of(*, on_gpu: bool = False, first: int = 0, **seconds: Any) -> StepSchedule:
    overrides = {f"measure.{key}": value for key, value in seconds.items()}
    (plan,) = plans(points=(1,), repeats=1, overrides=overrides)
    return plan_schedule(plan, first=first, batches_per_epoch=None, on_gpu=on_gpu)


def run(
    course: StepSchedule, step_s: Callable[[int], float], others: Sequence[float] = ()
) -> tuple[list[float], Pacing]:
    """Steps of a rank as the loop makes them; `others` are how much faster steps of other ranks seem to be."""

    def gather(own: list[float]) -> list[list[float]]:
        return [own, *([own[0], own[1] / faster] for faster in others)]

    told: list[tuple[int, int]] = []
    pacing = Pacing(course, gather, lambda steps, warmup: told.append((steps, warmup)))
    times: list[float] = []
    step = 0
    while step < course.steps:
        while step <= course.warmup and pacing.is_due(step):
            pacing.agree(times)
        times.append(step_s(step))
        step += 1
    assert not told or told[-1] == (course.steps, course.warmup)
    return times, pacing


@pytest.mark.parametrize("length", [0.004, 0.05, 3.0])
def test_both_last_as_long_as_was_asked_for_and_no_longer_than_needed(length: float) -> None:
    course = course_of(warmup_s=10.0, measured_s=30.0)
    least = course.warmup, course.measured
    # The first steps set things up.
    times, _ = run(course, lambda step: length * (20 if step < 2 else 1))
    warmup, measured = sum(times[1 : course.warmup]), sum(times[course.warmup :])
    assert warmup >= 10.0 or course.warmup > least[0]
    assert 10.0 - length <= warmup <= max(10.0 + 2 * length, least[0] * length + 40 * length)
    assert 30.0 - 1e-9 <= measured <= max(30.0 + length, least[1] * length + 1e-9)


def test_a_first_step_that_compiles_warms_nothing_up() -> None:
    course = course_of(warmup_s=20.0, measured_s=60.0)
    times, _ = run(course, lambda step: 0.1 if step else 90.0)
    assert sum(times[1 : course.warmup]) == pytest.approx(20.0, abs=0.2)


def test_steps_that_were_asked_for_are_made_where_they_take_longer() -> None:
    course = course_of(warmup_s=0.1, measured_s=0.1)
    least = course.warmup, course.measured
    run(course, lambda step: 1.0)
    assert (course.warmup, course.measured) == least


def test_the_rank_with_the_shortest_steps_measures_long_enough() -> None:
    course = course_of(warmup_s=0.0, measured_s=40.0)
    run(course, lambda step: 0.5, others=[1.0, 2.0])
    assert course.measured == 160


def test_without_seconds_nothing_changes_on_a_cpu_and_a_gpu_has_its_own() -> None:
    plain = course_of()
    assert not plain.is_timed
    assert (course_of(on_gpu=True).warmup_s, course_of(on_gpu=True).measured_s) == (20.0, 60.0)
    off = course_of(on_gpu=True, warmup_s=0.0, measured_s=0.0)
    assert (off.warmup, off.end) == (plain.warmup, plain.end)


def test_watched_steps_stay_at_the_end_of_the_warm_up_and_a_resumed_run_counts_its_own() -> None:
    course = course_of(first=1000, warmup_s=5.0, measured_s=5.0)
    run(course, lambda step: 0.1)
    assert course.held == range(course.window.start - HELD_STEPS, course.window.start)
    assert course.window.stop == course.watch_from == course.warmup - WATCHED_STEPS
    assert course.end == 1000 + course.warmup + course.measured


def test_what_was_not_reached_is_said() -> None:
    course = course_of(warmup_s=2.0, measured_s=30.0)
    times, pacing = run(course, lambda step: 0.1 if step < 20 else 0.05)
    (text,) = pacing.warnings(times, on_gpu=True)
    assert "instead of 30 s" in text
    course = course_of(warmup_s=2.0, measured_s=3.0)
    times, pacing = run(course, lambda step: 0.1)
    assert pacing.warnings(times, on_gpu=False) == []
    assert pacing.warnings(times, on_gpu=True)[0].startswith("short-window: measured for 3 s")
