"""The gradient exchange of each scaling point: what ran, what its messages took, and the least they could take.

Here messages are counted: the time in which at least one was under way, as rank 0 or the engine's timeline tells it, in
a window of steps. The exchange phase of the account (`dlbench.reading.causes`) is another quantity: the time of all
ranks between the end of the backward pass and the end of the exchange, with negotiation and copies, over all steps.

The model puts gradients and the times at which they were ready (measured), and a line for the time of an exchange
(measured or fitted), into the overlap model of `dlbench.costs.overlap`: one exchange at a time, each as soon as its
gradients are there and the one before is through. Of all ways to merge neighbouring gradients into messages the best
one leaves the least after the backward pass. A line fitted to a run's own messages leaves out what they waited for
stragglers. Other orders, several channels, and cores that messages take from computing are not in the model. Where a
run did better than the model's best, the model is contradicted, and gives no bound.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlbench.costs import overlap
from dlbench.costs.fit.least_errors import fit_line
from dlbench.reading.measures import PARTS
from dlbench.reading.scaling import Group, Point
from dlbench.reading.table import RunTable
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.report.wording import number_text, ranks_text, runs_text, value_text
from dlbench.specs.collectives.network import LineCost
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey, pairing
from dlbench.units import format_seconds

MIN_SIZES = 3
"""Different sizes of messages that a line needs: two always lie on one."""
MIN_RATIO = 4.0
"""Largest over smallest of these sizes: with less, start-up and rate cannot be separated."""

ROUNDING = 1e-6
"""Of seconds that a record holds."""

CONTRADICTED = "model contradicted by measurement"
"""Why there is no bound where a run did better than the model's best."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """What ran: not what was asked for."""

    carrier: str
    by: str
    """Who grouped gradients into messages and chose the exchange: `dlbench`, `Horovod`, `PyTorch DDP`."""
    exchange: str
    fusion: str
    wire: str
    groups: str
    """In words: `2 groups of 4 ranks`."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The least that the best merging would leave after the backward pass, by the overlap model; means over runs."""

    line: str
    """The cost line of the run that stands for the point, in words."""
    startup_s: float
    per_byte_s: float
    is_fitted: bool
    """Whether the line was fitted to the run's own messages, instead of measured apart from them."""
    best_exposed: Estimate
    """The least message time after the backward pass of any merging, seconds per step; no more than measured."""
    num_messages: Estimate
    """Messages of that merging."""
    as_ran: Estimate | None
    """The model's time for the messages as they ran, to set beside the measured one, seconds per step. None where their
    readiness was not measured."""
    compute_s: float
    """Mean step of the baseline for the same samples per rank, without its exchange if it has any, seconds."""
    efficiency: Estimate
    """Scaling efficiency if nothing but that were lost (fraction): the baseline's step over the same with what is left;
    from the measured one to 1."""
    waiting: Estimate
    """What rank 0 waited for stragglers, taken out of a fitted line, seconds per step."""


@dataclass(frozen=True, kw_only=True)
class ExchangePoint:
    """The gradient exchange at one rank count: counts are medians over the runs that record it, times means."""

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
    """Messages under way, seconds per step, as the following three."""
    exposed: Estimate | None
    """Of it after the backward pass."""
    hidden: Estimate | None
    """Of it during the backward pass."""
    backward: Estimate | None
    wire_overflows: int
    """Of all runs."""
    density: Estimate | None
    dense_switches: int
    """Of all runs."""
    evidence: tuple[str, ...]
    """How all this is known, each way once."""
    window: str
    """Steps whose messages were timed, in words."""
    efficiency: Estimate
    """Measured, of the scaling point."""
    prediction: Prediction | None
    why: str
    """Why there is no prediction, in a phrase; empty where there is one."""
    cores: str
    """What is known of the cores that communication takes from computing, in a sentence; empty on devices."""
    timeline: tuple[Message, ...]
    """Messages of the run whose communication time is the median."""
    timeline_run: str
    timeline_backward_s: float | None
    run_ids: tuple[str, ...]


def exchange_points(group: Group, table: RunTable) -> tuple[ExchangePoint, ...]:
    """The exchange of every point with more than one rank whose runs record it, by rank count."""
    runs = {run.plan.run_id: run for run in group.runs}
    found = []
    for point in group.points:
        recorded = [(runs[run_id], result) for run_id in point.run_ids if (result := _exchange(runs[run_id]))]
        if point.ranks > 1 and recorded:
            found.append(_point(point, group.baseline, recorded, table))
    return tuple(found)


def _exchange(run: Run) -> ExchangeResult | None:
    return None if run.record is None else run.record.exchange


