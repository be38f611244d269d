"""What a block of a chain takes: seconds, and bytes at each point of a pass.

A unit's boundary is its input, which the unit before makes. **Owner rule**: the boundary at which a block begins
belongs to that block, whoever saved it: the block's decision says whether it stays or moves. It is released after the
backward pass of the block before, which may need it as well. Two exceptions:

- what other modules use as well (`joins` is False) never moves, because they hold it anyway;
- what nobody saves (`input_saved` is False) is gone after the block's forward pass, unless the block is recomputed
  from it or others use it.

Inner boundaries are saved or not like everything else. Those that are not saved are held while the two units beside
them run, and so are all inner boundaries of a block that is to be recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlbench.errors import UserError, nearest
from dlbench.specs.memory.chain import Chain
from dlbench.specs.memory.plan import Decision, PlannedBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One block under one decision."""

    forward_s: float
    backward_s: float
    recomputes: bool
    input_bytes: int
    """Of the boundary at which it begins; held while its forward pass runs."""
    kept_bytes: int
    """Of `input_bytes`: what is held after the forward pass (before it has left, if it moves) and again for the
    backward pass, until that of the block before is done."""
    own_bytes: int
    """What its forward pass saves beside its boundaries, held until it has left or its backward pass is done; 0 where
    it is recomputed."""
    forward_bytes: int
    """Room that its forward pass needs to start, its output included."""
    moved_bytes: int
    """What leaves the device after its forward pass, and comes back; 0: nothing moves."""
    freed_bytes: int
    """What is freed when that has left, and has to find room again."""
    again_bytes: int
    """Room for recomputing, held until its backward pass is done; 0 where it is not recomputed."""
    again_bare_bytes: int
    """The same where the block's output is not held anyway."""
    own_released_bytes: int
    """What the end of its backward pass frees, beside `again_bytes` and the boundary at which it ends."""


class BlockCosts:
    """Costs of all blocks that a chain can be cut into; each is computed once.

    Args:
        chain: the chain.
        blocking: tensors leave one by one while a block computes, as in torch's save_on_cpu, so that a swapped block
            holds what one unit saves at a time.
    """

    def __init__(self, chain: Chain, *, blocking: bool = False) -> None:
        self.chain = chain
        self._blocking = blocking
        self._known: dict[tuple[int, int, Decision], BlockCost] = {}

    def of(self, first: int, last: int, decision: Decision) -> BlockCost:
        """The block of units `first` to `last`, both included."""
        key = (first, last, decision)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._cost(first, last, decision)
        return found

    def of_all(self, blocks: Sequence[tuple[int, int, Decision]]) -> list[BlockCost]:
        """Blocks by first unit, last unit and decision."""
        known = self._known
        return [known.get(block) or self.of(*block) for block in blocks]

    def of_plan(self, blocks: Sequence[PlannedBlock]) -> list[BlockCost]:
        """The blocks of a plan.

        Raises:
            ValueError: they are not all units in order, or a block spans a boundary that others use.
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
        held_by_others = not begin.joins
        kept = begin.input_bytes if begin.input_saved or recomputes or held_by_others else 0
        moving = 0 if held_by_others else kept

        saved = passing = single = single_inner = inner = 0
        for position, (unit, output) in enumerate(zip(units, outputs, strict=True)):
            entering = unit.input_bytes if position else 0
            stays = entering if unit.input_saved else 0
            saved += stays + unit.saved_bytes
            passing = max(passing, entering + output)
            beside = output if position + 1 < len(units) else 0
            single = max(single, entering + unit.saved_bytes + output)
            single_inner = max(single_inner, entering + unit.saved_bytes + beside)
            inner = max(inner, saved + entering - stays + beside)
        bare = max(inner, saved + entering - stays + outputs[-1])

        idle = BlockCost(
            forward_s=sum(unit.forward_s for unit in units),
            backward_s=sum(unit.backward_s for unit in units),
            recomputes=recomputes,
            input_bytes=begin.input_bytes,
            kept_bytes=kept,
            own_bytes=0,
            forward_bytes=bare,
            moved_bytes=0,
            freed_bytes=0,
            again_bytes=0,
            again_bare_bytes=0,
            own_released_bytes=0,
        )
        if recomputes:
            moved = moving if decision == "recompute-swap" else 0
            return replace(
                idle,
                forward_bytes=passing,
                moved_bytes=moved,
                freed_bytes=moved,
                again_bytes=inner,
                again_bare_bytes=bare,
            )
        if decision == "swap" and self._blocking:
            return replace(
                idle,
                kept_bytes=kept - moving,
                forward_bytes=single,
                moved_bytes=saved + moving,
                again_bytes=single_inner + moving,
                again_bare_bytes=single + moving,
            )
        moved = saved + moving if decision == "swap" else 0
        return replace(idle, own_bytes=saved, moved_bytes=moved, freed_bytes=moved, own_released_bytes=saved)


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
    """First and last unit of each block.

    Args:
        chain: the chain.
        starts: numbers of the units with which blocks begin; None: every unit is a block. Unit 0 and units whose
            input others use as well always begin one.

    Raises:
        ValueError: a start is no unit of the chain.
    """
    count = len(chain.units)
    if starts is None:
        return tuple((number, number) for number in range(count))
    for start in starts:
        if not 0 <= start < count:
            raise ValueError(f"no block can begin with unit {start}: the chain has units 0 to {count - 1}")
    begins = sorted({0, *starts, *(number for number in range(1, count) if not chain.units[number].joins)})
    return tuple((first, after - 1) for first, after in zip(begins, [*begins[1:], count], strict=True))


def block_starts(names: Sequence[str], units: Sequence[str]) -> list[int] | None:
    """Numbers of the units with which blocks begin (`train.memory.blocks`); None where no names are given.

    Raises:
        UserError: a name is no unit's.
    """
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
