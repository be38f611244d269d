"""The view `scaling`: throughput, speed-up and efficiency of every rank count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.records.scan import Run
from dlbench.report.chart_style import HEIGHT, MEASURED, MUTED, NARROW
from dlbench.report.charts import Axis, Chart, Rows, figure_row, finish, layer, lines
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, figure_text, percent, sentence, times_text, units_text, value_text
from dlbench.stats.estimates import Estimate, placed, ratio_estimate
from dlbench.units import counted
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent
from dlbench.views.forecast import PublishedAnchor, anchor_layers, anchor_rows, anchors_text, published_for
from dlbench.views.model import GroupSource, GroupView, ReportGroup, place_of

_LINEAR = 100  # Ratio of rank counts, two decades, up to which axes are linear by default.
_PUBLISHED = {"efficiency": "efficiency", "throughput": "throughput_per_s"}  # Fields of `PublishedAnchor`.
_EXTENT = 40  # Width of the labels of a vertical axis, pixels: seven characters.

ABOUT = {
    "strong": "Strong scaling: the global batch is fixed, so the batch per rank shrinks as ranks are added. Ideal: the "
    "step shortens in proportion.",
    "weak": "Weak scaling: the batch per rank is fixed, so the global batch grows with the ranks. Ideal: the step "
    "takes no longer than at the baseline.",
}
BRACKETS = "[low, high] is a 95 % interval; (low to high) is the smallest and largest of a few runs."
ONE_POINT = "One rank count only: there is nothing to scale against."


def baseline_note(group: scaling.Group, groups: Sequence[scaling.Group], table: RunTable) -> str:
    """Returns a sentence on a handicap of the baseline; empty without one. `groups` are all groups of the report."""
    base, largest = group.baseline, group.points[-1]
    if len(group.points) == 1 or group.sample.plan.series.variant != "plain":
        return ""
    single_ranks: list[tuple[Point, scaling.Group]] = []
    for candidate in groups:
        single_ranks += [(point, candidate) for point in candidate.points if _is_same_work(group, candidate, point)]
    best, best_group = max(single_ranks, key=lambda pair: pair[0].throughput.value, default=(base, group))
    if best.throughput.value > base.throughput_per_rank.value and best is not base:
        plan, unit = best_group.sample.plan, group.sample.plan.workload.sample_unit
        ratio = ratio_estimate(table.rates_of(largest.run_ids), table.rates_of(best.run_ids))
        rate = f"{figure_text(best.throughput)} {unit}/s"
        return (
            f"Against the best single-rank run here ({plan.engine.name}, {_cores(best_group)}; {rate}): "
            f"{times_text(ratio)} with {place_of(largest)} ({basis_text(ratio)}); ranks of the baseline have "
            f"{_cores(group)}."
        )
    is_on_cpu = group.sample.record is not None and group.sample.record.ranks[0].device.startswith("cpu")
    if is_on_cpu and largest.ranks * base.nodes > base.ranks * largest.nodes:
        return (
            f"Every rank had {_cores(group)}, also at the baseline, so that efficiencies compare like with like. A "
            "single rank with all cores may be faster, and was not measured here."
        )
    return ""


def _cores(group: scaling.Group) -> str:
    return counted(group.sample.plan.layout.cores_per_rank, "core")


def _is_same_work(group: scaling.Group, candidate: scaling.Group, point: Point) -> bool:
    """Returns whether a point of another group is one rank that trains the same, with any cores and engine."""
    plan, other_plan = group.sample.plan, candidate.sample.plan
    batch = plan.global_batch if group.scaling == "strong" else group.baseline.batch_per_rank
    return (
        point.ranks == 1
        and point.batch_per_rank == batch
        and other_plan.series.variant == "plain"
        and other_plan.fault == plan.fault
        and other_plan.system.name == plan.system.name
        and _work(candidate.sample) == _work(group.sample)
    )


def _work(run: Run) -> dict[str, Any]:
    """Returns the workload and the kind of device, without the batch per rank and the settings of readers."""
    device = "" if run.record is None else run.record.ranks[0].device.split(":")[0]
    varied = {"train": {"batch_per_rank"}, "data": {"loader_workers", "prefetch_batches"}}
    work = run.plan.model_dump(include={"workload"}, exclude={"workload": varied})
    return {**work, "device": device, "phases": run.plan.measure.phases}


def verdict(
    unit: str, all_points: tuple[Point, ...], *, is_oversubscribed: bool, causes: LostPercent | None = None
) -> str:
    """Returns two sentences on the largest point: its efficiency and losses, but no losses if ranks shared cores."""
    base, last = all_points[0], all_points[-1]
    if len(all_points) == 1:
        rate = f"{figure_text(base.throughput)} {unit}/s at {place_of(last)} ({basis_text(base.throughput)})"
        return f"{rate}. Scaling needs a second rank count."
    basis = f"{place_of(base)} = 100 %; {basis_text(last.efficiency)}"
    sentence = f"Scaling efficiency {figure_text(last.efficiency)} at {place_of(last)} ({basis})."
    if is_oversubscribed:
        return f"{sentence} Ranks shared cores: this says nothing about the scaling of the machine."
    return f"{sentence} {_explanation(last, causes)}".rstrip()


def _explanation(point: Point, causes: LostPercent | None) -> str:
    """Says what was lost by the account of the point; without one, whether anything was."""
    if causes is not None:
        account = causes.at(point)
        if account is not None:
            return sentence(account.verdict.line)
    return {
        "insufficient": f"{units_text(point.efficiency)} cannot distinguish a loss from noise.",
        "within": "There is no loss worth explaining.",
        "above": "That is above the ideal: the baseline ran with a handicap, or its runs drifted.",
        "below": "",
        "undecided": f"Whether {percent(WORTH_EXPLAINING, 0)} or more is lost is undecided.",
    }[placed(point.efficiency, 1 - WORTH_EXPLAINING, 1 + WORTH_EXPLAINING)]


def loss_text(group: ReportGroup) -> str:
    """Returns the sentence of the verdict on the losses of the largest point; empty if nothing is known."""
    if len(group.points) == 1:
        return ""
    return _explanation(group.largest, group.of(LostPercent))


class _Quantity(NamedTuple):
    """A quantity that a chart shows over ranks."""

    name: str  # Field of a point.
    title: str
    axis: str  # Title of the vertical axis.
    ideal: float | None  # Ideal value; None: in proportion to the ideal speed-up.
    base: float = 1.0  # Value at the baseline.
    number_format: str = ",.4~r"
    axes: Literal["", "xy"] = "xy"  # Axes that a page may switch to logarithms.

    def figure(self, point: Point) -> Estimate:
        figure: Estimate = getattr(point, self.name)
        return figure

    def ideal_of(self, point: Point) -> float:
        return self.base * point.ideal_speedup if self.ideal is None else self.ideal


def _charts(group: ReportGroup) -> list[Chart]:
    if len(group.points) == 1:
        return []
    base, unit = group.baseline, f"{group.sample_unit}/s"
    quantities = (
        _Quantity("efficiency", "Efficiency", "scaling efficiency", ideal=1.0, number_format=".0%", axes=""),
        _Quantity("throughput", "Throughput", unit, ideal=None, base=base.throughput.value),
        _Quantity("speedup", "Speed-up", f"over {place_of(base)}", ideal=None),
    )
    return [_chart(group, quantity) for quantity in quantities]


def _chart(group: ReportGroup, quantity: _Quantity) -> Chart:
    anchors = published_for(group, _PUBLISHED.get(quantity.name, ""))
    rows: Rows = [
        {
            "ranks": point.ranks,
            "ideal": quantity.ideal_of(point),
            "label": value_text(quantity.figure(point)),
            "place": place_of(point),
            **figure_row(quantity.figure(point)),
        }
        for point in group.points
    ]
    columns: tuple[Column[Point], ...] = (
        Column("", "At", place_of),
        Column("", f"{quantity.title}, {quantity.axis}", quantity.figure),
        Column("", "Ideal", quantity.ideal_of, unit=quantity.figure(group.baseline).unit),
    )
    words = "; ".join(f"{row['place']}: {row['shown']}" for row in rows)
    return finish(
        _layers(rows, quantity, anchors),
        group,
        name=quantity.name,
        title=quantity.title,
        alt=f"{quantity.title} ({quantity.axis}) over ranks, with the ideal as a dashed line. {words}."
        f"{anchors_text(anchors)}",
        table=Sheet(name=quantity.name, title=quantity.title, columns=columns, rows=group.points),
        size=(NARROW, HEIGHT),
        axes=quantity.axes,
    )


def _layers(rows: Rows, quantity: _Quantity, anchors: Sequence[PublishedAnchor]) -> list[dict[str, Any]]:
    counts = sorted({row["ranks"] for row in rows} | {anchor.ranks for anchor in anchors})
    is_long = bool(anchors) or counts[-1] > _LINEAR * counts[0]
    # Space on the right for the labels at the ends of the lines.
    scale: dict[str, Any] = {"domain": [0, counts[-1] * 1.28], "nice": False}
    if is_long:
        scale = {"type": "log", "base": 2, "domain": [counts[0] / 1.2, counts[-1] * 4], "nice": False}
    axis = {"values": counts, "grid": False, "labelOverlap": "greedy"}
    x = Axis("ranks", field="ranks", format="d", scale=scale, axis=axis)
    published = anchor_rows(anchors)
    y = _y_axis(quantity, [*rows, *published], is_long=is_long and bool(quantity.axes))
    tooltip = {"place": "at", "shown": quantity.title, "basis": "interval"}
    drawn = lines(rows, y, MEASURED, tooltip, x_axis=x, ideal="ideal")
    last, style = rows[-1:], {"align": "left", "dx": 8, "fontSize": 12}
    value = {"x": "ranks:Q", "y": "value:Q", "text": "label:N"}
    return [
        *drawn,
        # Labels at the lines replace a legend.
        layer(last, "text", {"x": "ranks:Q", "y": "ideal:Q"}, color=MUTED, dy=-7, text="ideal", **style),
        layer(last, "text", value, color=MEASURED, dy=7, **style),
        *anchor_layers(published),
    ]


def _y_axis(quantity: _Quantity, rows: Rows, *, is_long: bool) -> Axis:
    """Returns an axis that begins at zero, because a cut axis misleads, and of equal width, so that charts align. Over
    more than two decades it is logarithmic like the ranks, so that the ideal is a straight line.
    """
    values: list[float] = [row[name] for row in rows for name in ("value", "ideal", "low", "high") if row.get(name)]
    scale: dict[str, Any] = {"domain": [0, max(values) * 1.12], "nice": False}
    if is_long:
        scale = {"type": "log", "base": 2, "domain": [min(values) * 0.85, max(values) * 1.25], "nice": False}
    axis = {"tickCount": 6, "minExtent": _EXTENT, "maxExtent": _EXTENT}
    return Axis(quantity.axis, format=quantity.number_format, scale=scale, axis=axis)


class ScalingView(GroupView):
    """The growth of throughput with the ranks."""

    id = "scaling"
    title = "Scaling"
    level = "answer"
    key = "leaf_switches"
    after = "quality"

    def numbers(self, source: GroupSource) -> tuple[Point, ...]:
        """Returns the rank counts whose runs differ in the number of leaf switches, a point for each number."""
        return source.group.leaf_points

    def always(self) -> tuple[Sheet[Any], ...]:
        return (points_sheet(()),)

    def section(self, group: ReportGroup) -> Section:
        points = points_sheet(group.points, group.sample_unit)
        by_switches = points_sheet(group.all_of(Point), group.sample_unit)
        title = "Efficiency by leaf switches of the allocation"
        return Section(
            id=self.id,
            title=self.title,
            caption=BRACKETS,
            about=(ONE_POINT if len(group.points) == 1 else ABOUT[group.scaling], group.baseline_note),
            charts=lambda: _charts(group),
            charts_per_row=3,
            sheets=with_rows(points, replace(by_switches, name="leaf-switches", title=title)),
            brief=(),
            where={
                "sample_unit": group.sample_unit,
                "scaling": group.scaling,
                "baseline_ranks": group.baseline.ranks,
                "sufficient": group.is_sufficient,
                "caption": group.caption,
            },
        )


def points_sheet(points: tuple[Point, ...], unit: str = "samples") -> Sheet[Point]:
    """Returns the table of the points of a group; `unit` names samples."""
    nodes = switches = speedup = ideal = efficiency = fraction = ""
    if any(point.nodes > 1 for point in points):
        nodes = "Nodes"
    if len(set(chain.from_iterable(point.leaf_switches for point in points))) > 1:
        switches = "Leaf switches"
    # People see no comparison of a single point; programs get the same columns in every report.
    if len(points) != 1:
        speedup, ideal, efficiency = "Speed-up", "Ideal", "Efficiency"
    if any(point.serial_fraction for point in points):
        fraction = "Serial fraction"
    throughput = f"Throughput, {unit}/s"
    columns: tuple[Column[Point], ...] = (
        Column("ranks", "Ranks", "ranks", is_brief=True),
        Column("nodes", nodes, "nodes", is_brief=True),
        Column("leaf_switches", switches, "switches_text", is_brief=bool(switches)),
        Column("batch_per_rank", "", "batch_per_rank"),
        Column("throughput_per_s", throughput, "throughput", has_interval=True, is_brief=True),
        Column("throughput_per_rank_per_s", f"Per rank, {unit}/s", "throughput_per_rank", has_interval=True),
        Column("speedup", speedup, "speedup", has_interval=True),
        Column("ideal_speedup", ideal, "ideal_speedup", unit="ratio"),
        Column("efficiency", efficiency, "efficiency", _efficiency_cell, has_interval=True, is_brief=True),
        Column("step_s", "Step, median", "step", has_interval=True, is_brief=True),
        Column("step_p95_s", "Step, p95", "step_p95", has_interval=True),
        Column("runs", "Runs", "throughput.n", is_brief=True),
        Column("throughput_interval", "", "throughput.kind"),
        Column("efficiency_interval", "", "efficiency.kind"),
        Column("paired_with_baseline", "", "paired_with_baseline"),
        Column("serial_fraction", fraction, "serial_fraction", has_interval=True),
    )
    caption = _intervals_caption(points)
    return Sheet(name="points", title="Scaling points", columns=columns, rows=points, in_terminal=True, caption=caption)


def _efficiency_cell(point: Point) -> Cell | Estimate:
    if point.is_baseline:
        return Cell("baseline", number=1.0)
    return point.efficiency


def _intervals_caption(points: Sequence[Point]) -> str:
    """Returns the kinds of the intervals, each once: of throughputs, and of ratios and steps if they differ."""
    if not points:
        return ""
    kinds: dict[str, dict[str, None]] = {"": {}, "ratios ": {}, "steps ": {}}
    for point in points:
        throughput = basis_text(point.throughput)
        kinds[""][throughput] = None
        if not point.is_baseline and basis_text(point.efficiency) != throughput:
            kinds["ratios "][basis_text(point.efficiency)] = None
        if basis_text(point.step) != throughput:
            kinds["steps "][basis_text(point.step)] = None
    texts = [f"{prefix}{', '.join(texts)}" for prefix, texts in kinds.items() if texts]
    return f"Intervals: {'; '.join(texts)}."
