"""Errors beyond the fitted points; merging of gradients and exposed communication, against all partitions there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dlbench.perfmodels.lines import best_merge, hybrid_threshold, merged
from dlbench.perfmodels.predictions import Miss, model_error, network_error, network_factors
from dlbench.specs.comm import FittedRange, LargestHeldOut, LineCost, Residual, SizeBias
from tests.support import collectives_factory as factory


def fitted(*, draws: int = 200, ratios: tuple[float, ...] = (0.98, 0.8)) -> object:
    """Costs fitted at 4, 8 and 16 ranks; without 16, times there were predicted so many times as long."""
    by_size = tuple(SizeBias(num_bytes=1024 << 10 * i, ratio=ratio) for i, ratio in enumerate(ratios))
    held = LargestHeldOut(
        ranks=16, fitted_ranks=(4, 8), num_points=2, ratio=ratios[0], median_error=0.1, by_size=by_size
    )
    over = FittedRange(ranks=(4, 8, 16), group_sizes=(2,), num_groups=(2, 8), sizes=(1024, 1 << 20), runs=5)
    left = tuple(
        Residual(collective="allreduce", algorithm="ring", ranks=ranks, least=0.9, most=1.2) for ranks in (8, 16)
    )
    costs = {"fitted_over": over, "largest_held_out": held, "residuals": left, "draws": ((0.0,) * 5,) * draws}
    return factory.network().model_copy(update=costs)


def test_the_scale_is_that_of_the_posterior() -> None:
    found = model_error([Miss(error=0.1, doublings=1.0), Miss(error=-0.2, doublings=2.0)])
    assert found.freedom == 4
    assert found.scale == pytest.approx(math.sqrt((2 * 0.03**2 + 0.1**2 + 0.2**2 / 2) / 4))


def test_a_miss_within_the_scatter_of_its_runs_says_nothing() -> None:
    prior = model_error((), prior_scale=0.01)
    hit = model_error([Miss(error=0.001, doublings=1.0, scatter=0.05)] * 4, prior_scale=0.01)
    assert hit.scale == pytest.approx(prior.scale, rel=0.05)
    assert hit.freedom == pytest.approx(prior.freedom, rel=0.05)
    # What runs cannot explain counts all the more, and exact hits do make the model better.
    missed, exact = (
        model_error([Miss(error=error, doublings=1.0, scatter=0.001)] * 4, prior_scale=0.01) for error in (0.1, 0.001)
    )
    assert missed.scale > 0.05
    assert exact.scale < 0.8 * prior.scale
    # The scale is where the likelihood of the misses, times its prior, is largest.
    misses = [Miss(error=0.04, doublings=1.0, scatter=0.02), Miss(error=-0.01, doublings=2.0, scatter=0.03)]
    variances = np.geomspace(1e-6, 1e-1, 20_000)
    logs = -np.log(variances) - 0.01**2 / variances
    for miss in misses:
        total = variances * miss.doublings + miss.scatter**2
        logs -= (np.log(total) + miss.error**2 / total) / 2
    expected = math.sqrt(variances[logs.argmax()])
    assert model_error(misses, prior_scale=0.01).scale == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("doublings", [0.5, 1, 4])
def test_draws_have_the_quantiles_of_the_factor_however_few_they_are(doublings: float) -> None:
    found = model_error([Miss(error=0.1, doublings=1.0)])
    logs = np.log(found.drawn(doublings, 200, (1,)))
    for level in (0.5, 0.8, 0.95):
        assert math.exp(np.quantile(logs, (1 + level) / 2)) == pytest.approx(found.factor(doublings, level), rel=0.02)
    expected = stats.t.ppf(0.975, 3) * found.scale * math.sqrt(doublings)
    assert math.log(found.factor(doublings, 0.95)) == pytest.approx(expected)
    assert set(found.drawn(0, 10, (1,)).tolist()) == {1.0}


def test_a_network_misses_by_size_and_by_doublings() -> None:
    network = fitted()
    small, large = (network_error(network, size).scale for size in (2000, 1 << 20))
    assert small == pytest.approx(math.sqrt((2 * 0.03**2 + math.log(0.98) ** 2) / 3))
    assert large == pytest.approx(math.sqrt((2 * 0.03**2 + math.log(0.8) ** 2) / 3))
    assert network_error(network.model_copy(update={"largest_held_out": None}), 1).scale == 0.03
    inside, once, twice = (network_factors(network, "allreduce", "ring", 1 << 20, ranks) for ranks in (16, 32, 64))
    assert set(inside.tolist()) == {0.9, 1.2}  # Half of the draws at either end of what the fit misses.
    ends = np.where(np.arange(200) % 2, 1.2, 0.9)
    np.testing.assert_allclose(np.log(twice / ends), math.sqrt(2) * np.log(once / ends))


def test_ranks_out_of_lockstep_widen_halving_and_doubling_where_they_are_no_power_of_two() -> None:
    network = fitted()

    def width(algorithm: str, ranks: int) -> float:
        """Of 95 % of the draws, as logarithm, over that of a ring, whose ranks stay in step."""
        of_each = (network_factors(network, "allreduce", name, 1024, ranks) for name in (algorithm, "ring"))
        ends = [np.log(np.quantile(factors, [0.025, 0.975])) for factors in of_each]
        return float(np.diff(ends[0])[0] - np.diff(ends[1])[0])

    for algorithm in ("recursive-halving-doubling", "shifted-halving-doubling", "recursive-doubling"):
        assert width(algorithm, 12) > 0.2
        assert width(algorithm, 16) == width(algorithm, 8) == 0
    assert width("hierarchical", 12) == 0
    # Where the fit has measured it, what it missed there says it.
    left = Residual(collective="allreduce", algorithm="recursive-doubling", ranks=12, least=0.9, most=1.2)
    network = network.model_copy(update={"residuals": (*network.residuals, left)})
    assert width("recursive-doubling", 12) == 0


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
