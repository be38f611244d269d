"""Sheets on memory: by rank count, and by batch and precision."""

from __future__ import annotations

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import DASH, basis_text, figure_text, place_text, runs_text
from dlbench.stats.figure import figure_columns
from dlbench.units import format_bytes


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
