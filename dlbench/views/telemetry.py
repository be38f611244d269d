"""The view `telemetry`: power, clocks, utilisation, memory and traffic of the nodes, as sampled."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dlbench.analysis.scaling import Group as RunGroup
from dlbench.analysis.scaling import group_by
from dlbench.analysis.table import RunTable
from dlbench.analysis.telemetry.readings import FieldSummary, MachineReading, NodeTelemetry
from dlbench.analysis.telemetry.throttling import gpu_numbers
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import CLOCK_REASONS
from dlbench.report.document import Section, with_rows
from dlbench.report.formats.data import HIDDEN
from dlbench.report.table import Cell, Column, Sheet, column, columns_of
from dlbench.report.wording import percent, place_text
from dlbench.units import format_number
from dlbench.views.model import GroupSource, GroupView, ReportGroup, known_mean, place_of
from dlbench.views.next_step import rerun
from dlbench.views.readers import rate_cell

MAX_UNAVAILABLE = 40
MAX_HOST = 64  # Characters of a host name.
MIN_SAMPLES = 3  # Samples in the measured window that a statement on a node's use needs.

_THROTTLING = {reason.name for reason in CLOCK_REASONS if reason.is_throttling}

MAX_SHOWN = 12  # Nodes of a rank count that people see, of the median run; further ones are counted.
MAX_ROWS = 512  # Nodes in the table for programs.
_ABOUT = (
    "Of the run with the median throughput at each rank count. CPU, memory, network and disks are those of the whole "
    "node, with other programs."
)
_ABOUT_GPUS = "Power: sum over a node's GPUs; clock and utilisation: means; memory and temperature: highest sample."


@dataclass(frozen=True, kw_only=True)
class NodeMeans:
    """The means of one node in the measured window of one run; None: not known."""

    ranks: int = field(metadata=column())
    nodes: int = field(metadata=column())
    run_id: str = field(metadata=column())
    node_rank: int = field(metadata=column(name="node"))
    host: str = field(metadata=column(limit=MAX_HOST))
    num_gpus: int = field(metadata=column(name="gpus"))  # Sampled GPUs of the ranks, or all if these are not known.
    gpu_power_w: float | None = field(metadata=column())  # Sum over its GPUs; None if one does not report its power.
    num_power: int  # GPUs that report their power.
    sm_clock_hz: float | None = field(  # Mean over its GPUs.
        metadata=column("SM clock", text=lambda hertz: Cell(f"{hertz / 1e6:,.0f} MHz", number=hertz))
    )
    gpu_utilisation: float | None = field(metadata=column("GPU busy", unit="fraction"))
    sm_active: float | None = field(metadata=column("SMs busy", unit="fraction"))  # By GPM, as the next two.
    tensor_active: float | None = field(metadata=column("Tensor cores", unit="fraction"))
    dram_active: float | None = field(metadata=column("GPU memory bandwidth", unit="fraction"))
    gpu_memory_bytes: float | None = field(metadata=column("GPU memory", unit="bytes"))  # Highest of any GPU.
    gpu_temperature_c: float | None = field(
        metadata=column("Hottest GPU", text=lambda celsius: Cell(f"{celsius:.0f} °C", number=celsius))
    )
    throttled: float | None = field(metadata=column("Throttled", "throttled_share", unit="fraction"))
    throttled_by: str = field(metadata=column())  # GPU and reason; empty without throttling.
    cpu_busy: float | None = field(metadata=column("CPU busy", unit="fraction"))  # Mean over its cores (1).
    host_memory_bytes: float | None = field(metadata=column("Host memory", unit="bytes"))  # Mean over time.
    network_received: float | None = field(metadata=column("Received", "network_received_bytes_per_s", text=rate_cell))
    network_sent: float | None = field(metadata=column("Sent", "network_sent_bytes_per_s", text=rate_cell))
    disk_read: float | None = field(metadata=column("Disks read", "disk_read_bytes_per_s", text=rate_cell))
    num_samples: int = field(metadata=column("Samples", "samples", unit="samples"))
    num_gaps: int = field(metadata=column("Gaps", "gaps"))
    missing: float = field(metadata=column("Missing", "missing_share", unit="fraction"))  # Share without samples (1).
    is_shown: bool = field(default=False, metadata={HIDDEN: False})  # Whether it is a row for people.

    @property
    def place(self) -> tuple[int, int]:
        return self.ranks, self.nodes

    @property
    def power(self) -> Cell | None:
        """The power of its GPUs, or the number of GPUs that report it."""
        if self.gpu_power_w is not None:
            return Cell(f"{format_number(self.gpu_power_w)} W", number=self.gpu_power_w)
        if self.num_power:
            return Cell(f"reported by {self.num_power} of {self.num_gpus} GPUs")
        return None

    @property
    def title(self) -> str:
        return f"{place_of(self)}, {self.host[:MAX_HOST] or f'node {self.node_rank}'}"


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A field that nodes do not report."""

    what: str = field(metadata=column("Missing", limit=120))
    reason: str = field(metadata=column("Why", limit=300))
    num_nodes: int = field(metadata=column("Nodes", "nodes"))  # Different nodes, however many runs they were in.


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """The samples of the nodes of a group of runs."""

    nodes: tuple[NodeMeans, ...]  # Nodes of the runs that were read, by rank count, run and node.
    median_run_ids: tuple[str, ...]  # The run with the median throughput of each rank count, which people see.
    unavailable: tuple[Unavailable, ...]
    num_runs: int  # Runs of the group.
    num_read: int  # Runs whose samples were read.
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunTelemetry:
    """All fields that the nodes of one run sampled in the measured window."""

    run_id: str
    nodes: tuple[NodeTelemetry, ...]
    not_measured: Mapping[str, str]  # Why nodes have no samples, by node (`node 3`); damage of the run under `run`.


