"""The view `forecast`: projections to two and four times the ranks, and published figures (`reports/anchors.yaml`) next
to runs of the same work. They share no colour, line style, column or headline with what was measured here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dlbench.errors import UserError
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
from dlbench.projection.projected import MIN_POINTS, Projection, Target
from dlbench.projection.projected import figure as projected_figure
from dlbench.projection.step import project
from dlbench.report.chart_style import PUBLISHED
from dlbench.report.charts import Chart, Rows, layer, tooltips
from dlbench.report.document import Section
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Column, Sheet, drop_empty_columns
from dlbench.report.wording import figure_text, percent, ranks_text
from dlbench.specs.base import Count, Name, Positive, Precision, Ranks, Spec
from dlbench.specs.choices import SettingLayers, validate
from dlbench.specs.files import read_yaml, search_path
from dlbench.specs.plan import RunPlan
from dlbench.specs.problems import tags_of
from dlbench.specs.workload import FAMILIES, TextData
from dlbench.units import format_number, format_seconds
from dlbench.views.model import GroupSource, GroupView, ReportGroup
from dlbench.views.next_step import rank_counts, second_rank

QUANTITIES = ("efficiency", "throughput_per_s", "time_to_target_s")
FACTORS = (2, 4)  # Times the largest measured rank count.
MOST_DIFFERENCES = 2  # A published figure whose work differs in more is not named.
MOST_NAMED = 3  # Published figures of other work in a report.
NO_FIGURE = "dlbench has no published reference of this kind of network."


class Work(Spec):
    """The configuration of a published figure, in which a run must agree."""

    scaling: Literal["weak", "strong"] | None = Field(None, description="What grew with the ranks; none: one count.")
    batch_per_rank: Count = Field(description="Samples per rank and step.")
    precision: tuple[Precision, ...] = Field(min_length=1, description="Precisions of its class: any of them.")
    data: Literal["real", "synthetic"] = Field(description="Whether files were read.")
    model: dict[str, str | int | float | list[int]] = Field(description="Keys of the network; `family` names it.")
    sequence_length: Count | None = Field(None, description="Tokens per sample, for text.")
    optimizer: Name | None = Field(None, description="Of a time to a target.")
    target: float | None = Field(None, description="Value of the quality metric that was reached, of a time.")


class PublishedFigure(Spec):
    """One published figure, of one of `QUANTITIES`."""

    id: Name = Field(description="Unique in all files.")
    title: str = Field(min_length=1, max_length=40, description="What to call it.")
    efficiency: float | None = Field(None, gt=0, le=2, description="Scaling efficiency.")
    throughput_per_s: Positive | None = Field(None, description="Samples per second of all ranks.")
    time_to_target_s: Positive | None = Field(None, description="Seconds of a training to `work.target`.")
    ranks: Ranks = Field(description="At this rank count.")
    baseline: str = Field("", description="What an efficiency is measured against.")
    hardware: str = Field(min_length=1, description="What it was measured on.")
    recipe: str = Field(min_length=1, description="How.")
    source: str = Field(min_length=1, description="Who says so.")
    address: str = Field(pattern=r"^https://", description="Where.")
    work: Work = Field(description="What a run must agree in.")

    @model_validator(mode="after")
    def _is_complete(self) -> PublishedFigure:
        if sum(getattr(self, name) is not None for name in QUANTITIES) != 1:
            raise ValueError(f"must have exactly one of {', '.join(QUANTITIES)}")
        if self.efficiency is not None and not (self.baseline and self.work.scaling):
            raise ValueError("an efficiency needs baseline and work.scaling")
        if self.time_to_target_s is not None and None in (self.work.target, self.work.optimizer):
            raise ValueError("a time needs work.target and work.optimizer")
        if not any(self.work.model.get("family") in tags_of(kind) for kind in FAMILIES):
            raise ValueError("work.model.family must be that of a network, e.g. resnet")
        return self


class AnchorFile(Spec):
    """A file of published figures."""

    format: Literal["dlbench.anchors"] = Field(description="Says what the file is.")
    version: Literal[1] = Field(description="Version of the format.")
    anchors: tuple[PublishedFigure, ...] = Field(description="Published figures.")


def published() -> tuple[PublishedFigure, ...]:
    """Returns the figures of the bundled file and of `reports/anchors.yaml` in the folders of DLBENCH_PATH.
    Raises `UserError`, which names file and key: a file is invalid, or two figures have one id.
    """
    paths = [folder / "anchors.yaml" for folder in reversed(search_path("reports"))]
    return _read(tuple(dict.fromkeys(path.resolve() for path in paths if path.is_file())))


@functools.cache
def _read(paths: tuple[Path, ...]) -> tuple[PublishedFigure, ...]:
    figures: dict[str, PublishedFigure] = {}
    for path in paths:
        layers = SettingLayers(str(path))
        layers.add(read_yaml(path), str(path))
        for index, figure in enumerate(validate(AnchorFile, layers).anchors):
            if figure.id in figures:
                raise UserError(f"{path}: anchors.{index}.id: {figure.id!r} is already used; choose another")
            figures[figure.id] = figure
    return tuple(figures.values())


def differences(plan: RunPlan, figure: PublishedFigure) -> list[str]:
    """Returns the settings in which a run's work differs from that of a published figure, with both values."""
    work, workload, precision = figure.work, plan.workload, plan.workload.train.precision
    model = workload.model.model_dump(mode="json")
    settings: dict[str, tuple[object, object]] = {"scaling": (work.scaling, work.scaling and plan.series.scaling)}
    if work.scaling is None and plan.series.scaling == "strong":
        settings["global batch"] = (work.batch_per_rank * figure.ranks, plan.global_batch)
    else:
        settings["batch per rank"] = (work.batch_per_rank, workload.train.batch_per_rank)
    settings["parts per batch"] = (1, workload.train.gradient_accumulation)
    settings["data"] = (work.data, "synthetic" if workload.data.is_synthetic else "real")
    settings |= {f"model.{key}": (value, model.get(key)) for key, value in work.model.items()}
    if isinstance(workload.data, TextData):
        settings["sequence length"] = (work.sequence_length, workload.data.sequence_length)
    if figure.time_to_target_s is not None:
        settings["optimizer"] = (work.optimizer, workload.train.optimizer.name)
        settings["target"] = (work.target, None)
        if workload.quality is not None and plan.measure.until == "quality":
            settings["target"] = (work.target, workload.quality.target)
    if precision not in work.precision:
        settings["precision"] = (" or ".join(work.precision), precision)
    return [f"{name} {theirs} there, {ours} here" for name, (theirs, ours) in settings.items() if theirs != ours]


