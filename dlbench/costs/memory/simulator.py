"""One pass over a chain of blocks on three resources: computing, the way out of the device, and the way back.

The rules, which the executor (`dlbench.node.memory`) follows too. Bytes of a block are those of
`dlbench.costs.memory.blocks`; budget = capacity - what no plan can move (`Chain.fixed_bytes`); *held* is the sum of all
activations that are on the device, or have room reserved there.

**Forward pass of block b**, first to last:

1. It starts when held + `forward_bytes` <= budget. Until then it waits for the oldest swap-out that is not finished,
   and for the next one, in order.
2. It holds `forward_bytes` more while it runs; afterwards its `own_bytes` and its output stay. Its input goes but for
   its `kept_bytes`.
3. A block that moves something appends one transfer of `moved_bytes` to the way out, which works in order, one
   transfer at a time, each latency + bytes / rate. When it ends, `freed_bytes` are freed.

**Backward pass of block b**, last to first, after head and loss (`turn_s`):

1. *Issuing*, at the start of the backward pass and at the end of each block's: the blocks that have not been issued
   are looked at in backward order, as long as the first of them can be issued; none overtakes another.

   - keep: nothing to do.
   - swap: needs room for `freed_bytes`; they are reserved, and one transfer of `moved_bytes` is appended to the way
     in, which works like the way out.
   - recompute: nothing is reserved yet, but it becomes *owed*: see below.
   - recompute-swap: both.
   - **Still here**: a block whose swap-out is not finished needs no transfer and no more room: its tensors stay as
     they are, and the end of the swap-out frees nothing. A swap-out that has not begun is dropped.
   - **Owed room**: what is issued beyond a recompute block that has not started must leave it the room that it will
     need: all `freed_bytes` issued beyond it, those still here included, may be at most its `spare` = budget - what is
     held when it starts if nothing is issued beyond it - the room for recomputing (`again_bytes`, or
     `again_bare_bytes` where the next block's input is not held).
2. A block that has not been issued when its turn comes waits for the oldest swap-out that is not finished, then
   issuing is tried again, and so on. (Were tensors issued at the ends of blocks alone, the first block of the backward
   pass could wait for ever.) A block that recomputes waits likewise until held + the room for recomputing <= budget.
   If no swap-out is left, nothing can make room: the plan does not fit.
3. It starts when its transfer has ended; recomputing comes first.
4. At its end it frees its room for recomputing, its `own_released_bytes` and the `kept_bytes` of the boundary at which
   it ends (for the last block: the chain's output).

Whether a plan fits does not depend on times: waiting lets every swap-out end, and what is issued beyond a block leaves
it its room. Where it does not fit, the simulator goes on as if there was room.

**Prefetch**: `room` is the above. `one-block` (streamed) issues block b when block b + 1 is next to run its backward
pass, not earlier, and starts a forward pass only when at most one swap-out is not finished: two blocks' buffers do.
`blocking` (offload) computes nothing during a transfer, in both directions.

**Computing beside transfers** takes `drag` seconds longer for each second in which any transfer runs; from 1 on it
stands still meanwhile. A pass ends when computing and all transfers have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dlbench.costs.memory.blocks import BlockCost, BlockCosts
from dlbench.costs.memory.schedule import Kind, Lane, Operation, Schedule
from dlbench.specs.memory.chain import Chain, TransferRates
from dlbench.specs.memory.plan import PlannedBlock

Prefetch = Literal["room", "one-block", "blocking"]


def simulate(
    chain: Chain,
    blocks: Sequence[PlannedBlock],
    rates: TransferRates | None,
    capacity_bytes: int | None,
    *,
    prefetch: Prefetch = "room",
) -> Schedule:
    """A pass with these blocks.

    Args:
        chain: the chain, as measured.
        blocks: all its units, in order.
        rates: of transfers; None where no block moves anything.
        capacity_bytes: what may be held; None: no limit.
        prefetch: how early blocks come back.

    Raises:
        ValueError: blocks that are not the chain's, or that move something without rates.
    """
    costs = BlockCosts(chain, blocking=prefetch == "blocking").of_plan(blocks)
    if rates is None and any(cost.moved_bytes for cost in costs):
        raise ValueError("blocks that are swapped need transfer rates")
    trace = Trace()
    done = run(costs, Setting.of(chain, rates, capacity_bytes, prefetch), trace)
    return Schedule(
        operations=tuple(sorted(trace.operations, key=lambda found: (found.start_s, found.end_s))),
        makespan=done.clock,
        useful_s=chain.useful_s,
        recompute_s=done.recompute_s,
        room_wait_s=done.room_wait_s,
        swap_wait_s=done.swap_wait_s,
        peak_bytes=chain.fixed_bytes + done.peak,
        swapped_bytes=sum(costs[out.block].moved_bytes for out in done.outs),
        over_bytes=done.over,
        held=trace.curve(chain.fixed_bytes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is the same for every plan."""

    budget: float
    """Bytes for activations; infinite: no limit."""
    out_s: float
    """Seconds per byte."""
    in_s: float
    latency_s: float
    drag: float
    one_block: bool
    blocking: bool
    output_bytes: int
    before_s: float
    turn_s: float
    after_s: float

    @classmethod
    def of(
        cls, chain: Chain, rates: TransferRates | None, capacity_bytes: int | None, prefetch: Prefetch = "room"
    ) -> Setting:
        """Of a chain within a capacity; no rates: nothing moves."""
        return cls(
            budget=math.inf if capacity_bytes is None else capacity_bytes - chain.fixed_bytes,
            out_s=1 / rates.out_bytes_per_s if rates else 0.0,
            in_s=1 / rates.in_bytes_per_s if rates else 0.0,
            latency_s=rates.latency_s if rates else 0.0,
            drag=min(1.0, rates.drag) if rates else 0.0,
            one_block=prefetch == "one-block",
            blocking=prefetch == "blocking",
            output_bytes=chain.output_bytes,
            before_s=chain.before_s,
            turn_s=chain.turn_s,
            after_s=chain.after_s,
        )