@dataclass(frozen=True, kw_only=True)
class DetailedTelemetry(Telemetry):
    """Telemetry of all runs, field by field."""

    runs: tuple[RunTelemetry, ...]


def _by_rank_count(group: RunGroup) -> list[Run]:
    return sorted(group.runs, key=attrgetter("plan.layout.ranks", "plan.layout.nodes"))


def _telemetry(group: RunGroup, table: RunTable) -> Telemetry:
    nodes: list[NodeMeans] = []
    readings: list[MachineReading] = []
    damaged, partly_read = [], []
    for run in _by_rank_count(group):
        reading = table.readings.get(run.plan.run_id)
        if reading is None:
            continue
        readings.append(reading)
        nodes += [_means(run, reading, node) for node in reading.nodes]
        if reading.problem:
            damaged.append(f"damaged: {reading.problem}")
        if reading.left_out:
            total = len(reading.nodes) + reading.left_out
            partly_read.append(f"{reading.run_id}: {len(reading.nodes)} of {total} nodes were read")
    return Telemetry(
        nodes=tuple(nodes),
        median_run_ids=tuple(table.points[group.id, point.ranks, point.nodes][0].plan.run_id for point in group.points),
        unavailable=_unavailable(readings),
        num_runs=len(group.runs),
        num_read=sum(bool(reading.nodes) for reading in readings),
        notes=tuple(dict.fromkeys((*damaged, *partly_read))),
    )


def _means(run: Run, reading: MachineReading, node: NodeTelemetry) -> NodeMeans:
    gpus = _gpus(reading, node)

    def of_gpus(name: str) -> list[FieldSummary]:
        summaries = [node.fields.get(f"gpu.{gpu}.{name}") for gpu in gpus]
        return [summary for summary in summaries if summary is not None]

    def mean_of_gpus(name: str) -> float | None:
        return known_mean(summary.mean for summary in of_gpus(name))

    def highest_of_gpus(name: str) -> float | None:
        return max((summary.highest for summary in of_gpus(name)), default=None)

    def mean(name: str) -> float | None:
        summary = node.fields.get(name)
        return None if summary is None else summary.mean

    def total(pattern: str) -> float | None:
        means = [summary.mean for name, summary in node.fields.items() if re.fullmatch(pattern, name)]
        return sum(means) if means else None

    powers_w = [summary.mean for summary in of_gpus("power_w")]
    gpu_power_w = None
    if powers_w and len(powers_w) == len(gpus):  # The power of some GPUs is not that of the node.
        gpu_power_w = sum(powers_w)
    cpu_busy = mean("host.cpu.busy")
    if cpu_busy is None:
        cpu_busy = mean("host.cpu.mean.busy")
    throttled, gpu, reason = worst_throttled(node, gpus) or (None, 0, "")
    return NodeMeans(
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        run_id=run.plan.run_id,
        num_gpus=len(gpus),
        gpu_power_w=gpu_power_w,
        num_power=len(powers_w),
        sm_clock_hz=mean_of_gpus("sm_clock_hz"),
        gpu_utilisation=mean_of_gpus("utilization"),
        sm_active=mean_of_gpus("sm_active"),
        tensor_active=mean_of_gpus("tensor_active"),
        dram_active=mean_of_gpus("dram_active"),
        gpu_memory_bytes=highest_of_gpus("memory_used_bytes"),
        gpu_temperature_c=highest_of_gpus("temperature_c"),
        throttled=throttled,
        throttled_by=f"GPU {gpu}, {reason}" if throttled else "",
        cpu_busy=cpu_busy,
        host_memory_bytes=mean("host.memory_used_bytes"),
        network_received=total(r"host\.(net|infiniband)\..+\.received_bytes"),
        network_sent=total(r"host\.(net|infiniband)\..+\.sent_bytes"),
        disk_read=total(r"host\.disk\..+\.read_bytes"),
        **{name: getattr(node, name) for name in ("node_rank", "host", "num_samples", "num_gaps", "missing")},
    )


