"""The views `steps` and `ranks`: quantiles and outliers of step times (of the slowest rank) by rank count. Figures are
means over runs of their digests (`dlbench.analysis.table`), because the experimental unit is the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

from dlbench.analysis import scaling
from dlbench.analysis.scaling import Point
from dlbench.analysis.table import QUANTILES, OutlierStep, RunTable, StepDigest
from dlbench.records.scan import Run
from dlbench.report.chart_style import RANK_COLOURS, WIDE, si_label
from dlbench.report.charts import Chart, Rows, Subject, channel, finish, layer, short, tooltips
from dlbench.report.document import Section, with_rows
from dlbench.report.table import Column, Pivot, Sheet, column, columns_of
from dlbench.report.wording import PART_TITLES, estimate_parts, figure_text, percent, value_text
from dlbench.stats.estimates import Estimate, geometric_mean_estimate, median_estimate, of_known
from dlbench.units import plural
from dlbench.views.model import AtPlace, GroupSource, GroupView, ReportGroup, place_of
from dlbench.views.next_step import second_rank
from dlbench.views.stragglers import RankMap, map_text, rank_charts, rank_map, rank_sheet, ratio_cell, slowest_text

CORRELATED = 0.2  # Lowest autocorrelation of successive steps with a warning that they are not independent.
DRAWN = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)  # Percents.
LISTED = (0, 5, 25, 50, 75, 95, 100)  # Percents of the quantiles in tables, if the runs have enough steps.
MAX_OUTLIERS = 20  # Steps in a table for people: those with the largest ratio.
NO_STEPS = "this report was made without the single steps of its runs."


@dataclass(frozen=True, kw_only=True)
class StepQuantile:
    """One quantile of the step times at a rank count."""

    share: float = field(metadata=column(name="share_of_steps_fraction"))  # 0, 0.01, ..., 1.
    seconds: Estimate  # Median over runs with their range, whatever their number: 101 quantiles are no 101 claims.


@dataclass(frozen=True, kw_only=True)
class StepPoint(AtPlace):
    """The step times at one rank count: the slowest rank's time in each measured step, seconds."""

    is_baseline: bool
    run_ids: tuple[str, ...] = field(metadata=column(name="runs", value=len))
    num_steps: int = field(metadata=column("Steps", "steps", text="{:,}".format))  # Measured steps of all runs.
    num_warmup: int = field(metadata=column(name="warmup_steps_left_out"))  # Warm-up steps of all runs.
    quantiles: tuple[StepQuantile, ...]
    p50: Estimate = field(metadata=column("Median", "p50_s"))  # Quantile of each run, geometric mean over runs.
    p95: Estimate = field(metadata=column("p95", "p95_s"))
    p99: Estimate = field(metadata=column("p99", "p99_s"))
    longest: Estimate = field(metadata=column("Longest", "longest_s"))
    num_outliers: int  # Steps beyond their run's fence, of all runs together.
    outlier_share: Estimate = field(metadata=column(name="outlier_share_fraction"))  # Median over runs.
    fence: Estimate = field(metadata=column("Outlier limit", "fence_s"))  # Tukey's far-out fence, median.
    outliers: tuple[OutlierStep, ...]  # The longest steps of each run, the largest ratio first.
    autocorrelation: Estimate | None  # Of successive steps, median over runs; None: no run has it.

    @property
    def place(self) -> str:
        return place_of(self)


@dataclass(frozen=True, kw_only=True)
class StepDistribution:
    """Step times of a group by rank count."""

    points: tuple[StepPoint, ...]
    map: RankMap


def step_times(group: scaling.Group, table: RunTable) -> StepDistribution | None:
    """Returns the distribution, outliers and map of a group's steps; None if the table was made without digests."""
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
    outliers = chain.from_iterable(digest.outliers for digest in digests)
    records = [runs[run_id].record for run_id in point.run_ids]
    num_steps = sum(digest.num_steps for digest in digests)

    def quantile_s(percent: int) -> Estimate:
        return geometric_mean_estimate({key: digest.quantiles_s[percent] for key, digest in by_run.items()}, "s")

    outlier_shares = {key: digest.num_outliers / digest.num_steps for key, digest in by_run.items()}
    autocorrelations = {key: digest.autocorrelation for key, digest in by_run.items()}
    return StepPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        is_baseline=is_baseline,
        run_ids=point.run_ids,
        num_steps=num_steps,
        num_warmup=sum(record.steps for record in records if record is not None) - num_steps,
        quantiles=tuple(_quantile(digests, index) for index in range(QUANTILES)),
        p50=quantile_s(50),
        p95=quantile_s(95),
        p99=quantile_s(99),
        longest=quantile_s(100),
        num_outliers=sum(digest.num_outliers for digest in digests),
        outlier_share=median_estimate(outlier_shares, "fraction"),
        fence=median_estimate({key: digest.fence_s for key, digest in by_run.items()}, "s"),
        outliers=tuple(sorted(outliers, key=lambda step: (-step.ratio, step.run_id, step.step))),
        autocorrelation=of_known(median_estimate, autocorrelations, "ratio"),
    )


