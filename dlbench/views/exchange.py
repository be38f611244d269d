"""The gradient exchange of each scaling point: what ran, what its messages took, and the least they could take.

Here messages are counted: the time in which at least one was under way, as rank 0 or the engine's timeline has it, in
a window of steps. The exchange phase of the account (`dlbench.analysis.causes`) is another quantity: the time of all
ranks between the end of the backward pass and the end of the exchange, with negotiation and copies, over all steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dlbench.analysis.measures import PARTS
from dlbench.analysis.scaling import Group as Runs
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import alt
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, Rows, finish, tooltips
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE, si_label
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, Value, column, columns_of
from dlbench.report.wording import basis_text, figure_text, ranks_text, value_text
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, of_known
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange_bound import ExchangeBound, Recorded, exchange_bound
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import second_rank
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

NOT_MEASURED = "not measured"

OTHERS = "Of parameters or activations"
_COUNT: Mapping[str, Any] = {
    # A count has an interval only where runs differ.
    "text": lambda one: Cell(value_text(one), number=one.value) if one.low == one.high else one,
    "missing": NOT_MEASURED,
}
NO_BOUND = "no bound"
MAX_MESSAGES = 60  # Messages that are listed and drawn, the last ones; those before are counted.
TIMES_CAPTION = (
    "Messages under way, by their own clock, and the backward pass: of the steps in the last column. The account is of "
    "the measured steps, and counts after the backward pass the whole phase of all ranks, with negotiation, copies and "
    "waiting."
)
PASSES_CAPTION = (
    "Collectives of gradients, parameters and activations under way, which lie in forward and backward pass; waited "
    "for: this rank computed nothing meanwhile."
)
LEAST_CAPTION = (
    "A model: every gradient as early as it was ready, one message at a time, neighbours merged in the best way. "
    "Efficiency: if nothing else were lost."
)
MAX_EVIDENCE = 80  # Characters of what a point is known from.
_ROW = 16
_KINDS = {
    "backward pass": PART_COLOURS["backward"],
    "ready, waits": "#9aa0a6",
    "under way": PART_COLOURS["exchange"],
}
SHARES = {"exposed": PART_COLOURS["exchange"], "hidden": "#f0b48a"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """What ran: not what was asked for."""

    carrier: str
    by: str  # Who grouped gradients into messages and chose the exchange: `dlbench`, `Horovod`, `PyTorch DDP`.
    exchange: str
    fusion: str
    wire: str
    groups: str  # In words: `2 groups of 4 ranks`.


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """The gradient exchange at one rank count: counts are medians over the runs that record it, times means."""

    ranks: int
    nodes: int
    ways: tuple[Way, ...]  # One, unless runs of equal settings ran differently.
    num_messages: Estimate | None = field(metadata=column("Messages per step", "messages", **_COUNT))
    """Of a step; None where no message was seen."""
    num_others: Estimate | None = field(metadata=column(OTHERS, "other_messages", **{**_COUNT, "missing": "none"}))
    """Gathers and such of a step; None where there are none."""
    message_bytes: Estimate | None = field(metadata=column("Gradients per step", "gradient_bytes", **_COUNT))
    """Gradients of all messages, bytes per step."""
    bytes_inside: Estimate | None = field(metadata=column("Sent per rank, intra-group", **_COUNT))
    """Sent per rank and step inside its group."""
    bytes_across: Estimate | None = field(metadata=column("Sent per rank, inter-group", **_COUNT))
    """Sent per rank and step to other groups."""
    communication: Estimate | None = field(metadata=column(name="communication_s"))
    """Messages under way, seconds per step, as the following three."""
    exposed: Estimate | None = field(metadata=column(name="after_backward_s"))  # Of it after the backward pass.
    hidden: Estimate | None = field(metadata=column(name="during_backward_s"))  # Of it during the backward pass.
    backward: Estimate | None = field(metadata=column(name="backward_s"))
    hidden_share: Estimate | None  # Of a step in the middle, over the mean step of each run (fraction); as the next.
    exposed_share: Estimate | None
    is_in_passes: bool
    """Whether forward and backward pass wait for collectives (FSDP, tensor parallel), so that `exposed` lies there."""
    wire_overflows: int  # Of all runs.
    density: Estimate | None
    dense_switches: int  # Of all runs.
    evidence: tuple[str, ...]  # How all this is known, each way once.
    window: str  # Steps whose messages were timed, in words.
    efficiency: Estimate  # Measured, of the scaling point.
    least: Estimate | None  # The prediction's least after the backward pass; known where its efficiency is not, too.
    prediction: ExchangeBound | None
    why: str  # Why there is no prediction, in a phrase; empty where there is one.
    timeline: tuple[Message, ...]  # Messages of the run whose communication time is the median.
    timeline_run: str
    timeline_backward_s: float | None
    run_ids: tuple[str, ...]


WayRow = tuple[ExchangePoint, Way]  # One way in which the exchange of a point ran.


def exchange_points(group: Runs, table: RunTable) -> tuple[ExchangePoint, ...]:
    """The exchange of every point with more than one rank whose runs record it, by rank count."""
    several = ((point, _recorded(group, point)) for point in group.points if point.ranks > 1)
    return tuple(_point(point, group.baseline, recorded, table) for point, recorded in several if recorded)


def _recorded(group: Runs, point: Point) -> Recorded:
    own = (run for run in group.runs if run.plan.run_id in point.run_ids)
    return [(run, run.record.exchange) for run in own if run.record is not None and run.record.exchange is not None]


def _point(point: Point, baseline: Point, recorded: Recorded, table: RunTable) -> ExchangePoint:
    results = [result for _, result in recorded]
    # The run in the middle by communication time (the lower middle of an even number).
    timed = [item for item in recorded if item[1].communication_s is not None and item[1].of_gradients]
    ordered = sorted(timed or recorded, key=lambda item: (item[1].communication_s or 0.0, item[0].plan.run_id))
    run, sample = ordered[(len(ordered) - 1) // 2]
    prediction, why, least = exchange_bound(point, baseline, recorded, table, sample)

    by_key = {table.keys[run.plan.run_id]: result for run, result in recorded}

    def over(pick: Callable[[ExchangeResult], float | None], unit: str) -> Estimate | None:
        return of_known(median_estimate, {key: pick(result) for key, result in by_key.items()}, unit)

    def mean(name: str) -> Estimate | None:
        # What is under way during and after the backward pass must sum.
        return of_known(mean_estimate, {key: getattr(result, name) for key, result in by_key.items()}, "s")

    waits = [] if run.record is None else [rank.waits for rank in run.record.ranks if rank.waits is not None]
    windows = sorted({result.window_steps for result in results})
    span = " to ".join(map(str, dict.fromkeys((windows[0], windows[-1]))))
    return ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        ways=tuple(dict.fromkeys(_way(run, result) for run, result in recorded)),
        num_messages=over(lambda result: float(len(result.of_gradients)) or None, "messages"),
        num_others=over(lambda result: float(len(result.messages) - len(result.of_gradients)) or None, "messages"),
        message_bytes=over(
            lambda result: float(sum(m.num_bytes for m in result.of_gradients)) if result.of_gradients else None,
            "bytes",
        ),
        bytes_inside=over(lambda result: result.bytes_inside, "bytes"),
        bytes_across=over(lambda result: result.bytes_across, "bytes"),
        communication=mean("communication_s"),
        exposed=mean("exposed_s"),
        hidden=mean("hidden_s"),
        backward=mean("backward_s"),
        hidden_share=_share("hidden_s", recorded, table),
        exposed_share=_share("exposed_s", recorded, table),
        is_in_passes=any({"forward", "backward"} & {*one.gather_s, *one.exchange_s} for one in waits),
        wire_overflows=sum(result.wire_overflows for result in results),
        density=over(lambda result: result.density, "fraction"),
        dense_switches=sum(result.dense_switches for result in results),
        evidence=tuple(dict.fromkeys(result.evidence for result in results)),
        window=f"{span} step{'s' * (span != '1')} of each run",
        efficiency=point.efficiency,
        least=least,
        prediction=prediction,
        why=why,
        timeline=sample.of_gradients,
        timeline_run=run.plan.run_id,
        timeline_backward_s=sample.backward_s,
        run_ids=tuple(run.plan.run_id for run, _ in recorded),
    )


def _share(name: str, recorded: Recorded, table: RunTable) -> Estimate | None:
    """A time of the messages, the median of steps, over the mean step of its run."""
    times = {run.plan.run_id: getattr(result, name) for run, result in recorded}
    steps = {own: sum(table.parts[own][name] for name in PARTS) for own in times}
    known = {table.keys[own]: time / steps[own] for own, time in times.items() if time is not None}
    return of_known(mean_estimate, known, "fraction")


def _way(run: Run, result: ExchangeResult) -> Way:
    groups = "1 group" if result.num_groups == 1 else f"{result.num_groups} groups"
    return Way(
        carrier=result.carrier,
        by="dlbench" if result.by == "dlbench" else run.plan.engine_title,
        exchange=result.exchange,
        fusion=result.fusion,
        wire=result.wire,
        groups=f"{groups} of {ranks_text(result.group_size)}",
    )


def what_ran(points: tuple[ExchangePoint, ...]) -> Sheet[WayRow]:
    """For people a line for each way that runs of equal settings went; for programs all figures, a row for a point."""
    is_sparse = any(point.density or point.dense_switches for point in points)
    overflowed, has_others = (any(getattr(one, name) for one in points) for name in ("wire_overflows", "num_others"))

    def both(name: str, title: str) -> Column[WayRow]:
        """Of each way; programs find all ways of the point."""
        return Column(
            name,
            title,
            lambda row: " | ".join(dict.fromkeys(getattr(way, name) for way in row[0].ways)),
            lambda row: str(getattr(row[1], name)),
        )

    of_point = functools.partial(columns_of, ExchangePoint, of=itemgetter(0))
    of_model = functools.partial(columns_of, ExchangeBound, of=lambda row: row[0].prediction)
    columns: tuple[Column[WayRow], ...] = (
        *of_point(*place_columns()),
        *(both("carrier", "Carried by"), both("by", "Grouped by"), both("exchange", "Exchange")),
        *(both("fusion", "Fusion"), both("wire", "Wire")),
        Column("", "Groups", lambda row: row[1].groups),
        *of_point("num_messages", "num_others", titles={"other_messages": OTHERS * has_others}),
        *of_point("message_bytes", "bytes_inside", "bytes_across"),
        *of_point("communication", "exposed", "hidden", "backward", "hidden_share", "exposed_share"),
        *of_point("density", "efficiency", titles={"density": "Density of sums" * is_sparse}),
        *of_model("best_exposed", "num_messages", "as_ran", "efficiency"),
        *of_point("wire_overflows", titles={"wire_overflows": "Overflows" * overflowed}),
        *of_point("dense_switches", titles={"dense_switches": "Sent dense" * is_sparse}),
        *of_model("startup_s", "per_byte_s"),
        *of_point("why_not_predicted=why"),
        Column("runs", "", lambda row: len(row[0].run_ids)),
    )
    return Sheet(
        name="exchange",
        title="What ran",
        columns=columns,
        rows=[(point, way) for point in points for way in point.ways],
        is_data=lambda row: row[1] is row[0].ways[0],
        caption="What ran, not what was asked for. Bytes sent per rank follow from the algorithm that ran.",
    )


def times(points: tuple[ExchangePoint, ...], at: Column[ExchangePoint] | None = None) -> Sheet[ExchangePoint]:
    """Message time per step during and after the backward pass, and the least of it by the model."""
    has_least, is_in_passes = (any(getattr(one, name) for one in points) for name in ("least", "is_in_passes"))
    hidden, exposed = ("behind computing", "waited for") if is_in_passes else ("during backward", "after backward")
    caption = PASSES_CAPTION if is_in_passes else TIMES_CAPTION

    def time(title: str, name: str) -> Column[ExchangePoint]:
        return Column("", title, lambda point: getattr(point, name) or NOT_MEASURED)

    def efficiency(point: ExchangePoint) -> Value:
        return point.prediction.efficiency if point.prediction else NO_BOUND

    columns: tuple[Column[ExchangePoint], ...] = (
        at or Column("", "At", place_of),
        *(time("Messages under way", "communication"), time(hidden, "hidden"), time(exposed, "exposed")),
        time("Backward pass" * (not is_in_passes), "backward"),
        Column("", "Least after backward" * has_least, lambda point: point.least or NO_BOUND),
        Column("", "Efficiency with it" * has_least, efficiency),
        Column("", "Cost of a message" * has_least, lambda point: point.prediction.line if point.prediction else None),
        Column("", "Interval", lambda point: basis_text(point.communication) if point.communication else None),
        Column("", "Known from", evidence_text),
    )
    return Sheet(
        name="exchange-times",
        title="Messages of a step",
        columns=columns,
        rows=points,
        caption=f"{caption} {LEAST_CAPTION}" if has_least else caption,
    )


def evidence_text(point: ExchangePoint) -> str:
    """What the times are known from, in a short sentence; the records of the runs hold all of it."""
    cut = (text.partition(";")[0].partition(": ")[0].partition(". ")[0] for text in point.evidence)
    starts = list(dict.fromkeys(cut))
    first = starts[0] if len(starts[0]) <= MAX_EVIDENCE else f"{starts[0][:MAX_EVIDENCE].rsplit(' ', 1)[0]} ..."
    return f"{first}; {point.window}" + (f" (otherwise in {len(starts) - 1} of the runs)" if len(starts) > 1 else "")


def messages(point: ExchangePoint) -> Sheet[tuple[str, Sequence[Message]]]:
    """Messages of a step of the run in the middle, in the order of sending; the first of many are summed up."""
    before = point.timeline[:-MAX_MESSAGES]
    numbered = list(enumerate(point.timeline, start=1))[len(before) :]
    rows: list[tuple[str, Sequence[Message]]] = [(f"1 to {len(before)}", before)] if before else []
    rows += [(str(number), (message,)) for number, message in numbered]

    def time(title: str, field: str) -> Column[tuple[str, Sequence[Message]]]:
        def seconds(row: tuple[str, Sequence[Message]]) -> float | str | None:
            found: float | None = getattr(row[1][0], field)
            return None if row[1] is before else NOT_MEASURED if found is None else found

        return Column("", title, seconds, unit="s")

    columns: tuple[Column[tuple[str, Sequence[Message]]], ...] = (
        Column("", "Message", lambda row: row[0]),
        Column("", "Gradients", lambda row: sum(one.num_tensors for one in row[1])),
        Column("", "Bytes", lambda row: sum(one.num_bytes for one in row[1]), unit="bytes"),
        Column("", "Went", lambda row: None if row[1] is before else row[1][0].method, limit=80),
        *(time(title, f"{name}_s") for title, name in (("Ready", "ready"), ("Began", "start"), ("Took", "exchange"))),
    )
    return Sheet(name="exchange-messages", title="Single messages", columns=columns, rows=rows)


def exchange_charts(group: ReportGroup, points: tuple[ExchangePoint, ...]) -> list[Chart]:
    """The timeline of the point with most ranks that has one."""
    drawable = [point for point in points if point.timeline_backward_s and any(map(_is_timed, point.timeline))]
    if not drawable:
        return []
    point = drawable[-1]
    numbered = list(enumerate(point.timeline, start=1))[-MAX_MESSAGES:]
    drawn = [(number, message) for number, message in numbered if _is_timed(message)]
    end = alt.Chart(alt.InlineData(values=[{"to": point.timeline_backward_s}]))
    rule = end.mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1.2).encode(x=alt.X("to:Q"))
    # The backward pass on line 0, then each message's wait and exchange on a line of its own.
    backward, waits, under_way = _KINDS
    rows: Rows = [span("backward", backward, 0.0, point.timeline_backward_s or 0.0)]
    for number, message in drawn:
        start, took = message.start_s or 0.0, message.exchange_s or 0.0
        name, what = f"message {number}", f"{format_bytes(message.num_bytes)}, {message.method}"
        if message.ready_s is not None and message.ready_s < start:
            rows.append(span(name, waits, message.ready_s, start, what))
        rows.append(span(name, under_way, start, start + took, what))
    of = f" (the last {len(drawn)} are drawn)" if len(drawn) < len(point.timeline) else ""
    named = {"messages under way": point.communication, "during the pass": point.hidden, "after it": point.exposed}
    figures = [f"{name} {figure_text(figure)}" for name, figure in named.items() if figure is not None]
    words = f"{len(point.timeline)} messages{of} of a step next to its backward pass, whose end is dashed. "
    return [
        finish(
            alt.layer(spans(rows, _KINDS), rule),
            group,
            name="timeline",
            title=f"A step's messages at {place_of(point)}",
            alt=f"{words}{', '.join(figures) or 'No sums are known'}.",
            table=messages(point),
            size=(WIDE * 3 // 2, min(360, max(90, _ROW * (len(drawn) + 1)))),
        ),
    ]


def _is_timed(message: Message) -> bool:
    return message.start_s is not None and message.exchange_s is not None


def span(name: str, kind: str, first: float, last: float, what: str = "") -> dict[str, Any]:
    """A bar of `spans` on the line `name`, seconds."""
    return {"name": name, "kind": kind, "from": first, "to": last, "shown": format_seconds(last - first), "what": what}


def spans(rows: Rows, colours: Mapping[str, str]) -> Any:
    """Bars over the time since the start of the backward pass, on lines from above; by kind, which have colours."""
    lines = list(dict.fromkeys(row["name"] for row in rows))
    few = len(lines) <= 360 // _ROW
    y = alt.Y("name:N", title=None, sort=lines).scale(paddingInner=0.25 if few else 0.0)
    title = None if few else f"{len(lines) - 1} messages"
    y = y.axis(labels=few, labelLimit=260, ticks=False, domain=False, title=title)
    label = si_label("s")
    x = alt.X("from:Q", title="time since the start of the backward pass").axis(labelExpr=label, tickCount=6)
    present = [kind for kind in colours if any(row["kind"] == kind for row in rows)]
    colour = alt.Color("kind:N", title=None, sort=list(colours)).scale(
        domain=present, range=[colours[kind] for kind in present]
    )
    tooltip = tooltips({"name:N": "line", "kind:N": "what", "shown:N": "for", "what:N": "message"})
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar()
    return bars.encode(y=y, x=x, x2="to:Q", color=colour.legend(orient="bottom", columns=len(colours)), tooltip=tooltip)


class ExchangeView(GroupView):
    """Messages, their times, and the overlap with the backward pass."""

    id = "exchange"
    title = "Gradient exchange"
    key = "exchange"
    after = "ranks"

    def numbers(self, source: GroupSource) -> tuple[ExchangePoint, ...]:
        return exchange_points(source.group, source.table)

    def shown(self, group: ReportGroup, points: tuple[ExchangePoint, ...]) -> Section:
        why = [f"At {place_of(point)}: {point.why}." for point in points if point.prediction is None and point.why]
        last = points[-1]
        if last.communication is None or last.hidden is None:
            headline = f"{len(last.run_ids)} runs say what ran, and not how long"
        elif last.is_in_passes and last.exposed is not None:
            headline = f"Collectives take {value_text(last.communication)} per step at {place_of(last)}, "
            headline += f"{value_text(last.exposed)} of it waited for"
        else:
            headline = f"Messages take {value_text(last.communication)} per step at {place_of(last)}, "
            headline += f"{value_text(last.hidden)} of it during backward"
        return Section(
            headline=headline,
            notes=tuple(why),
            caption="In brackets: the interval.",
            charts=lambda: exchange_charts(group, points),
            charts_per_row=1,
            sheets=(times(points), what_ran(points)),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.largest.ranks == 1:
            return second_rank(group, "one rank exchanges nothing")
        return (
            "not recorded: these runs do not say what their exchange did; runs of this version with --engine horovod "
            "or --engine ddp do, unless measure.warmup_steps is 0."
        )
