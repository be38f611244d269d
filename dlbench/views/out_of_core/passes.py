"""One pass by its plan: the blocks of the chain, and the operations as the simulator has them and as they ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.costs.memory.blocks import BlockCosts
from dlbench.costs.memory.planner import PREFETCH
from dlbench.costs.memory.schedule import Schedule
from dlbench.costs.memory.simulator import simulate
from dlbench.records.memory import MemoryResult
from dlbench.specs.memory import BlockPlan, Chain, Decision, Prediction, Swap, TransferRates


@dataclass(frozen=True, kw_only=True)
class PassSpan:
    """One operation of a pass, simulated or measured."""

    lane: str
    """compute, out or in."""
    kind: str
    """forward, recompute, backward, outside, wait, swap out or swap in."""
    block: int | None
    """Number of its block, from 0; None: outside of the chain."""
    start_s: float
    """From the start of the pass."""
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """A block of a plan."""

    number: int
    """From 0."""
    modules: str
    """Its module, or the first and the last."""
    num_units: int
    decision: Decision
    own_bytes: int
    """Activations that its forward pass saves, without its input."""
    input_bytes: int
    """Its input, which the block before makes."""
    moved_bytes: int
    """What leaves the device after its forward pass and comes back."""
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A pass of one run."""

    run_id: str
    label: str
    is_planned: bool
    """Whether a plan decides for every block; otherwise all are treated alike."""
    predicted: Prediction
    capacity_bytes: int | None
    blocks: tuple[PlannedPart, ...]
    simulated: tuple[PassSpan, ...]
    """By the simulator, with the chain and the rates that were measured before training."""
    held: tuple[tuple[float, int], ...]
    """What the simulator says is held from each of these times (seconds) on, bytes."""
    measured: tuple[PassSpan, ...]
    """A watched pass of rank 0; empty where none was watched."""

    @property
    def order(self) -> tuple[bool, bool, int]:
        """What has most to show comes first: a plan, a measured pass, most bytes moved."""
        return not self.is_planned, not self.measured, -self.predicted.swapped_bytes


def passage_of(told: MemoryResult, *, run_id: str, label: str) -> Passage:
    """The pass of a run.

    Args:
        told: what the run says of its activations.
        run_id: of the run.
        label: of the run, in words.
    """
    schedule = schedule_of(told.chain, told.plan, told.rates, told.swap)
    return Passage(
        run_id=run_id,
        label=label,
        is_planned="planned" in (told.recompute, told.swap),
        predicted=told.plan.predicted,
        capacity_bytes=told.plan.capacity_bytes,
        blocks=blocks_of(told.chain, told.plan, told.swap),
        simulated=spans_of(schedule),
        held=schedule.held,
        measured=tuple(
            PassSpan(lane=one.lane, kind=one.kind, block=one.block, start_s=one.start_s, end_s=one.end_s)
            for one in told.timeline
        ),
    )


def blocks_of(chain: Chain, plan: BlockPlan, swap: Swap) -> tuple[PlannedPart, ...]:
    """The blocks of a plan with what the chain says of them."""
    costs = BlockCosts(chain, blocking=swap == "offload")
    found = []
    for number, block in enumerate(plan.blocks):
        units = chain.units[block.first : block.last + 1]
        first, last = units[0].name, units[-1].name
        kept = costs.of(block.first, block.last, "keep")
        found.append(
            PlannedPart(
                number=number,
                modules=first if first == last else f"{first} to {last}",
                num_units=len(units),
                decision=block.decision,
                own_bytes=kept.own_bytes,
                input_bytes=kept.input_bytes,
                moved_bytes=costs.of(block.first, block.last, block.decision).moved_bytes,
                forward_s=kept.forward_s,
                backward_s=kept.backward_s,
            )
        )
    return tuple(found)


def schedule_of(chain: Chain, plan: BlockPlan, rates: TransferRates | None, swap: Swap) -> Schedule:
    """A pass by the simulator, as the method brings tensors back."""
    return simulate(chain, plan.blocks, rates, plan.capacity_bytes, prefetch=PREFETCH[swap])


def spans_of(schedule: Schedule) -> tuple[PassSpan, ...]:
    """The operations of a simulated pass."""
    return tuple(
        PassSpan(lane=one.lane, kind=one.kind, block=one.block, start_s=one.start_s, end_s=one.end_s)
        for one in schedule.operations
    )


# For a terminal

LANES = ("compute", "out", "in")

KIND_SIGNS = {"forward": "F", "recompute": "R", "backward": "B", "wait": "."}
"""What stands in the line of the computation; anything else that is computed is `=`."""
IDLE = "."
WIDTH = 68
"""Characters of a lane: with its title it fits 80 columns."""

LEGEND = (
    "F forward, R recomputed, B backward, = outside of the chain, . waiting or idle; digits: the last digit of the "
    "number of the block."
)


def lanes(spans: Sequence[PassSpan], width: int = WIDTH) -> list[tuple[str, str]]:
    """Title and characters of each lane; the computation has two lines: what is done, and of which block.

    Args:
        spans: operations of one pass.
        width: characters of a lane; each stands for an equal part of the pass, and shows what took most of it; a
            transfer is shown however short it is.
    """
    end = max((span.end_s for span in spans), default=0.0)
    if end <= 0:
        return []
    chosen = {
        lane: _chosen([span for span in spans if span.lane == lane], end, width, has_gaps=lane == "compute")
        for lane in LANES
    }
    found = [
        ("compute", "".join((IDLE if span is None else KIND_SIGNS.get(span.kind, "=")) for span in chosen["compute"]))
    ]
    found.append(("block", "".join(_digit(span) for span in chosen["compute"])))
    found += [(lane, "".join(_digit(span) for span in chosen[lane])) for lane in LANES[1:]]
    return found


def _digit(span: PassSpan | None) -> str:
    if span is None or (span.lane == "compute" and span.kind not in ("forward", "recompute", "backward")):
        return IDLE
    return IDLE if span.block is None else str(span.block % 10)


def _chosen(spans: Sequence[PassSpan], end: float, width: int, *, has_gaps: bool) -> list[PassSpan | None]:
    """What took most of each of `width` equal parts; None where nothing did, and with `has_gaps` where a gap did."""
    found: list[PassSpan | None] = []
    for place in range(width):
        begin, until = end * place / width, end * (place + 1) / width
        taken = {id(span): min(span.end_s, until) - max(span.start_s, begin) for span in spans}
        longest = max(spans, key=lambda span: taken[id(span)], default=None)
        idle = (until - begin) - sum(max(0.0, seconds) for seconds in taken.values()) if has_gaps else 0.0
        is_idle = longest is None or taken[id(longest)] <= 0 or taken[id(longest)] < idle
        found.append(None if is_idle else longest)
    return found
