"""What runs say of their gradient exchange becomes part of the `Report`."""

from __future__ import annotations

from typing import Literal

from dlbench.reading.scaling import Group
from dlbench.records.exchange import Message
from dlbench.report.wording import clean, ranks_text
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.units import format_seconds
from dlbench.views.exchange import model
from dlbench.views.exchange import numbers as analysis


def exchange(group: Group) -> tuple[model.ExchangePoint, ...]:
    """Points whose runs tell of their exchange, by rank count; empty where none does."""
    return tuple(map(_point, analysis.exchange_points(group)))


def _point(point: analysis.ExchangePoint) -> model.ExchangePoint:
    windows = [str(steps) for steps in sorted({point.window_steps[0], point.window_steps[-1]})]
    return model.ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        ways=tuple(map(_way, point.ways)),
        num_messages=optional_figure_of(point.num_messages, "messages"),
        message_bytes=optional_figure_of(point.message_bytes, "bytes"),
        bytes_inside=optional_figure_of(point.bytes_inside, "bytes"),
        bytes_across=optional_figure_of(point.bytes_across, "bytes"),
        communication=optional_figure_of(point.communication_s, "s"),
        exposed=optional_figure_of(point.exposed_s, "s"),
        hidden=optional_figure_of(point.hidden_s, "s"),
        backward=optional_figure_of(point.backward_s, "s"),
        wire_overflows=point.wire_overflows,
        density=optional_figure_of(point.density, "fraction"),
        dense_switches=point.dense_switches,
        evidence=tuple(map(clean, point.evidence)),
        window=f"{' to '.join(windows)} steps of each run",
        efficiency=figure_of(point.efficiency, "fraction"),
        prediction=None if point.prediction is None else _prediction(point.prediction),
        why=clean(point.why),
        timeline=tuple(_message(message) for message in point.sample.messages),
        timeline_run=point.sample_id,
        timeline_backward_s=point.sample.backward_s,
        run_ids=point.run_ids,
    )


def _way(way: tuple[str, ...]) -> model.Way:
    carrier, by, exchange_name, fusion, wire, size, count = map(clean, way)
    grouper: Literal["engine", "dlbench"] = "dlbench" if by == "dlbench" else "engine"
    groups = "1 group" if count == "1" else f"{count} groups"
    return model.Way(
        carrier=carrier,
        by=grouper,
        exchange=exchange_name,
        fusion=fusion,
        wire=wire,
        groups=f"{groups} of {ranks_text(int(size))}",
    )


def _message(message: Message) -> model.Message:
    return model.Message(
        num_bytes=message.num_bytes,
        num_tensors=message.num_tensors,
        method=clean(message.method, 80),
        ready_s=message.ready_s,
        start_s=message.start_s,
        exchange_s=message.exchange_s,
    )


def _prediction(found: analysis.Prediction) -> model.Prediction:
    line = found.line
    rate = f"{format_seconds(line.per_byte_s * 2**20)} a MiB"
    start = format_seconds(line.startup_s) if line.startup_s else "0 s"
    return model.Prediction(
        line=f"{clean(line.name)}: {start} a message and {rate}",
        startup_s=line.startup_s,
        per_byte_s=line.per_byte_s,
        is_fitted=found.is_fitted,
        best_exposed=figure_of(found.best_exposed_s, "s"),
        num_messages=figure_of(found.num_messages, "messages"),
        as_ran=optional_figure_of(found.as_ran_s, "s"),
        compute_s=found.compute_s,
        efficiency=figure_of(found.efficiency, "fraction"),
    )
