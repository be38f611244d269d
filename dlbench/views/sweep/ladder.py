"""A ladder: each setting is a step on top of those before it, and is judged by what it adds to them."""

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


def gains_of(rates: Sequence[Rates]) -> tuple[dict[RunKey, float], ...]:
    """Log ratios of each step over the last one before it that shares a repeat with it, over those that both have."""
    logs = ((paired_logs(one, before) for before in reversed(rates[:i])) for i, one in enumerate(rates))
    return tuple(next(filter(None, found), {}) for found in logs)


def efficiency(one: SettingRuns, first: Sequence[SettingRuns]) -> Estimate | None:
    """Returns the share of linear scaling of a step, from the same step at the smallest rank count; None there.

    `first`: the steps there, in order; where the step could not act there, the one before it is what it was.
    """
    order = [step.name for step in one.plan.series.ladder]
    upto = order[: order.index(one.plan.series.step) + 1]
    ranks, least = one.plan.layout.ranks, first[0].plan.layout.ranks
    base = [other.rates for other in first if other.rates and other.plan.series.step in upto]
    logs = paired_logs(one.rates, base[-1]) if base and least < ranks else {}
    return ratio_of_logs(logs).scaled(least / ranks, "fraction") if logs else None


def published_text(found: Published) -> str:
    """What somebody published of a step, with its source."""
    value = f"{found.value:g}x" if found.unit == "gain" else f"{percent(found.value)} efficiency"
    return f"{value}: {found.what} ({found.source})"


def step_words(plan: RunPlan, settings: Sequence[SweptSetting]) -> str:
    """Which step pays and which does not, in one sentence."""
    parts = []
    for outcome, answer in LADDER_STEP.items():
        those = [
            f"{one.label} ({times_text(one.gain)})" if one.gain else one.label
            for one in settings
            if one.outcome == outcome and not one.is_baseline
        ]
        if those:
            parts.append(f"{answer.in_sentence}: {', '.join(those)}")
    left = [step.name for step in plan.series.ladder if step.skipped]
    parts += [f"cannot act here: {', '.join(left)}"] * bool(left)
    whole, words = height(plan.series.ladder, settings)
    parts += [f"{times_text(whole)} {words} ({basis_text(whole)})"] if whole else []
    return f"At {place_text(plan.layout.ranks, plan.layout.nodes)}: {'; '.join(parts)}."


def height(steps: Sequence[LadderStep], settings: Sequence[SweptSetting]) -> tuple[Estimate | None, str]:
    """The last step with figures over the baseline, and in words what that is of; None where none has them."""
    base = next(place for place, one in enumerate(settings) if one.is_baseline)
    last = max(place for place, one in enumerate(settings) if one.ratio)
    name = f"that of {settings[base].label}" if base else "the baseline"
    return settings[last].ratio if last > base else None, f"{name} with {last - base} of {len(steps) - 1} steps"
