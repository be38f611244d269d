"""How often ranks look whether they were told to stop: in time for the checkpoint, and no more often than needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from dlbench.node.garbage import COLLECT_EVERY
from dlbench.node.training.pauses import CHECKS_IN_WARNING, any_stop_requested, stop_check_interval

STEPS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=6)


def looks_of_all(warning_s: float, ranks: Sequence[Sequence[float]]) -> list[int]:
    """What each rank decides, when all have told their slowest step."""
    told: list[Any] = []

    def tell(value: Any) -> list[Any]:
        told.append(value)
        return [value]

    for steps in ranks:
        stop_check_interval(warning_s, steps, tell)
    return [stop_check_interval(warning_s, steps, lambda _: told) for steps in ranks]


@given(warning_s=st.floats(1, 3600), ranks=st.lists(STEPS, min_size=1, max_size=4))
@example(
    warning_s=120.0, ranks=[[50.0], [0.1, 0.1]]
)  # a first step sets things up, and counts where it is the only one
@example(warning_s=120.0, ranks=[[50.0, 0.4]])
def test_ranks_look_alike_and_often_enough_for_a_checkpoint(warning_s: float, ranks: list[list[float]]) -> None:
    """Whatever the steps of the slowest rank, a warning is seen with three quarters of its time left, or at the next
    step."""
    looks = looks_of_all(warning_s, ranks)
    assert len(set(looks)) == 1
    every = looks[0]
    assert 1 <= every <= COLLECT_EVERY
    slowest = max(max(steps[1:] or steps) for steps in ranks)
    part = warning_s / CHECKS_IN_WARNING
    if every > 1:
        assert every * slowest <= part * (1 + 1e-9)
    # And not more often: a look makes the ranks wait for each other.
    if every < COLLECT_EVERY:
        assert (every + 1) * slowest > part * (1 - 1e-9)


@given(warning_s=st.floats(1, 3600), count=st.integers(0, 3))
def test_without_a_step_that_took_time_the_collector_s_rhythm_is_kept(warning_s: float, count: int) -> None:
    assert stop_check_interval(warning_s, [0.0] * count, lambda value: [value, value]) == COLLECT_EVERY


@given(told=st.lists(st.booleans(), min_size=1, max_size=8))
def test_one_rank_that_was_told_stops_all(told: list[bool]) -> None:
    assert any_stop_requested(lambda _: told) == any(told)
