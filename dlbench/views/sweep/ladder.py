"""A ladder: each setting is a step on top of those before it, and is judged by what it adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlbench.records.scan import Run
from dlbench.report.wording import basis_text, percent, place_text, times_text
from dlbench.specs.plan import LadderStep, Published, RunPlan
from dlbench.stats.estimates import Estimate, paired_logs
from dlbench.stats.pairing import RunKey
from dlbench.views.sweep.settings import STEP_VERDICTS, Setting, ratio_of

Rates = Mapping[RunKey, float]


def gains_of(rates: Sequence[Rates]) -> tuple[dict[RunKey, float], ...]:
    """Log ratios of each step over the last one before it that shares a repeat with it, over those that both have."""
    logs = ((paired_logs(one, before) for before in reversed(rates[:i])) for i, one in enumerate(rates))
    return tuple(next(filter(None, found), {}) for found in logs)


def efficiency(plan: RunPlan, rates: Rates, first: Sequence[tuple[Run, Rates]]) -> Estimate | None:
    """Share of linear scaling of a step, from the same step at the smallest rank count; None there.

    `first`: the steps there, in order; where the step could not act there, the one before it is what it was.
    """
    order = [step.name for step in plan.series.ladder]
    upto = order[: order.index(plan.series.step) + 1]
    ranks = first[0][0].plan.layout.ranks
    base = [one for run, one in first if one and run.plan.series.step in upto]
    logs = paired_logs(rates, base[-1]) if base and ranks < plan.layout.ranks else {}
    return ratio_of(logs).scaled(ranks / plan.layout.ranks, "fraction") if logs else None


def published_text(found: Published) -> str:
    """What somebody published of a step, with its source."""
    value = f"{found.value:g}x" if found.unit == "gain" else f"{percent(found.value)} efficiency"
    return f"{value}: {found.what} ({found.source})"


def step_words(plan: RunPlan, settings: Sequence[Setting]) -> str:
    """Which step pays and which does not, in one sentence."""
    parts = []
    for verdict, words in STEP_VERDICTS.items():
        those = [
            f"{one.label} ({times_text(one.gain)})" if one.gain else one.label
            for one in settings
            if one.verdict == verdict
        ]
        parts += [f"{words}: {', '.join(those)}"] * bool(those)
    left = [step.name for step in plan.series.ladder if step.skipped]
    parts += [f"cannot act here: {', '.join(left)}"] * bool(left)
    whole, words = height(plan.series.ladder, settings)
    parts += [f"{times_text(whole)} {words} ({basis_text(whole)})"] if whole else []
    return f"At {place_text(plan.layout.ranks, plan.layout.nodes)}: {'; '.join(parts)}."


def height(steps: Sequence[LadderStep], settings: Sequence[Setting]) -> tuple[Estimate | None, str]:
    """The last step with figures over the baseline, and in words what that is of; None where none has them."""
    base = next(place for place, one in enumerate(settings) if one.is_baseline)
    last = max(place for place, one in enumerate(settings) if one.ratio)
    name = f"that of {settings[base].label}" if base else "the baseline"
    return settings[last].ratio if last > base else None, f"{name} with {last - base} of {len(steps) - 1} steps"
