"""A setting of a sweep: its figures and verdict, whether it is the default, its arithmetic and costs; for Horovod's
autotuner the cost of its search, and when that is paid back.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from dlbench.analysis.scaling import last_loss, local_sgd_settings
from dlbench.analysis.table import RunTable
from dlbench.records.exchange import AutotuneResult
from dlbench.records.scan import Run
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import column, times_cell
from dlbench.report.wording import figure_text, percent
from dlbench.specs.choices import why_inert
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.plan import value_text as as_option
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Wording
from dlbench.stats.verdict_words import LADDER_STEP, SETTING, SETTING_TO_TARGET
from dlbench.units import format_bytes, format_number, format_seconds

_DEFAULTS_KNOWN = ("sync.", "engine.horovod.", "engine.ddp.", "engine.fsdp.", "engine.pipeline.")
"""Keys with a default of dlbench."""

_TRAINING = ("train.", "model.", "data.")  # Keys that change the training.
_SHARED = (
    *("fsdp", "zero-1", "tensor", "fsdp+tensor", "pipeline", "data+pipeline", "spatial", "data+spatial"),
    *("local-sgd", "asynchronous"),
)
"""Strategies whose loss is compared with that of replicas."""

_CHANGE_LOSS = ("sync.wire", "sync.average_", "engine.")  # Keys of arithmetic and strategy.
_SAME_NUMBERS = ("train.recompute", "train.swap", "train.memory.", "train.optimizer_state")
"""Keys of training that change where activations and state are stored, and no number that is computed."""

SettingWord = Literal[
    "baseline",
    "faster",
    "faster per step",
    "slower",
    "equal",
    "undecided",
    "insufficient",
    "target missed",
    "no figure",
]
"""Against the baseline, in time to the target if runs train to one, else in throughput. faster per step: ranks train
separately, so that their updates are not those of the baseline."""

COSTS = (  # In which strategies differ.
    *("memory_bytes", "step_bytes", "packing_s", "carried_s", "merging_s", "gather_s"),
    *("bubble", "ideal_bubble", "stage_imbalance"),
)


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
    """Returns the search in the runs of a setting, None if there was none; `rate_base` is in samples per second."""
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
        return "; ".join((*parts, "cost of the search unknown"))
    parts.append(f"the search cost {figure_text(autotune.cost)}")
    if autotune.break_even_steps is None:
        return "; ".join((*parts, "never paid back: a step is no faster than at the baseline"))
    gain = f"{format_seconds(autotune.gain_s or 0.0)} per step"
    if not is_faster:
        gain += ", a gain that is not certain"
    return "; ".join((*parts, f"paid back after {format_number(autotune.break_even_steps, 3)} steps ({gain})"))


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss after equal samples, means over ranks, medians over runs."""

    own: Estimate | None = field(metadata=column("Loss after equal samples", "loss", missing="not finite"))
    """None if it is not finite in some run."""
    reference: Estimate | None  # With plain arithmetic and replicas, or else of the baseline.
    reference_label: str
    difference: Estimate | None = field(metadata=column("Difference", "loss_difference"))
    why: str  # Why there is no reference; empty if there is one.


