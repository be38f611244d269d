"""Sheets on the data path: input by rank count, and what is known of reading."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import basis_text, figure_text, optional, percent, place_text
from dlbench.stats.figure import figure_columns
from dlbench.units import format_bytes

DATA_CAPTION = (
    "Input wait and copy: means over ranks, steps and runs, as the parts of a step. Accelerator utilisation as MLPerf "
    "Storage has it: the share of the time that is not spent waiting for input; that benchmark asks for 90 %, for "
    "CosmoFlow 70 %. A step stalls if more than 10 % of it is input wait; single steps are looked at in the run in the "
    "middle of each point, on at most 16 ranks. Disks: all local disks of all its nodes, whatever read from them."
)


def data_sheets(group: Group) -> list[Sheet]:
    """Waits by rank count, and what is known of reading."""
    found = group.data_path
    if found is None:
        return []
    rows: Table = [
        (
            *("At", "Input wait a step", "Share of the step", "Copy to the device", "Accelerator utilisation"),
            *("Interval", "Steps that stall", "Longest wait", "Disks read"),
        )
    ]
    for point in found.points:
        rate = point.disk_bytes_per_s
        rows.append(
            (
                place_text(point.ranks, point.nodes),
                figure_text(point.wait),
                figure_text(point.wait_share),
                figure_text(point.copy),
                figure_text(point.utilisation),
                basis_text(point.wait),
                "not looked at" if point.stalled is None else f"{percent(point.stalled)} of {point.stall_steps:,}",
                optional(point.longest_wait_s, "s"),
                "not known" if rate is None else f"{format_bytes(rate)}/s",
            )
        )
    facts: Table = [("What", "Known"), *found.facts]
    return [
        Sheet(
            name="data-path",
            title="Input by rank count",
            text=rows,
            caption=f"{DATA_CAPTION} {group.parts_caption}.",
            columns=_DATA_COLUMNS,
            rows=tuple(
                {
                    "group": group.id,
                    "ranks": point.ranks,
                    "nodes": point.nodes,
                    **figure_columns("input_wait_s", point.wait),
                    **figure_columns("input_wait_share", point.wait_share),
                    **figure_columns("copy_s", point.copy),
                    **figure_columns("accelerator_utilisation", point.utilisation),
                    "runs": point.wait.n,
                    "stalled_share": point.stalled,
                    "stall_steps": point.stall_steps,
                    "longest_wait_s": point.longest_wait_s,
                    "disk_read_bytes_per_s": point.disk_bytes_per_s,
                    "page_cache_bytes": point.page_cache_bytes,
                }
                for point in found.points
            ),
        ),
        Sheet(
            name="data-facts",
            title="Reading, order, coverage, staging",
            text=facts,
            caption="From the plan and the record of the run in the middle of the point with most ranks, unless a line "
            "says otherwise.",
            columns=("group", "what", "known"),
            rows=tuple({"group": group.id, "what": title, "known": text} for title, text in found.facts),
        ),
    ]


_DATA_COLUMNS = (
    *("group", "ranks", "nodes"),
    *(
        f"{name}{end}"
        for name in ("input_wait_s", "input_wait_share", "copy_s", "accelerator_utilisation")
        for end in ("", "_low", "_high")
    ),
    *("runs", "stalled_share", "stall_steps", "longest_wait_s", "disk_read_bytes_per_s", "page_cache_bytes"),
)
