"""One setting of a sweep: its figures and verdict, whether it is the default, what it computes and what it costs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from dlbench.analysis.side_by_side import last_loss, trains_apart
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import column, times_cell
from dlbench.specs.choices import why_inert
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.plan import value_text as as_option
from dlbench.stats.estimates import Estimate, median_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Wording
from dlbench.stats.verdict_words import LADDER_STEP, SETTING, SETTING_TO_TARGET
from dlbench.units import format_bytes, format_seconds
from dlbench.views.sweep.autotune import Autotune

_DEFAULTS_KNOWN = ("sync.", "engine.horovod.", "engine.ddp.", "engine.fsdp.")
"""Keys whose default is dlbench's own. Those of a workload or system are in files that a plan no longer names."""
_TRAINING = ("train.", "model.", "data.")  # Keys that change what is trained.
_SHARED = ("fsdp", "zero-1", "tensor", "fsdp+tensor", "local-sgd")  # Strategies whose loss stands beside replicas'.
_CHANGE_LOSS = ("sync.wire", "sync.average_", "engine.")  # Keys of arithmetic and strategy.
_SAME_NUMBERS = ("train.recompute", "train.swap", "train.memory.", "train.optimizer_state")
"""Of them those that change where activations and state lie meanwhile, and no number that is computed."""
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
"""Against the baseline, in time to the target where runs train to one, else in throughput. faster per step: of ranks
that train apart, whose updates are not those of the baseline."""

