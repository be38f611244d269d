"""A step's backward pass and its messages on one clock: when each was ready, began and was through."""

from __future__ import annotations

from typing import Any

from dlbench.records.exchange import Message
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE, si_label
from dlbench.report.wording import figure_text, place_text
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange.numbers import ExchangePoint
from dlbench.views.exchange.tables import MAX_MESSAGES, messages
from dlbench.views.model import Group

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
    tooltip = [
        alt.Tooltip("name:N", title="line"),
        alt.Tooltip("kind:N", title="what"),
        alt.Tooltip("shown:N", title="for"),
        alt.Tooltip("what:N", title="message"),
    ]
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
