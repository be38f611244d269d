"""Charts of methods: throughput over the batch, peak memory, and one pass in its lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlbench.report.charts.chart import Chart, ReportSubject, Rows, Subject, finish
from dlbench.report.charts.style import FORECAST, HEIGHT, IDEAL, INK, MEASURED, MUTED, PART_COLOURS, WIDE, si_label
from dlbench.report.wording import basis_text, figure_text, place_text
from dlbench.units import format_bytes, format_seconds
from dlbench.views.out_of_core.numbers import COLOURS, OTHER_COLOUR, Limit, MethodPoint, OutOfCore
from dlbench.views.out_of_core.passes import Passage, PassSpan, PlannedPart
from dlbench.views.out_of_core.tables import blocks_sheet, methods_sheet

KIND_COLOURS = {
    "forward": PART_COLOURS["forward"],
    "recompute": PART_COLOURS["input"],
    "backward": PART_COLOURS["backward"],
    "outside": PART_COLOURS["other"],
    "swap out": PART_COLOURS["optimizer"],
    "swap in": PART_COLOURS["imbalance"],
    "wait": PART_COLOURS["exchange"],
}
KIND_TITLES = {
    "forward": "forward",
    "recompute": "recomputed",
    "backward": "backward",
    "outside": "outside of the chain",
    "swap out": "swapped out",
    "swap in": "swapped in",
    "wait": "waiting",
}
"""Of the operations of a pass, in the order of the legend."""

_FURTHER = ("#6b5bb5", "#44aa99", "#a83271", "#f0e442")
"""Of methods with the title of another one."""


def method_charts(found: OutOfCore, number: int) -> list[Chart]:
    """Throughput over the batch and peak memory, at the largest rank count."""
    last = found.points[-1]
    points = [one for one in found.points if (one.ranks, one.nodes) == (last.ranks, last.nodes)]
    where = place_text(last.ranks, last.nodes)
    subject = ReportSubject(id=f"out-of-core-{number}", label=f"{found.label}, {where}")
    limit = next((one for one in found.limits if (one.ranks, one.nodes) == (last.ranks, last.nodes)), None)
    with_figures = [one for one in points if one.throughput is not None]
    charts = []
    if with_figures:
        charts.append(_throughput_chart(found, with_figures, limit, subject))
    if any(one.device_peak is not None for one in points):
        charts.append(_memory_chart(found, points, subject))
    return charts


def byte_unit(most: float) -> tuple[int, str]:
    """The unit in which an axis up to so many bytes has short numbers: its bytes, and its name."""
    return next(((size, name) for size, name in ((2**30, "GiB"), (2**20, "MiB")) if most >= size), (2**10, "KiB"))


def in_core_mark(batch: int) -> list[Any]:
    """Layers that mark the largest batch in core on an axis of batches."""
    import altair as alt

    text = {"batch": batch, "text": f"in core up to {batch}", "foot": 0}
    mark = alt.Chart(alt.InlineData(values=[text]))
    return [
        mark.mark_rule(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("batch:Q")),
        mark.mark_text(color=MUTED, align="left", dx=5, dy=-8, fontSize=12).encode(
            x=alt.X("batch:Q"), y=alt.Y("foot:Q"), text=alt.Text("text:N")
        ),
    ]


def _colours(points: Sequence[MethodPoint]) -> dict[str, str]:
    """Colours by label: that of its method, and others where several labels share one."""
    chosen: dict[str, str] = {}
    further = iter(_FURTHER)
    for one in points:
        if one.label not in chosen:
            colour = COLOURS.get(one.method, OTHER_COLOUR)
            chosen[one.label] = colour if colour not in chosen.values() else next(further, OTHER_COLOUR)
    return chosen


def _throughput_chart(found: OutOfCore, points: Sequence[MethodPoint], limit: Limit | None, subject: Subject) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "method": one.label,
            "batch": one.batch,
            "value": one.throughput.value,
            "low": one.throughput.low,
            "high": one.throughput.high,
            "shown": figure_text(one.throughput),
            "basis": basis_text(one.throughput),
        }
        for one in points
        if one.throughput is not None
    ]
    colours = _colours(points)
    batches = sorted({row["batch"] for row in rows})
    ends = [batches[0] / 1.15, batches[-1] * 1.15]
    if limit is not None and limit.batch > 0:
        ends = [min(ends[0], limit.batch / 1.15), max(ends[1], limit.batch * 1.15)]
    scale = alt.Scale(type="log", base=2, domain=ends, nice=False)
    x = alt.X("batch:Q", title="batch per rank", scale=scale, axis=alt.Axis(values=batches, grid=False, format="d"))
    y = alt.Y("value:Q", title=f"{found.sample_unit}/s", axis=alt.Axis(format=",.4~r", tickCount=5))
    legend = alt.Legend(orient="bottom", columns=1, labelLimit=340)
    colour = alt.Color("method:N", title=None, legend=legend).scale(domain=list(colours), range=list(colours.values()))
    tooltip = [
        alt.Tooltip("method:N", title="activations"),
        alt.Tooltip("batch:Q", title="batch"),
        alt.Tooltip("shown:N", title=f"{found.sample_unit}/s"),
        alt.Tooltip("basis:N", title="interval"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, color=colour)
    layers = [base.mark_line(strokeWidth=2).encode(y=y)]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.5).encode(y=alt.Y("low:Q"), y2="high:Q"))
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(y=alt.Y("value:Q"), tooltip=tooltip))
    words = "; ".join(f"{row['method']}, batch {row['batch']}: {row['shown']}" for row in rows)
    mark = ""
    if limit is not None and limit.batch > 0:
        layers += in_core_mark(limit.batch)
        mark = f" Dashed: {format_bytes(limit.capacity_bytes)} hold {limit.batch} samples of a pass in core."
    return finish(
        alt.layer(*layers),
        subject,
        name="throughput",
        title="Throughput by batch and method",
        alt=f"Throughput over the batch per rank, a line for each method.{mark} {words}.",
        table=methods_sheet(found),
        size=(WIDE - 40, HEIGHT + 30),
    )


def _memory_chart(found: OutOfCore, points: Sequence[MethodPoint], subject: Subject) -> Chart:
    import altair as alt

    size, unit = byte_unit(max(one.device_peak.value for one in points if one.device_peak is not None))
    rows: Rows = [
        {
            "at": f"{one.label}, {one.batch}",
            "bytes": one.device_peak.value / size,
            "low": None if one.device_peak.low is None else one.device_peak.low / size,
            "high": None if one.device_peak.high is None else one.device_peak.high / size,
            "predicted": None if one.predicted_peak_bytes is None else one.predicted_peak_bytes / size,
            "capacity": None if one.capacity_bytes is None else one.capacity_bytes / size,
            "shown": figure_text(one.device_peak),
            "foreseen": "" if one.predicted_peak_bytes is None else format_bytes(one.predicted_peak_bytes),
            "allowed": "no limit" if one.capacity_bytes is None else format_bytes(one.capacity_bytes),
        }
        for one in points
        if one.device_peak is not None
    ]
    tooltip = [
        alt.Tooltip("at:N", title="activations, batch"),
        alt.Tooltip("shown:N", title="measured"),
        alt.Tooltip("foreseen:N", title="predicted"),
        alt.Tooltip("allowed:N", title="capacity"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("at:N", title=None, sort=[row["at"] for row in rows]).axis(labelLimit=230)
    )
    x = alt.X("bytes:Q", title=f"{unit} at most").scale(domainMin=0).axis(tickCount=5, format=".4~g")
    layers = [
        base.mark_bar(height={"band": 0.6}, color=MEASURED).encode(x=x, tooltip=tooltip),
        base.mark_tick(color=FORECAST, thickness=3, size=18).encode(x=alt.X("predicted:Q")),
    ]
    if any(row["low"] is not None and row["low"] != row["high"] for row in rows):
        layers.append(base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    if any(row["capacity"] is not None for row in rows):
        layers.append(base.mark_tick(color=INK, thickness=2, size=22).encode(x=alt.X("capacity:Q")))
    words = "; ".join(f"{row['at']}: {row['shown']}, predicted {row['foreseen']}" for row in rows)
    return finish(
        alt.layer(*layers),
        subject,
        name="memory",
        title="Peak memory: bar measured, red predicted, black capacity",
        alt=f"Peak memory of the rank that held most, measured and predicted, with the capacity. {words}.",
        table=methods_sheet(found),
        size=(WIDE - 120, max(60, 28 * len(rows))),
    )


# A pass


def passage_charts(found: Passage, label: str, number: int) -> list[Chart]:
    """The lanes of a pass, measured above predicted, and what is held meanwhile."""
    about = ReportSubject(id=f"pass-{number}", label=f"{label}: {found.label}")
    sides = [("measured", found.measured), ("predicted", found.simulated)]
    charts = [lanes_chart([(name, spans) for name, spans in sides if spans], found.blocks, about)]
    if len(found.held) > 1:
        charts.append(held_chart(found.held, found.capacity_bytes, found.blocks, about))
    return charts


def lanes_chart(
    sides: Sequence[tuple[str, Sequence[PassSpan]]], blocks: Sequence[PlannedPart], subject: Subject
) -> Chart:
    """Three lanes of each side, e.g. measured and predicted, on one scale of time."""
    import altair as alt

    is_alone = len(sides) == 1
    names = [lane if is_alone else f"{lane}, {side}" for lane in ("compute", "out", "in") for side, _ in sides]
    rows: Rows = [
        {
            "lane": span.lane if is_alone else f"{span.lane}, {side}",
            "kind": KIND_TITLES.get(span.kind, span.kind),
            "block": "" if span.block is None else str(span.block),
            "modules": blocks[span.block].modules if span.block is not None and span.block < len(blocks) else "",
            "start": span.start_s,
            "end": span.end_s,
            "shown": format_seconds(span.end_s - span.start_s),
        }
        for side, spans in sides
        for span in spans
    ]
    present = [kind for kind, title in KIND_TITLES.items() if any(row["kind"] == title for row in rows)]
    legend = alt.Legend(orient="bottom", columns=4)
    colour = alt.Color("kind:N", title=None, legend=legend).scale(
        domain=[KIND_TITLES[kind] for kind in present], range=[KIND_COLOURS[kind] for kind in present]
    )
    x = alt.X("start:Q", title="from the start of the pass").scale(nice=False, domainMin=0)
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.8}, stroke="white", strokeWidth=0.5)
        .encode(
            y=alt.Y("lane:N", title=None, sort=names).scale(domain=names),
            x=x.axis(labelExpr=si_label("s"), tickCount=6, grid=True),
            x2="end:Q",
            color=colour,
            tooltip=[
                alt.Tooltip("kind:N", title="operation"),
                alt.Tooltip("block:N", title="block"),
                alt.Tooltip("modules:N", title="modules"),
                alt.Tooltip("shown:N", title="time"),
            ],
        )
    )
    return finish(
        alt.layer(bars),
        subject,
        name="lanes",
        title="One pass in its three lanes",
        alt=f"What is computed, what leaves the device and what comes back over one pass. {_side_words(sides)}.",
        table=blocks_sheet(blocks, "Blocks of the plan"),
        size=(WIDE + 140, 34 * len(names)),
    )


def _side_words(sides: Sequence[tuple[str, Sequence[PassSpan]]]) -> str:
    found = []
    for side, spans in sides:
        end = max((span.end_s for span in spans), default=0.0)
        waited = sum(span.end_s - span.start_s for span in spans if span.kind == "wait")
        found.append(f"{side}: {format_seconds(end)}, of it waiting {format_seconds(waited) if waited else 'nothing'}")
    return "; ".join(found)


def held_chart(
    held: Sequence[tuple[float, int]], capacity: int | None, blocks: Sequence[PlannedPart], subject: Subject
) -> Chart:
    """What is held over a pass, by the simulator, under the capacity."""
    import altair as alt

    most = max(num for _, num in held)
    size, unit = byte_unit(most)
    rows: Rows = [{"at": at, "bytes": num / size, "shown": format_bytes(num)} for at, num in held]
    area = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_area(interpolate="step-after", color=MEASURED, opacity=0.35, line={"color": MEASURED})
        .encode(
            x=alt.X("at:Q", title="from the start of the pass")
            .scale(nice=False, domainMin=0)
            .axis(labelExpr=si_label("s"), tickCount=6),
            y=alt.Y("bytes:Q", title=f"{unit} held").scale(domainMin=0).axis(tickCount=5, format=".4~g"),
            tooltip=[alt.Tooltip("shown:N", title="held")],
        )
    )
    layers = [area]
    limit = ""
    if capacity is not None:
        line = alt.Chart(alt.InlineData(values=[{"bytes": capacity / size}]))
        layers.append(line.mark_rule(color=INK, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("bytes:Q")))
        limit = f"; dashed: the capacity, {format_bytes(capacity)}"
    return finish(
        alt.layer(*layers),
        subject,
        name="held",
        title="Held over the pass, predicted",
        alt=f"Bytes held over one pass by the simulator, at most {format_bytes(most)}{limit}.",
        table=blocks_sheet(blocks, "Blocks of the plan"),
        size=(WIDE + 140, 120),
    )
