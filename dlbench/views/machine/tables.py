"""Sheets on the data path and memory; see also `telemetry_tables` and `energy_tables`."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import (
    DASH,
    basis_text,
    figure_text,
    optional,
    percent,
    place_text,
    runs_text,
)
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


def memory_sheets(group: Group) -> list[Sheet]:
    """Memory by rank count, and by batch and precision where several ran."""
    found = group.memory
    if found is None:
        return []
    held = "Allocated on a GPU at most" if found.on_gpu else "Resident in a rank at most"
    header = ["At", held, *(["Resident in its process", "Used on a GPU"] if found.on_gpu else [])]
    rows: Table = [(*header, "Used on a node", "Interval")]
    for point in found.points:
        cells = [place_text(point.ranks, point.nodes), figure_text(point.peak)]
        if found.on_gpu:
            cells += [
                "not recorded" if point.resident is None else figure_text(point.resident),
                _bytes(point.gpu_used_bytes),
            ]
        rows.append((*cells, _bytes(point.host_used_bytes), basis_text(point.peak)))
    sheets = [
        Sheet(
            name="memory",
            title="Memory by rank count",
            text=rows,
            caption="Peak of the rank that held most, median over runs"
            + (", by torch's allocator: its cache and the CUDA context come on top" if found.on_gpu else "")
            + ". Used: the highest sample in the measured window of the run in the middle, whatever used it. "
            + f"{group.caption}.",
            columns=(
                *("group", "ranks", "nodes", "peak_bytes", "peak_bytes_low", "peak_bytes_high", "runs", "peak_of"),
                *("resident_bytes", "gpu_used_bytes", "host_used_bytes", "model_bytes", "gradient_bytes"),
            ),
            rows=tuple(
                {
                    "group": group.id,
                    "ranks": point.ranks,
                    "nodes": point.nodes,
                    **figure_columns("peak_bytes", point.peak),
                    "runs": point.peak.n,
                    "peak_of": "GPU" if found.on_gpu else "process",
                    "resident_bytes": None if point.resident is None else point.resident.value,
                    "gpu_used_bytes": point.gpu_used_bytes,
                    "host_used_bytes": point.host_used_bytes,
                    "model_bytes": found.model_bytes,
                    "gradient_bytes": found.gradient_bytes,
                }
                for point in found.points
            ),
        )
    ]
    return [*sheets, _batches(group)] if len(found.batches) > 1 else sheets


def _bytes(value: float | None) -> str:
    return "not sampled" if value is None else format_bytes(value)


def _batches(group: Group) -> Sheet:
    assert group.memory is not None
    rows: Table = [("Batch a rank", "Parts", "Precision", "Peak of a rank", "Runs", "Ended without memory")]
    rows += [
        (
            f"{batch.batch:,}",
            str(batch.parts),
            batch.precision,
            DASH if batch.peak_bytes is None else format_bytes(batch.peak_bytes),
            runs_text(batch.num_runs),
            runs_text(batch.num_without_memory) if batch.num_without_memory else "none",
        )
        for batch in group.memory.batches
    ]
    return Sheet(
        name="memory-batches",
        title="Memory by batch and precision",
        text=rows,
        caption="All runs of this report with the same workload, preset, engine and system, at any rank count: the "
        "highest peak of any rank.",
        columns=("group", "batch_per_rank", "parts", "precision", "peak_bytes", "runs", "runs_without_memory"),
        rows=tuple(
            {
                "group": group.id,
                "batch_per_rank": batch.batch,
                "parts": batch.parts,
                "precision": batch.precision,
                "peak_bytes": batch.peak_bytes,
                "runs": batch.num_runs,
                "runs_without_memory": batch.num_without_memory,
            }
            for batch in group.memory.batches
        ),
    )
