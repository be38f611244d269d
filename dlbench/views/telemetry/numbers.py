"""What the samplers of a group's runs saw: means of the measured window by node, one run over time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.reading.samples.node_means import FieldSummary, NodeTelemetry
from dlbench.reading.samples.node_samples import node_watch, nodes_of
from dlbench.reading.samples.readings import MachineReading, MachineReadings, machine_readings
from dlbench.reading.scaling import Group
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.views.telemetry.timeline import Timeline, timeline, worst_throttled

MAX_UNAVAILABLE = 40


@dataclass(frozen=True, kw_only=True)
class NodeMeans:
    """One node in the measured window of one run; None: not known."""

    ranks: int
    nodes: int
    run_id: str
    node_rank: int
    host: str
    num_gpus: int
    """Sampled ones that ranks computed on, as far as that is known."""
    gpu_power_w: float | None
    """Of all its GPUs together, mean; None where not all of them report it."""
    num_power: int
    """GPUs that report their power."""
    sm_clock_hz: float | None
    """Mean over its GPUs."""
    gpu_utilisation: float | None
    """Share of the time in which a kernel ran (1), mean over its GPUs."""
    sm_active: float | None
    """Share of multiprocessors that were busy, mean over its GPUs; by GPM, as the next two."""
    tensor_active: float | None
    """Share of the time in which tensor cores worked."""
    dram_active: float | None
    """Bandwidth of GPU memory over the highest."""
    gpu_memory_bytes: float | None
    """Highest sample of any of its GPUs."""
    gpu_temperature_c: float | None
    """Highest sample of any of its GPUs."""
    throttled: float | None
    """Share of the time (1) in which the commonest reason held down the clock of its most throttled GPU."""
    throttled_by: str
    """GPU and reason; empty where none was."""
    cpu_busy: float | None
    """Mean over its cores (1)."""
    host_memory_bytes: float | None
    """Mean."""
    network_received: float | None
    """Bytes per second, all interfaces together."""
    network_sent: float | None
    disk_read: float | None
    """Bytes per second, all disks together."""
    num_samples: int
    num_gaps: int
    missing: float
    """Share of the window without samples (1)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How often, and how late, samples were taken, over all nodes of the run that is drawn."""

    period_s: float
    """Longest period of any node."""
    late_median_s: float
    """Of the node with the largest."""
    late_max_s: float
    dropped: int
    """Samples that did not fit into a node's share of bytes."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """What nodes do not report."""

    what: str
    reason: str
    num_nodes: int
    """Different nodes, however many runs they were in."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the samplers of the nodes saw."""

    nodes: tuple[NodeMeans, ...]
    """Of the runs that were read, by rank count, run and node."""
    timeline: Timeline | None
    """Of the run in the middle of the point with most ranks; None where none of its nodes was sampled."""
    sampling: Sampling | None
    unavailable: tuple[Unavailable, ...]
    num_runs: int
    """Runs of the group."""
    num_read: int
    """Runs whose samples were read."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunTelemetry:
    """All that the nodes of one run sampled in the measured window."""

    run_id: str
    nodes: tuple[NodeTelemetry, ...]
    not_measured: Mapping[str, str]
    """Why nodes have no samples, by node (`node 3`), and under `run` what is damaged."""


@dataclass(frozen=True, kw_only=True)
class DetailedTelemetry(Telemetry):
    """Telemetry of all runs, field by field."""

    runs: tuple[RunTelemetry, ...]


def telemetry(group: Group, table: RunTable) -> Telemetry | None:
    """What the samplers saw; None where no run of the group has samples.

    Args:
        group: comparable runs.
        table: where they are from.
    """
    found = _telemetry(group, machine_readings(table))
    return found if found.nodes else None


def detailed_telemetry(group: Group, table: RunTable) -> DetailedTelemetry:
    """The same of all runs and all fields; without any sample, the reasons.

    Args:
        group: comparable runs.
        table: where they are from.
    """
    readings = machine_readings(table, None)
    found = _telemetry(group, readings)
    runs = [readings.by_run[run.plan.run_id] for run in _by_rank_count(group)]
    return DetailedTelemetry(
        **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
        runs=tuple(
            RunTelemetry(
                run_id=reading.run_id,
                nodes=reading.nodes,
                not_measured=reading.why | ({"run": reading.problem} if reading.problem else {}),
            )
            for reading in runs
        ),
    )


def _by_rank_count(group: Group) -> list[Run]:
    return sorted(group.runs, key=lambda run: (run.plan.layout.ranks, run.plan.layout.nodes))


def _telemetry(group: Group, readings: MachineReadings) -> Telemetry:
    found = [
        (run, reading) for run in _by_rank_count(group) if (reading := readings.by_run.get(run.plan.run_id)) is not None
    ]
    largest = group.points[-1]
    middle = readings.middle[group.id, largest.ranks, largest.nodes]
    drawn = readings.by_run.get(middle.plan.run_id)
    notes = [f"damaged: {reading.problem}" for _, reading in found if reading.problem]
    notes += [
        f"{reading.run_id}: {len(reading.nodes)} of {len(reading.nodes) + reading.left_out} nodes were read"
        for _, reading in found
        if reading.left_out
    ]
    return Telemetry(
        nodes=tuple(_means(run, reading, node) for run, reading in found for node in reading.nodes),
        timeline=timeline(middle, drawn, notes) if drawn is not None and drawn.nodes else None,
        sampling=_sampling(middle),
        unavailable=_unavailable([reading for _, reading in found]),
        num_runs=len(group.runs),
        num_read=sum(bool(reading.nodes) for _, reading in found),
        notes=tuple(dict.fromkeys(notes)),
    )


def _means(run: Run, reading: MachineReading, node: NodeTelemetry) -> NodeMeans:
    gpus = _gpus(reading, node)

    def of_gpus(field: str, value: Callable[[FieldSummary], float]) -> list[float]:
        summaries = (node.fields.get(f"gpu.{gpu}.{field}") for gpu in gpus)
        return [value(summary) for summary in summaries if summary is not None]

    def total(pattern: str) -> float | None:
        known = [summary.mean for name, summary in node.fields.items() if re.fullmatch(pattern, name)]
        return sum(known) if known else None

    def mean_of_gpus(field: str) -> float | None:
        known = of_gpus(field, lambda summary: summary.mean)
        return sum(known) / len(known) if known else None

    busy = node.fields.get("host.cpu.busy") or node.fields.get("host.cpu.mean.busy")
    memory = node.fields.get("host.memory_used_bytes")
    power = of_gpus("power_w", lambda summary: summary.mean)
    worst = worst_throttled(node, gpus)
    return NodeMeans(
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        run_id=run.plan.run_id,
        node_rank=node.node_rank,
        host=node.host,
        num_gpus=len(gpus),
        # What some GPUs take is no power of the node.
        gpu_power_w=sum(power) if power and len(power) == len(gpus) else None,
        num_power=len(power),
        sm_clock_hz=mean_of_gpus("sm_clock_hz"),
        gpu_utilisation=mean_of_gpus("utilization"),
        sm_active=mean_of_gpus("sm_active"),
        tensor_active=mean_of_gpus("tensor_active"),
        dram_active=mean_of_gpus("dram_active"),
        gpu_memory_bytes=max(of_gpus("memory_used_bytes", lambda summary: summary.highest), default=None),
        gpu_temperature_c=max(of_gpus("temperature_c", lambda summary: summary.highest), default=None),
        throttled=None if worst is None else worst[0],
        throttled_by="" if worst is None or not worst[0] else f"GPU {worst[1]}, {worst[2]}",
        cpu_busy=busy.mean if busy else None,
        host_memory_bytes=memory.mean if memory else None,
        network_received=total(r"host\.(net|infiniband)\..+\.received_bytes"),
        network_sent=total(r"host\.(net|infiniband)\..+\.sent_bytes"),
        disk_read=total(r"host\.disk\..+\.read_bytes"),
        num_samples=node.num_samples,
        num_gaps=node.num_gaps,
        missing=node.missing,
    )


def _gpus(reading: MachineReading, node: NodeTelemetry) -> tuple[int, ...]:
    """The node's GPUs whose energy counts, which are those of the ranks; all sampled ones where that is not known."""
    sources = reading.energy.sources if reading.energy is not None else ()
    used = {
        int(source.name.removeprefix("gpu."))
        for source in sources
        if source.kind == "GPUs" and source.node_rank == node.node_rank
    }
    sampled = {int(match[1]) for name in node.fields if (match := re.match(r"gpu\.(\d+)\.", name))}
    return tuple(sorted(used or sampled))


def _sampling(run: Run) -> Sampling | None:
    known = [watched for node in nodes_of(run) if (watched := node_watch(run, node)) is not None]
    if not known:
        return None
    return Sampling(
        period_s=max(watched.period_s for watched in known),
        late_median_s=max(watched.late_median_s for watched in known),
        late_max_s=max(watched.late_max_s for watched in known),
        dropped=sum(watched.dropped_samples for watched in known),
    )


def _unavailable(readings: Sequence[MachineReading]) -> tuple[Unavailable, ...]:
    """What nodes do not report, each reason once, with the number of different nodes of the runs that were read."""
    nodes: dict[tuple[str, str], set[str]] = {}
    for reading in readings:
        for node_name, reason in reading.why.items():
            nodes.setdefault(("all samples", reason), set()).add(node_name)
        for node in reading.nodes:
            reasons = [*node.unavailable.items(), *(("failed on the way", text) for text in node.failures)]
            for what, reason in reasons:
                nodes.setdefault((what, reason), set()).add(node.host or f"node {node.node_rank}")
    return tuple(
        Unavailable(what=what, reason=reason, num_nodes=len(names))
        for (what, reason), names in list(nodes.items())[:MAX_UNAVAILABLE]
    )
