"""Efficiency as a product of factors: exact, in range, as its definition says; and slow periods of ranks in a map."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlbench.reading.causes import CAUSES
from dlbench.reading.digest import RankStepMap
from dlbench.reading.scaling import Group, Point, groups
from dlbench.reading.table import tabulate
from dlbench.records.scan import scan
from dlbench.stats.pairing import RunKey
from dlbench.views.steps.slow_periods import MIN_EXCESS, find_slow_period
from dlbench.views.waterfall.numbers import FACTORS, FactoredPoint, factorise, waterfall
from tests.reading.test_causes import random_work, simulate
from tests.support.run_factory import Story, constant, plans, write_run, write_scaling

Times = dict[RunKey, Mapping[str, float]]


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Point:
    """Some point: `factorise` only hands it on."""
    folder = tmp_path_factory.mktemp("point")
    write_scaling(folder, points=(1,), repeats=1)
    return groups(tabulate(scan(folder)))[0].baseline


# Nanoseconds of each cause; a step that computes nothing has no factors.
run_causes = st.fixed_dictionaries({name: st.integers(1 if name == "compute" else 0, 10**9) for name in CAUSES})


def in_seconds(runs: list[dict[str, int]], block: str) -> Times:
    return {(block, repeat): {name: ns / 1e9 for name, ns in run.items()} for repeat, run in enumerate(runs)}


def by_definition(run: dict[str, int]) -> tuple[dict[str, Fraction], Fraction, Fraction]:
    """A run's own efficiencies, its computing and its step, as the module's docstring defines them."""
    x0 = Fraction(sum(run.values()))
    x1 = x0 - run["exchange"]
    x2 = x1 - run["straggler"] - run["rest"]
    x3 = x2 - run["input"]
    x4 = x3 - run["host"]
    return {"communication": x1 / x0, "late_ranks": x2 / x1, "input": x3 / x2, "host": x4 / x3}, x4, x0


def relative_by_definition(own: dict[str, int], base: dict[str, int], work: Fraction) -> dict[str, Fraction]:
    a, computing, _ = by_definition(own)
    b, computing_of_base, _ = by_definition(base)
    return {**{name: a[name] / b[name] for name in a}, "compute": work * computing_of_base / computing}


def geometric(values: Iterable[Fraction]) -> float:
    return statistics.geometric_mean(map(float, values))


@settings(deadline=None)
@given(
    own=st.lists(run_causes, min_size=1, max_size=4),
    base=st.lists(run_causes, min_size=1, max_size=4),
    work=st.sampled_from([Fraction(1), Fraction(1, 4), Fraction(3)]),
)
def test_factors_multiply_to_the_efficiency_and_are_what_the_definition_says(
    point: Point, own: list[dict[str, int]], base: list[dict[str, int]], work: Fraction
) -> None:
    found = factorise(point, in_seconds(own, "a"), in_seconds(base, "b"), work=float(work), is_baseline=False)
    assert tuple(factor.name for factor in found.factors) == FACTORS
    every = list(itertools.product(own, base))
    efficiency = geometric(work * by_definition(b)[2] / by_definition(a)[2] for a, b in every)
    assert found.efficiency.value == pytest.approx(efficiency, rel=1e-12)
    assert math.prod(factor.relative.value for factor in found.factors) == pytest.approx(efficiency, rel=1e-12)
    # What a waterfall takes off in its steps is the loss, and ends at the efficiency.
    assert math.fsum(factor.step for factor in found.factors) == pytest.approx(
        1 - efficiency, abs=1e-12 * max(1.0, *(factor.level for factor in found.factors))
    )
    assert found.factors[-1].level == pytest.approx(efficiency, rel=1e-12)
    for factor in found.factors:
        wanted = geometric(relative_by_definition(a, b, work)[factor.name] for a, b in every)
        assert factor.relative.value == pytest.approx(wanted, rel=1e-11)
        if factor.own is None:
            assert factor.name == "compute"
        else:
            assert factor.own.value == pytest.approx(
                geometric(by_definition(run)[0][factor.name] for run in own), rel=1e-11
            )
            assert 0 < factor.own.value <= 1 + 1e-15


@settings(deadline=None)
@given(
    own=st.lists(run_causes, min_size=1, max_size=4),
    base=st.lists(run_causes, min_size=1, max_size=4),
    paired=st.booleans(),
)
def test_few_runs_have_the_range_of_their_pairs(
    point: Point, own: list[dict[str, int]], base: list[dict[str, int]], paired: bool
) -> None:
    if paired:
        base = (base * len(own))[: len(own)]
    found = factorise(
        point, in_seconds(own, "a"), in_seconds(base, "a" if paired else "b"), work=1.0, is_baseline=False
    )
    together = zip(own, base, strict=True) if paired or len(own) == len(base) == 1 else itertools.product(own, base)
    pairs = [relative_by_definition(a, b, Fraction(1)) for a, b in together]
    for factor in found.factors:
        seen = [float(pair[factor.name]) for pair in pairs]
        if min(len(own), len(base)) == 1:
            assert (factor.relative.low, factor.relative.high, factor.relative.kind) == (None, None, "single run")
            continue
        assert factor.relative.kind == "range"
        assert factor.relative.low == pytest.approx(min(seen), rel=1e-9)
        assert factor.relative.high == pytest.approx(max(seen), rel=1e-9)


def test_drift_that_hits_pairs_alike_leaves_no_width(point: Point) -> None:
    """Each repeat is slower than the one before, point and baseline alike."""
    base = dict.fromkeys(CAUSES, 1.0)
    own = {**base, "exchange": 3.0}

    def drifting(times: Mapping[str, float], block: str) -> Times:
        return {(block, k): {name: value * (1 + k / 10) for name, value in times.items()} for k in range(6)}

    paired = factorise(point, drifting(own, "a"), drifting(base, "a"), work=1.0, is_baseline=False)
    apart = factorise(point, drifting(own, "a"), drifting(base, "b"), work=1.0, is_baseline=False)
    for factor in paired.factors:
        assert factor.relative.kind == "Student t"
        assert factor.relative.low == pytest.approx(factor.relative.high, rel=1e-12)
    compute = next(factor for factor in apart.factors if factor.name == "compute")
    assert compute.relative.low is not None
    assert compute.relative.high is not None
    assert compute.relative.low < 0.95 < 1.05 < compute.relative.high


def test_the_baseline_is_one_by_definition_and_has_efficiencies_of_its_own(point: Point) -> None:
    times: Times = {("a", 0): {**dict.fromkeys(CAUSES, 0.0), "compute": 0.09, "input": 0.01}}
    found = factorise(point, times, times, work=1.0, is_baseline=True)
    assert {factor.relative.value for factor in found.factors} == {1.0}
    assert {factor.relative.kind for factor in found.factors} == {"by definition"}
    own = {factor.name: factor.own.value for factor in found.factors if factor.own is not None}
    assert own == pytest.approx({"late_ranks": 1.0, "communication": 1.0, "input": 0.9, "host": 1.0})


def test_a_step_that_computes_nothing_has_no_factors(point: Point) -> None:
    times: Times = {("a", 0): {**dict.fromkeys(CAUSES, 0.0), "exchange": 0.1}}
    found = factorise(point, times, times, work=1.0, is_baseline=False)
    assert found.factors == ()
    assert found.efficiency.value == 1.0


# Of runs


def only_group(folder: Path) -> tuple[Group, tuple[FactoredPoint, ...]]:
    table = tabulate(scan(folder), with_causes=True)
    (group,) = groups(table)
    return group, waterfall(group, table)


def test_a_late_rank_is_lost_to_late_ranks_and_imbalance_by_pops_definition(tmp_path: Path) -> None:
    """100 ms of own work, 8 ms of network at 4 ranks, one rank 25 ms late: 133 ms in all."""
    for plan in plans(points=(1, 4), repeats=5):
        late = simulate(plan, lambda rank, step: {"backward": 75.0} if rank == 3 else {})
        write_run(tmp_path, plan, late if plan.layout.ranks > 1 else constant([5, 0, 30, 50, 0, 10], other=5))
    _, (_, found) = only_group(tmp_path)
    relative = {factor.name: factor.relative.value for factor in found.factors}
    assert relative["late_ranks"] == pytest.approx(100 / 125, rel=1e-3)
    assert relative["communication"] == pytest.approx(125 / 133, rel=1e-3)
    assert relative["input"] == pytest.approx(1.0, rel=2e-3)
    assert relative["compute"] == pytest.approx(1.0, rel=2e-3)
    assert found.efficiency.value == pytest.approx(100 / 133, rel=1e-3)
    assert found.pop is not None
    # Useful time of the ranks: 100, 100, 100 and 125 of 133 ms.
    assert found.pop.load_balance.value == pytest.approx(106.25 / 125, rel=1e-3)
    assert found.pop.communication.value == pytest.approx(125 / 133, rel=1e-3)
    assert found.pop.parallel.value == pytest.approx(106.25 / 133, rel=1e-3)


def test_ranks_that_take_turns_in_being_late_are_balanced_by_pops_definition(tmp_path: Path) -> None:
    for plan in plans(points=(2,), repeats=5):
        write_run(tmp_path, plan, simulate(plan, lambda rank, step: {"backward": 75.0} if rank == step % 2 else {}))
    _, (found,) = only_group(tmp_path)
    own = {factor.name: factor.own.value for factor in found.factors if factor.own is not None}
    assert found.pop is not None
    assert found.pop.load_balance.value > 0.99
    assert own["late_ranks"] < 0.85
    assert found.pop.communication.value < own["communication"]


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_the_product_is_one_less_the_lost_points_of_the_report(tmp_path: Path, scaling: str) -> None:
    for plan in plans(points=(1, 2, 4), repeats=3, scaling=scaling, overrides={"train.batch_per_rank": 8}):
        write_run(tmp_path, plan, simulate(plan, random_work(plan.series.position)), Story())
    group, found = only_group(tmp_path)
    for point, one in zip(group.points, found, strict=True):
        # Geometric means multiply, arithmetic ones add; between the two lies the square of the scatter.
        assert one.efficiency.value == pytest.approx(1 - point.whole.lost.value, rel=1e-2)
        product = math.prod(factor.relative.value for factor in one.factors)
        assert product == pytest.approx(one.efficiency.value, rel=1e-12)
        for factor in one.factors:
            low, high = factor.relative.low, factor.relative.high
            assert one.is_baseline or (low is not None and high is not None and low <= factor.relative.value <= high)


# Slow periods


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
