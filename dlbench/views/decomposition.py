"""What a step costs, found by taking things away: real against synthetic input, with against without gradient exchange
(`dlbench run --decompose`).

For each repeat k of a scaling point, with T the mean over ranks and steps of the step time, seconds:

* input: T_plain(k) - T_synthetic(k);
* exchange: T_plain(k) - T_apart(k), waiting for stragglers included (T - T_nocomm).

Next to them stands what the phases of the same plain runs say, means over all ranks, the stragglers too: the wait for
input, and the gradient exchange after the backward pass.
Both need not agree: the gap between them is what other parts of a step gain or lose without the one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, cast

from dlbench.analysis.attribution import about_means
from dlbench.analysis.comparability import run_facts
from dlbench.analysis.measures import PARTS
from dlbench.analysis.repeats import mixed_configurations
from dlbench.analysis.side_by_side import Twins, twins
from dlbench.records.scan import Run
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.report.wording import basis_text, figure_text, percent, place_text, repeat_text
from dlbench.specs.plan import RunPlan, Variant
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, mean_estimate
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Verdict, judge
from dlbench.stats.verdict_words import DECOMPOSITION
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView, place_of

What = Literal["input", "exchange"]

TAKEN_AWAY: dict[What, Variant] = {"input": "synthetic-input", "exchange": "no-exchange"}
"""What a variant goes without; the name is also that of the phase."""

GapWord = Literal["agree", "differ", "undecided", "insufficient"]
"""agree: the gap's whole interval lies within `MARGIN` of a step; differ: the whole interval lies outside."""

MARGIN = 0.01  # Share of a step below which a gap between difference and phase is negligible.

WITHOUT: Mapping[What, str] = {"input": "with synthetic input", "exchange": "without exchange"}

OWN_PARTS = tuple(name for name in PARTS if name != "imbalance")
"""Parts that sum to the mean step over ranks; how far the slowest rank is behind is not one of them."""

Parts = Mapping[str, float]  # Seconds per step of each of `OWN_PARTS`.


@dataclass(frozen=True, kw_only=True)
class PhaseRemoval:
    """One thing that was taken away; seconds per step, means over pairs of runs."""

    what: What = field(metadata=column("Without"))
    seconds: Estimate = field(metadata=column("Shorter by", "shorter_s"))
    share: Estimate = field(metadata=column("Of the step", "shorter_fraction"))
    phase_s: Estimate = field(metadata=column("Phase"))  # What the phase of that name holds in the plain runs.
    gap_s: Estimate = field(metadata=column("Gap"))
    verdict: GapWord = field(metadata=column("Verdict"))
    judged: Verdict = field(metadata={HIDDEN: False})  # On the gap.


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """One scaling point of one series with control runs."""

    series: str = field(metadata=column("Series", limit=64))
    workload: str = field(metadata=column("Workload", limit=64))
    preset: str
    engine: str
    exchanged_by: str  # The engine in words, with dlbench's own buckets where it has them.
    ranks: int
    nodes: int


def series_facts(plan: RunPlan) -> dict[str, Any]:
    """The fields of `SeriesPoint`."""
    return {
        "series": plan.series.id,
        "workload": plan.workload.name,
        "preset": plan.workload.preset,
        "engine": plan.engine.name,
        "exchanged_by": plan.engine_title,
        "ranks": plan.layout.ranks,
        "nodes": plan.layout.nodes,
    }


@dataclass(frozen=True, kw_only=True)
class Decomposition(SeriesPoint):
    """What the steps of one scaling point consist of."""

    scaling: str
    step_s: Estimate | None = field(metadata=column("Step"))
    """The plain step, mean over ranks and steps, geometric mean over runs; None where no plain run has figures."""
    differences: tuple[PhaseRemoval, ...]
    missing: tuple[str, ...]  # What of the plan could not be compared, in sentences.
    doubts: tuple[str, ...] = ()


def decompositions(runs: Sequence[Run]) -> tuple[Decomposition, ...]:
    """Every scaling point whose series has variants of `dlbench run --decompose`, in order of series, ranks, nodes.

    Only repeats count of which both the plain run and the variant have figures.
    """

    def is_wanted(planned: Collection[Variant]) -> bool:
        # `dlbench io --tiers` has a view of its own.
        return "cached-input" not in planned and any(variant in planned for variant in TAKEN_AWAY.values())

    return tuple(_point(found) for found in twins(runs, ("plain", *TAKEN_AWAY.values()), is_wanted))


def _point(found: Twins) -> Decomposition:
    parts = {
        variant: found.of(variant, lambda one: {name: one.parts[name] for name in OWN_PARTS}) for variant in found.runs
    }
    plain, missing, differences = parts["plain"], list(found.missing), []
    for what, variant in TAKEN_AWAY.items():
        if repeats := found.repeats(("plain", variant)):
            differences.append(difference(what, {k: (plain[k], parts[variant][k]) for k in repeats}))
        elif variant in found.planned:
            missing.append(f"{what}: no repeat has figures both with and without it")
    facts: dict[str, dict[str, Mapping[str, str]]] = {
        variant: {run.plan.run_id: run_facts(run) for run, _ in by_repeat.values()}
        for variant, by_repeat in found.runs.items()
        if by_repeat
    }
    return Decomposition(
        **series_facts(found.plan),
        scaling=found.plan.series.scaling,
        step_s=geometric_mean_estimate({k: sum(one.values()) for k, one in plain.items()}, "s") if plain else None,
        differences=tuple(differences),
        missing=tuple(missing),
        doubts=tuple(doubt.text for doubt in mixed_configurations(facts)),
    )


