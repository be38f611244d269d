"""Tables of a report as CSV: scaling points, parts of a step, runs, quality, and every sheet of every view by its name.

Raw numbers, units in the column names.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dlbench.errors import UserError, nearest
from dlbench.report.model import Group, Report
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views import sheets
from dlbench.views.exchange.csv import EXCHANGE_COLUMNS, SWEEP_COLUMNS, exchange_rows, sweep_rows


def to_csv(report: Report, table: str = "points") -> str:
    """One table as CSV (RFC 4180, but with plain newlines), with a header line.

    Text that a spreadsheet would read as a formula gets an apostrophe in front.

    Args:
        report: what to print of.
        table: a name of `all_tables`.

    Raises:
        UserError: there is no such table.
    """
    if table in _TABLES:
        _, header, rows = _TABLES[table]
        return write_table(header, rows(report))
    named = sheets.named_tables(report)
    if table not in named:
        raise UserError(
            f"--table {table}: no such table in this report; {nearest(table, [*_TABLES, *named])} "
            "(--table ? lists them all)"
        )
    return _sheet_csv(named[table])


def all_tables(report: Report) -> dict[str, tuple[str, str]]:
    """What each table of the report holds, and the table as CSV, by its name; the first seven are in every report."""
    fixed = {name: (title, write_table(header, rows(report))) for name, (title, header, rows) in _TABLES.items()}
    return fixed | {name: (table.title, _sheet_csv(table)) for name, table in sheets.named_tables(report).items()}


def _sheet_csv(table: sheets.NamedTable) -> str:
    """What a row lacks is empty."""
    return write_table(table.columns, ({name: row.get(name) for name in table.columns} for row in table.rows))


def write_table(header: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> str:
    """Rows by column name as CSV, in the way of `to_csv`."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in header])
    return sink.getvalue()


def _cell(value: Cell) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str):
        return "'" + value if value.startswith(("=", "+", "-", "@")) else value
    return repr(value) if isinstance(value, float) else str(value)


# Figure of a point -> its column; the ends of its interval get _low and _high behind it.
_FIGURES = {
    "throughput": "throughput_per_s",
    "throughput_per_rank": "throughput_per_rank_per_s",
    "step": "step_s",
    "step_p95": "step_p95_s",
    "speedup": "speedup",
    "efficiency": "efficiency",
    "serial_fraction": "serial_fraction",
}

_GROUP_COLUMNS = ("group", "label", "sample_unit", "scaling")

POINT_COLUMNS: tuple[str, ...] = (
    *_GROUP_COLUMNS,
    *("ranks", "nodes", "batch_per_rank", "baseline_ranks", "ideal_speedup", "paired_with_baseline", "sufficient"),
    *(f"{column}{end}" for column in _FIGURES.values() for end in ("", "_low", "_high")),
    *("runs", "throughput_interval", "efficiency_interval", "caption"),
    *("tflops_per_rank", "peak_tflops_per_rank", "mfu", "training_time_s"),
)

PART_COLUMNS: tuple[str, ...] = (
    *_GROUP_COLUMNS,
    *("ranks", "nodes", "baseline_ranks", "part", "seconds", "seconds_low", "seconds_high", "ideal_seconds"),
    *("lost_fraction", "lost_fraction_low", "lost_fraction_high", "runs", "interval"),
)

RUN_COLUMNS: tuple[str, ...] = (
    *("run_id", "group", "state", "workload", "preset", "engine", "precision", "data", "batch_per_rank", "scaling"),
    *("series", "repeat", "ranks", "nodes", "sample_unit", "steps", "throughput_per_s", "step_median_s"),
    *("step_p95_s", "step_cv", "finished", "story", "warnings", "goal", "reached", "time_to_quality_s"),
    *("samples_to_quality", "epochs_to_quality"),
)

# Figure of a quality point -> its column, as above.
_QUALITY_FIGURES = {
    "time": "time_to_quality_s",
    "resolution": "last_interval_s",
    "epochs": "epochs_to_quality",
    "samples": "samples_to_quality",
    "best": "best",
    "final": "final",
    "whole": "mean_s",
    "training": "training_s",
    "evaluation": "evaluation_s",
    "other": "other_s",
}
_FACTORS = {
    "speedup": "speedup",
    "throughput": "throughput_factor",
    "samples": "samples_factor",
    "rest": "rest_factor",
}

QUALITY_COLUMNS: tuple[str, ...] = (
    *_GROUP_COLUMNS,
    *("ranks", "nodes", "global_batch", "metric", "target", "predictor_value", "runs", "reached", "invalid", "lost"),
    *(f"{name}{end}" for name in (*_QUALITY_FIGURES.values(), *_FACTORS.values()) for end in ("", "_low", "_high")),
    *("time_interval", "factor_interval", "caption"),
)

