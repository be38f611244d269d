"""Seconds and bytes of the blocks of a chain, and the schedule of a pass over blocks.

The boundary at which a block begins (the input of its first unit) belongs to that block, whichever unit saved it. A
boundary that other modules use as well (`joins` is False, `input_shared` not) never moves, because they hold it; one
that no unit saves (`input_saved` is False) is freed after the forward pass, unless the block is recomputed from it or
other modules use it.

Temporary memory of a unit counts while its own pass runs, so a block needs the most that any of its units needs with
the bytes that the others hold at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from dlbench.errors import UserError, nearest
from dlbench.specs.out_of_core import Chain, Decision, PlannedBlock, Prediction, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """The seconds and bytes of one block with one decision."""

    forward_s: float
    backward_s: float
    recomputes: bool
    input_bytes: int  # Bytes of the boundary at which it begins; held while its forward pass runs.
    kept_bytes: int  # Of `input_bytes`, held until their swap-out ends, and again until the backward pass ends.
    own_bytes: int  # Saved by its forward pass, without boundaries; 0 if it is recomputed.
    forward_bytes: int  # Bytes that its forward pass needs without its input, including its output.
    moved_bytes: int  # Bytes that leave the device after its forward pass and come back; 0: nothing moves.
    moved_count: int  # Storages of these bytes; each has a transfer's latency.
    freed_bytes: int  # Bytes that are freed when the swap-out has ended, and allocated again for the swap-in.
    backward_bytes: int  # Bytes that its backward pass needs besides `own_bytes` and `kept_bytes`, with recomputing.
    gradient_bytes: int  # Gradients of its parameters, which stay.
    gradients_before_bytes: int  # Gradients of parameters that exist when its backward pass begins.


class BlockCosts:
    """The costs of all blocks that a chain can be cut into, each computed once. With `blocking`, tensors leave one by
    one (torch's save_on_cpu), and a swapped block holds the bytes of one unit at a time.
    """

    def __init__(self, chain: Chain, *, blocking: bool = False) -> None:
        self.chain = chain
        self._blocking = blocking
        self._cache: dict[tuple[int, int, Decision], BlockCost] = {}
        gradients = [chain.turn_gradient_bytes, *(unit.gradient_bytes for unit in reversed(chain.units[1:]))]
        self._gradients_behind = list(accumulate(gradients))[::-1]  # Bytes behind each unit.

    def of(self, first: int, last: int, decision: Decision) -> BlockCost:
        key = (first, last, decision)
        cost = self._cache.get(key)
        if cost is None:
            cost = self._cache[key] = self._cost(first, last, decision)
        return cost

    def of_all(self, blocks: Sequence[tuple[int, int, Decision]]) -> list[BlockCost]:
        cache = self._cache
        return [cache.get(block) or self.of(*block) for block in blocks]

    def of_plan(self, blocks: Sequence[PlannedBlock]) -> list[BlockCost]:
        """Returns the costs of the blocks of a plan; raises as `check_blocks`."""
        check_blocks(self.chain, blocks)
        return [self.of(block.first, block.last, block.decision) for block in blocks]

    def _cost(self, first: int, last: int, decision: Decision) -> BlockCost:
        units = self.chain.units[first : last + 1]
        outputs = [unit.input_bytes for unit in self.chain.units[first + 1 : last + 2]]
        if last + 1 == len(self.chain.units):
            outputs.append(self.chain.output_bytes)
        begin = units[0]
        recomputes = decision in ("recompute", "recompute-swap")
        blocking = decision == "swap" and self._blocking
        held_by_others = begin.input_shared and not begin.joins
        is_kept = begin.input_saved or recomputes or held_by_others
        input_kept = begin.input_bytes if is_kept else 0
        moving = 0 if held_by_others else input_kept

        # Bytes include those saved by earlier units of the block; in backward also gradients of those behind.
        saved = count = forward = passing = recomputing = 0
        saved_up_to = []
        for position, (unit, output) in enumerate(zip(units, outputs, strict=True)):
            entering = unit.input_bytes if position else 0
            # If recomputing ends with this unit, it does so when all is saved.
            recomputing = max(forward, saved + entering + unit.saved_bytes + unit.recomputing_working_bytes)
            forward = max(forward, saved + entering + unit.saved_bytes + output + unit.forward_working_bytes)
            passing = max(passing, entering + output + unit.passing_working_bytes)
            if unit.input_saved and entering:
                saved += entering
                count += 1
            if unit.saved_bytes:
                saved += unit.saved_bytes
                count += unit.saved_count
            saved_up_to.append(saved)
        backward, piecemeal, gradients = _backward_bytes(units, saved_up_to)

        moved = {"swap": saved + moving, "recompute-swap": moving}.get(decision, 0)
        if recomputes or not any(unit.saved_count for unit in units):
            count = 1
        elif moving:
            count += 1
        own_bytes, needed, freed = saved, backward - saved, moved
        if recomputes:  # The gradient of its output exists while its forward pass is repeated.
            own_bytes, forward, needed = 0, passing, max(backward, recomputing + outputs[-1])
        elif blocking:
            own_bytes, forward, needed, freed = 0, passing, piecemeal, 0
            input_kept -= moving
        return BlockCost(
            forward_s=sum(unit.forward_s for unit in units),
            backward_s=sum(unit.backward_s for unit in units),
            recomputes=recomputes,
            input_bytes=begin.input_bytes,
            kept_bytes=input_kept,
            own_bytes=own_bytes,
            forward_bytes=forward,
            moved_bytes=moved,
            moved_count=count if moved else 0,
            freed_bytes=freed,
            backward_bytes=needed,
            gradient_bytes=gradients,
            gradients_before_bytes=self._gradients_behind[last],
        )


def _backward_bytes(units: Sequence[Unit], saved_up_to: Sequence[int]) -> tuple[int, int, int]:
    """Returns the peaks of a backward pass, of one whose storages come back one by one, and its gradients, in bytes."""
    backward = piecemeal = gradients = 0
    for unit, unit_saved in zip(reversed(units), reversed(saved_up_to), strict=True):
        backward = max(backward, unit_saved + unit.backward_working_bytes + gradients)
        piecemeal = max(piecemeal, unit.piecemeal_bytes + gradients)
        gradients += unit.gradient_bytes
    return backward, piecemeal, gradients


def check_blocks(chain: Chain, blocks: Sequence[PlannedBlock]) -> None:
    """Raises a ValueError unless blocks are all units of the chain in order and span no boundary that others use."""
    expected = 0
    for block in blocks:
        if block.first != expected or not block.first <= block.last < len(chain.units):
            raise ValueError(
                f"blocks must be all {len(chain.units)} units in order; "
                f"units {block.first} to {block.last} follow unit {expected - 1}"
            )
        for unit in chain.units[block.first + 1 : block.last + 1]:
            if not unit.joins:
                raise ValueError(f"a block spans the input of {unit.name}, which other modules use as well")
        expected = block.last + 1
    if expected != len(chain.units):
        raise ValueError(f"blocks hold units 0 to {expected - 1} of {len(chain.units)}")


def cut(chain: Chain, starts: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
    """Returns first and last unit of each block that begins with one of `starts`; None: every unit is a block. Unit 0
    and units whose input other modules use as well always begin one.
    """
    count = len(chain.units)
    if starts is None:
        return tuple((number, number) for number in range(count))
    begins = sorted({0, *starts, *(number for number in range(1, count) if not chain.units[number].joins)})
    return tuple((first, after - 1) for first, after in pairwise([*begins, count]))


def block_starts(names: Sequence[str], units: Sequence[str]) -> list[int] | None:
    """Returns the numbers of the units with which blocks begin (`train.memory.blocks`); None without names."""
    if not names:
        return None
    for name in names:
        if name not in units:
            raise UserError(f"train.memory.blocks: no block can begin with {name!r}; {nearest(name, units)}")
    return sorted({units.index(name) for name in names})


def spans_of(chain: Chain, longest: int | None = None) -> tuple[tuple[int, int], ...]:
    """Returns first and last unit of every possible block of at most `longest` units."""
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
    """A time span in which one lane is busy or waits."""

    lane: Lane
    kind: Kind  # outside: not part of the chain (before it, head and loss, after it). wait: computing stalls.
    block: int | None  # Number of the block, from 0; for wait the block that waits. None: outside.
    start_s: float  # Seconds from the start of the pass.
    end_s: float  # Seconds from the start of the pass.


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A simulated pass."""

    operations: tuple[Operation, ...]  # In the order of their start.
    makespan: float  # The pass, seconds.
    useful_s: float  # The pass in core, seconds.
    recompute_s: float  # Recomputing, with the slowdown by transfers, seconds.
    room_wait_s: float  # Forward passes waited for free memory, seconds.
    swap_wait_s: float  # Backward passes waited for swap-ins, or for free memory, seconds.
    peak_bytes: int  # Largest bytes held at a time: `chain.fixed_bytes` and activations.
    swapped_bytes: int  # Bytes that leave the device; as many come back.
    leaving: frozenset[int]  # The blocks of these bytes.
    over_bytes: int  # Bytes by which the capacity is too small; 0: the pass fits.
    held: tuple[tuple[float, int], ...]  # Times, ascending, and the bytes that are held from then on (as `peak_bytes`).

    @property
    def fits(self) -> bool:
        return self.over_bytes == 0

    @property
    def stall_s(self) -> float:
        return self.room_wait_s + self.swap_wait_s

    @property
    def occupancy(self) -> float:
        """Share of the pass in which the device computes, recomputing included."""
        return _share(self.makespan - self.stall_s, self.makespan)

    @property
    def efficiency(self) -> float:
        return _share(self.useful_s, self.makespan)


def predicted(schedule: Schedule) -> Prediction:
    """Returns the figures of the schedule that a plan and a record hold."""
    figures = {name: getattr(schedule, name) for name in Prediction.model_fields if name != "pass_s"}
    return Prediction(pass_s=schedule.makespan, **figures)


def _share(part: float, total: float) -> float:
    if total <= 0:
        return 1.0
    return min(1.0, max(0.0, part / total))
