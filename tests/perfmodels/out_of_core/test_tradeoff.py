"""Step time against capacity and batch, and the largest batch of each method."""

from __future__ import annotations

import pytest

from dlbench.perfmodels.out_of_core.planner import (
    METHODS,
    against_batch,
    in_core_bytes,
    largest_batch,
    point,
    scaled,
)
from tests.perfmodels.out_of_core.chains import equal_chain, link

CHAIN = equal_chain(8, state_bytes=500, outside_bytes=40, turn_s=0.5)
RATES = link(70)


def test_a_scaled_chain_is_proportional_but_for_the_state() -> None:
    double = scaled(CHAIN, 8)
    assert double.batch == 8
    assert double.state_bytes == CHAIN.state_bytes
    assert double.useful_s == 2 * CHAIN.useful_s
    assert double.units[1].saved_bytes == 200
    assert in_core_bytes(double) - 500 == 2 * (in_core_bytes(CHAIN) - 500)
    assert scaled(CHAIN, CHAIN.batch) == CHAIN
    assert scaled(CHAIN, 1).units[1].input_bytes == 3  # never less than its share


def test_samples_per_second_beyond_what_fits_in_core() -> None:
    capacity = in_core_bytes(CHAIN)
    curve = against_batch(CHAIN, link(20), ("planned", "planned"), capacity, (2, 4, 6, 8))
    rates = [found.samples_per_s for found in curve]
    assert rates[0] == rates[1] == pytest.approx(4 / CHAIN.useful_s)
    assert all(rate is not None and 0 < rate < 4 / CHAIN.useful_s for rate in rates[2:])
    assert [
        found.samples_per_s is None for found in against_batch(CHAIN, RATES, ("none", "none"), capacity, (4, 5))
    ] == [False, True]


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_batch_fits_and_one_more_does_not(method: tuple[str, str]) -> None:
    capacity = in_core_bytes(CHAIN)
    largest = largest_batch(CHAIN, RATES, method, capacity)  # type: ignore[arg-type]
    assert largest >= CHAIN.batch
    for batch, does in ((largest, True), (largest + 1, False)):
        found = point(scaled(CHAIN, batch), RATES, method, capacity)  # type: ignore[arg-type]
        assert (found.plan is not None) is does
