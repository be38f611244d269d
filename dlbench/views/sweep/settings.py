"""One setting of a sweep next to its speed: whether it is the default, what it computes, what its tuning cost."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from dlbench.analysis.side_by_side import QUALITY_OPEN, last_loss, trains_apart
from dlbench.analysis.table import RunTable
from dlbench.records.exchange import AutotuneResult
from dlbench.records.scan import Run
from dlbench.report.table import column, times_cell
from dlbench.report.wording import DASH, figure_text, times_text, units_text
from dlbench.specs.choices import why_inert
from dlbench.specs.plan import AxisValue, RunPlan
from dlbench.specs.plan import value_text as as_option
from dlbench.stats.estimates import (
    Estimate,
    by_definition,
    is_other_than,
    mean_estimate,
    median_estimate,
    paired_logs,
    placed,
)
from dlbench.stats.multiplicity import LEVEL
from dlbench.stats.pairing import KnownKey, RunKey
from dlbench.units import format_bytes, format_number, format_seconds

_DEFAULTS_KNOWN = ("sync.", "engine.horovod.", "engine.ddp.", "engine.fsdp.")
"""Keys whose default is dlbench's own. Those of a workload or system are in files that a plan no longer names."""
_TRAINING = ("train.", "model.", "data.")  # Keys that change what is trained.
_SHARED = ("fsdp", "zero-1", "tensor", "fsdp+tensor", "local-sgd")  # Strategies whose loss stands beside replicas'.
_CHANGE_LOSS = ("sync.wire", "sync.average_", "engine.")  # Keys of arithmetic and strategy.
_SAME_NUMBERS = ("train.recompute", "train.swap", "train.memory.", "train.optimizer_state")
"""Of them those that change where activations and state lie meanwhile, and no number that is computed."""
SettingVerdict = Literal[
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
"""Against the baseline, in time to the target where runs train to one, else in throughput. equal: within the margin,
interval and all. undecided: neither that nor a difference. faster per step: of ranks that train apart, whose updates
are not those of the baseline."""

MARGIN = 0.02  # Differences within this share, interval and all, are no reason to choose a setting.
MARGIN_TEXT = f"{MARGIN * 100:g} %"

STEP_VERDICTS: Mapping[SettingVerdict, str] = {
    "faster": "pays",
    "equal": f"adds nothing (within {MARGIN_TEXT})",
    "slower": "costs",
    "faster per step": "pays per step, quality not compared",
    "undecided": "not certain",
    "insufficient": "too few repeats to tell",
    "no figure": "no figure",
}
"""What a step adds to those before it, in the order of the sentence."""
PAYS = {"faster": "yes", "equal": "no", "undecided": "unsure", "insufficient": "too few", "baseline": DASH}
"""The same in a table."""


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """Horovod's autotuner as one contestant: what its search cost, and when that is paid back."""

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


_SECONDS: Mapping[str, Any] = {"text": lambda seconds: format_seconds(seconds) if seconds else "0 s"}


@dataclass(frozen=True, kw_only=True)
class Setting:
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
    verdict: SettingVerdict
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
    def verdict_title(self) -> str:
        """`equal` names its margin, `faster per step` what it leaves open, and with a target what was faster; of a
        ladder's step what it adds.
        """
        if self.gain is not None:
            return STEP_VERDICTS[self.verdict]
        if self.num_reached is None:
            more = {"equal": f" within {MARGIN_TEXT}", "faster per step": f"; {QUALITY_OPEN}"}
            return self.verdict + more.get(self.verdict, "")
        found = {"faster": "faster to the target", "slower": "slower to the target"}
        apart = dict.fromkeys(("equal", "undecided", "insufficient"), "not told apart")
        first = "faster per step, " * (self.is_faster_per_step and self.verdict in ("slower", "target missed"))
        return first + (found | apart).get(self.verdict, self.verdict)


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


COSTS = ("memory_bytes", "step_bytes", "packing_s", "carried_s", "merging_s", "gather_s")


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


def run_key(run: Run, table: RunTable) -> RunKey:
    """The repeat of a run with figures, which pairs it with those of the other settings, and its session."""
    return KnownKey.of("", run.plan.series.repeat, table.sessions[run.plan.run_id])


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

    own = {run_key(run, table): last_loss(run) for run in runs}
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
    base = {run_key(run, table): last_loss(run) for run in reference}
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
    finite = {key: value for key, value in found.items() if value is not None}
    return median_estimate(finite, "loss") if finite and len(finite) == len(found) else None


def autotuned(
    runs: Sequence[Run], table: RunTable, ratio: Estimate | None, rate_base: float, *, is_faster: bool
) -> Autotune | None:
    """What Horovod's autotuner did in the runs of a setting; None where it was off or nothing is recorded. `ratio`: its
    throughput over the baseline's (`rate_base`, samples per second); `is_faster`: for certain.
    """
    records = {run_key(run, table): run.record for run in runs if run.record is not None}
    by_run = {
        key: record.exchange.autotune for key, record in records.items() if record.exchange and record.exchange.autotune
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
        settled_step=median_estimate(settled).value if settled else None,
        evaluations=median_estimate([float(result.evaluations) for result in results]).value,
        cost=cost,
        chosen=tuple(dict.fromkeys(map(_chosen_text, results))),
        gain_s=gain,
        break_even_steps=cost.value / gain if cost is not None and gain is not None and gain > 0 else None,
        words="",
    )
    return replace(found, words=_autotune_words(found, is_faster=is_faster))


def _chosen_text(result: AutotuneResult) -> str:
    """Fusion threshold and cycle time that the search chose."""
    threshold, cycle = result.fusion_threshold_bytes, result.cycle_time_ms
    return (
        f"{'an unknown threshold' if threshold is None else format_bytes(threshold)} and "
        f"{'an unknown cycle' if cycle is None else f'{cycle:.3g} ms'}"
    )


def _autotune_words(found: Autotune, *, is_faster: bool) -> str:
    """What it chose, at what cost, and when that is paid back."""
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
    return "; ".join(
        [*parts, f"paid back after {format_number(found.break_even_steps, 3)} steps ({gain} per step{sure})"]
    )


Pair = tuple[str, AxisValue, AxisValue]  # An axis and two of its values: the second over the first.

AxisVerdict = Literal["matters", "no effect", "undecided", "insufficient"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting's throughput, as the comparison of axes needs it."""

    values: Mapping[str, AxisValue]
    acting: frozenset[str]  # Swept keys that act in this combination.
    throughput: Mapping[RunKey, float]


@dataclass(frozen=True, kw_only=True)
class Level:
    """One value of an axis."""

    value: str
    effect: Estimate | None
    """Throughput over that of the axis' first value, all else equal (ratio); None where no combination ran with
    both."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One swept key."""

    key: str
    levels: tuple[Level, ...]  # The first is the one that the others are measured against.
    verdict: AxisVerdict
    words: str  # The verdict in a sentence, with the two values that are furthest apart.


def is_within_margin(ratio: Estimate) -> bool:
    """Whether a ratio lies, interval and all, so near to 1 that it does not matter."""
    return placed(ratio, 1 - MARGIN, 1 + MARGIN) == "within"


def levels_of(settings: Sequence[Measured], references: Mapping[str, AxisValue]) -> dict[str, list[AxisValue]]:
    """Values of every axis that acts anywhere and has two of them or more, the reference first. `references`: the value
    of each axis that its others are compared with.
    """
    found: dict[str, list[AxisValue]] = {}
    for key, reference in references.items():
        # Each value once, in the order of first appearance.
        seen = list({repr(s.values[key]): s.values[key] for s in settings if key in s.acting}.values())
        if len(seen) > 1:
            found[key] = sorted(seen, key=lambda value: not same(value, reference))
    return found


def contrasts(
    settings: Sequence[Measured], levels: Mapping[str, Sequence[AxisValue]]
) -> dict[Pair, dict[RunKey, float]]:
    """Log ratios of throughput of every pair of values of every axis, one for each repeat; `levels` of `levels_of`."""
    return {
        (key, a, b): _contrast(settings, key, b, a)
        for key, values in levels.items()
        for a, b in itertools.combinations(values, 2)
    }


def axes(
    levels: Mapping[str, Sequence[AxisValue]], found: Mapping[Pair, Mapping[RunKey, float]], adjusted: Sequence[float]
) -> tuple[Axis, ...]:
    """The effect of every axis. `levels` and `found`: as `levels_of` and `contrasts` give them; `adjusted`: the p value
    of each of `found` after Holm over the whole family.
    """
    p_values = dict(zip(found, adjusted, strict=True))
    return tuple(
        _axis(key, values, {pair: logs for pair, logs in found.items() if pair[0] == key}, p_values)
        for key, values in levels.items()
    )


def _axis(
    key: str, values: Sequence[AxisValue], pairs: Mapping[Pair, Mapping[RunKey, float]], p_values: Mapping[Pair, float]
) -> Axis:
    known = {pair: ratio_of(logs) for pair, logs in pairs.items() if logs}
    is_claimed = any(
        p_values[pair] < LEVEL and is_other_than(ratio, 1) and not is_within_margin(ratio)
        for pair, ratio in known.items()
    )
    verdict: AxisVerdict = "undecided"
    if not known or not all(ratio.is_confident for ratio in known.values()):
        verdict = "insufficient"
    elif is_claimed:
        verdict = "matters"
    elif len(known) == len(pairs) and all(map(is_within_margin, known.values())):
        verdict = "no effect"
    count = max((ratio.n for ratio in known.values()), default=0)
    effects = [by_definition(1.0, count), *(known.get((key, values[0], value)) for value in values[1:])]
    widest = max(known, key=lambda pair: abs(math.log(known[pair].value)), default=None)
    return Axis(
        key=key,
        levels=tuple(Level(value=value_text(key, v), effect=one) for v, one in zip(values, effects, strict=True)),
        verdict=verdict,
        words=_words(verdict, widest, known[widest]) if widest else INCOMPARABLE,
    )


INCOMPARABLE = "insufficient: no two of its values ran with the same values of the others"


def _words(verdict: AxisVerdict, widest: Pair, ratio: Estimate) -> str:
    """The verdict on an axis; `ratio` is that of the second of the `widest` values over the first."""
    slow, fast = (value_text(widest[0], value) for value in widest[1:])
    if ratio.value < 1:
        slow, fast, ratio = fast, slow, ratio.inverted("ratio")
    text = f"{fast} over {slow} is {times_text(ratio)}, all else equal"
    return {
        "matters": f"matters: {text}",
        "no effect": f"no effect: all values within {MARGIN_TEXT} ({text}); it may stay as it is",
        "undecided": f"undecided: {text}; neither a difference for certain, nor within {MARGIN_TEXT}",
        "insufficient": f"insufficient: {units_text(ratio)} ({text})",
    }[verdict]


def _contrast(settings: Sequence[Measured], key: str, top: AxisValue, bottom: AxisValue) -> dict[RunKey, float]:
    """By repeat: mean log ratio of two values of an axis over the combinations of the other axes that ran with both."""
    sides: list[dict[tuple[str, ...], Mapping[RunKey, float]]] = []
    for value in (top, bottom):
        acting = [s for s in settings if same(s.values[key], value) and key in s.acting]
        sides.append({tuple(repr(s.values[k]) for k in s.values if k != key): s.throughput for s in acting})
    logs: dict[RunKey, list[float]] = {}
    for others in sides[0].keys() & sides[1].keys():
        for repeat, ratio in paired_logs(sides[0][others], sides[1][others]).items():
            logs.setdefault(repeat, []).append(ratio)
    # Repeats that lack a combination would compare something else.
    whole = max(map(len, logs.values()), default=0)
    return {repeat: math.fsum(found) / whole for repeat, found in sorted(logs.items()) if len(found) == whole}


def ratio_of(logs: Mapping[RunKey, float]) -> Estimate:
    """The ratio of which these are the logarithms, over repeats."""
    return mean_estimate(logs).mapped(math.exp, "ratio")


def same(one: AxisValue, other: AxisValue) -> bool:
    """Equal in value and type: 1 is not true, and 1.0 is not 1 where a person wrote them apart."""
    return repr(one) == repr(other)
