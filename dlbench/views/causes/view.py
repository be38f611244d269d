"""Lost efficiency: words and the section of a group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from dlbench.report.document import Section, with_rows
from dlbench.report.table import Sheet
from dlbench.report.wording import figure_text, number_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.units import first_of
from dlbench.views.causes.charts import account_charts
from dlbench.views.causes.experiments import CAUSE_TITLES, NOT_MEASURED
from dlbench.views.causes.numbers import CausePoint, Diagnosed, LostPercent, lost_percent
from dlbench.views.causes.tables import account_sheet, experiment_sheet
from dlbench.views.model import ReportGroup
from dlbench.views.view import MEANS, GroupSource, GroupView, place_of

MOST_ALONE = 2  # Rank counts up to which the waterfall is the only chart.

VARIANT = (  # Remedy of a group without causes.
    "not shown: in these runs something was taken away on purpose; the plain runs next to them have this view, and "
    "dlbench diagnose says what the difference is."
)
MAX_PLANTED = 8  # Ranks with an injected fault that are named.


def findings(diagnosed: Diagnosed, next_step: str) -> Iterator[str]:
    """Yields the diagnosis of each rank count, the largest first, which ends with the group's next step."""
    if diagnosed.fault:
        yield f"A fault was injected on purpose: {diagnosed.fault}."
    for point in reversed(diagnosed.points):
        text = f"{place_of(point)}: {point.verdict.line}."
        if next_step and point is diagnosed.points[-1]:
            text += f" Next: {next_step}"
        yield text


def remarks(diagnosed: Diagnosed) -> Iterator[str]:
    """Yields notes on the causes: unmeasured ones and why, injected faults, monitoring, limits."""
    for index, cause in enumerate(diagnosed.points[0].causes):
        yield from _cause_remarks(CAUSE_TITLES[cause.name], cause.name, index, diagnosed.points)
    for point in diagnosed.points:
        if point.planted:
            parts = [f"rank {rank} {number_text(seconds, 's')}" for rank, seconds in point.planted]
            yield f"Planted at {place_of(point)}, per step: {first_of(parts, MAX_PLANTED)}."
    cost = diagnosed.watch_cost
    if cost is None:
        yield f"Monitoring: {diagnosed.watching}."
    else:
        share = figure_text(Estimate(cost.value, cost.low, cost.high, cost.num_runs, "Student t", "fraction"))
        yield f"Monitoring ({diagnosed.watching}) cost {share} of a step (accounted, {runs_text(cost.num_runs)})."
    yield from diagnosed.limits


def _cause_remarks(title: str, name: str, index: int, points: Sequence[CausePoint]) -> Iterator[str]:
    unmeasured = [point for point in points if not point.causes[index].is_measured]
    if unmeasured:
        where = ""
        if len(unmeasured) < len(points):
            where = f" at {', '.join(map(place_of, unmeasured))}"
        reasons = _first(chain.from_iterable(point.causes[index].not_measured for point in unmeasured))
        yield f"{title}: {NOT_MEASURED}{where}: {reasons}; compute includes it."
    notes = list(chain.from_iterable(point.causes[index].notes for point in points))
    takes_time = any(point.causes[index].seconds.value for point in points)
    # That these take no time is said in the table's caption.
    if notes and (takes_time or name not in ("launch", "memory", "gather", "bubble")):
        yield f"{title}: {_first(notes)}."


def _first(texts: Iterable[str]) -> str:
    first, *others = dict.fromkeys(texts)
    if not others:
        return first
    return f"{first} (and {len(others)} more reasons in other runs)"


class CausesView(GroupView):
    """The parts of a step, and the efficiency lost to each."""

    id = "causes"
    title = "Where the time goes"
    level = "answer"
    key = "causes"
    after = "time-to-train"

    def always(self) -> tuple[Sheet[Any], ...]:
        return (account_sheet(()),)

    def numbers(self, source: GroupSource) -> LostPercent | None:
        return lost_percent(source.group, source.table)

    def shown(self, group: ReportGroup, lost: LostPercent) -> Section:
        points = lost.diagnosed.points
        return Section(
            caption=MEANS,
            words=tuple(findings(lost.diagnosed, group.next_step)),
            charts=partial(account_charts, group, points),
            charts_per_row=2 if len(points) > MOST_ALONE else 1,
            sheets=with_rows(account_sheet(points), experiment_sheet(points)),
            notes=tuple(remarks(lost.diagnosed)),
            where={"sample_unit": group.sample_unit, "scaling": group.scaling, "baseline_ranks": group.baseline.ranks},
        )

    def remedy(self, group: ReportGroup) -> str:
        return VARIANT
