"""Sheets on the data path: input by rank count, and what is known of reading."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import percent, place_text
from dlbench.units import format_bytes
from dlbench.views.columns import telling
from dlbench.views.data_path.numbers import DataPoint

STALLS_CAPTION = "A step stalls if more than 10 % of it is input wait; counted in the median run, on at most 16 ranks."
UTILISATION_CAPTION = "Accelerator utilisation as in MLPerf Storage: time not spent waiting for input (90 % asked for)."


def input_sheet(points: Sequence[DataPoint], *, on_gpu: bool) -> Sheet[DataPoint]:
    """Waits, stalls and disks by rank count; without a GPU there is no copy worth a column and no accelerator."""
    columns: tuple[Column[DataPoint], ...] = (
        Column("", "At", lambda point: place_text(point.ranks, point.nodes), is_brief=True),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("input_wait_s", "Input wait per step", lambda point: point.wait, has_interval=True, is_brief=True),
        Column("input_wait_share", "Share of the step", lambda point: point.wait_share, has_interval=True),
        Column(
            "copy_s", "Copy to the device" if on_gpu else "", lambda point: point.copy, has_interval=True, is_brief=True
        ),
        Column(
            "accelerator_utilisation",
            "Accelerator utilisation" if on_gpu else "",
            lambda point: point.utilisation,
            has_interval=True,
            is_brief=True,
        ),
        Column("runs", "", lambda point: point.wait.n),
        Column("stalled_share", "Steps that stall", lambda point: point.stalled, _stalled),
        Column("stall_steps", "", lambda point: point.stall_steps),
        Column("longest_wait_s", "Longest wait", lambda point: point.longest_wait_s, unit="s"),
        Column("disk_read_bytes_per_s", "Disks read", lambda point: point.disk_bytes_per_s, _disks),
        Column("page_cache_bytes", "", lambda point: point.page_cache_bytes),
    )
    return Sheet(
        name="data-path",
        title="Input by rank count",
        columns=telling(columns, points),
        rows=points,
        caption=" ".join(
            [
                *([STALLS_CAPTION] if any(point.stalled for point in points) else []),
                *([UTILISATION_CAPTION] if on_gpu else []),
            ]
        ),
        is_drawn=True,
    )


def _stalled(point: DataPoint) -> Cell:
    if point.stalled is None:
        return Cell("not looked at")
    return Cell(f"{percent(point.stalled)} of {point.stall_steps:,}", number=point.stalled)


def _disks(point: DataPoint) -> Cell:
    rate = point.disk_bytes_per_s
    return Cell("unknown") if rate is None else Cell(f"{format_bytes(rate)}/s", number=rate)


def facts_sheet(facts: Sequence[tuple[str, str]]) -> Sheet[tuple[str, str]]:
    """Titles and texts."""
    columns: tuple[Column[tuple[str, str]], ...] = (
        Column("what", "What", operator.itemgetter(0)),
        Column("known", "Known", operator.itemgetter(1)),
    )
    return Sheet(
        name="data-facts",
        title="Reading, order, coverage, staging",
        columns=columns,
        rows=facts,
        is_folded=True,
    )
