"""Sheets on memory: by rank count, and by batch and precision."""

from __future__ import annotations

from collections.abc import Sequence

from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import place_text, runs_text
from dlbench.stats.estimates import Estimate
from dlbench.views.columns import telling
from dlbench.views.memory.numbers import BatchMemory, Memory, MemoryPoint

BATCHES_CAPTION = "All runs of this network, preset, engine and system; the highest peak of any rank."


def points_sheet(found: Memory) -> Sheet[MemoryPoint]:
    """Memory of the ranks, and of their nodes, by rank count."""
    on_gpu = found.on_gpu
    columns: tuple[Column[MemoryPoint], ...] = (
        Column("", "At", lambda point: place_text(point.ranks, point.nodes), is_brief=True),
        Column("ranks", "", lambda point: point.ranks),
        Column("nodes", "", lambda point: point.nodes),
        Column(
            "peak_bytes",
            "Allocated on a GPU at most" if on_gpu else "Resident in a rank at most",
            lambda point: point.peak,
            has_interval=True,
            is_brief=True,
        ),
        Column("runs", "", lambda point: point.peak.n),
        Column("peak_of", "", lambda point: "GPU" if on_gpu else "process"),
        Column(
            "reserved_bytes",
            "With torch's cache" if on_gpu else "",
            lambda point: point.reserved,
            lambda point: _or_not(point.reserved, "not recorded"),
        ),
        Column(
            "resident_bytes",
            "Resident in its process" if on_gpu else "",
            lambda point: point.resident,
            lambda point: _or_not(point.resident, "not recorded"),
        ),
        Column(
            "gpu_used_bytes",
            "Used on a GPU" if on_gpu else "",
            lambda point: point.gpu_used_bytes,
            lambda point: _or_not(point.gpu_used_bytes, "not sampled"),
            unit="bytes",
        ),
        Column(
            "host_used_bytes",
            "Used on a node",
            lambda point: point.host_used_bytes,
            lambda point: _or_not(point.host_used_bytes, "not sampled"),
            unit="bytes",
        ),
        Column("model_bytes", "", lambda point: found.model_bytes),
        Column("gradient_bytes", "", lambda point: found.gradient_bytes),
    )
    allocator = "Allocated: by torch's allocator, without its cache and the CUDA context."
    return Sheet(
        name="memory",
        title="Memory by rank count",
        columns=telling(columns, found.points),
        rows=found.points,
        caption=f"In the measured steps. {allocator if on_gpu else ''}".rstrip(),
        is_drawn=True,
    )


def _or_not(value: Estimate | float | None, why: str) -> Estimate | float | Cell:
    return Cell(why) if value is None else value


def batches_sheet(batches: Sequence[BatchMemory]) -> Sheet[BatchMemory]:
    """Which batches fitted, in which precision."""
    columns: tuple[Column[BatchMemory], ...] = (
        Column("batch_per_rank", "Batch per rank", lambda batch: batch.batch, unit="samples"),
        Column("parts", "Parts", lambda batch: batch.parts),
        Column("precision", "Precision", lambda batch: batch.precision),
        Column("peak_bytes", "Peak of a rank", lambda batch: batch.peak_bytes, unit="bytes"),
        Column("runs", "Runs", lambda batch: batch.num_runs, lambda batch: runs_text(batch.num_runs)),
        Column(
            "runs_without_memory",
            "Ended without memory",
            lambda batch: batch.num_without_memory,
            lambda batch: runs_text(batch.num_without_memory) if batch.num_without_memory else "none",
        ),
    )
    return Sheet(
        name="memory-batches",
        title="Memory by batch and precision",
        columns=columns,
        rows=batches,
        caption=BATCHES_CAPTION,
        is_drawn=sum(bool(batch.peak_bytes) for batch in batches) > 1,
    )
