"""One run over time: which GPUs and nodes are drawn, and which of their samples."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlbench.errors import IncompleteDataError
from dlbench.reading.samples.gpu_use import computes_on_gpu, gpus_of_ranks
from dlbench.reading.samples.integral import counter_curve, joined
from dlbench.reading.samples.node_means import COUNTERS, NodeTelemetry
from dlbench.reading.samples.node_samples import Interval, NodeSamples, NodeStages, node_stages, read_node
from dlbench.reading.samples.readings import MachineReading
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import CLOCK_REASONS, THROTTLING_MASK, throttling_names

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


MAX_LANES = 3
"""GPUs, or nodes without any, that are drawn over time."""

_AT_REST = 1e4
"""Bytes per second below which a network or a disk is not worth a panel."""

_THROTTLING = {reason.name for reason in CLOCK_REASONS if reason.is_throttling}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel."""

    lane: str
    points: tuple[tuple[float, float | None], ...]
    """Seconds from the begin of the measured window, and a value in the panel's unit; None within a gap."""
    mean: float | None
    """Over the measured window, in the panel's unit; None where nothing is known."""
    lowest: float | None
    highest: float | None

    @property
    def num_gaps(self) -> int:
        """Gaps of the line as it is drawn."""
        return sum(value is None for _, value in self.points)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity over time."""

    name: str
    title: str
    unit: str
    """`W`, `MHz`, `%`, `GiB`, `MiB/s`."""
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run over time, on the clock of each node; second 0 is the begin of the measured window."""

    run_id: str
    ranks: int
    nodes: int
    window_s: float
    lanes: tuple[str, ...]
    """`GPU 0 of n0`, `n0`."""
    panels: tuple[Panel, ...]
    stages: tuple[Stretch, ...]
    throttled: tuple[Stretch, ...]

    def throttled_shares(self) -> dict[tuple[str, str], float]:
        """Share of the measured window (1) in which a lane's clock was held down, by lane and reason."""
        shares: dict[tuple[str, str], float] = {}
        for one in self.throttled:
            inside = max(0.0, min(one.end_s, self.window_s) - max(one.begin_s, 0.0))
            shares[one.lane, one.name] = shares.get((one.lane, one.name), 0.0) + inside / self.window_s
        return shares


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


@dataclass(frozen=True, kw_only=True)
class _Lane:
    node: int
    gpu: int | None
    samples: NodeSamples
    stages: NodeStages
    host: str
    """Unique among the nodes of the run."""

    @property
    def name(self) -> str:
        return self.host if self.gpu is None else f"GPU {self.gpu} of {self.host}"


def timeline(run: Run, reading: MachineReading, notes: list[str]) -> Timeline | None:
    """A run over time, from its most throttled nodes; None where nothing can be drawn, with the reason in `notes`."""
    try:
        lanes = _lanes(run, reading)
    except IncompleteDataError as error:
        notes.append(f"not drawn: {error}")
        return None
    by_node: dict[int, _Lane] = {}
    for lane in lanes:
        by_node.setdefault(lane.node, lane)
    panels = [panel for panel in (*_gpu_panels(lanes, reading), *_host_panels(by_node, reading)) if panel is not None]
    if not panels:
        return None
    window = lanes[0].stages.measured
    return Timeline(
        run_id=run.plan.run_id,
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        window_s=(window[1] - window[0]) / 1e9,
        lanes=tuple(dict.fromkeys(line.lane for panel in panels for line in panel.lines)),
        panels=tuple(panels),
        stages=tuple(one for lane in by_node.values() for one in stage_stretches(lane.host, lane.stages)),
        throttled=tuple(
            one
            for lane in lanes
            if lane.gpu is not None
            for one in throttled_stretches(lane.name, lane.samples, lane.gpu, lane.stages.measured)
        ),
    )


