"""The figures and the document of `dlbench memory plan`, all predicted by the simulator from one measured chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as chain_items
from operator import attrgetter

import dlbench
from dlbench.perfmodels.out_of_core.blocks import BlockCosts, Operation
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
from dlbench.report.chart_style import PART_COLOURS, WIDE, si_label
from dlbench.report.charts import Chart, ReportSubject, Rows, Series, Subject, channel, finish, layer, palette, tooltips
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Pivot, Sheet, column, columns_of
from dlbench.report.wording import DASH, percent
from dlbench.specs.out_of_core import BlockPlan, Chain, Decision, Swap, TransferRates
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.out_of_core.numbers import IN_CORE, TITLES

KINDS = {  # Title and colour of the operations of a pass, in the order of the legend.
    "forward": ("forward", PART_COLOURS["forward"]),
    "recompute": ("recomputed", PART_COLOURS["input"]),
    "backward": ("backward", PART_COLOURS["backward"]),
    "outside": ("outside of the chain", PART_COLOURS["other"]),
    "swap out": ("swapped out", PART_COLOURS["optimizer"]),
    "swap in": ("swapped in", PART_COLOURS["imbalance"]),
    "wait": ("waiting", PART_COLOURS["exchange"]),
}
BATCH_FACTORS = (0.5, 1, 1.5, 2, 4)  # Batches of the curve of throughput, in multiples of the largest in core.


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """A block of a plan."""

    number: int = field(metadata=column("Block", "block", is_brief=True))
    modules: str = field(metadata=column("Modules", is_brief=True, limit=60))  # Its module, or the first and the last.
    num_units: int = field(metadata=column("Units", "units"))
    decision: Decision = field(
        metadata=column("Decision", text=lambda decision: decision.replace("-swap", ", input swapped"), is_brief=True)
    )
    own_bytes: int = field(metadata=column("Saves", unit="bytes", is_brief=True))  # Without its input.
    input_bytes: int = field(metadata=column("Input", unit="bytes", is_brief=True))  # Output of the block before.
    moved_bytes: int = field(metadata=column("Moves", unit="bytes"))  # Out of the device and back.
    forward_s: float = field(metadata=column("Forward", unit="s", is_brief=True))
    backward_s: float = field(metadata=column("Backward", unit="s", is_brief=True))


def blocks_of(chain: Chain, plan: BlockPlan, swap: Swap) -> tuple[PlannedPart, ...]:
    """Returns the blocks of a plan with the bytes and seconds of the chain."""
    costs = BlockCosts(chain, blocking=swap == "offload")
    parts = []
    for number, block in enumerate(plan.blocks):
        units = chain.units[block.first : block.last + 1]
        modules = units[0].name
        if units[-1].name != modules:
            modules = f"{modules} to {units[-1].name}"
        on_device = costs.of(block.first, block.last, "keep")
        parts.append(
            PlannedPart(
                number=number,
                modules=modules,
                num_units=len(units),
                decision=block.decision,
                own_bytes=on_device.own_bytes,
                input_bytes=on_device.input_bytes,
                moved_bytes=costs.of(block.first, block.last, block.decision).moved_bytes,
                forward_s=on_device.forward_s,
                backward_s=on_device.backward_s,
            )
        )
    return tuple(parts)


def blocks_sheet(blocks: Sequence[PlannedPart], title: str, *, in_terminal: bool = False) -> Sheet[PlannedPart]:
    """Returns the table of the blocks of a plan, first to last."""
    return Sheet(
        name="out-of-core-blocks",
        title=title,
        columns=columns_of(PlannedPart),
        rows=blocks,
        caption="Saves: bytes kept for the backward pass, without the input. Moves: bytes out of the device and back.",
        in_terminal=in_terminal,
        is_folded=not in_terminal and len(blocks) > 16,
    )


def lanes_chart(operations: Sequence[Operation], blocks: Sequence[PlannedPart], subject: Subject) -> Chart:
    """Draws computing, swap-outs and swap-ins in three lanes over time."""
    names = ["compute", "out", "in"]
    rows: Rows = []
    for span in operations:
        title, _ = KINDS.get(span.kind, (span.kind, ""))
        block = modules = ""
        if span.block is not None:
            block = str(span.block)
            if span.block < len(blocks):
                modules = blocks[span.block].modules
        rows.append(
            {
                "lane": span.lane,
                "kind": title,
                "block": block,
                "modules": modules,
                "start": span.start_s,
                "end": span.end_s,
                "shown": format_seconds(span.end_s - span.start_s),
            }
        )
    axis = {"labelExpr": si_label("s"), "tickCount": 6, "grid": True}
    encoding = {
        "y": channel("lane:N", title=None, sort=names, scale={"domain": names}),
        "x": channel("start:Q", title="from the start of the pass", scale={"nice": False, "domainMin": 0}, axis=axis),
        "x2": "end",
        "color": palette(rows, Series("kind", dict(KINDS.values()), columns=4)),
        "tooltip": tooltips({"kind": "operation", "block": "block", "modules": "modules", "shown": "time"}),
    }
    end = max((span.end_s for span in operations), default=0.0)
    waited_s = sum(span.end_s - span.start_s for span in operations if span.kind == "wait")
    waited = format_seconds(waited_s) if waited_s else "nothing"
    words = f"predicted: {format_seconds(end)}, of it waiting {waited}"
    return finish(
        [layer(rows, "bar", encoding, height={"band": 0.8}, stroke="white", strokeWidth=0.5)],
        subject,
        name="lanes",
        title="One pass in three lanes",
        alt=f"Computing, swap-outs and swap-ins over one pass. {words}.",
        table=blocks_sheet(blocks, "Blocks of the plan"),
        size=(WIDE + 140, 34 * len(names)),
    )


@dataclass(frozen=True, kw_only=True)
class MethodForecast:
    """The predicted time and memory of a method with a batch and a capacity."""

    method: str = field(metadata=column("Activations", is_brief=True))
    recompute: str
    swap: str
    batch: int
    capacity_bytes: int | None = field(metadata=column(unit="bytes", is_brief=True))  # Limit of memory; None: no limit.
    fits: bool = field(metadata=column("Fits", is_brief=True))  # Whether a pass holds no more than the capacity.
    pass_s: float | None = field(metadata=column("Pass", unit="s", is_brief=True))  # None: no plan fits.
    samples_per_s: float | None = field(metadata=column(is_brief=True))  # Without input, exchange and optimizer.
    peak_bytes: int | None = field(metadata=column("Peak", unit="bytes", is_brief=True))
    recompute_s: float | None = field(metadata=column("Recomputing", unit="s"))
    stall_s: float | None = field(metadata=column("Waiting", unit="s"))
    swapped_bytes: int | None = field(metadata=column("Moved", unit="bytes"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The run and machine that a chain was measured with."""

    workload: str
    preset: str
    where: str
    device: str
    sample_unit: str
    parts: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The JSON of `dlbench memory plan`."""

    format: str = "dlbench.memory-plan"
    version: int = 1
    measured: Measured
    chain: Chain
    rates: TransferRates | None
    capacity_bytes: int
    in_core_bytes: int  # Bytes that training in core holds with this batch.
    smallest_bytes: int  # The smallest capacity that any plan fits.
    in_core_batch: int  # The largest batch that fits the capacity in core; 0: none.
    plan: BlockPlan
    blocks: tuple[PlannedPart, ...]
    operations: tuple[Operation, ...]
    methods: tuple[MethodForecast, ...]  # Methods with this batch; only plans respect the capacity.
    by_batch: tuple[MethodForecast, ...]  # Methods with this capacity, by batch, in core and beyond.


def memory_plan(
    measured: Measured,
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> CapacityPlan:
    """Returns a plan for the chain's batch, with other methods and batches; raises DoesNotFitError. `starts` are the
    units with which blocks begin; None: the planner chooses.
    """
    swap = rates is not None
    plan = plan_blocks(chain, rates, capacity_bytes, recompute=True, swap=swap, starts=starts)
    schedule = simulate(chain, plan.blocks, rates, plan.capacity_bytes, prefetch=PREFETCH["planned"])
    in_core_batch = largest_batch(chain, None, ("none", "none"), capacity_bytes)
    batches = {max(1, round((in_core_batch or chain.batch) * factor)) for factor in BATCH_FACTORS}
    batches.add(chain.batch)
    methods = [method for method in METHODS if swap or method[1] == "none"]
    by_method = [
        against_batch(chain, rates, method, capacity_bytes, sorted(batches), starts=starts) for method in methods
    ]
    by_batch = chain_items.from_iterable(zip(*by_method, strict=True))
    return CapacityPlan(
        measured=measured,
        chain=chain,
        rates=rates,
        capacity_bytes=capacity_bytes,
        in_core_bytes=in_core_bytes(chain),
        smallest_bytes=smallest_capacity(chain, recompute=True, swap=swap, starts=starts),
        in_core_batch=in_core_batch,
        plan=plan,
        blocks=blocks_of(chain, plan, "planned"),
        operations=schedule.operations,
        methods=tuple(_forecast(_with_batch(chain, rates, method, capacity_bytes, starts)) for method in methods),
        by_batch=tuple(map(_forecast, by_batch)),
    )


def _with_batch(
    chain: Chain, rates: TransferRates | None, method: Method, capacity_bytes: int, starts: Sequence[int] | None
) -> CapacityPoint:
    """Returns a method with the chain's batch; one without a plan may hold more than the capacity."""
    if "planned" in method:
        return point(chain, rates, method, capacity_bytes, starts=starts)
    recompute, swap = method
    plan = fixed_plan(chain, rates, recompute, swap, starts=starts)
    return CapacityPoint(method=method, batch=chain.batch, capacity_bytes=capacity_bytes, plan=plan)


