"""The simulated pass: its rules one by one on small chains, what holds for all plans, its peak against a second account
(every tensor by its name, event by event), and step time against capacity and batch, with the largest batch of each.
"""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.perfmodels.out_of_core.blocks import BlockCosts, Kind, Lane, Schedule, predicted
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
from tests.perfmodels.out_of_core.chains import DECISIONS, blocks, equal_chain, link, links, planned, unit

Prefetch = Literal["room", "one-block", "blocking"]
prefetches: st.SearchStrategy[Prefetch] = st.sampled_from(("room", "one-block", "blocking"))


def times(schedule: Schedule, lane: Lane, kind: Kind) -> dict[int | None, tuple[float, float]]:
    return {op.block: (op.start_s, op.end_s) for op in schedule.operations if (op.lane, op.kind) == (lane, kind)}


# The rules, one by one


def test_in_core_takes_the_useful_time_and_holds_all() -> None:
    chain = equal_chain(3, before_s=0.5, turn_s=0.25, after_s=0.125, state_bytes=1000, outside_bytes=50)
    schedule = simulate(chain, blocks("kkk"), None, None)
    assert schedule.makespan == schedule.useful_s == 9.875
    assert schedule.peak_bytes == 1050 + 3 * 100 + 2 * 10 + 10
    assert (schedule.occupancy, schedule.efficiency, schedule.stall_s, schedule.swapped_bytes) == (1, 1, 0, 0)
    assert simulate(chain, blocks("kkk"), None, schedule.peak_bytes).fits
    assert simulate(chain, blocks("kkk"), None, schedule.peak_bytes - 7).over_bytes == 7


def test_checkpoints_hold_one_block_at_a_time_and_repeat_the_forward_pass() -> None:
    schedule = simulate(equal_chain(4), blocks("rrrr"), None, None)
    assert schedule.makespan == 4 * 3 + 4
    assert schedule.recompute_s == 4
    # The inputs, and the last block: what it saves, and the gradient of its output.
    assert schedule.peak_bytes == 3 * 10 + 100 + 10
    assert schedule.efficiency == pytest.approx(0.75)
    assert schedule.occupancy == 1


def test_a_swapped_block_leaves_after_its_forward_pass_and_is_back_before_its_backward_pass() -> None:
    # 100 bytes at 50 bytes/s out, 25 bytes/s in; 0.5 s start-up.
    rates = TransferRates(tier="test", out_bytes_per_s=50, in_bytes_per_s=25, latency_s=0.5)
    schedule = simulate(equal_chain(4), blocks("skkk"), rates, 10**6)
    assert times(schedule, "out", "swap out") == {0: (1.0, 3.5)}
    assert times(schedule, "in", "swap in") == {0: (4.0, 8.5)}
    assert (schedule.swapped_bytes, schedule.leaving) == (100, {0})


def test_what_has_not_left_when_it_is_wanted_back_stays() -> None:
    schedule = simulate(equal_chain(2), blocks("ks"), link(50), None)
    # Forward passes end at 2 s, when the transfer has not begun.
    assert times(schedule, "out", "swap out") == {}
    assert schedule.makespan == 6
    assert (schedule.swapped_bytes, schedule.leaving) == (0, set())
    # Of two, the first would have begun by then: neither is moved, of three the one that ends before.
    schedule = simulate(equal_chain(3), blocks("kss"), link(50), None)
    assert (schedule.leaving, schedule.makespan) == (set(), 9)
    schedule = simulate(equal_chain(4), blocks("ssss"), link(50), None)
    assert times(schedule, "out", "swap out") == {0: (1.0, 3.0)}
    assert schedule.leaving == set(times(schedule, "in", "swap in")) == {0}
    assert schedule.held[-1] == (12.0, 0)


def test_streamed_fetches_one_block_ahead_and_lets_one_block_leave_at_a_time() -> None:
    schedule = simulate(equal_chain(5), blocks("sssss"), link(40), None, prefetch="one-block")
    forward, leave = times(schedule, "compute", "forward"), times(schedule, "out", "swap out")
    for number in range(2, 5):
        assert forward[number][0] >= leave[number - 2][1]
    backward, back = times(schedule, "compute", "backward"), times(schedule, "in", "swap in")
    for number, (start, _) in back.items():
        if number < 3:
            assert start >= backward[number + 2][1]


def test_offload_computes_nothing_beside_a_transfer() -> None:
    schedule = simulate(equal_chain(3), blocks("sss"), link(100, latency_s=0.25, drag=0.5), None, prefetch="blocking")
    moved = (3 * 100 + 2 * 10) / 100 + 3 * 0.25  # without counts, as in earlier records, a block moves whole
    assert schedule.makespan == pytest.approx(9 + 2 * moved)
    assert schedule.stall_s == pytest.approx(2 * moved)
    assert schedule.swapped_bytes == 320
    assert schedule.peak_bytes == 10 + 10  # what a unit takes and makes: each tensor that it saves leaves at once


