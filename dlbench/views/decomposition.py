"""Costs of a step, measured by removal of input or gradient exchange (`dlbench run --decompose`). By repeat, the saving
is the mean step of the plain run minus that of the run without the phase; it is compared with that phase of the same
plain runs, means over all ranks, stragglers included.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, cast

from dlbench.analysis.attribution import about_means
from dlbench.analysis.comparability import run_facts
from dlbench.analysis.measures import PARTS, RunMeasures
from dlbench.analysis.repeats import mixed_configurations
from dlbench.analysis.scaling import Twins, twins
from dlbench.records.scan import Run
from dlbench.report.document import Section, with_rows
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Column, Sheet, column, columns_of
from dlbench.report.wording import basis_text, figure_text, percent, place_text, repeat_text
from dlbench.specs.plan import RunPlan, Variant
from dlbench.stats.estimates import MIN_RUNS, Estimate, geometric_mean_estimate, mean_estimate, of_known
from dlbench.stats.pairing import RunKey
from dlbench.stats.verdict import Verdict, judge
from dlbench.stats.verdict_words import DECOMPOSITION
from dlbench.views.model import Report, ReportSource, ReportView, place_of

Phase = Literal["input", "exchange"]

TAKEN_AWAY: dict[Phase, Variant] = {"input": "synthetic-input", "exchange": "no-exchange"}  # By removed phase.

GapWord = Literal["agree", "differ", "undecided", "insufficient"]  # About `MARGIN` of a step.

MARGIN = 0.01  # Share of a step below which a gap between difference and phase is negligible.

WITHOUT: Mapping[Phase, str] = {"input": "with synthetic input", "exchange": "without exchange"}

OWN_PARTS = tuple(name for name in PARTS if name != "imbalance")  # They sum to the mean step.

Parts = Mapping[str, float]  # Seconds per step of each of `OWN_PARTS`.


@dataclass(frozen=True, kw_only=True)
class PhaseRemoval:
    """A removed phase; seconds per step, means over pairs of runs."""

    what: Phase = field(metadata=column("Without"))
    seconds: Estimate = field(metadata=column("Shorter by", "shorter_s"))
    share: Estimate = field(metadata=column("Of the step", "shorter_fraction"))
    phase_s: Estimate = field(metadata=column("Phase"))  # The phase of that name in the plain runs.
    gap_s: Estimate = field(metadata=column("Gap"))
    verdict: GapWord = field(metadata=column("Verdict"))
    judged: Verdict = field(metadata={HIDDEN: False})  # Verdict on the gap.


@dataclass(frozen=True, kw_only=True)
class SeriesPoint:
    """A scaling point of a series with control runs."""

    series: str = field(metadata=column("Series", limit=64))
    workload: str = field(metadata=column("Workload", limit=64))
    preset: str
    engine: str
    exchanged_by: str  # The engine in words, with dlbench's own buckets where it has them.
    ranks: int
    nodes: int


def series_facts(plan: RunPlan) -> dict[str, Any]:
    """Returns the fields of `SeriesPoint`."""
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
    """The parts of the steps of a scaling point."""

    scaling: str
    step_s: Estimate | None = field(metadata=column("Step"))  # Of plain runs, mean over ranks and steps.
    differences: tuple[PhaseRemoval, ...]
    missing: tuple[str, ...]  # Planned comparisons without figures, in sentences.
    doubts: tuple[str, ...] = ()


def decompositions(runs: Sequence[Run]) -> tuple[Decomposition, ...]:
    """Returns scaling points of series with `dlbench run --decompose`, over the repeats that have all figures."""

    def is_decomposed(planned: Collection[Variant]) -> bool:
        # `dlbench io --tiers` has a view of its own.
        return "cached-input" not in planned and any(variant in planned for variant in TAKEN_AWAY.values())

    return tuple(map(_point, twins(runs, ("plain", *TAKEN_AWAY.values()), is_decomposed)))


def _point(twin_runs: Twins) -> Decomposition:
    parts = {variant: twin_runs.of(variant, _parts) for variant in twin_runs.runs}
    plain, missing, differences = parts["plain"], list(twin_runs.missing), []
    for phase, variant in TAKEN_AWAY.items():
        repeats = twin_runs.repeats(("plain", variant))
        if repeats:
            pairs = {key: (plain[key], parts[variant][key]) for key in repeats}
            differences.append(difference(phase, pairs))
        elif variant in twin_runs.planned:
            missing.append(f"{phase}: no repeat has figures both with and without it")
    facts: dict[str, dict[str, Mapping[str, str]]] = {}
    for variant, by_repeat in twin_runs.runs.items():
        if by_repeat:
            facts[variant] = {run.plan.run_id: run_facts(run) for run, _ in by_repeat.values()}
    steps_s = {key: sum(run_parts.values()) for key, run_parts in plain.items()}
    return Decomposition(
        **series_facts(twin_runs.plan),
        scaling=twin_runs.plan.series.scaling,
        step_s=of_known(geometric_mean_estimate, steps_s, "s"),
        differences=tuple(differences),
        missing=tuple(missing),
        doubts=tuple(doubt.text for doubt in mixed_configurations(facts)),
    )


def _parts(measures: RunMeasures) -> dict[str, float]:
    return {name: measures.parts[name] for name in OWN_PARTS}


def difference(phase: Phase, by_repeat: Mapping[RunKey, tuple[Parts, Parts]]) -> PhaseRemoval:
    """Returns the saving of removing a phase by pairs of plain run and variant, and whether it equals the phase."""

    def mean(values: Iterable[float], unit: str = "s") -> Estimate:
        return mean_estimate(dict(zip(by_repeat, values, strict=True)), unit)

    plain_parts = about_means([plain for plain, _ in by_repeat.values()])
    variant_parts = about_means([variant for _, variant in by_repeat.values()])
    savings_s, gaps_s = [], []
    for plain, variant in zip(plain_parts, variant_parts, strict=True):
        savings_s.append(sum(plain.values()) - sum(variant.values()))
        # Of the removed phase only the part that remains in the variant.
        others = {**plain, phase: 0.0}
        gaps_s.append(sum(others[name] - variant[name] for name in OWN_PARTS))
    step_s = sum(sum(plain.values()) for plain in plain_parts) / len(plain_parts)
    gap = mean(gaps_s)
    judged = judge(gap, MARGIN * step_s)
    return PhaseRemoval(
        what=phase,
        seconds=mean(savings_s),
        share=mean((saving_s / step_s for saving_s in savings_s), "fraction"),
        phase_s=mean(plain[phase] for plain in plain_parts),
        gap_s=gap,
        verdict=cast("GapWord", DECOMPOSITION[judged.outcome].word),
        judged=judged,
    )


def decomposition_lines(points: Sequence[Decomposition]) -> list[str]:
    """Returns for each scaling point its title and step, then a line indented by two blanks per difference."""
    lines = []
    for point in points:
        lines.append(_title(point))
        lines += [f"  {text}" for text in _sentences(point)]
    return lines


class DecompositionView(ReportView):
    """Costs of steps by removal, over all series with such runs."""

    id = "decomposition"
    title = "Decomposition"
    key = "decomposition"

    def numbers(self, source: ReportSource) -> tuple[Decomposition, ...]:
        return decompositions(source.scan.runs)

    def shown(self, report: Report, points: tuple[Decomposition, ...]) -> Section:
        """Returns each scaling point in sentences, and all differences in one table."""
        sections = []
        for number, point in enumerate(points, 1):
            section_id, words = f"decomposition-{number}", tuple(_sentences(point))
            sections.append(Section(id=section_id, title=_title(point), words=words, in_contents=False))
        return Section(sections=tuple(sections), sheets=with_rows(_sheet(points)))


def _sheet(points: Sequence[Decomposition]) -> Sheet[tuple[Decomposition, PhaseRemoval]]:
    engine: Column[Any] = Column("engine", "Engine", "engine", "exchanged_by")
    picks = ("series", "workload", "preset", engine, Column[Any]("", "At", place_of), "ranks", "nodes", "step_s")
    pairs: Column[Any] = Column("pairs", "Pairs", "seconds.n")
    differences = columns_of(
        PhaseRemoval, "what", "seconds", "share", "phase_s", "gap_s", "verdict", pairs, of=itemgetter(1)
    )
    rows = [(point, removal) for point in points for removal in point.differences]
    return Sheet(
        name="decomposition",
        title="Steps without input or exchange, against the phases of plain runs",
        columns=(*columns_of(Decomposition, *picks, of=itemgetter(0)), *differences),
        rows=rows,
        caption="Geometric means over pairs of interleaved runs, all ranks, per step. Phase: input wait, or gradient "
        "exchange after backward, in the plain runs. Gap: shortening of the step minus the phase.",
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
    for removal in point.differences:
        is_longer = removal.seconds.value < 0
        seconds, share = _turned(removal.seconds, is_longer), _turned(removal.share, is_longer)
        word = "longer" if is_longer else "shorter"
        yield (
            f"{removal.what}: {WITHOUT[removal.what]} a step is {figure_text(seconds)} {word}, {figure_text(share)} of "
            f"it ({basis_text(share)}); the phase itself takes {figure_text(removal.phase_s)}: {_verdict(removal)}"
        )
    yield from (f"not compared: {text}" for text in point.missing)


def _turned(estimate: Estimate, is_turned: bool) -> Estimate:
    return estimate.mapped(operator.neg, estimate.unit) if is_turned else estimate


def _verdict(removal: PhaseRemoval) -> str:
    outcome = removal.judged.outcome
    if outcome == "equal":
        return f"both agree within {percent(MARGIN, 0)} of a step"
    is_less = removal.gap_s.value < 0
    amount = f"{figure_text(_turned(removal.gap_s, is_less))} {'less' if is_less else 'more'}"
    gap = f"removing it saves {amount} than the phase"
    repeat = repeat_text(removal.gap_s, removal.judged.units_wanted)
    if outcome == "insufficient":
        unit = "sessions" if (removal.gap_s.sessions or 1) > 1 else "pairs"
        return f"{gap}; {removal.gap_s.units} of {MIN_RUNS} {unit} that a verdict needs: {repeat}"
    if outcome == "undecided":
        return f"{gap}, within the noise at {percent(MARGIN, 0)} of a step: {repeat}"
    return gap