@dataclass(frozen=True, kw_only=True)
class SweptSetting:
    """One combination of the swept keys at one rank count."""

    values: tuple[tuple[str, str], ...]
    label: str = field(metadata=column(name="setting"))  # The values alone, in the order of the keys.
    is_baseline: bool
    throughput: Estimate | None = field(metadata=column("Throughput", "throughput_per_s"))  # Per second.
    ratio: Estimate | None = field(metadata=column("Over the baseline", text=times_cell, is_brief=True))
    """Its throughput over the baseline's, over the repeats that both have."""
    gain: Estimate | None = field(metadata=column("Over step before", text=times_cell, is_brief=True))
    """Of a ladder: throughput over that of the last step before it that has figures. The verdict is on this."""
    efficiency: Estimate | None = field(metadata=column("Efficiency"))  # Of a ladder's step.
    published: str = field(  # Of a ladder's step, with source.
        metadata=column("Published", text=lambda published: published.split(":")[0].split(" eff")[0])
    )
    num_reached: int | None  # Runs that met their target; None, as the next two, if runs measure speed.
    time: Estimate | None = field(metadata=column("Time to accuracy", "time_to_quality_s", is_brief=True))
    """Seconds to the target, geometric mean over runs; None unless every run that ended met it."""
    sooner: Estimate | None = field(metadata=column("Sooner by", "time_speedup", text=times_cell, is_brief=True))
    """The baseline's time over this one's, over the repeats that both have."""
    is_faster_per_step: bool  # Whether its throughput is higher for certain.
    adjusted_p: float | None  # Of the ratio that decides, after Holm over all comparisons; None at the baseline.
    verdict: SettingWord
    outcome: str = field(metadata={HIDDEN: False})  # Key of `verdict` in `dlbench.stats.verdict`.
    num_runs: int = field(metadata=column("Runs", "runs", is_brief=True))
    num_planned: int = field(metadata=column(name="planned_runs"))  # Runs of the series that were to measure it.
    why: str  # Why the first run without a figure has none; empty if all have one.
    changes: tuple[str, ...] = field(metadata=column(value=" | ".join))  # Changes of the arithmetic, in words.
    inert: tuple[str, ...] = field(metadata=column(value=" | ".join))  # Its settings without effect.
    autotune: Autotune | None
    losses: Losses | None  # None if arithmetic and strategy are those of the reference.
    strategy: str  # How ranks share the work, e.g. data, fsdp.
    redraws_dropout: bool  # Whether dropout masks differ from those on one rank, as heads are shared.
    memory_bytes: float | None = field(metadata=column("Memory per rank", text=format_bytes, is_brief=True))
    """Of the rank that held most: tensors at the peak of a step, else the memory of its GPU's allocator."""
    step_bytes: float | None = field(metadata=column("Sent per rank and step", text=format_bytes))
    packing_s: float | None = field(metadata=column("Selecting or casting", unit="s"))
    """Seconds of a step's messages before the carrier has them, as the next two while it has them and afterwards."""
    carried_s: float | None = field(metadata=column("On the wire", unit="s"))
    merging_s: float | None = field(metadata=column("Merging", unit="s"))
    gather_s: float | None = field(metadata=column("Waiting for parameters", unit="s"))  # Per step.
    bubble: float | None = field(metadata=column("Bubble", text=percent))  # Share of the passes that stages wait.
    ideal_bubble: float | None = field(metadata=column("(p-1)/(m+p-1)", text=percent))  # That of equal stages.
    stage_imbalance: float | None = field(metadata=column("Longest stage over mean", text="{:.3f}".format))
    options: str  # The options of `dlbench run` that ask for it; keys that act in no run of it are left out.
    run_ids: tuple[str, ...]

    @property
    def decides(self) -> Estimate | None:
        """The ratio to the baseline that the verdict is about."""
        return self.ratio if self.num_reached is None else self.sooner

    @property
    def answer(self) -> Wording:
        if self.gain is not None:
            return LADDER_STEP[self.outcome]
        if self.num_reached is None:
            return SETTING[self.outcome]
        return SETTING_TO_TARGET[self.outcome]

    @property
    def verdict_title(self) -> str:
        """The verdict in a sentence; with a target it says too that a step is faster."""
        text = self.answer.in_sentence
        is_to_target = self.gain is None and self.num_reached is not None
        if is_to_target and self.is_faster_per_step and self.outcome in ("worse", "target missed"):
            return f"faster per step, {text}"
        return text


def value_text(key: str, value: AxisValue) -> str:
    """Returns a swept value for people, e.g. ``64 MiB``, ``on``, ``none``."""
    if value is True:
        return "on"
    if value is False:
        return "off"
    if value is None:
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return as_option(key, value)


def label(values: Mapping[str, AxisValue]) -> str:
    """Returns the values of a setting, in the order of the keys."""
    return ", ".join(value_text(key, value) for key, value in sorted(values.items()))


def short_keys(keys: Sequence[str]) -> list[str]:
    """Returns keys as column titles: their last word, or whole keys if two of these would be the same."""
    titles = [key.rpartition(".")[2] for key in keys]
    if "engine.name" in keys:
        titles[keys.index("engine.name")] = "engine"
    return list(keys) if len(set(titles)) < len(titles) else titles


def options(plan: RunPlan) -> str:
    """Returns the options of `dlbench run` for a plan's setting; keys that do not act in it are left out."""
    axes = plan.series.axes
    return " ".join(f"--set {shlex.quote(f'{key}={as_option(key, axes[key])}')}" for key in sorted(acting_keys(plan)))


def acting_keys(plan: RunPlan) -> frozenset[str]:
    """Returns the swept keys that act in this run; nothing in it reads the others."""
    return frozenset(key for key in plan.series.axes if not why_inert(key, plan))


def is_default(plan: RunPlan, firsts: Mapping[str, AxisValue]) -> bool:
    """Returns whether every swept key that acts is at its default, or at its first value if dlbench has no default."""
    for key, value in plan.series.axes.items():
        if not key.startswith(_DEFAULTS_KNOWN):
            if repr(value) != repr(firsts[key]):
                return False
        elif not _at_default(plan, key):
            return False
    return True


