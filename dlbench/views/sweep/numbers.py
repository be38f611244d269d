"""Verdicts on the settings of a series with swept keys, at each rank count, against the default, in pairs of repeats.
Settings are in different groups; interleaved repeats of one request make their comparison fair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Literal, cast

from dlbench.analysis.comparability import run_facts
from dlbench.analysis.environments import load_doubts, loads_of
from dlbench.analysis.repeats import averaged_unlike, compared_unlike, named
from dlbench.analysis.scaling import batch_text, group_by, local_sgd_settings
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.records.registry import data_source
from dlbench.records.scan import Run
from dlbench.report.table import times_cell
from dlbench.report.wording import DASH, basis_text, percent, place_text, sentence, times_text, units_text
from dlbench.specs.plan import LadderStep
from dlbench.specs.series import idle_steps
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, of_known, paired_logs
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Combination, Family, KeyEffect, Verdict, contrasts, family_of, key_effect, levels_of
from dlbench.stats.verdict_words import AXIS, SETTING, SETTING_MARGIN, SETTING_MARGIN_TEXT
from dlbench.views.doubts import run_doubts
from dlbench.views.model import AtPlace
from dlbench.views.next_step import remedy_of
from dlbench.views.sweep.choice import (
    OVER,
    Draft,
    SettingChoice,
    SettingRuns,
    efficiency,
    gains_of,
    height,
    published_text,
    step_words,
)
from dlbench.views.sweep.settings import (
    SettingWord,
    SweptSetting,
    acting_keys,
    autotuned,
    changed_arithmetic,
    costs,
    is_default,
    label,
    losses,
    options,
    value_text,
)
from dlbench.views.sweep.updates import Update, updates_of

AxisWord = Literal["matters", "no effect", "undecided", "insufficient"]


@dataclass(frozen=True, kw_only=True)
class SettingLevel:
    """One value of an axis."""

    value: str
    effect: Estimate | None  # Throughput over that of the first value, all else equal; None if unknown.


@dataclass(frozen=True, kw_only=True)
class SweptAxis:
    """One swept key."""

    key: str
    levels: tuple[SettingLevel, ...]  # The first is the one that the others are measured against.
    verdict: AxisWord
    words: str  # The verdict in a sentence, with the two values that are furthest apart.


@dataclass(frozen=True, kw_only=True)
class SweepCell(AtPlace):
    """All settings at one rank count, with equal preset, precision and data."""

    conditions: str
    baseline: str
    has_default: bool  # Whether the baseline is the default setting; otherwise it is the first of the sweep.
    steps: tuple[LadderStep, ...]  # All steps of a ladder in order, also those that cannot act here; else empty.
    to_target: bool  # Whether runs train to a target, so that the time to it decides, and not throughput.
    settings: tuple[SweptSetting, ...]
    axes: tuple[SweptAxis, ...]
    updates: tuple[Update, ...]  # By setting, where optimizers or their sharding are swept.
    best: str  # Label of the fastest certain setting; empty if there is none.
    best_ratio: Estimate | None  # Its ratio to the baseline, corrected for having been chosen.
    verdict: str
    advice: str
    needed_repeats: int | None  # Repeats that show a difference of the margin at the measured scatter; None: unknown.
    notes: tuple[str, ...]

    @property
    def best_setting(self) -> SweptSetting | None:
        return next((setting for setting in self.settings if self.best and setting.label == self.best), None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One swept series."""

    id: str  # In the page: `sweep-1`.
    label: str
    series: str
    keys: tuple[str, ...]
    sample_unit: str
    headline: tuple[str, str]  # The card's number and its meaning, at the largest rank count.
    verdict: str
    cells: tuple[SweepCell, ...]  # By rank count; only where a swept key acts.
    idle: tuple[str, ...]  # Sentences on rank counts and steps at which nothing swept acts.
    caption: str


