"""Tables on the gradient exchange as rows of text, header first; see `tabular`."""

from __future__ import annotations

from dlbench.records.exchange import Message
from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.wording import DASH, basis_text, figure_text, optional_figure, place_text, value_text
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange.numbers import ExchangePoint

NOT_MEASURED = "not measured"

MAX_MESSAGES = 60
"""Messages that are listed and drawn, the last ones, which are exposed; those before are counted."""

PREDICTION_CAPTION = (
    "Least exposed communication: gradients and their measured times of readiness, and the cost line, in the overlap "
    "model; one message at a time, neighbours merged in the best way. Attainable: the baseline's step against that "
    "step with it."
)


def what_ran(group: Group) -> Table:
    """Which exchange carried what; a line for each way that runs of equal settings went."""
    points = group.exchange
    is_sparse = any(point.density or point.dense_switches for point in points)
    overflowed = any(point.wire_overflows for point in points)
    header = ["At", "Carried by", "Grouped by", "Exchange", "Fusion", "Wire", "Groups", "Messages a step"]
    header += ["Gradients a step", "A rank sends inside", "A rank sends across"]
    header += ["Density of sums", "Sent dense"] * is_sparse + ["Overflows"] * overflowed
    rows: Table = [tuple(header)]
    for point in points:
        for way in point.ways:
            cells = [place_text(point.ranks, point.nodes), way.carrier, way.by, way.exchange, way.fusion, way.wire]
            cells.append(way.groups)
            cells += map(_count, (point.num_messages, point.message_bytes, point.bytes_inside, point.bytes_across))
            cells += [optional_figure(point.density), f"{point.dense_switches:,}"] if is_sparse else []
            cells += [f"{point.wire_overflows:,}"] if overflowed else []
            rows.append(tuple(cells))
    return rows


def times(group: Group) -> Table:
    """Communication a step, its exposed and its hidden part, and how that is known."""
    rows: Table = [("At", "Communication", "Hidden", "Exposed", "Backward", "Interval", "Watched", "Known from")]
    rows += [
        (
            place_text(point.ranks, point.nodes),
            *map(_measured, (point.communication, point.hidden, point.exposed, point.backward)),
            DASH if point.communication is None else basis_text(point.communication),
            point.window,
            "; ".join(point.evidence),
        )
        for point in group.exchange
    ]
    return rows


def predicted(group: Group) -> Table:
    """The least exposed communication and the attainable efficiency beside the measured ones."""
    rows: Table = [
        (
            *("At", "Exposed, measured", "By the model, as it ran", "Least possible", "Messages of that"),
            *("Efficiency, measured", "Attainable", "Cost line"),
        )
    ]
    for point in group.exchange:
        found = point.prediction
        start = (place_text(point.ranks, point.nodes), _measured(point.exposed))
        if found is None:
            rows.append((*start, DASH, DASH, DASH, figure_text(point.efficiency), DASH, point.why))
            continue
        rows.append(
            (
                *start,
                optional_figure(found.as_ran),
                figure_text(found.best_exposed),
                _count(found.num_messages),
                figure_text(point.efficiency),
                figure_text(found.efficiency),
                f"{'fitted to its own messages' if found.is_fitted else 'measured or given'}: {found.line}",
            )
        )
    return rows


def short(group: Group) -> Table:
    """What a terminal has room for."""
    rows: Table = [("at", "communication", "exposed", "least possible", "attainable")]
    for point in group.exchange:
        found = point.prediction
        rows.append(
            (
                place_text(point.ranks, point.nodes),
                _measured(point.communication),
                _measured(point.exposed),
                "not known" if found is None else figure_text(found.best_exposed),
                "not known" if found is None else figure_text(found.efficiency),
            )
        )
    return rows


def messages(point: ExchangePoint) -> Table:
    """Messages of a step of the run in the middle, in the order of sending."""
    rows: Table = [("Message", "Gradients", "Bytes", "Went", "Ready", "Began", "Took")]
    before = point.timeline[:-MAX_MESSAGES]
    if before:
        tensors, size = sum(m.num_tensors for m in before), sum(m.num_bytes for m in before)
        rows.append((f"1 to {len(before)}", str(tensors), format_bytes(size), DASH, DASH, DASH, DASH))
    shown = enumerate(point.timeline[-MAX_MESSAGES:], start=len(before) + 1)
    return [*rows, *(_message(number, message) for number, message in shown)]


def _message(number: int, message: Message) -> tuple[str, ...]:
    moments = (message.ready_s, message.start_s, message.exchange_s)
    return (
        str(number),
        str(message.num_tensors),
        format_bytes(message.num_bytes),
        message.method,
        *(NOT_MEASURED if moment is None else _moment(moment) for moment in moments),
    )


def _moment(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0 s"


def ways_text(point: ExchangePoint) -> str:
    """What ran at a point, in one line."""
    return "; ".join(
        f"{way.exchange} exchange over {way.carrier}, grouped by {way.by} (fusion {way.fusion}), wire {way.wire}, "
        f"{way.groups}"
        for way in point.ways
    )


def _count(figure: Estimate | None) -> str:
    """A count; its interval only where runs differ."""
    return value_text(figure) if figure and figure.low == figure.high else _measured(figure)


def _measured(figure: Estimate | None) -> str:
    return NOT_MEASURED if figure is None else figure_text(figure)