@dataclass
class Trace:
    """What a simulated pass tells beside its totals."""

    operations: list[Operation] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)
    """Time, and bytes that are held from then on more (or less)."""

    def add(self, lane: Lane, kind: Kind, block: int | None, start: float, end: float) -> None:
        """An operation; nothing where it takes no time."""
        if end > start:
            self.operations.append(Operation(lane=lane, kind=kind, block=block, start_s=start, end_s=end))

    def curve(self, fixed_bytes: int) -> tuple[tuple[float, int], ...]:
        """What is held from each time on; what is freed at a time goes before what is taken then."""
        points: list[tuple[float, int]] = [(0.0, fixed_bytes)]
        held = fixed_bytes
        for when, change in sorted(self.changes):
            held += change
            if when == points[-1][0]:
                points[-1] = (when, held)
            else:
                points.append((when, held))
        return tuple(points)


@dataclass(slots=True)
class SwapOut:
    """A transfer out of the device."""

    block: int
    start: float
    end: float
    freed: int


class Pass:
    """A pass while it is simulated: times in seconds from its start, bytes of activations."""

    __slots__ = (
        "_costs",
        "_in_free",
        "_issued",
        "_next",
        "_oldest",
        "_out_free",
        "_owed",
        "_pending",
        "_ready",
        "_setting",
        "_spare",
        "_trace",
        "clock",
        "held",
        "outs",
        "over",
        "peak",
        "recompute_s",
        "room_wait_s",
        "swap_wait_s",
    )

    def __init__(self, costs: Sequence[BlockCost], setting: Setting, trace: Trace | None = None) -> None:
        self._costs = costs
        self._setting = setting
        self._trace = trace
        self.clock = self.room_wait_s = self.swap_wait_s = self.recompute_s = 0.0
        self.held = self.peak = 0
        self.over = 0
        self.outs: list[SwapOut] = []
        self._oldest = 0
        self._pending = 0
        self._out_free = self._in_free = 0.0
        self._next = len(costs) - 1
        self._ready = [0.0] * len(costs)
        self._issued = 0
        self._owed: list[tuple[int, float]] = []
        self._spare = spare_bytes(costs, setting)

    def compute(self, kind: Kind, block: int | None, seconds: float) -> None:
        """Computes beside what is being transferred."""
        start = self.clock
        drag = self._setting.drag
        beside = max(self._out_free, self._in_free) - start
        if beside <= 0 or drag == 0 or seconds == 0:
            self.clock = start + seconds
        elif seconds <= beside * (1 - drag):
            self.clock = start + seconds / (1 - drag)
        else:
            self.clock = start + seconds + beside * drag
        if self._trace:
            self._trace.add("compute", kind, block, start, self.clock)

    def take(self, count: int) -> None:
        """Holds so many bytes more."""
        self.held += count
        self.peak = max(self.peak, self.held)
        if self.held - self._setting.budget > self.over:
            self.over = math.ceil(self.held - self._setting.budget)
        if self._trace:
            self._trace.changes.append((self.clock, count))

    def give(self, count: int, when: float) -> None:
        """Holds so many bytes less."""
        self.held -= count
        if self._trace:
            self._trace.changes.append((when, -count))

    def waited(self, block: int, since: float) -> float:
        """Seconds since then, in which nothing was computed."""
        if self._trace:
            self._trace.add("compute", "wait", block, since, self.clock)
        return self.clock - since

    # Swap-outs: those before `_oldest` have ended, those from `_pending` on have ended or stay for the backward pass.

    def free_ended(self) -> None:
        """Frees what has left by now."""
        while self._oldest < self._pending and self.outs[self._oldest].end <= self.clock:
            self._free_oldest()

    def wait_for_oldest(self) -> None:
        """Waits for the oldest swap-out that has not ended."""
        self.clock = max(self.clock, self.outs[self._oldest].end)
        self._free_oldest()

    def _free_oldest(self) -> None:
        out = self.outs[self._oldest]
        self._oldest += 1
        self.give(out.freed, out.end)

    def swap_out(self, block: int) -> None:
        """Appends the transfer of a block to the way out."""
        cost = self._costs[block]
        start = max(self.clock, self._out_free)
        self._out_free = start + self._setting.latency_s + cost.moved_bytes * self._setting.out_s
        self.outs.append(SwapOut(block, start, self._out_free, cost.freed_bytes))
        self._pending += 1

    def stays(self) -> None:
        """The newest swap-out that has not ended frees nothing; it is dropped if it has not begun."""
        self._pending -= 1
        if self.outs[self._pending].start >= self.clock:
            del self.outs[self._pending]
            self._out_free = self.outs[-1].end if self.outs else 0.0

    # A block

    def forward(self, block: int) -> None:
        """Forward pass of a block, from waiting for room to the start of its transfer."""
        cost, since = self._costs[block], self.clock
        self.free_ended()
        if self._setting.one_block:
            while self._pending - self._oldest > 1:
                self.wait_for_oldest()
        while self.held + cost.forward_bytes > self._setting.budget and self._oldest < self._pending:
            self.wait_for_oldest()
        self.room_wait_s += self.waited(block, since)
        self.take(cost.forward_bytes)
        self.compute("forward", block, cost.forward_s)
        output = self._costs[block + 1].input_bytes if block + 1 < len(self._costs) else self._setting.output_bytes
        stay = cost.own_bytes + output - cost.input_bytes + cost.kept_bytes
        self.give(cost.forward_bytes - stay, self.clock)
        if cost.moved_bytes:
            self.swap_out(block)
            if self._setting.blocking:
                since = self.clock
                self.wait_for_oldest()
                self.room_wait_s += self.waited(block, since)

    def issue(self, block: int) -> None:
        """Issues what has room, when the backward pass of `block` is next."""
        last = 0
        if self._setting.one_block:
            last = max(0, block - 1)
        elif self._setting.blocking:
            last = block
        while self._next >= last and self.issue_one():
            pass

    def issue_one(self, *, forced: bool = False) -> bool:
        """Issues the next block in backward order; False: there is no room."""
        number = self._next
        cost = self._costs[number]
        moves = cost.moved_bytes > 0
        here = moves and self._pending > self._oldest
        needed = 0 if here else cost.freed_bytes
        issued = self._issued + cost.freed_bytes
        if moves and not forced:
            if needed and self.held + needed > self._setting.budget:
                return False
            if any(issued > limit for _, limit in self._owed):
                return False
        self._next -= 1
        self._issued = issued
        if cost.recomputes:
            self._owed.append((number, issued + self._spare[number]))
        if here:
            self.stays()
        elif moves:
            self.take(needed)
            start = max(self.clock, self._in_free)
            self._in_free = start + self._setting.latency_s + cost.moved_bytes * self._setting.in_s
            self._ready[number] = self._in_free
            if self._trace:
                self._trace.add("in", "swap in", number, start, self._in_free)
        return True

    def backward(self, block: int) -> None:
        """Backward pass of a block, from issuing to freeing."""
        cost, since = self._costs[block], self.clock
        self.free_ended()
        self.issue(block)
        while self._next >= block:
            if self._oldest < self._pending:
                self.wait_for_oldest()
                self.free_ended()
            else:
                self.issue_one(forced=True)
            self.issue(block)
        self.clock = max(self.clock, self._ready[block])
        self.free_ended()
        again = again_bytes(self._costs, block, self._setting)
        while self.held + again > self._setting.budget and self._oldest < self._pending:
            self.wait_for_oldest()
        self.swap_wait_s += self.waited(block, since)
        self.take(again)
        if cost.recomputes:
            self._owed.pop(0)
            since = self.clock
            self.compute("recompute", block, cost.forward_s)
            self.recompute_s += self.clock - since
        self.compute("backward", block, cost.backward_s)
        self.give(again + cost.own_released_bytes + end_bytes(self._costs, block, self._setting), self.clock)

    def finish(self) -> None:
        """Ends when nothing is transferred any more."""
        self.clock = max(self.clock, self._out_free)
        if self._trace:
            for out in self.outs:
                self._trace.add("out", "swap out", out.block, out.start, out.end)


