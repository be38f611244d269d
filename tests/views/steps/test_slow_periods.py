"""Slow periods of ranks, found in a map of ranks by steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dlbench.reading.digest import RankStepMap
from dlbench.views.steps import MIN_EXCESS, find_slow_period


def rank_map(cells: np.ndarray, *, width: int = 1, first: int = 10) -> RankStepMap:
    rows, columns = cells.shape
    return RankStepMap(
        rank_starts=tuple(range(rows)),
        num_ranks=rows,
        step_starts=tuple(first + width * column for column in range(columns)),
        last_step=first + width * columns - 1,
        cells=tuple(tuple(row) for row in cells.tolist()),
        row_hosts=tuple(f"n{row // 2}" for row in range(rows)),
    )


def noise(rows: int, columns: int, sigma: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, sigma, (rows, columns))


@pytest.mark.parametrize(
    ("start", "end", "from_start", "to_end"), [(0, 100, True, True), (40, 100, False, True), (30, 60, False, False)]
)
def test_a_slow_rank_is_found_with_its_steps(start: int, end: int, from_start: bool, to_end: bool) -> None:
    cells = noise(8, 100, 0.01, seed=1)
    cells[5, start:end] *= 1.4
    found = find_slow_period(rank_map(cells, width=3))
    assert found is not None
    assert (found.row, found.first_rank, found.last_rank, found.hosts) == (5, 5, 5, "n2")
    assert (found.first_step, found.last_step) == (10 + 3 * start, 10 + 3 * end - 1)
    assert (found.from_start, found.to_end) == (from_start, to_end)
    assert found.ratio == pytest.approx(1.4, abs=0.02)


def test_what_slows_all_ranks_alike_is_no_slow_period() -> None:
    cells = noise(8, 100, 0.01, seed=2)
    cells[:, 20:60] *= 3
    assert find_slow_period(rank_map(cells)) is None


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.2])
@pytest.mark.parametrize(("rows", "columns"), [(2, 12), (4, 12), (8, 100), (64, 100)])
def test_noise_is_no_slow_period(sigma: float, rows: int, columns: int) -> None:
    found = [find_slow_period(rank_map(noise(rows, columns, sigma, seed))) for seed in range(25)]
    assert [one for one in found if one is not None] == []


def test_one_long_step_is_no_slow_period() -> None:
    cells = noise(4, 100, 0.01, seed=3)
    cells[2, 50] = 5.0
    assert find_slow_period(rank_map(cells)) is None


def test_one_row_has_nothing_to_be_compared_with() -> None:
    assert find_slow_period(rank_map(np.full((1, 50), 2.0))) is None


def test_of_two_ranks_the_slower_one_is_told() -> None:
    cells = noise(2, 50, 0.01, seed=4)
    cells[1] *= 1.2
    found = find_slow_period(rank_map(cells))
    assert found is not None
    assert (found.row, round(found.ratio, 1)) == (1, 1.2)


def test_the_heaviest_span_of_all_is_taken() -> None:
    """Against all spans of all rows, one by one."""
    rng = random.Random(5)
    cells = np.array([[rng.choice([1.0, 1.0, 1.3]) for _ in range(20)] for _ in range(5)])
    cells[3, 4:15] += 2.0
    excess = [
        [cells[r, c] / float(np.median(np.delete(cells[:, c], r))) - 1 - MIN_EXCESS for c in range(20)]
        for r in range(5)
    ]
    best = max(
        ((sum(excess[r][a:b]), r, a, b) for r in range(5) for a in range(20) for b in range(a + 1, 21)),
    )
    found = find_slow_period(rank_map(cells))
    assert found is not None
    assert (found.row, found.first_step - 10, found.last_step - 10 + 1) == best[1:]