def _point(
    point: Point, baseline: Point, recorded: Sequence[tuple[Run, ExchangeResult]], table: RunTable
) -> ExchangePoint:
    results = [result for _, result in recorded]
    run, sample = _typical(recorded)
    prediction, why = _predict(point, baseline, recorded, table, sample)

    def over(pick: Callable[[ExchangeResult], float | None], unit: str) -> Estimate | None:
        return median_estimate(known, unit) if (known := _known(recorded, table, pick)) else None

    def mean(pick: Callable[[ExchangeResult], float | None]) -> Estimate | None:
        # What is under way during and after the backward pass must sum.
        return mean_estimate(known, "s") if (known := _known(recorded, table, pick)) else None

    windows = sorted({result.window_steps for result in results})
    return ExchangePoint(
        ranks=point.ranks,
        nodes=point.nodes,
        ways=tuple(dict.fromkeys(_way(run, result) for run, result in recorded)),
        num_messages=over(lambda result: float(len(result.messages)) or None, "messages"),
        message_bytes=over(
            lambda result: float(sum(m.num_bytes for m in result.messages)) if result.messages else None, "bytes"
        ),
        bytes_inside=over(lambda result: result.bytes_inside, "bytes"),
        bytes_across=over(lambda result: result.bytes_across, "bytes"),
        communication=mean(lambda result: result.communication_s),
        exposed=mean(lambda result: result.exposed_s),
        hidden=mean(lambda result: result.hidden_s),
        backward=mean(lambda result: result.backward_s),
        wire_overflows=sum(result.wire_overflows for result in results),
        density=over(lambda result: result.density, "fraction"),
        dense_switches=sum(result.dense_switches for result in results),
        evidence=tuple(dict.fromkeys(result.evidence for result in results)),
        window=f"{' to '.join(map(str, dict.fromkeys((windows[0], windows[-1]))))} steps of each run",
        efficiency=point.efficiency,
        prediction=prediction,
        why=why,
        cores=_cores(run, sample),
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


def _way(run: Run, result: ExchangeResult) -> Way:
    groups = "1 group" if result.num_groups == 1 else f"{result.num_groups} groups"
    return Way(
        carrier=result.carrier,
        by="dlbench" if result.by == "dlbench" else run.plan.engine.kind.title,
        exchange=result.exchange,
        fusion=result.fusion,
        wire=result.wire,
        groups=f"{groups} of {ranks_text(result.group_size)}",
    )


def _known(
    recorded: Sequence[tuple[Run, ExchangeResult]], table: RunTable, pick: Callable[[ExchangeResult], float | None]
) -> dict[RunKey, float]:
    """Of the runs that have this value."""
    values = {table.keys[run.plan.run_id]: pick(result) for run, result in recorded}
    return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class _OneRun:
    """The model's numbers for one run."""

    line: LineCost
    is_fitted: bool
    best_s: float
    """After the backward pass, by the best merging."""
    measured_s: float | None
    num_messages: int
    as_ran_s: float | None


def _predict(
    point: Point,
    baseline: Point,
    recorded: Sequence[tuple[Run, ExchangeResult]],
    table: RunTable,
    sample: ExchangeResult,
) -> tuple[Prediction | None, str]:
    found: dict[RunKey, _OneRun] = {}
    waits = table.parts["exchange_wait_first"]
    waited = {table.keys[run.plan.run_id]: float(waits.loc[run.plan.run_id]) for run, _ in recorded}
    for run, result in recorded:
        key = table.keys[run.plan.run_id]
        one = _one_run(point, result, waited[key])
        if isinstance(one, str):
            return None, one
        found[key] = one
    runs = list(found.values())
    better = sum(one.measured_s is not None and one.measured_s < one.best_s * (1 - ROUNDING) for one in runs)
    if better:
        return (
            None,
            f"{CONTRADICTED}: {better} of {runs_text(len(runs))} left less after the backward pass than its best",
        )
    typical = runs[next(i for i, (_, result) in enumerate(recorded) if result is sample)]
    best = {key: one.best_s for key, one in found.items()}
    as_ran = {key: one.as_ran_s for key, one in found.items() if one.as_ran_s is not None}
    efficiency, compute = _efficiency(point, baseline, best, table)
    if efficiency.value < point.efficiency.value:
        return None, f"{CONTRADICTED}: it allows {value_text(efficiency)} efficiency, less than was measured"
    if efficiency.value > 1:
        return None, "no bound: the baseline's own exchange takes longer than the model's least"
    return (
        Prediction(
            line=_line_text(typical.line),
            startup_s=typical.line.startup_s,
            per_byte_s=typical.line.per_byte_s,
            is_fitted=typical.is_fitted,
            best_exposed=mean_estimate(best, "s"),
            num_messages=median_estimate({key: float(one.num_messages) for key, one in found.items()}, "messages"),
            as_ran=mean_estimate(as_ran, "s") if len(as_ran) == len(runs) else None,
            compute_s=compute,
            efficiency=_within(efficiency, point.efficiency.value),
            waiting=mean_estimate(waited, "s"),
        ),
        "",
    )


def _within(efficiency: Estimate, least: float) -> Estimate:
    """The same with an interval that ends at the measured efficiency and at 1, as the value does."""
    if efficiency.low is None or efficiency.high is None:
        return efficiency
    return dataclasses.replace(efficiency, low=max(efficiency.low, least), high=min(efficiency.high, 1.0))


def _efficiency(point: Point, baseline: Point, left: Mapping[RunKey, float], table: RunTable) -> tuple[Estimate, float]:
    """The model's efficiency, runs of the point against the baseline's in pairs where they are; and computing, seconds.

    With several ranks as baseline their exchange is no computing; one rank has none.
    """
    work = point.batch_per_rank / baseline.batch_per_rank
    parts = table.parts.loc[list(baseline.run_ids)]
    own = parts[[name for name in PARTS if name != "exchange"]].sum(axis=1) * work
    whole = parts[list(PARTS)].sum(axis=1) * work
    ideal = {table.keys[run_id]: float(whole.loc[run_id]) for run_id in baseline.run_ids}
    compute = {table.keys[run_id]: float(own.loc[run_id]) for run_id in baseline.run_ids}
    mean = statistics.fmean(compute.values())
    paired = set(pairing(ideal, left).keys)
    steps = {key: (compute[key] if key in paired else mean) + seconds for key, seconds in left.items()}
    return ratio_estimate(ideal, steps, "fraction"), mean


def _cores(run: Run, result: ExchangeResult) -> str:
    """What communication takes from the ranks' cores, as far as it is known."""
    record, cores = run.record, run.plan.layout.cores_per_rank
    if record is None or not record.ranks[0].device.startswith("cpu"):
        return ""
    who = "dlbench's thread of exchange" if result.by == "dlbench" else run.plan.engine.kind.thread
    during = "an unknown time" if result.hidden_s is None else number_text(result.hidden_s, "s")
    most = "its one core, shared" if cores == 1 else f"one of its {cores} cores if it is busy all along"
    return f"{who} takes core time from a rank's backward pass ({most}) for {during} of a step, which no model here has"


def _line_text(line: LineCost) -> str:
    start = format_seconds(line.startup_s) if line.startup_s else "0 s"
    return f"{line.name}: {start} per message and {format_seconds(line.per_byte_s * 2**20)} per MiB"


def _one_run(point: Point, result: ExchangeResult, waiting_s: float) -> _OneRun | str:
    """The model's numbers, or why there are none."""
    if not result.gradients:
        return "not measured: the runs do not record when each gradient was ready"
    lines = measured_lines(result, point.ranks)
    fitted = None if lines else fitted_line(result.messages, point.ranks, result.exchange, waiting_s=waiting_s)
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
        measured_s=result.exposed_s,
        num_messages=num_messages,
        as_ran_s=_as_ran(result.messages, line, backward),
    )