def _at_default(plan: RunPlan, key: str) -> bool:
    # A first bucket of DDP is smaller by default than by that size, so that the two are not the same there.
    if key == "sync.fusion" and plan.engine.name == "horovod" and plan.sync.fusion == plan.engine.kind.fusion:
        return True
    section: Any = plan
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    return bool(getattr(section, name) == type(section).model_fields[name].default)


def changed_arithmetic(plan: RunPlan) -> tuple[str, ...]:
    """Returns in words how the arithmetic differs from a plain fp32 exchange; empty for steps of a ladder."""
    if plan.series.step:
        return ()
    changes = []
    if "sync.wire" in acting_keys(plan) and plan.sync.wire != "fp32":
        changes.append(f"wire {plan.sync.wire}")
    every = plan.sync.average_every
    if every is not None and plan.layout.ranks > 1:
        changes.append(f"average every {every} updates")
    keys = sorted(plan.series.axes)
    changes += [key for key in keys if key.startswith(_TRAINING) and not key.startswith(_SAME_NUMBERS)]
    return tuple(changes)


def costs(runs: Sequence[Run], table: RunTable) -> dict[str, float | None]:
    """Returns `COSTS` by field of `SweptSetting`, medians over the runs with figures."""
    values: dict[str, list[float]] = {name: [] for name in COSTS}
    for run in runs:
        record, causes = run.record, table.causes.get(run.plan.run_id)
        assert record is not None
        run_costs: dict[str, float | None] = {"memory_bytes": record.held_bytes}
        if record.bubble is not None:
            run_costs |= {"bubble": record.bubble, "stage_imbalance": record.stage_imbalance}
            run_costs["ideal_bubble"] = run.plan.engine.pipeline.bubble()
        exchange = record.exchange
        if exchange is not None:
            packing_s, merging_s = exchange.packing_s, exchange.merging_s
            run_costs |= {"step_bytes": exchange.sent_bytes, "packing_s": packing_s, "merging_s": merging_s}
            if exchange.communication_s is not None and exchange.by == "dlbench":
                run_costs["carried_s"] = max(0.0, exchange.communication_s - (packing_s or 0.0) - (merging_s or 0.0))
        if causes is not None and "gather" not in causes.not_measured:
            run_costs["gather_s"] = causes.seconds["gather"]
        for name, value in run_costs.items():
            if value is not None:
                values[name].append(value)
    medians = {name: median(numbers) for name, numbers in values.items() if numbers}
    return {name: medians.get(name) for name in COSTS}


def losses(runs: Sequence[Run], all_runs: Sequence[Sequence[Run]], table: RunTable) -> Losses | None:
    """Returns the loss of a setting with changed arithmetic or a shared model, with a reference of `all_runs`."""
    if not runs or _is_plain(runs[0].plan):
        return None
    losses_by_key = {table.repeat_key(run): last_loss(run) for run in runs}
    own, why = _median(losses_by_key), "no run of replicas with fp32"
    without_reference = Losses(own=own, reference=None, reference_label="", difference=None, why=why)
    # The setting that differs in these keys alone; else the first that is plain, or trains as those do.
    in_fp32 = [setting for setting in all_runs if setting and setting[0].plan.sync.wire == "fp32"]
    plain = [setting for setting in in_fp32 if _is_plain(setting[0].plan)]
    if not plain:
        plain = [setting for setting in in_fp32[:1] if not local_sgd_settings(setting[0].plan)]
    if not plain:
        return without_reference
    equal_but_loss = [setting for setting in plain if _other_axes(setting) == _other_axes(runs)]
    reference = [*equal_but_loss, *plain][0]
    if reference is runs:
        return None
    base = {table.repeat_key(run): last_loss(run) for run in reference}
    samples = {run.record.steps * run.plan.global_batch for run in (*runs, *reference) if run.record is not None}
    if len(samples) > 1:
        return replace(without_reference, why=f"unequal samples: {', '.join(map(str, sorted(samples)))}")
    differences: dict[RunKey, float | None] = {}
    for key, loss in losses_by_key.items():
        if key in base:
            base_loss = base[key]
            differences[key] = None if loss is None or base_loss is None else loss - base_loss
    return Losses(
        own=own,
        reference=_median(base),
        reference_label=label(reference[0].plan.series.axes),
        difference=_median(differences),
        why="",
    )


def _is_plain(plan: RunPlan) -> bool:
    return plan.sync.wire == "fp32" and plan.strategy not in _SHARED


def _other_axes(runs: Sequence[Run]) -> dict[str, AxisValue]:
    return {key: value for key, value in runs[0].plan.series.axes.items() if not key.startswith(_CHANGE_LOSS)}


def _median(losses_by_key: Mapping[RunKey, float | None]) -> Estimate | None:
    if None in losses_by_key.values():
        return None
    return of_known(median_estimate, losses_by_key, "loss")
