"""A series with swept keys becomes a verdict at each rank count: each setting against the default, in pairs of repeats.

Runs of a group may be averaged; settings of a sweep are in different groups, and are compared on purpose. What makes
that fair is the series: one request, so that all but the swept keys is equal, and repeats interleaved over the
settings, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from dlbench.analysis.comparability import run_facts
from dlbench.analysis.core_load import load_doubts, loads_of
from dlbench.analysis.repeats import averaged_unlike, compared_unlike, named
from dlbench.analysis.side_by_side import alike, batch_text, trains_apart
from dlbench.analysis.table import RunTable, without_resumed
from dlbench.records.registry import data_source
from dlbench.records.scan import Run
from dlbench.report.table import times_cell
from dlbench.report.wording import DASH, basis_text, percent, place_text, sentence, times_text, units_text
from dlbench.specs.plan import LadderStep
from dlbench.specs.series import idle_steps
from dlbench.stats.estimates import Estimate, by_definition, geometric_mean_estimate, paired_logs
from dlbench.stats.factors import Combination, KeyEffect, contrasts, key_effect, levels_of
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Family, Verdict, family_of
from dlbench.stats.verdict_words import AXIS, SETTING, SETTING_MARGIN, SETTING_MARGIN_TEXT
from dlbench.views.doubts import run_doubts
from dlbench.views.next_step import remedy_of
from dlbench.views.sweep.autotune import autotuned
from dlbench.views.sweep.choice import OVER, SettingChoice
from dlbench.views.sweep.drafts import Draft, SettingRuns
from dlbench.views.sweep.ladder import efficiency, gains_of, height, published_text, step_words
from dlbench.views.sweep.settings import (
    SettingWord,
    SweptSetting,
    acting_keys,
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
    effect: Estimate | None
    """Throughput over that of the axis' first value, all else equal (ratio); None where no combination ran with
    both."""


@dataclass(frozen=True, kw_only=True)
class SweptAxis:
    """One swept key."""

    key: str
    levels: tuple[SettingLevel, ...]  # The first is the one that the others are measured against.
    verdict: AxisWord
    words: str  # The verdict in a sentence, with the two values that are furthest apart.


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """All settings at one rank count, with equal preset, precision and data."""

    ranks: int
    nodes: int
    conditions: str
    baseline: str
    has_default: bool  # Whether the baseline is the default setting; otherwise it is the first of the sweep.
    steps: tuple[LadderStep, ...]  # Of a ladder: all in order, those too that cannot act here; empty: it is none.
    to_target: bool  # Whether runs train to a target, so that the time to it decides, and not throughput.
    settings: tuple[SweptSetting, ...]
    axes: tuple[SweptAxis, ...]
    updates: tuple[Update, ...]  # By setting, where optimizers or their sharding are swept.
    best: str
    """Label of the fastest of those that are faster than the baseline for certain and are what their name says; empty
    where there is none."""
    best_ratio: Estimate | None
    """What decides over the baseline's, corrected for having been chosen from all settings."""
    verdict: str
    advice: str
    needed_repeats: int | None  # That show a difference of the margin at the scatter found; None: not known.
    notes: tuple[str, ...]

    @property
    def best_setting(self) -> SweptSetting | None:
        """Returns the setting that `best` names."""
        return next((setting for setting in self.settings if self.best and setting.label == self.best), None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One swept series."""

    id: str  # In the page: `sweep-1`.
    label: str
    series: str
    keys: tuple[str, ...]
    sample_unit: str
    headline: tuple[str, str]  # The card's number and what it means, at the largest rank count.
    verdict: str
    cells: tuple[SweepCell, ...]  # By rank count; only where a swept key acts.
    idle: tuple[str, ...]
    """Rank counts at which no swept key acts, each a sentence with the largest relative difference between settings:
    scatter, not effect; steps of a ladder that cannot act somewhere, and why."""
    caption: str


def sweeps(table: RunTable) -> tuple[Sweep, ...]:
    """All series with swept keys that hold figures, in the order of their creation."""
    table = without_resumed(table)
    planned = [*table.runs.values(), *(item.run for item in table.without if item.run.plan.run_id not in table.runs)]
    swept = (run for run in planned if run.plan.series.named)
    series = alike(swept, lambda run: (run.plan.created, run.plan.series.id))
    found = [(runs, *_drafts(runs, table)) for _, runs in sorted(series.items())]
    family = family_of(logs for _, drafts, _ in found for draft in drafts for logs in draft.comparisons)
    with_figures = [one for one in found if one[1] or one[2]]
    return tuple(
        _sweep(runs, [cell_of(draft, family, table) for draft in drafts], idle, table, f"sweep-{number}")
        for number, (runs, drafts, idle) in enumerate(with_figures, 1)
    )


def _drafts(runs: Sequence[Run], table: RunTable) -> tuple[list[Draft], list[str]]:
    """Rank counts with two settings and a run with figures, and what to say of those at which no swept key acts."""
    drafts: list[Draft] = []
    idle: list[str] = []
    for (ranks, nodes, *_), group in sorted(alike(sorted(runs, key=_order), _place).items()):
        figures = [run for run in group if run.plan.run_id in table.runs]
        if len(_by_setting(group)) < 2 or not figures:
            continue
        if any(acting_keys(run.plan) for run in group):
            drafts.append(_draft(group, table, drafts[0] if drafts else None))
        else:
            rates = [geometric_mean_estimate(_rates(found, table)).value for found in _by_setting(figures)]
            idle.append(
                f"At {place_text(ranks, nodes)} no swept key acts; settings differ by up to "
                f"{percent(max(rates) / min(rates) - 1)} there, which is the scatter of the machine."
            )
    return drafts, idle


def _sweep(
    runs: Sequence[Run], cells: Sequence[SweepCell], idle: Sequence[str], table: RunTable, sweep_id: str
) -> Sweep:
    plan = next((run for run in runs if run.plan.run_id in table.runs), runs[0]).plan
    keys = tuple(sorted({key for run in runs for key in run.plan.series.named}))
    batch = "each step on top of those before it" if plan.series.step else batch_text(plan)
    notice = f"; {plan.workload.notice}" if plan.workload.notice else ""
    last = cells[-1] if cells else None
    return Sweep(
        id=sweep_id,
        label=f"{plan.workload.name}: {'ladder' if plan.series.step else ' x '.join(keys)} (series {plan.series.id})",
        series=plan.series.id,
        keys=keys,
        sample_unit=plan.workload.sample_unit,
        headline=_headline(last) if last else (DASH, "no swept key acts"),
        verdict=last.verdict if last else "The swept keys act at no rank count that was run.",
        cells=tuple(cells),
        idle=(*idle, *(f"{text}." for text in idle_steps([run.plan for run in runs]))),
        caption=f"{plan.workload.name}, {batch}, {plan.series.scaling} scaling on {plan.system.name}; geometric "
        f"means over runs; ratios in pairs of interleaved repeats{notice}",
    )


def _headline(cell: SweepCell) -> tuple[str, str]:
    if cell.steps:
        whole, words = height(cell.steps, cell.settings)
        found = times_cell(whole)
        return found.text, f"{found.interval} {words}, at {place_text(cell.ranks, cell.nodes)}".lstrip()
    name, place = "the default" if cell.has_default else "the first setting", place_text(cell.ranks, cell.nodes)
    if cell.best_ratio is None:
        return DASH, f"no setting is faster than {name} for certain, at {place}"
    found = times_cell(cell.best_ratio)
    basis = basis_text(cell.best_ratio)
    return found.text, f"{OVER[cell.to_target]} {name} {found.interval} by {cell.best}, at {place}; {basis}"


def _order(run: Run) -> tuple[int, int]:
    """The order of the request: every second repeat runs it backwards."""
    place = run.plan.series
    return place.repeat, place.position if place.repeat % 2 == 0 else -place.position


def _place(run: Run) -> tuple[int, int, str, str, str]:
    """Ranks, nodes, preset, precision, data: what settings must share to be compared."""
    plan = run.plan
    precision, data = str(plan.workload.train.precision), data_source(run)
    if plan.series.step:  # which may set both
        precision, data = "precision by step", plan.workload.data.source
    return (plan.layout.ranks, plan.layout.nodes, plan.workload.preset, precision, data)


def _by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    found = alike(runs, lambda run: tuple(f"{key}={value!r}" for key, value in sorted(run.plan.series.named.items())))
    return list(found.values())


def _rates(runs: Sequence[Run], table: RunTable) -> dict[RunKey, float]:
    return {table.repeat_key(run): table.rates[run.plan.run_id] for run in runs if run.plan.run_id in table.runs}


def _draft(runs: Sequence[Run], table: RunTable, smallest: Draft | None) -> Draft:
    """`smallest`: the settings at the smallest rank count; None there."""
    groups = _by_setting(runs)
    order = [step.name for step in runs[0].plan.series.ladder]
    if order:  # a ladder, whose steps keep their order where the first run of one is missing
        groups.sort(key=lambda group: order.index(group[0].plan.series.step))
    rates = [_rates(group, table) for group in groups]
    axes = groups[0][0].plan.series.axes
    defaults = [i for i, group in enumerate(groups) if rates[i] and not order and is_default(group[0].plan, axes)]
    base = defaults[0] if defaults else next(i for i, one in enumerate(rates) if one)
    reached: list[int | None] = [None] * len(groups)
    speeds: list[dict[RunKey, float]] = list(rates)
    if to_target := groups[0][0].plan.measure.until == "quality":
        for number, group in enumerate(groups):
            times = _times_to_target(group, table)
            reached[number] = len(times)
            is_whole = len(times) == _num_ended(group, table)
            speeds[number] = {key: 1 / seconds for key, seconds in times.items()} if is_whole else {}
    gains = gains_of(rates) if order else [{} for _ in groups]
    settings = tuple(
        SettingRuns(
            runs=tuple(group),
            measured=tuple(run for run in group if run.plan.run_id in table.runs),
            rates=rates[number],
            num_reached=reached[number],
            speeds=speeds[number],
            rate_logs=paired_logs(rates[number], rates[base]),
            logs=paired_logs(speeds[number], speeds[base]),
            gain_logs=gains[number],
        )
        for number, group in enumerate(groups)
    )
    combinations = [
        Combination(values=dict(sorted(one.plan.series.axes.items())), acting=acting_keys(one.plan), rates=one.speeds)
        for one in settings
        # What had no effect would make its axis look as if it had none.
        if one.speeds and not order and not one.inert
    ]
    levels = levels_of(combinations, dict(sorted(settings[base].plan.series.axes.items())))
    return Draft(
        settings=settings,
        base=base,
        has_default=bool(defaults),
        is_ladder=bool(order),
        to_target=to_target,
        first=settings if smallest is None else smallest.first,
        levels=levels,
        contrasts=contrasts(combinations, levels),
    )


def _times_to_target(runs: Sequence[Run], table: RunTable) -> dict[RunKey, float]:
    times = {}
    for run in runs:
        quality = run.record and run.record.quality
        if run.plan.run_id in table.runs and quality and quality.time_to_quality_s:
            times[table.repeat_key(run)] = quality.time_to_quality_s
    return times


def _num_ended(runs: Sequence[Run], table: RunTable) -> int:
    """Returns the runs that were trained to the end of their limit, or to the target; of others nobody knows."""
    return sum(run.plan.run_id in table.runs or run.state == "invalid" for run in runs)


def cell_of(draft: Draft, family: Family, table: RunTable) -> SweepCell:
    """Returns the comparison of all settings of one rank count, some of whose runs must have figures."""
    settings = tuple(_setting(number, draft, family, table) for number in range(len(draft.settings)))
    choice = SettingChoice(draft, settings, family.size)
    effects = tuple(_axis(key, draft, family) for key in draft.levels)
    runs = [run for one in draft.settings for run in one.runs]
    ranks, nodes, preset, precision, data = _place(runs[0])
    doubts = [*load_doubts(loads_of(runs)), *(doubt for run in runs for doubt in run_doubts(run))]
    plan, baseline = runs[0].plan, choice.baseline.label
    if draft.has_default:
        baseline = f"the default ({baseline})"
    elif not draft.is_ladder:
        baseline += ", the first setting with figures: the default is not in the sweep, or has none"
    if draft.is_ladder:
        verdict = step_words(plan, settings)
    else:
        keys = {answer: [axis.key for axis in effects if axis.verdict == answer.word] for answer in AXIS.values()}
        text = "; ".join(f"{answer.in_sentence}: {', '.join(names)}" for answer, names in keys.items() if names)
        sentences = [*choice.words(f"At {place_text(ranks, nodes)}"), sentence(text) if text else ""]
        verdict = " ".join(filter(None, sentences))
    return SweepCell(
        ranks=ranks,
        nodes=nodes,
        conditions=f"{preset} preset, {precision}, {'synthetic data' if data == 'synthetic' else data}",
        baseline=baseline,
        steps=plan.series.ladder,
        has_default=draft.has_default,
        to_target=draft.to_target,
        settings=settings,
        axes=effects,
        updates=updates_of([one.runs for one in draft.settings], table),
        best=choice.best.label if choice.best else "",
        best_ratio=choice.gain_of(choice.best),
        verdict=verdict,
        advice=remedy_of(doubts) or choice.advice(),
        needed_repeats=choice.needed_repeats,
        notes=tuple(_notes(draft, settings, table)),
    )


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


def _setting(number: int, draft: Draft, family: Family, table: RunTable) -> SweptSetting:
    """Returns a setting with its verdict: a difference must leave 1 out, stand after Holm, and leave the margin."""
    one, base = draft.settings[number], draft.settings[draft.base]
    plan, is_baseline = one.plan, one is base
    by_rate, by_speed, by_gain = (
        family.judge(logs, SETTING_MARGIN) for logs in (one.rate_logs, one.logs, one.gain_logs)
    )
    judged = by_gain if draft.is_ladder else by_speed
    is_faster_per_step = by_rate is not None and by_rate.outcome == "better"
    unity = by_definition(1.0, len(base.rates))
    ratio = unity if is_baseline else _estimate(by_rate)
    times = {key: 1 / speed for key, speed in one.speeds.items()} if draft.to_target else {}
    outcome = "baseline" if is_baseline else _outcome(one, judged, draft, num_ended=_num_ended(one.runs, table))
    adjusted_p = None
    if not is_baseline and by_speed is not None:
        adjusted_p = family.adjusted_p(one.gain_logs if draft.is_ladder else one.logs)
    step = next((step for step in plan.series.ladder if step.name == plan.series.step), None)
    reasons = {item.run.plan.run_id: f"{item.state}: {item.why}" for item in table.without}
    missing = [run.plan.run_id for run in one.runs if run not in one.measured]
    rate_base = geometric_mean_estimate(base.rates).value
    return SweptSetting(
        values=tuple((key, value_text(key, value)) for key, value in sorted(plan.series.named.items())),
        label=label(plan.series.named),
        is_baseline=is_baseline,
        throughput=geometric_mean_estimate(one.rates, f"{plan.workload.sample_unit}/s") if one.rates else None,
        ratio=ratio,
        gain=_estimate(by_gain),
        efficiency=efficiency(one, draft.first) if step and one.rates else None,
        published=published_text(step.published) if step and step.published else "",
        num_reached=one.num_reached,
        time=geometric_mean_estimate(times, "s") if times else None,
        sooner=(unity if is_baseline else _estimate(by_speed)) if times else None,
        is_faster_per_step=is_faster_per_step,
        adjusted_p=adjusted_p,
        verdict=cast("SettingWord", SETTING[outcome].word),
        outcome=outcome,
        num_runs=len(one.measured),
        num_planned=max(len(one.runs), plan.series.repeats),
        why=reasons[missing[0]] if missing else "",
        changes=changed_arithmetic(plan),
        inert=one.inert,
        autotune=autotuned(one.measured, table, ratio, rate_base, is_faster=is_faster_per_step),
        # Runs that end at a target end after unequal samples.
        losses=None if draft.to_target else losses(one.measured, [other.measured for other in draft.settings], table),
        strategy=plan.strategy,
        redraws_dropout=plan.redraws_dropout,
        **costs(one.measured, table),
        options=options(plan),
        run_ids=tuple(run.plan.run_id for run in one.measured),
    )


def _estimate(verdict: Verdict | None) -> Estimate | None:
    return None if verdict is None else verdict.estimate


def _outcome(one: SettingRuns, judged: Verdict | None, draft: Draft, *, num_ended: int) -> str:
    """Returns the outcome of a setting that is not the baseline, or the state for which it has none."""
    outcome = "no figure" if judged is None else judged.outcome
    if draft.to_target and not one.speeds and num_ended:
        return "target missed"
    if draft.to_target and one.speeds and judged is None:
        return "undecided"
    if not draft.to_target and outcome == "better" and trains_apart(one.plan):
        return "faster per step"
    return outcome


def _notes(draft: Draft, settings: Sequence[SweptSetting], table: RunTable) -> Iterator[str]:
    inert = sum(bool(setting.inert) for setting in settings)
    if inert:
        yield (
            f"In {inert} of {len(settings)} settings a requested value had no effect; they are marked, cannot be the "
            "best, and are left out of the axes."
        )
    measured = [run for one in draft.settings for run in one.measured]
    devices = sorted({rank.device.split(":")[0] for run in measured if run.record for rank in run.record.ranks})
    if len(devices) > 1:
        yield f"Runs were on different devices ({', '.join(devices)}): the ratios hold that difference too."
    facts = {
        label(found[0].plan.series.named): {run.plan.run_id: run_facts(run) for run in found}
        for found in _by_setting(measured)
    }
    if averaged := averaged_unlike(facts):
        yield sentence(averaged)
    swept = {key for run in measured for key in run.plan.series.axes}
    if "train.batch_per_rank" in swept and all(run.plan.workload.data.is_synthetic for run in measured):
        swept.add("data.num_samples")  # a pool of a few batches
    differences = [one for one in compared_unlike(facts) if one.key not in swept]
    if differences:
        yield f"Settings differ in {named(differences)}; unless the swept keys set that, the ratios hold it too."
    repeats = [set(one.rates) for one in draft.settings if one.rates]
    common, every = len(set.intersection(*repeats)), len(set.union(*repeats))
    if draft.is_ladder and common < every:
        shared = f"{common} of {every} repeats"
        yield f"Only over the {shared} that all steps have do gains multiply exactly to the last ratio."
