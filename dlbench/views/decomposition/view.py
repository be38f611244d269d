"""Decompositions for people: sentences (`dlbench run --decompose`), and a section of `dlbench diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlbench.report.document import Section
from dlbench.report.table import Column, Sheet
from dlbench.report.wording import ENGINE_TITLES, basis_text, figure_text, percent, place_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.views.decomposition.numbers import MARGIN, Decomposition, Difference, decompositions
from dlbench.views.decomposition.reasons import WITHOUT, What
from dlbench.views.model import Report
from dlbench.views.view import ReportSource, ReportView

_TITLES: Mapping[What, str] = {"input": "input", "exchange": "exchange"}


def decomposition_lines(found: Sequence[Decomposition]) -> list[str]:
    """A paragraph per scaling point: its title and step, then a line indented by two blanks per difference."""
    return [line for point in found for line in (_title(point), *(f"  {text}" for text in _sentences(point)))]


def decomposition_section(found: Sequence[Decomposition]) -> Section | None:
    """Each scaling point in sentences, and all differences in one table; None where there are none."""
    if not found:
        return None
    return Section(
        id="decomposition",
        title="Decomposition",
        sections=tuple(
            Section(id=f"decomposition-{number}", title=_title(point), words=_sentences(point), in_contents=False)
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
        """Every scaling point whose series has variants."""
        return decompositions(source.scan.runs)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """None where no series has variants."""
        section = decomposition_section(report.all_of(Decomposition))
        return () if section is None else (section,)


Row = tuple[Decomposition, Difference]


def _sheet(found: Sequence[Decomposition]) -> Sheet[Row]:
    columns: tuple[Column[Row], ...] = (
        Column("series", "Series", lambda row: row[0].series, limit=64),
        Column("workload", "Workload", lambda row: row[0].workload, limit=64),
        Column("preset", "", lambda row: row[0].preset),
        Column("engine", "Engine", lambda row: row[0].engine, lambda row: ENGINE_TITLES[row[0].engine]),
        Column("", "At", lambda row: place_text(row[0].ranks, row[0].nodes)),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("step_s", "Step", lambda row: row[0].step_s, has_interval=True),
        Column("what", "Without", lambda row: row[1].what),
        Column("shorter_s", "Shorter by", lambda row: row[1].seconds, has_interval=True),
        Column("shorter_fraction", "Of the step", lambda row: row[1].share, has_interval=True),
        Column("phase_s", "Phase", lambda row: row[1].phase_s, has_interval=True),
        Column("gap_s", "Gap", lambda row: row[1].gap_s, has_interval=True),
        Column("verdict", "Verdict", lambda row: row[1].verdict),
        Column("pairs", "Pairs", lambda row: row[1].seconds.n),
    )
    return Sheet(
        name="decomposition",
        title="Steps without input or exchange, against the phases of plain runs",
        columns=columns,
        rows=[(point, one) for point in found for one in point.differences],
        caption="Means over pairs of interleaved runs and over all ranks, per step. Phase: input wait, or gradient "
        "exchange after backward, in the plain runs. Gap: what the step is shorter by, less the phase.",
    )


def _title(point: Decomposition) -> str:
    step = "no plain run has figures"
    if point.step_s is not None:
        step = f"step {figure_text(point.step_s)} ({basis_text(point.step_s)})"
    return (
        f"{point.workload}, {point.preset} preset, {ENGINE_TITLES[point.engine]}, {point.scaling} scaling, "
        f"{place_text(point.ranks, point.nodes)}: {step}"
    )


def _sentences(point: Decomposition) -> tuple[str, ...]:
    doubts = (f"! {text}" for text in point.doubts)
    return (*doubts, *map(_sentence, point.differences), *(f"not compared: {text}" for text in point.missing))


def _sentence(one: Difference) -> str:
    is_less = one.seconds.value < 0
    seconds, share = (_turned(estimate, is_less) for estimate in (one.seconds, one.share))
    changed = f"{figure_text(seconds)} {'longer' if is_less else 'shorter'}, {figure_text(share)} of it"
    return (
        f"{_TITLES[one.what]}: {WITHOUT[one.what]} a step is {changed} ({basis_text(share)}); the phase itself takes "
        f"{figure_text(one.phase_s)}: {_verdict(one)}"
    )


def _turned(estimate: Estimate, is_turned: bool) -> Estimate:
    """An estimate with the other sign, if `is_turned`."""
    return estimate.mapped(lambda value: -value, estimate.unit) if is_turned else estimate


def _verdict(one: Difference) -> str:
    if one.verdict == "agree":
        return f"both agree within {percent(MARGIN, 0)} of a step"
    is_less = one.gap_s.value < 0
    amount = figure_text(_turned(one.gap_s, is_less))
    gap = f"removing it saves {amount} {'less' if is_less else 'more'} than the phase"
    if one.verdict == "insufficient":
        return f"{gap}; {one.gap_s.n} of {MIN_RUNS} pairs measured that a verdict needs: use --repeats {MIN_RUNS}"
    if one.verdict == "undecided":
        return f"{gap}, within the noise at {percent(MARGIN, 0)} of a step: more repeats decide"
    return f"{gap}; {one.reason}"
