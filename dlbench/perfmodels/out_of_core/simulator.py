"""A simulated pass over a chain of blocks on three resources: computing, swap-outs and swap-ins (docs/out-of-core.md);
the executor (`dlbench.node.out_of_core`) follows the same rules.

*Held* bytes are those of activations and gradients on the device or reserved there; the budget is capacity -
`Chain.fixed_bytes`. Computing starts when its bytes fit, and until then waits for the oldest swap-out that has not
ended. In the backward pass blocks are *issued* last to first, as early as the next one can be (if only after other
blocks, the first could wait for ever): `freed_bytes` are reserved and the swap-in is queued; a block whose swap-out has
not ended stays instead. Issued blocks must leave each block that has not started its memory, so whether a plan fits
does not depend on times. If it does not fit, the simulator continues as if the memory were free.

`one-block` (streamed) issues a block when the one behind it is next, and starts a forward pass only when at most one
swap-out has not ended; `blocking` (offload) computes nothing during a transfer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
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
    """Returns a simulated pass with these blocks, which are all units of the chain in order; no capacity is no limit.
    Raises `ValueError`: blocks are not those of the chain, or move bytes without rates.
    """
    costs = BlockCosts(chain, blocking=prefetch == "blocking").of_plan(blocks)
    if rates is None and any(cost.moved_bytes for cost in costs):
        raise ValueError("blocks that are swapped need transfer rates")
    setting = PassSetting.of(chain, rates, capacity_bytes, prefetch)
    trace = Trace()
    state = run(costs, setting, trace)
    return Schedule(
        operations=tuple(sorted(trace.operations, key=attrgetter("start_s", "end_s"))),
        makespan=state.clock,
        useful_s=chain.useful_s,
        recompute_s=sum(span.end_s - span.start_s for span in trace.operations if span.kind == "recompute"),
        room_wait_s=state.room_wait_s,
        swap_wait_s=state.swap_wait_s,
        peak_bytes=chain.fixed_bytes + state.peak,
        swapped_bytes=sum(costs[out.block].moved_bytes for out in state.outs),
        leaving=frozenset(out.block for out in state.outs),
        over_bytes=math.ceil(max(0, state.peak - setting.budget)),
        held=trace.curve(chain.fixed_bytes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSetting:
    """The figures of a pass that do not depend on the plan."""

    budget: float  # Bytes for activations; infinite: no limit.
    out_s: float  # Seconds per byte of a swap-out.
    in_s: float  # Seconds per byte of a swap-in.
    latency_s: float  # Seconds per storage of a transfer.
    drag: float  # Seconds by which computing takes longer per second of transfers.
    one_block: bool  # Whether blocks are streamed, one ahead.
    blocking: bool  # Whether computing waits for transfers.
    output_bytes: int  # Output of the chain.
    turn_bytes: int  # Bytes that head and loss need.
    turn_gradient_bytes: int  # Gradients of the head's parameters.
    last_bytes: int  # See `last_bytes`.
    before_s: float  # Seconds before the chain's forward pass.
    turn_s: float  # Seconds of head and loss.
    after_s: float  # Seconds after the chain's backward pass.

    @classmethod
    def of(
        cls, chain: Chain, rates: TransferRates | None, capacity_bytes: int | None, prefetch: Prefetch = "room"
    ) -> PassSetting:
        """Returns the setting of a chain within a capacity; None: no limit. Without rates nothing moves."""
        budget = math.inf if capacity_bytes is None else capacity_bytes - chain.fixed_bytes
        out_s = in_s = latency_s = drag = 0.0
        if rates is not None:
            out_s, in_s = 1 / rates.out_bytes_per_s, 1 / rates.in_bytes_per_s
            latency_s, drag = rates.latency_s, min(1.0, rates.drag)
        return cls(
            budget=budget,
            out_s=out_s,
            in_s=in_s,
            latency_s=latency_s,
            drag=drag,
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
    """Returns the most bytes held after the backward pass, with all gradients: by modules before the chain or in the
    update.
    """
    gradients = chain.turn_gradient_bytes + sum(unit.gradient_bytes for unit in chain.units)
    return gradients + max(chain.after_bytes, chain.after_gradient_bytes + chain.update_bytes)


class SwapOut(NamedTuple):
    """A transfer out of the device."""

    block: int
    start: float  # Seconds from the start of the pass.
    end: float  # Seconds from the start of the pass.
    freed: int  # Bytes that are freed at its end.


@dataclass(slots=True)
class Pass:
    """The state of a pass during simulation: times in seconds from its start, bytes of activations."""

    clock: float = 0.0
    held: int = 0
    peak: int = 0
    room_wait_s: float = 0.0
    swap_wait_s: float = 0.0
    recompute_s: float = 0.0  # Recomputing of the blocks so far, without slowdown.
    outs: list[SwapOut] = field(default_factory=list)
    oldest: int = 0  # The first swap-out that has not ended.
    out_free: float = 0.0  # Time at which the last swap-out ends.


@dataclass
class Trace:
    """The operations and the memory curve of a simulated pass."""

    operations: list[Operation] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)  # Time, and bytes held more from then on.

    def add(self, lane: Lane, kind: Kind, block: int | None, start: float, end: float) -> None:
        """Adds an operation, unless it takes no time."""
        if end > start:
            self.operations.append(Operation(lane=lane, kind=kind, block=block, start_s=start, end_s=end))

    def curve(self, fixed_bytes: int) -> tuple[tuple[float, int], ...]:
        """Returns times and the bytes held from then on; at equal times memory is freed before it is allocated."""
        points: list[tuple[float, int]] = [(0.0, fixed_bytes)]
        held_bytes = fixed_bytes
        for when, change in sorted(self.changes):
            held_bytes += change
            if when == points[-1][0]:
                points[-1] = (when, held_bytes)
            else:
                points.append((when, held_bytes))
        return tuple(points)


def run(costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None) -> Pass:
    """Simulates a pass over blocks and returns its end."""
    state = begin(costs, setting, trace)
    forward(state, costs, range(len(costs)), setting, trace)
    backward(state, costs, setting, trace)
    return state


def begin(costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None) -> Pass:
    """Returns the state of a pass at the start of the first block's forward pass."""
    first = costs[0].input_bytes
    if trace:
        trace.add("compute", "outside", None, 0.0, setting.before_s)
        trace.changes.append((0.0, first))
    return Pass(clock=setting.before_s, held=first, peak=first)


