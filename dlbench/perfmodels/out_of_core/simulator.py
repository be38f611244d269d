"""One pass over a chain of blocks on three resources: computing, the way out of the device, and the way back.

The rules, which the executor (`dlbench.node.out_of_core`) follows too. Bytes of a block are those of
`dlbench.perfmodels.out_of_core.blocks`; budget = capacity - what no plan can move (`Chain.fixed_bytes`); *held* is the
sum of all activations and gradients that are on the device, or have room reserved there.

**Forward pass of block b**, first to last:

1. It starts when held + `forward_bytes` <= budget. Until then it waits for the oldest swap-out that is not finished,
   and for the next one, in order.
2. It holds `forward_bytes` more while it runs; afterwards its `own_bytes` and its output stay. Its input goes but for
   its `kept_bytes`.
3. A block that moves something appends its `moved_bytes` to the way out, which works in order, one storage at a time,
   each latency + bytes / rate. When its `moved_count` storages have left, `freed_bytes` are freed.

**Turn**: head and loss (`turn_s`) start when held + `turn_bytes` <= budget, and wait likewise; then the chain's output
goes, and the gradients of the head's parameters stay.

**Backward pass of block b**, last to first:

1. *Issuing*, at the start of the backward pass and at the end of each block's: the blocks that have not been issued
   are looked at in backward order, as long as the first of them can be issued; none overtakes another.

   - keep: nothing to do.
   - swap: needs room for `freed_bytes`; they are reserved, and its `moved_bytes` are appended to the way in,
     which works like the way out.
   - recompute: nothing is reserved.
   - recompute-swap: as swap.
   - **Still here**: a block whose swap-out is not finished needs no transfer and no more room: its tensors stay as
     they are. It is among those that never leave (`Schedule.leaving`): training does not send it. What such a swap-out
     slowed computing down until then is not taken back.
   - **Owed room**: what is issued beyond a block that has not started must leave it the room that it will need: all
     `freed_bytes` issued beyond it, those still here included, may be at most its `spare` = budget - what is held when
     it starts if nothing is issued beyond it - `backward_bytes`.
2. A block that has not been issued when its turn comes waits for the oldest swap-out that is not finished, then
   issuing is tried again, and so on. (Were tensors issued at the ends of blocks alone, the first block of the backward
   pass could wait for ever.) It waits likewise until held + `backward_bytes` <= budget. If no swap-out is left, nothing
   can make room: the plan does not fit.
3. It starts when its transfer has ended; recomputing comes first.
4. At its end all of that, its `own_bytes` and its `kept_bytes` go, but for the `gradient_bytes` of its parameters.

What is before the chain takes `after_bytes`, and the optimizer's update `update_bytes`, besides all gradients.

Whether a plan fits does not depend on times: waiting lets every swap-out end, and what is issued beyond a block leaves
it its room. Where it does not fit, the simulator goes on as if there was room.

**Prefetch**: `room` is the above. `one-block` (streamed) issues block b when block b + 1 is next to run its backward
pass, not earlier, and starts a forward pass only when at most one swap-out is not finished: two blocks' buffers do.
`blocking` (offload) computes nothing during a transfer, in both directions.

**Computing during transfers** takes `drag` seconds longer for each second in which any transfer runs; from 1 on it
stands still meanwhile. A pass ends when computing and all transfers have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dlbench.perfmodels.out_of_core.blocks import BlockCost, BlockCosts, Kind, Lane, Operation, Schedule
from dlbench.specs.out_of_core import Chain, PlannedBlock, TransferRates

Prefetch = Literal["room", "one-block", "blocking"]


def simulate(
    chain: Chain,
    blocks: Sequence[PlannedBlock],
    rates: TransferRates | None,
    capacity_bytes: int | None,
    *,
    prefetch: Prefetch = "room",
) -> Schedule:
    """A pass with these blocks. `blocks`: all its units, in order. `rates`: of transfers; None where no block moves
    anything. `capacity_bytes`: what may be held; None: no limit. Raises `ValueError`: blocks that are not the chain's,
    or that move something without rates.
    """
    costs = BlockCosts(chain, blocking=prefetch == "blocking").of_plan(blocks)
    if rates is None and any(cost.moved_bytes for cost in costs):
        raise ValueError("blocks that are swapped need transfer rates")
    setting = PassSetting.of(chain, rates, capacity_bytes, prefetch)
    trace = Trace()
    done = run(costs, setting, trace)
    return Schedule(
        operations=tuple(sorted(trace.operations, key=lambda found: (found.start_s, found.end_s))),
        makespan=done.clock,
        useful_s=chain.useful_s,
        recompute_s=sum(found.end_s - found.start_s for found in trace.operations if found.kind == "recompute"),
        room_wait_s=done.room_wait_s,
        swap_wait_s=done.swap_wait_s,
        peak_bytes=chain.fixed_bytes + done.peak,
        swapped_bytes=sum(costs[out.block].moved_bytes for out in done.outs),
        leaving=frozenset(out.block for out in done.outs),
        over_bytes=max(0, math.ceil(done.peak - setting.budget)) if math.isfinite(setting.budget) else 0,
        held=trace.curve(chain.fixed_bytes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSetting:
    """What is the same for every plan."""

    budget: float  # Bytes for activations; infinite: no limit.
    out_s: float  # Seconds per byte.
    in_s: float
    latency_s: float
    drag: float
    one_block: bool
    blocking: bool
    output_bytes: int
    turn_bytes: int
    turn_gradient_bytes: int
    last_bytes: int
    """The most that is held after the chain's backward pass: besides all gradients, by what is before it, or in the
    update."""
    before_s: float
    turn_s: float
    after_s: float

    @classmethod
    def of(
        cls, chain: Chain, rates: TransferRates | None, capacity_bytes: int | None, prefetch: Prefetch = "room"
    ) -> PassSetting:
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
            turn_bytes=max(chain.turn_bytes, chain.turn_gradient_bytes),
            turn_gradient_bytes=chain.turn_gradient_bytes,
            last_bytes=last_bytes(chain),
            before_s=chain.before_s,
            turn_s=chain.turn_s,
            after_s=chain.after_s,
        )


def last_bytes(chain: Chain) -> int:
    """The most that is held when the chain's backward pass is done, in that of what is before it or in the update."""
    made = chain.turn_gradient_bytes + sum(unit.gradient_bytes for unit in chain.units)
    return made + max(chain.after_bytes, chain.after_gradient_bytes + chain.update_bytes)


