"""The view `forecast`: projections to two and four times the ranks, and published figures (`dlbench.views.anchors`).
None of them is measured here, so they never share a line style, a column or a headline with measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlbench.projection.gathering import gathered, with_network
from dlbench.projection.page import (
    MeasuredPoint,
    flag_lines,
    held_out_line,
    measured_points,
    projection_chart,
    refusals,
    target_columns,
)
from dlbench.projection.projected import MIN_POINTS, Projection, Target, figure
from dlbench.projection.step import project
from dlbench.report.charts.chart import Chart
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Sheet
from dlbench.report.wording import figure_text, ranks_text
from dlbench.views.anchors import PublishedAnchor, anchors_of, anchors_sheet
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import rank_counts, second_rank
from dlbench.views.view import GroupSource, GroupView

FACTORS = (2, 4)  # Times the largest measured rank count.
MOST_DIFFERENCES = 2  # A published figure whose work differs in more is not named.
MOST_NAMED = 3  # Published figures of other work in a report.
NO_FIGURE = "dlbench has no published reference of this kind of network."


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A projection to more ranks, and published figures for the same work."""

    projection: Projection
    anchors: tuple[PublishedAnchor, ...]
    why_no_anchor: str
    measured: tuple[MeasuredPoint, ...] = field(metadata={HIDDEN: False})


def published_for(group: ReportGroup, quantity: str) -> tuple[PublishedAnchor, ...]:
    """Returns the published figures of the same work as a group, of one of `dlbench.views.anchors.QUANTITIES`."""
    forecast = group.of(Forecast)
    if forecast is None:
        return ()
    same_work = [anchor for anchor in forecast.anchors if not anchor.differences]
    return tuple(anchor for anchor in same_work if getattr(anchor, quantity, None) is not None)


def _targets_sheet(targets: Sequence[Target], sample_unit: str) -> Sheet[Target]:
    columns = target_columns(targets, sample_unit)
    return Sheet(
        name="forecast",
        title="Projected, not measured",
        columns=tuple(replace(column, name=column.name and f"projected_{column.name}") for column in columns),
        rows=targets,
        caption="dlbench project runs RUNS --to 64,256 projects further, with the account of the time.",
    )


class ForecastView(GroupView):
    """Projections of the measured points to more ranks."""

    id = "forecast"
    title = "Projection and published figures"
    key = "forecast"
    after = "causes"

    def numbers(self, source: GroupSource) -> Forecast | None:
        """Returns None for a group of one point, which has no scaling, without published figures of its work."""
        group, costs = source.group, source.network
        anchors = anchors_of(group.sample.plan)
        if len(group.points) == 1 and (not anchors or anchors[0].differences):
            return None
        if costs is not None and costs.system != group.sample.plan.system.name:
            costs = None  # Then the projection uses the points alone.
        inputs = with_network(gathered(group, source.table, is_whole=costs is not None), costs)
        return Forecast(
            projection=project(inputs, [factor * group.points[-1].ranks for factor in FACTORS]),
            measured=measured_points(inputs),
            anchors=anchors,
            why_no_anchor=anchors[0].unlike if anchors else NO_FIGURE,
        )

    def shown(self, group: ReportGroup, forecast: Forecast) -> Section | None:
        projection, same_work = forecast.projection, [item for item in forecast.anchors if not item.differences]
        sheets: list[Sheet[Any]] = []
        headline = ""
        if same_work:
            headline = f"published for the same work: {same_work[0].shown}"
            sheets.append(anchors_sheet(same_work))
        if projection.targets:
            last = projection.targets[-1]
            assert last.efficiency is not None
            share = figure_text(figure(last.efficiency, "fraction"))
            headline = f"projected, not measured: {share} efficiency at {ranks_text(last.ranks)}"
            sheets.insert(0, _targets_sheet(projection.targets, group.sample_unit))
        unlike = [anchor.unlike for anchor in forecast.anchors if 0 < len(anchor.differences) <= MOST_DIFFERENCES]
        if not sheets and not unlike:
            return None
        words = (held_out_line(projection.held_out), *flag_lines(projection), *refusals(projection.refused))

        def charts() -> list[Chart]:
            if not projection.targets:
                return []
            return [projection_chart(group, forecast.measured, projection.targets)]

        return Section(
            headline=headline,
            words=(*words, *unlike[:MOST_NAMED]),
            charts=charts,
            sheets=tuple(sheets),
        )

    def remedy(self, group: ReportGroup) -> str:
        forecast = group.of(Forecast)
        if forecast is None:
            return second_rank(group, "one rank count only")
        counts = sorted({point.ranks for point in group.points})
        if len(counts) >= MIN_POINTS:
            return " ".join(refusals(forecast.projection.refused)[:1])  # `dlbench project` prints all.
        needed = [*counts, *rank_counts(counts[-1], (2, 4), group.most_ranks)][:MIN_POINTS]
        if len(needed) < MIN_POINTS:
            return f"needs {MIN_POINTS} rank counts (you have {len(counts)}, and this machine has no more ranks)."
        ranks = ",".join(map(str, needed))
        return f"needs {MIN_POINTS} rank counts (you have {len(counts)}): run the same workload with --ranks {ranks}."
