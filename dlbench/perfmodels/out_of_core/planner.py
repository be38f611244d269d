"""Plans for a capacity: which blocks stay, move or are recomputed; and step time against capacity and batch.

Other batches are not measured: `scaled` takes times and activations in proportion to the samples, and the state as it
is. Times per sample often fall with the batch, so that larger batches may turn out faster than predicted, smaller ones
slower; bytes are exact where every activation has the batch as one of its dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlbench.perfmodels.out_of_core.blocks import cut, predicted
from dlbench.perfmodels.out_of_core.search import EFFORT, DoesNotFitError, allowed, best_found, fits, smallest_capacity
from dlbench.perfmodels.out_of_core.simulator import Prefetch, simulate
from dlbench.specs.out_of_core import BlockPlan, Chain, Decision, PlannedBlock, Recompute, Swap, TransferRates, Unit

PREFETCH: dict[Swap, Prefetch] = {"none": "room", "offload": "blocking", "streamed": "one-block", "planned": "room"}
"""How early blocks come back, by `train.swap`."""
PLANNER = "dynamic programming and local search"
Method = tuple[Recompute, Swap]  # train.recompute and train.swap.
METHODS: tuple[Method, ...] = (
    ("none", "none"),
    ("blocks", "none"),
    ("none", "offload"),
    ("none", "streamed"),
    ("blocks", "streamed"),
    ("planned", "none"),
    ("none", "planned"),
    ("planned", "planned"),
)
LARGEST_BATCH = 1 << 20  # No larger batch is looked for.
LEAST_SAVING = 0.01  # Of what training in core holds: less saves nothing (reported and live bytes agree no better).
CURVE_EFFORT = 60_000  # Effort of each plan of a curve (`dlbench.perfmodels.out_of_core.search`).

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

    `recompute`, `swap`: as of train.recompute and train.swap. `starts`: units with which blocks begin; None: every unit
    is a block. Raises `ValueError`: a method that has no fixed plan, or that moves something without rates.
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

    `starts`: units with which blocks begin; None: the planner chooses. `known`: plans to begin with, besides its own.
    Raises `DoesNotFitError`: no plan fits; it names the smallest capacity that would do.
    """
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


@dataclass(frozen=True, kw_only=True)
class CapacityPoint:
    """A method with a batch and a capacity."""

    method: Method
    batch: int  # Samples of a pass.
    capacity_bytes: int
    plan: BlockPlan | None  # None: it does not fit.

    @property
    def samples_per_s(self) -> float | None:
        """Samples of the batch over the predicted pass; None where it does not fit, or takes no time."""
        if self.plan is None or self.plan.predicted.pass_s == 0:
            return None
        return self.batch / self.plan.predicted.pass_s


def scaled(chain: Chain, batch: int) -> Chain:
    """The chain for another batch: times and activations in proportion, state and parameters' gradients as they are."""
    factor = batch / chain.batch

    def size(count: int, fixed: int = 0) -> int:
        return min(count, fixed) + math.ceil(max(0, count - fixed) * batch / chain.batch)

    def grown(names: str, unit: Unit, fixed: int = 0) -> dict[str, int]:
        return {name: size(getattr(unit, name), fixed) for name in names.split()}

    saved = "saved_bytes input_bytes forward_working_bytes recomputing_working_bytes passing_working_bytes"
    units = tuple(
        unit.model_copy(
            update={
                **{name: getattr(unit, name) * factor for name in ("forward_s", "backward_s")},
                **grown(saved, unit),
                **grown("backward_working_bytes piecemeal_bytes", unit, unit.gradient_bytes),
            }
        )
        for unit in chain.units
    )
    update: dict[str, object] = {name: getattr(chain, name) * factor for name in ("before_s", "turn_s", "after_s")}
    update |= {name: size(getattr(chain, name)) for name in ("output_bytes", "outside_bytes")}
    for part in ("turn", "after"):
        update[f"{part}_bytes"] = size(getattr(chain, f"{part}_bytes"), getattr(chain, f"{part}_gradient_bytes"))
    return chain.model_copy(update={**update, "batch": batch, "units": units})


def in_core_bytes(chain: Chain) -> int:
    """What training holds in core."""
    return fixed_plan(chain, None, "none", "none").predicted.peak_bytes


def saves_nothing(peak_bytes: int, in_core: int) -> bool:
    """Whether a pass with this peak is as good as in core, where training holds `in_core` bytes."""
    return peak_bytes > (1 - LEAST_SAVING) * in_core


def point(
    chain: Chain,
    rates: TransferRates | None,
    method: Method,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
    known: Iterable[Sequence[PlannedBlock]] = (),
    effort: int = CURVE_EFFORT,
) -> CapacityPoint:
    """A method with the chain's batch. One that treats all blocks alike does not know of the capacity: it fits or not.

    `rates`: of transfers; None: methods that swap do not fit. `method`: train.recompute and train.swap. `starts`: units
    with which blocks begin; None: every unit, or what the planner chooses.
    """
    recompute, swap = method
    plan: BlockPlan | None = None
    if swap == "none" or rates is not None:
        if "planned" in method:
            try:
                plan = plan_blocks(
                    chain,
                    rates if swap == "planned" else None,
                    capacity_bytes,
                    recompute=recompute == "planned",
                    swap=swap == "planned",
                    starts=starts,
                    known=known,
                    effort=effort,
                )
            except DoesNotFitError:
                plan = None
        else:
            plan = fixed_plan(chain, rates if swap != "none" else None, recompute, swap, starts=starts)
            plan = plan if plan.predicted.peak_bytes <= capacity_bytes else None
    return CapacityPoint(method=method, batch=chain.batch, capacity_bytes=capacity_bytes, plan=plan)


def against_batch(
    chain: Chain,
    rates: TransferRates | None,
    method: Method,
    capacity_bytes: int,
    batches: Iterable[int],
    *,
    starts: Sequence[int] | None = None,
) -> tuple[CapacityPoint, ...]:
    """Returns the points of a method with one capacity, batch by batch; each plan begins with the one before."""
    points: list[CapacityPoint] = []
    blocks: list[Sequence[PlannedBlock]] = []
    for batch in batches:
        points.append(point(scaled(chain, batch), rates, method, capacity_bytes, starts=starts, known=blocks))
        plan = points[-1].plan
        blocks = [] if plan is None else [plan.blocks]
    return tuple(points)


def largest_batch(
    chain: Chain,
    rates: TransferRates | None,
    method: Method,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> int:
    """The largest batch that fits, whatever its time; 0: none does. At most `LARGEST_BATCH`."""
    recompute, swap = method
    if swap != "none" and rates is None:
        return 0

    def does(batch: int) -> bool:
        other = scaled(chain, batch)
        if "planned" in method:
            may_recompute, may_swap = recompute == "planned", swap == "planned"
            return fits(other, capacity_bytes, recompute=may_recompute, swap=may_swap, starts=starts)
        plan = fixed_plan(other, rates if swap != "none" else None, recompute, swap, starts=starts)
        return plan.predicted.peak_bytes <= capacity_bytes

    low, high = 0, 1
    while high < LARGEST_BATCH and does(high):
        low, high = high, 2 * high
    high = min(high, LARGEST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low