class SwapOut(NamedTuple):
    """A transfer out of the device."""

    block: int
    start: float
    end: float
    freed: int


@dataclass(slots=True)
class Pass:
    """A pass while it is simulated: times in seconds from its start, bytes of activations."""

    clock: float = 0.0
    held: int = 0
    peak: int = 0
    room_wait_s: float = 0.0
    swap_wait_s: float = 0.0
    recompute_s: float = 0.0  # Of the blocks so far, undisturbed.
    outs: list[SwapOut] = field(default_factory=list)
    oldest: int = 0  # The first swap-out that has not ended.
    out_free: float = 0.0  # When the way out has nothing to do.


@dataclass
class Trace:
    """What a simulated pass gives besides its totals."""

    operations: list[Operation] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)  # Time, and bytes held from then on.

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


def run(costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None) -> Pass:
    """Simulates a pass over blocks."""
    done = begin(costs, setting, trace)
    forward(done, costs, range(len(costs)), setting, trace)
    backward(done, costs, setting, trace)
    return done


def begin(costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None) -> Pass:
    """A pass at the start of the first block's forward pass."""
    first = costs[0].input_bytes
    if trace:
        trace.add("compute", "outside", None, 0.0, setting.before_s)
        trace.changes.append((0.0, first))
    return Pass(clock=setting.before_s, held=first, peak=first)


