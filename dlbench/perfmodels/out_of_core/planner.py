"""Plans for a capacity: which blocks stay, move or are recomputed; and step time against capacity and batch. Other
batches are not measured: `scaled` assumes times and activations in proportion to the samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dlbench.perfmodels.out_of_core.blocks import cut, predicted
from dlbench.perfmodels.out_of_core.search import EFFORT, DoesNotFitError, Search, allowed, fits, smallest_capacity
from dlbench.perfmodels.out_of_core.simulator import PassSetting, Prefetch, simulate
from dlbench.specs.out_of_core import BlockPlan, Chain, Decision, PlannedBlock, Recompute, Swap, TransferRates

PREFETCH: dict[Swap, Prefetch] = {"none": "room", "offload": "blocking", "streamed": "one-block", "planned": "room"}
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
LARGEST_BATCH = 1 << 20  # No larger batch is tried.
LEAST_SAVING = 0.01  # Share of the bytes in core; less is no saving (reported and live bytes agree no better).
CURVE_EFFORT = 60_000  # Effort of each plan of a curve (`dlbench.perfmodels.out_of_core.search`).

_ACTIVATIONS = (
    "saved_bytes",
    "input_bytes",
    "forward_working_bytes",
    "recomputing_working_bytes",
    "passing_working_bytes",
)
_DECISION: dict[tuple[Recompute, Swap], Decision] = {
    ("none", "none"): "keep",
    ("blocks", "none"): "recompute",
    ("none", "offload"): "swap",
    ("none", "streamed"): "swap",
    ("blocks", "streamed"): "recompute-swap",
}


def fixed_plan(
    chain: Chain, rates: TransferRates | None, recompute: Recompute, swap: Swap, *, starts: Sequence[int] | None = None
) -> BlockPlan:
    """Returns the plan of a method that treats all blocks equally; its peak may exceed the capacity.

    `starts` are the units with which blocks begin; None: every unit. Raises `ValueError`: the method decides block by
    block, or moves bytes without rates.
    """
    decision = _DECISION.get((recompute, swap))
    if decision is None:
        raise ValueError(f"train.recompute {recompute} with train.swap {swap} treats blocks one by one")
    blocks = tuple(PlannedBlock(first=first, last=last, decision=decision) for first, last in cut(chain, starts))
    schedule = simulate(chain, blocks, rates, None, prefetch=PREFETCH[swap])
    return BlockPlan(blocks=blocks, capacity_bytes=None, predicted=predicted(schedule), planner="fixed")


def plan_blocks(  # noqa: PLR0913  # The capacity, what a plan may do, and where the search starts and ends.
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
    """Returns the plan with the shortest pass that the search, also from `known` plans, found; the same each time.
    `starts` are the units with which blocks begin; None: the planner chooses. Raises `DoesNotFitError`: no plan fits.
    """
    decisions = allowed(recompute=recompute, swap=swap)
    search = Search(chain, PassSetting.of(chain, rates, capacity_bytes), decisions, starts, effort)
    plan = search.run(tuple((block.first, block.last, block.decision) for block in blocks) for blocks in known)
    if plan is None:
        smallest_bytes = smallest_capacity(chain, recompute=recompute, swap=swap, starts=starts)
        raise DoesNotFitError(chain, capacity_bytes, smallest_bytes)
    blocks = tuple(PlannedBlock(first=first, last=last, decision=decision) for first, last, decision in plan)
    schedule = simulate(chain, blocks, rates, capacity_bytes)
    return BlockPlan(blocks=blocks, capacity_bytes=capacity_bytes, predicted=predicted(schedule), planner=PLANNER)


@dataclass(frozen=True, kw_only=True)
class CapacityPoint:
    """The plan of a method for one batch and one capacity."""

    method: Method
    batch: int  # Samples of a pass.
    capacity_bytes: int
    plan: BlockPlan | None  # None: it does not fit.

    @property
    def samples_per_s(self) -> float | None:
        """Samples of the batch over the predicted pass; None if it does not fit or takes no time."""
        if self.plan is None or self.plan.predicted.pass_s == 0:
            return None
        return self.batch / self.plan.predicted.pass_s


def scaled(chain: Chain, batch: int) -> Chain:
    """Returns the chain for another batch: times and activations in proportion, state and gradients unchanged."""
    factor = batch / chain.batch

    def size(num_bytes: int, fixed: int = 0) -> int:
        return min(num_bytes, fixed) + math.ceil(max(0, num_bytes - fixed) * batch / chain.batch)

    units = []
    for unit in chain.units:
        update: dict[str, object] = {name: getattr(unit, name) * factor for name in ("forward_s", "backward_s")}
        for name in _ACTIVATIONS:
            update[name] = size(getattr(unit, name))
        for name in ("backward_working_bytes", "piecemeal_bytes"):
            update[name] = size(getattr(unit, name), unit.gradient_bytes)
        units.append(unit.model_copy(update=update))
    update = {"batch": batch, "units": tuple(units)}
    update |= {name: getattr(chain, name) * factor for name in ("before_s", "turn_s", "after_s")}
    update |= {name: size(getattr(chain, name)) for name in ("output_bytes", "outside_bytes")}
    update["turn_bytes"] = size(chain.turn_bytes, chain.turn_gradient_bytes)
    update["after_bytes"] = size(chain.after_bytes, chain.after_gradient_bytes)
    return chain.model_copy(update=update)


def in_core_bytes(chain: Chain) -> int:
    """Returns the peak of a pass without recomputing and swapping, in bytes."""
    return fixed_plan(chain, None, "none", "none").predicted.peak_bytes


def saves_nothing(peak_bytes: int, in_core: int) -> bool:
    """Returns whether a peak is hardly below `in_core`, the peak of training in core, both in bytes."""
    return peak_bytes > (1 - LEAST_SAVING) * in_core


def point(
    chain: Chain,
    rates: TransferRates | None,
    method: Method,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
    known: Iterable[Sequence[PlannedBlock]] = (),
) -> CapacityPoint:
    """Returns the plan of a method for the chain's batch, if it fits; without `rates`, methods that swap do not.
    `starts` are the units with which blocks begin; None: every unit, or those that the planner chooses.
    """
    recompute, swap = method
    plan: BlockPlan | None = None
    can_run = swap == "none" or rates is not None
    if can_run and "planned" in method:
        with suppress(DoesNotFitError):
            plan = plan_blocks(
                chain,
                rates,
                capacity_bytes,
                recompute=recompute == "planned",
                swap=swap == "planned",
                starts=starts,
                known=known,
                effort=CURVE_EFFORT,
            )
    elif can_run:
        fixed = fixed_plan(chain, rates, recompute, swap, starts=starts)
        if fixed.predicted.peak_bytes <= capacity_bytes:
            plan = fixed
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
    """Returns the points of a method with one capacity, by batch; each search begins with the plan before."""
    points: list[CapacityPoint] = []
    known: list[Sequence[PlannedBlock]] = []
    for batch in batches:
        batch_point = point(scaled(chain, batch), rates, method, capacity_bytes, starts=starts, known=known)
        points.append(batch_point)
        known = [batch_point.plan.blocks] if batch_point.plan else []
    return tuple(points)


def largest_batch(
    chain: Chain,
    rates: TransferRates | None,
    method: Method,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> int:
    """Returns the largest batch that fits, at most `LARGEST_BATCH`; 0 if none does."""
    recompute, swap = method
    if swap != "none" and rates is None:
        return 0

    def exceeds(batch: int) -> bool:
        chain_of_batch = scaled(chain, batch)
        if "planned" in method:
            may_recompute, may_swap = recompute == "planned", swap == "planned"
            return not fits(chain_of_batch, capacity_bytes, recompute=may_recompute, swap=may_swap, starts=starts)
        return fixed_plan(chain_of_batch, rates, recompute, swap, starts=starts).predicted.peak_bytes > capacity_bytes

    beyond = 1
    while beyond < LARGEST_BATCH and not exceeds(beyond):
        beyond *= 2
    return bisect_left(range(beyond), True, lo=beyond // 2 + 1, key=exceeds) - 1
