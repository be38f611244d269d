"""The views `steps` and `ranks`: quantiles and outliers of step times by rank count; the map is of `rank_map`.

The time of a step is that of its slowest rank. Each run is reduced to a digest when it is read
(`dlbench.analysis.digest`); here the digests of one rank count become means over runs, because the experimental unit
is the run (`dlbench.stats.estimates`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlbench.analysis import scaling
from dlbench.analysis.digest import QUANTILES, OutlierStep, StepDigest
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import RunTable
from dlbench.lazy import alt
from dlbench.records.scan import Run
from dlbench.report.charts.chart import Chart, Rows, Subject, finish, inline, short, tooltips
from dlbench.report.charts.style import RANK_COLOURS, WIDE, si_label
from dlbench.report.document import Section
from dlbench.report.table import Column, Pivot, Sheet, column, columns_of
from dlbench.report.wording import PART_TITLES, estimate_parts, figure_text, percent, value_text
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate, of_known
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import second_rank
from dlbench.views.rank_map import RankMap, map_text, rank_charts, rank_map, rank_sheet, ratio_cell, slowest_text
from dlbench.views.view import GroupSource, GroupView, place_of

CORRELATED = 0.2  # Autocorrelation of successive steps from which on a warning is given: they are not independent.
DRAWN = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)
"""Percents of the quantiles that are drawn."""
LISTED = (0, 5, 25, 50, 75, 95, 100)
"""Percents of the quantiles that stand in tables for people, where the runs have steps enough for them."""
MAX_OUTLIERS = 20  # Steps in a table for people; the ones with the largest ratio.
NO_STEPS = "this report was made without the single steps of its runs."


@dataclass(frozen=True, kw_only=True)
class StepQuantile:
    """One quantile of the step times at a rank count."""

    share: float = field(metadata=column(name="share_of_steps_fraction"))
    """Share of steps that take no longer (fraction): 0, 0.01, ..., 1."""
    seconds: Estimate  # Median over runs with their range, whatever their number: 101 quantiles are no 101 claims.


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Step times at one rank count: the slowest rank's time in each measured step, seconds."""

    ranks: int
    nodes: int
    is_baseline: bool
    run_ids: tuple[str, ...] = field(metadata=column(name="runs", value=len))
    num_steps: int = field(metadata=column("Steps", "steps", text=lambda count: f"{count:,}"))  # Measured, of all runs.
    num_warmup: int = field(metadata=column(name="warmup_steps_left_out"))  # Of all runs together; they are left out.
    quantiles: tuple[StepQuantile, ...]
    p50: Estimate = field(metadata=column("Median", "p50_s"))  # Quantiles of each run, geometric mean over runs.
    p95: Estimate = field(metadata=column("p95", "p95_s"))
    p99: Estimate = field(metadata=column("p99", "p99_s"))
    longest: Estimate = field(metadata=column("Longest", "longest_s"))
    num_outliers: int  # Steps beyond their run's fence, of all runs together.
    outlier_share: Estimate = field(metadata=column(name="outlier_share_fraction"))
    """Share of a run's steps that are outliers (fraction), median over runs."""
    fence: Estimate = field(metadata=column("Outlier limit", "fence_s"))
    """Third quartile + 3 x the interquartile range (Tukey's far-out fence), median over runs."""
    outliers: tuple[OutlierStep, ...]  # The longest of each run, the largest ratio first.
    autocorrelation: Estimate | None
    """Correlation of successive step times (ratio), median over the runs in which it is known; None: known in none."""


@dataclass(frozen=True, kw_only=True)
class StepDistribution:
    """Step times of a group by rank count."""

    points: tuple[StepPoint, ...]
    map: RankMap


def step_times(group: scaling.Group, table: RunTable) -> StepDistribution | None:
    """Distribution, outliers and map of a group's steps; None where the table was made without digests."""
    if not table.digests:
        return None
    runs = {run.plan.run_id: run for run in group.runs}
    return StepDistribution(
        points=tuple(_point(point, runs, table, is_baseline=point is group.baseline) for point in group.points),
        map=rank_map(group.points[-1], table),
    )


def _point(point: Point, runs: dict[str, Run], table: RunTable, *, is_baseline: bool) -> StepPoint:
    by_run = {table.keys[run_id]: table.digests[run_id] for run_id in point.run_ids}
    digests = list(by_run.values())
    outliers = [step for one in digests for step in one.outliers]
    records = [runs[run_id].record for run_id in point.run_ids]

    def quantile_s(percent: int) -> Estimate:
        return geometric_mean_estimate({key: one.quantiles_s[percent] for key, one in by_run.items()}, "s")

    return StepPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        run_ids=point.run_ids,
        num_steps=sum(one.num_steps for one in digests),
        num_warmup=sum(one.steps for one in records if one is not None) - sum(one.num_steps for one in digests),
        quantiles=tuple(_quantile(digests, index) for index in range(QUANTILES)),
        p50=quantile_s(50),
        p95=quantile_s(95),
        p99=quantile_s(99),
        longest=quantile_s(100),
        num_outliers=sum(one.num_outliers for one in digests),
        outlier_share=median_estimate(
            {key: one.num_outliers / one.num_steps for key, one in by_run.items()}, "fraction"
        ),
        fence=median_estimate({key: one.fence_s for key, one in by_run.items()}, "s"),
        outliers=tuple(sorted(outliers, key=lambda one: (-one.ratio, one.run_id, one.step))),
        autocorrelation=of_known(median_estimate, {key: one.autocorrelation for key, one in by_run.items()}, "ratio"),
    )


