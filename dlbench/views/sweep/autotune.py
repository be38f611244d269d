"""Horovod's autotuner as a setting of a sweep: the cost of its search, and when that is paid back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from dlbench.analysis.table import RunTable
from dlbench.records.exchange import AutotuneResult
from dlbench.records.scan import Run
from dlbench.report.wording import figure_text
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.units import format_bytes, format_number, format_seconds


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """The autotuner's search in the runs of a setting."""

    num_runs: int
    num_finished: int  # Runs in which it had settled before the measured steps.
    planned_steps: int
    settled_step: float | None  # Median over runs; None where it settled in none.
    evaluations: float  # Settings it tried; median over runs.
    cost: Estimate | None  # Time of the search minus that of as many steps afterwards, seconds; None: not recorded.
    chosen: tuple[str, ...]  # Fusion threshold and cycle time that it chose, in words, each pair once.
    gain_s: float | None  # Seconds per step by which the tuned setting is faster than the baseline; negative: slower.
    break_even_steps: float | None  # Steps after which the search is paid back; None: never, or not known.
    words: str


def autotuned(
    runs: Sequence[Run], table: RunTable, ratio: Estimate | None, rate_base: float, *, is_faster: bool
) -> Autotune | None:
    """Returns the search of Horovod's autotuner in the runs of a setting; None if it was off or nothing is recorded.

    `ratio` is the setting's throughput over the baseline's (`rate_base`, samples per second).
    """
    by_run = {}
    for run in runs:
        if run.record is not None and run.record.exchange and run.record.exchange.autotune:
            by_run[table.repeat_key(run)] = run.record.exchange.autotune
    if not by_run:
        return None
    results = list(by_run.values())
    costs = {key: result.cost_s for key, result in by_run.items()}
    settled = [float(result.settled_step) for result in results if result.settled_step is not None]
    cost = of_known(median_estimate, costs, "s")
    gain_s = break_even_steps = None
    if ratio is not None:
        gain_s = runs[0].plan.global_batch / rate_base * (1 - 1 / ratio.value)
        if cost is not None and gain_s > 0:
            break_even_steps = cost.value / gain_s
    autotune = Autotune(
        num_runs=len(results),
        num_finished=sum(result.finished for result in results),
        planned_steps=results[0].planned_steps,
        settled_step=median(settled) if settled else None,
        evaluations=median(float(result.evaluations) for result in results),
        cost=cost,
        chosen=tuple(dict.fromkeys(map(_chosen_text, results))),
        gain_s=gain_s,
        break_even_steps=break_even_steps,
        words="",
    )
    return replace(autotune, words=_words(autotune, is_faster=is_faster))


def _chosen_text(result: AutotuneResult) -> str:
    threshold, cycle = "an unknown threshold", "an unknown cycle"
    if result.fusion_threshold_bytes is not None:
        threshold = format_bytes(result.fusion_threshold_bytes)
    if result.cycle_time_ms is not None:
        cycle = f"{result.cycle_time_ms:.3g} ms"
    return f"{threshold} and {cycle}"


def _words(autotune: Autotune, *, is_faster: bool) -> str:
    steps = f"{autotune.planned_steps:,} steps planned"
    if autotune.settled_step is not None:
        steps = f"settled at step {autotune.settled_step:,.0f} ({steps})"
    parts = [f"tried {autotune.evaluations:g} settings, {steps}"]
    num_late = autotune.num_runs - autotune.num_finished
    if num_late > 0:
        parts.append(f"had not settled before the measured steps in {num_late} of {autotune.num_runs} runs")
    parts.append(f"chose {' or '.join(autotune.chosen)}")
    if autotune.cost is None:
        parts.append("cost of the search unknown")
    else:
        parts.append(f"the search cost {figure_text(autotune.cost)}")
        if autotune.break_even_steps is None:
            parts.append("never paid back: a step is no faster than at the baseline")
        else:
            gain = f"{format_seconds(autotune.gain_s or 0.0)} per step"
            if not is_faster:
                gain += ", a gain that is not certain"
            parts.append(f"paid back after {format_number(autotune.break_even_steps, 3)} steps ({gain})")
    return "; ".join(parts)
