"""The gradient exchange of each scaling point: what ran, what it took, and how little of it could be exposed.

The prediction puts gradients and the times at which they were ready (measured), and a line for the time of an exchange
(measured or fitted), into the overlap model of `dlbench.costs.overlap`: one exchange at a time, each as soon as its
gradients are there and the one before is through. Of all ways to merge neighbouring gradients into messages the best
one leaves the least communication behind the backward pass, and that bounds the efficiency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlbench.costs import overlap
from dlbench.costs.fit.least_errors import fit_line
from dlbench.reading.scaling import Group, Point
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.specs.collectives.network import LineCost
from dlbench.stats.estimates import Estimate, median_estimate

MIN_SIZES = 3
"""Different sizes of messages that a line needs: two always lie on one."""
MIN_RATIO = 4.0
"""Largest over smallest of these sizes: with less, start-up and rate cannot be told apart."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the overlap model says of a point; estimates over runs."""

    line: LineCost
    """The line of the run that stands for the point."""
    is_fitted: bool
    """Whether it was fitted to the run's own messages, instead of measured apart from them."""
    best_exposed_s: Estimate
    """The least exposed communication of any merging, seconds a step."""
    num_messages: Estimate
    """Messages of that merging."""
    as_ran_s: Estimate | None
    """What the model gives for the messages as they ran: its own test. None where their readiness was not measured."""
    compute_s: float
    """Mean step of the baseline for the same samples a rank, without its exposed exchange if it has any, seconds."""
    efficiency: Estimate
    """The share of the ideal that is attainable with the least exposed communication (1)."""


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """The exchange at one rank count; medians over the runs that tell of it."""

    ranks: int
    nodes: int
    run_ids: tuple[str, ...]
    sample: ExchangeResult
    """Of the run whose communication time is the median: the timeline, and what ran."""
    sample_id: str
    ways: tuple[tuple[str, ...], ...]
    """Carrier, who groups, exchange, fusion, wire, group size, groups: each combination that ran, once."""
    num_messages: Estimate | None
    """None where no message was seen."""
    message_bytes: Estimate | None
    """Gradients of all messages of a step."""
    bytes_inside: Estimate | None
    bytes_across: Estimate | None
    communication_s: Estimate | None
    exposed_s: Estimate | None
    hidden_s: Estimate | None
    backward_s: Estimate | None
    wire_overflows: int
    """Of all runs."""
    density: Estimate | None
    dense_switches: int
    """Of all runs."""
    window_steps: tuple[int, ...]
    """Each number of watched steps, once."""
    evidence: tuple[str, ...]
    """Each, once."""
    efficiency: Estimate
    """Measured, of the scaling point."""
    prediction: Prediction | None
    why: str
    """Why there is no prediction; empty where there is one."""


def exchange_points(group: Group) -> list[ExchangePoint]:
    """The exchange of every point with more than one rank whose runs tell of it."""
    runs = {run.plan.run_id: run for run in group.runs}
    found = []
    for point in group.points:
        told = [(runs[run_id], result) for run_id in point.run_ids if (result := _exchange(runs[run_id])) is not None]
        if point.ranks > 1 and told:
            found.append(_point(point, group.baseline.ranks, told))
    return found


def _exchange(run: Run) -> ExchangeResult | None:
    return None if run.record is None else run.record.exchange


def _point(point: Point, baseline_ranks: int, told: Sequence[tuple[Run, ExchangeResult]]) -> ExchangePoint:
    results = [result for _, result in told]
    run, sample = _typical(told)
    prediction, why = _predict(point, baseline_ranks, results, sample)
    counts = [float(len(result.messages)) for result in results if result.messages]
    sizes = [float(sum(m.num_bytes for m in result.messages)) for result in results if result.messages]
    return ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        run_ids=tuple(run.plan.run_id for run, _ in told),
        sample=sample,
        sample_id=run.plan.run_id,
        ways=tuple(dict.fromkeys(map(_way, results))),
        num_messages=median_estimate(counts) if counts else None,
        message_bytes=median_estimate(sizes) if sizes else None,
        bytes_inside=_over(results, lambda result: result.bytes_inside),
        bytes_across=_over(results, lambda result: result.bytes_across),
        communication_s=_over(results, lambda result: result.communication_s),
        exposed_s=_over(results, lambda result: result.exposed_s),
        hidden_s=_over(results, lambda result: result.hidden_s),
        backward_s=_over(results, lambda result: result.backward_s),
        wire_overflows=sum(result.wire_overflows for result in results),
        density=_over(results, lambda result: result.density),
        dense_switches=sum(result.dense_switches for result in results),
        window_steps=tuple(sorted({result.window_steps for result in results})),
        evidence=tuple(dict.fromkeys(result.evidence for result in results)),
        efficiency=point.efficiency,
        prediction=prediction,
        why=why,
    )


def _typical(told: Sequence[tuple[Run, ExchangeResult]]) -> tuple[Run, ExchangeResult]:
    """The run in the middle by communication time (the lower middle of an even number)."""
    timed = [item for item in told if item[1].communication_s is not None and item[1].messages]
    ordered = sorted(timed or told, key=lambda item: (item[1].communication_s or 0.0, item[0].plan.run_id))
    return ordered[(len(ordered) - 1) // 2]


def _way(result: ExchangeResult) -> tuple[str, ...]:
    return (
        result.carrier,
        result.by,
        result.exchange,
        result.fusion,
        result.wire,
        str(result.group_size),
        str(result.num_groups),
    )


def _over(results: Sequence[ExchangeResult], pick: Callable[[ExchangeResult], float | None]) -> Estimate | None:
    values = [value for result in results if (value := pick(result)) is not None]
    return median_estimate(values) if values else None


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
            line=typical.line,
            is_fitted=typical.is_fitted,
            best_exposed_s=median_estimate([one.best_s for one in found]),
            num_messages=median_estimate([float(one.num_messages) for one in found]),
            as_ran_s=median_estimate(as_ran) if len(as_ran) == len(found) else None,
            compute_s=compute,
            efficiency=median_estimate([_share(ideal, compute, one.best_s) for one in found]),
        ),
        "",
    )


def _share(ideal_s: float, compute_s: float, exposed_s: float) -> float:
    """Efficiency against the baseline's step, which holds exposed exchange of its own if it had several ranks."""
    return overlap.attainable_efficiency(compute_s, exposed_s) * ideal_s / compute_s


def _one_run(point: Point, result: ExchangeResult) -> _OneRun | str:
    """The model's numbers, or why there are none."""
    if not result.gradients:
        return "not measured: the runs do not tell when each gradient was ready"
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
