"""Merging of gradients and exposed communication, against all partitions there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.perfmodels.overlap import best_merge, hybrid_threshold, merged
from dlbench.specs.comm import LineCost


def line(startup: float, per_byte: float) -> LineCost:
    return LineCost(name="test", startup_s=startup, per_byte_s=per_byte, ranks=4)


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.product([False, True], repeat=count - 1):
        groups = [1]
        for cut in cuts:
            groups = [*groups, 1] if cut else [*groups[:-1], groups[-1] + 1]
        yield tuple(groups)


def end(groups: tuple[int, ...], sizes: list[int], ready: list[float], cost: LineCost) -> float:
    free = 0.0
    for size, start in zip(*merged(groups, sizes, ready), strict=True):
        free = max(free, start) + cost.time(size)
    return free


gradients = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 20)), min_size=1, max_size=10).map(
    lambda pairs: ([size for size, _ in pairs], list(itertools.accumulate(gap for _, gap in pairs)))
)
costs = st.builds(line, st.floats(0, 50), st.floats(0, 0.5))


@given(gradients=gradients, cost=costs)
def test_the_planner_is_as_good_as_the_best_of_all_partitions(
    gradients: tuple[list[int], list[float]], cost: LineCost
) -> None:
    sizes, ready = gradients
    best = min(end(groups, sizes, ready, cost) for groups in partitions(len(sizes)))
    assert end(best_merge(sizes, ready, cost), sizes, ready, cost) == pytest.approx(best, rel=1e-12)


def test_the_published_rule_is_not_always_the_best() -> None:
    # The rule looks at two neighbours: the second gradient joins the first, half a second late, and the third comes a
    # whole start-up after that and stays alone. Better: the first alone, the others together behind it.
    sizes, ready, cost = [10, 1, 10], [0.0, 0.5, 2.5], line(2.0, 0.1)
    assert end((2, 1), sizes, ready, cost) == pytest.approx(6.6)
    assert best_merge(sizes, ready, cost) == (1, 2)
    assert end((1, 2), sizes, ready, cost) == pytest.approx(6.1)


@pytest.mark.parametrize(
    ("flat", "grouped", "threshold"),
    [
        (line(10.0, 1.0), line(1.0, 2.0), 9),  # equal at 9 bytes
        (line(10.0, 1.0), line(1.0, 5.0), 3),  # 2.25: from 3 on
        (line(1.0, 1.0), line(2.0, 2.0), 0),
        (line(1.0, 1.0), line(1.0, 1.0), 0),
        (line(2.0, 1.0), line(1.0, 1.0), None),
        (line(10.0, 2.0), line(1.0, 1.0), None),
        (line(1.0, 2.0), line(10.0, 1.0), None),  # flat below 9 bytes only
    ],
)
def test_threshold_of_hybrid(flat: LineCost, grouped: LineCost, threshold: int | None) -> None:
    assert hybrid_threshold(flat, grouped) == threshold
    if threshold:
        assert flat.time(threshold) <= grouped.time(threshold)
        assert flat.time(threshold - 1) > grouped.time(threshold - 1)
