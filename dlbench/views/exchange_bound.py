"""A lower bound of the exposed exchange after the backward pass, by the overlap model.

Inputs are the measured times at which gradients were ready, and a line for the time of a message. The bound is that of
the best way to merge neighbouring gradients (`dlbench.perfmodels.lines`). If a run did better, the model is
contradicted: no bound.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from dlbench.analysis.measures import PARTS
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import np
from dlbench.perfmodels.lines import best_merge, fit_line, merged
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

MIN_SIZES = 3  # Different sizes of messages that a line needs: any two are on a line.
MIN_RATIO = 4.0  # Largest over smallest size: with less, start-up and rate cannot be separated.
ROUNDING = 1e-6  # Relative rounding error of the seconds in a record.
CONTRADICTED = "model contradicted by measurement"


@dataclass(frozen=True, kw_only=True)
class ExchangeBound:
    """The least time of messages after the backward pass with the best merging, by the model; means over runs."""

    line: str  # The cost of a message in the median run, in words.
    startup_s: float
    per_byte_s: float
    is_fitted: bool  # Whether the line was fitted to the run's own messages, instead of measured separately.
    best_exposed: Estimate = field(metadata=column(name="least_after_backward_s"))  # Seconds, of any merging.
    num_messages: Estimate = field(metadata=column(name="least_messages"))  # Messages of that merging.
    as_ran: Estimate | None = field(metadata=column(name="modelled_after_backward_s"))
    """The model's time after the backward pass for the messages that ran, seconds per step; None if it was not measured
    when they were ready."""
    compute_s: float  # Mean step of the baseline for the same samples per rank without exchange, seconds.
    efficiency: Estimate = field(metadata=column(name="least_efficiency"))  # If nothing else cost time (1).
    waiting: Estimate  # Waits of rank 0 for stragglers, which a fitted line excludes, seconds per step.


@dataclass(frozen=True, kw_only=True)
class RunBound:
    """The model's figures of one run."""

    line: LineCost
    is_fitted: bool
    best_s: float  # Seconds after the backward pass with the best merging.
    measured_s: float | None  # Measured seconds after the backward pass.
    num_messages: int  # Messages of the best merging.
    as_ran_s: float | None  # Modelled seconds after the backward pass of the messages that ran.


def exchange_bound(
    point: Point, baseline: Point, recorded: Recorded, table: RunTable, sample: ExchangeResult
) -> tuple[ExchangeBound | None, str, Estimate | None]:
    """Returns the bound of a point, why there is none, and the least after the backward pass, seconds per step."""
    bounds: dict[RunKey, RunBound] = {}
    waited_s: dict[RunKey, float] = {}
    sample_bound: RunBound | None = None
    for run, result in recorded:
        key = table.keys[run.plan.run_id]
        waited_s[key] = table.parts[run.plan.run_id]["exchange_wait_first"]
        bound = _run_bound(point, result, waited_s[key])
        if isinstance(bound, str):
            return None, bound, None
        bounds[key] = bound
        if result is sample:
            sample_bound = bound
    assert sample_bound is not None
    num_better = sum(
        bound.measured_s is not None and bound.measured_s < bound.best_s * (1 - ROUNDING) for bound in bounds.values()
    )
    if num_better:
        reason = (
            f"{num_better} of {runs_text(len(bounds))} took less time after the backward pass than the model's best"
        )
        return None, f"{CONTRADICTED}: {reason}", None
    best_s = {key: bound.best_s for key, bound in bounds.items()}
    least = mean_estimate(best_s, "s")
    efficiency, compute_s = _efficiency(point, baseline, best_s, table)
    if efficiency.value < point.efficiency.value:
        return None, f"{CONTRADICTED}: it allows {value_text(efficiency)} efficiency, less than was measured", None
    if efficiency.value > 1:
        return None, "no bound of efficiency: the baseline's exchange takes longer than the model's least", least
    if efficiency.low is not None and efficiency.high is not None:
        # The interval ends at the measured efficiency and at 1, as the value does.
        low = max(efficiency.low, point.efficiency.value)
        efficiency = dataclasses.replace(efficiency, low=low, high=min(efficiency.high, 1.0))
    as_ran = None
    as_ran_s = {key: bound.as_ran_s for key, bound in bounds.items() if bound.as_ran_s is not None}
    if len(as_ran_s) == len(bounds):
        as_ran = mean_estimate(as_ran_s, "s")
    num_messages = {key: float(bound.num_messages) for key, bound in bounds.items()}
    line = sample_bound.line
    startup = format_seconds(line.startup_s) if line.startup_s else "0 s"
    prediction = ExchangeBound(
        line=f"{line.name}: {startup} per message and {format_seconds(line.per_byte_s * 2**20)} per MiB",
        startup_s=line.startup_s,
        per_byte_s=line.per_byte_s,
        is_fitted=sample_bound.is_fitted,
        best_exposed=least,
        num_messages=median_estimate(num_messages, "messages"),
        as_ran=as_ran,
        compute_s=compute_s,
        efficiency=efficiency,
        waiting=mean_estimate(waited_s, "s"),
    )
    return prediction, "", least


