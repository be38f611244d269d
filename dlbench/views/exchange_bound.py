"""The least that an exchange of gradients could leave after the backward pass, by the overlap model.

The model puts gradients and the times at which they were ready (measured), and a line for the time of an exchange
(measured or fitted), into the overlap model of `dlbench.perfmodels.overlap`: one exchange at a time, each as soon as
its gradients are there and the one before is through. Of all ways to merge neighbouring gradients into messages the
best one leaves the least after the backward pass. A line fitted to a run's own messages leaves out what they waited
for stragglers. Other orders, several channels, and cores that messages take from computing are not in the model. Where
a run did better than the model's best, the model is contradicted, and gives no bound.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlbench.analysis.measures import PARTS
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import np
from dlbench.perfmodels import overlap
from dlbench.perfmodels.lines import fit_line
from dlbench.projection.exchange import last_end
from dlbench.records.exchange import ExchangeResult, Message
from dlbench.records.scan import Run
from dlbench.report.table import column
from dlbench.report.wording import runs_text, value_text
from dlbench.specs.comm import LineCost
from dlbench.stats.estimates import Estimate, mean_estimate, median_estimate, ratio_estimate
from dlbench.stats.pairing import RunKey, pairing
from dlbench.units import format_seconds

Recorded = Sequence[tuple[Run, ExchangeResult]]

MIN_SIZES = 3  # Different sizes of messages that a line needs: two always lie on one.
MIN_RATIO = 4.0  # Largest over smallest of these sizes: with less, start-up and rate cannot be separated.
ROUNDING = 1e-6  # Of seconds that a record holds.
CONTRADICTED = "model contradicted by measurement"  # Where a run did better than the model's best, there is no bound.


@dataclass(frozen=True, kw_only=True)
class ExchangeBound:
    """The least that the best merging would leave after the backward pass, by the overlap model; means over runs."""

    line: str  # The cost line of the run that stands for the point, in words.
    startup_s: float
    per_byte_s: float
    is_fitted: bool  # Whether the line was fitted to the run's own messages, instead of measured apart from them.
    best_exposed: Estimate = field(metadata=column(name="least_after_backward_s"))
    """The least message time after the backward pass of any merging, seconds per step; no more than measured."""
    num_messages: Estimate = field(metadata=column(name="least_messages"))  # Messages of that merging.
    as_ran: Estimate | None = field(metadata=column(name="modelled_after_backward_s"))
    """The model's time for the messages as they ran, to compare with the measured one, seconds per step; None where
    their readiness was not measured."""
    compute_s: float  # Mean step of the baseline for the same samples per rank without exchange, seconds.
    efficiency: Estimate = field(metadata=column(name="least_efficiency"))
    """Scaling efficiency if nothing but that were lost (fraction): the baseline's step over the same with what is left;
    from the measured one to 1."""
    waiting: Estimate  # What rank 0 waited for stragglers, taken out of a fitted line, seconds per step.


@dataclass(frozen=True, kw_only=True)
class RunBound:
    """The model's numbers for one run."""

    line: LineCost
    is_fitted: bool
    best_s: float  # After the backward pass, by the best merging.
    measured_s: float | None
    num_messages: int
    as_ran_s: float | None


def exchange_bound(
    point: Point, baseline: Point, recorded: Recorded, table: RunTable, sample: ExchangeResult
) -> tuple[ExchangeBound | None, str, Estimate | None]:
    """Returns the bound of a point, why there is none, and the least after the backward pass, seconds per step.

    `sample`: the result of the run that stands for the point.
    """
    found: dict[RunKey, RunBound] = {}
    ids = [run.plan.run_id for run, _ in recorded]
    waited = {table.keys[run_id]: table.parts[run_id]["exchange_wait_first"] for run_id in ids}
    for run, result in recorded:
        key = table.keys[run.plan.run_id]
        one = _run_bound(point, result, waited[key])
        if isinstance(one, str):
            return None, one, None
        found[key] = one
    runs = list(found.values())
    better = sum(one.measured_s is not None and one.measured_s < one.best_s * (1 - ROUNDING) for one in runs)
    if better:
        less = f"{better} of {runs_text(len(runs))} left less after the backward pass than its best"
        return None, f"{CONTRADICTED}: {less}", None
    typical = runs[next(i for i, (_, result) in enumerate(recorded) if result is sample)]
    best = {key: one.best_s for key, one in found.items()}
    least = mean_estimate(best, "s")
    as_ran = {key: one.as_ran_s for key, one in found.items() if one.as_ran_s is not None}
    efficiency, compute = _efficiency(point, baseline, best, table)
    if efficiency.value < point.efficiency.value:
        return None, f"{CONTRADICTED}: it allows {value_text(efficiency)} efficiency, less than was measured", None
    if efficiency.value > 1:
        return None, "no bound of efficiency: the baseline's own exchange takes longer than the model's least", least
    if efficiency.low is not None and efficiency.high is not None:
        # The interval ends at the measured efficiency and at 1, as the value does.
        low = max(efficiency.low, point.efficiency.value)
        efficiency = dataclasses.replace(efficiency, low=low, high=min(efficiency.high, 1.0))
    line = typical.line
    start = format_seconds(line.startup_s) if line.startup_s else "0 s"
    prediction = ExchangeBound(
        line=f"{line.name}: {start} per message and {format_seconds(line.per_byte_s * 2**20)} per MiB",
        startup_s=line.startup_s,
        per_byte_s=line.per_byte_s,
        is_fitted=typical.is_fitted,
        best_exposed=least,
        num_messages=median_estimate({key: float(one.num_messages) for key, one in found.items()}, "messages"),
        as_ran=mean_estimate(as_ran, "s") if len(as_ran) == len(runs) else None,
        compute_s=compute,
        efficiency=efficiency,
        waiting=mean_estimate(waited, "s"),
    )
    return prediction, "", least