def _forecast(planned: CapacityPoint) -> MethodForecast:
    prediction = None if planned.plan is None else planned.plan.predicted
    names = ("pass_s", "peak_bytes", "recompute_s", "stall_s", "swapped_bytes")
    recompute, swap = planned.method
    return MethodForecast(
        method=TITLES[planned.method],
        recompute=recompute,
        swap=swap,
        batch=planned.batch,
        capacity_bytes=planned.capacity_bytes,
        fits=prediction is not None and prediction.peak_bytes <= planned.capacity_bytes,
        samples_per_s=planned.samples_per_s,
        **{name: getattr(prediction, name, None) for name in names},
    )


def memory_plan_document(plan: CapacityPlan) -> Document:
    """Returns the plan as a document for every format."""
    measured = plan.measured
    label = f"{measured.workload} ({measured.preset}), batch {plan.chain.batch}, in {format_bytes(plan.capacity_bytes)}"
    subject = ReportSubject(id="memory-plan", label=label)
    words = tuple(_words(plan))
    sections = (
        Section(
            id="plan",
            title="The plan",
            words=words,
            brief=words,
            sheets=(blocks_sheet(plan.blocks, "The plan, block by block", in_terminal=True),),
        ),
        Section(
            id="pass",
            title="A pass, predicted",
            brief=(),
            charts=lambda: [lanes_chart(plan.operations, plan.blocks, subject)],
            charts_per_row=1,
        ),
        Section(
            id="trade-off",
            title="Memory against time",
            words=tuple(_trade_words(plan)),
            sheets=(_methods_sheet(plan), _batch_sheet(plan)),
        ),
    )
    return Document(
        title=f"dlbench memory plan: {subject.label}",
        dlbench_version=dlbench.__version__,
        meta=(f"Measured on {measured.where}, {measured.device}.",),
        sections=sections,
        data=plan,
        file_prefix="memory-plan-",
        command="dlbench memory plan",
    )


