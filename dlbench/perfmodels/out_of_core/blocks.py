"""What a block of a chain takes (seconds, and bytes at each point of a pass), and the schedule of a pass over blocks.

A unit's boundary is its input, which the unit before makes. **Owner rule**: the boundary at which a block begins
belongs to that block, whoever saved it: the block's decision says whether it stays or moves. It is released after the
block's backward pass; where the unit before saved it as well, it is part of what that one's backward pass works with.
Two exceptions:

- what other modules use as well (`joins` is False, `input_shared` not) never moves, because they hold it anyway;
- what nobody saves (`input_saved` is False) is gone after the block's forward pass, unless the block is recomputed
  from it or others use it.

Inner boundaries are saved or not like everything else. Those that are not saved are held while the two units next to
them run.

**Moments**: what a unit holds for a while (workspace, gradients) counts while its own pass runs, and only then. So a
block needs the most that any of its units needs, each with what the others hold at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from dlbench.errors import UserError, nearest
from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One block under one decision."""

    forward_s: float
    backward_s: float
    recomputes: bool
    input_bytes: int  # Of the boundary at which it begins; held while its forward pass runs.
    kept_bytes: int
    """Of `input_bytes`: what is held after the forward pass (before it has left, if it moves) and again until its
    backward pass is done."""
    own_bytes: int
    """What its forward pass saves besides its boundaries, held until it has left or its backward pass is done; 0 where
    it is recomputed."""
    forward_bytes: int  # Room that its forward pass needs besides its input, its output included.
    moved_bytes: int  # What leaves the device after its forward pass, and comes back; 0: nothing moves.
    moved_count: int  # Storages that this lies in; each takes a transfer's fixed time.
    freed_bytes: int  # What is freed when that has left, and has to find room again.
    backward_bytes: int  # Room that its backward pass needs besides `own_bytes` and `kept_bytes`, recomputing included.
    gradient_bytes: int  # Gradients of its parameters, which stay.
    gradients_before_bytes: int  # Gradients of parameters that are there when its backward pass begins.


class BlockCosts:
    """Costs of all blocks that a chain can be cut into; each is computed once. `chain`: the chain. `blocking`: tensors
    leave one by one while a block computes, as in torch's save_on_cpu, so that a swapped block holds what one unit
    needs at a time.
    """

    def __init__(self, chain: Chain, *, blocking: bool = False) -> None:
        self.chain = chain
        self._blocking = blocking
        self._known: dict[tuple[int, int, Decision], BlockCost] = {}
        made = [chain.turn_gradient_bytes, *(unit.gradient_bytes for unit in reversed(chain.units[1:]))]
        self._gradients_behind = list(accumulate(made))[::-1]

    def of(self, first: int, last: int, decision: Decision) -> BlockCost:
        key = (first, last, decision)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._cost(first, last, decision)
        return found

    def of_all(self, blocks: Sequence[tuple[int, int, Decision]]) -> list[BlockCost]:
        known = self._known
        return [known.get(block) or self.of(*block) for block in blocks]

    def of_plan(self, blocks: Sequence[PlannedBlock]) -> list[BlockCost]:
        """The blocks of a plan. Raises `ValueError`: they are not all units in order, or a block spans a boundary that
        others use.
        """
        check_blocks(self.chain, blocks)
        return [self.of(block.first, block.last, block.decision) for block in blocks]

    def _cost(self, first: int, last: int, decision: Decision) -> BlockCost:
        units = self.chain.units[first : last + 1]
        outputs = [unit.input_bytes for unit in self.chain.units[first + 1 : last + 2]]
        if last + 1 == len(self.chain.units):
            outputs.append(self.chain.output_bytes)
        begin = units[0]
        recomputes = decision in ("recompute", "recompute-swap")
        held_by_others = begin.input_shared and not begin.joins
        kept = begin.input_bytes if begin.input_saved or recomputes or held_by_others else 0
        moving = 0 if held_by_others else kept

        # With what units before it in the block have saved; backward also with the gradients of those behind it.
        saved = count = forward = passing = again = 0
        held = []
        for position, (unit, output) in enumerate(zip(units, outputs, strict=True)):
            entering = unit.input_bytes if position else 0
            # Where recomputing ends with this unit, it does so when all is saved.
            again = max(forward, saved + entering + unit.saved_bytes + unit.recomputing_working_bytes)
            forward = max(forward, saved + entering + unit.saved_bytes + output + unit.forward_working_bytes)
            passing = max(passing, entering + output + unit.passing_working_bytes)
            saved += (entering if unit.input_saved else 0) + unit.saved_bytes
            count += (1 if unit.input_saved and entering else 0) + (unit.saved_count if unit.saved_bytes else 0)
            held.append(saved)
        backward = piecemeal = gradients = 0
        for unit, here in zip(reversed(units), reversed(held), strict=True):
            backward = max(backward, here + unit.backward_working_bytes + gradients)
            piecemeal = max(piecemeal, unit.piecemeal_bytes + gradients)
            gradients += unit.gradient_bytes

        moves = decision in ("swap", "recompute-swap")
        blocking = decision == "swap" and self._blocking
        own = 0 if recomputes or blocking else saved
        moved = (moving if recomputes else saved + moving) if moves else 0
        is_counted = any(unit.saved_count for unit in units)
        count = count + (1 if moving else 0) if is_counted and not recomputes else 1
        needed = piecemeal if blocking else backward - saved
        if recomputes:  # the gradient of its output is there while its forward pass is repeated
            needed = max(backward, again + outputs[-1])
        return BlockCost(
            forward_s=sum(unit.forward_s for unit in units),
            backward_s=sum(unit.backward_s for unit in units),
            recomputes=recomputes,
            input_bytes=begin.input_bytes,
            kept_bytes=kept - moving if blocking else kept,
            own_bytes=own,
            forward_bytes=passing if recomputes or blocking else forward,
            moved_bytes=moved,
            moved_count=count if moved else 0,
            freed_bytes=0 if blocking else moved,
            backward_bytes=needed,
            gradient_bytes=gradients,
            gradients_before_bytes=self._gradients_behind[last],
        )


