"""The view `forecast`: what `dlbench project` says of two and four times the ranks, and published figures.

None of them is measured, so they never share a line style, a column or a headline with measurements. Published figures
are data (`reports/anchors.yaml`), each with its source; only where a run does the same work may they stand next to its
own.
"""

from __future__ import annotations

import functools
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
from dlbench.projection.projected import Projection, figure
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
    """What a published figure was measured on; all of it must agree."""

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
    """All of them."""

    format: Literal["dlbench.anchors"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    anchors: tuple[PublishedFigure, ...] = Field(description="Published figures.")


@functools.cache
def published() -> tuple[PublishedFigure, ...]:
    """All figures of the bundled file."""
    return AnchorFile.model_validate(read_yaml(bundled.folder("reports") / "anchors.yaml")).anchors


def differences(run: Run, work: Work) -> dict[str, tuple[str, str]]:
    """What a run does otherwise than a published figure: theirs and ours, by what it is; empty: the same work."""
    workload = run.plan.workload
    ours = workload.model.model_dump(mode="json")
    asked: dict[str, tuple[object, object]] = {
        "preset": (work.preset, workload.preset),
        "scaling": (work.scaling, run.plan.series.scaling),
        "batch per rank": (work.batch_per_rank, workload.train.batch_per_rank),
        "parts per batch": (1, workload.train.gradient_accumulation),
        "data": (work.data, "synthetic" if workload.data.is_synthetic else "real"),
        **{f"model.{key}": (value, ours.get(key)) for key, value in work.model.items()},
    }
    found = {what: (str(theirs), str(mine)) for what, (theirs, mine) in asked.items() if theirs != mine}
    if workload.train.precision not in work.precision:
        found["precision"] = (" or ".join(work.precision), str(workload.train.precision))
    return found


def references(run: Run) -> list[tuple[PublishedFigure, dict[str, tuple[str, str]]]]:
    """The published figures of the run's kind of network, each with its `differences`. Any run of a group will do: the
    group shares what is compared.
    """
    family = run.plan.workload.model.family
    return [(one, differences(run, one.work)) for one in published() if one.work.model.get("family") == family]


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
    differences: tuple[str, ...]  # What the runs do otherwise; empty: the same work, and only then is it drawn.


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A projection to more ranks, and published figures for the same work."""

    projection: Projection
    anchors: tuple[PublishedAnchor, ...]
    why_no_anchor: str
    measured: tuple[MeasuredPoint, ...] = field(metadata={HIDDEN: False})

    @property
    def same_work(self) -> tuple[PublishedAnchor, ...]:
        """Published figures that may stand next to the measured ones."""
        return tuple(anchor for anchor in self.anchors if not anchor.differences)


def _drawn(group: ReportGroup, found: Forecast) -> list[Chart]:
    layers: list[Any] = []
    for anchor in found.same_work:
        line = alt.Chart(alt.InlineData(values=[{"value": anchor.efficiency, "title": f"{anchor.title}, published"}]))
        layers += [
            line.mark_rule(color=PUBLISHED, strokeDash=[8, 3, 2, 3], strokeWidth=1.5).encode(y=alt.Y("value:Q")),
            line.mark_text(color=PUBLISHED, align="left", dx=4, dy=-6, fontSize=11, x=0).encode(
                y=alt.Y("value:Q"), text="title:N"
            ),
        ]
    return [projection_chart(group, found.measured, found.projection.targets, layers)]


class ForecastView(GroupView):
    """What the measured points let expect of more ranks."""

    id = "forecast"
    title = "Projection and published figures"
    key = "forecast"
    after = "causes"

    def numbers(self, source: GroupSource) -> Forecast | None:
        """None for a group of one point, which scales against nothing."""
        group, costs = source.group, source.network
        if len(group.points) == 1:
            return None
        if costs is not None and costs.system != group.sample.plan.system.name:
            costs = None  # Then the points alone are asked.
        found = with_network(gathered(group, source.table, is_whole=costs is not None), costs)
        known = references(group.sample)
        why_no_anchor = ""
        if not known:
            why_no_anchor = "No published reference of this kind of network is on file."
        elif all(other for _, other in known):
            nearest, differs = min(known, key=lambda one: len(one[1]))
            why_no_anchor = (
                f"No published reference is of the same work; the nearest, {nearest.title} "
                f"({percent(nearest.efficiency)} at {ranks_text(nearest.ranks)}), differs in {', '.join(differs)}."
            )
        return Forecast(
            projection=project(found, [factor * group.points[-1].ranks for factor in FACTORS]),
            measured=measured_points(found),
            anchors=tuple(
                PublishedAnchor(
                    **one.model_dump(exclude={"id", "work"}),
                    differences=tuple(f"{what} {theirs} there, {ours} here" for what, (theirs, ours) in other.items()),
                )
                for one, other in known
            ),
            why_no_anchor=why_no_anchor,
        )

    def shown(self, group: ReportGroup, found: Forecast) -> Section | None:
        targets = found.projection.targets
        if not (targets or found.same_work):
            return None
        sheets: list[Sheet[Any]] = []
        if targets:
            columns = target_columns(targets, group.sample_unit)
            sheets.append(
                Sheet(
                    name="forecast",
                    title="Projected, not measured",
                    columns=tuple(replace(one, name=one.name and f"projected_{one.name}") for one in columns),
                    rows=targets,
                    caption="dlbench project runs RUNS --to 64,256 goes further, and says where the time goes.",
                )
            )
        if found.same_work:
            sheets.append(
                Sheet(
                    name="anchors",
                    title="Published references of the same work",
                    columns=columns_of(PublishedAnchor),
                    rows=found.same_work,
                    caption="Weak-scaling efficiency on other hardware.",
                )
            )
        if targets:
            assert targets[-1].efficiency is not None
            share, at = figure_text(figure(targets[-1].efficiency, "fraction")), ranks_text(targets[-1].ranks)
            headline = f"projected, not measured: {share} efficiency at {at}"
        else:
            one = found.same_work[0]
            headline = f"published for the same work: {percent(one.efficiency)} at {ranks_text(one.ranks)}"
        return Section(
            headline=headline,
            words=(
                held_out_line(found.projection.held_out),
                *flag_lines(found.projection),
                *refusals(found.projection.refused),
            ),
            charts=lambda: _drawn(group, found),
            sheets=tuple(sheets),
        )

    def remedy(self, group: ReportGroup) -> str:
        found = group.of(Forecast)
        if found is None:
            return second_rank(group, "one rank count only")
        counts = sorted({point.ranks for point in group.points})
        if len(counts) >= MIN_POINTS:
            return " ".join(refusals(found.projection.refused)[:1])  # `dlbench project` says all.
        more = [*counts, *rank_counts(counts[-1], (2, 4), group.most_ranks)][:MIN_POINTS]
        if len(more) < MIN_POINTS:
            return f"needs {MIN_POINTS} rank counts (you have {len(counts)}, and this machine holds no more)."
        asked = ",".join(map(str, more))
        return f"needs {MIN_POINTS} rank counts (you have {len(counts)}): run the same workload with --ranks {asked}."
