"""What a step costs, found by taking things away: real against synthetic input, with against without exchange.

For each repeat k of a scaling point, with T the mean over ranks and steps of the step time, seconds:

* input: T_plain(k) - T_synthetic(k);
* exchange: T_plain(k) - T_apart(k), waiting for stragglers included (T - T_nocomm).

Beside them stands what the phases of the same plain runs say, means over all ranks, the stragglers too: the wait for
input, and the gradient exchange after the backward pass.
Both need not agree: the gap between them is, part by part, what other parts of a step gain or lose without the one:

    T_plain - T_variant - phase_plain = sum over other parts of (part_plain - part_variant) - phase_variant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlbench.reading.attribution import about_means
from dlbench.reading.comparability import told_of
from dlbench.reading.measures import PARTS, measured_or_why
from dlbench.reading.repeats import unlike_runs
from dlbench.records.scan import Run
from dlbench.specs.plan import Variant
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, mean_estimate
from dlbench.stats.verdicts import Placed, placed
from dlbench.views.decomposition.reasons import What, reason

Verdict = Literal["agree", "differ", "undecided", "insufficient"]
"""agree: the gap's whole interval lies within `MARGIN` of a step; differ: the whole interval lies outside; undecided:
it reaches over an end. insufficient: fewer than `MIN_RUNS` pairs have no 95 % interval, and allow no verdict."""

_VERDICTS: Mapping[Placed, Verdict] = {
    "within": "agree",
    "below": "differ",
    "above": "differ",
    "undecided": "undecided",
    "insufficient": "insufficient",
}

TAKEN_AWAY: dict[What, Variant] = {"input": "synthetic-input", "exchange": "no-exchange"}
"""What a variant goes without; the name is also that of the phase."""

MARGIN = 0.01
"""Share of a step below which a gap between difference and phase is negligible."""

OWN_PARTS = tuple(name for name in PARTS if name != "imbalance")
"""Parts that sum to the mean step over ranks; how far the slowest rank is behind is not one of them."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that was taken away; seconds per step, means over pairs of runs."""

    what: What
    seconds: Estimate
    """How much shorter a step is without it."""
    share: Estimate
    """The same as a fraction of the plain step."""
    phase_s: Estimate
    """What the phase of that name holds in the plain runs."""
    gap_s: Estimate
    """`seconds` less `phase_s`."""
    moved_s: Mapping[str, Estimate]
    """What the gap is made of, by part; sums to it. Positive: time that went away beyond the phase."""
    verdict: Verdict
    reason: str | None
    """Where most of the gap lies, and what is likely behind it; None unless both differ."""


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """One scaling point of one series."""

    series: str
    workload: str
    preset: str
    engine: str
    scaling: str
    ranks: int
    nodes: int
    step_s: Estimate | None
    """The plain step, mean over ranks and steps, geometric mean over runs; None where no plain run has figures."""
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    """What of the plan could not be compared, in sentences."""
    doubts: tuple[str, ...] = ()
    """Why its runs are no repeats, in sentences."""


Parts = Mapping[str, float]
"""Seconds per step of each of `OWN_PARTS`."""


def decompositions(runs: Sequence[Run]) -> tuple[Decomposition, ...]:
    """Every scaling point whose series has variants of `dlbench run --decompose`, in order of series, ranks, nodes.

    Only repeats count of which both the plain run and the variant have figures. A copy is no repeat.
    """
    points: dict[tuple[str, str, str, int, int], list[Run]] = {}
    for run in runs:
        plan = run.plan
        axes = ", ".join(f"{key}={value}" for key, value in sorted(plan.series.axes.items()))
        key = plan.created, plan.series.id, axes, plan.layout.ranks, plan.layout.nodes
        points.setdefault(key, []).append(run)
    return tuple(_point(found) for _, found in sorted(points.items()) if _has_variants(found))


def _has_variants(runs: Sequence[Run]) -> bool:
    if any(run.plan.series.variant == "cached-input" for run in runs):  # `dlbench io --tiers` has a view of its own
        return False
    return any(run.plan.series.variant in TAKEN_AWAY.values() for run in runs)


def _point(runs: Sequence[Run]) -> Decomposition:
    measured: dict[Variant, dict[int, Parts]] = {}
    told: dict[str, dict[str, Mapping[str, str]]] = {}
    missing: list[str] = []
    for run in runs:
        series = run.plan.series
        known = measured.setdefault(series.variant, {})
        if series.repeat in known:  # a copied folder
            continue
        found, why = measured_or_why(run)
        if found is None:
            missing.append(why)
            continue
        told.setdefault(series.variant, {})[run.plan.run_id] = told_of(run)
        known[series.repeat] = {name: found.parts[name] for name in OWN_PARTS}
    plain = measured.get("plain", {})
    planned = {run.plan.series.variant for run in runs}
    differences = []
    for what, variant in TAKEN_AWAY.items():
        pairs = sorted(plain.keys() & measured.get(variant, {}).keys())
        if pairs:
            differences.append(difference(what, [(plain[k], measured[variant][k]) for k in pairs]))
        elif variant in planned:
            missing.append(f"{what}: no repeat has figures both with and without it")
    plan = min(runs, key=lambda run: run.plan.series.variant != "plain").plan
    return Decomposition(
        series=plan.series.id,
        workload=plan.workload.name,
        preset=plan.workload.preset,
        engine=plan.engine.name,
        scaling=plan.series.scaling,
        ranks=plan.layout.ranks,
        nodes=plan.layout.nodes,
        step_s=geometric_mean_estimate([_whole(parts) for parts in plain.values()], "s") if plain else None,
        differences=tuple(differences),
        missing=tuple(missing),
        doubts=tuple(doubt.text for doubt in unlike_runs(told)),
    )


def difference(what: What, pairs: Sequence[tuple[Parts, Parts]]) -> Difference:
    """What taking something away saves, and whether that is what its phase holds.

    Args:
        what: was taken away.
        pairs: the plain run and its variant, one pair for each repeat that has figures of both.
    """
    pairs = list(zip(*(about_means([pair[side] for pair in pairs]) for side in (0, 1)), strict=True))
    spared = [_whole(plain) - _whole(variant) for plain, variant in pairs]
    gaps = [_gap_parts(what, plain, variant) for plain, variant in pairs]
    gap = mean_estimate([sum(parts.values()) for parts in gaps], "s")
    moved = {name: mean_estimate([parts[name] for parts in gaps], "s") for name in OWN_PARTS}
    step = sum(_whole(plain) for plain, _ in pairs) / len(pairs)
    verdict = _VERDICTS[placed(gap, -MARGIN * step, MARGIN * step)]
    return Difference(
        what=what,
        seconds=mean_estimate(spared, "s"),
        share=mean_estimate([each / step for each in spared], "fraction"),
        phase_s=mean_estimate([plain[what] for plain, _ in pairs], "s"),
        gap_s=gap,
        moved_s=moved,
        verdict=verdict,
        reason=reason(what, gap, moved) if verdict == "differ" else None,
    )


def _gap_parts(what: What, plain: Parts, variant: Parts) -> dict[str, float]:
    """What the gap of one pair is made of; of its own phase only what is left of it in the variant."""
    return {name: (0.0 if name == what else plain[name]) - variant[name] for name in OWN_PARTS}


def _whole(parts: Parts) -> float:
    return sum(parts.values())