class PublishedAnchor(PublishedFigure):
    """A published figure for the same kind of network as that of a group."""

    differences: tuple[str, ...] = Field(description="Differences of the runs' settings; none: it is drawn.")

    @property
    def value(self) -> float:
        """The published number of any quantity."""
        return float(self.efficiency or self.throughput_per_s or self.time_to_target_s or math.nan)

    @property
    def shown(self) -> str:
        """The figure with its rank count, e.g. `74.7 s at 2,048 ranks`."""
        text = format_seconds(self.value)
        if self.efficiency is not None:
            text = percent(self.efficiency)
        elif self.throughput_per_s is not None:
            text = f"{format_number(self.throughput_per_s)} samples/s"
        return f"{text} at {ranks_text(self.ranks)}"

    @property
    def unlike(self) -> str:
        """A sentence on all that differs; empty if it is of the same work."""
        if not self.differences:
            return ""
        return f"Published, but of other work: {self.title}, {self.shown} ({'; '.join(self.differences)})."


def anchors_of(plan: RunPlan) -> tuple[PublishedAnchor, ...]:
    """Returns the published figures of a run's kind of network, by the number of differences, then by ranks."""
    anchors = []
    for figure in published():
        if figure.work.model["family"] == plan.workload.model.family:
            anchor = PublishedAnchor.model_construct(**dict(figure), differences=tuple(differences(plan, figure)))
            anchors.append(anchor)
    return tuple(sorted(anchors, key=lambda anchor: (len(anchor.differences), anchor.ranks)))


def anchors_sheet(anchors: Sequence[PublishedAnchor]) -> Sheet[PublishedAnchor]:
    """Returns a table of published figures of the same work."""
    columns: tuple[Column[PublishedAnchor], ...] = (
        Column("title", "Published", "title"),
        Column("published_efficiency", "Efficiency", "efficiency", unit="fraction"),
        Column("published_throughput_per_s", "Samples/s", "throughput_per_s", unit="ratio"),
        Column("published_time_to_target_s", "Time to target", "time_to_target_s", unit="s"),
        Column("ranks", "At", "ranks", lambda anchor: ranks_text(anchor.ranks)),
        Column("batch_per_rank", "Batch per rank", "work.batch_per_rank"),
        Column("precision", "Precision", lambda anchor: " or ".join(anchor.work.precision)),
        *(Column(name, name.capitalize(), name) for name in ("baseline", "hardware", "recipe", "source", "address")),
    )
    return Sheet(
        name="anchors",
        title="Published references of the same work",
        columns=drop_empty_columns(columns, anchors),
        rows=anchors,
        caption="Published, not measured here, and on other hardware.",
    )


def anchor_rows(anchors: Sequence[PublishedAnchor], scale: float = 1.0) -> Rows:
    """Returns a row of a chart over ranks for each figure, its value times `scale`."""
    rows: Rows = []
    for anchor in anchors:
        row = {"ranks": anchor.ranks, "value": anchor.value * scale, "title": anchor.title, "shown": anchor.shown}
        rows.append({**row, "hardware": anchor.hardware, "source": anchor.source})
    return rows


def anchor_layers(rows: Rows) -> list[dict[str, Any]]:
    """Returns layers with a labelled mark for each of `anchor_rows`."""
    if not rows:
        return []
    place = {"x": "ranks:Q", "y": "value:Q"}
    tooltip = tooltips({"title": "published", "shown": "figure", "hardware": "on", "source": "source"})
    point: dict[str, Any] = {"color": PUBLISHED, "shape": "diamond", "filled": False, "size": 90, "opacity": 1}
    return [
        layer(rows, "point", {**place, "tooltip": tooltip}, **point),
        layer(rows, "text", {**place, "text": "title:N"}, color=PUBLISHED, align="right", dx=-8, dy=12, fontSize=11),
    ]


def anchors_text(anchors: Sequence[PublishedAnchor]) -> str:
    """Returns the figures in words, for the description of a chart; empty if there are none."""
    return "".join(f" Published: {anchor.title}, {anchor.shown}." for anchor in anchors)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A projection to more ranks, and published figures for the same work."""

    projection: Projection
    anchors: tuple[PublishedAnchor, ...]
    why_no_anchor: str
    measured: tuple[MeasuredPoint, ...] = field(metadata={HIDDEN: False})


def published_for(group: ReportGroup, quantity: str) -> tuple[PublishedAnchor, ...]:
    """Returns the published figures of the same work as a group, of one of `dlbench.views.forecast.QUANTITIES`."""
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
            share = figure_text(projected_figure(last.efficiency, "fraction"))
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

        return Section(headline=headline, words=(*words, *unlike[:MOST_NAMED]), charts=charts, sheets=tuple(sheets))

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