def test_each_storage_takes_the_fixed_time_of_a_transfer() -> None:
    """Three that a unit saves, and its input; of a block that is recomputed the input alone."""
    chain = equal_chain(4, units=tuple(unit(number, saved_count=3) for number in range(4)))
    schedule = simulate(chain, blocks("skkk"), link(100, latency_s=0.25), None)
    assert times(schedule, "out", "swap out") == {0: (1.0, 2.75)}
    assert times(schedule, "in", "swap in") == {0: (4.0, 5.75)}
    costs = BlockCosts(chain)
    counts = [costs.of(1, 2, decision).moved_count for decision in DECISIONS]
    assert counts == [0, 8, 0, 1]
    assert costs.of(0, 0, "recompute-swap").moved_count == 0  # others hold its input


def test_computing_beside_transfers_takes_longer_by_the_drag() -> None:
    # The first block leaves in 2 s: the forward passes beside it take half a second longer for each of them.
    chain = equal_chain(4)
    schedule = simulate(chain, blocks("skkk"), link(50, drag=0.5), None)
    assert times(schedule, "compute", "forward")[1] == (1.0, 3.0)
    assert times(schedule, "compute", "forward")[2] == (3.0, 4.0)
    still = simulate(chain, blocks("skkk"), link(50, drag=1.0), None)
    assert times(still, "compute", "forward")[1] == (1.0, 4.0)


def test_blocks_must_be_the_chains() -> None:
    with pytest.raises(ValueError, match="all 3 units in order"):
        simulate(equal_chain(3), blocks("kkkk"), None, None)
    with pytest.raises(ValueError, match="hold units 0 to 1 of 3"):
        simulate(equal_chain(3), blocks("kk"), None, None)
    with pytest.raises(ValueError, match="need transfer rates"):
        simulate(equal_chain(3), blocks("ksk"), None, None)


# What holds for all plans


@given(planned, links, prefetches, st.integers(0, 1500) | st.none())
def test_every_pass_is_a_pass(
    drawn: tuple[Chain, tuple[PlannedBlock, ...]], rates: TransferRates, prefetch: Prefetch, capacity: int | None
) -> None:
    chain, plan = drawn
    schedule = simulate(chain, plan, rates, capacity, prefetch=prefetch)
    for lane in ("compute", "out", "in"):
        found = [op for op in schedule.operations if op.lane == lane]
        for one, other in itertools.pairwise(found):
            assert one.end_s <= other.start_s + 1e-9, (one, other)
        assert not found or found[-1].end_s <= schedule.makespan + 1e-9
    for kind in ("swap out", "forward"):
        order = [op.block for op in schedule.operations if op.kind == kind]
        assert order == sorted(order, key=lambda block: block or 0)
    for kind in ("swap in", "backward", "recompute"):
        order = [op.block for op in schedule.operations if op.kind == kind]
        assert order == sorted(order, key=lambda block: -(block or 0))
    leave, back = times(schedule, "out", "swap out"), times(schedule, "in", "swap in")
    backward = times(schedule, "compute", "backward")
    for block, (start, end) in back.items():
        if block in leave:
            assert leave[block][1] <= start + 1e-9
        if block in backward:
            assert end <= backward[block][0] + 1e-9
    busy = sum(op.end_s - op.start_s for op in schedule.operations if op.lane == "compute" and op.kind != "wait")
    assert busy >= chain.useful_s - 1e-9
    assert busy + schedule.stall_s <= schedule.makespan + 1e-6
    assert predicted(schedule).pass_s == schedule.makespan


@given(planned, links, prefetches, st.integers(0, 1500) | st.none())
def test_what_is_held_is_never_more_than_the_peak_and_all_is_freed(
    drawn: tuple[Chain, tuple[PlannedBlock, ...]], rates: TransferRates, prefetch: Prefetch, capacity: int | None
) -> None:
    chain, plan = drawn
    schedule = simulate(chain, plan, rates, capacity, prefetch=prefetch)
    assert [when for when, _ in schedule.held] == sorted({when for when, _ in schedule.held})
    assert all(held >= chain.fixed_bytes for _, held in schedule.held)
    gradients = chain.turn_gradient_bytes + sum(each.gradient_bytes for each in chain.units)
    assert schedule.held[-1][1] == chain.fixed_bytes + gradients
    assert max(held for _, held in schedule.held) <= schedule.peak_bytes
    if capacity is not None:
        assert schedule.fits == (schedule.peak_bytes <= capacity)
        assert schedule.over_bytes == max(0, schedule.peak_bytes - capacity)


@given(planned, links, st.integers(0, 1500))
def test_what_a_plan_needs_does_not_depend_on_times(
    drawn: tuple[Chain, tuple[PlannedBlock, ...]], rates: TransferRates, capacity: int
) -> None:
    chain, plan = drawn
    needed = simulate(chain, plan, rates, 0).peak_bytes
    assert simulate(chain, plan, rates, needed).fits
    assert not needed or not simulate(chain, plan, rates, needed - 1).fits
    assert simulate(chain, plan, rates, capacity).fits == (needed <= capacity)
    assert simulate(chain, plan, link(1.0), capacity).fits == (needed <= capacity)


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
