"""The search for a plan: from plans that are easily made to better ones nearby, with a bounded number of simulations.

A plan is made better by changing one block, or two, or where a block begins, as long as the simulated pass gets
shorter. Where nothing near helps, some blocks are changed at random (always in the same way) and the search goes on
from there. It ends when its simulations are used up, so that it takes a bounded time and always finds the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from dlbench.costs.memory.blocks import BlockCosts, cut
from dlbench.costs.memory.simulator import Pass, Setting, backward, begin, forward
from dlbench.specs.memory.chain import Chain, TransferRates
from dlbench.specs.memory.plan import Decision

Blocks = tuple[tuple[int, int, Decision], ...]
"""First unit, last unit and decision of each block."""

EFFORT = 250_000
"""Blocks that are simulated at most; about 3 microseconds each."""
PATIENCE = 30
"""Random changes in a row that may come to nothing."""
NEAR = 4
"""How many blocks apart two may be that are changed together, where there are more than `FEW`."""
FEW = 16


def best_found(
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    decisions: Sequence[Decision],
    starts: Sequence[int] | None = None,
    effort: int = EFFORT,
) -> Blocks | None:
    """The best plan that was found; None where none fits.

    Args:
        chain: the chain.
        rates: of transfers; None where no decision moves anything.
        capacity_bytes: what a pass may hold.
        decisions: those that blocks may have.
        starts: units with which blocks begin; None: the search chooses.
        effort: blocks that are simulated at most.
    """
    search = _Search(chain, rates, capacity_bytes, decisions, starts, effort)
    return search.run()


class _Search:
    def __init__(
        self,
        chain: Chain,
        rates: TransferRates | None,
        capacity_bytes: int,
        decisions: Sequence[Decision],
        starts: Sequence[int] | None,
        effort: int,
    ) -> None:
        self._chain = chain
        self._costs = BlockCosts(chain)
        self._setting = Setting.of(chain, rates, capacity_bytes)
        self._decisions = decisions
        self._spans = cut(chain, starts)
        self._pinned = starts is not None
        self._left = effort
        self._random = random.Random(0)
        self._useful = chain.useful_s
        self._seen: dict[Blocks, float] = {}
        self.best: Blocks | None = None
        self.least = math.inf

    def run(self) -> Blocks | None:
        """Starting points, descents from the best of them, and random changes."""
        rated = sorted(((self.rate(plan), number, plan) for number, plan in enumerate(self._starting_points())))
        rated = [found for found in rated if found[0] < math.inf]
        if not rated:
            return None
        self.least, _, self.best = rated[0]
        for least, _, plan in rated[:4]:
            self._keep(*self._descend(plan, least))
        idle = 0
        while idle < PATIENCE and self._left > 0 and self.least > self._useful * (1 + 1e-9):
            changed = self._shaken(self.best)
            least = self.rate(changed)
            if least == math.inf:
                idle += 1
                continue
            idle = 0 if self._keep(*self._descend(changed, least)) else idle + 1
        return self.best

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
        costs = [self._costs.of(*block) for block in plan]
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

    # Starting points

    def _starting_points(self) -> Iterator[Blocks]:
        spans = self._spans
        keep: list[Decision] = ["keep"] * len(spans)
        yield self._plan(keep)
        for decision in self._decisions[1:]:
            for head in range(1, len(spans) + 1):
                yield self._plan([decision] * head + keep[head:])
            for order in self._orders():
                plan = keep[:]
                for block in order:
                    plan[block] = decision
                    made = self._plan(plan)
                    if self.rate(made) < math.inf:
                        yield made
                        break

    def _orders(self) -> Iterator[list[int]]:
        kept = [self._costs.of(*span, "keep") for span in self._spans]
        bytes_of = [cost.own_bytes + cost.kept_bytes for cost in kept]
        yield sorted(range(len(kept)), key=lambda block: kept[block].forward_s / max(1, bytes_of[block]))
        yield sorted(range(len(kept)), key=lambda block: -bytes_of[block])
        yield sorted(range(len(kept)), key=lambda block: bytes_of[block])

    def _plan(self, decisions: Sequence[Decision]) -> Blocks:
        return tuple((first, last, decision) for (first, last), decision in zip(self._spans, decisions, strict=True))

    # Neighbours

    def _descend(self, plan: Blocks, least: float) -> tuple[Blocks, float]:
        improved = True
        while improved and self._left > 0:
            improved = False
            for better in self._neighbours(plan):
                value = self.rate(better, least)
                if value < least * (1 - 1e-9):
                    plan, least, improved = better, value, True
                    break
                if self._left <= 0:
                    break
        return plan, least

    def _neighbours(self, plan: Blocks) -> Iterator[Blocks]:
        count = len(plan)
        for block, (first, last, now) in enumerate(plan):
            for decision in self._decisions:
                if decision != now:
                    yield (*plan[:block], (first, last, decision), *plan[block + 1 :])
        if not self._pinned:
            yield from self._recut(plan)
        near = count if count <= FEW else NEAR
        for block, (first, last, now) in enumerate(plan):
            for other in range(block + 1, min(count, block + near + 1)):
                for decision in self._decisions:
                    for second in self._decisions:
                        if decision != now and second != plan[other][2]:
                            changed = list(plan)
                            changed[block] = (first, last, decision)
                            changed[other] = (*plan[other][:2], second)
                            yield tuple(changed)

    def _recut(self, plan: Blocks) -> Iterator[Blocks]:
        for block in range(len(plan) - 1):
            (first, last, now), (after, end, then) = plan[block], plan[block + 1]
            if self._chain.units[after].joins:
                for decision in dict.fromkeys((now, then, "recompute" if "recompute" in self._decisions else now)):
                    yield (*plan[:block], (first, end, decision), *plan[block + 2 :])
                if after < end:
                    yield (*plan[:block], (first, after, now), (after + 1, end, then), *plan[block + 2 :])
            if last > first:
                yield (*plan[:block], (first, last - 1, now), (last, end, then), *plan[block + 2 :])
        for block, (first, last, now) in enumerate(plan):
            if last > first:
                for begin_second in {(first + last + 1) // 2, first + 1, last}:
                    yield (*plan[:block], (first, begin_second - 1, now), (begin_second, last, now), *plan[block + 1 :])

    def _shaken(self, plan: Blocks) -> Blocks:
        """With some blocks changed at random."""
        changed = list(plan)
        for _ in range(self._random.randint(2, 4)):
            block = self._random.randrange(len(changed))
            changed[block] = (*changed[block][:2], self._random.choice(self._decisions))
        return tuple(changed)
