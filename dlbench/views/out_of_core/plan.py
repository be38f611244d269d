"""What `dlbench memory plan` computes and prints: a plan for a capacity, its pass as a picture, and other methods.

All of it is predicted by the simulator from one measured chain; nothing here is measured. Other batches have the same
chain, times and activations taken as proportional to their samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import dlbench
from dlbench.perfmodels.memory.blocks import Operation
from dlbench.perfmodels.memory.planner import (
    METHODS,
    Method,
    Point,
    against_batch,
    against_capacity,
    fixed_plan,
    in_core_bytes,
    largest_batch,
    plan_blocks,
    point,
    saves_nothing,
)
from dlbench.perfmodels.memory.search import smallest_capacity
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, Subject, finish
from dlbench.report.charts.shapes import Axis, Series, lines, scatter
from dlbench.report.charts.style import FORECAST, HEIGHT, INK, WIDE
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Pivot, Sheet, column, columns_of
from dlbench.report.wording import DASH, percent
from dlbench.specs.memory import BlockPlan, Chain, TransferRates
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.out_of_core.numbers import COLOURS, IN_CORE, TITLES, PassSpan, PlannedPart, blocks_of, schedule_of
from dlbench.views.out_of_core.view import blocks_sheet, byte_unit, held_chart, in_core_mark, lanes_chart

CAPACITIES = 6  # Of the curve of memory against time, from the smallest to that of training in core.
BATCH_FACTORS = (0.5, 1, 1.5, 2, 4)  # Batches of the curve of throughput, in multiples of the largest in core.


@dataclass(frozen=True, kw_only=True)
class Forecast:
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
class MemoryPlan:
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
    held: tuple[tuple[float, int], ...]  # What is held from each of these times (seconds) on, bytes.
    methods: tuple[Forecast, ...]  # With this batch: the plans for the capacity, all others as they are.
    by_capacity: tuple[Forecast, ...]  # Of the plan at this batch, from the least capacity to that of training in core.
    by_batch: tuple[Forecast, ...]  # With this capacity, batches in core and beyond.


def memory_plan(
    measured: Measured,
    chain: Chain,
    rates: TransferRates | None,
    capacity_bytes: int,
    *,
    starts: Sequence[int] | None = None,
) -> MemoryPlan:
    """A plan for the chain's batch, and what surrounds it.

    Without rates of transfers nothing can be swapped; `starts` are units with which blocks begin, otherwise the planner
    chooses. Raises DoesNotFitError: no plan fits; names the smallest capacity that would do.
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

    def as_it_is(method: Method) -> Point:
        """With this batch; a method that treats all blocks alike even where it holds more than the capacity."""
        if "planned" in method:
            return point(chain, rates, method, capacity_bytes, starts=starts)
        moves = rates if method[1] != "none" else None
        fixed = fixed_plan(chain, moves, *method, starts=starts)
        return Point(method=method, batch=chain.batch, capacity_bytes=capacity_bytes, plan=fixed)

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
        operations=schedule.operations,
        held=schedule.held,
        methods=tuple(_forecast(as_it_is(method)) for method in methods),
        by_capacity=tuple(map(_forecast, by_capacity)),
        by_batch=tuple(_forecast(one) for row in zip(*by_batch, strict=True) for one in row),
    )


def _forecast(one: Point) -> Forecast:
    found = None if one.plan is None else one.plan.predicted
    names = ("pass_s", "peak_bytes", "recompute_s", "stall_s", "swapped_bytes")
    recompute, swap = one.method
    return Forecast(
        method=TITLES[one.method],
        recompute=recompute,
        swap=swap,
        batch=one.batch,
        capacity_bytes=one.capacity_bytes,
        fits=found is not None and found.peak_bytes <= one.capacity_bytes,
        samples_per_s=one.samples_per_s,
        **{name: getattr(found, name, None) for name in names},
    )


# The document

METHODS_CAPTION = (
    "Predicted by the simulator from the chain as measured. Methods that treat all blocks alike know of no capacity; "
    "planned ones were given the capacity. Saves: of what training in core holds at most."
)
BATCH_CAPTION = (
    "Samples per second of forward and backward passes, predicted: times and activations in proportion to the batch. "
    "A dash: the method does not fit."
)


