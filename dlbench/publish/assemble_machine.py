"""What samplers and records tell of the machine becomes part of the `Report`: energy, memory; see also its siblings."""

from __future__ import annotations

from dlbench.analysis.energy_points import KINDS
from dlbench.analysis.energy_points import KindEnergy as KindOfPoint
from dlbench.analysis.energy_scaling import ScaledEnergy, scaled_energy
from dlbench.analysis.machine_readings import machine_readings
from dlbench.analysis.memory import BatchMemory, MemoryPoint, batch_memory, memory_points
from dlbench.analysis.node_samples import STAGES
from dlbench.analysis.scaling import Group
from dlbench.analysis.statistics import Estimate
from dlbench.analysis.tables import RunTable
from dlbench.publish import machine_model as model
from dlbench.publish.assemble_data_path import data_path
from dlbench.publish.assemble_telemetry import telemetry
from dlbench.publish.figure import figure_of, optional_figure_of
from dlbench.publish.wording import clean
from dlbench.units import format_bytes

__all__ = ["data_path", "energy", "memory", "telemetry"]

MAX_BATCHES = 40
_FP32_BYTES = 4


def energy(group: Group, table: RunTable) -> model.Energy | None:
    """Energy of the runs; None where none tells of it."""
    found = scaled_energy(group, table, machine_readings(table))
    if not any(scaled.point.kinds for scaled in found):
        return None
    notes = dict.fromkeys(text for scaled in found for text in scaled.point.notes)
    damaged = dict.fromkeys(text for scaled in found for text in scaled.point.damaged)
    return model.Energy(
        points=tuple(map(_energy_point, found)),
        notes=tuple(map(clean, [*notes, *(f"damaged: {text}" for text in damaged)])),
    )


def _energy_point(scaled: ScaledEnergy) -> model.EnergyPoint:
    point = scaled.point
    return model.EnergyPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        kinds=tuple(
            _kind(kind, point.kinds[kind], scaled.efficiency.get(kind)) for kind in KINDS if kind in point.kinds
        ),
        why=tuple((kind, clean(reason)) for kind, reasons in point.why.items() for reason in reasons),
        doubts=tuple(map(clean, point.doubts)),
        num_unread=scaled.num_unread,
    )


def _kind(name: str, told: KindOfPoint, efficiency: Estimate | None) -> model.KindEnergy:
    return model.KindEnergy(
        kind=name,
        joules_per_sample=optional_figure_of(told.joules_per_sample, "J"),
        samples_per_joule=optional_figure_of(told.samples_per_joule, "samples/J"),
        efficiency=optional_figure_of(efficiency, "ratio"),
        power=optional_figure_of(told.power_w, "W"),
        whole=figure_of(told.whole_j, "J"),
        stages=tuple(
            (stage, figure_of(joules, "J")) for stage in STAGES if (joules := told.stages_j.get(stage)) is not None
        ),
        num_sources=told.num_sources,
        methods=told.methods,
        coverage=told.coverage,
    )


def memory(group: Group, table: RunTable) -> model.Memory | None:
    """Memory of the ranks; every run with a record tells of it."""
    record = group.sample.record
    if record is None:
        return None
    points = memory_points(group, machine_readings(table))
    batches = batch_memory(group, table)
    told = record.environment.get("memory.bytes", "")
    return model.Memory(
        on_gpu=points[0].on_gpu,
        points=tuple(map(_memory_point, points)),
        model_bytes=record.num_parameters * _FP32_BYTES,
        gradient_bytes=record.gradient_bytes,
        host_bytes=int(told) if told.isascii() and told.isdecimal() and len(told) < 20 else None,
        batches=tuple(map(_batch, batches[:MAX_BATCHES])),
        limit=_limit(group, batches),
        notes=(),
    )


def _memory_point(point: MemoryPoint) -> model.MemoryPoint:
    return model.MemoryPoint(
        ranks=point.ranks,
        nodes=point.nodes,
        peak=figure_of(point.peak, "bytes"),
        resident=optional_figure_of(point.resident, "bytes"),
        gpu_used_bytes=point.gpu_used,
        host_used_bytes=point.host_used,
    )


def _batch(found: BatchMemory) -> model.BatchMemory:
    return model.BatchMemory(
        batch=found.batch,
        parts=found.parts,
        precision=found.precision,
        peak_bytes=found.peak_bytes,
        num_runs=found.num_runs,
        num_without_memory=found.num_without_memory,
    )


def _limit(group: Group, batches: tuple[BatchMemory, ...]) -> str:
    """What the runs of the group's precision tell of the largest batch."""
    workload = group.sample.plan.workload
    train = workload.train
    own = [b for b in batches if b.precision == train.precision and b.parts == train.gradient_accumulation]
    fitted = [b for b in own if b.num_runs]
    failed = [b.batch for b in own if b.num_without_memory and not b.num_runs]
    largest = max(fitted, key=lambda b: b.batch)
    fits = f"{largest.batch} samples a rank fitted in {train.precision}"
    if largest.peak_bytes:
        fits += f" ({format_bytes(largest.peak_bytes)} at the rank that held most)"
    if failed:
        return f"{fits}; {min(failed)} samples ended without memory."
    next_batches = ",".join(str(largest.batch * factor) for factor in (2, 4, 8))
    return (
        f"{fits}; what limits the batch was not measured: no run ended without memory. Larger ones: dlbench run "
        f"{workload.name} --preset {workload.preset} --sweep train.batch_per_rank={next_batches}"
    )
