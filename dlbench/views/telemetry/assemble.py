"""What the samplers of a group's runs saw becomes part of the `Report`: means by node, one run over time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dlbench.reading.run_table import RunTable
from dlbench.reading.samples.node_means import FieldSummary
from dlbench.reading.samples.node_means import Telemetry as NodeTelemetry
from dlbench.reading.samples.node_samples import node_watch, nodes_of
from dlbench.reading.samples.readings import MachineReading, machine_readings
from dlbench.reading.scaling import Group
from dlbench.records.scan import Run
from dlbench.report.wording import clean
from dlbench.views.energy.numbers import KINDS
from dlbench.views.machine import model
from dlbench.views.telemetry.assemble_course import NAME_LENGTH, course, worst_throttled

MAX_UNAVAILABLE = 40


def telemetry(group: Group, table: RunTable) -> model.Telemetry | None:
    """What the samplers saw; None where no run of the group has samples."""
    readings = machine_readings(table)
    runs = sorted(group.runs, key=lambda run: (run.plan.layout.ranks, run.plan.layout.nodes))
    found = [(run, reading) for run in runs if (reading := readings.by_run.get(run.plan.run_id)) is not None]
    nodes = [_means(run, reading, node) for run, reading in found for node in reading.nodes]
    if not nodes:
        return None
    largest = group.points[-1]
    middle = readings.middle[group.id, largest.ranks, largest.nodes]
    drawn = readings.by_run.get(middle.plan.run_id)
    notes = [f"damaged: {reading.problem}" for _, reading in found if reading.problem]
    notes += [
        f"{reading.run_id}: {len(reading.nodes)} of {len(reading.nodes) + reading.left_out} nodes were read"
        for _, reading in found
        if reading.left_out
    ]
    return model.Telemetry(
        nodes=tuple(nodes),
        course=course(middle, drawn, notes) if drawn is not None and drawn.nodes else None,
        sampling=_sampling(middle),
        unavailable=_unavailable([reading for _, reading in found]),
        num_runs=len(runs),
        num_read=sum(bool(reading.nodes) for _, reading in found),
        notes=tuple(clean(note) for note in dict.fromkeys(notes)),
    )


def _means(run: Run, reading: MachineReading, node: NodeTelemetry) -> model.NodeMeans:
    gpus = _gpus(reading, node)

    def of_gpus(field: str, value: Callable[[FieldSummary], float]) -> list[float]:
        summaries = (node.fields.get(f"gpu.{gpu}.{field}") for gpu in gpus)
        return [value(summary) for summary in summaries if summary is not None]

    def total(pattern: str) -> float | None:
        told = [summary.mean for name, summary in node.fields.items() if re.fullmatch(pattern, name)]
        return sum(told) if told else None

    power = of_gpus("power_w", lambda summary: summary.mean)
    worst = worst_throttled(node, gpus)
    return model.NodeMeans(
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        run_id=run.plan.run_id,
        node_rank=node.node_rank,
        host=clean(node.host, NAME_LENGTH),
        num_gpus=len(gpus),
        # What some GPUs take is no power of the node.
        gpu_power_w=sum(power) if power and len(power) == len(gpus) else None,
        num_power=len(power),
        sm_clock_hz=_mean(of_gpus("sm_clock_hz", lambda summary: summary.mean)),
        gpu_utilisation=_mean(of_gpus("utilization", lambda summary: summary.mean)),
        gpu_memory_bytes=max(of_gpus("memory_used_bytes", lambda summary: summary.highest), default=None),
        gpu_temperature_c=max(of_gpus("temperature_c", lambda summary: summary.highest), default=None),
        throttled=None if worst is None else worst[0],
        throttled_by="" if worst is None or not worst[0] else f"GPU {worst[1]}, {worst[2]}",
        cpu_busy=_of(node, "host.cpu.busy", "host.cpu.mean.busy"),
        host_memory_bytes=_of(node, "host.memory_used_bytes"),
        network_received=total(r"host\.(net|infiniband)\..+\.received_bytes"),
        network_sent=total(r"host\.(net|infiniband)\..+\.sent_bytes"),
        disk_read=total(r"host\.disk\..+\.read_bytes"),
        num_samples=node.num_samples,
        num_gaps=node.num_gaps,
        missing=node.missing,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _of(node: NodeTelemetry, *names: str) -> float | None:
    return next((node.fields[name].mean for name in names if name in node.fields), None)


def _gpus(reading: MachineReading, node: NodeTelemetry) -> tuple[int, ...]:
    """The node's GPUs whose energy counts, which are those of the ranks; all sampled ones where none is told."""
    sources = reading.energy.sources if reading.energy is not None else ()
    used = {
        int(source.name.removeprefix("gpu."))
        for source in sources
        if source.kind == KINDS[0] and source.node_rank == node.node_rank
    }
    sampled = {int(match[1]) for name in node.fields if (match := re.match(r"gpu\.(\d+)\.", name))}
    return tuple(sorted(used or sampled))


def _sampling(run: Run) -> model.Sampling | None:
    told = [watched for node in nodes_of(run) if (watched := node_watch(run, node)) is not None]
    if not told:
        return None
    return model.Sampling(
        period_s=max(watched.period_s for watched in told),
        late_median_s=max(watched.late_median_s for watched in told),
        late_max_s=max(watched.late_max_s for watched in told),
        dropped=sum(watched.dropped_samples for watched in told),
    )


def _unavailable(readings: Sequence[MachineReading]) -> tuple[model.Unavailable, ...]:
    """What nodes do not tell, each reason once, with the number of nodes of all runs that were read."""
    counts: dict[tuple[str, str], int] = {}
    for reading in readings:
        for reason in reading.why.values():
            counts["all samples", reason] = counts.get(("all samples", reason), 0) + 1
        for node in reading.nodes:
            told = [*node.unavailable.items(), *(("failed on the way", text) for text in node.failures)]
            for what, reason in told:
                counts[what, reason] = counts.get((what, reason), 0) + 1
    return tuple(
        model.Unavailable(what=clean(what, 120), reason=clean(reason, 300), num_nodes=count)
        for (what, reason), count in list(counts.items())[:MAX_UNAVAILABLE]
    )
