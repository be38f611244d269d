"""Plans that fit, by dynamic programming over the chain, and a local search among them.

Each block must fit in addition to the bytes that earlier blocks leave, so of two partial plans for the first units the
one that leaves less is never worse. Its price is the time of recomputing plus `price` times that of its transfers.

The search begins with the methods that treat all blocks equally (but offloading), plans that treat only as many blocks
so as are needed to fit, and the cheapest plans at some prices; its result is never worse. A descent changes one block,
or two, or where a block begins, as long as the pass gets shorter; then some blocks are changed at random, with a fixed
seed, until the simulations are used up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from dlbench.errors import EnvironmentLacksError
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, cut, spans_of
from dlbench.perfmodels.out_of_core.simulator import PassSetting, backward, begin, forward, last_bytes
from dlbench.specs.out_of_core import Chain, Decision
from dlbench.units import format_bytes

Blocks = tuple[tuple[int, int, Decision], ...]  # First unit, last unit and decision of each block.

FRONT = 12  # Partial plans that are continued at a time: from the one that leaves the least bytes to the fastest.
EFFORT = 120_000  # Largest number of simulated blocks; about 3 microseconds each.
PATIENCE = 30  # Random changes in a row without a better plan after which the search ends.
NEAR = 4  # Largest distance of two blocks that are changed together, in plans of more than `FEW` blocks.
FEW = 16  # Units or blocks up to which all combinations are tried.
LONGEST = 8  # Units of a block in the first plans, in chains of more than `FEW` units.
PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)  # Seconds of computing that a second of moving may cost; hidden transfers cost 0.
DESCENTS = 4  # First plans from which a descent begins.


_PartialPlan = tuple[int, float, int, tuple[int, int, Decision] | None, "_PartialPlan | None"]
"""Bytes that the blocks so far leave on the device, their price in seconds, the most bytes that they need at a time,
the last block, and the partial plan before it. A plain tuple, because there are hundreds of thousands."""


def cheapest_fitting(
    costs: BlockCosts,
    setting: PassSetting,
    decisions: Sequence[Decision],
    spans: Sequence[tuple[int, int]],
    price: float,
    *,
    front: int = FRONT,
) -> tuple[Blocks, int] | None:
    """Returns the plan of the lowest price and its peak in bytes of activations; None (exact) if no plan fits.

    `front` partial plans are continued at a time; `spans` are first and last units of possible blocks; `price` is the
    cost of a second of moving in seconds of computing.
    """
    units = costs.chain.units
    price_per_byte, price_per_storage = price * (setting.in_s + setting.out_s) / 2, price * setting.latency_s
    last_units: list[list[int]] = [[] for _ in units]  # Last units of the blocks that begin with each unit.
    for first, last in spans:
        last_units[first].append(last)
    plans: list[list[_PartialPlan]] = [[] for _ in range(len(units) + 1)]  # Partial plans before each unit.
    if setting.last_bytes <= setting.budget:
        plans[0].append((0, 0.0, setting.last_bytes, None, None))
    for first in range(len(units)):
        front_plans = _thinned(plans[first], front)
        if not front_plans:
            continue
        for last in last_units[first]:
            for decision in decisions:
                cost = costs.of(first, last, decision)
                seconds = cost.moved_bytes * price_per_byte + cost.moved_count * price_per_storage
                if cost.recomputes:
                    seconds += cost.forward_s
                stays = cost.own_bytes + cost.kept_bytes
                forward = cost.input_bytes + cost.forward_bytes
                needed = max(forward, stays + cost.gradients_before_bytes + cost.backward_bytes)
                gain = stays - cost.freed_bytes
                plans[last + 1].extend(
                    (plan[0] + gain, plan[1] + seconds, max(plan[2], plan[0] + needed), (first, last, decision), plan)
                    for plan in front_plans
                    if plan[0] + needed <= setting.budget
                )
    turn = setting.output_bytes + setting.turn_bytes
    complete = _thinned([plan for plan in plans[-1] if plan[0] + turn <= setting.budget], front)
    if not complete:
        return None
    best = min(complete, key=itemgetter(1, 2))
    peak = max(best[2], best[0] + turn)
    blocks = []
    plan: _PartialPlan | None = best
    while plan is not None and plan[3] is not None:
        blocks.append(plan[3])
        plan = plan[4]
    return tuple(reversed(blocks)), peak


def _thinned(plans: Sequence[_PartialPlan], front: int) -> list[_PartialPlan]:
    """Returns at most `front` Pareto-optimal plans in bytes left and price; the first leaves the least."""
    best: list[_PartialPlan] = []
    for plan in sorted(plans, key=itemgetter(0, 1)):
        if not best or plan[1] < best[-1][1]:
            best.append(plan)
    if len(best) <= front:
        return best
    if front == 1:
        return best[:1]
    return [best[number * (len(best) - 1) // (front - 1)] for number in range(front)]


class DoesNotFitError(EnvironmentLacksError):
    """No plan fits the capacity; `smallest_bytes` would suffice."""

    def __init__(self, chain: Chain, capacity_bytes: int, smallest_bytes: int) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(
            f"training does not fit into {format_bytes(capacity_bytes)} with any plan: it needs at least "
            f"{exact_bytes(smallest_bytes)}: {largest_items(chain, smallest_bytes)}"
        )


def allowed(*, recompute: bool, swap: bool) -> tuple[Decision, ...]:
    """Returns the decisions that a plan may take."""
    may: dict[Decision, bool] = {
        "keep": True,
        "swap": swap,
        "recompute": recompute,
        "recompute-swap": recompute and swap,
    }
    return tuple(decision for decision, is_allowed in may.items() if is_allowed)


def smallest_capacity(chain: Chain, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None) -> int:
    """Returns the bytes of the smallest capacity that some plan fits; no plan fits one byte less. Blocks begin with the
    units `starts`. Without, all ways to cut the chain are tried, or single units if they may be swapped.
    """
    costs = BlockCosts(chain)
    high = _least_peak(costs, None, recompute=recompute, swap=swap, starts=starts)
    assert high is not None, "without a limit everything fits"
    low = 0
    while low < high:
        middle = (low + high) // 2
        peak = _least_peak(costs, chain.fixed_bytes + middle, recompute=recompute, swap=swap, starts=starts)
        if peak is None:
            low = middle + 1
        else:
            high = peak
    return chain.fixed_bytes + high


def fits(
    chain: Chain, capacity_bytes: int, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None
) -> bool:
    """Returns whether some plan fits the capacity."""
    if capacity_bytes < chain.fixed_bytes:
        return False
    return _least_peak(BlockCosts(chain), capacity_bytes, recompute=recompute, swap=swap, starts=starts) is not None


def _least_peak(
    costs: BlockCosts, capacity_bytes: int | None, *, recompute: bool, swap: bool, starts: Sequence[int] | None
) -> int | None:
    """Returns the peak of activations of some plan within a capacity, in bytes; None if there is no such plan."""
    chain = costs.chain
    is_free = starts is None and recompute and not swap
    spans = spans_of(chain) if is_free else cut(chain, starts)
    setting = PassSetting.of(chain, None, capacity_bytes)
    plan = cheapest_fitting(costs, setting, allowed(recompute=recompute, swap=swap), spans, 0.0, front=1)
    return None if plan is None else plan[1]


def largest_items(chain: Chain, smallest_bytes: int) -> str:
    """Returns the three largest items of the smallest capacity, in words."""
    outputs = [*(unit.input_bytes for unit in chain.units[1:]), chain.output_bytes]
    sizes = [
        unit.input_bytes + unit.saved_bytes + max(output, unit.backward_working_bytes)
        for unit, output in zip(chain.units, outputs, strict=True)
    ]
    largest = chain.units[sizes.index(max(sizes))].name
    passing = smallest_bytes - chain.fixed_bytes
    passing_title = f"activations, their gradients and workspace (the largest: {largest})"
    if passing == last_bytes(chain):
        passing_title = "gradients and workspace of the optimizer's update"
    items = [
        (chain.state_bytes, "parameters and optimizer state"),
        (chain.exchange_bytes, "buffers of the exchange"),
        (chain.outside_bytes, "batch and modules before the chain"),
        (passing, passing_title),
    ]
    return ", ".join(f"{format_bytes(size)} {title}" for size, title in sorted(items, reverse=True)[:3] if size > 0)


def exact_bytes(count: int) -> str:
    """Returns bytes exactly, as text that can be given as a capacity, and rounded if they are many."""
    if count < 1024:
        return f"{count} B"
    return f"{count} B ({format_bytes(count)})"


class Search:
    """A search for the plan with the shortest pass, within a number of simulated blocks (`effort`)."""

    def __init__(
        self,
        chain: Chain,
        setting: PassSetting,
        decisions: Sequence[Decision],
        starts: Sequence[int] | None,
        effort: int,
    ) -> None:
        self._chain = chain
        self._costs = BlockCosts(chain)
        self._setting = setting
        self._decisions = decisions
        self._spans = cut(chain, starts)
        self._pinned = starts is not None
        self._effort_left = effort  # Blocks that may still be simulated.
        self._random = random.Random(0)
        self._useful = chain.useful_s  # Seconds of a pass in core.
        self._rated: dict[Blocks, float] = {}  # Seconds of the pass of each plan that was simulated.
        self.best: Blocks | None = None
        self.least = math.inf

    def run(self, known: Iterable[Blocks]) -> Blocks | None:
        """Returns the best plan of the search, which begins with its own and the known plans; None if no plan fits."""
        keep = self._plan(["keep"] * len(self._spans))
        if self.rate(keep) < math.inf:
            return keep
        plans = enumerate(dict.fromkeys((*known, *self._first_plans())))
        rated = sorted((self.rate(plan), number, plan) for number, plan in plans)
        rated = [(seconds, number, plan) for seconds, number, plan in rated if seconds < math.inf]
        if not rated:
            return None
        self.least, _, self.best = rated[0]
        for seconds, _, plan in rated[:DESCENTS]:
            self._update_best(*self._descend(plan, seconds))
        idle = 0
        while idle < PATIENCE and self._effort_left > 0 and self.least > self._useful * (1 + 1e-9):
            blocks = list(self.best)
            for _ in range(self._random.randint(2, 4)):
                block = self._random.randrange(len(blocks))
                blocks[block] = (*blocks[block][:2], self._random.choice(self._decisions))
            changed = tuple(blocks)
            seconds = self.rate(changed)
            if seconds < math.inf and self._update_best(*self._descend(changed, seconds)):
                idle = 0
            else:
                idle += 1
        return self._lightened(self.best)

    def _update_best(self, plan: Blocks, seconds: float) -> bool:
        if seconds < self.least * (1 - 1e-9):
            self.best, self.least = plan, seconds
            return True
        return False

    def rate(self, plan: Blocks, cutoff: float = math.inf) -> float:
        """Returns the seconds of the pass; infinite if it does not fit, or takes `cutoff` or more."""
        seconds = self._rated.get(plan)
        if seconds is not None:
            return seconds
        costs = self._costs.of_all(plan)
        setting = self._setting
        recompute_s = sum(cost.forward_s for cost in costs if cost.recomputes)
        if self._useful + recompute_s >= cutoff:
            return math.inf
        self._effort_left -= len(costs)
        state = begin(costs, setting)
        forward(state, costs, range(len(costs)), setting)
        if state.peak <= setting.budget:
            backward(state, costs, setting, cutoff=cutoff)
        if state.peak > setting.budget:
            self._rated[plan] = math.inf
            return math.inf
        if state.clock >= cutoff:
            return math.inf
        self._rated[plan] = state.clock
        return state.clock

    def _first_plans(self) -> Iterator[Blocks]:
        keep: list[Decision] = ["keep"] * len(self._spans)
        costs = [self._costs.of(*span, "keep") for span in self._spans]
        sizes = [cost.own_bytes + cost.kept_bytes for cost in costs]
        by_time = sorted(range(len(costs)), key=lambda block: costs[block].forward_s / max(1, sizes[block]))
        by_size = sorted(range(len(costs)), key=sizes.__getitem__, reverse=True)
        yield self._plan(keep)
        for decision in self._decisions[1:]:
            yield self._plan([decision] * len(keep))
            for order in (range(len(keep)), by_time, by_size):
                yield self._shortest(order, decision)
        spans = self._spans
        if not self._pinned:
            spans = spans_of(self._chain, FEW if len(self._chain.units) <= FEW else LONGEST)
        without_swap = [decision for decision in self._decisions if decision in ("keep", "recompute")]
        for decisions, price in ((without_swap, 0.0), *((self._decisions, price) for price in PRICES)):
            plan = cheapest_fitting(self._costs, self._setting, decisions, spans, price)
            if plan is not None:
                yield plan[0]

    def _shortest(self, order: Sequence[int], decision: Decision) -> Blocks:
        """Returns the plan with the decision for as many blocks in this order as are needed to fit; for all if none
        fits.
        """

        def plan(count: int) -> Blocks:
            decisions: list[Decision] = ["keep"] * len(order)
            for block in order[:count]:
                decisions[block] = decision
            return self._plan(decisions)

        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            if self.rate(plan(middle)) < math.inf:
                high = middle
            else:
                low = middle
        return plan(high)

    def _plan(self, decisions: Sequence[Decision]) -> Blocks:
        return tuple((first, last, decision) for (first, last), decision in zip(self._spans, decisions, strict=True))

    def _descend(self, plan: Blocks, seconds: float) -> tuple[Blocks, float]:
        """Returns the plan and its seconds when no change of one block, or of two near each other, makes it shorter."""
        pairs = False
        while self._effort_left > 0:
            better, better_seconds = self._round(plan, seconds, pairs=pairs)
            if better_seconds < seconds:
                plan, seconds, pairs = better, better_seconds, False
            elif not pairs:
                pairs = True
            else:
                break
        return plan, seconds

    def _round(self, plan: Blocks, seconds: float, *, pairs: bool) -> tuple[Blocks, float]:
        changes = self._pairs if pairs else self._changes
        block = 0
        while block < len(plan) and self._effort_left > 0:
            for changed in changes(plan, block):
                changed_seconds = self.rate(changed, seconds)
                if changed_seconds < seconds * (1 - 1e-9):
                    plan, seconds = changed, changed_seconds
                    break
            else:
                block += 1
                continue
            if pairs:
                break
        return plan, seconds

    def _changes(self, plan: Blocks, block: int) -> Iterator[Blocks]:
        """Yields plans in which a block has another decision or borders."""
        first, last, decision = plan[block]
        head, tail = plan[:block], plan[block + 1 :]
        for other in self._decisions:
            if other != decision:
                yield (*head, (first, last, other), *tail)
        if self._pinned:
            return
        if tail:
            next_first, next_last, next_decision = tail[0]
            if self._chain.units[next_first].joins:
                for other in dict.fromkeys((decision, next_decision, *self._decisions[2:3])):
                    yield (*head, (first, next_last, other), *tail[1:])
                if next_first < next_last:
                    yield (*head, (first, next_first, decision), (next_first + 1, next_last, next_decision), *tail[1:])
                if last > first:
                    yield (*head, (first, last - 1, decision), (last, next_last, next_decision), *tail[1:])
        if last > first:
            for second in sorted({(first + last + 1) // 2, first + 1, last}):
                yield (*head, (first, second - 1, decision), (second, last, decision), *tail)

    def _pairs(self, plan: Blocks, block: int) -> Iterator[Blocks]:
        """Yields plans in which a block and one near it have other decisions."""
        first, last, decision = plan[block]
        end = len(plan) if len(plan) <= FEW else min(len(plan), block + NEAR + 1)
        for second in range(block + 1, end):
            second_first, second_last, second_decision = plan[second]
            for new in self._decisions:
                for second_new in self._decisions:
                    if new != decision and second_new != second_decision:
                        changed = list(plan)
                        changed[block] = (first, last, new)
                        changed[second] = (second_first, second_last, second_new)
                        yield tuple(changed)

    def _lightened(self, plan: Blocks) -> Blocks:
        """Returns the plan with less moved and recomputed, if the pass takes no longer."""
        for block in range(len(plan)):
            first, last, decision = plan[block]
            for lighter in self._decisions[: self._decisions.index(decision)]:
                changed = (*plan[:block], (first, last, lighter), *plan[block + 1 :])
                if self.rate(changed) <= self.least * (1 + 1e-9):
                    plan = changed
                    break
        return plan
