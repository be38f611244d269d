"""What `dlbench memory plan` computes and prints: a plan for a capacity, its pass, and other methods.

All of it is predicted by the simulator from one measured chain; nothing here is measured. Other batches have the same
chain, times and activations taken as proportional to their samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import dlbench
from dlbench.perfmodels.out_of_core.blocks import Operation
from dlbench.perfmodels.out_of_core.planner import (
    METHODS,
    PREFETCH,
    CapacityPoint,
    Method,
    against_batch,
    fixed_plan,
    in_core_bytes,
    largest_batch,
    plan_blocks,
    point,
    saves_nothing,
)
from dlbench.perfmodels.out_of_core.search import smallest_capacity
from dlbench.perfmodels.out_of_core.simulator import simulate
from dlbench.report.charts.chart import ReportSubject
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Pivot, Sheet, column, columns_of
from dlbench.report.wording import DASH, percent
from dlbench.specs.out_of_core import BlockPlan, Chain, TransferRates
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.out_of_core.numbers import IN_CORE, TITLES
from dlbench.views.out_of_core.planned_pass import PlannedPart, blocks_of, blocks_sheet, lanes_chart

BATCH_FACTORS = (0.5, 1, 1.5, 2, 4)  # Batches of the curve of throughput, in multiples of the largest in core.


@dataclass(frozen=True, kw_only=True)
class MethodForecast:
    """What a method would take with a batch and a capacity."""

    method: str = field(metadata=column("Activations", is_brief=True))
    recompute: str
    swap: str
    batch: int
    capacity_bytes: int | None = field(metadata=column(unit="bytes", is_brief=True))  # What may be held; None: all.
    fits: bool = field(metadata=column("Fits", is_brief=True))  # Whether a pass holds no more than that.
    pass_s: float | None = field(metadata=column("Pass", unit="s", is_brief=True))
    """Forward and backward pass, seconds; None where no plan fits."""
    samples_per_s: float | None = field(metadata=column(is_brief=True))
    """The batch over the pass; input, exchange and optimiser come on top."""
    peak_bytes: int | None = field(metadata=column("Peak", unit="bytes", is_brief=True))
    recompute_s: float | None = field(metadata=column("Recomputing", unit="s"))
    stall_s: float | None = field(metadata=column("Waiting", unit="s"))
    swapped_bytes: int | None = field(metadata=column("Moved", unit="bytes"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Where a chain comes from."""

    workload: str
    preset: str
    where: str
    device: str
    sample_unit: str
    parts: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """What the JSON of `dlbench memory plan` holds."""

    format: str = "dlbench.memory-plan"
    version: int = 1
    measured: Measured
    chain: Chain
    rates: TransferRates | None
    capacity_bytes: int
    in_core_bytes: int  # What training holds in core with this batch.
    smallest_bytes: int  # The smallest capacity that any plan fits.
    in_core_batch: int  # The largest batch that the capacity holds in core; 0: none.
    plan: BlockPlan
    blocks: tuple[PlannedPart, ...]
    operations: tuple[Operation, ...]
    methods: tuple[MethodForecast, ...]  # With this batch: the plans for the capacity, all others as they are.
    by_batch: tuple[MethodForecast, ...]  # With this capacity, batches in core and beyond.


