"""Plans that fit, by dynamic programming over the chain: what has to be held does not depend on times.

When all swap-outs have ended, a block's forward and backward pass find held what earlier blocks leave on the device,
whatever the order of events (`dlbench.perfmodels.out_of_core.simulator`). So a plan fits just when each block finds its
room besides that sum, and of two ways to treat the first units the one that leaves less is never the worse one. Times
count here by a price: recomputing at its length, moving at `price` times the length of its transfer.

The search for a plan begins with every method that treats all blocks alike, with those where as many of the first, the
largest or the cheapest blocks are treated so as are needed to fit, and with the cheapest plans that fit at some prices
of moving, which choose where blocks begin as well; so what is found is never worse than any of these. Offloading is
none of them: it waits for each transfer, and may fit where swapping in a plan does not.

A plan is made better by changing one block, or two, or where a block begins, as long as the simulated pass gets
shorter. Where nothing near helps, some blocks are changed at random (always in the same way) and the search goes on
from there. It ends when its simulations are used up, so that it takes a bounded time and always finds the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from operator import itemgetter

from dlbench.errors import EnvironmentLacksError
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, cut, spans_of
from dlbench.perfmodels.out_of_core.simulator import PassSetting, backward, begin, forward, last_bytes
from dlbench.specs.out_of_core import Chain, Decision, TransferRates
from dlbench.units import format_bytes

Blocks = tuple[tuple[int, int, Decision], ...]  # First unit, last unit and decision of each block.

FRONT = 12  # Ways to treat the first units that are followed at a time: from the one that leaves least to the fastest.
EFFORT = 120_000  # Blocks that are simulated at most; about 3 microseconds each.
PATIENCE = 30  # Random changes in a row that may come to nothing.
NEAR = 4  # How many blocks apart two may be that are changed together, where there are more than `FEW`.
FEW = 16
LONGEST = 8  # Units of a block in the first plans, in chains of more than `FEW` units.
PRICES = (0.0, 0.1, 0.3, 1.0, 3.0)  # Seconds of computing that a second of moving may cost; hidden transfers cost 0.
DESCENTS = 4  # First plans that are made better.


_Way = tuple[int, float, int, tuple[int, int, Decision] | None, "_Way | None"]
"""What the blocks so far leave on the device, their price in seconds, the most that they need at a time, the last of
them, and the way before it. Plain, as hundreds of thousands are made."""


def cheapest_fitting(
    costs: BlockCosts,
    setting: PassSetting,
    decisions: Sequence[Decision],
    spans: Sequence[tuple[int, int]],
    price: float,
    *,
    front: int = FRONT,
) -> tuple[Blocks, int] | None:
    """The plan of the least price that was found, and its peak in bytes of activations; None: no plan fits.

    None is exact; the price is exact where `front` ways are enough.

    `setting`: of the pass; its budget must hold the peak. `spans`: first and last units that blocks may have. `price`:
    what a second of moving costs, in seconds of computing. `front`: ways that are followed at a time.
    """
    units = costs.chain.units
    per_byte, each = price * (setting.in_s + setting.out_s) / 2, price * setting.latency_s
    after: list[list[int]] = [[] for _ in units]
    for first, last in spans:
        after[first].append(last)
    ways: list[list[_Way]] = [[] for _ in range(len(units) + 1)]
    if setting.last_bytes <= setting.budget:
        ways[0].append((0, 0.0, setting.last_bytes, None, None))
    for first in range(len(units)):
        known = _thinned(ways[first], front)
        for last in after[first] if known else ():
            for decision in decisions:
                cost = costs.of(first, last, decision)
                seconds = cost.forward_s if cost.recomputes else 0.0
                seconds += cost.moved_bytes * per_byte + cost.moved_count * each
                stays = cost.own_bytes + cost.kept_bytes
                forward = cost.input_bytes + cost.forward_bytes
                needed = max(forward, stays + cost.gradients_before_bytes + cost.backward_bytes)
                gain = stays - cost.freed_bytes
                ways[last + 1].extend(
                    (way[0] + gain, way[1] + seconds, max(way[2], way[0] + needed), (first, last, decision), way)
                    for way in known
                    if way[0] + needed <= setting.budget
                )
    turn = setting.output_bytes + setting.turn_bytes
    ended = _thinned([way for way in ways[-1] if way[0] + turn <= setting.budget], front)
    if not ended:
        return None
    best = min(ended, key=itemgetter(1, 2))
    peak = max(best[2], best[0] + turn)
    blocks = []
    way: _Way | None = best
    while way is not None and way[3] is not None:
        blocks.append(way[3])
        way = way[4]
    return tuple(reversed(blocks)), peak


def _thinned(ways: Sequence[_Way], front: int) -> list[_Way]:
    """Those that no other way beats in both, at most `front` of them: the first leaves the least."""
    best: list[_Way] = []
    for way in sorted(ways, key=itemgetter(0, 1)):
        if not best or way[1] < best[-1][1]:
            best.append(way)
    if len(best) <= front:
        return best
    if front == 1:
        return best[:1]
    return [best[number * (len(best) - 1) // (front - 1)] for number in range(front)]


class DoesNotFitError(EnvironmentLacksError):
    """No plan fits the capacity; `smallest_bytes` would do."""

    def __init__(self, chain: Chain, capacity_bytes: int, smallest_bytes: int) -> None:
        self.smallest_bytes = smallest_bytes
        super().__init__(
            f"training does not fit into {format_bytes(capacity_bytes)} even so: needs at least "
            f"{exact_bytes(smallest_bytes)}: {largest_items(chain, smallest_bytes)}"
        )


def allowed(*, recompute: bool, swap: bool) -> tuple[Decision, ...]:
    """Decisions that a plan may take."""
    every: tuple[tuple[Decision, bool], ...] = (
        ("keep", True),
        ("swap", swap),
        ("recompute", recompute),
        ("recompute-swap", recompute and swap),
    )
    return tuple(decision for decision, may in every if may)


def smallest_capacity(chain: Chain, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None) -> int:
    """Bytes of the smallest capacity that some plan fits; no plan fits one byte less.

    Where blocks may be swapped, single units as blocks need the least: nothing else has to be held, and a block needs
    no less than each of its units by itself. Otherwise all ways to cut the chain count.

    `starts`: units with which blocks begin; None: all ways to cut the chain.
    """
    most = _least_peak(chain, None, recompute=recompute, swap=swap, starts=starts)
    assert most is not None, "without a limit everything fits"
    least = 0
    while least < most:
        middle = (least + most) // 2
        found = _least_peak(chain, middle, recompute=recompute, swap=swap, starts=starts)
        if found is None:
            least = middle + 1
        else:
            most = found
    return chain.fixed_bytes + most


def fits(
    chain: Chain, capacity_bytes: int, *, recompute: bool, swap: bool, starts: Sequence[int] | None = None
) -> bool:
    """Whether some plan fits the capacity."""
    budget = capacity_bytes - chain.fixed_bytes
    return budget >= 0 and _least_peak(chain, budget, recompute=recompute, swap=swap, starts=starts) is not None


def _least_peak(
    chain: Chain, budget: int | None, *, recompute: bool, swap: bool, starts: Sequence[int] | None
) -> int | None:
    """Peak of activations of some plan that keeps to the budget; None: there is none."""
    spans = cut(chain, starts) if starts is not None or swap or not recompute else spans_of(chain)
    setting = PassSetting.of(chain, None, None if budget is None else chain.fixed_bytes + budget)
    found = cheapest_fitting(BlockCosts(chain), setting, allowed(recompute=recompute, swap=swap), spans, 0.0, front=1)
    return None if found is None else found[1]


def largest_items(chain: Chain, smallest_bytes: int) -> str:
    """What takes most of the smallest capacity, in words."""
    outputs = [*(unit.input_bytes for unit in chain.units[1:]), chain.output_bytes]
    sizes = [
        unit.input_bytes + unit.saved_bytes + max(output, unit.backward_working_bytes)
        for unit, output in zip(chain.units, outputs, strict=True)
    ]
    largest = chain.units[sizes.index(max(sizes))].name
    passing = smallest_bytes - chain.fixed_bytes
    what = f"activations, their gradients and workspace (the largest: {largest})"
    if passing == last_bytes(chain):
        what = "gradients and what the optimiser's update works with"
    items = [
        (chain.state_bytes, "parameters and optimiser state"),
        (chain.exchange_bytes, "buffers of the exchange"),
        (chain.outside_bytes, "batch and modules before the chain"),
        (passing, what),
    ]
    return ", ".join(f"{format_bytes(size)} {what}" for size, what in sorted(items, reverse=True)[:3] if size > 0)


def exact_bytes(count: int) -> str:
    """Bytes as text that can be given as a capacity, and in words."""
    return f"{count} B" if count < 1024 else f"{count} B ({format_bytes(count)})"


def best_found(
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    decisions: Sequence[Decision],
    starts: Sequence[int] | None = None,
    known: Sequence[Blocks] = (),
    effort: int = EFFORT,
) -> Blocks | None:
    """The best plan that was found; None where none fits."""
    return _Search(chain, PassSetting.of(chain, rates, capacity_bytes), decisions, starts, effort).run(known)


class _Search:
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
        self._left = effort
        self._random = random.Random(0)
        self._useful = chain.useful_s
        self._seen: dict[Blocks, float] = {}
        self.best: Blocks | None = None
        self.least = math.inf

    def run(self, known: Sequence[Blocks] = ()) -> Blocks | None:
        """First plans, descents from the best of them, and random changes."""
        keep = self._plan(["keep"] * len(self._spans))
        if self.rate(keep) < math.inf:
            return keep
        rated = sorted(
            (self.rate(plan), number, plan) for number, plan in enumerate(dict.fromkeys((*known, *self._first_plans())))
        )
        rated = [found for found in rated if found[0] < math.inf]
        if not rated:
            return None
        self.least, _, self.best = rated[0]
        for least, _, plan in rated[:DESCENTS]:
            self._keep(*self._descend(plan, least))
        idle = 0
        while idle < PATIENCE and self._left > 0 and self.least > self._useful * (1 + 1e-9):
            shaken = list(self.best)
            for _ in range(self._random.randint(2, 4)):
                block = self._random.randrange(len(shaken))
                shaken[block] = (*shaken[block][:2], self._random.choice(self._decisions))
            changed = tuple(shaken)
            least = self.rate(changed)
            if least < math.inf and self._keep(*self._descend(changed, least)):
                idle = 0
            else:
                idle += 1
        return self._lightened(self.best)

    def _keep(self, plan: Blocks, least: float) -> bool:
        if least < self.least * (1 - 1e-9):
            self.best, self.least = plan, least
            return True
        return False

    def rate(self, plan: Blocks, cutoff: float = math.inf) -> float:
        """Seconds of the pass; infinite where it does not fit, or takes `cutoff` or more."""
        known = self._seen.get(plan)
        if known is not None:
            return known
        costs = self._costs.of_all(plan)
        setting = self._setting
        again = sum(cost.forward_s for cost in costs if cost.recomputes)
        if self._useful + again >= cutoff:
            return math.inf
        self._left -= len(costs)
        done = begin(costs, setting)
        forward(done, costs, range(len(costs)), setting)
        if done.peak <= setting.budget:
            backward(done, costs, setting, cutoff=cutoff)
        if done.peak > setting.budget:
            self._seen[plan] = math.inf
            return math.inf
        if done.clock >= cutoff:
            return math.inf
        self._seen[plan] = done.clock
        return done.clock

    def _first_plans(self) -> Iterator[Blocks]:
        keep: list[Decision] = ["keep"] * len(self._spans)
        yield self._plan(keep)
        for decision in self._decisions[1:]:
            yield self._plan([decision] * len(keep))
            for order in ([*range(len(keep))], *self._orders()):
                yield self._shortest(order, decision)
        longest = None if len(self._chain.units) <= FEW else LONGEST
        spans = self._spans if self._pinned else spans_of(self._chain, longest)
        without = [decision for decision in self._decisions if decision in ("keep", "recompute")]
        for decisions, price in ((without, 0.0), *((self._decisions, price) for price in PRICES)):
            found = cheapest_fitting(self._costs, self._setting, decisions, spans, price)
            if found is not None:
                yield found[0]

    def _shortest(self, order: Sequence[int], decision: Decision) -> Blocks:
        """This many of the first blocks in this order as a plan needs to fit; all where that is not enough."""

        def plan(count: int) -> Blocks:
            some: list[Decision] = ["keep"] * len(order)
            for block in order[:count]:
                some[block] = decision
            return self._plan(some)

        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.rate(plan(middle)) < math.inf else (middle, high)
        return plan(high)

    def _orders(self) -> Iterator[list[int]]:
        kept = [self._costs.of(*span, "keep") for span in self._spans]
        sizes = [cost.own_bytes + cost.kept_bytes for cost in kept]
        yield sorted(range(len(kept)), key=lambda block: kept[block].forward_s / max(1, sizes[block]))
        yield sorted(range(len(kept)), key=lambda block: -sizes[block])

    def _plan(self, decisions: Sequence[Decision]) -> Blocks:
        return tuple((first, last, decision) for (first, last), decision in zip(self._spans, decisions, strict=True))

    def _descend(self, plan: Blocks, least: float) -> tuple[Blocks, float]:
        """The plan that is left when no change of one block, or of two near each other, makes it shorter."""
        pairs = False
        while self._left > 0:
            better, value = self._round(plan, least, pairs=pairs)
            if value < least:
                plan, least, pairs = better, value, False
            elif not pairs:
                pairs = True
            else:
                break
        return plan, least

    def _round(self, plan: Blocks, least: float, *, pairs: bool) -> tuple[Blocks, float]:
        """Looks once at every block, and takes what is better at once."""
        block = 0
        while block < len(plan) and self._left > 0:
            for changed in self._pairs(plan, block) if pairs else self._changes(plan, block):
                value = self.rate(changed, least)
                if value < least * (1 - 1e-9):
                    plan, least = changed, value
                    break
            else:
                block += 1
                continue
            if pairs:
                break
        return plan, least

    def _changes(self, plan: Blocks, block: int) -> Iterator[Blocks]:
        first, last, now = plan[block]
        head, tail = plan[:block], plan[block + 1 :]
        for decision in self._decisions:
            if decision != now:
                yield (*head, (first, last, decision), *tail)
        if self._pinned:
            return
        if tail:
            (after, end, then), tail = tail[0], tail[1:]
            if self._chain.units[after].joins:
                for decision in dict.fromkeys((now, then, *self._decisions[2:3])):
                    yield (*head, (first, end, decision), *tail)
                if after < end:
                    yield (*head, (first, after, now), (after + 1, end, then), *tail)
                if last > first:
                    yield (*head, (first, last - 1, now), (last, end, then), *tail)
            tail = plan[block + 1 :]
        if last > first:
            for second in sorted({(first + last + 1) // 2, first + 1, last}):
                yield (*head, (first, second - 1, now), (second, last, now), *tail)

    def _pairs(self, plan: Blocks, block: int) -> Iterator[Blocks]:
        first, last, now = plan[block]
        near = len(plan) if len(plan) <= FEW else NEAR
        for other in range(block + 1, min(len(plan), block + near + 1)):
            for decision in self._decisions:
                for second in self._decisions:
                    if decision != now and second != plan[other][2]:
                        changed = list(plan)
                        changed[block] = (first, last, decision)
                        changed[other] = (*plan[other][:2], second)
                        yield tuple(changed)

    def _lightened(self, plan: Blocks) -> Blocks:
        """With less moved and recomputed, where the pass takes no longer for it."""
        for block in range(len(plan)):
            first, last, now = plan[block]
            for decision in self._decisions[: self._decisions.index(now)]:
                changed = (*plan[:block], (first, last, decision), *plan[block + 1 :])
                if self.rate(changed) <= self.least * (1 + 1e-9):
                    plan = changed
                    break
        return plan