def end_bytes(costs: Sequence[BlockCost], block: int, setting: Setting) -> int:
    """What is held of the boundary at which a block ends, when its backward pass runs."""
    return costs[block + 1].kept_bytes if block + 1 < len(costs) else setting.output_bytes


def again_bytes(costs: Sequence[BlockCost], block: int, setting: Setting) -> int:
    """Room that a block needs for recomputing."""
    return costs[block].again_bytes if end_bytes(costs, block, setting) else costs[block].again_bare_bytes


def spare_bytes(costs: Sequence[BlockCost], setting: Setting) -> list[float]:
    """What is not held, block by block, while its backward pass runs and nothing is issued beyond it.

    Below 0: it does not fit.
    """
    spare: list[float] = []
    before = 0
    for block, cost in enumerate(costs):
        own = cost.own_bytes + cost.kept_bytes
        end = end_bytes(costs, block, setting)
        spare.append(setting.budget - before - own - end - again_bytes(costs, block, setting))
        before += own - cost.freed_bytes
    return spare


def run(costs: Sequence[BlockCost], setting: Setting, trace: Trace | None = None) -> Pass:
    """Simulates a pass over blocks."""
    done = Pass(costs, setting, trace)
    done.take(costs[0].input_bytes)
    done.compute("outside", None, setting.before_s)
    for block in range(len(costs)):
        done.forward(block)
    done.compute("outside", None, setting.turn_s)
    for block in range(len(costs) - 1, -1, -1):
        done.backward(block)
    done.give(costs[0].kept_bytes, done.clock)
    done.compute("outside", None, setting.after_s)
    done.finish()
    return done