def sweeps(table: RunTable) -> tuple[Sweep, ...]:
    """Returns all series with swept keys that hold figures, in the order of their creation."""
    table = without_resumed(table)
    planned = [*table.runs.values(), *(item.run for item in table.without if item.run.plan.run_id not in table.runs)]
    series = group_by([run for run in planned if run.plan.series.named], attrgetter("plan.created", "plan.series.id"))
    drafted = []
    comparisons = []
    for _, runs in sorted(series.items()):
        drafts, idle = _drafts(runs, table)
        if drafts or idle:
            drafted.append((runs, drafts, idle))
        for draft in drafts:
            comparisons += draft.comparisons
    family = family_of(comparisons)
    swept_series = []
    for number, (runs, drafts, idle) in enumerate(drafted, 1):
        cells = [cell_of(draft, family, table) for draft in drafts]
        swept_series.append(_sweep(runs, cells, idle, table, f"sweep-{number}"))
    return tuple(swept_series)


def _drafts(runs: Sequence[Run], table: RunTable) -> tuple[list[Draft], list[str]]:
    drafts: list[Draft] = []
    idle: list[str] = []
    for (ranks, nodes, *_), group in sorted(group_by(sorted(runs, key=_order), _conditions).items()):
        measured = [run for run in group if run.plan.run_id in table.runs]
        if len(_by_setting(group)) < 2 or not measured:
            continue
        if any(acting_keys(run.plan) for run in group):
            first = drafts[0].settings if drafts else ()
            drafts.append(_draft(group, table, first))
        else:
            rates = [geometric_mean_estimate(_rates(runs, table)).value for runs in _by_setting(measured)]
            idle.append(
                f"At {place_text(ranks, nodes)} no swept key acts; settings differ by up to "
                f"{percent(max(rates) / min(rates) - 1)} there, which is the scatter of the machine."
            )
    return drafts, idle


def _sweep(
    runs: Sequence[Run], cells: Sequence[SweepCell], idle: Sequence[str], table: RunTable, sweep_id: str
) -> Sweep:
    plans = [run.plan for run in runs]
    plan = next((plan for plan in plans if plan.run_id in table.runs), plans[0])
    keys = tuple(sorted(set().union(*(plan.series.named for plan in plans))))
    name, batch = " x ".join(keys), batch_text(plan)
    if plan.series.step:
        name, batch = "ladder", "each step on top of those before it"
    headline = (DASH, "no swept key acts")
    verdict = "The swept keys act at no rank count that was run."
    if cells:
        headline, verdict = _headline(cells[-1]), cells[-1].verdict
    caption = (
        f"{plan.workload.name}, {batch}, {plan.series.scaling} scaling on {plan.system.name}; geometric "
        "means over runs; ratios in pairs of interleaved repeats"
    )
    if plan.workload.notice:
        caption += f"; {plan.workload.notice}"
    return Sweep(
        id=sweep_id,
        label=f"{plan.workload.name}: {name} (series {plan.series.id})",
        series=plan.series.id,
        keys=keys,
        sample_unit=plan.workload.sample_unit,
        headline=headline,
        verdict=verdict,
        cells=tuple(cells),
        idle=(*idle, *(f"{text}." for text in idle_steps(plans))),
        caption=caption,
    )


def _headline(cell: SweepCell) -> tuple[str, str]:
    place = place_text(cell.ranks, cell.nodes)
    if cell.steps:
        ratio, words = height(cell.steps, cell.settings)
        cell_text = times_cell(ratio)
        return cell_text.text, f"{cell_text.interval} {words}, at {place}".lstrip()
    name = "the default" if cell.has_default else "the first setting"
    if cell.best_ratio is None:
        return DASH, f"no setting is faster than {name} for certain, at {place}"
    cell_text = times_cell(cell.best_ratio)
    basis = basis_text(cell.best_ratio)
    return cell_text.text, f"{OVER[cell.to_target]} {name} {cell_text.interval} by {cell.best}, at {place}; {basis}"


def _order(run: Run) -> tuple[int, int]:
    series = run.plan.series
    if series.repeat % 2:
        return series.repeat, -series.position
    return series.repeat, series.position


def _conditions(run: Run) -> tuple[int, int, str, str, str]:
    plan = run.plan
    precision, data = str(plan.workload.train.precision), data_source(run)
    if plan.series.step:  # which may set both
        precision, data = "precision by step", plan.workload.data.source
    return (plan.layout.ranks, plan.layout.nodes, plan.workload.preset, precision, data)


