"""Plans: never worse than a single method, near the exact optimum on small chains, refused where none fits."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlbench.errors import ExitCode
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, check_blocks, cut, spans_of
from dlbench.perfmodels.out_of_core.planner import fixed_plan, plan_blocks
from dlbench.perfmodels.out_of_core.search import DoesNotFitError, allowed, fits, smallest_capacity
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, Recompute, Swap, TransferRates
from tests.perfmodels.out_of_core.chains import DECISIONS, chains, drawn_chain, equal_chain, link, links, unit
from tests.support.out_of_core_oracle import best_cut, best_plan, cuts, random_case

WAYS = ((True, True), (True, False), (False, True))
FIXED: tuple[tuple[Recompute, Swap], ...] = (
    ("none", "none"),
    ("blocks", "none"),
    ("none", "offload"),
    ("none", "streamed"),
    ("blocks", "streamed"),
)
few = st.integers(0, 2**32).map(lambda seed: drawn_chain(random.Random(seed), most=4))


def brute_force(
    chain: Chain, rates: TransferRates, capacity: int, decisions: tuple[Decision, ...], starts: tuple[int, ...] | None
) -> float:
    """The shortest pass of all plans that fit, by trying all of them."""
    best = math.inf
    spans = cut(chain, starts)
    for chosen in itertools.product(decisions, repeat=len(spans)):
        plan = [
            PlannedBlock(first=first, last=last, decision=decision)
            for (first, last), decision in zip(spans, chosen, strict=True)
        ]
        schedule = simulate(chain, plan, rates, capacity)
        if schedule.fits:
            best = min(best, schedule.makespan)
    return best


def every_cut(chain: Chain) -> list[tuple[int, ...]]:
    joined = [number for number, each in enumerate(chain.units) if number and not each.joins]
    return [starts for starts in cuts(len(chain.units)) if set(joined) <= set(starts)]


# The oracle


@given(few, links, st.integers(0, 1000), st.sampled_from(WAYS))
def test_the_oracle_finds_what_trying_all_plans_finds(
    chain: Chain, rates: TransferRates, capacity: int, way: tuple[bool, bool]
) -> None:
    decisions = allowed(recompute=way[0], swap=way[1])
    expected = brute_force(chain, rates, capacity, decisions, None)
    found = best_plan(chain, rates, capacity, decisions=decisions)
    assert (math.inf if found is None else found[1]) == pytest.approx(expected, rel=1e-9)
    if found is not None:
        schedule = simulate(chain, found[0], rates, capacity)
        assert schedule.fits
        assert schedule.makespan == pytest.approx(found[1])


# The planner


@given(chains, links, st.floats(0, 1), st.sampled_from(WAYS), st.booleans())
def test_a_plan_is_never_worse_than_a_single_method_and_fits(
    chain: Chain, rates: TransferRates, share: float, way: tuple[bool, bool], pinned: bool
) -> None:
    recompute, swap = way
    starts = tuple(range(0, len(chain.units), 2)) if pinned else None
    low = smallest_capacity(chain, recompute=recompute, swap=swap, starts=starts)
    high = fixed_plan(chain, None, "none", "none", starts=starts).predicted.peak_bytes
    capacity = low + round(share * (high - low))
    plan = plan_blocks(chain, rates, capacity, recompute=recompute, swap=swap, starts=starts, effort=20_000)
    assert plan.predicted.peak_bytes <= capacity == plan.capacity_bytes
    assert simulate(chain, plan.blocks, rates, capacity).makespan == plan.predicted.pass_s
    assert {block.decision for block in plan.blocks} <= set(allowed(recompute=recompute, swap=swap))
    if pinned:
        assert {(block.first, block.last) for block in plan.blocks} == set(cut(chain, starts))
    for method in FIXED:
        # Offloading waits for each transfer and holds less meanwhile than any plan does: another way to swap.
        if (method[0] == "blocks") > recompute or (method[1] != "none") > swap or method[1] == "offload":
            continue
        single = fixed_plan(chain, rates, *method, starts=starts).predicted
        if single.peak_bytes <= capacity:
            assert plan.predicted.pass_s <= single.pass_s * (1 + 1e-9), method


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_near_the_best_there_is(seed: int) -> None:
    case = random_case(seed, most=7)
    starts = range(len(case.chain.units))
    plan = plan_blocks(case.chain, case.rates, case.capacity_bytes, recompute=True, swap=True, starts=starts)
    best = best_plan(case.chain, case.rates, case.capacity_bytes, decisions=DECISIONS[:3])
    if best is not None:
        assert plan.predicted.pass_s <= 1.02 * best[1]


def test_blocks_are_cut_as_well_as_the_best_cuts() -> None:
    for seed in range(6):
        case = random_case(seed, units=5)
        plan = plan_blocks(case.chain, case.rates, case.capacity_bytes, recompute=True, swap=True)
        best = best_cut(case.chain, case.rates, case.capacity_bytes)
        assert best[1] <= plan.predicted.pass_s * (1 + 1e-9)
        assert plan.predicted.pass_s <= 1.02 * best[1], seed


def test_what_others_use_is_never_spanned() -> None:
    chain = equal_chain(6).model_copy(update={"units": tuple(unit(number, joins=number != 3) for number in range(6))})
    capacity = smallest_capacity(chain, recompute=True, swap=False)
    plan = plan_blocks(chain, None, capacity, recompute=True, swap=False)
    assert 3 in {block.first for block in plan.blocks}
    for seed in (16, 23):
        case = random_case(seed, units=40)
        plan = plan_blocks(case.chain, case.rates, case.capacity_bytes, recompute=True, swap=True, effort=20_000)
        check_blocks(case.chain, plan.blocks)


# The smallest capacity


@given(few, st.sampled_from(WAYS))
def test_the_smallest_capacity_is_that_of_the_best_of_all_plans(chain: Chain, way: tuple[bool, bool]) -> None:
    recompute, swap = way
    decisions = allowed(recompute=recompute, swap=swap)
    least = min(
        simulate(chain, plan, link(1.0), 0).peak_bytes
        for starts in every_cut(chain)
        for spans in [cut(chain, starts)]
        for chosen in itertools.product(decisions, repeat=len(spans))
        for plan in [
            [PlannedBlock(first=a, last=b, decision=decision) for (a, b), decision in zip(spans, chosen, strict=True)]
        ]
    )
    assert smallest_capacity(chain, recompute=recompute, swap=swap) == least
    assert fits(chain, least, recompute=recompute, swap=swap)
    assert not fits(chain, least - 1, recompute=recompute, swap=swap)


def test_a_plan_is_found_in_the_smallest_capacity_and_refused_below() -> None:
    for seed in range(5):
        chain = random_case(seed, units=9).chain
        for recompute, swap in WAYS:
            least = smallest_capacity(chain, recompute=recompute, swap=swap)
            rates = link(1e6)
            plan_blocks(chain, rates, least, recompute=recompute, swap=swap, effort=1000)
            with pytest.raises(DoesNotFitError, match=f"needs at least {least} B") as caught:
                plan_blocks(chain, rates, least - 1, recompute=recompute, swap=swap)
            assert caught.value.smallest_bytes == least
            assert caught.value.exit_code == ExitCode.ENVIRONMENT
            assert "\n" not in str(caught.value)


def test_the_refusal_names_the_largest_items() -> None:
    chain = equal_chain(3, state_bytes=3000, exchange_bytes=2000, outside_bytes=7)
    with pytest.raises(DoesNotFitError) as caught:
        plan_blocks(chain, link(10), 1000, recompute=True, swap=True)
    assert str(caught.value) == (
        "training does not fit into 1000 B with any plan: it needs at least 5127 B (5.007 KiB): 2.93 KiB parameters "
        "and optimizer state, 1.953 KiB buffers of the exchange, 120 B activations, their gradients and workspace (the "
        "largest: layers.1)"
    )


# Fixed plans, and wrong arguments


def test_fixed_plans_treat_all_blocks_alike() -> None:
    chain = equal_chain(4)
    rates = link(100)
    decisions = [{block.decision for block in fixed_plan(chain, rates, *method).blocks} for method in FIXED]
    assert decisions == [{"keep"}, {"recompute"}, {"swap"}, {"swap"}, {"recompute-swap"}]
    coarse = fixed_plan(chain, rates, "blocks", "none", starts=[2])
    assert [(block.first, block.last) for block in coarse.blocks] == [(0, 1), (2, 3)]
    with pytest.raises(ValueError, match="blocks one by one"):
        fixed_plan(chain, rates, "planned", "none")


def test_spans_do_not_cross_what_others_use() -> None:
    chain = equal_chain(4).model_copy(update={"units": (unit(0), unit(1), unit(2, joins=False), unit(3))})
    assert spans_of(chain) == ((0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3))
    assert cut(chain, [3]) == ((0, 1), (2, 2), (3, 3))
    costs = BlockCosts(chain)
    assert costs.of(2, 3, "recompute-swap").moved_bytes == 0