def forward(
    done: Pass, costs: Sequence[BlockCost], blocks: range, setting: PassSetting, trace: Trace | None = None
) -> None:
    """Goes on with the forward passes of some blocks, which come next. What it says of a block does not depend on what
    is decided for later ones.
    """
    clock, held, peak, oldest, out_free, outs = done.clock, done.held, done.peak, done.oldest, done.out_free, done.outs
    budget, drag = setting.budget, setting.drag
    allowed = 1 if setting.one_block else len(costs)
    for block in blocks:
        cost, since = costs[block], clock
        output = costs[block + 1].input_bytes if block + 1 < len(costs) else setting.output_bytes
        needed = cost.forward_bytes
        while oldest < len(outs) and (
            outs[oldest].end <= clock or held + needed > budget or len(outs) - oldest > allowed
        ):
            held -= outs[oldest].freed
            clock = max(clock, outs[oldest].end)
            oldest += 1
        start = clock
        peak = max(peak, held + needed)
        clock += cost.forward_s if out_free <= clock else stretched(cost.forward_s, out_free - clock, drag)
        stays = cost.own_bytes + output + cost.kept_bytes - cost.input_bytes
        held += stays
        if trace:
            trace.add("compute", "wait", block, since, start)
            trace.add("compute", "forward", block, start, clock)
            trace.changes += [(start, needed), (clock, stays - needed)]
        done.room_wait_s += start - since
        if cost.recomputes:
            done.recompute_s += cost.forward_s
        if cost.moved_bytes:
            start = max(clock, out_free)
            out_free = start + cost.moved_count * setting.latency_s + cost.moved_bytes * setting.out_s
            outs.append(SwapOut(block, start, out_free, cost.freed_bytes))
            if setting.blocking:
                if trace:
                    trace.add("compute", "wait", block, clock, out_free)
                done.room_wait_s += out_free - clock
                clock = out_free
    done.clock, done.held, done.peak, done.oldest, done.out_free = clock, held, peak, oldest, out_free


def backward(
    done: Pass, costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None, cutoff: float = math.inf
) -> None:
    """Ends a pass after all forward passes: from head and loss on. Where it finds that the pass cannot end before
    `cutoff`, it stops, and leaves its clock there or beyond.
    """
    way = _WayBack(done, costs, setting, trace)
    since = done.clock
    way.make_room(setting.turn_bytes)
    if trace:
        trace.add("compute", "wait", len(costs) - 1, since, done.clock)
    done.room_wait_s += done.clock - since
    way.compute("outside", None, setting.turn_s)
    way.free(setting.turn_bytes - setting.turn_gradient_bytes + setting.output_bytes, done.clock)
    left = done.recompute_s + setting.after_s + sum(cost.backward_s for cost in costs)
    for block in range(len(costs) - 1, -1, -1):
        if done.clock + left >= cutoff:
            done.clock = max(cutoff, done.clock)
            return
        cost, since = costs[block], done.clock
        way.bring(block)
        way.start(block)
        if trace:
            trace.add("compute", "wait", block, since, done.clock)
        done.swap_wait_s += done.clock - since
        if cost.recomputes:
            way.compute("recompute", block, cost.forward_s)
            left -= cost.forward_s
        way.compute("backward", block, cost.backward_s)
        left -= cost.backward_s
        way.free(cost.backward_bytes - cost.gradient_bytes + cost.own_bytes + cost.kept_bytes, done.clock)
    done.peak = max(done.peak, setting.last_bytes)
    way.compute("outside", None, setting.after_s)
    done.clock = max(done.clock, done.out_free)
    if trace:
        for out in done.outs:
            trace.add("out", "swap out", out.block, out.start, out.end)
        trace.changes += [(out.end, -out.freed) for out in done.outs]


def stretched(seconds: float, transfers_s: float, drag: float) -> float:
    """How long computing takes that alone takes `seconds`, where transfers run for the next `transfers_s` seconds."""
    if seconds <= 0:
        return 0.0
    if seconds <= transfers_s * (1 - drag):
        return seconds / (1 - drag)
    return seconds + transfers_s * drag