def _as_ran(messages: Sequence[Message], line: LineCost, backward_s: float) -> float | None:
    """The model's time after the backward pass for the messages as they were."""
    ready = [message.ready_s for message in messages if message.ready_s is not None]
    if not messages or len(ready) < len(messages):
        return None
    sizes = [message.num_bytes for message in messages]
    return overlap.exposed([1] * len(sizes), sizes, ready, line, backward_s)


def measured_lines(result: ExchangeResult, ranks: int) -> list[LineCost]:
    """Lines that the run measured or was given, for its rank count; they count bytes of gradients in any format."""
    return [line for line in result.costs if line.ranks == ranks]


def fitted_line(messages: Sequence[Message], ranks: int, name: str, *, waiting_s: float = 0.0) -> LineCost | None:
    """The line through the times of a run's own messages; None where they do not determine one.

    Args:
        messages: of a step, in the order of sending.
        ranks: of the run.
        name: of the exchange.
        waiting_s: what this rank waited for stragglers in a step. A message that began as soon as it was ready holds
            it; one that had to wait for the message before it does not, because that one waited already.
    """
    timed = [(one.num_bytes, seconds) for one, seconds in _without_waiting(messages, waiting_s) if seconds > 0]
    sizes = [size for size, _ in timed]
    if len(set(sizes)) < MIN_SIZES or max(sizes) / min(sizes) < MIN_RATIO:
        return None
    return fit_line(f"{name}, from its own messages", ranks, sizes, [seconds for _, seconds in timed])


def _without_waiting(messages: Sequence[Message], waiting_s: float) -> Iterator[tuple[Message, float]]:
    free = -math.inf
    for one in messages:
        if not one.exchange_s or not one.num_bytes:
            continue
        is_queued = one.ready_s is not None and one.ready_s < free
        yield one, one.exchange_s - (0.0 if is_queued else waiting_s)
        if one.start_s is not None:
            free = one.start_s + one.exchange_s
