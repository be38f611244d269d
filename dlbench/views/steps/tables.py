"""Tables of step times: by rank count, outliers, distribution; and of the map of ranks by steps."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.reading.digest import OutlierStep
from dlbench.report.table import Cell, Column, Pivot, Sheet
from dlbench.report.wording import DASH, PART_TITLES
from dlbench.views.steps.numbers import MapRow, RankMap, StepPoint, StepQuantile, StepTimes
from dlbench.views.steps.words import outliers_text, place, row_title, supports

DRAWN = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)
"""Percents of the quantiles that are drawn."""

LISTED = (0, 5, 25, 50, 75, 95, 100)
"""Percents of the quantiles that stand in tables for people, where the runs have steps enough for them."""

FEW_OUTLIERS = 3
"""With fewer outliers there is a sentence, and neither a table nor a chart."""

MAX_OUTLIERS = 20
"""Steps in a table for people; the ones with the largest ratio."""

MAX_ROWS = 16
"""Rows of a map in a table for people; the slowest ones."""


def _ratio(value: float, decimals: int) -> Cell:
    return Cell(f"{value:.{decimals}f}x", number=value)


def steps_sheet(found: StepTimes) -> Sheet[StepPoint]:
    """Step times, a line per rank count; people see the quantiles that all points have steps enough for."""
    has_outliers = any(point.num_outliers for point in found.points)

    def tail(percent: int, title: str) -> str:
        return title if all(supports(point, percent) for point in found.points) else ""

    columns: tuple[Column[StepPoint], ...] = (
        Column("", "At", place),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("is_baseline", "", lambda point: point.is_baseline),
        Column("runs", "", lambda point: len(point.run_ids)),
        Column("steps", "Steps", lambda point: point.num_steps, lambda point: f"{point.num_steps:,}"),
        Column(
            "warmup_steps_left_out",
            "",
            lambda point: point.num_warmup,
        ),
        Column("p50_s", "Median", lambda point: point.p50, has_interval=True),
        Column("p95_s", tail(95, "p95"), lambda point: point.p95, has_interval=True),
        Column("p99_s", tail(99, "p99"), lambda point: point.p99, has_interval=True),
        Column("longest_s", "Longest", lambda point: point.longest, has_interval=True),
        Column("fence_s", "Outlier limit" if has_outliers else "", lambda point: point.fence, has_interval=True),
        Column("outlier_share_fraction", "", lambda point: point.outlier_share, has_interval=True),
        Column("outlier_steps", "Outliers" if has_outliers else "", lambda point: point.num_outliers, outliers_text),
        Column(
            "autocorrelation",
            "",
            lambda point: point.autocorrelation,
            has_interval=True,
        ),
        Column("interval", "", lambda point: point.p50.kind),
    )
    return Sheet(
        name="steps",
        title="Step times by rank count",
        columns=columns,
        rows=found.points,
        caption="Outlier limit: third quartile + 3 x interquartile range of the run (Tukey)." if has_outliers else "",
    )


Outlier = tuple[StepPoint, OutlierStep]


def outlier_sheet(points: Sequence[StepPoint], most: int = MAX_OUTLIERS) -> Sheet[Outlier]:
    """The longest steps, for people the `most` with the largest ratio to their run's median step, largest first."""
    rows = tuple((point, step) for point in points for step in point.outliers)
    shown = {id(step) for _, step in sorted(rows, key=lambda row: -row[1].ratio)[:most]}
    columns: tuple[Column[Outlier], ...] = (
        Column("", "At", lambda row: place(row[0])),
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("is_baseline", "", lambda row: row[0].is_baseline),
        Column("step", "Step", lambda row: row[1].step),
        Column("seconds", "Took", lambda row: row[1].seconds, unit="s"),
        Column("ratio_to_median", "Over the median", lambda row: row[1].ratio, lambda row: _ratio(row[1].ratio, 2)),
        Column("rank", "Rank", lambda row: row[1].rank),
        Column("host", "Host", lambda row: row[1].host, limit=64),
        Column("phase", "Grew most", lambda row: row[1].phase, lambda row: PART_TITLES[row[1].phase]),
        Column("run_id", "Run", lambda row: row[1].run_id),
        Column("outlier_steps_of_all_runs", "", lambda row: row[0].num_outliers),
    )
    return Sheet(
        name="outlier-steps",
        title="Outlier steps",
        columns=columns,
        rows=rows,
        is_shown=lambda row: len(rows) >= FEW_OUTLIERS and id(row[1]) in shown,
        order=lambda row: -row[1].ratio,
        is_folded=True,
    )


Quantile = tuple[StepPoint, int, StepQuantile]


def quantile_sheet(found: StepTimes) -> Sheet[Quantile]:
    """The distribution of step times; for people a column per rank count."""
    columns: tuple[Column[Quantile], ...] = (
        Column("ranks", "", lambda row: row[0].ranks),
        Column("nodes", "", lambda row: row[0].nodes),
        Column("is_baseline", "", lambda row: row[0].is_baseline),
        Column("share_of_steps_fraction", "", lambda row: row[2].share),
        Column("seconds", "", lambda row: row[2].seconds, has_interval=True),
        Column("runs", "", lambda row: row[2].seconds.n),
        Column("interval", "", lambda row: row[2].seconds.kind),
    )
    return Sheet(
        name="step-quantiles",
        title="Distribution of step times",
        columns=columns,
        rows=tuple((point, index, one) for point in found.points for index, one in enumerate(point.quantiles)),
        pivot=Pivot(
            corner="Share of steps",
            down=lambda row: f"{row[1]} %",
            across=lambda row: place(row[0]),
            cell=lambda row: row[2].seconds,
        ),
        is_shown=lambda row: row[1] in LISTED and supports(row[0], row[1]),
        is_drawn=True,
        caption="Geometric means over runs; in parentheses the range of runs.",
    )


# Ranks by steps


def rank_sheet(found: RankMap, most: int = MAX_ROWS) -> Sheet[MapRow]:
    """Mean and largest value of each row of the map, for people of the `most` slowest, slowest first."""
    slowest = sorted(found.rows, key=lambda row: -row.mean)[:most]
    columns: tuple[Column[MapRow], ...] = (
        Column("", "Ranks", row_title),
        Column("run_id", "", lambda row: found.run_id),
        Column("ranks", "", lambda row: found.ranks),
        Column("nodes", "", lambda row: found.nodes),
        Column("first_rank", "", lambda row: row.first_rank),
        Column("last_rank", "", lambda row: row.last_rank),
        Column("hosts", "Hosts", lambda row: row.hosts, lambda row: row.hosts or DASH, limit=140),
        Column("mean_ratio", "Mean", lambda row: row.mean, lambda row: _ratio(row.mean, 3)),
        Column("largest_ratio", "Largest", lambda row: row.largest, lambda row: _ratio(row.largest, 3)),
        Column("", "In steps", _steps_of_largest),
        Column("largest_first_step", "", lambda row: row.largest_first_step),
        Column("largest_last_step", "", lambda row: row.largest_last_step),
    )
    return Sheet(
        name="ranks",
        title="Own work by rank, slowest first",
        columns=columns,
        rows=found.rows,
        is_shown=lambda row: row in slowest,
        order=lambda row: -row.mean,
        is_drawn=True,
    )


def _steps_of_largest(row: MapRow) -> str:
    first, last = row.largest_first_step, row.largest_last_step
    return str(first) if first == last else f"{first} to {last}"
