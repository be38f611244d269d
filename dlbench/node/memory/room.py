"""What each block of a plan needs of the room, and how much of it later blocks must leave to those before them.

The rules are those of `dlbench.costs.memory.simulator`, with the bytes of `dlbench.costs.memory.blocks`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.costs.memory.blocks import BlockCost
from dlbench.specs.memory.plan import Decision


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block, as a pass had them; by the owner rule of `dlbench.costs.memory.blocks`."""

    saved_bytes: int = 0
    """What its forward pass keeps (recompute: would keep), each storage once, inner units' inputs included; without its
    own input and output, parameters and casts of them."""
    input_bytes: int = 0
    """Of its input's storage; 0 for the first block."""
    input_saved: bool = False
    """Whether a backward pass in core needs its input."""
    output_bytes: int = 0


class Room:
    """Bytes that blocks need: as planned or, without a plan's costs, as the last counted pass had them.

    Args:
        decisions: of each block.
        budget: what activations may take; None: no limit.
        costs: of each block under its decision.
        held_by_others: numbers of the blocks whose input others hold anyway.
    """

    def __init__(
        self,
        decisions: Sequence[Decision],
        budget: int | None,
        costs: Sequence[BlockCost] | None,
        held_by_others: set[int],
    ) -> None:
        self.budget = math.inf if budget is None else budget
        self.seen = [BlockBytes()] * len(decisions)
        """Bytes of each block in the last counted pass."""
        self._decisions = decisions
        self._costs = costs
        self._held_by_others = held_by_others
        self._issued = 0
        self._limits: deque[tuple[int, float]] = deque()

    def recomputes(self, block: int) -> bool:
        """Whether a block is recomputed."""
        return self._decisions[block] in ("recompute", "recompute-swap")

    def moves(self, block: int) -> bool:
        """Whether the input of a block leaves with it."""
        return (
            0 < block < len(self._decisions)
            and self._decisions[block] in ("swap", "recompute-swap")
            and block not in self._held_by_others
        )

    def forward_bytes(self, block: int) -> int:
        """Room that its forward pass needs to start, its output included."""
        if self._costs is not None:
            return self._costs[block].forward_bytes
        seen = self.seen[block]
        return seen.output_bytes + (0 if self.recomputes(block) else seen.saved_bytes)

    def own_bytes(self, block: int) -> int:
        """What stays of its forward pass, beside its boundaries, until it leaves."""
        if self._costs is not None:
            return self._costs[block].own_bytes
        return 0 if self.recomputes(block) else self.seen[block].saved_bytes

    def kept_bytes(self, block: int) -> int:
        """What stays of its input after its forward pass, until it leaves."""
        if self._costs is not None:
            return self._costs[block].kept_bytes
        seen = self.seen[block]
        return seen.input_bytes if seen.input_saved or self.recomputes(block) or block in self._held_by_others else 0

    def backward_bytes(self, block: int) -> int:
        """What its backward pass takes beside what is kept, recomputing included."""
        if self._costs is None:
            return self.seen[block].saved_bytes if self.recomputes(block) else 0
        return self._costs[block].backward_bytes

    def gradients_before(self, block: int) -> int:
        """Gradients of parameters that are there when its backward pass begins."""
        return 0 if self._costs is None else self._costs[block].gradients_before_bytes

    def turn(self) -> None:
        """The backward pass begins: nothing is issued yet."""
        self._issued = 0
        self._limits.clear()

    def leaves_enough(self, num_bytes: int) -> bool:
        """Whether blocks whose backward pass comes first keep their room if so many bytes come back before."""
        return not self._limits or self._issued + num_bytes <= self._limits[0][1]

    def issue(self, block: int, num_bytes: int) -> None:
        """So many bytes of a block, the next one in backward order, come back, or stay; it is owed room from now on."""
        self._issued += num_bytes
        if self._costs is None:
            return
        below = sum(cost.own_bytes + cost.kept_bytes - cost.freed_bytes for cost in self._costs[:block])
        own = self._costs[block].own_bytes + self._costs[block].kept_bytes
        spare = self.budget - below - own - self.gradients_before(block) - self.backward_bytes(block)
        limit = self._issued + spare
        while self._limits and self._limits[-1][1] >= limit:
            self._limits.pop()
        self._limits.append((block, limit))

    def start(self, block: int) -> None:
        """A block's backward pass begins: it has its room."""
        while self._limits and self._limits[0][0] >= block:
            self._limits.popleft()
