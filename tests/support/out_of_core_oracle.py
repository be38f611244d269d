"""The best plan there is for a small chain, by branch and bound over the simulator.

Decisions are made block by block in the order of the forward pass, whose simulation does not depend on later ones. A
branch is left where it cannot fit whatever follows, or cannot end before the best plan so far:

- from a block on, a pass takes at least the rest of its computing, what was decided to be recomputed included;
- what has left the device before the backward pass can begin must come back, one transfer after the other: the
  backward pass of block b starts no earlier than its beginning + the transfers of b and of all later ones.

Both hold for every way to go on, so that the result is exact (to rounding, 1e-12 of the pass).

Chains are drawn at random: networks of several shapes, links from slow to fast.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dlbench.perfmodels.out_of_core.blocks import BlockCost, BlockCosts, cut
from dlbench.perfmodels.out_of_core.planner import fixed_plan
from dlbench.perfmodels.out_of_core.search import smallest_capacity
from dlbench.perfmodels.out_of_core.simulator import Pass, PassSetting, backward, begin, forward
from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, TransferRates, Unit

SHAPES = ("equal", "cnn", "growing", "random", "spiky")
DECISIONS: tuple[Decision, ...] = ("keep", "swap", "recompute", "recompute-swap")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    chain: Chain
    rates: TransferRates
    capacity_bytes: int


def random_case(seed: int, *, units: int | None = None, most: int = 10) -> Case:
    """A chain with rates and a capacity between what just fits and what training in core holds.

    The link moves all activations in 0.1 to 10 times the pass, in each direction by itself; a fifth of the cases have
    just the smallest capacity.
    """
    draw = random.Random(seed)
    count = units or draw.randint(2, most)
    shape = SHAPES[seed % len(SHAPES)]
    chain = _chain(draw, count, shape)
    in_core = fixed_plan(chain, None, "none", "none").predicted.peak_bytes
    smallest = smallest_capacity(chain, recompute=True, swap=True)
    activations = in_core - chain.fixed_bytes
    slowness = 10 ** draw.uniform(-1, 1)
    rates = TransferRates(
        tier="drawn",
        out_bytes_per_s=max(1.0, activations / (chain.useful_s * slowness)),
        in_bytes_per_s=max(1.0, activations / (chain.useful_s * slowness * 2 ** draw.uniform(-1, 1))),
        latency_s=draw.choice((0.0, 1e-3 * chain.useful_s / count, 0.05 * chain.useful_s / count)),
        drag=draw.choice((0.0, 0.0, 0.1, 0.3, 1.0)),
    )
    share = 0.0 if draw.random() < 0.2 else draw.random()
    return Case(shape=shape, chain=chain, rates=rates, capacity_bytes=smallest + round(share * (in_core - smallest)))


def _chain(draw: random.Random, count: int, shape: str) -> Chain:
    units = []
    largest = 10 ** draw.uniform(4, 9)
    ratio = draw.uniform(1, 3)
    """Backward over forward pass."""
    halves = draw.choice((2, 3, 4))
    """Stages of a convolutional network; each halves what is saved."""
    inner = draw.choice((0.0, 1.0, 3.0, 8.0))
    """Bytes that a unit saves beside its boundaries, over these."""
    for number in range(count):
        place = number / max(1, count - 1)
        size, time = {
            "equal": (1.0, 1.0),
            "cnn": (0.5 ** int(place * halves), 1.0),
            "growing": (0.1 + place, 1.0),
            "random": (draw.random(), draw.expovariate(1.0)),
            "spiky": (1.0 if draw.random() < 0.3 else 0.05, draw.choice((0.1, 1.0, 4.0))),
        }[shape]
        boundary = 0 if number == 0 else max(1, round(largest * size * draw.choice((1.0, 1.0, 0.25))))
        units.append(
            Unit(
                name=f"layers.{number}",
                forward_s=1e-3 * time,
                backward_s=1e-3 * time * (ratio if shape != "random" else draw.uniform(0.5, 3)),
                saved_bytes=round(largest * size * inner),
                input_bytes=boundary,
                input_saved=draw.random() < 0.9,
                joins=draw.random() < 0.95,
                gradient_bytes=round(largest * draw.random() * 0.1),
                backward_working_bytes=round(largest * size * draw.random()),
            )
        )
    return Chain(
        units=tuple(units),
        batch=32,
        output_bytes=round(largest * draw.choice((0.0, 0.1, 1.0))),
        before_s=1e-3 * draw.choice((0.0, 0.5)),
        turn_s=1e-3 * draw.choice((0.0, 0.2, 1.0)),
        after_s=1e-3 * draw.choice((0.0, 0.5)),
        state_bytes=round(largest * draw.random()),
        outside_bytes=round(largest * draw.random()),
        turn_bytes=round(largest * draw.random()),
    )


def best_plan(
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    decisions: Sequence[Decision] = DECISIONS,
    starts: Sequence[int] | None = None,
    within_s: float = math.inf,
) -> tuple[tuple[PlannedBlock, ...], float] | None:
    """The plan with the shortest pass, and that pass in seconds; None where nothing fits (or is within `within_s`).

    Args:
        chain: the chain.
        rates: of transfers; None where no decision moves anything.
        capacity_bytes: what a pass may hold.
        decisions: the decisions that blocks may have.
        starts: units with which blocks begin; None: every unit is a block.
        within_s: a pass that is known to be possible, seconds: only shorter or equal ones are looked for, faster.
    """
    search = _Search(chain, rates, capacity_bytes, decisions, cut(chain, starts), within_s)
    search.go_on(search.start, 0)
    return None if search.best is None else (search.best, search.least)


def best_cut(
    chain: Chain, rates: TransferRates | None, capacity_bytes: int
) -> tuple[tuple[PlannedBlock, ...], float] | None:
    """As `best_plan`, over all ways to cut the chain into blocks as well."""
    best = None
    for starts in cuts(len(chain.units)):
        if any(not chain.units[number].joins and number not in starts for number in range(1, len(chain.units))):
            continue
        within = math.inf if best is None else best[1]
        found = best_plan(chain, rates, capacity_bytes, starts=starts, within_s=within)
        if found is not None and (best is None or found[1] < best[1]):
            best = found
    return best


def cuts(count: int) -> Iterator[tuple[int, ...]]:
    for bits in range(1 << (count - 1)):
        yield (0, *(number for number in range(1, count) if bits >> (number - 1) & 1))


class _Search:
    def __init__(
        self,
        chain: Chain,
        rates: TransferRates | None,
        capacity_bytes: int,
        decisions: Sequence[Decision],
        spans: Sequence[tuple[int, int]],
        within_s: float,
    ) -> None:
        known = BlockCosts(chain)
        self._setting = PassSetting.of(chain, rates, capacity_bytes)
        self._spans = spans
        self._options: list[list[BlockCost]] = []
        self._decisions: list[list[Decision]] = []
        for span in spans:
            # The first block's input is not held, so that some decisions come to the same.
            different: dict[BlockCost, Decision] = {}
            for decision in decisions:
                different.setdefault(known.of(*span, decision), decision)
            self._options.append(list(different))
            self._decisions.append(list(different.values()))
        self._chosen: list[BlockCost] = [options[0] for options in self._options]
        self._picks = [0] * len(spans)
        self._forward_left = [0.0] * (len(spans) + 1)
        self._needed = [0.0] * (len(spans) + 1)
        """Room that some block from here on needs whatever is decided, beside what earlier ones hold."""
        for block in range(len(spans) - 1, -1, -1):
            options = self._options[block]
            self._forward_left[block] = self._forward_left[block + 1] + options[0].forward_s
            least = min(cost.input_bytes + cost.forward_bytes for cost in options)
            self._needed[block] = max(self._needed[block + 1], least)
        self._backward = [options[0].backward_s for options in self._options]
        self.start = begin(self._chosen, self._setting)
        self.best: tuple[PlannedBlock, ...] | None = None
        self.least = within_s * (1 + 1e-12)

    def go_on(self, done: Pass, block: int) -> None:
        """Tries all that may follow the forward passes before `block`."""
        if block == len(self._spans):
            end = replace(done, outs=list(done.outs))
            backward(end, self._chosen, self._setting, cutoff=self.least)
            if end.peak <= self._setting.budget and end.clock < self.least:
                self.least = end.clock
                self.best = tuple(
                    PlannedBlock(first=first, last=last, decision=names[pick])
                    for (first, last), names, pick in zip(self._spans, self._decisions, self._picks, strict=True)
                )
            return
        for pick, cost in enumerate(self._options[block]):
            self._chosen[block] = cost
            self._picks[block] = pick
            went = replace(done, outs=list(done.outs))
            forward(went, self._chosen, range(block, block + 1), self._setting)
            if went.peak <= self._setting.budget and self._may_be_best(went, block):
                self.go_on(went, block + 1)

    def _may_be_best(self, done: Pass, block: int) -> bool:
        """Whether something that follows these forward passes might fit, and end in time."""
        pending = sum(out.freed for out in done.outs[done.oldest :])
        chosen, setting = self._chosen, self._setting
        output = self._options[block + 1][0].input_bytes if block + 1 < len(self._options) else setting.output_bytes
        if done.held - pending - output + self._needed[block + 1] > setting.budget:
            return False
        turn = done.clock + self._forward_left[block + 1] + setting.turn_s
        left = setting.after_s + done.recompute_s + sum(self._backward)
        if turn + left >= self.least:
            return False
        moves = 0.0
        for number in range(len(self._spans) - 1, block, -1):
            left -= self._backward[number]
        brought = {out.block for out in done.outs if out.end <= turn}
        for number in range(block, -1, -1):
            cost = chosen[number]
            if number in brought:
                moves += cost.moved_count * setting.latency_s + cost.moved_bytes * setting.in_s
                if turn + moves + left >= self.least:
                    return False
            left -= self._backward[number] + (cost.forward_s if cost.recomputes else 0.0)
        return True
