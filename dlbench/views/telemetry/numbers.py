"""What the samplers of a group's runs saw: means of the measured window by node, one run over time."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench.reading.samples.integral import counter_curve, joined
from dlbench.reading.samples.node_means import COUNTERS, FieldSummary, NodeTelemetry
from dlbench.reading.samples.node_samples import Interval, NodeSamples, NodeStages, node_watch, nodes_of
from dlbench.reading.samples.readings import MachineReading, MachineReadings, machine_readings
from dlbench.reading.scaling import Group
from dlbench.reading.table import RunTable
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import THROTTLING_MASK, throttling_names
from dlbench.views.telemetry.timeline import Timeline, timeline, worst_throttled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Times = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]


MAX_POINTS = 200
"""Points of a line, those without a value counted."""
MAX_STRETCHES = 40
"""Of a lane: further ones are joined to their nearest neighbours."""

_KEPT_GAPS = 10
"""The longest gaps, both of whose sides are points."""

SeriesPoint = tuple[float, float | None]
"""Seconds, and a value; None within a gap."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A time in which a lane was at a stage, or throttled."""

    lane: str
    """Name of a GPU or a node."""
    begin_s: float
    end_s: float
    name: str
    """The stage, or the reasons."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Values over time, and between which neighbours nothing is known."""

    time_ns: Times
    values: Floats
    gap_behind: Flags
    """Shape (n - 1,)."""


def series(samples: NodeSamples, names: Sequence[str], window: Interval) -> tuple[SeriesPoint, ...]:
    """The mean (host.cpu.N.busy) or sum (anything else) of fields over time; of counters the rate, per second.

    Args:
        samples: of one node.
        names: fields of one kind, all of them sampled.
        window: of the measured steps; its begin is second 0.
    """
    import numpy as np

    line = _line(samples, names)
    if not len(line.values):
        return ()
    found: list[SeriesPoint] = []
    chosen = thinned(line.time_ns, line.values, line.gap_behind)
    holes = np.concatenate([[0], np.cumsum(line.gap_behind)])
    for place, index in enumerate(chosen):
        if place and holes[index] != holes[chosen[place - 1]]:
            middle = (int(line.time_ns[index]) + int(line.time_ns[chosen[place - 1]])) // 2
            found.append(((middle - window[0]) / 1e9, None))
        found.append(((int(line.time_ns[index]) - window[0]) / 1e9, float(line.values[index])))
    return tuple(found)


def _line(samples: NodeSamples, names: Sequence[str]) -> _Line:
    import numpy as np

    if COUNTERS.fullmatch(names[0]):
        values = np.sum([samples.columns[name] for name in names], axis=0)
        return _rates(samples, values, max(samples.period_of(name) for name in names))
    each = [samples.columns[name] for name in names]
    values = np.mean(each, axis=0) if names[0].endswith("busy") else np.sum(each, axis=0)
    held = np.isfinite(values)
    times = samples.time_ns[held]
    near = joined(times, max(samples.period_of(name) for name in names))
    return _Line(time_ns=times, values=values[held], gap_behind=~near)