def _quantile(digests: Sequence[StepDigest], index: int) -> StepQuantile:
    values = [one.quantiles_s[index] for one in digests]
    several = len(values) > 1
    return StepQuantile(
        share=index / (QUANTILES - 1),
        seconds=Estimate(
            value=geometric_mean_estimate(values).value,
            low=min(values) if several else None,
            high=max(values) if several else None,
            n=len(values),
            kind="range" if several else "single run",
            unit="s",
        ),
    )


def supports(point: StepPoint, percent_of_steps: int) -> bool:
    """Whether the runs are long enough for a quantile: a step at least lies beyond it."""
    beyond = min(percent_of_steps, 100 - percent_of_steps)
    return not beyond or beyond * point.num_steps >= 100 * len(point.run_ids)


def steps_sheet(found: StepDistribution) -> Sheet[StepPoint]:
    """Step times, a line per rank count; people see the quantiles that all points have steps enough for."""
    has_outliers = any(point.num_outliers for point in found.points)

    def outliers(point: StepPoint) -> str:
        return f"{point.num_outliers:,} ({percent(point.num_outliers / point.num_steps, 2)})"

    hidden = {f"p{tail}_s": "" for tail in (95, 99) if not all(supports(point, tail) for point in found.points)}
    columns = (
        Column("", "At", place_of),
        *columns_of(
            StepPoint,
            *("ranks", "nodes", "is_baseline", "run_ids", "num_steps", "num_warmup"),
            *("p50", "p95", "p99", "longest", "fence", "outlier_share"),
            Column("outlier_steps", "Outliers" if has_outliers else "", "num_outliers", outliers),
            *("autocorrelation", "interval=p50.kind"),
            titles=hidden | ({} if has_outliers else {"fence_s": ""}),
        ),
    )
    return Sheet(
        name="steps",
        title="Step times by rank count",
        columns=columns,
        rows=found.points,
        caption="Outlier limit: third quartile + 3 x interquartile range of the run (Tukey)." if has_outliers else "",
    )


Outlier = tuple[StepPoint, OutlierStep]


def outlier_sheet(points: Sequence[StepPoint]) -> Sheet[Outlier]:
    """The longest steps, largest first; for people those with the largest ratio to their run's median step."""
    rows = tuple((point, step) for point in points for step in point.outliers)
    shown = {id(step) for _, step in sorted(rows, key=lambda row: -row[1].ratio)[:MAX_OUTLIERS]}
    of_point = functools.partial(columns_of, StepPoint, of=operator.itemgetter(0))
    columns: tuple[Column[Outlier], ...] = (
        Column("", "At", lambda row: place_of(row[0])),
        *of_point("ranks", "nodes", "is_baseline"),
        Column("step", "Step", lambda row: row[1].step),
        Column("seconds", "Took", lambda row: row[1].seconds, unit="s"),
        Column("ratio_to_median", "Over the median", lambda row: row[1].ratio, lambda row: ratio_cell(row[1].ratio, 2)),
        Column("rank", "Rank", lambda row: row[1].rank),
        Column("host", "Host", lambda row: row[1].host, limit=64),
        Column("phase", "Grew most", lambda row: row[1].phase, lambda row: PART_TITLES[row[1].phase]),
        Column("run_id", "Run", lambda row: row[1].run_id),
        *of_point("outlier_steps_of_all_runs=num_outliers"),
    )
    return Sheet(
        name="outlier-steps",
        title="Outlier steps",
        columns=columns,
        rows=rows,
        is_shown=lambda row: id(row[1]) in shown,
        order=lambda row: -row[1].ratio,
        is_folded=True,
    )


def quantile_sheet(found: StepDistribution) -> Sheet[tuple[StepPoint, int, StepQuantile]]:
    """The distribution of step times; for people a column per rank count."""
    columns = (
        *columns_of(StepPoint, "ranks", "nodes", "is_baseline", of=operator.itemgetter(0)),
        *columns_of(
            StepQuantile, "share", "seconds", "runs=seconds.n", "interval=seconds.kind", of=operator.itemgetter(2)
        ),
    )
    return Sheet(
        name="step-quantiles",
        title="Distribution of step times",
        columns=columns,
        rows=tuple((point, index, one) for point in found.points for index, one in enumerate(point.quantiles)),
        pivot=Pivot(
            corner="Share of steps",
            down=lambda row: f"{row[1]} %",
            across=lambda row: place_of(row[0]),
            cell=lambda row: row[2].seconds,
        ),
        is_shown=lambda row: row[1] in LISTED and supports(row[0], row[1]),
        is_drawn=True,
        caption="Geometric means over runs; in parentheses the range of runs.",
    )