def forward(
    state: Pass, costs: Sequence[BlockCost], blocks: range, setting: PassSetting, trace: Trace | None = None
) -> None:
    """Simulates the forward passes of the next blocks. They do not depend on the decisions for later blocks."""
    clock, held, peak = state.clock, state.held, state.peak
    oldest, out_free, outs = state.oldest, state.out_free, state.outs
    budget, drag = setting.budget, setting.drag
    num_allowed = 1 if setting.one_block else len(costs)  # Swap-outs that may run when a block starts.
    for block in blocks:
        cost, ready = costs[block], clock
        output = costs[block + 1].input_bytes if block + 1 < len(costs) else setting.output_bytes
        needed = cost.forward_bytes
        while oldest < len(outs) and (
            outs[oldest].end <= clock or held + needed > budget or len(outs) - oldest > num_allowed
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
            trace.add("compute", "wait", block, ready, start)
            trace.add("compute", "forward", block, start, clock)
            trace.changes += [(start, needed), (clock, stays - needed)]
        state.room_wait_s += start - ready
        if cost.recomputes:
            state.recompute_s += cost.forward_s
        if cost.moved_bytes:
            start = max(clock, out_free)
            out_free = start + cost.moved_count * setting.latency_s + cost.moved_bytes * setting.out_s
            outs.append(SwapOut(block, start, out_free, cost.freed_bytes))
            if setting.blocking:
                if trace:
                    trace.add("compute", "wait", block, clock, out_free)
                state.room_wait_s += out_free - clock
                clock = out_free
    state.clock, state.held, state.peak, state.oldest, state.out_free = clock, held, peak, oldest, out_free


def backward(
    state: Pass, costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None = None, cutoff: float = math.inf
) -> None:
    """Simulates the rest of a pass from head and loss on; if it cannot end before `cutoff`, it stops early with the
    clock there or beyond.
    """
    steps = _BackwardSteps(state, costs, setting, trace)
    ready = state.clock
    steps.make_room(setting.turn_bytes)
    if trace:
        trace.add("compute", "wait", len(costs) - 1, ready, state.clock)
    state.room_wait_s += state.clock - ready
    steps.compute("outside", None, setting.turn_s)
    steps.free(setting.turn_bytes - setting.turn_gradient_bytes + setting.output_bytes, state.clock)
    remaining_s = state.recompute_s + setting.after_s + sum(cost.backward_s for cost in costs)
    for block in range(len(costs) - 1, -1, -1):
        if state.clock + remaining_s >= cutoff:
            state.clock = max(cutoff, state.clock)
            return
        cost, ready = costs[block], state.clock
        steps.swap_in(block)
        steps.start(block)
        if trace:
            trace.add("compute", "wait", block, ready, state.clock)
        state.swap_wait_s += state.clock - ready
        if cost.recomputes:
            steps.compute("recompute", block, cost.forward_s)
            remaining_s -= cost.forward_s
        steps.compute("backward", block, cost.backward_s)
        remaining_s -= cost.backward_s
        steps.free(cost.backward_bytes - cost.gradient_bytes + cost.own_bytes + cost.kept_bytes, state.clock)
    state.peak = max(state.peak, setting.last_bytes)
    steps.compute("outside", None, setting.after_s)
    state.clock = max(state.clock, state.out_free)
    if trace:
        for out in state.outs:
            trace.add("out", "swap out", out.block, out.start, out.end)
        trace.changes += [(out.end, -out.freed) for out in state.outs]


def stretched(seconds: float, transfers_s: float, drag: float) -> float:
    """Returns the seconds of computing, `seconds` alone, if transfers run for the next `transfers_s` seconds."""
    if seconds <= 0:
        return 0.0
    if seconds <= transfers_s * (1 - drag):
        return seconds / (1 - drag)
    return seconds + transfers_s * drag


class _BackwardSteps:
    """The steps of a backward pass, with the queue of swap-ins and the memory that must be left to earlier blocks."""

    __slots__ = (
        *("_below", "_costs", "_in_free", "_issued", "_limits", "_next", "_ready", "_setting", "_state", "_trace"),
    )

    def __init__(self, state: Pass, costs: Sequence[BlockCost], setting: PassSetting, trace: Trace | None) -> None:
        self._state, self._costs, self._setting, self._trace = state, costs, setting, trace
        self._in_free = 0.0  # Time at which the last swap-in ends.
        self._next = len(costs) - 1  # The block that is issued next.
        self._ready = [0.0] * len(costs)  # Time at which the swap-in of each block ends.
        self._issued = 0  # Sum of `freed_bytes` of all issued blocks.
        self._limits: deque[tuple[int, float]] = deque()
        """Blocks that have been issued and have not started, each with the limit of `_issued` until it starts; those
        with a limit above that of a later block are left out, so that the first limit is the lowest."""
        freed = sum(out.freed for out in state.outs[state.oldest :])
        self._below = state.held - setting.output_bytes - freed  # Bytes of blocks up to `_next` after their swap-outs.

    def compute(self, kind: Kind, block: int | None, seconds: float) -> None:
        state, start = self._state, self._state.clock
        transfers_s = max(state.out_free, self._in_free) - start
        state.clock += seconds if transfers_s <= 0 else stretched(seconds, transfers_s, self._setting.drag)
        if self._trace:
            self._trace.add("compute", kind, block, start, state.clock)

    def take(self, num_bytes: int) -> None:
        state = self._state
        state.held += num_bytes
        state.peak = max(state.peak, state.held)
        if self._trace:
            self._trace.changes.append((state.clock, num_bytes))

    def free(self, num_bytes: int, when: float) -> None:
        self._state.held -= num_bytes
        if self._trace:
            self._trace.changes.append((when, -num_bytes))

    def swap_in(self, block: int) -> None:
        """Issues blocks while memory is free, waits until `block` has been issued, and for its transfer."""
        state, outs = self._state, self._state.outs
        setting = self._setting
        last = 0  # The last block that may be issued now.
        if setting.blocking:
            last = block
        elif setting.one_block:
            last = max(0, block - 1)
        while True:
            while state.oldest < len(outs) and outs[state.oldest].end <= state.clock:
                state.held -= outs[state.oldest].freed
                state.oldest += 1
            while self._next >= last and self._issue(setting.budget):
                pass
            if self._next < block:
                break
            if state.oldest < len(outs):
                state.clock = max(state.clock, outs[state.oldest].end)
            else:
                self._issue(math.inf)
        state.clock = max(state.clock, self._ready[block])

    def _issue(self, budget: float) -> bool:
        """Issues the next block in backward order; returns False if it does not fit."""
        number, state = self._next, self._state
        cost = self._costs[number]
        if cost.moved_bytes:
            freed = cost.freed_bytes
            is_on_device = state.oldest < len(state.outs)
            if self._limits and self._issued + freed > self._limits[0][1]:
                return False
            if freed and not is_on_device and state.held + freed > budget:
                return False
            self._issued += freed
            if is_on_device:
                # The newest swap-out has not ended: its block does not leave.
                del state.outs[-1]
                state.out_free = state.outs[-1].end if state.outs else 0.0
            else:
                self.take(freed)
                start = max(state.clock, self._in_free)
                latency_s = cost.moved_count * self._setting.latency_s
                self._in_free = start + latency_s + cost.moved_bytes * self._setting.in_s
                self._ready[number] = self._in_free
                if self._trace:
                    self._trace.add("in", "swap in", number, start, self._in_free)
        stays = cost.own_bytes + cost.kept_bytes
        self._below -= stays - cost.freed_bytes
        spare = self._setting.budget - self._below - stays - cost.gradients_before_bytes - cost.backward_bytes
        limit = self._issued + spare
        while self._limits and self._limits[-1][1] >= limit:
            self._limits.pop()
        self._limits.append((number, limit))
        self._next -= 1
        return True

    def make_room(self, num_bytes: int) -> None:
        """Holds `num_bytes` more as soon as swap-outs have freed enough memory."""
        state = self._state
        while state.oldest < len(state.outs) and (
            state.outs[state.oldest].end <= state.clock or state.held + num_bytes > self._setting.budget
        ):
            state.held -= state.outs[state.oldest].freed
            state.clock = max(state.clock, state.outs[state.oldest].end)
            state.oldest += 1
        self.take(num_bytes)

    def start(self, block: int) -> None:
        self.make_room(self._costs[block].backward_bytes)
        if self._limits and self._limits[0][0] == block:
            self._limits.popleft()
