"""Plans that fit, by dynamic programming over the chain: what has to be held does not depend on times.

When all swap-outs have ended, a block's forward and backward pass find held what earlier blocks leave on the device,
whatever the order of events (`dlbench.costs.memory.simulator`). So a plan fits just when each block finds its room
beside that sum, and of two ways to treat the first units the one that leaves less is never the worse one. Times count
here by a price: recomputing at its length, moving at `price` times the length of its transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from dlbench.costs.memory.blocks import BlockCosts
from dlbench.costs.memory.simulator import Setting
from dlbench.specs.memory import Decision

Blocks = tuple[tuple[int, int, Decision], ...]
"""First unit, last unit and decision of each block."""

FRONT = 12
"""Ways to treat the first units that are followed at a time: from the one that leaves least to the fastest."""


_Way = tuple[int, float, int, tuple[int, int, Decision] | None, "_Way | None"]
"""What the blocks so far leave on the device, their price in seconds, the most that they need at a time, the last of
them, and the way before it. Plain, as hundreds of thousands are made."""


def cheapest_fitting(
    costs: BlockCosts,
    setting: Setting,
    decisions: Sequence[Decision],
    spans: Sequence[tuple[int, int]],
    price: float,
    *,
    front: int = FRONT,
) -> tuple[Blocks, int] | None:
    """The plan of the least price that was found, and its peak in bytes of activations; None: no plan fits.

    None is exact; the price is exact where `front` ways are enough.

    Args:
        costs: of the chain's blocks.
        setting: of the pass; its budget must hold the peak.
        decisions: those that blocks may have.
        spans: first and last units that blocks may have.
        price: what a second of moving costs, in seconds of computing.
        front: ways that are followed at a time.
    """
    units = costs.chain.units
    per_byte = price * (setting.in_s + setting.out_s) / 2
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
                seconds = (cost.forward_s if cost.recomputes else 0.0) + cost.moved_bytes * per_byte
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
