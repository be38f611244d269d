"""The view `forecast`: projections to two and four times the ranks, and published figures (`reports/anchors.yaml`).

None of them is measured here, so they never share a line style, a column or a headline with measurements. A published
figure is only shown if runs do the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from dlbench import bundled
from dlbench.lazy import alt
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
from dlbench.projection.projected import Projection, Target, figure
from dlbench.projection.refusals import MIN_POINTS
from dlbench.projection.step import project
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart
from dlbench.report.charts.style import PUBLISHED
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Sheet, column, columns_of
from dlbench.report.wording import figure_text, percent, ranks_text
from dlbench.specs.base import Count, Fraction, Name, Precision, Spec
from dlbench.specs.files import read_yaml
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import rank_counts, second_rank
from dlbench.views.view import GroupSource, GroupView

FACTORS = (2, 4)  # Times the largest measured rank count.


class Work(Spec):
    """The configuration of a published figure, in which a run must agree."""

    preset: Name = Field(description="Preset of the workload that holds the published configuration.")
    scaling: Literal["weak", "strong"] = Field(description="What grew with the ranks.")
    batch_per_rank: Count = Field(description="Samples per rank and step.")
    precision: tuple[Precision, ...] = Field(description="Precisions of its class: any of them.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")
    model: dict[str, Any] = Field(description="Keys of the network; `family` names it.")


class PublishedFigure(Spec):
    """One published figure."""

    id: Name = Field(description="Unique in the file.")
    title: str = Field(description="What to call it.")
    efficiency: Fraction = Field(description="Scaling efficiency.")
    ranks: Count = Field(description="At this rank count.")
    baseline: str = Field(description="What it is measured against.")
    hardware: str = Field(description="What it was measured on.")
    recipe: str = Field(description="How.")
    source: str = Field(description="Who says so.")
    address: str = Field(pattern=r"^https://", description="Where.")
    work: Work = Field(description="What a run must agree in.")


class AnchorFile(Spec):
    """The file of all published figures."""

    format: Literal["dlbench.anchors"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    anchors: tuple[PublishedFigure, ...] = Field(description="Published figures.")


@functools.cache
def published() -> tuple[PublishedFigure, ...]:
    """Returns all figures of the bundled file."""
    return AnchorFile.model_validate(read_yaml(bundled.folder("reports") / "anchors.yaml")).anchors


def differences(run: Run, work: Work) -> dict[str, tuple[str, str]]:
    """Returns the published and the run's values of settings that differ, by their names; empty: the same work."""
    workload = run.plan.workload
    model = workload.model.model_dump(mode="json")
    settings: dict[str, tuple[object, object]] = {
        "preset": (work.preset, workload.preset),
        "scaling": (work.scaling, run.plan.series.scaling),
        "batch per rank": (work.batch_per_rank, workload.train.batch_per_rank),
        "parts per batch": (1, workload.train.gradient_accumulation),
        "data": (work.data, "synthetic" if workload.data.is_synthetic else "real"),
        **{f"model.{key}": (value, model.get(key)) for key, value in work.model.items()},
    }
    differing = {name: (str(theirs), str(ours)) for name, (theirs, ours) in settings.items() if theirs != ours}
    if workload.train.precision not in work.precision:
        differing["precision"] = (" or ".join(work.precision), str(workload.train.precision))
    return differing


def references(run: Run) -> list[tuple[PublishedFigure, dict[str, tuple[str, str]]]]:
    """Returns the published figures of the run's kind of network, each with its `differences`."""
    family = run.plan.workload.model.family
    figures = [figure for figure in published() if figure.work.model.get("family") == family]
    return [(figure, differences(run, figure.work)) for figure in figures]