COSTS = ("memory_bytes", "step_bytes", "packing_s", "carried_s", "merging_s", "gather_s")
"""Fields of `SweptSetting`: what strategies differ in besides time."""
_SECONDS: Mapping[str, Any] = {"text": lambda seconds: format_seconds(seconds) if seconds else "0 s"}


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss after equal samples, means over ranks, medians over runs."""

    own: Estimate | None = field(metadata=column("Loss after equal samples", "loss", missing="not finite"))
    """None where it is not finite in some run."""
    reference: Estimate | None
    """Of the same setting with plain arithmetic and replicas, or else of the baseline; None where there is none to
    compare with."""
    reference_label: str = field(metadata=column("That is", "reference", value=lambda found: found or None))
    difference: Estimate | None = field(metadata=column("Difference", "loss_difference"))
    why: str  # Why there is nothing to compare with; empty where there is.


@dataclass(frozen=True, kw_only=True)
class SweptSetting:
    """One combination of the swept keys at one rank count."""

    values: tuple[tuple[str, str], ...]
    label: str = field(metadata=column(name="setting"))  # The values alone, in the order of the keys.
    is_baseline: bool
    throughput: Estimate | None = field(metadata=column("Throughput", "throughput_per_s"))
    """Samples per second, geometric mean over runs."""
    ratio: Estimate | None = field(metadata=column("Over the baseline", text=times_cell, is_brief=True))
    """To the baseline's, over the repeats that both have."""
    gain: Estimate | None = field(metadata=column("Over step before", text=times_cell, is_brief=True))
    """Of a ladder: to the last step before it that has figures. The verdict is on this."""
    efficiency: Estimate | None = field(metadata=column("Efficiency"))
    """Of a ladder: share of linear scaling from the same step at the smallest rank count."""
    published: str = field(metadata=column("Published", text=lambda found: found.split(":")[0].split(" eff")[0]))
    """Of a ladder: what the step gained elsewhere, with its source."""
    num_reached: int | None  # Runs that met their target; None where runs measure speed, as the following three.
    time: Estimate | None = field(metadata=column("Time to accuracy", "time_to_quality_s", is_brief=True))
    """Seconds to the target, geometric mean over runs; None unless every run that ended met it."""
    sooner: Estimate | None = field(metadata=column("Sooner by", "time_speedup", text=times_cell, is_brief=True))
    """The baseline's time over this one's, over the repeats that both have."""
    is_faster_per_step: bool  # For certain.
    adjusted_p: float | None
    """Of the ratio that decides, after Holm over all comparisons of the report; None at the baseline."""
    verdict: SettingWord
    outcome: str = field(metadata={HIDDEN: False})
    """Key of `verdict` in the tables of `dlbench.stats.verdict_words`: of an outcome, or of a state without one."""
    num_runs: int = field(metadata=column("Runs", "runs", is_brief=True))
    num_planned: int = field(metadata=column(name="planned_runs"))  # Runs of the series that were to measure it.
    why: str  # Why the first of the others has no figure; empty where all have.
    changes: tuple[str, ...] = field(metadata=column(value=" | ".join))  # What is computed otherwise, in words.
    inert: tuple[str, ...] = field(metadata=column(value=" | ".join))
    """Settings of its runs that had no effect: it is not what its name says."""
    autotune: Autotune | None
    losses: Losses | None  # None where arithmetic and strategy are those of the reference.
    strategy: str  # What ranks share, e.g. data, fsdp.
    redraws_dropout: bool  # Heads that ranks share drop others than on one rank.
    memory_bytes: float | None = field(metadata=column("Memory per rank", text=format_bytes, is_brief=True))
    """Of the rank that held most: tensors at the peak of a step, else what its GPU's allocator held."""
    step_bytes: float | None = field(metadata=column("Sent per rank and step", text=format_bytes))
    packing_s: float | None = field(metadata=column("Selecting or casting", **_SECONDS))
    """Of a step's messages: before the carrier had them, while it had them, and after that."""
    carried_s: float | None = field(metadata=column("On the wire", **_SECONDS))
    merging_s: float | None = field(metadata=column("Merging", **_SECONDS))
    gather_s: float | None = field(metadata=column("Waiting for parameters", **_SECONDS))  # Per step.
    options: str  # The options of `dlbench run` that ask for it; keys that act in no run of it are left out.
    run_ids: tuple[str, ...]

    @property
    def decides(self) -> Estimate | None:
        """The ratio to the baseline that the verdict is of."""
        return self.ratio if self.num_reached is None else self.sooner

    @property
    def answer(self) -> Wording:
        """Returns the verdict in words: of a ladder's step on what it adds."""
        if self.gain is not None:
            return LADDER_STEP[self.outcome]
        return (SETTING if self.num_reached is None else SETTING_TO_TARGET)[self.outcome]

    @property
    def verdict_title(self) -> str:
        """Returns the verdict in a sentence, and with a target what each step of it is faster by."""
        text = self.answer.in_sentence
        if self.gain is None and self.num_reached is not None and self.is_faster_per_step:
            return f"faster per step, {text}" if self.outcome in ("worse", "target missed") else text
        return text


def value_text(key: str, value: AxisValue) -> str:
    """A swept value for readers, e.g. ``64 MiB``, ``on``, ``none``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return as_option(key, value)


def label(values: Mapping[str, AxisValue]) -> str:
    """A setting by its values, in the order of the keys."""
    return ", ".join(value_text(key, value) for key, value in sorted(values.items()))


def short_keys(keys: Sequence[str]) -> list[str]:
    """Returns keys as column titles: their last word, or all of them where two would be the same."""
    short = ["engine" if key == "engine.name" else key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else list(keys)


def options(plan: RunPlan) -> str:
    """The options of `dlbench run` that ask for a plan's setting; keys that do not act in it are left out."""
    acting = acting_keys(plan)
    return " ".join(
        f"--set {shlex.quote(f'{key}={as_option(key, value)}')}"
        for key, value in sorted(plan.series.axes.items())
        if key in acting
    )


def acting_keys(plan: RunPlan) -> frozenset[str]:
    """Swept keys that act in this run; the others are read by nothing in it."""
    return frozenset(key for key in plan.series.axes if not why_inert(key, plan))


