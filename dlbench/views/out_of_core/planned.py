"""What `dlbench memory plan` computes: a plan for a capacity, its pass, and what other methods and batches would take.

All of it is predicted by the simulator from one measured chain; nothing here is measured. Other batches have the same
chain, times and activations taken as proportional to their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.costs.memory.planner import fixed_plan, plan_blocks
from dlbench.costs.memory.scaling import scaled
from dlbench.costs.memory.smallest import DoesNotFitError, smallest_capacity
from dlbench.specs.memory.chain import Chain, TransferRates
from dlbench.specs.memory.plan import BlockPlan
from dlbench.specs.memory.settings import Recompute, Swap
from dlbench.views.out_of_core.methods import TITLES
from dlbench.views.out_of_core.passes import PassSpan, PlannedPart, blocks_of, schedule_of, spans_of

CAPACITY_STEPS = 8
"""Capacities of the curve of memory against time, from the smallest to that of training in core."""
BATCH_FACTORS = (0.5, 1, 1.5, 2, 3, 4)
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
    in_core = in_core_bytes(chain)
    smallest = smallest_capacity(chain, recompute=True, swap=swap, starts=starts)
    limit = in_core_batch(chain, capacity_bytes)
    batches = sorted({max(1, round((limit or chain.batch) * factor)) for factor in BATCH_FACTORS} | {chain.batch})
    capacities = _between(smallest, max(in_core, smallest))
    return MemoryPlan(
        measured=measured,
        chain=chain,
        rates=rates,
        capacity_bytes=capacity_bytes,
        in_core_bytes=in_core,
        smallest_bytes=smallest,
        in_core_batch=limit,
        plan=plan,
        blocks=blocks_of(chain, plan, "planned"),
        operations=spans_of(schedule),
        held=schedule.held,
        methods=tuple(_methods(chain, rates, capacity_bytes, starts)),
        by_capacity=tuple(
            forecast(chain, rates, ("planned", "planned" if swap else "none"), capacity, starts)
            for capacity in capacities
        ),
        by_batch=tuple(
            one for batch in batches for one in _methods(scaled(chain, batch), rates, capacity_bytes, starts)
        ),
    )


def _between(low: int, high: int) -> list[int]:
    return sorted({low + (high - low) * place // (CAPACITY_STEPS - 1) for place in range(CAPACITY_STEPS)})


def _methods(chain: Chain, rates: TransferRates | None, capacity: int, starts: Sequence[int] | None) -> list[Forecast]:
    """All methods with one batch; those that swap only where rates are known."""
    return [
        forecast(chain, rates, method, capacity, starts)
        for method in TITLES
        if rates is not None or method[1] == "none"
    ]


def forecast(
    chain: Chain,
    rates: TransferRates | None,
    method: tuple[Recompute, Swap],
    capacity: int,
    starts: Sequence[int] | None = None,
) -> Forecast:
    """What a method would take; one that treats all blocks alike does not know of the capacity."""
    recompute, swap = method
    plan: BlockPlan | None
    if "planned" in method:
        try:
            plan = plan_blocks(
                chain, rates, capacity, recompute=recompute == "planned", swap=swap == "planned", starts=starts
            )
        except DoesNotFitError:
            plan = None
    else:
        plan = fixed_plan(chain, rates if swap != "none" else None, recompute, swap, starts=starts)
    found = None if plan is None else plan.predicted
    return Forecast(
        method=TITLES[method],
        recompute=recompute,
        swap=swap,
        batch=chain.batch,
        capacity_bytes=capacity,
        fits=found is not None and found.peak_bytes <= capacity,
        pass_s=None if found is None else found.pass_s,
        samples_per_s=None if found is None or not found.pass_s else chain.batch / found.pass_s,
        peak_bytes=None if found is None else found.peak_bytes,
        recompute_s=None if found is None else found.recompute_s,
        stall_s=None if found is None else found.stall_s,
        swapped_bytes=None if found is None else found.swapped_bytes,
    )


def in_core_bytes(chain: Chain) -> int:
    """What training holds in core."""
    return fixed_plan(chain, None, "none", "none").predicted.peak_bytes


def in_core_batch(chain: Chain, capacity: int) -> int:
    """The largest batch that a capacity holds in core; 0: none."""
    per_sample = (in_core_bytes(chain) - chain.state_bytes) / chain.batch
    return max(0, int((capacity - chain.state_bytes) / per_sample)) if per_sample > 0 else chain.batch