def _by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    def values(run: Run) -> tuple[str, ...]:
        return tuple(f"{key}={value!r}" for key, value in sorted(run.plan.series.named.items()))

    return list(group_by(runs, values).values())


def _rates(runs: Sequence[Run], table: RunTable) -> dict[RunKey, float]:
    return {table.repeat_key(run): table.rates[run.plan.run_id] for run in runs if run.plan.run_id in table.runs}


def _draft(runs: Sequence[Run], table: RunTable, first: Sequence[SettingRuns]) -> Draft:
    groups = _by_setting(runs)
    order = [step.name for step in runs[0].plan.series.ladder]
    if order:  # a ladder, whose steps keep their order even if the first run of one is missing
        groups.sort(key=lambda group: order.index(group[0].plan.series.step))
    rates = [_rates(group, table) for group in groups]
    first_plan = groups[0][0].plan
    with_rates = [index for index in range(len(groups)) if rates[index]]
    defaults = []
    if not order:
        defaults = [index for index in with_rates if is_default(groups[index][0].plan, first_plan.series.axes)]
    base = [*defaults, *with_rates][0]
    num_reached: list[int | None] = [None] * len(groups)
    speeds: list[dict[RunKey, float]] = list(rates)
    to_target = first_plan.measure.until == "quality"
    if to_target:
        for index, group in enumerate(groups):
            times_s = _times_to_target(group, table)
            num_reached[index] = len(times_s)
            speeds[index] = {}
            if len(times_s) == _num_ended(group, table):
                speeds[index] = {key: 1 / seconds for key, seconds in times_s.items()}
    gains: list[dict[RunKey, float]] = [{} for _ in groups]
    if order:
        gains = gains_of(rates)
    settings = []
    for index, group in enumerate(groups):
        setting = SettingRuns(
            runs=tuple(group),
            measured=tuple(run for run in group if run.plan.run_id in table.runs),
            rates=rates[index],
            num_reached=num_reached[index],
            speeds=speeds[index],
            rate_logs=paired_logs(rates[index], rates[base]),
            logs=paired_logs(speeds[index], speeds[base]),
            gain_logs=gains[index],
        )
        settings.append(setting)
    combinations = []
    for setting in settings:
        # A setting that had no effect would make its axis look as if it had none.
        if setting.speeds and not order and not setting.inert:
            axes = dict(sorted(setting.plan.series.axes.items()))
            combinations.append(Combination(values=axes, acting=acting_keys(setting.plan), rates=setting.speeds))
    levels = levels_of(combinations, dict(sorted(settings[base].plan.series.axes.items())))
    return Draft(
        settings=tuple(settings),
        base=base,
        has_default=bool(defaults),
        is_ladder=bool(order),
        to_target=to_target,
        first=first or settings,
        levels=levels,
        contrasts=contrasts(combinations, levels),
    )


def _times_to_target(runs: Sequence[Run], table: RunTable) -> dict[RunKey, float]:
    times_s = {}
    for run in runs:
        quality = run.record and run.record.quality
        if run.plan.run_id in table.runs and quality and quality.time_to_quality_s:
            times_s[table.repeat_key(run)] = quality.time_to_quality_s
    return times_s


def _num_ended(runs: Sequence[Run], table: RunTable) -> int:
    return sum(run.plan.run_id in table.runs or run.state == "invalid" for run in runs)