def is_default(plan: RunPlan, firsts: Mapping[str, AxisValue]) -> bool:
    """Whether every swept key that acts is at its default. `firsts`: the first swept value of each key, which stands
    for the default where dlbench has none of its own (the engine, what is trained, the system).
    """
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
    """What this setting computes otherwise than plain fp32 exchange of the workload as it stands, in words; the name of
    a ladder's step says it.
    """
    if plan.series.step:
        return ()
    wire = (f"wire {plan.sync.wire}",) if "sync.wire" in acting_keys(plan) and plan.sync.wire != "fp32" else ()
    every = plan.sync.average_every
    apart = (f"average every {every} updates",) if every is not None and plan.layout.ranks > 1 else ()
    trained = (key for key in plan.series.axes if key.startswith(_TRAINING) and not key.startswith(_SAME_NUMBERS))
    return (*wire, *apart, *sorted(trained))


def costs(runs: Sequence[Run], table: RunTable) -> dict[str, float | None]:
    """What strategies differ in besides time, medians over the runs with figures: the fields of `Setting`."""
    found: dict[str, list[float]] = {name: [] for name in COSTS}
    for run in runs:
        record, causes = run.record, table.causes.get(run.plan.run_id)
        assert record is not None
        known: dict[str, float | None] = {"memory_bytes": record.held_bytes}
        if (one := record.exchange) is not None:
            packing, merging = one.packing_s, one.merging_s
            known |= {"step_bytes": one.sent_bytes, "packing_s": packing, "merging_s": merging}
            if one.communication_s is not None and one.by == "dlbench":
                known["carried_s"] = max(0.0, one.communication_s - (packing or 0.0) - (merging or 0.0))
        for name, value in known.items():
            found[name] += [] if value is None else [value]
        if causes is not None and "gather" not in causes.not_measured:
            found["gather_s"].append(causes.seconds["gather"])
    return {name: median(values) if values else None for name, values in found.items()}


def losses(runs: Sequence[Run], all_runs: Sequence[Sequence[Run]], table: RunTable) -> Losses | None:
    """The loss of a setting that changes the arithmetic of the exchange, or what ranks share, next to that of one that
    does not. `runs`: the setting's runs with figures; `all_runs`: those of the cell, by setting, this one and the
    baseline among them.
    """

    def is_plain(plan: RunPlan) -> bool:
        return plan.sync.wire == "fp32" and plan.strategy not in _SHARED

    if not runs or is_plain(runs[0].plan):
        return None

    def others(found: Sequence[Run]) -> dict[str, AxisValue]:
        return {key: value for key, value in found[0].plan.series.axes.items() if not key.startswith(_CHANGE_LOSS)}

    own = {table.repeat_key(run): last_loss(run) for run in runs}
    nothing = Losses(
        own=_median(own), reference=None, reference_label="", difference=None, why="no run of replicas with fp32"
    )
    # The setting that differs in these keys alone; else the first that is plain, or trains as those do.
    known = [found for found in all_runs if found and found[0].plan.sync.wire == "fp32"]
    plain = [found for found in known if is_plain(found[0].plan)]
    plain = plain or [found for found in known[:1] if not trains_apart(found[0].plan)]
    reference = next(iter([*(found for found in plain if others(found) == others(runs)), *plain]), None)
    if reference is None:
        return nothing
    if reference is runs:
        return None
    base = {table.repeat_key(run): last_loss(run) for run in reference}
    seen = {run.record.steps * run.plan.global_batch for run in (*runs, *reference) if run.record is not None}
    if len(seen) > 1:
        return replace(nothing, why=f"unequal samples: {', '.join(map(str, sorted(seen)))}")
    gaps = {
        key: None if one is None or (other := base[key]) is None else one - other
        for key, one in own.items()
        if key in base
    }
    return Losses(
        own=nothing.own,
        reference=_median(base),
        reference_label=label(reference[0].plan.series.axes),
        difference=_median(gaps),
        why="",
    )


def _median(found: Mapping[RunKey, float | None]) -> Estimate | None:
    return None if None in found.values() else of_known(median_estimate, found, "loss")
