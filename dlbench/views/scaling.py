"""The view `scaling`: throughput, speed-up and efficiency of every rank count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import alt
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, figure_row, lines
from dlbench.report.charts.style import HEIGHT, MEASURED, MUTED, NARROW
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, figure_text, percent, sentence, times_text, units_text, value_text
from dlbench.stats.estimates import Estimate, placed, ratio_estimate
from dlbench.views.causes.numbers import WORTH_EXPLAINING, LostPercent
from dlbench.views.model import ReportGroup
from dlbench.views.view import GroupView, place_of

_LINEAR = 100  # Times as many ranks, two decades, up to which axes are linear unless a reader asks.
_EXTENT = 40  # Room for the labels of a vertical axis, pixels: seven characters.

ABOUT = {
    "strong": "Strong scaling: the global batch is fixed, so the batch per rank shrinks as ranks are added. Ideal: the "
    "step shortens in proportion.",
    "weak": "Weak scaling: the batch per rank is fixed, so the global batch grows with the ranks. Ideal: the step "
    "takes no longer than at the baseline.",
}
BRACKETS = "[low, high] is a 95 % interval; (low to high) is the smallest and largest of a few runs."
ONE_POINT = "One rank count only: there is nothing to scale against."


def baseline_note(group: scaling.Group, groups: Sequence[scaling.Group], table: RunTable) -> str:
    """What a reader must know of the baseline, in a sentence; empty where nothing holds it back.

    `groups` are all of the report, this one too.
    """
    base, largest = group.baseline, group.points[-1]
    if len(group.points) == 1 or group.sample.plan.series.variant != "plain":
        return ""
    alone = [(point, other) for other in groups for point in other.points if _is_same_work(group, other, point)]
    point, other = max(alone, key=lambda one: one[0].throughput.value, default=(base, group))
    if point.throughput.value > base.throughput_per_rank.value and point is not base:
        plan, unit = other.sample.plan, group.sample.plan.workload.sample_unit
        rates = table.rates
        top, bottom = ({table.keys[run_id]: float(rates[run_id]) for run_id in one.run_ids} for one in (largest, point))
        ratio = ratio_estimate(top, bottom)
        rate = f"{figure_text(point.throughput)} {unit}/s"
        return (
            f"Against the best single-rank run here ({plan.engine.name}, {_cores(other)}; {rate}): {times_text(ratio)} "
            f"with {place_of(largest)} ({basis_text(ratio)}); ranks of the baseline have {_cores(group)}."
        )
    is_on_cpu = group.sample.record is not None and group.sample.record.ranks[0].device.startswith("cpu")
    if is_on_cpu and largest.ranks * base.nodes > base.ranks * largest.nodes:
        return (
            f"Every rank had {_cores(group)}, also at the baseline, so that efficiencies compare like with like. A "
            "single rank with all cores may be faster, and was not measured here."
        )
    return ""


def _cores(group: scaling.Group) -> str:
    count = group.sample.plan.layout.cores_per_rank
    return f"{count} core{'s' * (count > 1)}"


def _is_same_work(group: scaling.Group, other: scaling.Group, point: Point) -> bool:
    """Whether a point is of one rank that trains the same, with whatever cores and engine."""
    own, plan = group.sample.plan, other.sample.plan
    batch = own.global_batch if group.scaling == "strong" else group.baseline.batch_per_rank
    return (
        point.ranks == 1
        and point.batch_per_rank == batch
        and plan.series.variant == "plain"
        and plan.fault == own.fault
        and plan.system.name == own.system.name
        and _work(other.sample) == _work(group.sample)
    )


def _work(run: Run) -> dict[str, Any]:
    """What is trained, where on, and nothing of how batches are cut and read."""
    device = run.record.ranks[0].device.split(":")[0] if run.record is not None else ""
    workload = run.plan.workload.model_dump(
        exclude={"train": {"batch_per_rank"}, "data": {"loader_workers", "prefetch_batches"}}
    )
    return {**workload, "device": device, "phases": run.plan.measure.phases}


def verdict(
    unit: str, all_points: tuple[Point, ...], *, is_oversubscribed: bool, causes: LostPercent | None = None
) -> str:
    """What the largest scaling point says, in two sentences: the efficiency with its interval, and what it lost.

    `unit`: what a sample is called; `all_points`: baseline first; `is_oversubscribed`: ranks shared cores, which makes
    a scaling figure meaningless.
    """
    base, last = all_points[0], all_points[-1]
    if len(all_points) == 1:
        rate = f"{figure_text(base.throughput)} {unit}/s at {place_of(last)} ({basis_text(base.throughput)})"
        return f"{rate}. Scaling needs a second rank count."
    basis = f"{place_of(base)} = 100 %; {basis_text(last.efficiency)}"
    sentence = f"Scaling efficiency {figure_text(last.efficiency)} at {place_of(last)} ({basis})."
    if is_oversubscribed:
        return f"{sentence} Ranks shared cores: this says nothing about the scaling of the machine."
    more = _explanation(last, causes)
    return f"{sentence} {more}" if more else sentence


def _explanation(point: Point, causes: LostPercent | None) -> str:
    """Says what was lost, as the account of the point does; without one, whether anything was."""
    account = None if causes is None else causes.at(point)
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
    """The second sentence of the verdict on its own: what the largest point lost; empty where nothing is known."""
    return _explanation(group.largest, group.of(LostPercent)) if len(group.points) > 1 else ""


class _Quantity(NamedTuple):
    """What a chart shows over ranks."""

    name: str  # Of the figure of a point.
    title: str
    axis: str
    ideal: Callable[[Point], float]

    def figure(self, point: Point) -> Estimate:
        found: Estimate = getattr(point, self.name)
        return found


def _charts(group: ReportGroup) -> list[Chart]:
    if len(group.points) == 1:
        return []
    base, unit = group.baseline, f"{group.sample_unit}/s"
    quantities = (
        _Quantity("efficiency", "Efficiency", "scaling efficiency", lambda point: 1.0),
        _Quantity("throughput", "Throughput", unit, lambda point: base.throughput.value * point.ideal_speedup),
        _Quantity("speedup", "Speed-up", f"over {place_of(base)}", lambda point: point.ideal_speedup),
    )
    return [_chart(group, quantity) for quantity in quantities]


def _chart(group: ReportGroup, quantity: _Quantity) -> Chart:
    rows: Rows = [
        {
            "ranks": point.ranks,
            "ideal": quantity.ideal(point),
            "label": value_text(quantity.figure(point)),
            "place": place_of(point),
            **figure_row(quantity.figure(point)),
        }
        for point in group.points
    ]
    columns: tuple[Column[Point], ...] = (
        Column("", "At", place_of),
        Column("", f"{quantity.title}, {quantity.axis}", quantity.figure),
        Column("", "Ideal", quantity.ideal, unit=quantity.figure(group.baseline).unit),
    )
    words = "; ".join(f"{row['place']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*_layers(rows, quantity)),
        group,
        name=quantity.name,
        title=quantity.title,
        alt=f"{quantity.title} ({quantity.axis}) over ranks, with the ideal as a dashed line. {words}.",
        table=Sheet(name=quantity.name, title=quantity.title, columns=columns, rows=group.points),
        size=(NARROW, HEIGHT),
        axes="" if quantity.name == "efficiency" else "xy",
    )


def _layers(rows: Rows, quantity: _Quantity) -> list[Any]:
    counts = sorted({row["ranks"] for row in rows})
    is_long = counts[-1] > _LINEAR * counts[0]
    # Room on the right for the labels at the ends of the lines.
    scale: dict[str, Any] = {"domain": [0, counts[-1] * 1.28], "nice": False}
    if is_long:
        scale = {"type": "log", "base": 2, "domain": [counts[0] / 1.2, counts[-1] * 4], "nice": False}
    axis = {"values": counts, "grid": False, "labelOverlap": "greedy"}
    x = Axis("ranks", field="ranks", format="d", scale=scale, axis=axis)
    y = _y_axis(quantity, rows, is_long=is_long and quantity.name != "efficiency")
    tooltip = {"place": "at", "shown": quantity.title, "basis": "interval"}
    drawn = lines(rows, y, MEASURED, tooltip, x_axis=x, ideal="ideal")
    last = alt.Chart(alt.InlineData(values=rows[-1:])).encode(x=alt.X("ranks:Q"))
    return [
        *drawn.layer,
        # Labels at the lines make a legend needless.
        last.mark_text(color=MUTED, align="left", dx=8, dy=-7, fontSize=12, text="ideal").encode(y=alt.Y("ideal:Q")),
        last.mark_text(color=MEASURED, align="left", dx=8, dy=7, fontSize=12).encode(y="value:Q", text="label:N"),
    ]


def _y_axis(quantity: _Quantity, rows: Rows, *, is_long: bool) -> Axis:
    """Begins at zero, because a share read off a cut axis misleads; of equal width, so that the charts stand aligned.

    Over more than two decades it is logarithmic like the ranks, which keeps the ideal a straight line.
    """
    values = [value for row in rows for value in (row["value"], row["ideal"], row["low"], row["high"]) if value]
    scale: dict[str, Any] = {"domain": [0, max(values) * 1.12], "nice": False}
    if is_long:
        scale = {"type": "log", "base": 2, "domain": [min(values) * 0.85, max(values) * 1.25], "nice": False}
    form = ".0%" if quantity.name == "efficiency" else ",.4~r"
    axis = {"tickCount": 6, "minExtent": _EXTENT, "maxExtent": _EXTENT}
    return Axis(quantity.axis, format=form, scale=scale, axis=axis)


class ScalingView(GroupView):
    """How throughput grows with the ranks."""

    id = "scaling"
    title = "Scaling"
    level = "answer"
    after = "quality"

    def always(self) -> tuple[Sheet[Any], ...]:
        return (points_sheet(()),)

    def section(self, group: ReportGroup) -> Section:
        return Section(
            id=self.id,
            title=self.title,
            caption=BRACKETS,
            about=(ONE_POINT if len(group.points) == 1 else ABOUT[group.scaling], group.baseline_note),
            charts=lambda: _charts(group),
            charts_per_row=3,
            sheets=(points_sheet(group.points, group.sample_unit),),
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
    """The points of a group; `unit`: what a sample is called."""
    is_spread = any(point.nodes > 1 for point in points)
    # Of a single point there is nothing to compare, for people; programs find the same columns in every report.
    is_series = len(points) != 1
    has_fraction = any(point.serial_fraction for point in points)

    def figure(name: str, title: str, field: str, *, is_brief: bool = False) -> Column[Point]:
        return Column(name, title, lambda point: getattr(point, field), has_interval=True, is_brief=is_brief)

    columns: tuple[Column[Point], ...] = (
        Column("ranks", "Ranks", lambda point: point.ranks, is_brief=True),
        Column("nodes", "Nodes" * is_spread, lambda point: point.nodes, is_brief=True),
        Column("batch_per_rank", "", lambda point: point.batch_per_rank),
        figure("throughput_per_s", f"Throughput, {unit}/s", "throughput", is_brief=True),
        figure("throughput_per_rank_per_s", f"Per rank, {unit}/s", "throughput_per_rank"),
        figure("speedup", "Speed-up" * is_series, "speedup"),
        Column("ideal_speedup", "Ideal" * is_series, lambda point: point.ideal_speedup, unit="ratio"),
        Column(
            "efficiency",
            "Efficiency" * is_series,
            lambda point: point.efficiency,
            lambda point: Cell("baseline", number=1.0) if point.is_baseline else point.efficiency,
            has_interval=True,
            is_brief=True,
        ),
        figure("step_s", "Step, median", "step", is_brief=True),
        figure("step_p95_s", "Step, p95", "step_p95"),
        Column("runs", "Runs", lambda point: point.throughput.n, is_brief=True),
        Column("throughput_interval", "", lambda point: point.throughput.kind),
        Column("efficiency_interval", "", lambda point: point.efficiency.kind),
        Column("paired_with_baseline", "", lambda point: point.paired_with_baseline),
        figure("serial_fraction", "Serial fraction" * has_fraction, "serial_fraction"),
    )
    # What the intervals are, each kind once: of throughputs, of ratios and of steps.
    figures: dict[str, list[str]] = {"": [], "ratios ": [], "steps ": []}
    for point in points:
        own = basis_text(point.throughput)
        figures[""].append(own)
        for name, estimate in (("ratios ", point.efficiency), ("steps ", point.step)):
            if not (point.is_baseline and estimate is point.efficiency) and basis_text(estimate) != own:
                figures[name].append(basis_text(estimate))
    texts = [f"{name}{', '.join(dict.fromkeys(found))}" for name, found in figures.items() if found]
    caption = f"Intervals: {'; '.join(texts)}." if texts else ""
    return Sheet(name="points", title="Scaling points", columns=columns, rows=points, in_terminal=True, caption=caption)
