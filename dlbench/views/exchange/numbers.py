"""The gradient exchange of each scaling point: what ran, what it took, and how little of it could be exposed.

The prediction puts gradients and the times at which they were ready (measured), and a line for the time of an exchange
(measured or fitted), into the overlap model of `dlbench.costs.overlap`: one exchange at a time, each as soon as its
gradients are there and the one before is through. Of all ways to merge neighbouring gradients into messages the best
one leaves the least communication behind the backward pass, and that bounds the efficiency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.costs import overlap
from dlbench.costs.fit.least_errors import fit_line
from dlbench.reading.scaling import Group, Point
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.report.wording import ranks_text
from dlbench.specs.collectives.network import LineCost
from dlbench.stats.estimates import Estimate, median_estimate
from dlbench.units import format_seconds

MIN_SIZES = 3
"""Different sizes of messages that a line needs: two always lie on one."""
MIN_RATIO = 4.0
"""Largest over smallest of these sizes: with less, start-up and rate cannot be separated."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """What ran: not what was asked for."""

    carrier: str
    by: Literal["engine", "dlbench"]
    """Who grouped gradients into messages and chose the exchange."""
    exchange: str
    fusion: str
    wire: str
    groups: str
    """In words: `2 groups of 4 ranks`."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How little communication could be exposed, by the overlap model; medians over runs."""

    line: str
    """The cost line of the run that stands for the point, in words."""
    startup_s: float
    per_byte_s: float
    is_fitted: bool
    """Whether the line was fitted to the run's own messages, instead of measured apart from them."""
    best_exposed: Estimate
    """The least exposed communication of any merging, seconds per step."""
    num_messages: Estimate
    """Messages of that merging."""
    as_ran: Estimate | None
    """Exposed communication by the model for the messages as they ran, to set beside the measured one, seconds per
    step. None where their readiness was not measured."""
    compute_s: float
    """Mean step of the baseline for the same samples per rank, without its exposed exchange if it has any, seconds."""
    efficiency: Estimate
    """The share of the ideal that is attainable with the least exposed communication (fraction)."""


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """The gradient exchange at one rank count; medians over the runs that record it."""

    ranks: int
    nodes: int
    ways: tuple[Way, ...]
    """One, unless runs of equal settings ran differently."""
    num_messages: Estimate | None
    """Of a step; None where no message was seen."""
    message_bytes: Estimate | None
    """Gradients of all messages of a step, bytes."""
    bytes_inside: Estimate | None
    """Sent per rank and step inside its group."""
    bytes_across: Estimate | None
    """Sent per rank and step to other groups."""
    communication: Estimate | None
    """Seconds per step, as the following three."""
    exposed: Estimate | None
    hidden: Estimate | None
    backward: Estimate | None
    wire_overflows: int
    """Of all runs."""
    density: Estimate | None
    dense_switches: int
    """Of all runs."""
    evidence: tuple[str, ...]
    """How all this is known, each way once."""
    window: str
    """Steps that were watched, in words."""
    efficiency: Estimate
    """Measured, of the scaling point."""
    prediction: Prediction | None
    why: str
    """Why there is no prediction; empty where there is one."""
    timeline: tuple[Message, ...]
    """Messages of the run whose communication time is the median."""
    timeline_run: str
    timeline_backward_s: float | None
    run_ids: tuple[str, ...]


def exchange_points(group: Group) -> tuple[ExchangePoint, ...]:
    """The exchange of every point with more than one rank whose runs record it, by rank count."""
    runs = {run.plan.run_id: run for run in group.runs}
    found = []
    for point in group.points:
        recorded = [(runs[run_id], result) for run_id in point.run_ids if (result := _exchange(runs[run_id]))]
        if point.ranks > 1 and recorded:
            found.append(_point(point, group.baseline.ranks, recorded))
    return tuple(found)


def _exchange(run: Run) -> ExchangeResult | None:
    return None if run.record is None else run.record.exchange


def _point(point: Point, baseline_ranks: int, recorded: Sequence[tuple[Run, ExchangeResult]]) -> ExchangePoint:
    results = [result for _, result in recorded]
    run, sample = _typical(recorded)
    prediction, why = _predict(point, baseline_ranks, results, sample)
    with_messages = [result for result in results if result.messages]
    windows = sorted({result.window_steps for result in results})
    return ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        ways=tuple(dict.fromkeys(map(_way, results))),
        num_messages=_over(with_messages, lambda result: float(len(result.messages)), "messages"),
        message_bytes=_over(with_messages, lambda result: float(sum(m.num_bytes for m in result.messages)), "bytes"),
        bytes_inside=_over(results, lambda result: result.bytes_inside, "bytes"),
        bytes_across=_over(results, lambda result: result.bytes_across, "bytes"),
        communication=_over(results, lambda result: result.communication_s, "s"),
        exposed=_over(results, lambda result: result.exposed_s, "s"),
        hidden=_over(results, lambda result: result.hidden_s, "s"),
        backward=_over(results, lambda result: result.backward_s, "s"),
        wire_overflows=sum(result.wire_overflows for result in results),
        density=_over(results, lambda result: result.density, "fraction"),
        dense_switches=sum(result.dense_switches for result in results),
        evidence=tuple(dict.fromkeys(result.evidence for result in results)),
        window=f"{' to '.join(map(str, dict.fromkeys((windows[0], windows[-1]))))} steps of each run",
        efficiency=point.efficiency,
        prediction=prediction,
        why=why,
        timeline=sample.messages,
        timeline_run=run.plan.run_id,
        timeline_backward_s=sample.backward_s,
        run_ids=tuple(run.plan.run_id for run, _ in recorded),
    )