def _quantile(digests: Sequence[StepDigest], index: int) -> StepQuantile:
    values = [digest.quantiles_s[index] for digest in digests]
    mean = geometric_mean_estimate(values).value
    if len(values) == 1:
        seconds = Estimate(value=mean, low=None, high=None, n=1, kind="single run", unit="s")
    else:
        seconds = Estimate(value=mean, low=min(values), high=max(values), n=len(values), kind="range", unit="s")
    return StepQuantile(share=index / (QUANTILES - 1), seconds=seconds)


def supports(point: StepPoint, percent_of_steps: int) -> bool:
    """Returns whether the runs are long enough for a quantile: at least one step is beyond it."""
    beyond = min(percent_of_steps, 100 - percent_of_steps)
    return not beyond or beyond * point.num_steps >= 100 * len(point.run_ids)


def steps_sheet(distribution: StepDistribution) -> Sheet[StepPoint]:
    """Returns the table of step times by rank count; people see the quantiles that all points have enough steps for."""
    points = distribution.points
    titles = {f"p{tail}_s": "" for tail in (95, 99) if not all(supports(point, tail) for point in points)}
    caption = "Outlier limit: third quartile + 3 x interquartile range of the run (Tukey)."
    if not any(point.num_outliers for point in points):
        titles |= {"outlier_steps": "", "fence_s": ""}
        caption = ""
    columns = (
        Column("", "At", place_of),
        *columns_of(
            StepPoint,
            *("ranks", "nodes", "is_baseline", "run_ids", "num_steps", "num_warmup"),
            *("p50", "p95", "p99", "longest", "fence", "outlier_share"),
            Column("outlier_steps", "Outliers", "num_outliers", _outliers_text),
            *("autocorrelation", "interval=p50.kind"),
            titles=titles,
        ),
    )
    return Sheet(name="steps", title="Step times by rank count", columns=columns, rows=points, caption=caption)


def _outliers_text(point: StepPoint) -> str:
    return f"{point.num_outliers:,} ({percent(point.num_outliers / point.num_steps, 2)})"


@dataclass(frozen=True)
class OutlierRow:
    """A step that is an outlier, with its rank count."""

    point: StepPoint
    step: OutlierStep


def outlier_sheet(points: Sequence[StepPoint]) -> Sheet[OutlierRow]:
    """Returns the table of outliers; people see those with the largest ratio to their run's median step."""
    rows = [OutlierRow(point, step) for point in points for step in point.outliers]
    shown_rows = {id(row) for row in sorted(rows, key=attrgetter("step.ratio"), reverse=True)[:MAX_OUTLIERS]}
    columns: tuple[Column[OutlierRow], ...] = (
        Column("", "At", "point.place"),
        *columns_of(StepPoint, "ranks", "nodes", "is_baseline", of="point"),
        Column("step", "Step", "step.step"),
        Column("seconds", "Time", "step.seconds", unit="s"),
        Column("ratio_to_median", "Over the median", "step.ratio", lambda row: ratio_cell(row.step.ratio, 2)),
        Column("rank", "Rank", "step.rank"),
        Column("host", "Host", "step.host", limit=64),
        Column("phase", "Phase that grew most", "step.phase", lambda row: PART_TITLES[row.step.phase]),
        Column("run_id", "Run", "step.run_id"),
        *columns_of(StepPoint, "outlier_steps_of_all_runs=num_outliers", of="point"),
    )
    return Sheet(
        name="outlier-steps",
        title="Outlier steps",
        columns=columns,
        rows=rows,
        is_shown=lambda row: id(row) in shown_rows,
        order=lambda row: -row.step.ratio,
        is_folded=True,
    )


@dataclass(frozen=True)
class QuantileRow:
    """A quantile of step times, with its rank count."""

    point: StepPoint
    percent: int
    quantile: StepQuantile


def quantile_sheet(distribution: StepDistribution) -> Sheet[QuantileRow]:
    """Returns the distribution of step times; for people a column per rank count."""
    rows: list[QuantileRow] = []
    for point in distribution.points:
        rows += [QuantileRow(point, index, quantile) for index, quantile in enumerate(point.quantiles)]
    picks = ("share", "seconds", "runs=seconds.n", "interval=seconds.kind")
    return Sheet(
        name="step-quantiles",
        title="Distribution of step times",
        columns=(
            *columns_of(StepPoint, "ranks", "nodes", "is_baseline", of="point"),
            *columns_of(StepQuantile, *picks, of="quantile"),
        ),
        rows=rows,
        pivot=Pivot(
            corner="Share of steps",
            down=lambda row: f"{row.percent} %",
            across="point.place",
            cell="quantile.seconds",
        ),
        is_shown=lambda row: row.percent in LISTED and supports(row.point, row.percent),
        is_drawn=True,
        caption="Geometric means over runs; in parentheses the range of runs.",
    )