EVALUATION_COLUMNS: tuple[str, ...] = (
    *("run_id", "group", "ranks", "nodes", "metric", "target", "samples", "epoch", "wall_s", "train_s", "eval_s"),
    *("value", "loss"),
)


def _of_group(group: Group) -> dict[str, Cell]:
    return {
        "group": group.id,
        "label": group.label,
        "sample_unit": group.sample_unit,
        "scaling": group.scaling,
        "baseline_ranks": group.baseline.ranks,
    }


def _point_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for index, point in enumerate(group.points):
            row = _of_group(group) | {
                "ranks": point.ranks,
                "nodes": point.nodes,
                "batch_per_rank": point.batch_per_rank,
                "ideal_speedup": point.ideal_speedup,
                "paired_with_baseline": point.paired_with_baseline,
                "sufficient": group.is_sufficient,
                "runs": point.throughput.n,
                "throughput_interval": point.throughput.kind,
                "efficiency_interval": point.efficiency.kind,
                "caption": group.caption,
            }
            for name, column in _FIGURES.items():
                row |= figure_columns(column, getattr(point, name))
            yield row | _of_utilisation(group, index)


def _of_utilisation(group: Group, index: int) -> dict[str, Cell]:
    point = group.utilisation.points[index] if group.utilisation else None
    return {
        "tflops_per_rank": point.achieved.value if point and point.achieved else None,
        "peak_tflops_per_rank": point.peak_tflops if point else None,
        "mfu": point.mfu.value if point and point.mfu else None,
        "training_time_s": point.training_time.value if point and point.training_time else None,
    }


def _part_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for point in group.points:
            for part in point.parts:
                yield _of_group(group) | {
                    "ranks": point.ranks,
                    "nodes": point.nodes,
                    "part": part.name,
                    "seconds": part.seconds.value,
                    "seconds_low": part.seconds.low,
                    "seconds_high": part.seconds.high,
                    "ideal_seconds": part.ideal_seconds,
                    "lost_fraction": part.lost.value,
                    "lost_fraction_low": part.lost.low,
                    "lost_fraction_high": part.lost.high,
                    "runs": part.seconds.n,
                    "interval": part.seconds.kind,
                }


def _run_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    for run in report.runs:
        row: dict[str, Cell] = {name: getattr(run, name) for name in RUN_COLUMNS if hasattr(run, name)}
        yield row | {"throughput_per_s": run.throughput, "warnings": " | ".join(run.warnings)}


def _quality_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for point in group.quality.points if group.quality else ():
            assert group.quality is not None
            row = _of_group(group) | {
                "ranks": point.ranks,
                "nodes": point.nodes,
                "global_batch": point.global_batch,
                "metric": group.quality.metric,
                "target": group.quality.target,
                "predictor_value": group.quality.predictor_value,
                "runs": point.num_runs,
                "reached": point.num_reached,
                "invalid": point.num_invalid,
                "lost": point.num_lost,
                "time_interval": point.time.kind if point.time else None,
                "factor_interval": point.factors.speedup.kind if point.factors else None,
                "caption": group.caption,
            }
            for name, column in _QUALITY_FIGURES.items():
                row |= figure_columns(column, getattr(point, name))
            for name, column in _FACTORS.items():
                row |= figure_columns(column, getattr(point.factors, name) if point.factors else None)
            yield row


def _evaluation_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    for group in report.groups:
        for curve in group.quality.curves if group.quality else ():
            assert group.quality is not None
            row: dict[str, Cell] = {
                "run_id": curve.run_id,
                "group": group.id,
                "ranks": curve.ranks,
                "nodes": curve.nodes,
                "metric": group.quality.metric,
                "target": group.quality.target,
            }
            for one in curve.evaluations:
                yield row | {name: getattr(one, name) for name in EVALUATION_COLUMNS if name not in row}


_TABLES = {
    "points": ("scaling points", POINT_COLUMNS, _point_rows),
    "parts": ("parts of a step", PART_COLUMNS, _part_rows),
    "runs": ("runs", RUN_COLUMNS, _run_rows),
    "quality": ("training to a quality", QUALITY_COLUMNS, _quality_rows),
    "evaluations": ("evaluations", EVALUATION_COLUMNS, _evaluation_rows),
    "exchange": ("gradient exchange", EXCHANGE_COLUMNS, exchange_rows),
    "sweep": ("settings of sweeps", SWEEP_COLUMNS, sweep_rows),
}
