"""Tables on single steps: distribution, outliers, ranks by steps; see `view.Sheet`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    PART_TITLES,
    basis_text,
    figure_text,
)
from dlbench.stats.figure import Cell, figure_columns
from dlbench.units import format_seconds
from dlbench.views.steps.numbers import MapRow, RankMap, StepPoint, StepTimes
from dlbench.views.steps.words import correlation_text, map_text, outliers_text, place, row_title

DRAWN = (0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99, 100)
"""Percents of the quantiles that are drawn and stand in tables for people."""

MAX_OUTLIERS = 20
"""Steps in a table for people; the longest ones."""

MAX_ROWS = 16
"""Rows of a map in a table for people; the slowest ones."""

_WHERE = ("group", "label", "ranks", "nodes", "is_baseline")
_ENDS = ("", "_low", "_high")

WHAT_A_STEP_IS = "A step's time is that of its slowest rank."


def steps_of(group: Group) -> StepTimes:
    """Of a group that has them."""
    assert group.step_times is not None
    return group.step_times


def _where(group: Group, point: StepPoint) -> dict[str, Cell]:
    return {
        "group": group.id,
        "label": group.label,
        "ranks": point.ranks,
        "nodes": point.nodes,
        "is_baseline": point.is_baseline,
    }


def step_sheets(group: Group) -> list[Sheet]:
    """Step times by rank count, their outliers, and their distribution."""
    found = steps_of(group)
    made = [_steps(group, found)]
    if any(point.outliers for point in found.points):
        made.append(_outliers(group, found))
    return [*made, _distribution(group, found)]


def _steps(group: Group, found: StepTimes) -> Sheet:
    fractions = ("outlier_share_fraction", "autocorrelation")
    names = ("p50_s", "p95_s", "p99_s", "longest_s", "fence_s", *fractions)
    return Sheet(
        name="steps",
        title="Step times by rank count",
        text=summary(found),
        caption=(
            f"{group.caption}. {WHAT_A_STEP_IS} Quantiles of each run, medians over runs. Beyond the fence: longer "
            "than the third quartile + 3 x the interquartile range of the run. Autocorrelation: of successive steps."
        ),
        columns=(
            *(*_WHERE, "runs", "steps", "warmup_steps_left_out"),
            *(f"{name}{end}" for name in names for end in _ENDS),
            *("outlier_steps", "interval"),
        ),
        rows=tuple(
            {
                **_where(group, point),
                "runs": len(point.run_ids),
                "steps": point.num_steps,
                "warmup_steps_left_out": point.num_warmup,
                **figure_columns("p50_s", point.p50),
                **figure_columns("p95_s", point.p95),
                **figure_columns("p99_s", point.p99),
                **figure_columns("longest_s", point.longest),
                **figure_columns("fence_s", point.fence),
                **figure_columns("outlier_share_fraction", point.outlier_share),
                **figure_columns("autocorrelation", point.autocorrelation),
                "outlier_steps": point.num_outliers,
                "interval": point.p50.kind,
            }
            for point in found.points
        ),
    )


def summary(found: StepTimes) -> Table:
    """A line a rank count."""
    rows: Table = [
        (
            *("At", "Runs", "Steps", "Warm-up left out", "p50", "p95", "p99", "Longest", "Fence", "Beyond it"),
            *("Autocorrelation", "Interval"),
        )
    ]
    rows += [
        (
            place(point),
            str(len(point.run_ids)),
            f"{point.num_steps:,}",
            f"{point.num_warmup:,}",
            *map(figure_text, (point.p50, point.p95, point.p99, point.longest, point.fence)),
            outliers_text(point),
            "not known" if point.autocorrelation is None else correlation_text(point.autocorrelation),
            basis_text(point.p50),
        )
        for point in found.points
    ]
    return rows


def _outliers(group: Group, found: StepTimes) -> Sheet:
    total = sum(point.num_outliers for point in found.points)
    listed = sum(len(point.outliers) for point in found.points)
    return Sheet(
        name="outlier-steps",
        title="Steps beyond the fence",
        text=outliers(found),
        caption=(
            f"{group.caption}. Of {total:,} such steps the {min(listed, MAX_OUTLIERS)} with the largest ratio to their "
            "run's median step. Rank: whose own work was longest; grew most: against that rank's median. Steps are "
            "numbered from 0, warm-up steps counted."
        ),
        columns=(
            *(*_WHERE, "run_id", "step", "seconds", "ratio_to_median", "rank", "host", "phase"),
            "outlier_steps_of_all_runs",
        ),
        rows=tuple(
            {
                **_where(group, point),
                "run_id": one.run_id,
                "step": one.step,
                "seconds": one.seconds,
                "ratio_to_median": one.ratio,
                "rank": one.rank,
                "host": one.host,
                "phase": one.phase,
                "outlier_steps_of_all_runs": point.num_outliers,
            }
            for point in found.points
            for one in point.outliers
        ),
    )


def outliers(found: StepTimes, most: int = MAX_OUTLIERS) -> Table:
    """The longest steps of all rank counts, by their ratio to the median step."""
    pairs = [(point, one) for point in found.points for one in point.outliers]
    pairs.sort(key=lambda pair: -pair[1].ratio)
    rows: Table = [("At", "Step", "Took", "Over the median", "Rank", "Host", "Grew most", "Run")]
    rows += [
        (
            *(place(point), str(one.step), format_seconds(one.seconds), f"{one.ratio:.2f}x", str(one.rank), one.host),
            *(PART_TITLES.get(one.phase, one.phase), one.run_id),
        )
        for point, one in pairs[:most]
    ]
    return rows


def _distribution(group: Group, found: StepTimes) -> Sheet:
    return Sheet(
        name="step-quantiles",
        title="Distribution of step times",
        text=distribution(found),
        caption=f"{group.caption}. {WHAT_A_STEP_IS} Medians over runs; in brackets the range of runs.",
        columns=(*_WHERE, "share_of_steps_fraction", *(f"seconds{end}" for end in _ENDS), "runs", "interval"),
        rows=tuple(_quantile_rows(group, found)),
    )


def distribution(found: StepTimes) -> Table:
    """Quantiles, a column a rank count."""
    rows: Table = [("Share of steps", *map(place, found.points))]
    for index in DRAWN:
        rows.append((f"{index} %", *(figure_text(point.quantiles[index].seconds) for point in found.points)))
    return rows


def _quantile_rows(group: Group, found: StepTimes) -> Iterator[Mapping[str, Cell]]:
    for point in found.points:
        for one in point.quantiles:
            yield {
                **_where(group, point),
                "share_of_steps_fraction": one.share,
                **figure_columns("seconds", one.seconds),
                "runs": one.seconds.n,
                "interval": one.seconds.kind,
            }


# Ranks by steps


def rank_sheets(group: Group) -> list[Sheet]:
    """The map of the run in the middle, a line a row of ranks."""
    found = steps_of(group).map
    shown = sorted(found.rows, key=lambda row: -row.mean)[:MAX_ROWS]
    left = len(found.rows) - len(shown)
    more = f" The {len(shown)} slowest rows; {left} more stand below the chart." if left else ""
    return [
        Sheet(
            name="ranks",
            title=f"Own work by rank, slowest first, run {found.run_id}",
            text=rank_rows(shown),
            caption=f"{group.caption}. {map_text(found)}{more}",
            columns=(
                *("group", "label", "run_id", "ranks", "nodes", "first_rank", "last_rank", "hosts", "mean_ratio"),
                *("largest_ratio", "largest_first_step", "largest_last_step"),
            ),
            rows=tuple({"group": group.id, "label": group.label, **_row_columns(found, row)} for row in found.rows),
        )
    ]


def rank_rows(found: Sequence[MapRow]) -> Table:
    """Mean and largest value of each row."""
    rows: Table = [("Ranks", "Hosts", "Mean", "Largest", "In steps")]
    rows += [
        (
            *(row_title(row), row.hosts or DASH, f"{row.mean:.3f}x", f"{row.largest:.3f}x"),
            _span(row.largest_first_step, row.largest_last_step),
        )
        for row in found
    ]
    return rows


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _row_columns(found: RankMap, row: MapRow) -> dict[str, Cell]:
    return {
        "run_id": found.run_id,
        "ranks": found.ranks,
        "nodes": found.nodes,
        "first_rank": row.first_rank,
        "last_rank": row.last_rank,
        "hosts": row.hosts,
        "mean_ratio": row.mean,
        "largest_ratio": row.largest,
        "largest_first_step": row.largest_first_step,
        "largest_last_step": row.largest_last_step,
    }