def _typical(recorded: Sequence[tuple[Run, ExchangeResult]]) -> tuple[Run, ExchangeResult]:
    """The run in the middle by communication time (the lower middle of an even number)."""
    timed = [item for item in recorded if item[1].communication_s is not None and item[1].messages]
    ordered = sorted(timed or recorded, key=lambda item: (item[1].communication_s or 0.0, item[0].plan.run_id))
    return ordered[(len(ordered) - 1) // 2]


def _way(result: ExchangeResult) -> Way:
    groups = "1 group" if result.num_groups == 1 else f"{result.num_groups} groups"
    return Way(
        carrier=result.carrier,
        by=result.by,
        exchange=result.exchange,
        fusion=result.fusion,
        wire=result.wire,
        groups=f"{groups} of {ranks_text(result.group_size)}",
    )


def _over(
    results: Sequence[ExchangeResult], pick: Callable[[ExchangeResult], float | None], unit: str
) -> Estimate | None:
    """The median over the results that have this value."""
    values = [value for result in results if (value := pick(result)) is not None]
    return median_estimate(values, unit) if values else None


@dataclass(frozen=True, kw_only=True)
class _OneRun:
    """The model's numbers for one run."""

    line: LineCost
    is_fitted: bool
    best_s: float
    num_messages: int
    as_ran_s: float | None


def _predict(
    point: Point, baseline_ranks: int, results: Sequence[ExchangeResult], sample: ExchangeResult
) -> tuple[Prediction | None, str]:
    found: list[_OneRun] = []
    for result in results:
        one = _one_run(point, result)
        if isinstance(one, str):
            return None, one
        found.append(one)
    parts = {part.name: part.ideal_seconds for part in point.parts}
    # One rank exchanges nothing: what its exchange takes is the engine's own work, which more ranks have too.
    ideal = point.whole.ideal_seconds
    compute = ideal if baseline_ranks == 1 else ideal - parts["exchange"]
    typical = found[next(i for i, result in enumerate(results) if result is sample)]
    as_ran = [one.as_ran_s for one in found if one.as_ran_s is not None]
    return (
        Prediction(
            line=_line_text(typical.line),
            startup_s=typical.line.startup_s,
            per_byte_s=typical.line.per_byte_s,
            is_fitted=typical.is_fitted,
            best_exposed=median_estimate([one.best_s for one in found], "s"),
            num_messages=median_estimate([float(one.num_messages) for one in found], "messages"),
            as_ran=median_estimate(as_ran, "s") if len(as_ran) == len(found) else None,
            compute_s=compute,
            efficiency=median_estimate([_share(ideal, compute, one.best_s) for one in found], "fraction"),
        ),
        "",
    )


def _line_text(line: LineCost) -> str:
    start = format_seconds(line.startup_s) if line.startup_s else "0 s"
    return f"{line.name}: {start} per message and {format_seconds(line.per_byte_s * 2**20)} per MiB"


def _share(ideal_s: float, compute_s: float, exposed_s: float) -> float:
    """Efficiency against the baseline's step, which holds exposed exchange of its own if it had several ranks."""
    return overlap.attainable_efficiency(compute_s, exposed_s) * ideal_s / compute_s


def _one_run(point: Point, result: ExchangeResult) -> _OneRun | str:
    """The model's numbers, or why there are none."""
    if not result.gradients:
        return "not measured: the runs do not record when each gradient was ready"
    lines = measured_lines(result, point.ranks)
    fitted = None if lines else fitted_line(result.messages, point.ranks, result.exchange)
    candidates = [*lines, *([fitted] if fitted else [])]
    if not candidates:
        return (
            f"not measured: no cost of an exchange was fitted or given, and messages of fewer than {MIN_SIZES} sizes "
            f"(or within a factor of {MIN_RATIO:g}) fit no line"
        )
    order = sorted(result.gradients, key=lambda gradient: gradient.ready_s)
    sizes = [gradient.num_bytes for gradient in order]
    ready = [gradient.ready_s for gradient in order]
    backward = result.backward_s or ready[-1]
    tried = []
    for line in candidates:
        groups = overlap.best_merge(sizes, ready, line)
        tried.append((overlap.exposed(groups, sizes, ready, line, backward), len(groups), line))
    best, num_messages, line = min(tried, key=lambda item: item[:2])
    return _OneRun(
        line=line,
        is_fitted=not lines,
        best_s=best,
        num_messages=num_messages,
        as_ran_s=_as_ran(result.messages, line, backward),
    )


def _as_ran(messages: Sequence[Message], line: LineCost, backward_s: float) -> float | None:
    """Exposed communication that the model gives for the messages as they were."""
    ready = [message.ready_s for message in messages if message.ready_s is not None]
    if not messages or len(ready) < len(messages):
        return None
    sizes = [message.num_bytes for message in messages]
    return overlap.exposed([1] * len(sizes), sizes, ready, line, backward_s)


def measured_lines(result: ExchangeResult, ranks: int) -> list[LineCost]:
    """Lines that the run measured or was given, for its rank count; they count bytes of gradients in any format."""
    return [line for line in result.costs if line.ranks == ranks]


def fitted_line(messages: Sequence[Message], ranks: int, name: str) -> LineCost | None:
    """The line through the times of a run's own messages; None where they do not determine one."""
    timed = [(m.num_bytes, m.exchange_s) for m in messages if m.exchange_s and m.num_bytes]
    sizes = [size for size, _ in timed]
    if len(set(sizes)) < MIN_SIZES or max(sizes) / min(sizes) < MIN_RATIO:
        return None
    return fit_line(f"{name}, from its own messages", ranks, sizes, [seconds for _, seconds in timed])
