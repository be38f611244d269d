"""The view `telemetry`: what samplers saw of power, clocks, utilisation, memory and traffic of the nodes."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlbench.analysis.scaling import Group as RunGroup
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.node_means import FieldSummary, NodeTelemetry
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.analysis.telemetry.throttling import gpu_numbers
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import CLOCK_REASONS
from dlbench.report.document import Section
from dlbench.report.formats.json import HIDDEN
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import percent, place_text
from dlbench.units import format_bytes, format_number
from dlbench.views.model import ReportGroup
from dlbench.views.next_step import rerun
from dlbench.views.view import GroupSource, GroupView, place_of

MAX_UNAVAILABLE = 40
MAX_HOST = 64  # Characters of a host name.
MIN_SAMPLES = 3  # Samples in the measured window below which nothing is said of a node's use.

_THROTTLING = {reason.name for reason in CLOCK_REASONS if reason.is_throttling}

MAX_SHOWN = 12  # Nodes of a rank count that people see: those of the run in the middle; the rest are counted.
MAX_ROWS = 512  # Nodes in the table for programs.
_ABOUT = (
    "Of the run at each rank count whose throughput is in the middle. CPU, memory, network and disks are the whole "
    "node's, other programs included."
)
_ABOUT_GPUS = "Power: sum over a node's GPUs; clock and utilisation: means; memory and temperature: highest sample."


def _shape(text: Callable[[float], str]) -> Callable[[float], Cell]:
    return lambda value: Cell(text(value), number=value)


_rate = _shape(lambda value: f"{format_bytes(value)}/s")


@dataclass(frozen=True, kw_only=True)
class NodeMeans:
    """One node in the measured window of one run; None: not known."""

    ranks: int = field(metadata=column())
    nodes: int = field(metadata=column())
    run_id: str = field(metadata=column())
    node_rank: int = field(metadata=column(name="node"))
    host: str = field(metadata=column(limit=MAX_HOST))
    num_gpus: int = field(metadata=column(name="gpus"))  # Sampled ones that ranks computed on, as far as that is known.
    gpu_power_w: float | None = field(metadata=column())  # Sum of its GPUs, mean; None where one reports none.
    num_power: int  # GPUs that report their power.
    sm_clock_hz: float | None = field(metadata=column("SM clock", text=_shape(lambda hertz: f"{hertz / 1e6:,.0f} MHz")))
    """Mean over its GPUs."""
    gpu_utilisation: float | None = field(metadata=column("GPU busy", unit="fraction"))
    """Share of the time in which a kernel ran (1), mean over its GPUs."""
    sm_active: float | None = field(metadata=column("SMs busy", unit="fraction"))
    """Share of multiprocessors that were busy, mean over its GPUs; by GPM, as the next two."""
    tensor_active: float | None = field(metadata=column("Tensor cores", unit="fraction"))
    """Share of the time in which tensor cores worked."""
    dram_active: float | None = field(metadata=column("GPU memory bandwidth", unit="fraction"))
    """Bandwidth of GPU memory over the highest."""
    gpu_memory_bytes: float | None = field(metadata=column("GPU memory", unit="bytes"))  # Highest of any GPU.
    gpu_temperature_c: float | None = field(metadata=column("Hottest GPU", text=_shape(lambda one: f"{one:.0f} °C")))
    """Highest sample of any of its GPUs."""
    throttled: float | None = field(metadata=column("Throttled", "throttled_share", unit="fraction"))
    """Share of the time (1) in which the commonest reason held down the clock of its most throttled GPU."""
    throttled_by: str = field(metadata=column())  # GPU and reason; empty where none was.
    cpu_busy: float | None = field(metadata=column("CPU busy", unit="fraction"))  # Mean over its cores (1).
    host_memory_bytes: float | None = field(metadata=column("Host memory", unit="bytes"))  # Mean.
    network_received: float | None = field(metadata=column("Received", "network_received_bytes_per_s", text=_rate))
    """Bytes per second, all interfaces together."""
    network_sent: float | None = field(metadata=column("Sent", "network_sent_bytes_per_s", text=_rate))
    disk_read: float | None = field(metadata=column("Disks read", "disk_read_bytes_per_s", text=_rate))
    """Bytes per second, all disks together."""
    num_samples: int = field(metadata=column("Samples", "samples", unit="samples"))
    num_gaps: int = field(metadata=column("Gaps", "gaps"))
    missing: float = field(metadata=column("Missing", "missing_share", unit="fraction"))  # Share without samples (1).
    is_shown: bool = field(default=False, metadata={HIDDEN: False})
    """Whether it is a row for people; programs get other nodes, in another order."""

    @property
    def power(self) -> Cell | None:
        """Says the power of its GPUs, or of how many it is known."""
        if self.gpu_power_w is not None:
            return Cell(f"{format_number(self.gpu_power_w)} W", number=self.gpu_power_w)
        return Cell(f"of {self.num_power} of {self.num_gpus} GPUs only") if self.num_power else None


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """What nodes do not report."""

    what: str = field(metadata=column("Missing", limit=120))
    reason: str = field(metadata=column("Why", limit=300))
    num_nodes: int = field(metadata=column("Nodes", "nodes"))  # Different nodes, however many runs they were in.


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the samplers of the nodes saw."""

    nodes: tuple[NodeMeans, ...]  # Of the runs that were read, by rank count, run and node.
    middle_run_ids: tuple[str, ...]  # Of each rank count the run whose throughput is in the middle, which people see.
    unavailable: tuple[Unavailable, ...]
    num_runs: int  # Runs of the group.
    num_read: int  # Runs whose samples were read.
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunTelemetry:
    """All that the nodes of one run sampled in the measured window."""

    run_id: str
    nodes: tuple[NodeTelemetry, ...]
    not_measured: Mapping[str, str]  # Why nodes have no samples, by node (`node 3`), and under `run` what is damaged.


