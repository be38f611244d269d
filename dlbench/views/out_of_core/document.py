"""What `dlbench memory plan` prints: the plan block by block, its pass as a picture, and what else would do."""

from __future__ import annotations

from collections.abc import Iterator

import dlbench
from dlbench.costs.memory.planner import saves_nothing
from dlbench.report.charts.chart import Chart, ReportSubject, Rows, Subject, finish
from dlbench.report.charts.style import FORECAST, HEIGHT, INK, WIDE, si_label
from dlbench.report.document import Document, Section
from dlbench.report.table import Cell, Column, Pivot, Sheet
from dlbench.report.wording import DASH, percent
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.out_of_core.charts import byte_unit, held_chart, in_core_mark, lanes_chart
from dlbench.views.out_of_core.numbers import COLOURS, IN_CORE
from dlbench.views.out_of_core.passes import LEGEND, lanes
from dlbench.views.out_of_core.planned import Forecast, MemoryPlan
from dlbench.views.out_of_core.tables import blocks_sheet

METHODS_CAPTION = (
    "Predicted by the simulator from the chain as measured. Methods that treat all blocks alike know of no capacity; "
    "planned ones were given the capacity. Saves: of what training in core holds at most."
)
BATCH_CAPTION = (
    "Samples per second of forward and backward passes, predicted: times and activations in proportion to the batch. "
    "A dash: the method does not fit."
)


