"""The view `scaling`: throughput, speed-up and efficiency of every rank count."""

from __future__ import annotations

from dlbench.reading.scaling import Point
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Group
from dlbench.views.scaling.charts import scaling_charts
from dlbench.views.view import GroupView

ABOUT = {
    "strong": "Strong scaling: the global batch is fixed, so the batch per rank shrinks as ranks are added. Ideal: the "
    "step shortens in proportion.",
    "weak": "Weak scaling: the batch per rank is fixed, so the global batch grows with the ranks. Ideal: the step "
    "takes no longer than at the baseline.",
}
ONE_POINT = "One rank count only: there is nothing to scale against."


class ScalingView(GroupView):
    """How throughput grows with the ranks."""

    id = "scaling"
    title = "Scaling"
    level = "answer"

    def section(self, group: Group) -> Section:
        """One table with a line for each rank count."""
        baseline = group.baseline
        return Section(
            id=self.id,
            title=self.title,
            caption=f"{group.caption}. [low, high]: the interval; (low to high): a mere range.",
            about=(ONE_POINT if len(group.points) == 1 else ABOUT[group.scaling], group.baseline_note),
            charts=lambda: scaling_charts(group),
            charts_per_row=3,
            sheets=(points_sheet(group.points, group.sample_unit),),
            brief=(),
            where={
                "sample_unit": group.sample_unit,
                "scaling": group.scaling,
                "baseline_ranks": baseline.ranks,
                "sufficient": group.is_sufficient,
                "caption": group.caption,
            },
        )


def points_sheet(points: tuple[Point, ...], unit: str = "samples") -> Sheet[Point]:
    """Scaling points.

    Args:
        points: of one group.
        unit: what a sample is called.
    """
    is_spread = any(point.nodes > 1 for point in points)
    has_fraction = any(point.serial_fraction for point in points)
    columns: tuple[Column[Point], ...] = (
        Column("ranks", "Ranks", lambda point: point.ranks, is_brief=True),
        Column("nodes", "Nodes", lambda point: point.nodes, is_brief=is_spread),
        Column("batch_per_rank", "", lambda point: point.batch_per_rank),
        Column(
            "throughput_per_s",
            f"Throughput, {unit}/s",
            lambda point: point.throughput,
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "throughput_per_rank_per_s",
            f"Per rank, {unit}/s",
            lambda point: point.throughput_per_rank,
            has_interval=True,
        ),
        Column("speedup", "Speed-up", lambda point: point.speedup, has_interval=True),
        Column("ideal_speedup", "Ideal", lambda point: point.ideal_speedup, unit="ratio"),
        Column(
            "efficiency", "Efficiency", lambda point: point.efficiency, _efficiency, has_interval=True, is_brief=True
        ),
        Column("step_s", "Step, median", lambda point: point.step, has_interval=True, is_brief=True),
        Column("step_p95_s", "Step, p95", lambda point: point.step_p95, has_interval=True),
        Column("runs", "Runs", lambda point: point.throughput.n, is_brief=True),
        Column("throughput_interval", "Interval", lambda point: point.throughput.kind, _basis),
        Column("efficiency_interval", "", lambda point: point.efficiency.kind),
        Column("paired_with_baseline", "", lambda point: point.paired_with_baseline),
        Column(
            "serial_fraction",
            "Serial fraction" if has_fraction else "",
            lambda point: point.serial_fraction,
            has_interval=True,
        ),
    )
    return Sheet(name="points", title="Scaling points", columns=columns, rows=points, in_terminal=True)


def _efficiency(point: Point) -> Estimate | Cell:
    return Cell("baseline", number=1.0) if point.is_baseline else point.efficiency


def _basis(point: Point) -> str:
    """Of the throughput and, where they are others, of the efficiency and of the steps."""
    own, ratio, steps = (basis_text(one) for one in (point.throughput, point.efficiency, point.step))
    found = [own, *([] if ratio == own or point.is_baseline else [f"ratios {ratio}"])]
    found += [] if steps == own else [f"steps {steps}"]
    return "; ".join(found) + ", baseline" * point.is_baseline