@dataclass(frozen=True, kw_only=True)
class DetailedTelemetry(Telemetry):
    """Telemetry of all runs, field by field."""

    runs: tuple[RunTelemetry, ...]


def _by_rank_count(group: RunGroup) -> list[Run]:
    return sorted(group.runs, key=lambda run: (run.plan.layout.ranks, run.plan.layout.nodes))


def _telemetry(group: RunGroup, table: RunTable) -> Telemetry:
    runs = _by_rank_count(group)
    found = [(run, table.readings[run.plan.run_id]) for run in runs if run.plan.run_id in table.readings]
    notes = [f"damaged: {reading.problem}" for _, reading in found if reading.problem]
    notes += [
        f"{reading.run_id}: {len(reading.nodes)} of {len(reading.nodes) + reading.left_out} nodes were read"
        for _, reading in found
        if reading.left_out
    ]
    return Telemetry(
        nodes=tuple(_means(run, reading, node) for run, reading in found for node in reading.nodes),
        middle_run_ids=tuple(table.points[group.id, point.ranks, point.nodes][0].plan.run_id for point in group.points),
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


def worst_throttled(node: NodeTelemetry, gpus: Iterable[int]) -> tuple[float, int, str] | None:
    """Share of the time (1), number of the GPU and reason that held a clock down most; None where none is known."""
    known = [
        (share, gpu, reason)
        for gpu in gpus
        if f"gpu.{gpu}" in node.clock_reasons
        for reason, share in ({"": 0.0} | node.clock_reasons[f"gpu.{gpu}"]).items()
        if not reason or reason in _THROTTLING
    ]
    return max(known, key=lambda one: one[0], default=None)


def _gpus(reading: MachineReading, node: NodeTelemetry) -> tuple[int, ...]:
    """The node's GPUs whose energy counts, which are those of the ranks; all sampled ones where that is not known."""
    sources = reading.energy.sources if reading.energy is not None else ()
    used = {
        int(source.name.removeprefix("gpu."))
        for source in sources
        if source.kind == "GPUs" and source.node_rank == node.node_rank
    }
    return tuple(sorted(used)) or gpu_numbers(node.fields)


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


def means_sheet(found: Telemetry) -> Sheet[NodeMeans]:
    """Means by node; for people without columns of which no node knows anything."""
    shown, left_out = _shown(found)

    def is_empty(one: Column[NodeMeans]) -> bool:
        """No node knows it; zero is something to say of shares and of memory, but not of what is missing."""
        values = [one.value(node) for node in shown]
        counts_zero = one.unit != "" and one.name != "missing_share"
        return not any(values) and not (counts_zero and any(value is not None for value in values))

    has_power = any(node.num_power for node in shown)
    empty = {one.name: "" for one in columns_of(NodeMeans) if is_empty(one)}
    columns: tuple[Column[NodeMeans], ...] = (
        Column("", "At", lambda node: f"{place_of(node)}, {node.host[:MAX_HOST] or f'node {node.node_rank}'}"),
        Column("", "Power of its GPUs" if has_power else "", "gpu_power_w", "power"),
        *columns_of(NodeMeans, titles=empty),
    )
    partial = [f"Samples of {found.num_read} of {found.num_runs} runs; dlbench diagnose reads them all."]
    about = [_ABOUT, *(partial if found.num_read != found.num_runs else []), *left_out]
    return Sheet(
        name="telemetry",
        title="Means of the measured window",
        columns=columns,
        rows=[*found.nodes[:MAX_ROWS], *shown],
        caption=" ".join([*about, *([_ABOUT_GPUS] if any(n.num_gpus for n in shown) else [])]),
        is_data=lambda row: not row.is_shown,
        is_shown=lambda row: row.is_shown and bool(row.num_samples),
    )


def _shown(found: Telemetry) -> tuple[list[NodeMeans], list[str]]:
    """Of each point the run in the middle, else the first that was read, most throttled nodes first; who is missing."""
    points: dict[tuple[int, int], dict[str, list[NodeMeans]]] = {}
    for node in found.nodes:
        points.setdefault((node.ranks, node.nodes), {}).setdefault(node.run_id, []).append(node)
    shown: list[NodeMeans] = []
    left_out: list[str] = []
    for place, runs in points.items():
        run_id = next((run_id for run_id in found.middle_run_ids if run_id in runs), next(iter(runs)))
        nodes = runs[run_id]
        nodes.sort(key=lambda node: (-(node.throttled or 0.0), node.node_rank))
        shown += [dataclasses.replace(node, is_shown=True) for node in nodes[:MAX_SHOWN]]
        if len(nodes) > MAX_SHOWN:
            left_out.append(f"At {place_text(*place)}: {MAX_SHOWN} of {len(nodes)} nodes, the most throttled first.")
    return shown, left_out


class TelemetryView(GroupView):
    """Power, clocks, utilisation, memory and traffic of the nodes."""

    id = "telemetry"
    title = "Telemetry"
    key = "telemetry"
    after = "memory"

    def numbers(self, source: GroupSource) -> Telemetry | None:
        telemetry = _telemetry(source.group, source.table)
        return telemetry if telemetry.nodes else None

    def shown(self, group: ReportGroup, found: Telemetry) -> Section:
        sheets: list[Sheet[Any]] = [
            means_sheet(found),
            Sheet(
                name="telemetry-missing",
                title="Not sampled",
                columns=columns_of(Unavailable),
                rows=found.unavailable,
                is_folded=True,
            ),
        ]
        return Section(
            headline=_headline(found, on_gpu=group.on_gpu),
            words=found.notes,
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: ReportGroup) -> str:
        return not_sampled(group)


class DetailedTelemetryView(TelemetryView):
    """The same over the samples of all runs, with every field of every node."""

    def numbers(self, source: GroupSource) -> DetailedTelemetry:
        found = _telemetry(source.group, source.table)
        runs = [source.table.readings[run.plan.run_id] for run in _by_rank_count(source.group)]
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


def not_sampled(group: ReportGroup) -> str:
    """What makes runs with samples."""
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: "
        f"{rerun(group, '--set watch.sampler=true')}."
    )


