"""What samplers and records tell of the machine becomes part of the `Report`: energy, memory; see also its siblings."""

from __future__ import annotations

import json
import shlex

from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.node_samples import STAGES
from dlbench.reading.samples.readings import machine_readings
from dlbench.reading.scaling import Group
from dlbench.report.wording import clean, runs_text
from dlbench.specs.plan import AxisValue
from dlbench.stats.estimates import Estimate
from dlbench.stats.figure import figure_of, optional_figure_of
from dlbench.units import format_bytes
from dlbench.views.data_path.assemble import data_path
from dlbench.views.energy.numbers import KINDS
from dlbench.views.energy.numbers import KindEnergy as KindOfPoint
from dlbench.views.energy.scaling import ScaledEnergy, scaled_energy
from dlbench.views.machine import model
from dlbench.views.memory.numbers import BatchMemory, MemoryPoint, batch_memory, memory_points
from dlbench.views.telemetry.assemble import telemetry

__all__ = ["data_path", "energy", "memory", "telemetry"]

MAX_BATCHES = 40
_FP32_BYTES = 4
_BATCH = "train.batch_per_rank"


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
        energy_per_sample=optional_figure_of(told.energy_per_sample, "J"),
        samples_per_joule=optional_figure_of(told.samples_per_joule, "samples/J"),
        efficiency=optional_figure_of(efficiency, "ratio"),
        mean_power=optional_figure_of(told.mean_power, "W"),
        whole=figure_of(told.whole_j, "J"),
        stages=tuple(
            (stage, figure_of(joules, "J")) for stage in STAGES if (joules := told.stages_j.get(stage)) is not None
        ),
        num_sources=told.num_sources,
        methods=told.methods,
        sampled_share=told.sampled_share,
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
    """What the runs of the group's precision and parts tell of the largest batch."""
    train = group.sample.plan.workload.train
    own = [b for b in batches if b.precision == train.precision and b.parts == train.gradient_accumulation]
    largest = max((b for b in own if b.num_runs), key=lambda b: b.batch)
    told = [f"{largest.batch} samples a rank fitted in {train.precision}"]
    if largest.peak_bytes:
        told[0] += f" ({format_bytes(largest.peak_bytes)} at the rank that held most)"
    ended = [b for b in own if b.num_without_memory]
    for b in ended:
        if b.batch <= largest.batch:
            fits = f" and fitted in {b.num_runs}" if b.num_runs else ", though more fitted in others"
            told.append(f"{b.batch} samples ended without memory in {runs_text(b.num_without_memory)}{fits}")
    above = [b.batch for b in ended if b.batch > largest.batch]
    if above:
        return f"{'; '.join([*told, f'{min(above)} samples ended without memory'])}."
    if ended:
        told.append("no larger batch of this precision and these parts ended without memory")
    else:
        told.append(
            "what limits the batch was not measured: no run of this precision and these parts ended without memory"
        )
    return f"{'; '.join(told)}. Larger ones: {_larger_batches(group, largest.batch)}"


def _larger_batches(group: Group, batch: int) -> str:
    """The command that tries larger batches with what else the group's runs were asked for."""
    plan = group.sample.plan
    series = plan.series
    chosen = {**plan.overrides, **series.axes, **(series.sides.get(series.side, {}) if series.side else {})}
    words = ["dlbench", "run", plan.workload.name, "--preset", plan.workload.preset]
    words += ["--engine", plan.engine.name, "--data", plan.workload.data.source]
    words += ["--ranks", str(group.points[0].ranks)]
    if plan.measure.until == "quality" and "measure.until" not in chosen:
        words.append("--to-quality")
    for key, value in sorted(chosen.items()):
        if key not in (_BATCH, "engine.name", "data.source"):
            words += ["--set", f"{key}={_yaml(value)}"]
    words += ["--sweep", f"{_BATCH}={','.join(str(batch * factor) for factor in (2, 4, 8))}"]
    return shlex.join(map(clean, words))


def _yaml(value: AxisValue) -> str:
    """As `--set` reads it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
