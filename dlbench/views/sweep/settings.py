"""One setting of a sweep beside its speed: whether it is the default, what it computes, what its tuning cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dlbench.records.exchange import AutotuneResult
from dlbench.records.record import Record
from dlbench.records.scan import Run
from dlbench.specs.inert import INERT
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.sync import SyncSpec
from dlbench.stats.estimates import Estimate, median_estimate

_DEFAULTS_KNOWN = ("sync.", "engine.horovod.", "engine.ddp.")
"""Keys whose default is dlbench's own. Those of a workload or system are in files that a plan no longer names."""
_TRAINING = ("train.", "model.", "data.")
"""Keys that change what is trained."""
_WIRE = frozenset({"sync.wire", "engine.horovod.compression"})
"""Keys that change the format on the wire; where all settings share one, nothing changes."""


@dataclass(frozen=True, kw_only=True)
class Autotuned:
    """Horovod's autotuner as one contestant: what its search cost, and when that is paid back."""

    num_runs: int
    planned_steps: int
    settled_step: float | None
    """Median over runs; None where it settled in none."""
    num_finished: int
    """Runs in which it had settled before the measured steps."""
    evaluations: float
    """Settings it tried; median over runs."""
    cost_s: Estimate | None
    """Time that the search cost beyond as many steps afterwards, seconds; None where no run tells."""
    chosen: tuple[tuple[float | None, float | None], ...]
    """Fusion threshold (bytes) and cycle time (ms) that it chose, each pair once."""
    gain_s: float | None
    """Seconds a step that the tuned setting is faster than the baseline; negative where it is slower."""
    break_even_steps: float | None
    """Steps after which the search is paid back; None: never, or not known."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss after equal steps, means over ranks, medians over runs."""

    own: Estimate | None
    """None where it is not finite in some run."""
    reference: Estimate | None
    """Of the same setting with fp32 on the wire, or else of the baseline; None where there is none to compare with."""
    reference_values: Mapping[str, AxisValue]
    """Which setting that is."""
    difference: Estimate | None
    """Own - reference, by repeat."""
    why: str
    """Why there is nothing to compare with; empty where there is."""


def acting_keys(plan: RunPlan) -> frozenset[str]:
    """Swept keys that act in this run; the others are read by nothing in it."""
    return frozenset(
        key for key in plan.series.axes if all(acts(plan) for prefix, acts, _ in INERT if key.startswith(prefix))
    )


def is_default(plan: RunPlan, firsts: Mapping[str, AxisValue]) -> bool:
    """Whether every swept key that acts is at its default.

    Args:
        plan: the setting.
        firsts: the first swept value of each key, which stands for the default where dlbench has none of its own
            (the engine, what is trained, the system).
    """
    for key, value in plan.series.axes.items():
        if not key.startswith(_DEFAULTS_KNOWN):
            if repr(value) != repr(firsts[key]):
                return False
        elif not _at_default(plan, key):
            return False
    return True


def _at_default(plan: RunPlan, key: str) -> bool:
    if key == "sync.fusion":
        # `auto` and `engine` are the same where the engine exchanges.
        return plan.sync.fusion_in_force == SyncSpec().fusion_in_force or plan.sync.fusion == "auto"
    section: Any = plan
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    return bool(getattr(section, name) == type(section).model_fields[name].default)


def changed_arithmetic(plan: RunPlan) -> tuple[str, ...]:
    """What this setting computes otherwise than plain fp32 exchange of the workload as it stands, in words."""
    is_swept = not _WIRE.isdisjoint(acting_keys(plan))
    wire = (f"wire {plan.wire}",) if is_swept and plan.wire != "fp32" else ()
    return (*wire, *sorted(key for key in plan.series.axes if key.startswith(_TRAINING)))