def check_blocks(chain: Chain, blocks: Sequence[PlannedBlock]) -> None:
    """Raises a ValueError where blocks are not all units of the chain in order, or span a boundary that others use."""
    expected = 0
    for block in blocks:
        if block.first != expected or not block.first <= block.last < len(chain.units):
            raise ValueError(
                f"blocks must be all {len(chain.units)} units in order; "
                f"units {block.first} to {block.last} follow unit {expected - 1}"
            )
        for number in range(block.first + 1, block.last + 1):
            if not chain.units[number].joins:
                raise ValueError(
                    f"a block spans the input of {chain.units[number].name}, which other modules use as well"
                )
        expected = block.last + 1
    if expected != len(chain.units):
        raise ValueError(f"blocks hold units 0 to {expected - 1} of {len(chain.units)}")


def cut(chain: Chain, starts: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """First and last unit of each block. `chain`: the chain. `starts`: numbers of the units with which blocks begin;
    None: every unit is a block. Unit 0 and units whose input others use as well always begin one.
    """
    count = len(chain.units)
    if starts is None:
        return tuple((number, number) for number in range(count))
    begins = sorted({0, *starts, *(number for number in range(1, count) if not chain.units[number].joins)})
    return tuple((first, after - 1) for first, after in zip(begins, [*begins[1:], count], strict=True))


def block_starts(names: Sequence[str], units: Sequence[str]) -> list[int] | None:
    """Numbers of the units with which blocks begin (`train.memory.blocks`); None where no names are given."""
    if not names:
        return None
    for name in names:
        if name not in units:
            raise UserError(f"train.memory.blocks: no block can begin with {name!r}; {nearest(name, units)}")
    return sorted({units.index(name) for name in names})


def spans_of(chain: Chain, longest: int | None = None) -> tuple[tuple[int, int], ...]:
    """First and last units of all blocks that there may be, of at most `longest` units."""
    spans = []
    for first in range(len(chain.units)):
        spans.append((first, first))
        for last in range(first + 1, min(len(chain.units), first + (longest or len(chain.units)))):
            if not chain.units[last].joins:
                break
            spans.append((first, last))
    return tuple(spans)


Lane = Literal["compute", "out", "in"]
Kind = Literal["forward", "recompute", "backward", "outside", "wait", "swap out", "swap in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Something that one lane does."""

    lane: Lane
    kind: Kind  # outside: what is not of the chain (before it, head and loss, after it). wait: computing stands still.
    block: int | None  # Number of the block, from 0; for wait the block that waits. None: outside.
    start_s: float  # From the start of the pass.
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A simulated pass."""

    operations: tuple[Operation, ...]  # In the order of their start.
    makespan: float  # The pass, seconds.
    useful_s: float  # The pass in core, seconds.
    recompute_s: float  # Recomputing, seconds; what transfers slow down included.
    room_wait_s: float  # Forward passes waited for room, seconds.
    swap_wait_s: float  # Backward passes waited for what comes back, or for its room, seconds.
    peak_bytes: int  # The most that is held at a time: `chain.fixed_bytes` and activations.
    swapped_bytes: int  # What leaves the device; as much comes back.
    leaving: frozenset[int]  # The blocks that it is of.
    over_bytes: int  # By how much the capacity is too small; 0: it fits.
    held: tuple[tuple[float, int], ...]  # What is held (as `peak_bytes`) from each of these times on; times ascend.

    @property
    def fits(self) -> bool:
        return self.over_bytes == 0

    @property
    def stall_s(self) -> float:
        return self.room_wait_s + self.swap_wait_s

    @property
    def occupancy(self) -> float:
        """Share of the pass in which something is computed, recomputing included."""
        return _share(self.makespan - self.stall_s, self.makespan)

    @property
    def efficiency(self) -> float:
        return _share(self.useful_s, self.makespan)


def predicted(schedule: Schedule) -> Prediction:
    """The schedule in the numbers that a plan and a record hold."""
    same = {name: getattr(schedule, name) for name in Prediction.model_fields if name != "pass_s"}
    return Prediction(pass_s=schedule.makespan, **same)


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0