def _distribution(group: Subject, found: StepDistribution) -> Chart:
    points, most = list(found.points), len(RANK_COLOURS)
    if len(points) > most:
        # The first, the last, and evenly between.
        points = [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
    rows: Rows = [
        {
            "place": place_of(point),
            "share": index,
            "seconds": short(figure.value),
            "low": short(figure.value if figure.low is None else figure.low),
            "high": short(figure.value if figure.high is None else figure.high),
            "shown": figure_text(figure),
        }
        for point in points
        for index in DRAWN
        for figure in (point.quantiles[index].seconds,)
    ]
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    kind: Literal["log", "linear"] = "log" if low > 0 and high > 8 * low else "linear"

    def x_of(field: str) -> Any:
        scale = alt.Scale(type=kind, zero=False, nice=False)
        return alt.X(f"{field}:Q", title="step time", scale=scale, axis=alt.Axis(labelExpr=si_label("s"), tickCount=5))

    places = [place_of(point) for point in points]
    y = alt.Y("share:Q", title="share of the steps").scale(domain=[0, 100]).axis(labelExpr="datum.value + ' %'")
    scale = alt.Scale(domain=places, range=list(RANK_COLOURS[: len(places)]))
    legend = alt.Legend(orient="bottom", columns=3, symbolStrokeWidth=3, symbolOpacity=1)
    base = alt.Chart(inline(rows)).encode(
        y=y, color=alt.Color("place:N", title=None, sort=places, scale=scale, legend=legend)
    )
    tooltip = tooltips({"place": "at", "share:Q": "share of the steps, %", "shown": "take no longer than"})
    layers = [base.mark_line(strokeWidth=2).encode(x=x_of("seconds"), order="share:Q", tooltip=tooltip)]
    if any(row["low"] != row["high"] for row in rows):
        layers.insert(0, base.mark_area(opacity=0.2, orient="horizontal").encode(x=x_of("low"), x2="high:Q"))
    left_out = (
        f" {len(points)} of {len(found.points)} rank counts are drawn." if len(points) < len(found.points) else ""
    )
    words = "; ".join(
        f"{place_of(point)}: half of the steps within {figure_text(point.p50)}, 95 % within {figure_text(point.p95)}, "
        f"the longest {figure_text(point.longest)}"
        for point in points
    )
    return finish(
        alt.layer(*layers),
        group,
        name="steps",
        title="Share of steps that take no longer (band: range of runs)",
        alt=f"Distribution of step times by rank count, geometric means over runs.{left_out} {words}.",
        table=quantile_sheet(found),
        size=(WIDE, 220),
        axes="x",
    )


class StepsView(GroupView):
    """How long steps take, and which take far longer."""

    id = "steps"
    title = "Step times"
    key = "step_times"
    after = "stragglers"

    def numbers(self, source: GroupSource) -> StepDistribution | None:
        return step_times(source.group, source.table)

    def shown(self, group: ReportGroup, found: StepDistribution) -> Section:
        outliers = outlier_sheet(found.points)
        last = found.points[-1]
        tail = f"95 % within {value_text(last.p95)}" if supports(last, 95) else f"longest {value_text(last.longest)}"
        count = f"{last.num_outliers or 'no'} outlier{'s' * (last.num_outliers != 1)} in {last.num_steps:,} steps"
        correlated = [
            f"{' '.join(filter(None, estimate_parts(point.autocorrelation, 2)))} at {place_of(point)}"
            for point in found.points
            if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED
        ]
        note = f"Successive steps are correlated ({'; '.join(correlated)}): count runs, not steps."
        return Section(
            headline=f"{place_of(last)}: median step {value_text(last.p50)}, {tail}; {count}",
            notes=(note,) if correlated else (),
            charts=lambda: [_distribution(group, found)],
            sheets=(steps_sheet(found), *((outliers,) if outliers.rows else ()), quantile_sheet(found)),
        )

    def remedy(self, group: ReportGroup) -> str:
        return NO_STEPS


class RanksView(GroupView):
    """Which ranks take longer than the others, and when."""

    id = "ranks"
    title = "Ranks and steps"
    after = "steps"

    def section(self, group: ReportGroup) -> Section | None:
        found = group.of(StepDistribution)
        if found is None or len(found.map.rows) < 2:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=slowest_text(found.map),
            notes=(map_text(found.map),),
            charts=lambda: rank_charts(group, found.map),
            sheets=(rank_sheet(found.map),),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.of(StepDistribution) is None:
            return NO_STEPS
        return second_rank(group, "there is no other rank to compare with")