def _rates(samples: NodeSamples, values: Floats, period_s: float) -> _Line:
    """The rate between neighbouring samples, in the middle between them; what a gap bridges is not drawn."""
    import numpy as np

    curve = counter_curve(samples.time_ns, values, period_s)
    drawn = np.flatnonzero(curve.known & ~curve.bridged)
    start, stop = curve.time_ns[:-1][drawn], curve.time_ns[1:][drawn]
    return _Line(time_ns=start + (stop - start) // 2, values=curve.begin_rate[drawn], gap_behind=np.diff(drawn) != 1)


def thinned(time_ns: Times, values: Floats, gap_behind: Flags, max_points: int = MAX_POINTS) -> list[int]:
    """Which points stand for all: the smallest and largest of equal spans of time, both sides of the longest gaps.

    With a point in every gap between two chosen ones there are at most `max_points`.

    Args:
        time_ns: growing, shape (n,).
        values: finite, shape (n,).
        gap_behind: whether nothing is known between a point and the next, shape (n - 1,).
        max_points: at least 50.
    """
    import numpy as np

    count = len(time_ns)
    gaps = np.flatnonzero(gap_behind)
    if count + len(gaps) <= max_points:
        return list(range(count))
    longest = gaps[np.argsort(np.diff(time_ns)[gaps], kind="stable")[::-1][:_KEPT_GAPS]]
    chosen = {0, count - 1, *longest.tolist(), *(longest + 1).tolist()}
    # Every gap may need a point of its own: many gaps leave less room for values.
    room = max_points - len(chosen) - len(gaps)
    spans = max(room, (max_points - 2 * len(chosen)) // 2) // 2
    length = int(time_ns[-1] - time_ns[0]) + 1
    bucket = ((time_ns - time_ns[0]) * spans) // length
    edges = np.searchsorted(bucket, np.arange(spans + 1))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if begin < end:
            chosen |= {begin + int(values[begin:end].argmin()), begin + int(values[begin:end].argmax())}
    return sorted(chosen)


def stage_stretches(lane: str, stages: NodeStages) -> tuple[Stretch, ...]:
    """The stages of a node without idle times; second 0 is the begin of the measured window."""
    start = stages.measured[0]
    stretches = [
        Stretch(lane=lane, begin_s=(begin - start) / 1e9, end_s=(end - start) / 1e9, name=stage)
        for stage, begin, end in stages.pieces
        if stage != "idle"
    ]
    return _joined_stretches(stretches)


def throttled_stretches(lane: str, samples: NodeSamples, gpu: int, window: Interval) -> tuple[Stretch, ...]:
    """When a GPU's clock was held down, with the reasons; a sample stands for half the way to its neighbours.

    Samples at the sides of a gap stand for nothing of the gap.
    """
    import numpy as np

    column = samples.columns.get(f"gpu.{gpu}.clock_reasons")
    if column is None:
        return ()
    held = np.isfinite(column)
    times, masks = samples.time_ns[held], column[held].astype(np.int64) & THROTTLING_MASK
    near = joined(times, samples.period_of(f"gpu.{gpu}.clock_reasons"))
    middle = (times[:-1] + np.diff(times) // 2 - window[0]) / 1e9
    own = (times - window[0]) / 1e9
    begins = np.concatenate([own[:1], np.where(near, middle, own[1:])])
    ends = np.concatenate([np.where(near, middle, own[:-1]), own[-1:]])
    stretches: list[Stretch] = []
    for index in np.flatnonzero(masks).tolist():
        name, begin, end = ", ".join(throttling_names(int(masks[index]))), float(begins[index]), float(ends[index])
        if stretches and stretches[-1].name == name and stretches[-1].end_s == begin:
            stretches[-1] = replace(stretches[-1], end_s=end)
        else:
            stretches.append(Stretch(lane=lane, begin_s=begin, end_s=end, name=name))
    return _joined_stretches(stretches)


def _joined_stretches(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """At most `MAX_STRETCHES`: those that are nearest to each other become one, which says so."""
    breaks = [after.begin_s - before.end_s for before, after in itertools.pairwise(stretches)]
    widest = sorted(range(len(breaks)), key=lambda place: -breaks[place])[: MAX_STRETCHES - 1]
    edges = [0, *sorted(place + 1 for place in widest), len(stretches)]
    return tuple(_one_stretch(stretches[begin:end]) for begin, end in itertools.pairwise(edges) if begin < end)


def _one_stretch(stretches: Sequence[Stretch]) -> Stretch:
    if len(stretches) == 1:
        return stretches[0]
    names = ", ".join(dict.fromkeys(stretch.name for stretch in stretches))
    return replace(stretches[0], end_s=stretches[-1].end_s, name=f"{names} (at times)")


def cpu_fields(samples: NodeSamples) -> list[str]:
    """The fields whose mean is how busy the node's cores were; none where they were not sampled."""
    cores = [name for name in samples.columns if re.fullmatch(r"host\.cpu\.\d+\.busy", name)]
    return cores or [name for name in ("host.cpu.mean.busy",) if name in samples.columns]


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
        sm_clock_hz=_mean(of_gpus("sm_clock_hz", lambda summary: summary.mean)),
        gpu_utilisation=_mean(of_gpus("utilization", lambda summary: summary.mean)),
        sm_active=_mean(of_gpus("sm_active", lambda summary: summary.mean)),
        tensor_active=_mean(of_gpus("tensor_active", lambda summary: summary.mean)),
        dram_active=_mean(of_gpus("dram_active", lambda summary: summary.mean)),
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
