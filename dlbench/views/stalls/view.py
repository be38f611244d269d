"""The view `stalls`: what fetching and preparing samples costs, by difference (`dlbench io --tiers`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import dlbench
from dlbench.report.document import Document, Section
from dlbench.report.wording import ENGINE_TITLES, basis_text, figure_text, percent, value_text
from dlbench.stats.estimates import MIN_RUNS, Estimate
from dlbench.stats.verdicts import placed
from dlbench.views.model import Report
from dlbench.views.stalls.charts import stall_charts
from dlbench.views.stalls.numbers import IoTiers, StallPart, Stalls, Tier, stalls
from dlbench.views.stalls.tables import NOT_MEASURED, TIER_TITLES, parts_sheet, place, runs_sheet
from dlbench.views.view import ReportSource, ReportView

TITLE = "Input stalls"
NEGLIGIBLE = 0.01
"""Share of a step below which a stall, interval and all, costs nothing worth words."""
_NAMES = {"preparation": "Preparing samples (decode, augment)", "fetch": "Fetching them from storage"}


class StallsView(ReportView):
    """What input costs, over all series that ran with synthetic, cached and cold data."""

    id = "stalls"
    title = TITLE
    key = "stalls"

    def numbers(self, source: ReportSource) -> tuple[Stalls, ...]:
        """Every scaling point of `dlbench io --tiers`."""
        return stalls(source.scan.runs)

    def sections(self, report: Report) -> tuple[Section, ...]:
        """None where no series is of that kind."""
        section = stalls_section(report.all_of(Stalls))
        return () if section is None else (section,)


def stalls_section(found: Sequence[Stalls]) -> Section | None:
    """Findings, both tables, and what to be careful about; None without any point."""
    if not found:
        return None
    words = tuple(_finding(point) for point in found)
    return Section(
        id="stalls",
        title=TITLE,
        headline=_headline(found[-1]),
        words=words,
        brief=(*words, *(text for point in found for text in _remarks(point))),
        charts=lambda: stall_charts(found),
        sheets=(parts_sheet(found), runs_sheet(found)),
        notes=tuple(text for point in found for text in _remarks(point)),
    )


def _headline(point: Stalls) -> str:
    """What fetching and preparing cost at the largest point."""
    names = {"preparation": "preparing", "fetch": "fetching"}
    parts = [
        f"{names[part.name]} {NOT_MEASURED if part.share is None else value_text(part.share)}"
        for part in point.parts
        if part.name in names
    ]
    return f"{place(point)}: {', '.join(parts)} of the step"


def stalls_document(found: Sequence[Stalls]) -> Document:
    """What `dlbench io --tiers` prints."""
    section = stalls_section(found)
    return Document(
        title="dlbench io: input stalls",
        dlbench_version=dlbench.__version__,
        sections=() if section is None else (section,),
        data=IoTiers(points=tuple(found)),
    )


def _finding(point: Stalls) -> str:
    """The ceiling, and both stalls, in words."""
    where = f"{point.workload} ({point.preset}, {ENGINE_TITLES[point.engine]}) at {place(point)}"
    start = f"{where}: "
    if point.ceiling is None:
        start += "the ingestion ceiling is not measured"
    else:
        start += f"ranks take {figure_text(point.ceiling)} {point.ceiling.unit} where nothing waits for input"
    return "; ".join([start, *(_part(part, point.whole_is) for part in point.parts if part.name != "ingestion")]) + "."


def _part(part: StallPart, whole_is: Tier) -> str:
    name = _NAMES[part.name]
    name = name[:1].lower() + name[1:]
    if part.seconds is None or part.share is None:
        return f"{name}: {NOT_MEASURED}: {part.why}"
    if placed(part.share, -NEGLIGIBLE, NEGLIGIBLE) == "within":
        return f"{name} costs less than {percent(NEGLIGIBLE, 0)} of a step ({figure_text(part.seconds)})"
    if part.seconds.low is not None and part.seconds.low <= 0 <= (part.seconds.high or 0.0):
        return f"whether {name} costs anything is undecided ({figure_text(part.seconds)} per step)"
    if part.seconds.value < 0:
        return f"{name} costs nothing ({figure_text(part.seconds)} per step)"
    share = f"{figure_text(part.share)} of the step with a {TIER_TITLES[whole_is]}"
    return f"{name} costs {figure_text(part.seconds)} per step, {share}{_basis(part.seconds)}"


def _basis(seconds: Estimate) -> str:
    if seconds.n >= MIN_RUNS:
        return ""
    return f" ({basis_text(seconds, 'repeat')})"


def _remarks(point: Stalls) -> Iterator[str]:
    """What must be known to read the figures of a point."""
    few = [part.seconds.n for part in point.parts if part.seconds is not None]
    if few and min(few) < MIN_RUNS:
        yield f"{place(point)}: {min(few)} of {MIN_RUNS} repeats that an interval of 95 % needs: --repeats {MIN_RUNS}."
    for text in point.notes:
        yield f"{place(point)}: {text}."
    for text in point.missing:
        yield f"Left out: {text}."
    cold = next((one for one in point.tiers if one.tier == "cold"), None)
    if cold is not None and cold.cache:
        known = cold.storage_share
        share = "" if known is None else f"; {percent(min(1.0, known))} of the bytes came from storage"
        yield f"Cold at {place(point)}: {cold.cache}{share}."