def _words(plan: CapacityPlan) -> Iterator[str]:
    predicted, measured = plan.plan.predicted, plan.measured
    passes = "" if measured.parts == 1 else f" (a step has {measured.parts} passes)"
    yield (
        f"Predicted: a pass over {plan.chain.batch} {measured.sample_unit} takes {format_seconds(predicted.pass_s)}"
        f"{passes}, {format_number(plan.chain.batch / predicted.pass_s, 3)} {measured.sample_unit}/s; in core it "
        f"would take {format_seconds(predicted.useful_s)}. Input, exchange and optimizer are not included."
    )
    savings = "nothing is saved"
    if plan.in_core_bytes and not saves_nothing(predicted.peak_bytes, plan.in_core_bytes):
        savings = f"{percent(1 - predicted.peak_bytes / plan.in_core_bytes)} are saved"
    yield (
        f"It holds {format_bytes(predicted.peak_bytes)} at most, of {format_bytes(plan.capacity_bytes)}; in core it "
        f"would be {format_bytes(plan.in_core_bytes)}: {savings}. The smallest capacity that fits is "
        f"{format_bytes(plan.smallest_bytes)}."
    )
    swapped = format_bytes(predicted.swapped_bytes) if predicted.swapped_bytes else "nothing"
    times = f"{_time_text(predicted.recompute_s, 'recomputing')}, {_time_text(predicted.stall_s, 'waiting')}"
    yield (
        f"The device computes in {percent(predicted.occupancy)} of the time (occupancy), and does the work of training "
        f"in core in {percent(predicted.efficiency)} (efficiency): {times}; {swapped} swapped out and back."
    )
    yield f"Measured on {measured.where}, {measured.device}{_rates(plan.rates)}."
    yield from measured.warnings