def difference(what: What, by_repeat: Mapping[RunKey, tuple[Parts, Parts]]) -> PhaseRemoval:
    """What taking something away saves by pairs of plain run and variant, and whether that is what its phase holds."""

    def mean(values: Iterable[float], unit: str = "s") -> Estimate:
        return mean_estimate(dict(zip(by_repeat, values, strict=True)), unit)

    pairs = list(zip(*(about_means([pair[side] for pair in by_repeat.values()]) for side in (0, 1)), strict=True))
    spared = [sum(plain.values()) - sum(variant.values()) for plain, variant in pairs]
    # Of its own phase only what is left of it in the variant.
    gaps = [
        {name: (0.0 if name == what else plain[name]) - variant[name] for name in OWN_PARTS} for plain, variant in pairs
    ]
    gap = mean(sum(parts.values()) for parts in gaps)
    step = sum(sum(plain.values()) for plain, _ in pairs) / len(pairs)
    judged = judge(gap, MARGIN * step)
    return PhaseRemoval(
        what=what,
        seconds=mean(spared),
        share=mean((each / step for each in spared), "fraction"),
        phase_s=mean(plain[what] for plain, _ in pairs),
        gap_s=gap,
        verdict=cast("GapWord", DECOMPOSITION[judged.outcome].word),
        judged=judged,
    )


def decomposition_lines(found: Sequence[Decomposition]) -> list[str]:
    """A paragraph per scaling point: its title and step, then a line indented by two blanks per difference."""
    return [line for point in found for line in (_title(point), *(f"  {text}" for text in _sentences(point)))]


def decomposition_section(found: Sequence[Decomposition]) -> Section:
    """Each scaling point in sentences, and all differences in one table."""
    return Section(
        id="decomposition",
        title="Decomposition",
        sections=tuple(
            Section(
                id=f"decomposition-{number}", title=_title(point), words=tuple(_sentences(point)), in_contents=False
            )
            for number, point in enumerate(found, 1)
        ),
        sheets=(_sheet(found),) if any(point.differences for point in found) else (),
    )


class DecompositionView(ReportView):
    """What steps cost by taking things away, over all series that did."""

    id = "decomposition"
    title = "Decomposition"
    key = "decomposition"

    def numbers(self, source: ReportSource) -> tuple[Decomposition, ...]:
        return decompositions(source.scan.runs)

    def shown(self, report: Report, found: tuple[Decomposition, ...]) -> Section:
        return decomposition_section(found)


def _sheet(found: Sequence[Decomposition]) -> Sheet[tuple[Decomposition, PhaseRemoval]]:
    engine: Column[Any] = Column("engine", "Engine", lambda point: point.engine, lambda point: point.exchanged_by)
    at: Column[Any] = Column("", "At", place_of)
    picks = ("series", "workload", "preset", engine, at, "ranks", "nodes", "step_s")
    pairs: Column[Any] = Column("pairs", "Pairs", lambda one: one.seconds.n)
    differences = columns_of(
        PhaseRemoval, "what", "seconds", "share", "phase_s", "gap_s", "verdict", pairs, of=itemgetter(1)
    )
    return Sheet(
        name="decomposition",
        title="Steps without input or exchange, against the phases of plain runs",
        columns=(*columns_of(Decomposition, *picks, of=itemgetter(0)), *differences),
        rows=[(point, one) for point in found for one in point.differences],
        caption="Geometric means over pairs of interleaved runs, all ranks, per step. Phase: input wait, or gradient "
        "exchange after backward, in the plain runs. Gap: what the step is shorter by, less the phase.",
    )


def _title(point: Decomposition) -> str:
    step = "no plain run has figures"
    if point.step_s is not None:
        step = f"step {figure_text(point.step_s)} ({basis_text(point.step_s)})"
    return (
        f"{point.workload}, {point.preset} preset, {point.exchanged_by}, {point.scaling} scaling, "
        f"{place_text(point.ranks, point.nodes)}: {step}"
    )


def _sentences(point: Decomposition) -> Iterator[str]:
    yield from (f"! {text}" for text in point.doubts)
    for one in point.differences:
        is_less = one.seconds.value < 0
        seconds, share = (_turned(estimate, is_less) for estimate in (one.seconds, one.share))
        changed = f"{figure_text(seconds)} {'longer' if is_less else 'shorter'}, {figure_text(share)} of it"
        yield (
            f"{one.what}: {WITHOUT[one.what]} a step is {changed} ({basis_text(share)}); the phase itself takes "
            f"{figure_text(one.phase_s)}: {_verdict(one)}"
        )
    yield from (f"not compared: {text}" for text in point.missing)


def _turned(estimate: Estimate, is_turned: bool) -> Estimate:
    return estimate.mapped(lambda value: -value, estimate.unit) if is_turned else estimate


def _verdict(one: PhaseRemoval) -> str:
    outcome = one.judged.outcome
    if outcome == "equal":
        return f"both agree within {percent(MARGIN, 0)} of a step"
    is_less = one.gap_s.value < 0
    amount = figure_text(_turned(one.gap_s, is_less))
    gap = f"removing it saves {amount} {'less' if is_less else 'more'} than the phase"
    more = repeat_text(one.gap_s, one.judged.units_wanted)
    if outcome == "insufficient":
        unit = "sessions" if (one.gap_s.sessions or 1) > 1 else "pairs"
        return f"{gap}; {one.gap_s.units} of {MIN_RUNS} {unit} that a verdict needs: {more}"
    if outcome == "undecided":
        return f"{gap}, within the noise at {percent(MARGIN, 0)} of a step: {more}"
    return gap