def _efficiency(
    point: Point, baseline: Point, exposed_s: Mapping[RunKey, float], table: RunTable
) -> tuple[Estimate, float]:
    """Returns the model's efficiency, paired with the baseline's runs if possible, and the seconds of computing."""
    work = point.batch_per_rank / baseline.batch_per_rank
    ideal_s: dict[RunKey, float] = {}
    compute_s: dict[RunKey, float] = {}
    for run_id in baseline.run_ids:
        key, parts = table.keys[run_id], table.parts[run_id]
        ideal_s[key] = sum(parts[name] for name in PARTS) * work
        compute_s[key] = sum(parts[name] for name in PARTS if name != "exchange") * work
    mean_s = statistics.fmean(compute_s.values())
    paired = set(pairing(ideal_s, exposed_s).keys)
    steps_s = {key: (compute_s[key] if key in paired else mean_s) + seconds for key, seconds in exposed_s.items()}
    return ratio_estimate(ideal_s, steps_s, "fraction"), mean_s


def _run_bound(point: Point, result: ExchangeResult, waiting_s: float) -> RunBound | str:
    """Returns the model's figures of a run, or why there are none."""
    if not result.gradients:
        return "not measured: the runs do not record when each gradient was ready"
    # Lines that the run measured or was given, for its rank count; they are for bytes of gradients in any format.
    lines = [line for line in result.costs if line.ranks == point.ranks]
    is_fitted = not lines
    if is_fitted:
        fitted = fitted_line(result.of_gradients, point.ranks, result.exchange, waiting_s=waiting_s)
        if fitted is None:
            return (
                f"not measured: no cost of an exchange was fitted or given, and messages of fewer than {MIN_SIZES} "
                f"sizes (or within a factor of {MIN_RATIO:g}) do not determine a line"
            )
        lines.append(fitted)
    order = sorted(result.gradients, key=attrgetter("ready_s"))
    sizes = [gradient.num_bytes for gradient in order]
    ready_s = [gradient.ready_s for gradient in order]
    backward_s = result.backward_s or ready_s[-1]

    def exposed_s(sizes: Sequence[float], ready_s: Sequence[float], line: LineCost) -> float:
        return max(0.0, float(last_end(ready_s, [np.array(line.time(size)) for size in sizes])) - backward_s)

    candidates = []
    for line in lines:
        groups = best_merge(sizes, ready_s, line)
        candidates.append((exposed_s(*merged(groups, sizes, ready_s), line), len(groups), line))
    best_s, num_messages, line = min(candidates, key=itemgetter(0, 1))
    as_ran_s = None
    messages_ready_s = [message.ready_s for message in result.of_gradients if message.ready_s is not None]
    if messages_ready_s and len(messages_ready_s) == len(result.of_gradients):
        message_sizes = [message.num_bytes for message in result.of_gradients]
        as_ran_s = exposed_s(message_sizes, messages_ready_s, line)
    return RunBound(
        line=line,
        is_fitted=is_fitted,
        best_s=best_s,
        measured_s=result.exposed_s,
        num_messages=num_messages,
        as_ran_s=as_ran_s,
    )


def fitted_line(messages: Sequence[Message], ranks: int, name: str, *, waiting_s: float = 0.0) -> LineCost | None:
    """Returns the line through the times of a run's own messages; None if they do not determine one. The wait of this
    rank for stragglers (`waiting_s`) is in the time of messages that began as soon as they were ready.
    """
    sizes, times_s = [], []
    free_s = -math.inf  # Time at which the message before ended.
    for message in messages:
        if not message.exchange_s or not message.num_bytes:
            continue
        seconds = message.exchange_s
        if message.ready_s is None or message.ready_s >= free_s:
            seconds -= waiting_s
        if seconds > 0:
            sizes.append(message.num_bytes)
            times_s.append(seconds)
        if message.start_s is not None:
            free_s = message.start_s + message.exchange_s
    if len(set(sizes)) < MIN_SIZES or max(sizes) / min(sizes) < MIN_RATIO:
        return None
    return fit_line(f"{name}, from its own messages", ranks, sizes, times_s)
