"""The peak of a pass against a second account of it, every tensor by its name, event by event; and step time against
capacity and batch, with the largest batch of each method.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from dlbench.perfmodels.out_of_core.planner import (
    METHODS,
    against_batch,
    fixed_plan,
    in_core_bytes,
    largest_batch,
    point,
    scaled,
)
from dlbench.perfmodels.out_of_core.search import fits
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.specs.out_of_core import Chain, PlannedBlock, TransferRates
from tests.perfmodels.out_of_core.chains import blocks, equal_chain, link, links, planned


class Live:
    """Tensors that are there, by name, and the most that they ever took."""

    def __init__(self, fixed: int) -> None:
        self.there: dict[str, int] = {"fixed": fixed}
        self.peak = fixed

    def take(self, name: str, size: int) -> None:
        assert name not in self.there, name
        self.there[name] = size
        self.peak = max(self.peak, sum(self.there.values()))

    def moment(self, size: int) -> None:
        self.take("moment", size)
        del self.there["moment"]

    def drop(self, *names: str) -> None:
        for name in names:
            self.there.pop(name, None)


def account(chain: Chain, plan: tuple[PlannedBlock, ...]) -> int:
    """The peak of a pass in which every transfer has ended before anything else begins, and nothing comes back early. A
    tensor is named by what it is: `in 3` is the input of unit 3, `saved 3` what its forward pass keeps.
    """
    live = Live(chain.state_bytes + chain.outside_bytes)
    units = chain.units
    stay = [unit.input_shared and not unit.joins for unit in units]
    sizes = [unit.input_bytes for unit in units] + [chain.output_bytes]

    def forward(number: int) -> None:
        """With all that it saves."""
        live.take(f"in {number + 1}", sizes[number + 1])
        live.take(f"saved {number}", units[number].saved_bytes)
        live.moment(units[number].forward_working_bytes)

    def kept_of(block: PlannedBlock) -> list[str]:
        """What a block keeps inside itself, where it keeps."""
        inner = range(block.first + 1, block.last + 1)
        return [f"saved {n}" for n in range(block.first, block.last + 1)] + [
            f"in {n}" for n in inner if units[n].input_saved
        ]

    live.take("in 0", sizes[0])
    for block in plan:
        recomputes = block.decision.startswith("recompute")
        for number in range(block.first, block.last + 1):
            if recomputes:
                live.take(f"in {number + 1}", sizes[number + 1])
                live.moment(units[number].passing_working_bytes)
            else:
                forward(number)
            is_first = number == block.first
            stays = units[number].input_saved if not is_first else True
            if (recomputes and not is_first) or not stays:
                live.drop(f"in {number}")
        first = units[block.first]
        if not (first.input_saved or recomputes or stay[block.first]):
            live.drop(f"in {block.first}")
        if "swap" in block.decision:
            if not stay[block.first]:
                live.drop(f"in {block.first}")
            if not recomputes:
                live.drop(*kept_of(block))
    live.moment(chain.turn_bytes)
    live.take("gradients of the head", chain.turn_gradient_bytes)
    live.drop(f"in {len(units)}")
    for block in reversed(plan):
        first, last = block.first, block.last
        recomputes = block.decision.startswith("recompute")
        is_there = units[first].input_saved or recomputes or stay[first]
        if "swap" in block.decision and not stay[first] and is_there:
            live.take(f"in {first}", sizes[first])
        if block.decision == "swap":
            for name in kept_of(block):
                kind, number = name.split()
                live.take(name, units[int(number)].saved_bytes if kind == "saved" else sizes[int(number)])
        if recomputes:
            live.take("gradient", sizes[last + 1])
            for number in range(first, last):
                forward(number)
                if number > first and not units[number].input_saved:
                    live.drop(f"in {number}")
            # It ends when all is saved: the last unit's output may not be made any more.
            live.take(f"saved {last}", units[last].saved_bytes)
            live.moment(units[last].recomputing_working_bytes)
            live.drop("gradient")
            if last > first and not units[last].input_saved:
                live.drop(f"in {last}")
        for number in range(last, first - 1, -1):
            live.moment(units[number].backward_working_bytes)
            live.drop(f"saved {number}", f"in {number}")
            live.take(f"gradients {number}", units[number].gradient_bytes)
    live.moment(chain.after_bytes)
    live.take("gradients before the chain", chain.after_gradient_bytes)
    live.moment(chain.update_bytes)
    return live.peak


@given(planned, links)
def test_the_peak_is_that_of_an_account_of_every_tensor(
    drawn: tuple[Chain, tuple[PlannedBlock, ...]], rates: TransferRates
) -> None:
    chain, plan = drawn
    assert simulate(chain, plan, rates, 0).peak_bytes == account(chain, plan)


@given(planned)
def test_training_in_core_is_planned_with_what_it_holds(drawn: tuple[Chain, tuple[PlannedBlock, ...]]) -> None:
    """Every unit kept: the figure of the views, of percentages and of refusals is the account's."""
    chain, _ = drawn
    keep = blocks("k" * len(chain.units))
    expected = account(chain, keep)
    assert in_core_bytes(chain) == expected == fixed_plan(chain, None, "none", "none").predicted.peak_bytes
    assert fits(chain, expected, recompute=False, swap=False, starts=range(len(chain.units)))
    assert not fits(chain, expected - 1, recompute=False, swap=False, starts=range(len(chain.units)))


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
