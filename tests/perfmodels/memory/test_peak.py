"""The peak of a pass against a second account of it: every tensor by its name, event by event."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from dlbench.perfmodels.memory.planner import fixed_plan, in_core_bytes, scaled
from dlbench.perfmodels.memory.search import fits
from dlbench.perfmodels.memory.simulator import simulate
from dlbench.specs.memory import Chain, PlannedBlock, TransferRates
from tests.perfmodels.memory.chains import blocks, equal_chain, links, planned, unit


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
    """The peak of a pass in which every transfer has ended before anything else begins, and nothing comes back early.

    A tensor is named by what it is: `in 3` is the input of unit 3, `saved 3` what its forward pass keeps.
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


def test_workspace_counts_when_it_is_there_and_not_beside_what_is_gone_by_then() -> None:
    """The first unit's workspace is large, but later activations are gone when it is needed."""
    units = (unit(0, backward_working_bytes=250), unit(1), unit(2))
    chain = equal_chain(3).model_copy(update={"units": units})
    assert in_core_bytes(chain) == max(3 * 100 + 2 * 10 + 10, 100 + 250)
    # Where a peak lies there, recomputing every block saves nothing: the plan says so by its figures.
    assert fixed_plan(chain, None, "blocks", "none").predicted.peak_bytes == 100 + 250


def test_another_batch_has_the_same_gradients() -> None:
    chain = equal_chain(2).model_copy(
        update={"units": tuple(unit(n, gradient_bytes=40, backward_working_bytes=140) for n in range(2))}
    )
    double = scaled(chain, 2 * chain.batch)
    assert [(u.gradient_bytes, u.backward_working_bytes) for u in double.units] == [(40, 240)] * 2


@pytest.mark.parametrize("number", range(4))
def test_every_kind_of_moment_can_be_the_peak(number: int) -> None:
    """Forward, turn, backward, update: the one that is largest decides."""
    names = ("forward_working_bytes", "turn_bytes", "backward_working_bytes", "update_bytes")
    chain = equal_chain(2)
    in_unit = {names[number]: 5000} if number in (0, 2) else {}
    of_chain = {names[number]: 5000} if number in (1, 3) else {}
    chain = chain.model_copy(update={"units": (unit(0, **in_unit), unit(1)), **of_chain})
    beside = (100 + 10, 2 * 100 + 10 + 10, 100, 0)
    assert in_core_bytes(chain) == 5000 + beside[number]


def test_peaks_of_all_plans_of_a_small_chain() -> None:
    chain = equal_chain(3, turn_bytes=30).model_copy(
        update={"units": tuple(unit(n, gradient_bytes=3, backward_working_bytes=7 + n) for n in range(3))}
    )
    rates = TransferRates(tier="t", out_bytes_per_s=10.0, in_bytes_per_s=10.0)
    for chosen in itertools.product("ksrR", repeat=3):
        plan = blocks("".join(chosen))
        assert simulate(chain, plan, rates, 0).peak_bytes == account(chain, plan), chosen
