"""Rows of the tables `exchange` (gradient exchange by rank count) and `sweep` (settings against each other) as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlbench.report.model import Report
from dlbench.stats.figure import Cell, figure_columns
from dlbench.views.exchange.numbers import ExchangePoint

# Figure of a point -> its column; the ends of its interval get _low and _high behind it.
_FIGURES = {
    "num_messages": "messages",
    "message_bytes": "gradient_bytes",
    "bytes_inside": "bytes_inside",
    "bytes_across": "bytes_across",
    "communication": "communication_s",
    "exposed": "exposed_s",
    "hidden": "hidden_s",
    "backward": "backward_s",
    "density": "density",
    "efficiency": "efficiency",
}
_PREDICTED = {
    "best_exposed": "best_exposed_s",
    "num_messages": "best_messages",
    "as_ran": "modelled_exposed_s",
    "efficiency": "attainable_efficiency",
}

EXCHANGE_COLUMNS: tuple[str, ...] = (
    *("group", "label", "ranks", "nodes", "carrier", "by", "exchange", "fusion", "wire"),
    *(f"{column}{end}" for column in (*_FIGURES.values(), *_PREDICTED.values()) for end in ("", "_low", "_high")),
    *("wire_overflows", "dense_switches", "startup_s", "per_byte_s", "why_not_predicted", "runs"),
)

SWEEP_COLUMNS: tuple[str, ...] = (
    *("series", "ranks", "nodes", "setting", "options", "is_baseline", "verdict", "adjusted_p"),
    *(f"{column}{end}" for column in ("throughput_per_s", "ratio") for end in ("", "_low", "_high")),
    *("runs", "planned_runs", "inert", "changes", "why"),
)


def exchange_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    """A row for each rank count of each group whose runs tell of their exchange."""
    for group in report.groups:
        for point in group.exchange:
            yield {"group": group.id, "label": group.label} | _of_point(point)


def _of_point(point: ExchangePoint) -> dict[str, Cell]:
    prediction = point.prediction
    row: dict[str, Cell] = {
        "ranks": point.ranks,
        "nodes": point.nodes,
        "wire_overflows": point.wire_overflows,
        "dense_switches": point.dense_switches,
        "startup_s": prediction.startup_s if prediction else None,
        "per_byte_s": prediction.per_byte_s if prediction else None,
        "why_not_predicted": point.why,
        "runs": len(point.run_ids),
    }
    for name in ("carrier", "by", "exchange", "fusion", "wire"):
        row[name] = " | ".join(dict.fromkeys(getattr(way, name) for way in point.ways))
    for name, column in _FIGURES.items():
        row |= figure_columns(column, getattr(point, name))
    for name, column in _PREDICTED.items():
        row |= figure_columns(column, getattr(prediction, name) if prediction else None)
    return row


def sweep_rows(report: Report) -> Iterator[Mapping[str, Cell]]:
    """A row for each setting at each rank count of each swept series."""
    for sweep in report.sweeps:
        for cell in sweep.cells:
            for one in cell.settings:
                yield {
                    "series": sweep.series,
                    "ranks": cell.ranks,
                    "nodes": cell.nodes,
                    "setting": one.label,
                    "options": one.options,
                    "is_baseline": one.is_baseline,
                    "verdict": one.verdict,
                    "adjusted_p": one.adjusted_p,
                    **figure_columns("throughput_per_s", one.throughput),
                    **figure_columns("ratio", one.ratio),
                    "runs": one.num_runs,
                    "planned_runs": one.num_planned,
                    "inert": " | ".join(one.inert),
                    "changes": " | ".join(one.changes),
                    "why": one.why,
                }