def worst_throttled(node: NodeTelemetry, gpus: Iterable[int]) -> tuple[float, int, str] | None:
    """Returns share of the time (1), GPU and reason that throttled a clock most; None if no GPU reports reasons."""
    worst: tuple[float, int, str] | None = None
    for gpu in gpus:
        reasons = node.clock_reasons.get(f"gpu.{gpu}")
        if reasons is None:
            continue
        worst = worst or (0.0, gpu, "")
        for reason, share in reasons.items():
            if reason in _THROTTLING and share > worst[0]:
                worst = share, gpu, reason
    return worst


def _gpus(reading: MachineReading, node: NodeTelemetry) -> tuple[int, ...]:
    """Returns the node's GPUs on which ranks computed, which are those with energy; else all sampled ones."""
    gpus = set()
    if reading.energy is not None:
        for source in reading.energy.sources:
            if source.kind == "GPUs" and source.node_rank == node.node_rank:
                gpus.add(int(source.name.removeprefix("gpu.")))
    return tuple(sorted(gpus)) or gpu_numbers(tuple(node.fields))


def _unavailable(readings: Sequence[MachineReading]) -> tuple[Unavailable, ...]:
    """Returns fields that nodes do not report, each reason once, with the number of different nodes."""
    nodes: dict[tuple[str, str], set[str]] = {}
    for reading in readings:
        for node_name, reason in reading.why.items():
            nodes.setdefault(("all samples", reason), set()).add(node_name)
        for node in reading.nodes:
            reasons = [*node.unavailable.items(), *(("failed on the way", text) for text in node.failures)]
            for name, reason in reasons:
                nodes.setdefault((name, reason), set()).add(node.host or f"node {node.node_rank}")
    return tuple(
        Unavailable(what=what, reason=reason, num_nodes=len(names))
        for (what, reason), names in list(nodes.items())[:MAX_UNAVAILABLE]
    )


def means_sheet(telemetry: Telemetry) -> Sheet[NodeMeans]:
    """Returns the table of means by node, for people without columns that no node has."""
    shown_nodes, left_out = _shown(telemetry)
    titles = {candidate.name: "" for candidate in columns_of(NodeMeans) if _is_empty(candidate, shown_nodes)}
    columns: tuple[Column[NodeMeans], ...] = (
        Column("", "At", "title"),
        Column("", "Power of its GPUs" if any(node.num_power for node in shown_nodes) else "", "gpu_power_w", "power"),
        *columns_of(NodeMeans, titles=titles),
    )
    captions = [_ABOUT]
    if telemetry.num_read != telemetry.num_runs:
        captions.append(f"Samples of {telemetry.num_read} of {telemetry.num_runs} runs; dlbench diagnose reads all.")
    captions += left_out
    if any(node.num_gpus for node in shown_nodes):
        captions.append(_ABOUT_GPUS)
    return Sheet(
        name="telemetry",
        title="Means of the measured window",
        columns=columns,
        rows=[*telemetry.nodes[:MAX_ROWS], *shown_nodes],
        caption=" ".join(captions),
        is_data=lambda node: not node.is_shown,
        is_shown=lambda node: node.is_shown and bool(node.num_samples),
    )


