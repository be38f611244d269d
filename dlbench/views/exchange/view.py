"""Gradient exchange: tables, the timeline of a step's messages, and the section of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dlbench.records.exchange import Message
from dlbench.report.charts.chart import Chart, Rows, finish, tooltips
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE, si_label
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet, Value
from dlbench.report.wording import basis_text, figure_text, place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange.numbers import ExchangePoint, Way, exchange_points
from dlbench.views.model import Group
from dlbench.views.next_step import second_rank
from dlbench.views.view import GroupSource, GroupView, place_columns, place_of

NOT_MEASURED = "not measured"
NO_BOUND = "no bound"

MAX_MESSAGES = 60
"""Messages that are listed and drawn, the last ones; those before are counted."""

WHAT_RAN_CAPTION = "What ran, not what was asked for. Bytes sent per rank follow from the algorithm that ran."
TIMES_CAPTION = (
    "Messages under way, by their own clock. After the backward pass the account counts the whole phase of all ranks, "
    "with negotiation, copies and waiting."
)
LEAST_CAPTION = (
    "A model: every gradient as early as it was ready, one message at a time, neighbours merged in the best way. "
    "Efficiency: if nothing else were lost."
)


@dataclass(frozen=True)
class _Row:
    """One way in which the exchange of a point ran."""

    point: ExchangePoint
    way: Way

    @property
    def ranks(self) -> int:
        return self.point.ranks

    @property
    def nodes(self) -> int:
        return self.point.nodes


def what_ran(points: tuple[ExchangePoint, ...]) -> Sheet[_Row]:
    """For people a line for each way that runs of equal settings went; for programs all figures, a row for a point."""
    is_sparse = any(point.density or point.dense_switches for point in points)
    overflowed = any(point.wire_overflows for point in points)

    def both(name: str, title: str) -> Column[_Row]:
        """Of each way; programs find all ways of the point."""
        return Column(
            name,
            title,
            lambda row: " | ".join(dict.fromkeys(getattr(way, name) for way in row.point.ways)),
            lambda row: str(getattr(row.way, name)),
        )

    columns: tuple[Column[_Row], ...] = (
        *place_columns(),
        both("carrier", "Carried by"),
        both("by", "Grouped by"),
        both("exchange", "Exchange"),
        both("fusion", "Fusion"),
        both("wire", "Wire"),
        Column("", "Groups", lambda row: row.way.groups),
        _count("messages", "Messages per step", "num_messages"),
        _count("gradient_bytes", "Gradients per step", "message_bytes"),
        _count("bytes_inside", "Sent per rank, intra-group", "bytes_inside"),
        _count("bytes_across", "Sent per rank, inter-group", "bytes_across"),
        Column("communication_s", "", lambda row: row.point.communication, has_interval=True),
        Column("after_backward_s", "", lambda row: row.point.exposed, has_interval=True),
        Column("during_backward_s", "", lambda row: row.point.hidden, has_interval=True),
        Column("backward_s", "", lambda row: row.point.backward, has_interval=True),
        Column("density", "Density of sums" * is_sparse, lambda row: row.point.density, has_interval=True),
        Column("efficiency", "", lambda row: row.point.efficiency, has_interval=True),
        _predicted("least_after_backward_s", "best_exposed"),
        _predicted("least_messages", "num_messages"),
        _predicted("modelled_after_backward_s", "as_ran"),
        _predicted("least_efficiency", "efficiency"),
        Column("wire_overflows", "Overflows" * overflowed, lambda row: row.point.wire_overflows),
        Column("dense_switches", "Sent dense" * is_sparse, lambda row: row.point.dense_switches),
        Column("startup_s", "", lambda row: row.point.prediction.startup_s if row.point.prediction else None),
        Column("per_byte_s", "", lambda row: row.point.prediction.per_byte_s if row.point.prediction else None),
        Column("why_not_predicted", "", lambda row: row.point.why),
        Column("runs", "", lambda row: len(row.point.run_ids)),
    )
    return Sheet(
        name="exchange",
        title="What ran",
        columns=columns,
        rows=[_Row(point, way) for point in points for way in point.ways],
        is_data=lambda row: row.way is row.point.ways[0],
        caption=WHAT_RAN_CAPTION,
    )


def _count(name: str, title: str, field: str) -> Column[_Row]:
    """A count; its interval only where runs differ."""
    return Column(
        name,
        title,
        lambda row: getattr(row.point, field),
        lambda row: count_cell(getattr(row.point, field)),
        has_interval=True,
    )


def count_cell(count: Estimate | None) -> Value | Cell:
    """A count; its interval only where runs differ."""
    if count is not None and count.low == count.high:
        return Cell(value_text(count), number=count.value)
    return count or NOT_MEASURED


def _predicted(name: str, field: str) -> Column[_Row]:
    return Column(
        name, "", lambda row: getattr(row.point.prediction, field) if row.point.prediction else None, has_interval=True
    )


def times(points: tuple[ExchangePoint, ...]) -> Sheet[ExchangePoint]:
    """Message time per step during and after the backward pass, and the least of it by the model."""
    has_least = any(point.prediction for point in points)
    columns: tuple[Column[ExchangePoint], ...] = (
        Column("", "At", place_of, is_brief=True),
        Column("", "Messages under way", lambda point: point.communication or NOT_MEASURED, is_brief=True),
        Column("", "during backward", lambda point: point.hidden or NOT_MEASURED),
        Column("", "after backward", lambda point: point.exposed or NOT_MEASURED, is_brief=True),
        Column("", "Backward pass", lambda point: point.backward or NOT_MEASURED),
        Column(
            "",
            "Least after backward" * has_least,
            lambda point: point.prediction.best_exposed if point.prediction else NO_BOUND,
            is_brief=True,
        ),
        Column(
            "",
            "Efficiency with it" * has_least,
            lambda point: point.prediction.efficiency if point.prediction else NO_BOUND,
            is_brief=True,
        ),
        Column("", "Cost of a message" * has_least, lambda point: point.prediction.line if point.prediction else None),
        Column("", "Interval", lambda point: basis_text(point.communication) if point.communication else None),
        Column("", "Known from", evidence_text),
    )
    return Sheet(
        name="exchange-times",
        title="Messages of a step",
        columns=columns,
        rows=points,
        caption=f"{TIMES_CAPTION} {LEAST_CAPTION}" if has_least else TIMES_CAPTION,
        in_terminal=True,
    )


MAX_EVIDENCE = 80
"""Characters of what a point is known from."""


def evidence_text(point: ExchangePoint) -> str:
    """What the times are known from, in a short sentence; the records of the runs hold all of it."""
    starts = list(
        dict.fromkeys(text.partition(";")[0].partition(": ")[0].partition(". ")[0] for text in point.evidence)
    )
    first = starts[0] if len(starts[0]) <= MAX_EVIDENCE else f"{starts[0][:MAX_EVIDENCE].rsplit(' ', 1)[0]} ..."
    return f"{first}; {point.window}" + (f" (otherwise in {len(starts) - 1} of the runs)" if len(starts) > 1 else "")


@dataclass(frozen=True)
class _Line:
    """A message of a step, or the first ones together."""

    name: str
    num_tensors: int
    num_bytes: int
    message: Message | None


MESSAGE_COLUMNS: tuple[Column[_Line], ...] = (
    Column("", "Message", lambda line: line.name),
    Column("", "Gradients", lambda line: line.num_tensors),
    Column("", "Bytes", lambda line: line.num_bytes, unit="bytes"),
    Column("", "Went", lambda line: line.message.method if line.message else None, limit=80),
    Column("", "Ready", lambda line: _time(line, "ready_s"), unit="s"),
    Column("", "Began", lambda line: _time(line, "start_s"), unit="s"),
    Column("", "Took", lambda line: _time(line, "exchange_s"), unit="s"),
)


def _time(line: _Line, name: Literal["ready_s", "start_s", "exchange_s"]) -> float | str | None:
    if line.message is None:
        return None
    seconds: float | None = getattr(line.message, name)
    return NOT_MEASURED if seconds is None else seconds


def messages(point: ExchangePoint) -> Sheet[_Line]:
    """Messages of a step of the run in the middle, in the order of sending."""
    before = point.timeline[:-MAX_MESSAGES]
    rows = [
        _Line(str(number), message.num_tensors, message.num_bytes, message)
        for number, message in enumerate(point.timeline, start=1)
    ][len(before) :]
    if before:
        tensors, size = sum(m.num_tensors for m in before), sum(m.num_bytes for m in before)
        rows.insert(0, _Line(f"1 to {len(before)}", tensors, size, None))
    return Sheet(name="exchange-messages", title="Single messages", columns=MESSAGE_COLUMNS, rows=rows)


def ways_text(point: ExchangePoint) -> str:
    """What ran at a point, in one line."""
    return "; ".join(
        f"{way.exchange} exchange over {way.carrier}, grouped by {way.by}, fusion {way.fusion}, "
        f"wire {way.wire}, {way.groups}"
        for way in point.ways
    )


_ROW = 16
_WAIT = "#9aa0a6"
_KINDS = ("backward pass", "ready, waits", "under way")
_COLOURS = (PART_COLOURS["backward"], _WAIT, PART_COLOURS["exchange"])


def exchange_charts(group: Group, points: tuple[ExchangePoint, ...]) -> list[Chart]:
    """The timeline of the point with most ranks that has one."""
    drawable = [point for point in points if point.timeline_backward_s and any(map(_is_timed, point.timeline))]
    return [_timeline(group, drawable[-1])] if drawable else []


def _is_timed(message: Message) -> bool:
    return message.start_s is not None and message.exchange_s is not None


def _timeline(group: Group, point: ExchangePoint) -> Chart:
    import altair as alt

    numbered = list(enumerate(point.timeline, start=1))[-MAX_MESSAGES:]
    drawn = [(number, message) for number, message in numbered if _is_timed(message)]
    rows = _rows(point, drawn)
    place = place_text(point.ranks, point.nodes)
    return finish(
        alt.layer(*_layers(alt, point, rows)),
        group,
        name="timeline",
        title=f"A step's messages at {place}",
        alt=_words(point, len(drawn)),
        table=messages(point),
        size=(WIDE * 3 // 2, min(360, max(90, _ROW * (len(drawn) + 1)))),
    )


def _rows(point: ExchangePoint, drawn: list[tuple[int, Message]]) -> Rows:
    """Bars: the backward pass on line 0, then each message's wait and exchange on a line of its own."""
    backward = point.timeline_backward_s or 0.0
    rows: Rows = [
        {
            "line": 0,
            "name": "backward",
            "kind": _KINDS[0],
            "from": 0.0,
            "to": backward,
            "shown": format_seconds(backward),
            "what": "",
        }
    ]
    for number, message in drawn:
        start, took = message.start_s or 0.0, message.exchange_s or 0.0
        what = f"{format_bytes(message.num_bytes)}, {message.method}"
        spans = [(_KINDS[2], start, start + took)]
        if message.ready_s is not None and message.ready_s < start:
            spans.insert(0, (_KINDS[1], message.ready_s, start))
        rows += [
            {
                "line": number,
                "name": f"message {number}",
                "kind": kind,
                "from": first,
                "to": last,
                "shown": format_seconds(last - first),
                "what": what,
            }
            for kind, first, last in spans
        ]
    return rows