def _lanes(run: Run, reading: MachineReading) -> list[_Lane]:
    """The most throttled GPU, the first GPU of the first node, and others spread over the run."""
    ranked = sorted(reading.nodes, key=lambda node: (-(_worst(node) or 0.0), node.node_rank))
    spread = [node.node_rank for node in reading.nodes][:: -(-len(reading.nodes) // MAX_LANES)]
    ordered = dict.fromkeys([ranked[0].node_rank, *spread])
    wanted = list(ordered)[:MAX_LANES]
    summaries = {node.node_rank: node for node in reading.nodes}
    lanes: list[_Lane] = []
    spare: list[_Lane] = []
    for node in wanted:
        samples, stages = read_node(run, node, lambda name: True), node_stages(run, node)
        gpus = gpus_of_ranks(run, samples).gpus if computes_on_gpu(run, node) else ()
        worst = worst_throttled(summaries[node], gpus)
        first = worst[1] if worst is not None and worst[0] > 0 else next(iter(gpus), None)
        host = _host(summaries[node], reading)
        lanes.append(_Lane(node=node, gpu=first, samples=samples, stages=stages, host=host))
        spare += [dataclasses.replace(lanes[-1], gpu=gpu) for gpu in gpus if gpu != first]
    return [*lanes, *spare][:MAX_LANES]


def _worst(node: NodeTelemetry) -> float | None:
    gpus = [int(name.removeprefix("gpu.")) for name in node.clock_reasons]
    worst = worst_throttled(node, gpus)
    return None if worst is None else worst[0]


_GPU_PANELS = (
    # Field, title, unit, factor to the unit.
    ("power_w", "Power of a GPU", "W", 1.0),
    ("sm_clock_hz", "SM clock", "MHz", 1e-6),
    ("utilization", "GPU utilisation", "%", 100.0),
    ("tensor_active", "Tensor cores active", "%", 100.0),
    ("dram_active", "GPU memory bandwidth used", "%", 100.0),
)


def _gpu_panels(lanes: Sequence[_Lane], reading: MachineReading) -> list[Panel | None]:
    chosen = [lane for lane in lanes if lane.gpu is not None]
    return [
        _panel(
            (field, title, unit, factor),
            [(lane.name, lane, [f"gpu.{lane.gpu}.{field}"], f"gpu.{lane.gpu}.{field}") for lane in chosen],
            reading,
        )
        for field, title, unit, factor in _GPU_PANELS
    ]


def _host_panels(by_node: Mapping[int, _Lane], reading: MachineReading) -> list[Panel | None]:
    lanes = list(by_node.values())

    def panel(
        name: str, title: str, unit: str, factor: float, fields: Callable[[_Lane], list[str]] | None = None
    ) -> Panel | None:
        spec = name, title, unit, factor
        members = [(lane.host, lane, fields(lane) if fields else [name], name) for lane in lanes]
        return _panel(spec, members, reading)

    found = [
        panel("host.cpu.busy", "CPU busy", "%", 100.0, lambda lane: cpu_fields(lane.samples)),
        panel("host.memory_used_bytes", "Host memory", "GiB", 2**-30),
    ]
    for what, title in (("received", "receives"), ("sent", "sends")):
        pattern = rf"host\.(?:net|infiniband)\.(.+)\.{what}_bytes"
        interface = re.fullmatch(pattern, _busiest(reading, pattern))
        if interface is not None:
            found.append(panel(interface[0], f"{interface[1]} {title}", "MiB/s", 2**-20))
    pattern = r"host\.disk\.(.+)\.read_bytes"
    disk = re.fullmatch(pattern, _busiest(reading, pattern))
    if disk is not None:
        found.append(panel(disk[0], f"Disk {disk[1]} reads", "MiB/s", 2**-20))
    return found


_Spec = tuple[str, str, str, float]
"""Name, title, unit, factor to the unit."""
_Member = tuple[str, _Lane, list[str], str]
"""Name of the line, its lane, the fields it is made of, and the field whose summary is its mean."""


def _host(node: NodeTelemetry, reading: MachineReading) -> str:
    is_unique = sum(other.host == node.host for other in reading.nodes) == 1
    return node.host if node.host and is_unique else f"{node.host} (node {node.node_rank})".strip()


def _busiest(reading: MachineReading, pattern: str) -> str:
    """The counter with the highest rate of all nodes; empty where all were as good as at rest."""
    known = [
        (summary.mean, name)
        for node in reading.nodes
        for name, summary in node.fields.items()
        if re.fullmatch(pattern, name) and summary.mean > _AT_REST
    ]
    return max(known)[1] if known else ""


def _panel(spec: _Spec, members: Sequence[_Member], reading: MachineReading) -> Panel | None:
    name, title, unit, factor = spec
    summaries = {node.node_rank: node.fields for node in reading.nodes}
    lines = []
    for label, lane, fields, summary_name in members:
        if not fields or not set(fields) <= lane.samples.columns.keys():
            continue
        points = series(lane.samples, fields, lane.stages.measured)
        of_node = summaries[lane.node]
        summary = of_node.get(summary_name) or of_node.get(fields[0])
        if not points or summary is None:
            continue
        lines.append(
            Line(
                lane=label,
                points=tuple((_rounded(t), None if v is None else _rounded(v * factor)) for t, v in points),
                mean=summary.mean * factor,
                lowest=summary.lowest * factor,
                highest=summary.highest * factor,
            )
        )
    return Panel(name=name, title=title, unit=unit, lines=tuple(lines)) if lines else None


def _rounded(value: float) -> float:
    """Four digits are more than a line shows."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(f"{value:.6g}")