def _efficiency(point: Point, baseline: Point, left: Mapping[RunKey, float], table: RunTable) -> tuple[Estimate, float]:
    """The model's efficiency, runs of the point against the baseline's in pairs where they are; and computing, seconds.

    With several ranks as baseline their exchange is no computing; one rank has none.
    """
    work = point.batch_per_rank / baseline.batch_per_rank
    parts = {table.keys[run_id]: table.parts[run_id] for run_id in baseline.run_ids}
    ideal = {key: sum(own[name] for name in PARTS) * work for key, own in parts.items()}
    compute = {key: sum(own[name] for name in PARTS if name != "exchange") * work for key, own in parts.items()}
    mean = statistics.fmean(compute.values())
    paired = set(pairing(ideal, left).keys)
    steps = {key: (compute[key] if key in paired else mean) + seconds for key, seconds in left.items()}
    return ratio_estimate(ideal, steps, "fraction"), mean


def _run_bound(point: Point, result: ExchangeResult, waiting_s: float) -> RunBound | str:
    """The model's numbers, or why there are none."""
    if not result.gradients:
        return "not measured: the runs do not record when each gradient was ready"
    # Lines that the run measured or was given, for its rank count; they count bytes of gradients in any format.
    lines = [line for line in result.costs if line.ranks == point.ranks]
    fitted = None if lines else fitted_line(result.of_gradients, point.ranks, result.exchange, waiting_s=waiting_s)
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

    def left(sizes: Sequence[float], ready: Sequence[float], line: LineCost) -> float:
        return max(0.0, float(last_end(ready, [np.array(line.time(size)) for size in sizes])) - backward)

    tried = []
    for line in candidates:
        groups = overlap.best_merge(sizes, ready, line)
        tried.append((left(*overlap.merged(groups, sizes, ready), line), len(groups), line))
    best, num_messages, line = min(tried, key=lambda item: item[:2])
    # The model's time for the messages as they were.
    known = [message.ready_s for message in result.of_gradients if message.ready_s is not None]
    is_known = bool(known) and len(known) == len(result.of_gradients)
    return RunBound(
        line=line,
        is_fitted=not lines,
        best_s=best,
        measured_s=result.exposed_s,
        num_messages=num_messages,
        as_ran_s=left([message.num_bytes for message in result.of_gradients], known, line) if is_known else None,
    )


def fitted_line(messages: Sequence[Message], ranks: int, name: str, *, waiting_s: float = 0.0) -> LineCost | None:
    """The line through the times of a run's own messages; None where they do not determine one.

    `messages`: of a step, in the order of sending; `waiting_s`: what this rank waited for stragglers in a step. A
    message that began as soon as it was ready holds it; one that had to wait for the message before it does not,
    because that one waited already.
    """
    sizes, times_s = [], []
    free = -math.inf
    for one in messages:
        if not one.exchange_s or not one.num_bytes:
            continue
        is_queued = one.ready_s is not None and one.ready_s < free
        seconds = one.exchange_s if is_queued else one.exchange_s - waiting_s
        if seconds > 0:
            sizes.append(one.num_bytes)
            times_s.append(seconds)
        if one.start_s is not None:
            free = one.start_s + one.exchange_s
    if len(set(sizes)) < MIN_SIZES or max(sizes) / min(sizes) < MIN_RATIO:
        return None
    return fit_line(f"{name}, from its own messages", ranks, sizes, times_s)
