"""Sheets on the data path: input by rank count, and what is known of reading."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import basis_text, percent, place_text
from dlbench.units import format_bytes
from dlbench.views.data_path.numbers import DataPoint

CAPTION = (
    "Input wait and copy: means over ranks, steps and runs, as the parts of a step. Accelerator utilisation as MLPerf "
    "Storage has it: the share of the time that is not spent waiting for input; that benchmark asks for 90 %, for "
    "CosmoFlow 70 %. A step stalls if more than 10 % of it is input wait; single steps are looked at in the run in the "
    "middle of each point, on at most 16 ranks. Disks: all local disks of all its nodes, whatever read from them."
)
FACTS_CAPTION = (
    "From the plan and the record of the run in the middle of the point with most ranks, unless a line says otherwise."
)


def input_sheet(points: Sequence[DataPoint]) -> Sheet[DataPoint]:
    """Waits, stalls and disks by rank count."""
    columns: tuple[Column[DataPoint], ...] = (
        Column("", "At", lambda point: place_text(point.ranks, point.nodes), is_brief=True),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column("input_wait_s", "Input wait per step", lambda point: point.wait, has_interval=True, is_brief=True),
        Column("input_wait_share", "Share of the step", lambda point: point.wait_share, has_interval=True),
        Column("copy_s", "Copy to the device", lambda point: point.copy, has_interval=True, is_brief=True),
        Column(
            "accelerator_utilisation",
            "Accelerator utilisation",
            lambda point: point.utilisation,
            has_interval=True,
            is_brief=True,
        ),
        Column("runs", "", lambda point: point.wait.n),
        Column("", "Interval", lambda point: basis_text(point.wait)),
        Column("stalled_share", "Steps that stall", lambda point: point.stalled, _stalled),
        Column("stall_steps", "", lambda point: point.stall_steps),
        Column("longest_wait_s", "Longest wait", lambda point: point.longest_wait_s, unit="s"),
        Column("disk_read_bytes_per_s", "Disks read", lambda point: point.disk_bytes_per_s, _disks),
        Column("page_cache_bytes", "", lambda point: point.page_cache_bytes),
    )
    return Sheet(name="data-path", title="Input by rank count", columns=columns, rows=points, caption=CAPTION)


def _stalled(point: DataPoint) -> Cell:
    if point.stalled is None:
        return Cell("not looked at")
    return Cell(f"{percent(point.stalled)} of {point.stall_steps:,}", number=point.stalled)


def _disks(point: DataPoint) -> Cell:
    rate = point.disk_bytes_per_s
    return Cell("not known") if rate is None else Cell(f"{format_bytes(rate)}/s", number=rate)


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
        caption=FACTS_CAPTION,
    )