def _headline(found: Telemetry, *, on_gpu: bool) -> str:
    """How busy the nodes of the largest rank count are, and whether a clock was throttled."""
    last = (found.nodes[-1].ranks, found.nodes[-1].nodes) if found.nodes else (0, 0)
    own = [node for node in found.nodes if (node.ranks, node.nodes) == last]
    worst = max(found.nodes, key=lambda node: (node.throttled or 0.0, node.ranks), default=None)
    throttling = "clock throttling unknown: no GPU was sampled" if on_gpu else "no GPU whose clocks could be read"
    if worst is not None and worst.throttled:
        throttling = f"throttled {percent(worst.throttled)} of the time: {worst.host[:20]}, {worst.throttled_by}"
    elif any(node.throttled is not None for node in found.nodes):
        throttling = "no throttling seen"
    if sum(node.num_samples for node in own) < MIN_SAMPLES:
        few = f"fewer than {MIN_SAMPLES} samples in the measured steps: too short a run"
        return throttling if any(node.throttled for node in found.nodes) else few
    gpus = [node.gpu_utilisation for node in own if node.gpu_utilisation is not None]
    cpus = [node.cpu_busy for node in own if node.cpu_busy is not None]
    means = (("GPUs", gpus), ("CPU", cpus))
    busy = (f"{name} busy {percent(statistics.fmean(shares), 0)}" for name, shares in means if shares)
    return ", ".join([*busy, throttling])