def _layers(alt: Any, point: ExchangePoint, rows: Rows) -> list[Any]:
    lines = list(dict.fromkeys(row["name"] for row in rows))
    few = len(lines) <= 360 // _ROW
    y = alt.Y("name:N", title=None, sort=lines).scale(paddingInner=0.25 if few else 0.0)
    y = y.axis(labels=few, ticks=False, domain=False, title=None if few else f"{len(lines) - 1} messages")
    label = si_label("s")
    x = alt.X("from:Q", title="time since the start of the backward pass").axis(labelExpr=label, tickCount=6)
    present = [kind for kind in _KINDS if any(row["kind"] == kind for row in rows)]
    colour = alt.Color("kind:N", title=None, sort=list(_KINDS)).scale(
        domain=present, range=[_COLOURS[_KINDS.index(kind)] for kind in present]
    )
    tooltip = tooltips({"name:N": "line", "kind:N": "what", "shown:N": "for", "what:N": "message"})
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar()
        .encode(y=y, x=x, x2="to:Q", color=colour.legend(orient="bottom", columns=3), tooltip=tooltip)
    )
    end = alt.Chart(alt.InlineData(values=[{"to": point.timeline_backward_s}]))
    return [bars, end.mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1.2).encode(x=alt.X("to:Q"))]