def memory_plan_document(found: MemoryPlan, *, for_pages: bool = False) -> Document:
    """The plan for every format; its data is `found`. `for_pages`: whether charts are drawn, which take the place of
    the picture in characters.
    """
    measured = found.measured
    what = (
        f"{measured.workload} ({measured.preset}), batch {found.chain.batch}, in {format_bytes(found.capacity_bytes)}"
    )
    subject = ReportSubject(id="memory-plan", label=what)
    words = tuple(_words(found))
    pictures = () if for_pages else (_picture_sheet(found),)
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
            words=() if for_pages else (LEGEND,),
            charts=lambda: [
                lanes_chart([("predicted", found.operations)], found.blocks, subject),
                held_chart(found.held, found.capacity_bytes, found.blocks, subject),
            ],
            charts_per_row=1,
            sheets=pictures,
        ),
        Section(
            id="trade-off",
            title="Memory against time",
            words=tuple(_trade_words(found)),
            charts=lambda: [_capacity_chart(found, subject), _batch_chart(found, subject)],
            sheets=(_methods_sheet(found), _capacity_sheet(found), _batch_sheet(found)),
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


def _words(found: MemoryPlan) -> Iterator[str]:
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


def _rates(found: MemoryPlan) -> str:
    rates = found.rates
    if rates is None:
        return "; transfers were not measured, so nothing is swapped"
    later = f", each transfer {format_seconds(rates.latency_s)} more" if rates.latency_s else ""
    return (
        f"; to {rates.tier} {format_number(rates.out_bytes_per_s / 1e9, 3)} GB/s, back "
        f"{format_number(rates.in_bytes_per_s / 1e9, 3)} GB/s{later}; "
        f"computing takes {percent(rates.drag, 0)} longer meanwhile"
    )


def _picture_sheet(found: MemoryPlan) -> Sheet[tuple[str, str]]:
    rows = lanes(found.operations)
    # The scale stands above the lanes, and is as long as they are.
    end = format_seconds(found.plan.predicted.pass_s)
    scale = f"0 s {'-' * max(0, (len(rows[0][1]) if rows else 0) - len(end) - 5)} {end}"
    columns: tuple[Column[tuple[str, str]], ...] = (
        Column("", "Lane", lambda row: row[0], is_brief=True),
        Column("", scale, lambda row: row[1], is_brief=True),
    )
    return Sheet(
        name="memory-plan-picture",
        title="A pass, predicted",
        columns=columns,
        rows=rows,
        caption=LEGEND,
        in_terminal=True,
    )


def _methods_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    in_core = found.in_core_bytes

    def saved(one: Forecast) -> float | None:
        return None if one.peak_bytes is None else 1 - one.peak_bytes / in_core

    def saving(one: Forecast) -> Cell | None:
        share = saved(one)
        if share is None or (one.recompute, one.swap) == IN_CORE:
            return None
        return Cell("nothing" if saves_nothing(one.peak_bytes or 0, in_core) else percent(share))

    share: Column[Forecast] = Column("saved_fraction", "Saves", saved, saving, is_brief=True)
    what = ("method", "recompute", "swap", "batch", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes", share)
    return Sheet(
        name="memory-methods",
        title=f"Methods with batch {found.chain.batch}",
        columns=columns_of(
            Forecast,
            *what,
            *("fits", "recompute_s", "stall_s", "swapped_bytes"),
            titles={"samples_per_s": f"{found.measured.sample_unit}/s"},
        ),
        rows=found.methods,
        caption=METHODS_CAPTION,
        in_terminal=True,
    )


def _capacity_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    names = ("capacity_bytes", "pass_s", "samples_per_s", "recompute_s", "stall_s", "swapped_bytes")
    titles = {"capacity_bytes": "Capacity", "samples_per_s": f"{found.measured.sample_unit}/s"}
    return Sheet(
        name="memory-capacities",
        title=f"Capacities with batch {found.chain.batch}, planned",
        # All of them are brief: none is left out.
        columns=tuple(replace(one, is_brief=True) for one in columns_of(Forecast, *names, titles=titles)),
        rows=found.by_capacity,
        caption="Predicted passes of plans for each capacity, from the smallest that any plan fits to that of training "
        "in core.",
        in_terminal=True,
    )


def _batch_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    names = ("batch", "method", "capacity_bytes", "pass_s", "samples_per_s", "peak_bytes", "fits")
    return Sheet(
        name="memory-batches-planned",
        title=f"Batches in {format_bytes(found.capacity_bytes)}: {found.measured.sample_unit}/s",
        columns=columns_of(Forecast, *names),
        rows=found.by_batch,
        pivot=Pivot(
            corner="Batch", down=lambda one: one.method, across=lambda one: str(one.batch), cell=_rate_if_it_fits
        ),
        caption=BATCH_CAPTION,
        in_terminal=True,
        is_drawn=True,
    )


def _rate_if_it_fits(one: Forecast) -> Cell:
    if one.samples_per_s is None:
        return Cell(DASH)
    return Cell(format_number(one.samples_per_s, 3), number=one.samples_per_s)


def _trade_words(found: MemoryPlan) -> Iterator[str]:
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


# Charts


def _capacity_chart(found: MemoryPlan, subject: Subject) -> Chart:
    """Time over memory: the plan's curve, and the other methods as points."""
    import altair as alt

    size, unit = byte_unit(max(one.peak_bytes or 0 for one in found.methods))
    curve, others = (
        [
            {
                "method": one.method,
                "bytes": one.peak_bytes / size,
                "value": one.pass_s,
                "shown": format_seconds(one.pass_s),
            }
            for one in forecasts
            if one.peak_bytes is not None and one.pass_s is not None
        ]
        for forecasts in (found.by_capacity, found.methods)
    )
    x = Axis(f"{unit} held at most", "bytes", scale={"zero": False})
    y = Axis("predicted pass", unit="s", scale={"zero": False})
    tooltip = {"method:N": "activations", "shown:N": "predicted pass"}
    drawn = scatter(others, x, y, Series("method", COLOURS), tooltip, size=70, has_shapes=False)
    line = alt.Chart(alt.InlineData(values=curve)).mark_line(color=FORECAST, strokeDash=[2, 3], strokeWidth=2)
    limit = alt.Chart(alt.InlineData(values=[{"bytes": found.capacity_bytes / size}]))
    words = "; ".join(f"{row['method']}: {row['shown']}, {row['bytes']:.3g} {unit}" for row in others)
    return finish(
        alt.layer(
            *drawn.layer,
            line.encode(x=alt.X("bytes:Q"), y=alt.Y("value:Q")),
            limit.mark_rule(color=INK, strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("bytes:Q")),
        ),
        subject,
        name="capacity",
        title="Time against memory (dotted: plans for other capacities)",
        alt=f"Predicted pass over what is held at most; dashed: the capacity. {words}.",
        table=_methods_sheet(found),
        size=(WIDE - 30, HEIGHT + 30),
    )


def _batch_chart(found: MemoryPlan, subject: Subject) -> Chart:
    """Predicted samples per second over the batch, of what fits."""
    import altair as alt

    rows: Rows = [
        {
            "method": one.method,
            "batch": one.batch,
            "value": one.samples_per_s,
            "shown": format_number(one.samples_per_s, 3),
        }
        for one in found.by_batch
        if one.fits and one.samples_per_s is not None
    ]
    unit = f"predicted {found.measured.sample_unit}/s"
    drawn = lines(
        rows,
        Axis(unit, format=",.4~r"),
        Series("method", COLOURS),
        {"method:N": "activations", "batch:Q": "batch", "shown:N": unit},
        x="batch",
        title="samples of a pass",
        room=1.1,
        reach=[one.batch for one in found.by_batch],
        is_forecast=True,
    )
    mark = in_core_mark(found.in_core_batch) if found.in_core_batch else []
    words = "; ".join(f"{row['method']}, {row['batch']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*drawn.layer, *mark),
        subject,
        name="batches",
        title="Throughput by batch, of what fits (predicted)",
        alt=f"Predicted throughput of passes over the batch, of methods that hold no more than the capacity. {words}.",
        table=_batch_sheet(found),
        size=(WIDE - 30, HEIGHT + 30),
    )


# For a terminal

LANES = ("compute", "out", "in")

KIND_SIGNS = {"forward": "F", "recompute": "R", "backward": "B", "wait": "."}
"""What stands in the line of the computation; anything else that is computed is `=`."""
IDLE = "."
WIDTH = 68  # Characters of a lane: with its title it fits 80 columns.

LEGEND = (
    "F forward, R recomputed, B backward, = outside of the chain, . waiting or idle; digits: the last digit of the "
    "number of the block."
)


def lanes(spans: Sequence[PassSpan], width: int = WIDTH) -> list[tuple[str, str]]:
    """Title and characters of each lane; the computation has two lines: what is done, and of which block.

    Each of the `width` characters of a lane stands for an equal part of the pass, and shows what took most of it; a
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
