"""A ladder: each setting is a step on top of those before it, and is judged by its gain over them."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.wording import basis_text, percent, place_text, times_text
from dlbench.specs.plan import LadderStep, Published, RunPlan
from dlbench.stats.estimates import Estimate, paired_logs
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import ratio_of_logs
from dlbench.stats.verdict_words import LADDER_STEP
from dlbench.views.sweep.drafts import Rates, SettingRuns
from dlbench.views.sweep.settings import SweptSetting


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