@dataclass(frozen=True, kw_only=True)
class PublishedAnchor:
    """A published figure for the same kind of network."""

    title: str = field(metadata=column("Published"))
    efficiency: float = field(metadata=column("Efficiency", "published_efficiency", unit="fraction"))
    ranks: int = field(metadata=column("At", text=ranks_text))
    baseline: str = field(metadata=column("Baseline"))
    hardware: str = field(metadata=column("Hardware"))
    recipe: str = field(metadata=column("How"))
    source: str = field(metadata=column("Source"))
    address: str = field(metadata=column("Address"))
    differences: tuple[str, ...]  # Differences of the runs' settings; only a figure without differences is drawn.


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A projection to more ranks, and published figures for the same work."""

    projection: Projection
    anchors: tuple[PublishedAnchor, ...]
    why_no_anchor: str
    measured: tuple[MeasuredPoint, ...] = field(metadata={HIDDEN: False})

    @property
    def same_work(self) -> tuple[PublishedAnchor, ...]:
        """Published figures of the same work, which may be compared with the measured ones."""
        return tuple(anchor for anchor in self.anchors if not anchor.differences)


def _charts(group: ReportGroup, forecast: Forecast) -> list[Chart]:
    layers: list[Any] = []
    for anchor in forecast.same_work:
        line = alt.Chart(alt.InlineData(values=[{"value": anchor.efficiency, "title": f"{anchor.title}, published"}]))
        layers += [
            line.mark_rule(color=PUBLISHED, strokeDash=[8, 3, 2, 3], strokeWidth=1.5).encode(y=alt.Y("value:Q")),
            line.mark_text(color=PUBLISHED, align="left", dx=4, dy=-6, fontSize=11, x=0).encode(
                y=alt.Y("value:Q"), text="title:N"
            ),
        ]
    return [projection_chart(group, forecast.measured, forecast.projection.targets, layers)]


def _why_no_anchor(figures: Sequence[tuple[PublishedFigure, dict[str, tuple[str, str]]]]) -> str:
    if not figures:
        return "dlbench has no published reference of this kind of network."
    nearest, differing = min(figures, key=lambda pair: len(pair[1]))
    if not differing:
        return ""
    return (
        f"No published reference is of the same work; the nearest, {nearest.title} "
        f"({percent(nearest.efficiency)} at {ranks_text(nearest.ranks)}), differs in {', '.join(differing)}."
    )


def _targets_sheet(targets: Sequence[Target], sample_unit: str) -> Sheet[Target]:
    columns = []
    for target_column in target_columns(targets, sample_unit):
        name = target_column.name and f"projected_{target_column.name}"
        columns.append(replace(target_column, name=name))
    return Sheet(
        name="forecast",
        title="Projected, not measured",
        columns=tuple(columns),
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
        """Returns None for a group of one point, which has no scaling."""
        group, costs = source.group, source.network
        if len(group.points) == 1:
            return None
        if costs is not None and costs.system != group.sample.plan.system.name:
            costs = None  # Then the projection uses the points alone.
        inputs = with_network(gathered(group, source.table, is_whole=costs is not None), costs)
        figures = references(group.sample)
        anchors = []
        for published_figure, differing in figures:
            texts = [f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in differing.items()]
            anchors.append(
                PublishedAnchor(**published_figure.model_dump(exclude={"id", "work"}), differences=tuple(texts))
            )
        return Forecast(
            projection=project(inputs, [factor * group.points[-1].ranks for factor in FACTORS]),
            measured=measured_points(inputs),
            anchors=tuple(anchors),
            why_no_anchor=_why_no_anchor(figures),
        )

    def shown(self, group: ReportGroup, forecast: Forecast) -> Section | None:
        projection, same_work = forecast.projection, forecast.same_work
        sheets: list[Sheet[Any]] = []
        headline = ""
        if same_work:
            headline = (
                f"published for the same work: {percent(same_work[0].efficiency)} at {ranks_text(same_work[0].ranks)}"
            )
            sheets.append(
                Sheet(
                    name="anchors",
                    title="Published references of the same work",
                    columns=columns_of(PublishedAnchor),
                    rows=same_work,
                    caption="Weak-scaling efficiency on other hardware.",
                )
            )
        if projection.targets:
            last = projection.targets[-1]
            assert last.efficiency is not None
            share = figure_text(figure(last.efficiency, "fraction"))
            headline = f"projected, not measured: {share} efficiency at {ranks_text(last.ranks)}"
            sheets.insert(0, _targets_sheet(projection.targets, group.sample_unit))
        if not sheets:
            return None
        return Section(
            headline=headline,
            words=(held_out_line(projection.held_out), *flag_lines(projection), *refusals(projection.refused)),
            charts=lambda: _charts(group, forecast),
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