def memory_plan(
    measured: Measured,
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> CapacityPlan:
    """A plan for the chain's batch, and what surrounds it.

    Without rates of transfers nothing can be swapped; `starts` are units with which blocks begin, otherwise the planner
    chooses. Raises DoesNotFitError: no plan fits; names the smallest capacity that would do.
    """
    swap = rates is not None
    plan = plan_blocks(chain, rates, capacity_bytes, recompute=True, swap=swap, starts=starts)
    schedule = simulate(chain, plan.blocks, rates, plan.capacity_bytes, prefetch=PREFETCH["planned"])
    limit = largest_batch(chain, None, ("none", "none"), capacity_bytes)
    batches = sorted({max(1, round((limit or chain.batch) * factor)) for factor in BATCH_FACTORS} | {chain.batch})
    methods = [method for method in METHODS if swap or method[1] == "none"]
    by_batch = [against_batch(chain, rates, one, capacity_bytes, batches, starts=starts) for one in methods]

    def as_it_is(method: Method) -> CapacityPoint:
        """With this batch; a method that treats all blocks alike even where it holds more than the capacity."""
        if "planned" in method:
            return point(chain, rates, method, capacity_bytes, starts=starts)
        moves = rates if method[1] != "none" else None
        fixed = fixed_plan(chain, moves, *method, starts=starts)
        return CapacityPoint(method=method, batch=chain.batch, capacity_bytes=capacity_bytes, plan=fixed)

    return CapacityPlan(
        measured=measured,
        chain=chain,
        rates=rates,
        capacity_bytes=capacity_bytes,
        in_core_bytes=in_core_bytes(chain),
        smallest_bytes=smallest_capacity(chain, recompute=True, swap=swap, starts=starts),
        in_core_batch=limit,
        plan=plan,
        blocks=blocks_of(chain, plan, "planned"),
        operations=schedule.operations,
        methods=tuple(_forecast(as_it_is(method)) for method in methods),
        by_batch=tuple(_forecast(one) for row in zip(*by_batch, strict=True) for one in row),
    )


def _forecast(one: CapacityPoint) -> MethodForecast:
    found = None if one.plan is None else one.plan.predicted
    names = ("pass_s", "peak_bytes", "recompute_s", "stall_s", "swapped_bytes")
    recompute, swap = one.method
    return MethodForecast(
        method=TITLES[one.method],
        recompute=recompute,
        swap=swap,
        batch=one.batch,
        capacity_bytes=one.capacity_bytes,
        fits=found is not None and found.peak_bytes <= one.capacity_bytes,
        samples_per_s=one.samples_per_s,
        **{name: getattr(found, name, None) for name in names},
    )


def memory_plan_document(found: CapacityPlan) -> Document:
    """The plan for every format; its data is `found`."""
    measured = found.measured
    what = (
        f"{measured.workload} ({measured.preset}), batch {found.chain.batch}, in {format_bytes(found.capacity_bytes)}"
    )
    subject = ReportSubject(id="memory-plan", label=what)
    words = tuple(_words(found))
    sections = (
        Section(
            id="plan",
            title="The plan",
            words=words,
            brief=words,
            sheets=(blocks_sheet(found.blocks, "The plan, block by block", in_terminal=True),),
        ),
        Section(
            id="pass",
            title="A pass, predicted",
            brief=(),
            charts=lambda: [lanes_chart(found.operations, found.blocks, subject)],
            charts_per_row=1,
        ),
        Section(
            id="trade-off",
            title="Memory against time",
            words=tuple(_trade_words(found)),
            sheets=(_methods_sheet(found), _batch_sheet(found)),
        ),
    )
    return Document(
        title=f"dlbench memory plan: {subject.label}",
        dlbench_version=dlbench.__version__,
        meta=(f"Measured on {measured.where}, {measured.device}.",),
        sections=sections,
        data=found,
        file_prefix="memory-plan-",
        command="dlbench memory plan",
    )


def _words(found: CapacityPlan) -> Iterator[str]:
    predicted, measured = found.plan.predicted, found.measured
    passes = "" if measured.parts == 1 else f" (a step has {measured.parts} passes)"
    yield (
        f"Predicted: a pass over {found.chain.batch} {measured.sample_unit} takes {format_seconds(predicted.pass_s)}"
        f"{passes}, {format_number(found.chain.batch / predicted.pass_s, 3)} {measured.sample_unit}/s; in core it "
        f"would take {format_seconds(predicted.useful_s)}. Input, exchange and optimiser come on top."
    )
    saved = 1 - predicted.peak_bytes / found.in_core_bytes if found.in_core_bytes else 0.0
    saves = (
        "nothing is saved"
        if saves_nothing(predicted.peak_bytes, found.in_core_bytes)
        else f"{percent(saved)} are saved"
    )
    yield (
        f"It holds {format_bytes(predicted.peak_bytes)} at most, of {format_bytes(found.capacity_bytes)}; in core it "
        f"would be {format_bytes(found.in_core_bytes)}: {saves}. The smallest capacity that would do is "
        f"{format_bytes(found.smallest_bytes)}."
    )
    swapped = format_bytes(predicted.swapped_bytes) if predicted.swapped_bytes else "nothing"
    yield (
        f"Something is computed in {percent(predicted.occupancy)} of the time (occupancy), and for the first time in "
        f"{percent(predicted.efficiency)} (efficiency): {_took(predicted.recompute_s, 'recomputing')}, "
        f"{_took(predicted.stall_s, 'waiting')}; {swapped} out and back."
    )
    yield f"Measured on {measured.where}, {measured.device}{_rates(found)}."
    yield from measured.warnings


def _took(seconds: float, what: str) -> str:
    return f"{format_seconds(seconds)} {what}" if seconds else f"no {what}"


def _rates(found: CapacityPlan) -> str:
    rates = found.rates
    if rates is None:
        return "; transfers were not measured, so nothing is swapped"
    later = f", each transfer {format_seconds(rates.latency_s)} more" if rates.latency_s else ""
    return (
        f"; to {rates.tier} {format_number(rates.out_bytes_per_s / 1e9, 3)} GB/s, back "
        f"{format_number(rates.in_bytes_per_s / 1e9, 3)} GB/s{later}; "
        f"computing takes {percent(rates.drag, 0)} longer meanwhile"
    )


def _methods_sheet(found: CapacityPlan) -> Sheet[MethodForecast]:
    in_core = found.in_core_bytes

    def saved(one: MethodForecast) -> float | None:
        return None if one.peak_bytes is None else 1 - one.peak_bytes / in_core

    def saving(one: MethodForecast) -> Cell | None:
        share = saved(one)
        if share is None or (one.recompute, one.swap) == IN_CORE:
            return None
        return Cell("nothing" if saves_nothing(one.peak_bytes or 0, in_core) else percent(share))

    share: Column[MethodForecast] = Column("saved_fraction", "Saves", saved, saving, is_brief=True)
    what = ("method", "recompute", "swap", "batch", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes", share)
    return Sheet(
        name="memory-methods",
        title=f"Methods with batch {found.chain.batch}",
        columns=columns_of(
            MethodForecast,
            *what,
            *("fits", "recompute_s", "stall_s", "swapped_bytes"),
            titles={"samples_per_s": f"{found.measured.sample_unit}/s"},
        ),
        rows=found.methods,
        caption="Predicted by the simulator from the chain as measured. Methods that treat all blocks alike know of no "
        "capacity; planned ones were given the capacity. Saves: of what training in core holds at most.",
        in_terminal=True,
    )


def _batch_sheet(found: CapacityPlan) -> Sheet[MethodForecast]:
    names = ("batch", "method", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes", "fits")
    return Sheet(
        name="memory-batches-planned",
        title=f"Batches in {format_bytes(found.capacity_bytes)}: {found.measured.sample_unit}/s",
        columns=columns_of(MethodForecast, *names),
        rows=found.by_batch,
        pivot=Pivot(corner="Batch", down="method", across=lambda one: str(one.batch), cell=_rate_if_it_fits),
        caption="Samples per second of forward and backward passes, predicted: times and activations in proportion to "
        "the batch. A dash: the method does not fit.",
        in_terminal=True,
    )


def _rate_if_it_fits(one: MethodForecast) -> Cell:
    if one.samples_per_s is None:
        return Cell(DASH)
    return Cell(format_number(one.samples_per_s, 3), number=one.samples_per_s)


def _trade_words(found: CapacityPlan) -> Iterator[str]:
    unit = found.measured.sample_unit
    if found.in_core_batch:
        batch = f"are enough for a pass of {found.in_core_batch} {unit}"
    else:
        batch = f"are too few for a pass of one of the {unit}"
    yield f"Without recomputing or swapping, {format_bytes(found.capacity_bytes)} {batch}."
    recomputed, partly = (
        next((one.peak_bytes or 0 for one in found.methods if (one.recompute, one.swap) == (recompute, "none")), 0)
        for recompute in ("blocks", "planned")
    )
    if recomputed > partly > 0:
        yield (
            "A recomputed block keeps its input, and in the backward pass holds all that it computes again: where that "
            "is more than it saves, recomputing all blocks holds more than a plan that keeps some."
        )
    fitting = [one for one in found.methods if one.fits and one.samples_per_s is not None]
    alike = [one for one in fitting if "planned" not in (one.recompute, one.swap)]
    planned = next((one for one in fitting if (one.recompute, one.swap) == ("planned", "planned")), None)
    if planned is not None and planned.pass_s and alike:
        best = min(alike, key=lambda one: one.pass_s or 0.0)
        yield (
            f"Of the methods that treat all blocks alike and fit, {best.method} is the fastest; the plan is predicted "
            f"to be {(best.pass_s or 0.0) / planned.pass_s:.2f}x as fast."
        )
    elif planned is not None:
        yield "No method that treats all blocks alike fits."