def _time_text(seconds: float, name: str) -> str:
    return f"{format_seconds(seconds)} {name}" if seconds else f"no {name}"


def _rates(rates: TransferRates | None) -> str:
    if rates is None:
        return "; transfers were not measured, so nothing is swapped"
    latency = f", latency of a transfer {format_seconds(rates.latency_s)}" if rates.latency_s else ""
    return (
        f"; to {rates.tier} {format_number(rates.out_bytes_per_s / 1e9, 3)} GB/s, back "
        f"{format_number(rates.in_bytes_per_s / 1e9, 3)} GB/s{latency}; "
        f"computing takes {percent(rates.drag, 0)} longer during transfers"
    )


def _methods_sheet(plan: CapacityPlan) -> Sheet[MethodForecast]:
    in_core = plan.in_core_bytes

    def saved_share(forecast: MethodForecast) -> float | None:
        return None if forecast.peak_bytes is None else 1 - forecast.peak_bytes / in_core

    def saved_cell(forecast: MethodForecast) -> Cell | None:
        share = saved_share(forecast)
        if share is None or (forecast.recompute, forecast.swap) == IN_CORE:
            return None
        if saves_nothing(forecast.peak_bytes or 0, in_core):
            return Cell("nothing")
        return Cell(percent(share))

    share: Column[MethodForecast] = Column("saved_fraction", "Saves", saved_share, saved_cell, is_brief=True)
    return Sheet(
        name="memory-methods",
        title=f"Methods with batch {plan.chain.batch}",
        columns=columns_of(
            MethodForecast,
            *("method", "recompute", "swap", "batch", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes"),
            *(share, "fits", "recompute_s", "stall_s", "swapped_bytes"),
            titles={"samples_per_s": f"{plan.measured.sample_unit}/s"},
        ),
        rows=plan.methods,
        caption="Predicted by the simulator from the measured chain. Only planned methods respect the capacity. Saves: "
        "share of the peak of training in core. Recomputing all blocks can hold more than recomputing some.",
        in_terminal=True,
    )


def _batch_sheet(plan: CapacityPlan) -> Sheet[MethodForecast]:
    names = ("batch", "method", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes", "fits")
    return Sheet(
        name="memory-batches-planned",
        title=f"Batches in {format_bytes(plan.capacity_bytes)}: {plan.measured.sample_unit}/s",
        columns=columns_of(MethodForecast, *names),
        rows=plan.by_batch,
        pivot=Pivot(corner="Batch", down="method", across=lambda forecast: str(forecast.batch), cell=_rate_if_it_fits),
        caption="Predicted samples per second of forward and backward passes; times and activations in proportion to "
        "the batch. A dash: the method does not fit.",
        in_terminal=True,
    )


def _rate_if_it_fits(forecast: MethodForecast) -> Cell:
    if forecast.samples_per_s is None:
        return Cell(DASH)
    return Cell(format_number(forecast.samples_per_s, 3), number=forecast.samples_per_s)


def _trade_words(plan: CapacityPlan) -> Iterator[str]:
    unit = plan.measured.sample_unit
    enough = f"enough for a pass of {plan.in_core_batch} {unit}"
    if not plan.in_core_batch:
        enough = f"too few for a pass of one of the {unit}"
    yield f"Without recomputing or swapping, {format_bytes(plan.capacity_bytes)} are {enough}."
    by_method = {(forecast.recompute, forecast.swap): forecast for forecast in plan.methods}
    peaks = {method: forecast.peak_bytes or 0 for method, forecast in by_method.items()}
    if peaks.get(("blocks", "none"), 0) > peaks.get(("planned", "none"), 0) > 0:
        yield (
            "A recomputed block keeps its input, and in the backward pass holds all that it computes again: if that is "
            "more than it saves, recomputing all blocks holds more than a plan that keeps some."
        )
    fitting = [forecast for forecast in plan.methods if forecast.fits and forecast.samples_per_s is not None]
    fixed = [forecast for forecast in fitting if "planned" not in (forecast.recompute, forecast.swap)]
    planned = by_method.get(("planned", "planned"))
    if planned not in fitting:
        return
    if not fixed:
        yield "No method that treats all blocks equally fits."
    elif planned is not None and planned.pass_s:
        best = min(fixed, key=attrgetter("pass_s"))
        yield (
            f"Of the methods that treat all blocks equally and fit, {best.method} is the fastest; the plan is predicted"
            f" to be {(best.pass_s or 0.0) / planned.pass_s:.2f}x as fast."
        )