def _distribution(group: Subject, distribution: StepDistribution) -> Chart:
    points, max_points = list(distribution.points), len(RANK_COLOURS)
    left_out = ""
    if len(points) > max_points:
        # The first, the last, and evenly between.
        points = [points[round(index * (len(points) - 1) / (max_points - 1))] for index in range(max_points)]
        left_out = f" {max_points} of {len(distribution.points)} rank counts are drawn."
    rows: Rows = [_quantile_row(point, index) for point in points for index in DRAWN]
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    kind: Literal["log", "linear"] = "log" if low > 0 and high > 8 * low else "linear"

    scale = {"type": kind, "zero": False, "nice": False}
    x = {"title": "step time", "scale": scale, "axis": {"labelExpr": si_label("s"), "tickCount": 5}}
    places = [place_of(point) for point in points]
    y_axis = {"labelExpr": "datum.value + ' %'"}
    colours = {"domain": places, "range": list(RANK_COLOURS[: len(places)])}
    legend = {"orient": "bottom", "columns": 3, "symbolStrokeWidth": 3, "symbolOpacity": 1}
    shared = {
        "y": channel("share:Q", title="share of the steps", scale={"domain": [0, 100]}, axis=y_axis),
        "color": channel("place:N", title=None, sort=places, scale=colours, legend=legend),
    }
    titles = {"place": "at", "share:Q": "share of the steps, %", "shown": "take no longer than"}
    line = {**shared, "x": channel("seconds:Q", **x), "order": "share:Q", "tooltip": tooltips(titles)}
    layers = [layer(rows, "line", line, strokeWidth=2)]
    if any(row["low"] != row["high"] for row in rows):
        band = {**shared, "x": channel("low:Q", **x), "x2": "high"}
        layers.insert(0, layer(rows, "area", band, opacity=0.2, orient="horizontal"))
    words = "; ".join(
        f"{place_of(point)}: half of the steps within {figure_text(point.p50)}, 95 % within {figure_text(point.p95)}, "
        f"the longest {figure_text(point.longest)}"
        for point in points
    )
    return finish(
        layers,
        group,
        name="steps",
        title="Share of steps that take no longer (band: range of runs)",
        alt=f"Distribution of step times by rank count, geometric means over runs.{left_out} {words}.",
        table=quantile_sheet(distribution),
        size=(WIDE, 220),
        axes="x",
    )


def _quantile_row(point: StepPoint, index: int) -> dict[str, Any]:
    figure = point.quantiles[index].seconds
    low, high = figure.low, figure.high
    if low is None or high is None:
        low = high = figure.value
    return {
        "place": place_of(point),
        "share": index,
        "seconds": short(figure.value),
        "low": short(low),
        "high": short(high),
        "shown": figure_text(figure),
    }


class StepsView(GroupView):
    """The distribution of step times, and outliers."""

    id = "steps"
    title = "Step times"
    key = "step_times"
    after = "stragglers"
    lack = NO_STEPS

    def numbers(self, source: GroupSource) -> StepDistribution | None:
        return step_times(source.group, source.table)

    def shown(self, group: ReportGroup, distribution: StepDistribution) -> Section:
        outlying_steps = outlier_sheet(distribution.points)
        last = distribution.points[-1]
        tail = f"95 % within {value_text(last.p95)}" if supports(last, 95) else f"longest {value_text(last.longest)}"
        outliers = f"{last.num_outliers or 'no'} {plural('outlier', last.num_outliers)} in {last.num_steps:,} steps"
        correlated = []
        for point in distribution.points:
            if point.autocorrelation is not None and point.autocorrelation.value >= CORRELATED:
                figure = " ".join(filter(None, estimate_parts(point.autocorrelation, 2)))
                correlated.append(f"{figure} at {place_of(point)}")
        notes = []
        if correlated:
            notes.append(f"Successive steps are correlated ({'; '.join(correlated)}): count runs, not steps.")
        return Section(
            headline=f"{place_of(last)}: median step {value_text(last.p50)}, {tail}; {outliers}",
            notes=tuple(notes),
            charts=lambda: [_distribution(group, distribution)],
            sheets=with_rows(steps_sheet(distribution), outlying_steps, quantile_sheet(distribution)),
        )


class RanksView(GroupView):
    """The map of ranks and steps: ranks that take longer than the others."""

    id = "ranks"
    title = "Ranks and steps"
    after = "steps"

    def section(self, group: ReportGroup) -> Section | None:
        distribution = group.of(StepDistribution)
        if distribution is None or len(distribution.map.rows) < 2:
            return None
        return Section(
            id=self.id,
            title=self.title,
            headline=slowest_text(distribution.map),
            notes=(map_text(distribution.map),),
            charts=lambda: rank_charts(group, distribution.map),
            sheets=(rank_sheet(distribution.map),),
        )

    def remedy(self, group: ReportGroup) -> str:
        if group.of(StepDistribution) is None:
            return NO_STEPS
        return second_rank(group, "there is no other rank to compare with")
