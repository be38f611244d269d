"""The lost percent: words and the section of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dlbench.report.document import Section
from dlbench.report.table import Sheet
from dlbench.report.wording import figure_text, number_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.views.causes.charts import account_charts
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED
from dlbench.views.causes.numbers import Diagnosed, LostPercent, lost_percent
from dlbench.views.causes.tables import account_sheet, experiment_sheet
from dlbench.views.model import ReportGroup
from dlbench.views.view import MEANS, GroupSource, GroupView, place_of

MOST_ALONE = 2  # Rank counts up to which the waterfall is the only chart.

VARIANT = (  # Why a group has no causes.
    "not shown: in these runs something was taken away on purpose; the plain runs next to them have this view, and "
    "dlbench diagnose says what the difference is."
)
MAX_PLANTED = 8  # Ranks with an injected fault that are named.


def findings(found: Diagnosed, next_step: str) -> Iterator[str]:
    """The diagnosis of each rank count, the largest first, which ends with what the group should do next."""
    if found.fault:
        yield f"A fault was injected on purpose: {found.fault}."
    for point in reversed(found.points):
        advice = f" Next: {next_step}" if next_step and point is found.points[-1] else ""
        yield f"{place_of(point)}: {point.verdict.line}.{advice}"


def remarks(found: Diagnosed) -> Iterator[str]:
    """What must be known to read the causes: what is not measured and why, injected faults, monitoring, limits."""
    for index, cause in enumerate(found.points[0].causes):
        title = CAUSE_TITLES[cause.name]
        unknown = [point for point in found.points if not point.causes[index].is_measured]
        if unknown:
            where = "" if len(unknown) == len(found.points) else f" at {', '.join(map(place_of, unknown))}"
            reasons = _first(reason for point in unknown for reason in point.causes[index].not_measured)
            yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
        notes = [note for point in found.points for note in point.causes[index].notes]
        # That nothing recomputes, or that the host was ahead, stands among the parts without time.
        is_told = cause.name not in ("launch", "memory", "gather")
        if notes and (is_told or any(point.causes[index].seconds.value for point in found.points)):
            yield f"{title}: {_first(notes)}."
    for point in found.points:
        if point.planted:
            ranks = ", ".join(
                f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted[:MAX_PLANTED]
            )
            left = len(point.planted) - MAX_PLANTED
            yield f"Planted at {place_of(point)}, per step: {ranks}{f' and {left} more ranks' if left > 0 else ''}."
    cost = found.watch_cost
    if cost is None:
        yield f"Monitoring: {found.watching}."
    else:
        share = figure_text(Estimate(cost.value, cost.low, cost.high, cost.num_runs, "Student t", "fraction"))
        yield f"Monitoring ({found.watching}) cost {share} of a step (accounted, {runs_text(cost.num_runs)})."
    yield from found.limits


def _first(texts: Iterable[str]) -> str:
    """The first of several texts, and how many others there are."""
    first, *others = dict.fromkeys(texts)
    return first + (f" (and {len(others)} more reasons in other runs)" if others else "")


class CausesView(GroupView):
    """Where the time of a step goes, and what is lost to it."""

    id = "causes"
    title = "Where the time goes"
    level = "answer"
    key = "causes"
    after = "time-to-train"

    def always(self) -> tuple[Sheet[Any], ...]:
        return (account_sheet(()),)

    def numbers(self, source: GroupSource) -> LostPercent | None:
        return lost_percent(source.group, source.table)

    def shown(self, group: ReportGroup, found: LostPercent) -> Section:
        points = found.diagnosed.points
        sheets: tuple[Sheet[Any], ...] = (account_sheet(points), experiment_sheet(points))
        return Section(
            caption=MEANS,
            words=tuple(findings(found.diagnosed, group.next_step)),
            charts=lambda: account_charts(group, points),
            charts_per_row=2 if len(points) > MOST_ALONE else 1,
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
            notes=tuple(remarks(found.diagnosed)),
            where={"sample_unit": group.sample_unit, "scaling": group.scaling, "baseline_ranks": group.baseline.ranks},
        )

    def remedy(self, group: ReportGroup) -> str:
        return VARIANT
