"""Horovod's autotuner as one contestant of a sweep: what its search cost, and when that is paid back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from dlbench.analysis.table import RunTable
from dlbench.records.exchange import AutotuneResult
from dlbench.records.scan import Run
from dlbench.report.wording import figure_text
from dlbench.stats.estimates import Estimate, median_estimate
from dlbench.units import format_bytes, format_number, format_seconds


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """What the search did in the runs of a setting."""

    num_runs: int
    num_finished: int  # Runs in which it had settled before the measured steps.
    planned_steps: int
    settled_step: float | None  # Median over runs; None where it settled in none.
    evaluations: float  # Settings it tried; median over runs.
    cost: Estimate | None  # What the search cost beyond as many steps afterwards, seconds; None: not recorded.
    chosen: tuple[str, ...]  # Fusion threshold and cycle time that it chose, in words, each pair once.
    gain_s: float | None  # Seconds per step by which the tuned setting is faster than the baseline; negative: slower.
    break_even_steps: float | None  # Steps after which the search is paid back; None: never, or not known.
    words: str


def autotuned(
    runs: Sequence[Run], table: RunTable, ratio: Estimate | None, rate_base: float, *, is_faster: bool
) -> Autotune | None:
    """Returns what Horovod's autotuner did in the runs of a setting; None where it was off or nothing is recorded.

    `ratio`: its throughput over the baseline's (`rate_base`, samples per second); `is_faster`: for certain.
    """
    by_run = {
        table.repeat_key(run): run.record.exchange.autotune
        for run in runs
        if run.record is not None and run.record.exchange and run.record.exchange.autotune
    }
    if not by_run:
        return None
    results = list(by_run.values())
    costs = {key: result.cost_s for key, result in by_run.items() if result.cost_s is not None}
    settled = [float(result.settled_step) for result in results if result.settled_step is not None]
    cost = median_estimate(costs, "s") if costs else None
    gain = None if ratio is None else runs[0].plan.global_batch / rate_base * (1 - 1 / ratio.value)
    found = Autotune(
        num_runs=len(results),
        num_finished=sum(result.finished for result in results),
        planned_steps=results[0].planned_steps,
        settled_step=median(settled) if settled else None,
        evaluations=median(float(result.evaluations) for result in results),
        cost=cost,
        chosen=tuple(dict.fromkeys(map(_chosen_text, results))),
        gain_s=gain,
        break_even_steps=cost.value / gain if cost is not None and gain is not None and gain > 0 else None,
        words="",
    )
    return replace(found, words=_words(found, is_faster=is_faster))


def _chosen_text(result: AutotuneResult) -> str:
    threshold, cycle = result.fusion_threshold_bytes, result.cycle_time_ms
    size = "an unknown threshold" if threshold is None else format_bytes(threshold)
    return f"{size} and {'an unknown cycle' if cycle is None else f'{cycle:.3g} ms'}"


def _words(found: Autotune, *, is_faster: bool) -> str:
    steps = f"{found.planned_steps:,} steps planned"
    if found.settled_step is not None:
        steps = f"settled at step {found.settled_step:,.0f} ({steps})"
    parts = [f"tried {found.evaluations:g} settings, {steps}"]
    if found.num_finished < found.num_runs:
        late = found.num_runs - found.num_finished
        parts.append(f"had not settled before the measured steps in {late} of {found.num_runs} runs")
    parts.append(f"chose {' or '.join(found.chosen)}")
    if found.cost is None:
        return "; ".join([*parts, "cost of the search unknown"])
    parts.append(f"the search cost {figure_text(found.cost)}")
    if found.break_even_steps is None:
        return "; ".join([*parts, "never paid back: a step is no faster than at the baseline"])
    gain = format_seconds(found.gain_s or 0.0)
    sure = "" if is_faster else ", a gain that is not certain"
    steps = f"{format_number(found.break_even_steps, 3)} steps"
    return "; ".join([*parts, f"paid back after {steps} ({gain} per step{sure})"])