def memory_plan_document(found: MemoryPlan, *, for_pages: bool = False) -> Document:
    """The plan for every format; its data is `found`.

    Args:
        found: the plan.
        for_pages: whether charts are drawn, which take the place of the picture in characters.
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
    yield (
        f"Occupancy {percent(predicted.occupancy)} (something is computed), efficiency {percent(predicted.efficiency)} "
        f"(something new is): {_took(predicted.recompute_s, 'recomputing')}, {_took(predicted.stall_s, 'waiting')}; "
        f"{format_bytes(predicted.swapped_bytes) if predicted.swapped_bytes else 'nothing'} out and back."
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
        f"computing takes {percent(rates.drag, 0)} longer beside them"
    )


def _picture_sheet(found: MemoryPlan) -> Sheet[tuple[str, str]]:
    columns: tuple[Column[tuple[str, str]], ...] = (
        Column("", "Lane", lambda row: row[0], is_brief=True),
        Column("", _scale(found), lambda row: row[1], is_brief=True),
    )
    return Sheet(
        name="memory-plan-picture",
        title="A pass, predicted",
        columns=columns,
        rows=lanes(found.operations),
        caption=LEGEND,
        in_terminal=True,
    )


def _scale(found: MemoryPlan) -> str:
    """The line above the lanes, as long as they are."""
    end = format_seconds(found.plan.predicted.pass_s)
    rows = lanes(found.operations)
    width = len(rows[0][1]) if rows else 0
    return f"0 s {'-' * max(0, width - len(end) - 5)} {end}"


def _methods_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    columns: tuple[Column[Forecast], ...] = (
        Column("method", "Activations", lambda one: one.method, is_brief=True),
        Column("recompute", "", lambda one: one.recompute),
        Column("swap", "", lambda one: one.swap),
        Column("batch", "", lambda one: one.batch),
        Column("capacity_bytes", "", lambda one: one.capacity_bytes),
        Column("pass_s", "Pass", lambda one: one.pass_s, unit="s", is_brief=True),
        Column("samples_per_s", f"{found.measured.sample_unit}/s", lambda one: one.samples_per_s, is_brief=True),
        Column("peak_bytes", "Peak", lambda one: one.peak_bytes, unit="bytes", is_brief=True),
        Column(
            "saved_fraction",
            "Saves",
            lambda one: None if one.peak_bytes is None else 1 - one.peak_bytes / found.in_core_bytes,
            lambda one: _saving(one, found.in_core_bytes),
            is_brief=True,
        ),
        Column("fits", "Fits", lambda one: one.fits, is_brief=True),
        Column("recompute_s", "Recomputing", lambda one: one.recompute_s, unit="s"),
        Column("stall_s", "Waiting", lambda one: one.stall_s, unit="s"),
        Column("swapped_bytes", "Moved", lambda one: one.swapped_bytes, unit="bytes"),
    )
    return Sheet(
        name="memory-methods",
        title=f"Methods with batch {found.chain.batch}",
        columns=columns,
        rows=found.methods,
        caption=METHODS_CAPTION,
        in_terminal=True,
    )


def _saving(one: Forecast, in_core: int) -> Cell | None:
    if one.peak_bytes is None or (one.recompute, one.swap) == IN_CORE:
        return None
    if saves_nothing(one.peak_bytes, in_core):
        return Cell("nothing")
    return Cell(percent(1 - one.peak_bytes / in_core))


def _capacity_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    columns: tuple[Column[Forecast], ...] = (
        Column("capacity_bytes", "Capacity", lambda one: one.capacity_bytes, unit="bytes", is_brief=True),
        Column("pass_s", "Pass", lambda one: one.pass_s, unit="s", is_brief=True),
        Column("samples_per_s", f"{found.measured.sample_unit}/s", lambda one: one.samples_per_s, is_brief=True),
        Column("recompute_s", "Recomputing", lambda one: one.recompute_s, unit="s", is_brief=True),
        Column("stall_s", "Waiting", lambda one: one.stall_s, unit="s", is_brief=True),
        Column("swapped_bytes", "Moved", lambda one: one.swapped_bytes, unit="bytes", is_brief=True),
    )
    return Sheet(
        name="memory-capacities",
        title=f"Capacities with batch {found.chain.batch}, planned",
        columns=columns,
        rows=found.by_capacity,
        caption="Predicted passes of plans for each capacity, from the smallest that any plan fits to that of training "
        "in core.",
        in_terminal=True,
    )


def _batch_sheet(found: MemoryPlan) -> Sheet[Forecast]:
    columns: tuple[Column[Forecast], ...] = (
        Column("batch", "", lambda one: one.batch),
        Column("method", "", lambda one: one.method),
        Column("capacity_bytes", "", lambda one: one.capacity_bytes),
        Column("pass_s", "", lambda one: one.pass_s),
        Column("samples_per_s", "", lambda one: one.samples_per_s),
        Column("peak_bytes", "", lambda one: one.peak_bytes),
        Column("fits", "", lambda one: one.fits),
    )
    return Sheet(
        name="memory-batches-planned",
        title=f"Batches in {format_bytes(found.capacity_bytes)}: {found.measured.sample_unit}/s",
        columns=columns,
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
        yield f"In core {format_bytes(found.capacity_bytes)} hold {found.in_core_batch} {unit} of a pass."
    else:
        yield f"In core {format_bytes(found.capacity_bytes)} hold no batch at all."
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
    curve: Rows = [
        {"bytes": one.peak_bytes / size, "seconds": one.pass_s, "shown": format_seconds(one.pass_s)}
        for one in found.by_capacity
        if one.peak_bytes is not None and one.pass_s is not None
    ]
    others: Rows = [
        {
            "method": one.method,
            "bytes": one.peak_bytes / size,
            "seconds": one.pass_s,
            "shown": format_seconds(one.pass_s),
        }
        for one in found.methods
        if one.peak_bytes is not None and one.pass_s is not None
    ]
    x = alt.X("bytes:Q", title=f"{unit} held at most").scale(zero=False).axis(tickCount=5, format=".4~g")
    y = alt.Y("seconds:Q", title="predicted pass").scale(zero=False)
    y = y.axis(labelExpr=si_label("s"), tickCount=5)
    names = list(dict.fromkeys(row["method"] for row in others))
    colour = alt.Color("method:N", title=None, legend=alt.Legend(orient="bottom", columns=2)).scale(
        domain=names, range=[COLOURS[name] for name in names]
    )
    tooltip = [alt.Tooltip("method:N", title="activations"), alt.Tooltip("shown:N", title="predicted pass")]
    line = alt.Chart(alt.InlineData(values=curve)).mark_line(color=FORECAST, strokeDash=[2, 3], strokeWidth=2)
    points = alt.Chart(alt.InlineData(values=others)).mark_point(filled=True, size=70, opacity=1)
    limit = alt.Chart(alt.InlineData(values=[{"bytes": found.capacity_bytes / size}]))
    words = "; ".join(f"{row['method']}: {row['shown']}, {row['bytes']:.3g} {unit}" for row in others)
    return finish(
        alt.layer(
            line.encode(x=x, y=y),
            points.encode(x=x, y=y, color=colour, tooltip=tooltip),
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
            "rate": one.samples_per_s,
            "shown": format_number(one.samples_per_s, 3),
        }
        for one in found.by_batch
        if one.fits and one.samples_per_s is not None
    ]
    batches = sorted({one.batch for one in found.by_batch})
    scale = alt.Scale(type="log", base=2, domain=[batches[0] / 1.1, batches[-1] * 1.1], nice=False)
    x = alt.X("batch:Q", title="samples of a pass", scale=scale, axis=alt.Axis(values=batches, grid=False, format="d"))
    y = alt.Y("rate:Q", title=f"predicted {found.measured.sample_unit}/s", axis=alt.Axis(format=",.4~r", tickCount=5))
    names = list(dict.fromkeys(row["method"] for row in rows))
    colour = alt.Color("method:N", title=None, legend=alt.Legend(orient="bottom", columns=2)).scale(
        domain=names, range=[COLOURS[name] for name in names]
    )
    tooltip = [
        alt.Tooltip("method:N", title="activations"),
        alt.Tooltip("batch:Q", title="batch"),
        alt.Tooltip("shown:N", title=f"predicted {found.measured.sample_unit}/s"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, color=colour)
    layers = [
        base.mark_line(strokeWidth=2, strokeDash=[2, 3]),
        base.mark_point(size=60, opacity=1).encode(tooltip=tooltip),
    ]
    if found.in_core_batch:
        layers += in_core_mark(found.in_core_batch)
    words = "; ".join(f"{row['method']}, {row['batch']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*layers),
        subject,
        name="batches",
        title="Throughput by batch, of what fits (predicted)",
        alt=f"Predicted throughput of passes over the batch, of methods that hold no more than the capacity. {words}.",
        table=_batch_sheet(found),
        size=(WIDE - 30, HEIGHT + 30),
    )
