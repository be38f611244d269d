"""A ladder: each setting is a step on top of those before it, and is judged by what it adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlbench.records.scan import Run
from dlbench.report.wording import basis_text, percent, place_text, times_text
from dlbench.specs.plan import Published, RunPlan
from dlbench.stats.estimates import Estimate, by_definition, paired_logs
from dlbench.stats.pairing import RunKey, in_all
from dlbench.views.sweep.settings import STEP_VERDICTS, Setting, ratio_of

Rates = Mapping[RunKey, float]


def in_common(rates: Sequence[Rates]) -> list[dict[RunKey, float]]:
    """The repeats that all steps with figures have: only over these do gains multiply to last over first, exactly."""
    known = [one for one in rates if one]
    keys = in_all(*known) if known else []
    return [{key: one[key] for key in keys} if one else {} for one in rates]


def gains_of(rates: Sequence[Rates]) -> tuple[dict[RunKey, float], ...]:
    """Log ratios of each step over the last one before it that has figures."""
    found: list[dict[RunKey, float]] = []
    before: Rates = {}
    for one in rates:
        found.append(paired_logs(one, before) if one and before else {})
        before = one or before
    return tuple(found)


def efficiency(plan: RunPlan, rates: Rates, first: Sequence[tuple[Run, Rates]]) -> Estimate | None:
    """Share of linear scaling of a step, from the same step at the smallest rank count.

    `first`: the steps there, in order; where the step could not act there, the one before it is what it was.
    """
    order = [step.name for step in plan.series.ladder]
    upto = order[: order.index(plan.series.step) + 1]
    ranks = first[0][0].plan.layout.ranks
    if ranks == plan.layout.ranks:
        return by_definition(1.0, len(rates), "fraction")
    base = [one for run, one in first if one and run.plan.series.step in upto]
    logs = paired_logs(rates, base[-1]) if base else {}
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
    whole = next((one.ratio for one in reversed(settings) if one.gain is not None and one.ratio), None)
    end = f"; all together {times_text(whole)} the baseline ({basis_text(whole)})" if whole else ""
    return f"At {place_text(plan.layout.ranks, plan.layout.nodes)}: {'; '.join(parts)}{end}."