class _WayBack:
    """What comes back, and when: the queue of blocks that have not been issued, and the room that is owed."""

    __slots__ = ("_below", "_costs", "_done", "_in_free", "_issued", "_limits", "_next", "_ready", "_setting", "_trace")

    def __init__(self, done: Pass, costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None) -> None:
        self._done, self._costs, self._setting, self._trace = done, costs, setting, trace
        self._in_free = 0.0
        self._next = len(costs) - 1  # The block that is issued next.
        self._ready = [0.0] * len(costs)
        self._issued = 0  # `freed_bytes` of all that was issued.
        self._limits: deque[tuple[int, float]] = deque()
        """Blocks that have been passed and have not started, each with what `_issued` may be until it starts;
        those whose limit a later one undercuts are left out, so that the first is the least."""
        freed = sum(out.freed for out in done.outs[done.oldest :])
        self._below = done.held - setting.output_bytes - freed  # What blocks up to `_next` hold after their swap-outs.

    def compute(self, kind: Kind, block: int | None, seconds: float) -> None:
        done, start = self._done, self._done.clock
        transfers_s = max(done.out_free, self._in_free) - start
        done.clock += seconds if transfers_s <= 0 else stretched(seconds, transfers_s, self._setting.drag)
        if self._trace:
            self._trace.add("compute", kind, block, start, done.clock)

    def take(self, count: int) -> None:
        done = self._done
        done.held += count
        done.peak = max(done.peak, done.held)
        if self._trace:
            self._trace.changes.append((done.clock, count))

    def free(self, count: int, when: float) -> None:
        self._done.held -= count
        if self._trace:
            self._trace.changes.append((when, -count))

    def bring(self, block: int) -> None:
        """Issues what has room, waits until `block` has been issued, and for its transfer."""
        done, outs = self._done, self._done.outs
        setting = self._setting
        last = block if setting.blocking else max(0, block - 1) if setting.one_block else 0
        while True:
            while done.oldest < len(outs) and outs[done.oldest].end <= done.clock:
                done.held -= outs[done.oldest].freed
                done.oldest += 1
            while self._next >= last and self._issue(setting.budget):
                pass
            if self._next < block:
                break
            if done.oldest < len(outs):
                done.clock = max(done.clock, outs[done.oldest].end)
            else:
                self._issue(math.inf)
        done.clock = max(done.clock, self._ready[block])

    def _issue(self, budget: float) -> bool:
        """Issues the next block in backward order; False: it has no room."""
        number, done = self._next, self._done
        cost = self._costs[number]
        if cost.moved_bytes:
            freed = cost.freed_bytes
            here = done.oldest < len(done.outs)
            if self._limits and self._issued + freed > self._limits[0][1]:
                return False
            if freed and not here and done.held + freed > budget:
                return False
            self._issued += freed
            if here:
                # The newest swap-out has not ended: its block does not leave.
                del done.outs[-1]
                done.out_free = done.outs[-1].end if done.outs else 0.0
            else:
                self.take(freed)
                start = max(done.clock, self._in_free)
                fixed_s = cost.moved_count * self._setting.latency_s
                self._in_free = start + fixed_s + cost.moved_bytes * self._setting.in_s
                self._ready[number] = self._in_free
                if self._trace:
                    self._trace.add("in", "swap in", number, start, self._in_free)
        own = cost.own_bytes + cost.kept_bytes
        self._below -= own - cost.freed_bytes
        spare = self._setting.budget - self._below - own - cost.gradients_before_bytes - cost.backward_bytes
        limit = self._issued + spare
        while self._limits and self._limits[-1][1] >= limit:
            self._limits.pop()
        self._limits.append((number, limit))
        self._next -= 1
        return True

    def make_room(self, count: int) -> None:
        """Holds this many bytes more, as soon as swap-outs leave room for them."""
        done = self._done
        while done.oldest < len(done.outs) and (
            done.outs[done.oldest].end <= done.clock or done.held + count > self._setting.budget
        ):
            done.held -= done.outs[done.oldest].freed
            done.clock = max(done.clock, done.outs[done.oldest].end)
            done.oldest += 1
        self.take(count)

    def start(self, block: int) -> None:
        self.make_room(self._costs[block].backward_bytes)
        if self._limits and self._limits[0][0] == block:
            self._limits.popleft()