def cell_of(draft: Draft, family: Family, table: RunTable) -> SweepCell:
    """Returns the comparison of all settings of one rank count, some of whose runs must have figures."""
    settings = tuple(_setting(index, draft, family, table) for index in range(len(draft.settings)))
    choice = SettingChoice(draft, settings, family.size)
    effects = tuple(_axis(key, draft, family) for key in draft.levels)
    runs = list(chain.from_iterable(setting.runs for setting in draft.settings))
    ranks, nodes, preset, precision, data = _conditions(runs[0])
    if data == "synthetic":
        data = "synthetic data"
    doubts = [*load_doubts(loads_of(runs)), *chain.from_iterable(map(run_doubts, runs))]
    plan, baseline = runs[0].plan, choice.base_name
    if draft.is_ladder:
        verdict = step_words(plan, settings)
    else:
        verdict = _verdict(choice, effects, place_text(ranks, nodes))
        if not draft.has_default:
            baseline += ", the first setting with figures: the default is not in the sweep, or has none"
    return SweepCell(
        ranks=ranks,
        nodes=nodes,
        conditions=f"{preset} preset, {precision}, {data}",
        baseline=baseline,
        steps=plan.series.ladder,
        has_default=draft.has_default,
        to_target=draft.to_target,
        settings=settings,
        axes=effects,
        updates=updates_of([setting.runs for setting in draft.settings], table),
        best=choice.best.label if choice.best else "",
        best_ratio=choice.gain_of(choice.best),
        verdict=verdict,
        advice=remedy_of(doubts) or choice.advice(),
        needed_repeats=choice.needed_repeats,
        notes=tuple(_notes(draft, settings, table)),
    )


def _verdict(choice: SettingChoice, effects: Sequence[SweptAxis], place: str) -> str:
    parts = []
    for answer in AXIS.values():
        keys = [axis.key for axis in effects if axis.verdict == answer.word]
        if keys:
            parts.append(f"{answer.in_sentence}: {', '.join(keys)}")
    sentences = choice.words(f"At {place}")
    if parts:
        sentences.append(sentence("; ".join(parts)))
    return " ".join(sentences)


def _axis(key: str, draft: Draft, family: Family) -> SweptAxis:
    pairs = {pair: logs for pair, logs in draft.contrasts.items() if pair[0] == key}
    verdicts = {pair: family.judge(logs, SETTING_MARGIN) for pair, logs in pairs.items()}
    effect = key_effect(key, draft.levels[key], verdicts)
    levels = zip(effect.values, effect.effects, strict=True)
    return SweptAxis(
        key=key,
        levels=tuple(SettingLevel(value=value_text(key, value), effect=ratio) for value, ratio in levels),
        verdict=cast("AxisWord", AXIS[effect.outcome].word),
        words=_axis_words(effect),
    )


def _axis_words(effect: KeyEffect) -> str:
    word = AXIS[effect.outcome].word
    if effect.widest is None:
        return f"{word}: no two of its values ran with the same values of the others"
    (key, *values), ratio = effect.widest
    slow, fast = (value_text(key, value) for value in values)
    if ratio.value < 1:
        slow, fast, ratio = fast, slow, ratio.inverted("ratio")
    text = f"{fast} over {slow} is {times_text(ratio)}, all else equal"
    return {
        "better": f"{word}: {text}",
        "equal": f"{word}: all values within {SETTING_MARGIN_TEXT} ({text}); it may stay as it is",
        "undecided": f"{word}: {text}; neither a difference for certain, nor within {SETTING_MARGIN_TEXT}",
        "insufficient": f"{word}: {units_text(ratio)} ({text})",
    }[effect.outcome]


