"""Plans for a capacity: which blocks stay, move or are recomputed, and where blocks begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlbench.costs.memory.blocks import cut
from dlbench.costs.memory.local_search import EFFORT, best_found
from dlbench.costs.memory.schedule import predicted
from dlbench.costs.memory.simulator import Prefetch, simulate
from dlbench.costs.memory.smallest import DoesNotFitError, allowed, smallest_capacity
from dlbench.specs.memory import BlockPlan, Chain, Decision, PlannedBlock, Recompute, Swap, TransferRates

PREFETCH: dict[Swap, Prefetch] = {"none": "room", "offload": "blocking", "streamed": "one-block", "planned": "room"}
"""How early blocks come back, by `train.swap`."""
PLANNER = "dynamic programming and local search"

_DECISION: dict[tuple[Recompute, Swap], Decision] = {
    ("none", "none"): "keep",
    ("blocks", "none"): "recompute",
    ("none", "offload"): "swap",
    ("none", "streamed"): "swap",
    ("blocks", "streamed"): "recompute-swap",
}


def fixed_plan(
    chain: Chain,
    rates: TransferRates | None,
    recompute: Recompute,
    swap: Swap,
    *,
    starts: Sequence[int] | None = None,
    capacity_bytes: int | None = None,
) -> BlockPlan:
    """The plan of a method that treats all blocks alike; it may need more than the capacity (see its peak).

    Args:
        chain: the chain, as measured.
        rates: of transfers; None where nothing moves.
        recompute: train.recompute, none or blocks.
        swap: train.swap, none, offload or streamed.
        starts: units with which blocks begin; None: every unit is a block.
        capacity_bytes: what may be held; None: no limit.

    Raises:
        ValueError: a method that has no fixed plan, or that moves something without rates.
    """
    decision = _DECISION.get((recompute, swap))
    if decision is None:
        raise ValueError(f"train.recompute {recompute} with train.swap {swap} treats blocks one by one")
    blocks = tuple(PlannedBlock(first=first, last=last, decision=decision) for first, last in cut(chain, starts))
    schedule = simulate(chain, blocks, rates, capacity_bytes, prefetch=PREFETCH[swap])
    return BlockPlan(blocks=blocks, capacity_bytes=capacity_bytes, predicted=predicted(schedule), planner="fixed")


def plan_blocks(
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    recompute: bool,
    swap: bool,
    starts: Sequence[int] | None = None,
    known: Iterable[Sequence[PlannedBlock]] = (),
    effort: int = EFFORT,
) -> BlockPlan:
    """The plan with the shortest pass that was found; always the same for the same arguments.

    Args:
        chain: the chain, as measured.
        rates: of transfers; None where swap is False.
        capacity_bytes: what a pass may hold.
        recompute: whether blocks may be recomputed.
        swap: whether blocks may move.
        starts: units with which blocks begin; None: the planner chooses.
        known: plans to begin with, beside its own; with the same units.
        effort: how many blocks it may simulate.

    Raises:
        DoesNotFitError: no plan fits; it names the smallest capacity that would do.
        ValueError: to swap without rates.
    """
    if swap and rates is None:
        raise ValueError("blocks that are swapped need transfer rates")
    found = best_found(
        chain,
        rates,
        capacity_bytes,
        decisions=allowed(recompute=recompute, swap=swap),
        starts=starts,
        known=[tuple((block.first, block.last, block.decision) for block in plan) for plan in known],
        effort=effort,
    )
    if found is None:
        raise DoesNotFitError(
            chain, capacity_bytes, smallest_capacity(chain, recompute=recompute, swap=swap, starts=starts)
        )
    blocks = tuple(PlannedBlock(first=first, last=last, decision=decision) for first, last, decision in found)
    schedule = simulate(chain, blocks, rates, capacity_bytes)
    return BlockPlan(blocks=blocks, capacity_bytes=capacity_bytes, predicted=predicted(schedule), planner=PLANNER)