def losses(runs: Sequence[Run], all_runs: Sequence[Sequence[Run]]) -> Losses | None:
    """The loss of a setting that changes the arithmetic of the exchange, beside fp32's.

    Args:
        runs: the setting's runs with figures.
        all_runs: runs with figures of the cell, by setting, this one and the baseline among them.
    """
    if not runs or not any(text.startswith("wire ") for text in changed_arithmetic(runs[0].plan)):
        return None
    own = {run.plan.series.repeat: _loss(run) for run in runs}
    reference = _plain_twin(runs, all_runs)
    nothing = Losses(
        own=_median(own.values()), reference=None, reference_values={}, difference=None, why="no run with fp32"
    )
    if reference is None:
        return nothing
    others = {run.plan.series.repeat: _loss(run) for run in reference}
    steps = {run.record.steps for run in (*runs, *reference) if run.record is not None}
    if len(steps) > 1:
        counts = ", ".join(sorted(str(count) for count in steps))
        return Losses(
            own=nothing.own, reference=None, reference_values={}, difference=None, why=f"unequal steps: {counts}"
        )
    gaps = [_gap(own[repeat], others[repeat]) for repeat in sorted(own.keys() & others.keys())]
    return Losses(
        own=nothing.own,
        reference=_median(others.values()),
        reference_values=dict(sorted(reference[0].plan.series.axes.items())),
        difference=_median(gaps),
        why="",
    )


def _plain_twin(own: Sequence[Run], all_runs: Sequence[Sequence[Run]]) -> Sequence[Run] | None:
    """Runs with figures of the setting that differs in the wire format alone; else of the first with fp32."""
    plain = [runs for runs in all_runs if runs and runs[0].plan.wire == "fp32"]

    def others(runs: Sequence[Run]) -> dict[str, AxisValue]:
        return {key: value for key, value in runs[0].plan.series.axes.items() if key not in _WIRE}

    twins = [runs for runs in plain if others(runs) == others(own)]
    return next(iter([*twins, *plain]), None)


def _loss(run: Run) -> float | None:
    """Last loss, mean over ranks; None where it is not finite on one."""
    assert run.record is not None
    values = [rank.last_loss for rank in run.record.ranks]
    finite = [value for value in values if value is not None]
    return fmean(finite) if len(finite) == len(values) else None


def _gap(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _median(values: Iterable[float | None]) -> Estimate | None:
    found = list(values)
    finite = [value for value in found if value is not None]
    return median_estimate(finite) if finite and len(finite) == len(found) else None


def autotuned(runs: Sequence[Run], ratio: Estimate | None, rate_base: float) -> Autotuned | None:
    """What Horovod's autotuner did in the runs of a setting; None where it was off or nothing is told.

    Args:
        runs: the setting's runs with figures.
        ratio: its throughput over the baseline's.
        rate_base: the baseline's throughput, samples a second.
    """
    results = [result for run in runs if (result := _autotune_of(run.record)) is not None]
    if not results:
        return None
    costs = [result.cost_s for result in results if result.cost_s is not None]
    settled = [float(result.settled_step) for result in results if result.settled_step is not None]
    cost = median_estimate(costs) if costs else None
    gain = None
    if ratio is not None:
        step_s = runs[0].plan.global_batch / rate_base
        gain = step_s * (1 - 1 / ratio.value)
    return Autotuned(
        num_runs=len(results),
        planned_steps=results[0].planned_steps,
        settled_step=median_estimate(settled).value if settled else None,
        num_finished=sum(result.finished for result in results),
        evaluations=median_estimate([float(result.evaluations) for result in results]).value,
        cost_s=cost,
        chosen=tuple(dict.fromkeys((result.fusion_threshold_bytes, result.cycle_time_ms) for result in results)),
        gain_s=gain,
        break_even_steps=cost.value / gain if cost is not None and gain is not None and gain > 0 else None,
    )


def _autotune_of(record: Record | None) -> AutotuneResult | None:
    return record.exchange.autotune if record is not None and record.exchange is not None else None