def _words(point: ExchangePoint, count: int) -> str:
    of = f" (the last {count} are drawn)" if count < len(point.timeline) else ""
    figures = [
        f"{name} {figure_text(figure)}"
        for name, figure in (
            ("messages under way", point.communication),
            ("during the pass", point.hidden),
            ("after it", point.exposed),
        )
        if figure is not None
    ]
    return (
        f"{len(point.timeline)} messages{of} of a step beside its backward pass, whose end is dashed. "
        f"{', '.join(figures) or 'No sums are known'}."
    )


class ExchangeView(GroupView):
    """Messages, their times, and the overlap with the backward pass."""

    id = "exchange"
    title = "Gradient exchange"
    key = "exchange"

    def numbers(self, source: GroupSource) -> tuple[ExchangePoint, ...]:
        return exchange_points(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        points = group.all_of(ExchangePoint)
        if not points:
            return None
        places = [f"At {place_text(point.ranks, point.nodes)}" for point in points]
        ran = [f"{place}: {ways_text(point)}." for place, point in zip(places, points, strict=True)]
        why = [
            f"{place}: {point.why}."
            for place, point in zip(places, points, strict=True)
            if point.prediction is None and point.why
        ]
        # What messages take from the cores, of the point with most ranks that tells.
        told = [(place, point) for place, point in zip(places, points, strict=True) if point.cores]
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(points[-1]),
            notes=(*why, *[f"{place}, {point.cores}." for place, point in told[-1:]]),
            caption=f"{group.caption}. In brackets: the interval.",
            charts=lambda: exchange_charts(group, points),
            charts_per_row=1,
            sheets=(times(points), what_ran(points)),
            brief=(*ran, *why),
        )

    def remedy(self, group: Group) -> str:
        if group.largest.ranks == 1:
            return second_rank(group, "one rank exchanges nothing")
        return (
            "not recorded: these runs do not say what their exchange did; runs of this version with --engine horovod "
            "or --engine ddp do, unless measure.warmup_steps is 0."
        )


def _headline(point: ExchangePoint) -> str:
    """How long messages are under way, and how much of it the backward pass hides."""
    if point.communication is None or point.hidden is None:
        return f"{len(point.run_ids)} runs say what ran, and not how long"
    took, hidden = value_text(point.communication), value_text(point.hidden)
    return f"Messages take {took} per step at {place_text(point.ranks, point.nodes)}, {hidden} of it during backward"