def _setting(index: int, draft: Draft, family: Family, table: RunTable) -> SweptSetting:
    """Returns a setting with its verdict: a difference must leave 1 out, hold after Holm, and exceed the margin."""
    runs, base = draft.settings[index], draft.settings[draft.base]
    plan = runs.plan
    all_logs = (runs.rate_logs, runs.logs, runs.gain_logs)
    by_rate, by_speed, by_gain = (family.judge(logs, SETTING_MARGIN) for logs in all_logs)
    deciding_logs, judged = runs.logs, by_speed
    if draft.is_ladder:
        deciding_logs, judged = runs.gain_logs, by_gain
    is_faster_per_step = by_rate is not None and by_rate.outcome == "better"
    if runs is base:
        outcome, adjusted_p = "baseline", None
        ratio: Estimate | None = by_definition(1.0, len(base.rates))
        sooner = ratio
    else:
        outcome = _outcome(runs, judged, draft, num_ended=_num_ended(runs.runs, table))
        adjusted_p = family.adjusted_p(deciding_logs) if by_speed else None
        ratio, sooner = _estimate(by_rate), _estimate(by_speed)
    times_s: dict[RunKey, float] = {}
    setting_losses = None
    if draft.to_target:
        times_s = {key: 1 / speed for key, speed in runs.speeds.items()}
    else:  # Runs that end at a target end after unequal samples.
        setting_losses = losses(runs.measured, [other.measured for other in draft.settings], table)
    step = next((step for step in plan.series.ladder if step.name == plan.series.step), None)
    reasons = {item.run.plan.run_id: f"{item.state}: {item.why}" for item in table.without}
    missing = [reasons[run.plan.run_id] for run in runs.runs if run not in runs.measured]
    rate_base = geometric_mean_estimate(base.rates).value
    return SweptSetting(
        values=tuple((key, value_text(key, value)) for key, value in sorted(plan.series.named.items())),
        label=label(plan.series.named),
        is_baseline=runs is base,
        throughput=of_known(geometric_mean_estimate, runs.rates, f"{plan.workload.sample_unit}/s"),
        ratio=ratio,
        gain=_estimate(by_gain),
        efficiency=efficiency(runs, draft.first) if step and runs.rates else None,
        published=published_text(step.published) if step and step.published else "",
        num_reached=runs.num_reached,
        time=of_known(geometric_mean_estimate, times_s, "s"),
        sooner=sooner if times_s else None,
        is_faster_per_step=is_faster_per_step,
        adjusted_p=adjusted_p,
        verdict=cast("SettingWord", SETTING[outcome].word),
        outcome=outcome,
        num_runs=len(runs.measured),
        num_planned=max(len(runs.runs), plan.series.repeats),
        why=next(iter(missing), ""),
        changes=changed_arithmetic(plan),
        inert=runs.inert,
        autotune=autotuned(runs.measured, table, ratio, rate_base, is_faster=is_faster_per_step),
        losses=setting_losses,
        strategy=plan.strategy,
        redraws_dropout=plan.redraws_dropout,
        **costs(runs.measured, table),
        options=options(plan),
        run_ids=tuple(run.plan.run_id for run in runs.measured),
    )


def _estimate(verdict: Verdict | None) -> Estimate | None:
    return None if verdict is None else verdict.estimate


def _outcome(runs: SettingRuns, judged: Verdict | None, draft: Draft, *, num_ended: int) -> str:
    if draft.to_target and not runs.speeds and num_ended:
        return "target missed"
    if judged is None:
        return "undecided" if draft.to_target and runs.speeds else "no figure"
    if not draft.to_target and judged.outcome == "better" and local_sgd_settings(runs.plan):
        return "faster per step"
    return judged.outcome


def _notes(draft: Draft, settings: Sequence[SweptSetting], table: RunTable) -> Iterator[str]:
    num_inert = sum(bool(setting.inert) for setting in settings)
    if num_inert:
        yield (
            f"In {num_inert} of {len(settings)} settings a requested value had no effect; they are marked, cannot be "
            "the best, and are left out of the axes."
        )
    measured = list(chain.from_iterable(setting.measured for setting in draft.settings))
    ranks = chain.from_iterable(run.record.ranks for run in measured if run.record)
    devices = {rank.device.split(":")[0] for rank in ranks}
    if len(devices) > 1:
        yield f"Runs were on different devices ({', '.join(sorted(devices))}): the ratios include that difference."
    facts = {}
    for runs in _by_setting(measured):
        facts[label(runs[0].plan.series.named)] = {run.plan.run_id: run_facts(run) for run in runs}
    averaged = averaged_unlike(facts)
    if averaged:
        yield sentence(averaged)
    swept = set().union(*(run.plan.series.axes for run in measured))
    if "train.batch_per_rank" in swept and all(run.plan.workload.data.is_synthetic for run in measured):
        swept.add("data.num_samples")  # a pool of a few batches
    differences = [difference for difference in compared_unlike(facts) if difference.key not in swept]
    if differences:
        unless = "unless the swept keys set that, the ratios include this difference"
        yield f"Settings differ in {named(differences)}; {unless}."
    repeats = [set(setting.rates) for setting in draft.settings if setting.rates]
    num_common, num_all = len(set.intersection(*repeats)), len(set.union(*repeats))
    if draft.is_ladder and num_common < num_all:
        repeats_text = f"the {num_common} of {num_all} repeats that all steps have"
        yield f"Gains multiply exactly to the last ratio only over {repeats_text}."
