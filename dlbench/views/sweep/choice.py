"""The choice of a setting of a sweep at one rank count, or of steps of a ladder, each on top of those before it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, variance

from dlbench.analysis.scaling import losses_text
from dlbench.records.scan import Run
from dlbench.report.wording import (
    basis_text,
    percent,
    place_text,
    reached_text,
    repeat_text,
    sentence,
    times_text,
    times_value,
    units_text,
)
from dlbench.specs.plan import AxisValue, LadderStep, Published, RunPlan
from dlbench.stats.estimates import MIN_RUNS, Estimate, gain_of_best, means_of, paired_logs
from dlbench.stats.multiplicity import pooled_freedom, repeats_for
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Pair, judge, ratio_of_logs
from dlbench.stats.verdict_words import LADDER_STEP, SETTING_MARGIN, SETTING_MARGIN_TEXT
from dlbench.units import first_of
from dlbench.views.sweep.settings import SweptSetting

Rates = Mapping[RunKey, float]  # By repeat.
OVER = {False: "the throughput of", True: "as fast to the target as"}  # By whether runs train to a target.
MANY_REPEATS = 100  # More: the scatter is the problem, not the number of runs.
_MAX_NAMED = 3  # Settings named in a sentence; the others are counted.


@dataclass(frozen=True, kw_only=True)
class SettingRuns:
    """The runs of one setting."""

    runs: tuple[Run, ...]
    measured: tuple[Run, ...]  # Those with figures.
    rates: Rates  # Throughput, samples per second.
    num_reached: int | None  # Runs that met their target; None if runs measure speed.
    speeds: Rates  # The figure that decides: 1 / time to the target (empty if a run missed it), else rates.
    rate_logs: Rates  # Logarithms of the rates over the baseline's, of the repeats that both have.
    logs: Rates  # Logarithms of the speeds over the baseline's.
    gain_logs: Rates  # Logarithms of the rates of a ladder's step over those of the step before; else empty.

    @property
    def plan(self) -> RunPlan:
        return self.runs[0].plan

    @property
    def inert(self) -> tuple[str, ...]:
        records = [run.record for run in self.measured if run.record]
        return tuple(sorted(set().union(*(record.inert for record in records))))


@dataclass(frozen=True, kw_only=True)
class Draft:
    """All settings at one rank count."""

    settings: tuple[SettingRuns, ...]
    base: int  # The setting that the others are measured against.
    has_default: bool
    is_ladder: bool
    to_target: bool
    first: Sequence[SettingRuns]  # The settings at the smallest rank count.
    levels: Mapping[str, Sequence[AxisValue]]
    contrasts: Mapping[Pair, Rates]

    @property
    def comparisons(self) -> list[Rates]:
        others = [setting for index, setting in enumerate(self.settings) if index != self.base]
        if self.is_ladder:
            return [setting.gain_logs for setting in others]
        logs = [setting.logs for setting in others] + [setting.rate_logs for setting in others]
        return [*logs, *self.contrasts.values()]


def gains_of(rates: Sequence[Rates]) -> list[dict[RunKey, float]]:
    """Returns log ratios of each step over the last one before it that shares a repeat with it, by common repeat."""
    gains: list[dict[RunKey, float]] = []
    for index, step_rates in enumerate(rates):
        logs = (paired_logs(step_rates, rates_before) for rates_before in reversed(rates[:index]))
        gains.append(next(filter(None, logs), {}))
    return gains


def efficiency(step: SettingRuns, first: Sequence[SettingRuns]) -> Estimate | None:
    """Returns the share of linear scaling, from the same step or the last before it at the smallest rank count."""
    ranks, fewest = step.plan.layout.ranks, first[0].plan.layout.ranks
    order = [rung.name for rung in step.plan.series.ladder]
    names = order[: order.index(step.plan.series.step) + 1]
    base_rates = [other.rates for other in first if other.rates and other.plan.series.step in names]
    if not base_rates or fewest >= ranks:
        return None
    logs = paired_logs(step.rates, base_rates[-1])
    return ratio_of_logs(logs).scaled(fewest / ranks, "fraction") if logs else None


def published_text(published: Published) -> str:
    """Returns a published figure of a step, with its source."""
    figure = f"{percent(published.value)} efficiency"
    if published.unit == "gain":
        figure = f"{published.value:g}x"
    return f"{figure}: {published.what} ({published.source})"


def step_words(plan: RunPlan, settings: Sequence[SweptSetting]) -> str:
    """Returns which steps pay and which do not, in one sentence."""
    parts = []
    for outcome, answer in LADDER_STEP.items():
        steps = []
        for setting in settings:
            if setting.outcome == outcome and not setting.is_baseline:
                gain = f" ({times_text(setting.gain)})" if setting.gain else ""
                steps.append(setting.label + gain)
        if steps:
            parts.append(f"{answer.in_sentence}: {', '.join(steps)}")
    skipped = [step.name for step in plan.series.ladder if step.skipped]
    if skipped:
        parts.append(f"cannot act here: {', '.join(skipped)}")
    ratio, words = height(plan.series.ladder, settings)
    if ratio:
        parts.append(f"{times_text(ratio)} {words} ({basis_text(ratio)})")
    return f"At {place_text(plan.layout.ranks, plan.layout.nodes)}: {'; '.join(parts)}."


def height(steps: Sequence[LadderStep], settings: Sequence[SweptSetting]) -> tuple[Estimate | None, str]:
    """Returns the ratio of the last step with figures to the baseline, and its meaning; None without figures."""
    base = next(index for index, setting in enumerate(settings) if setting.is_baseline)
    last = max(index for index, setting in enumerate(settings) if setting.ratio)
    name = f"that of {settings[base].label}" if base else "the baseline"
    words = f"{name} with {last - base} of {len(steps) - 1} steps"
    if last > base:
        return settings[last].ratio, words
    return None, words


class SettingChoice:
    """The choice among the settings at one rank count."""

    def __init__(self, draft: Draft, settings: tuple[SweptSetting, ...], family_size: int) -> None:
        self.draft, self.settings, self.baseline = draft, settings, settings[draft.base]
        self.base_name = f"the default ({self.baseline.label})" if draft.has_default else self.baseline.label
        others = [setting for setting in settings if not setting.is_baseline]
        self.compared = [setting for setting in others if setting.decides or setting.outcome == "target missed"]
        self.is_missed = draft.to_target and self.baseline.decides is None
        # The fastest of those that are faster for certain and are what their name says; of all, and of those that
        # compute what the baseline computes.
        certain = [setting for setting in self.compared if setting.outcome == "better" and not setting.inert]
        exact = [setting for setting in certain if not setting.changes]
        self.best = max(certain, key=_gain, default=None)
        self.best_exact = max(exact, key=_gain, default=None)
        self.ties = [setting for setting in settings if self._is_tie(setting)]
        self.needed_repeats = self._needed_repeats(family_size)

    def _is_tie(self, setting: SweptSetting) -> bool:
        if self.best is None or setting is self.best or setting.inert:
            return False
        best_runs = self.draft.settings[self.settings.index(self.best)]
        setting_runs = self.draft.settings[self.settings.index(setting)]
        logs = paired_logs(best_runs.speeds, setting_runs.speeds)
        return bool(logs) and not judge(ratio_of_logs(logs), SETTING_MARGIN, centre=1.0, none_at=1.0).is_difference

    def _needed_repeats(self, family_size: int) -> int | None:
        samples = []  # Means by session of the log ratios of undecided settings.
        for setting, draft in zip(self.settings, self.draft.settings, strict=True):
            if setting.outcome in ("undecided", "insufficient"):
                means = _means(draft.gain_logs if self.draft.is_ladder else draft.logs)
                if len(means) >= MIN_RUNS:
                    samples.append(means)
        if not samples:
            return None
        pooled = math.sqrt(fmean(variance(means) for means in samples))
        freedom = pooled_freedom(len(samples), fmean(map(len, samples)))
        return max(MIN_RUNS, repeats_for(pooled, SETTING_MARGIN, family_size, freedom))

    def gain_of(self, best: SweptSetting | None) -> Estimate | None:
        """Returns the gain of the best of all settings, corrected for having been chosen."""
        if best is None:
            return None
        others = [index for index in range(len(self.settings)) if index != self.draft.base]
        samples = [_means(self.draft.settings[index].logs) for index in others]
        gain, ratio = gain_of_best(samples, others.index(self.settings.index(best))), best.decides
        return gain if ratio is None else replace(gain, n=ratio.n, sessions=ratio.sessions)

    def words(self, start: str) -> list[str]:
        best, ratio = self.best, self.gain_of(self.best)
        if self.is_missed:
            met = reached_text(self.baseline.num_reached or 0, self.baseline.num_runs)
            return [f"{start} {met} of {self.base_name} met the target: there is no time to compare others with."]
        if best is None or best.decides is None or ratio is None:
            return [f"{start} {_no_best(self.compared, self.base_name)}"]
        count = len(self.compared)
        basis = f"{basis_text(ratio)}, in pairs"
        if count > 1:
            basis += f", corrected for the choice among {count}; {times_value(best.decides)} as measured"
        parts = [
            f"{start} the best of {count + 1} settings is {best.label}: {times_text(ratio)} "
            f"{OVER[self.draft.to_target]} {self.base_name} ({basis})."
        ]
        if best.changes:
            parts.append(f"It changes the arithmetic ({', '.join(best.changes)}){loss_text(best)}.")
            exact, exact_gain = self.best_exact, self.gain_of(self.best_exact)
            if exact is not None and exact_gain is not None:
                parts.append(f"Of those that do not, the best is {exact.label}: {times_text(exact_gain)}.")
        elif best.strategy != self.baseline.strategy:
            parts.append(sentence(strategy_words(best, self.baseline)))
        if self.ties:
            labels = first_of([setting.label for setting in self.ties], _MAX_NAMED, "; ")
            parts.append(f"Not distinguishable from it: {labels}.")
        return parts

    def advice(self) -> str:
        if self.is_missed:
            return "Let the baseline meet the target first: quality.max_epochs or max_samples, or quality.target."
        if self.best is not None:
            return self._advice_to_run(self.best)
        if not self.compared:
            return "Repeat the settings that have no figures."
        for setting in self.compared:
            if setting.outcome == "faster per step":
                why = "a step of it is not the same training"
                return f"Train to a target (--to-accuracy) with {setting.options} and without: {why}."
        default = "the default" if self.draft.has_default else ""
        if all(setting.outcome in ("equal", "worse", "target missed") for setting in self.compared):
            return f"Keep {default or self.baseline.options}: nothing that was swept is worth setting."
        ratios = [setting.decides for setting in self.compared if setting.decides is not None]
        fewest = min(ratios, key=attrgetter("units"))
        text = f"no setting is distinguishable from {default or self.baseline.label} as the better one"
        needed = self.needed_repeats
        if needed is None:
            return sentence(f"{repeat_text(fewest)}: {text} in {units_text(fewest)}")
        if needed > MANY_REPEATS:
            cost = f"a difference of {SETTING_MARGIN_TEXT} would take {needed} repeats of each"
            return f"Find out first why runs of one setting differ: {cost}."
        return sentence(f"{repeat_text(fewest, needed)}: {text}; that many show a difference of {SETTING_MARGIN_TEXT}")

    def _advice_to_run(self, best: SweptSetting) -> str:
        if best.changes and self.best_exact is not None and self.best_exact in self.ties:
            best = self.best_exact
        text = f"Run with {best.options}"
        if not best.changes or self.draft.to_target:
            return f"{text}."
        otherwise = "keep the default"
        if self.best_exact is not None:
            otherwise = f"run with {self.best_exact.options}"
        return f"{text} if the changed arithmetic is acceptable; otherwise {otherwise}."


def _means(logs: Rates) -> list[float]:
    return means_of(logs) if logs else []


def _gain(setting: SweptSetting) -> float:
    return setting.decides.value if setting.decides else 0.0


def _no_best(others: Sequence[SweptSetting], base_name: str) -> str:
    if not others:
        return f"only {base_name} has figures: there is nothing to compare."
    ratios = [setting.decides for setting in others if setting.decides is not None]
    if ratios and any(setting.outcome == "insufficient" for setting in others):
        ratios.sort(key=attrgetter("value"))
        ends = dict.fromkeys(map(times_value, (ratios[0], ratios[-1])))
        fewest = units_text(min(ratios, key=attrgetter("units")))
        return f"nothing is decided in {fewest} ({' to '.join(ends)} of {base_name})."
    counts = Counter(map(_outcome_title, others))
    text = ", ".join(f"{count} {title}" for title, count in counts.items())
    goal = "" if others[0].num_reached is None else " to the target"
    return f"no setting is faster{goal} than {base_name} for certain: of {len(others)} others {text}."


def _outcome_title(setting: SweptSetting) -> str:
    if setting.outcome == "better":  # It had no effect, or it would be the best.
        return "faster but not what was asked for"
    return setting.verdict_title.replace(";", ",")


def strategy_words(setting: SweptSetting, baseline: SweptSetting | None = None) -> str:
    """Returns what another strategy than the baseline's changes: memory, not the mathematics, as its loss shows."""
    text = "the same mathematics"
    if setting.redraws_dropout:
        text += " but for another draw of dropout"
    text += f" (strategy {setting.strategy})"
    if setting.memory_bytes and baseline is not None and baseline.memory_bytes:
        text += f", {setting.memory_bytes / baseline.memory_bytes:.2f} times the memory per rank"
    return text + loss_text(setting)


def loss_text(setting: SweptSetting) -> str:
    """Returns the loss next to its reference's, to be appended to a clause; empty if it is not compared."""
    losses = setting.losses
    if losses is None:
        return ""
    if losses.own is None:
        return "; its loss is not finite"
    if losses.reference is None:
        return f"; its loss cannot be compared: {losses.why}"
    return f"; {losses_text(losses.own.value, losses.reference.value, losses.reference_label)}"
