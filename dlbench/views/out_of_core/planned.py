"""What `dlbench memory plan` computes: a plan for a capacity, its pass, and what other methods and batches would take.

All of it is predicted by the simulator from one measured chain; nothing here is measured. Other batches have the same
chain, times and activations taken as proportional to their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.costs.memory.planner import fixed_plan, plan_blocks
from dlbench.costs.memory.smallest import smallest_capacity
from dlbench.costs.memory.tradeoff import (
    METHODS,
    Method,
    Point,
    against_batch,
    against_capacity,
    in_core_bytes,
    largest_batch,
    point,
)
from dlbench.specs.memory import BlockPlan, Chain, TransferRates
from dlbench.views.out_of_core.numbers import TITLES
from dlbench.views.out_of_core.passes import PassSpan, PlannedPart, blocks_of, schedule_of, spans_of

CAPACITIES = 6
"""Of the curve of memory against time, from the smallest to that of training in core."""
BATCH_FACTORS = (0.5, 1, 1.5, 2, 4)
"""Batches of the curve of throughput, in multiples of the largest in core."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a method would take with a batch and a capacity."""

    method: str
    recompute: str
    swap: str
    batch: int
    """Samples of a pass."""
    capacity_bytes: int | None
    """What may be held; None: no limit."""
    fits: bool
    """Whether a pass holds no more than that."""
    pass_s: float | None
    """Forward and backward pass, seconds; None where no plan fits."""
    samples_per_s: float | None
    """The batch over the pass; input, exchange and optimiser come on top."""
    peak_bytes: int | None
    recompute_s: float | None
    stall_s: float | None
    swapped_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Where a chain comes from."""

    workload: str
    preset: str
    where: str
    """This machine, or the run."""
    device: str
    sample_unit: str
    parts: int
    """Passes of a step."""
    warnings: tuple[str, ...]
    """Reasons for doubt."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the JSON of `dlbench memory plan` holds."""

    format: str = "dlbench.memory-plan"
    version: int = 1
    measured: Measured
    chain: Chain
    rates: TransferRates | None
    capacity_bytes: int
    in_core_bytes: int
    """What training holds in core with this batch."""
    smallest_bytes: int
    """The smallest capacity that any plan fits."""
    in_core_batch: int
    """The largest batch that the capacity holds in core; 0: none."""
    plan: BlockPlan
    blocks: tuple[PlannedPart, ...]
    operations: tuple[PassSpan, ...]
    """Of the simulated pass."""
    held: tuple[tuple[float, int], ...]
    """What is held from each of these times (seconds) on, bytes."""
    methods: tuple[Forecast, ...]
    """With this batch: the plans for the capacity, all others as they are."""
    by_capacity: tuple[Forecast, ...]
    """Of the plan, with this batch, from the smallest capacity to that of training in core."""
    by_batch: tuple[Forecast, ...]
    """With this capacity, batches in core and beyond."""


def memory_plan(
    measured: Measured,
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> MemoryPlan:
    """A plan, and what surrounds it.

    Args:
        measured: where the chain comes from.
        chain: for the batch asked for.
        rates: of transfers; None: nothing can be swapped.
        capacity_bytes: what may be held.
        starts: units with which blocks begin; None: the planner chooses.

    Raises:
        DoesNotFitError: no plan fits; names the smallest capacity that would do.
    """
    swap = rates is not None
    plan = plan_blocks(chain, rates, capacity_bytes, recompute=True, swap=swap, starts=starts)
    schedule = schedule_of(chain, plan, rates, "planned")
    limit = largest_batch(chain, None, ("none", "none"), capacity_bytes)
    batches = sorted({max(1, round((limit or chain.batch) * factor)) for factor in BATCH_FACTORS} | {chain.batch})
    methods = [method for method in METHODS if swap or method[1] == "none"]
    best: Method = ("planned", "planned" if swap else "none")
    by_capacity = against_capacity(chain, rates, best, points=CAPACITIES, starts=starts)
    by_batch = [against_batch(chain, rates, one, capacity_bytes, batches, starts=starts) for one in methods]
    return MemoryPlan(
        measured=measured,
        chain=chain,
        rates=rates,
        capacity_bytes=capacity_bytes,
        in_core_bytes=in_core_bytes(chain),
        smallest_bytes=smallest_capacity(chain, recompute=True, swap=swap, starts=starts),
        in_core_batch=limit,
        plan=plan,
        blocks=blocks_of(chain, plan, "planned"),
        operations=spans_of(schedule),
        held=schedule.held,
        methods=tuple(_forecast(_as_it_is(chain, rates, method, capacity_bytes, starts)) for method in methods),
        by_capacity=tuple(map(_forecast, by_capacity)),
        by_batch=tuple(_forecast(one) for row in zip(*by_batch, strict=True) for one in row),
    )


def _as_it_is(
    chain: Chain, rates: TransferRates | None, method: Method, capacity: int, starts: Sequence[int] | None
) -> Point:
    """A method with this batch; one that treats all blocks alike even where it holds more than the capacity."""
    recompute, swap = method
    if "planned" in method:
        return point(chain, rates, method, capacity, starts=starts)
    plan = fixed_plan(chain, rates if swap != "none" else None, recompute, swap, starts=starts)
    return Point(method=method, batch=chain.batch, capacity_bytes=capacity, plan=plan)


def _forecast(one: Point) -> Forecast:
    found = None if one.plan is None else one.plan.predicted
    recompute, swap = one.method
    return Forecast(
        method=TITLES[one.method],
        recompute=recompute,
        swap=swap,
        batch=one.batch,
        capacity_bytes=one.capacity_bytes,
        fits=found is not None and found.peak_bytes <= one.capacity_bytes,
        pass_s=None if found is None else found.pass_s,
        samples_per_s=one.samples_per_s,
        peak_bytes=None if found is None else found.peak_bytes,
        recompute_s=None if found is None else found.recompute_s,
        stall_s=None if found is None else found.stall_s,
        swapped_bytes=None if found is None else found.swapped_bytes,
    )