def _is_empty(candidate: Column[NodeMeans], nodes: Sequence[NodeMeans]) -> bool:
    """Returns whether no node has a value; a zero counts for shares and memory, but not for missing samples."""
    values = [candidate.value(node) for node in nodes]
    if candidate.unit and candidate.name != "missing_share":
        return all(value is None for value in values)
    return not any(values)


def _shown(telemetry: Telemetry) -> tuple[list[NodeMeans], list[str]]:
    """Returns the nodes that people see, those of each point's median run, most throttled first, and remarks on those
    left out.
    """
    shown_nodes: list[NodeMeans] = []
    left_out: list[str] = []
    for place, of_place in group_by(telemetry.nodes, attrgetter("place")).items():
        by_run = group_by(of_place, attrgetter("run_id"))
        run_id = next((run_id for run_id in telemetry.median_run_ids if run_id in by_run), of_place[0].run_id)
        nodes = sorted(by_run[run_id], key=lambda node: (-(node.throttled or 0.0), node.node_rank))
        shown_nodes += [dataclasses.replace(node, is_shown=True) for node in nodes[:MAX_SHOWN]]
        if len(nodes) > MAX_SHOWN:
            left_out.append(f"At {place_text(*place)}: {MAX_SHOWN} of {len(nodes)} nodes, the most throttled first.")
    return shown_nodes, left_out


class TelemetryView(GroupView):
    """Power, clocks, utilisation, memory and traffic of the nodes."""

    id = "telemetry"
    title = "Telemetry"
    key = "telemetry"
    after = "memory"

    def numbers(self, source: GroupSource) -> Telemetry | None:
        telemetry = _telemetry(source.group, source.table)
        return telemetry if telemetry.nodes else None

    def shown(self, group: ReportGroup, telemetry: Telemetry) -> Section:
        columns, rows = columns_of(Unavailable), telemetry.unavailable
        missing = Sheet(name="telemetry-missing", title="Not sampled", columns=columns, rows=rows, is_folded=True)
        return Section(
            headline=_headline(telemetry, on_gpu=group.on_gpu),
            words=telemetry.notes,
            sheets=with_rows(means_sheet(telemetry), missing),
        )

    def remedy(self, group: ReportGroup) -> str:
        return not_sampled(group)


class DetailedTelemetryView(TelemetryView):
    """The telemetry of all runs, with every field of every node."""

    def numbers(self, source: GroupSource) -> DetailedTelemetry:
        telemetry = _telemetry(source.group, source.table)
        runs = []
        for run in _by_rank_count(source.group):
            reading = source.table.readings[run.plan.run_id]
            not_measured = dict(reading.why)
            if reading.problem:
                not_measured["run"] = reading.problem
            runs.append(RunTelemetry(run_id=reading.run_id, nodes=reading.nodes, not_measured=not_measured))
        return DetailedTelemetry(
            **{field.name: getattr(telemetry, field.name) for field in dataclasses.fields(telemetry)}, runs=tuple(runs)
        )


def not_sampled(group: ReportGroup) -> str:
    """Returns a sentence on how to get runs with samples."""
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: "
        f"{rerun(group, '--set watch.sampler=true')}."
    )


def _headline(telemetry: Telemetry, *, on_gpu: bool) -> str:
    nodes = telemetry.nodes
    at_largest = [node for node in nodes if node.place == nodes[-1].place]
    throttling = "clock throttling unknown: no GPU was sampled" if on_gpu else "no GPU with readable clocks"
    worst = max(nodes, key=lambda node: (node.throttled or 0.0, node.ranks), default=None)
    is_throttled = worst is not None and bool(worst.throttled)
    if worst is not None and worst.throttled:
        throttling = f"throttled {percent(worst.throttled)} of the time: {worst.host[:20]}, {worst.throttled_by}"
    elif any(node.throttled is not None for node in nodes):
        throttling = "no throttling"
    if sum(node.num_samples for node in at_largest) < MIN_SAMPLES:
        if is_throttled:
            return throttling
        return f"fewer than {MIN_SAMPLES} samples in the measured steps: the run was too short"
    parts = []
    gpus = [node.gpu_utilisation for node in at_largest if node.gpu_utilisation is not None]
    cpus = [node.cpu_busy for node in at_largest if node.cpu_busy is not None]
    for name, shares in (("GPUs", gpus), ("CPU", cpus)):
        if shares:
            parts.append(f"{name} busy {percent(statistics.fmean(shares), 0)}")
    return ", ".join([*parts, throttling])
