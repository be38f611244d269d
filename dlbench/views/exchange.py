"""The view `exchange`: the messages of the gradient exchange of each scaling point, and a lower bound of their time.
The time of messages is that in which at least one was under way, by rank 0 or the engine's timeline, in some steps.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from dlbench.analysis.measures import PARTS
from dlbench.analysis.scaling import Group as Runs
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.report.chart_style import INK, PART_COLOURS, WIDE, si_label
from dlbench.report.charts import Chart, Rows, Series, channel, finish, layer, palette, tooltips
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, Value, column, columns_of, reader
from dlbench.report.wording import basis_text, figure_text, ranks_text, value_text
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.units import counted, format_bytes, format_seconds
from dlbench.views.exchange_bound import ExchangeBound, Recorded, exchange_bound
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_columns, place_of
from dlbench.views.next_step import second_rank

NOT_MEASURED = "not measured"

OTHERS = "Of parameters or activations"
NO_BOUND = "no bound"
MAX_MESSAGES = 60  # Messages that are listed and drawn, the last ones; earlier ones are counted.
TIMES_CAPTION = (
    "Times of messages under way and of the backward pass are of the steps in the last column, by the clock of the "
    "exchange. The account of the step is of all measured steps; its exchange after the backward pass is the whole "
    "phase of all ranks, with negotiation, copies and waiting."
)
PASSES_CAPTION = (
    "Collectives of gradients, parameters and activations under way, in forward and backward pass; waited for: this "
    "rank computed nothing during that time."
)
LEAST_CAPTION = (
    "Least after backward is a model: every gradient is sent as soon as it is ready, one message at a time, neighbours "
    "merged in the best way. Efficiency with it: if nothing else cost time."
)
MAX_EVIDENCE = 80  # Characters of the source of a point's times.
_ROW = 16
_KINDS = {"backward pass": PART_COLOURS["backward"], "ready, waits": "#9aa0a6", "under way": PART_COLOURS["exchange"]}
SHARES = {"exposed": PART_COLOURS["exchange"], "hidden": "#f0b48a"}


def _count_cell(count: Estimate) -> Cell | Estimate:
    if count.low == count.high:
        return Cell(value_text(count), number=count.value)
    return count


def _count_column(title: str, name: str | None = None, missing: str = NOT_MEASURED) -> dict[str, Any]:
    return column(title, name, text=_count_cell, missing=missing)


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """The exchange that ran, which may differ from the one that was requested."""

    carrier: str  # The library or transport, e.g. `gloo`.
    by: str  # The library that grouped gradients into messages: `dlbench`, `Horovod`, `PyTorch DDP`.
    exchange: str
    fusion: str
    wire: str  # Number format of messages.
    groups: str  # In words: `2 groups of 4 ranks`.


@dataclass(frozen=True, kw_only=True)
class ExchangePoint(AtPlace):
    """The gradient exchange at one rank count: counts are medians over the runs that record it, times means."""

    ways: tuple[ExchangeConfig, ...]  # One, unless runs of equal settings ran differently.
    num_messages: Estimate | None = field(metadata=_count_column("Messages per step", "messages"))
    num_others: Estimate | None = field(metadata=_count_column(OTHERS, "other_messages", missing="none"))
    message_bytes: Estimate | None = field(metadata=_count_column("Gradients per step", "gradient_bytes"))
    bytes_inside: Estimate | None = field(metadata=_count_column("Sent per rank, intra-group"))
    bytes_across: Estimate | None = field(metadata=_count_column("Sent per rank, inter-group"))
    communication: Estimate | None = field(metadata=column(name="communication_s"))  # Seconds under way.
    exposed: Estimate | None = field(metadata=column(name="after_backward_s"))  # After the backward pass.
    hidden: Estimate | None = field(metadata=column(name="during_backward_s"))  # During the backward pass.
    backward: Estimate | None = field(metadata=column(name="backward_s"))  # Seconds of the backward pass per step.
    hidden_share: Estimate | None  # `hidden` of the median step over the mean step of each run (1).
    exposed_share: Estimate | None  # `exposed` of the median step over the mean step of each run (1).
    is_in_passes: bool  # Whether passes wait for collectives (FSDP, tensor parallel): `exposed` is in them.
    wire_overflows: int  # Sum over all runs.
    density: Estimate | None  # Density of sums of sparse gradients (1).
    dense_switches: int  # Times that sparse sums were sent dense, over all runs.
    evidence: tuple[str, ...]  # Sources of the times, each once.
    window: str  # Steps whose messages were timed, in words.
    efficiency: Estimate  # Measured scaling efficiency of the point.
    least: Estimate | None  # Least seconds after the backward pass by the model.
    prediction: ExchangeBound | None
    why: str  # Why there is no prediction, in a phrase; empty if there is one.
    timeline: tuple[Message, ...]  # Messages of the run with the median communication time.
    timeline_run: str
    timeline_backward_s: float | None
    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class ConfigRow:
    """One exchange that ran at a point."""

    point: ExchangePoint
    config: ExchangeConfig

    @property
    def num_runs(self) -> int:
        return len(self.point.run_ids)


def exchange_points(group: Runs, table: RunTable) -> tuple[ExchangePoint, ...]:
    """Returns the exchange of every point with more than one rank whose runs record it, by rank count."""
    points = []
    with_record = [(run, run.record.exchange) for run in group.runs if run.record is not None]
    with_exchange = [(run, result) for run, result in with_record if result is not None]
    for point in group.points:
        recorded = [(run, result) for run, result in with_exchange if run.plan.run_id in point.run_ids]
        if point.ranks > 1 and recorded:
            points.append(_point(point, group.baseline, recorded, table))
    return tuple(points)


def _point(point: Point, baseline: Point, recorded: Recorded, table: RunTable) -> ExchangePoint:
    results = [result for _, result in recorded]
    # The run with the median communication time, of an even number the lower one, preferably a timed one.
    timed = [pair for pair in recorded if pair[1].communication_s is not None and pair[1].of_gradients]
    by_time = sorted(timed or recorded, key=lambda pair: (pair[1].communication_s or 0.0, pair[0].plan.run_id))
    run, sample = by_time[(len(by_time) - 1) // 2]
    prediction, why, least = exchange_bound(point, baseline, recorded, table, sample)
    by_key = {table.keys[run.plan.run_id]: result for run, result in recorded}

    def median(figure: Callable[[ExchangeResult], float | None], unit: str) -> Estimate | None:
        return of_known(median_estimate, {key: figure(result) for key, result in by_key.items()}, unit)

    def mean(name: str) -> Estimate | None:
        # Means, because the times during and after the backward pass must sum.
        return of_known(mean_estimate, {key: getattr(result, name) for key, result in by_key.items()}, "s")

    windows = sorted({result.window_steps for result in results})
    window = f"{windows[0]} to {windows[-1]} steps of each run"
    if windows[0] == windows[-1]:
        window = f"{counted(windows[0], 'step')} of each run"
    return ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        ways=tuple(dict.fromkeys(_config(run, result) for run, result in recorded)),
        num_messages=median(lambda result: float(len(result.of_gradients)) or None, "messages"),
        num_others=median(lambda result: float(len(result.messages) - len(result.of_gradients)) or None, "messages"),
        message_bytes=median(_gradient_bytes, "bytes"),
        bytes_inside=median(attrgetter("bytes_inside"), "bytes"),
        bytes_across=median(attrgetter("bytes_across"), "bytes"),
        **{name: mean(f"{name}_s") for name in ("communication", "exposed", "hidden", "backward")},
        hidden_share=_share("hidden_s", recorded, table),
        exposed_share=_share("exposed_s", recorded, table),
        is_in_passes=_waits_in_passes(run),
        wire_overflows=sum(result.wire_overflows for result in results),
        density=median(attrgetter("density"), "fraction"),
        dense_switches=sum(result.dense_switches for result in results),
        evidence=tuple(dict.fromkeys(result.evidence for result in results)),
        window=window,
        efficiency=point.efficiency,
        least=least,
        prediction=prediction,
        why=why,
        timeline=sample.of_gradients,
        timeline_run=run.plan.run_id,
        timeline_backward_s=sample.backward_s,
        run_ids=tuple(run.plan.run_id for run, _ in recorded),
    )


def _gradient_bytes(result: ExchangeResult) -> float | None:
    if not result.of_gradients:
        return None
    return float(sum(message.num_bytes for message in result.of_gradients))


def _waits_in_passes(run: Run) -> bool:
    if run.record is None:
        return False
    waits = [rank.waits for rank in run.record.ranks if rank.waits is not None]
    return any({"forward", "backward"} & {*wait.gather_s, *wait.exchange_s} for wait in waits)


def _share(name: str, recorded: Recorded, table: RunTable) -> Estimate | None:
    """Returns a time of the messages, the median of steps, over the mean step of its run."""
    shares: dict[RunKey, float] = {}
    for run, result in recorded:
        run_id, seconds = run.plan.run_id, getattr(result, name)
        if seconds is not None:
            shares[table.keys[run_id]] = seconds / sum(table.parts[run_id][part] for part in PARTS)
    return of_known(mean_estimate, shares, "fraction")


def _config(run: Run, result: ExchangeResult) -> ExchangeConfig:
    return ExchangeConfig(
        carrier=result.carrier,
        by="dlbench" if result.by == "dlbench" else run.plan.engine_title,
        exchange=result.exchange,
        fusion=result.fusion,
        wire=result.wire,
        groups=f"{counted(result.num_groups, 'group')} of {ranks_text(result.group_size)}",
    )


def what_ran(points: tuple[ExchangePoint, ...]) -> Sheet[ConfigRow]:
    """Returns the table of exchanges that ran: for people a line for each, for programs a row for each point."""
    titles = {} if any(point.num_others for point in points) else {"other_messages": ""}
    if any(point.density or point.dense_switches for point in points):
        titles |= {"density": "Density of sums", "dense_switches": "Sent dense"}
    if any(point.wire_overflows for point in points):
        titles["wire_overflows"] = "Overflows"

    def of_config(name: str, title: str) -> Column[ConfigRow]:
        """Returns a column of the exchange; programs get all exchanges of the point."""

        def of_all(row: ConfigRow) -> str:
            return " | ".join(dict.fromkeys(getattr(config, name) for config in row.point.ways))

        return Column(name, title, of_all, f"config.{name}")

    of_point = functools.partial(columns_of, ExchangePoint, of="point")
    of_model = functools.partial(columns_of, ExchangeBound, of="point.prediction")
    configs = {"carrier": "Carried by", "by": "Grouped by", "exchange": "Exchange", "fusion": "Fusion", "wire": "Wire"}
    columns: tuple[Column[ConfigRow], ...] = (
        *of_point(*place_columns()),
        *itertools.starmap(of_config, configs.items()),
        Column("", "Groups", "config.groups"),
        *of_point("num_messages", "num_others", "message_bytes", "bytes_inside", "bytes_across"),
        *of_point("communication", "exposed", "hidden", "backward", "hidden_share", "exposed_share"),
        *of_point("density", "efficiency"),
        *of_model("best_exposed", "num_messages", "as_ran", "efficiency"),
        *of_point("wire_overflows", "dense_switches"),
        *of_model("startup_s", "per_byte_s"),
        *of_point("why_not_predicted=why"),
        Column("runs", "", "num_runs"),
    )
    rows = [ConfigRow(point, config) for point in points for config in point.ways]
    return Sheet(
        name="exchange",
        title="Exchange that ran",
        columns=tuple(replace(original, title=titles.get(original.name, original.title)) for original in columns),
        rows=rows,
        is_data=lambda row: row.config is row.point.ways[0],
        caption="It may differ from the requested exchange. Bytes sent per rank follow from the algorithm that ran.",
    )


def times(points: tuple[ExchangePoint, ...], at: Column[ExchangePoint] | None = None) -> Sheet[ExchangePoint]:
    """Returns the table of message time per step during and after the backward pass, and of its least by the model."""

    def time(title: str, path: str, missing: str = NOT_MEASURED) -> Column[ExchangePoint]:
        read = reader(path)

        def figure(point: ExchangePoint) -> Value:
            return read(point) or missing

        return Column("", title, figure)

    under_way: Column[ExchangePoint] = time("Messages under way", "communication")
    columns = [at or Column("", "At", place_of), under_way]
    if any(point.is_in_passes for point in points):
        caption = PASSES_CAPTION
        columns += [time("behind computing", "hidden"), time("waited for", "exposed")]
    else:
        caption = TIMES_CAPTION
        columns += [time("during backward", "hidden"), time("after backward", "exposed")]
        columns.append(time("Backward pass", "backward"))
    if any(point.least for point in points):
        caption = f"{caption} {LEAST_CAPTION}"
        columns += [
            time("Least after backward", "least", NO_BOUND),
            time("Efficiency with it", "prediction.efficiency", NO_BOUND),
            Column("", "Cost of a message", "prediction.line"),
        ]
    columns.append(Column("", "Interval", lambda point: point.communication and basis_text(point.communication)))
    columns.append(Column("", "Source", evidence_text))
    return Sheet(
        name="exchange-times", title="Messages of a step", columns=tuple(columns), rows=points, caption=caption
    )


def evidence_text(point: ExchangePoint) -> str:
    """Returns the source of the times in a short sentence; the records of the runs have all of it."""
    starts = list(dict.fromkeys(re.split(r";|: |\. ", text, maxsplit=1)[0] for text in point.evidence))
    first = starts[0]
    if len(first) > MAX_EVIDENCE:
        first = f"{first[:MAX_EVIDENCE].rsplit(' ', 1)[0]} ..."
    text = f"{first}; {point.window}"
    if len(starts) > 1:
        text += f" (otherwise in {len(starts) - 1} of the runs)"
    return text


@dataclass(frozen=True)
class MessageRow:
    """A message, or the sums of several."""

    number: str  # The number in the order of sending, from 1, or a range.
    num_tensors: int
    num_bytes: int
    message: Message | None = None  # None: several messages.


def messages(point: ExchangePoint) -> Sheet[MessageRow]:
    """Returns the messages of a step of the median run in the order of sending; the first of many are one line."""
    rows = [
        MessageRow(str(number), message.num_tensors, message.num_bytes, message)
        for number, message in enumerate(point.timeline, start=1)
    ]
    first = rows[:-MAX_MESSAGES]
    if first:
        sums = sum(row.num_tensors for row in first), sum(row.num_bytes for row in first)
        rows = [MessageRow(f"1 to {len(first)}", *sums), *rows[-MAX_MESSAGES:]]

    def time(title: str, name: str) -> Column[MessageRow]:
        def seconds(row: MessageRow) -> float | str | None:
            value: float | None = getattr(row.message, name, None)
            if row.message is not None and value is None:
                return NOT_MEASURED
            return value

        return Column("", title, seconds, unit="s")

    columns: tuple[Column[MessageRow], ...] = (
        Column("", "Message", "number"),
        Column("", "Gradients", "num_tensors"),
        Column("", "Bytes", "num_bytes", unit="bytes"),
        Column("", "Method", "message.method", limit=80),
        *(time("Ready", "ready_s"), time("Start", "start_s"), time("Time", "exchange_s")),
    )
    return Sheet(name="exchange-messages", title="Single messages", columns=columns, rows=rows)


def exchange_charts(group: ReportGroup, points: tuple[ExchangePoint, ...]) -> list[Chart]:
    """Returns the chart of the messages of a step, at the point with most ranks that has them."""
    drawable = [point for point in points if point.timeline_backward_s and any(map(_is_timed, point.timeline))]
    if not drawable:
        return []
    point = drawable[-1]
    numbered = list(enumerate(point.timeline, start=1))[-MAX_MESSAGES:]
    drawn = [(number, message) for number, message in numbered if _is_timed(message)]
    end = [{"to": point.timeline_backward_s}]
    rule = layer(end, "rule", {"x": "to:Q"}, color=INK, strokeDash=[4, 3], strokeWidth=1.2)
    # The backward pass on line 0, then each message's wait and exchange on its own line.
    backward, waits, under_way = _KINDS
    rows: Rows = [span("backward", backward, 0.0, point.timeline_backward_s or 0.0)]
    for number, message in drawn:
        start_s, time_s = message.start_s or 0.0, message.exchange_s or 0.0
        name, text = f"message {number}", f"{format_bytes(message.num_bytes)}, {message.method}"
        if message.ready_s is not None and message.ready_s < start_s:
            rows.append(span(name, waits, message.ready_s, start_s, text))
        rows.append(span(name, under_way, start_s, start_s + time_s, text))
    part = f" (the last {len(drawn)} are drawn)" if len(drawn) < len(point.timeline) else ""
    named = {"messages under way": point.communication, "during the pass": point.hidden, "after it": point.exposed}
    figures = [f"{name} {figure_text(figure)}" for name, figure in named.items() if figure is not None]
    words = f"{len(point.timeline)} messages{part} of a step next to its backward pass, whose end is dashed. "
    return [
        finish(
            [spans(rows, _KINDS), rule],
            group,
            name="timeline",
            title=f"A step's messages at {place_of(point)}",
            alt=f"{words}{', '.join(figures) or 'No sums are known'}.",
            table=messages(point),
            size=(WIDE * 3 // 2, min(360, max(90, _ROW * (len(drawn) + 1)))),
        )
    ]


def _is_timed(message: Message) -> bool:
    return message.start_s is not None and message.exchange_s is not None


def span(name: str, kind: str, first: float, last: float, text: str = "") -> dict[str, Any]:
    """Returns a bar of `spans` on the line `name`, from `first` to `last` in seconds."""
    return {"name": name, "kind": kind, "from": first, "to": last, "shown": format_seconds(last - first), "what": text}


def spans(rows: Rows, colours: Mapping[str, str]) -> dict[str, Any]:
    """Returns bars over the time since the start of the backward pass, on lines from above; kinds have colours."""
    lines = list(dict.fromkeys(row["name"] for row in rows))
    has_names = len(lines) <= 360 // _ROW
    title, padding = None, 0.25
    if not has_names:
        title, padding = f"{len(lines) - 1} messages", 0.0
    names = {"labels": has_names, "labelLimit": 260, "ticks": False, "domain": False, "title": title}
    times_axis = {"labelExpr": si_label("s"), "tickCount": 6}
    encoding = {
        "y": channel("name:N", title=None, sort=lines, scale={"paddingInner": padding}, axis=names),
        "x": channel("from:Q", title="time since the start of the backward pass", axis=times_axis),
        "x2": "to",
        "color": palette(rows, Series("kind", colours, columns=len(colours))),
        "tooltip": tooltips({"name": "line", "kind": "kind", "shown": "time", "what": "message"}),
    }
    return layer(rows, "bar", encoding)


class ExchangeView(GroupView):
    """Messages of the gradient exchange, their times, and the overlap with the backward pass."""

    id = "exchange"
    title = "Gradient exchange"
    key = "exchange"
    after = "ranks"

    def numbers(self, source: GroupSource) -> tuple[ExchangePoint, ...]:
        return exchange_points(source.group, source.table)

    def shown(self, group: ReportGroup, points: tuple[ExchangePoint, ...]) -> Section:
        reasons = [f"At {place_of(point)}: {point.why}." for point in points if point.prediction is None and point.why]
        last = points[-1]
        if last.communication is None or last.hidden is None:
            headline = f"{len(last.run_ids)} runs record the exchange that ran, but no times"
        else:
            kind, part = "Messages", f"{value_text(last.hidden)} of it during backward"
            if last.is_in_passes and last.exposed is not None:
                kind, part = "Collectives", f"{value_text(last.exposed)} of it waited for"
            headline = f"{kind} take {value_text(last.communication)} per step at {place_of(last)}, {part}"
        return Section(
            headline=headline,
            notes=tuple(reasons),
            caption="In brackets: the interval.",
            charts=functools.partial(exchange_charts, group, points),
            charts_per_row=1,
            sheets=(times(points), what_ran(points)),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.largest.ranks == 1:
            return second_rank(group, "one rank exchanges nothing")
        return (
            "not recorded by these runs; runs of this version with --engine horovod or --engine ddp record it, unless "
            "measure.warmup_steps is 0."
        )
