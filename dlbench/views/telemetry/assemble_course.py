"""One run over time becomes part of the `Report`: which GPUs and nodes are drawn, and what of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlbench.errors import IncompleteDataError
from dlbench.reading.samples.gpu_use import computes_on_gpu, gpus_of_ranks
from dlbench.reading.samples.node_means import Telemetry as NodeTelemetry
from dlbench.reading.samples.node_samples import NodeCourse, NodeSamples, node_course, read_node
from dlbench.reading.samples.readings import MachineReading
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import CLOCK_REASONS
from dlbench.report.wording import clean
from dlbench.views.machine import model
from dlbench.views.telemetry.series import Bar, cpu_fields, series, stage_bars, throttled_bars

MAX_LANES = 3
"""GPUs, or nodes without any, that are drawn over time."""
NAME_LENGTH = 64
"""Of a host, characters."""

_AT_REST = 1e4
"""Bytes a second below which a network or a disk is not worth a panel."""

_THROTTLING = {reason.name for reason in CLOCK_REASONS if reason.is_throttling}


def worst_throttled(node: NodeTelemetry, gpus: Iterable[int]) -> tuple[float, int, str] | None:
    """Share of the time (1), number of the GPU and reason that held a clock down most; None where none tells."""
    told = [
        (share, gpu, reason)
        for gpu in gpus
        if f"gpu.{gpu}" in node.clock_reasons
        for reason, share in ({"": 0.0} | node.clock_reasons[f"gpu.{gpu}"]).items()
        if not reason or reason in _THROTTLING
    ]
    return max(told, key=lambda one: one[0], default=None)


@dataclass(frozen=True, kw_only=True)
class _Lane:
    node: int
    gpu: int | None
    samples: NodeSamples
    course: NodeCourse
    host: str
    """Unique among the nodes of the run."""

    @property
    def name(self) -> str:
        return self.host if self.gpu is None else f"GPU {self.gpu} of {self.host}"


def course(run: Run, reading: MachineReading, notes: list[str]) -> model.Course | None:
    """A run over time, from its most telling nodes; None where nothing can be drawn, with the reason in `notes`."""
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
    window = lanes[0].course.measured
    return model.Course(
        run_id=run.plan.run_id,
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        window_s=(window[1] - window[0]) / 1e9,
        lanes=tuple(dict.fromkeys(line.lane for panel in panels for line in panel.lines)),
        panels=tuple(panels),
        stages=tuple(one for lane in by_node.values() for one in _stretches(lane.host, stage_bars(lane.course))),
        throttled=tuple(
            one
            for lane in lanes
            if lane.gpu is not None
            for one in _stretches(lane.name, throttled_bars(lane.samples, lane.gpu, lane.course.measured))
        ),
    )


def _stretches(lane: str, bars: Iterable[Bar]) -> list[model.Stretch]:
    return [model.Stretch(lane=lane, begin_s=bar.begin_s, end_s=bar.end_s, name=bar.name) for bar in bars]


def _lanes(run: Run, reading: MachineReading) -> list[_Lane]:
    """The most throttled GPU, the first GPU of the first node, and others spread over the run."""
    ranked = sorted(reading.nodes, key=lambda node: (-(_worst(node) or 0.0), node.node_rank))
    ordered = dict.fromkeys([ranked[0].node_rank, *_spread([node.node_rank for node in reading.nodes], MAX_LANES)])
    wanted = list(ordered)[:MAX_LANES]
    summaries = {node.node_rank: node for node in reading.nodes}
    lanes: list[_Lane] = []
    spare: list[_Lane] = []
    for node in wanted:
        samples, course = read_node(run, node, lambda name: True), node_course(run, node)
        gpus = gpus_of_ranks(run, samples).gpus if computes_on_gpu(run, node) else ()
        worst = worst_throttled(summaries[node], gpus)
        first = worst[1] if worst is not None and worst[0] > 0 else next(iter(gpus), None)
        host = _host(summaries[node], reading)
        lanes.append(_Lane(node=node, gpu=first, samples=samples, course=course, host=host))
        spare += [dataclasses.replace(lanes[-1], gpu=gpu) for gpu in gpus if gpu != first]
    return [*lanes, *spare][:MAX_LANES]


def _worst(node: NodeTelemetry) -> float | None:
    gpus = [int(name.removeprefix("gpu.")) for name in node.clock_reasons]
    worst = worst_throttled(node, gpus)
    return None if worst is None else worst[0]


def _spread(items: Sequence[int], most: int) -> list[int]:
    return list(items[:: -(-len(items) // most)])


_GPU_PANELS = (
    # Field, title, unit, factor to the unit.
    ("power_w", "Power of a GPU", "W", 1.0),
    ("sm_clock_hz", "SM clock", "MHz", 1e-6),
    ("utilization", "GPU utilisation", "%", 100.0),
)


def _gpu_panels(lanes: Sequence[_Lane], reading: MachineReading) -> list[model.Panel | None]:
    chosen = [lane for lane in lanes if lane.gpu is not None]
    return [
        _panel(
            (field, title, unit, factor),
            [(lane.name, lane, [f"gpu.{lane.gpu}.{field}"], f"gpu.{lane.gpu}.{field}") for lane in chosen],
            reading,
        )
        for field, title, unit, factor in _GPU_PANELS
    ]


def _host_panels(by_node: Mapping[int, _Lane], reading: MachineReading) -> list[model.Panel | None]:
    lanes = list(by_node.values())

    def panel(
        name: str, title: str, unit: str, factor: float, fields: Callable[[_Lane], list[str]] | None = None
    ) -> model.Panel | None:
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
            found.append(panel(interface[0], f"{clean(interface[1], 30)} {title}", "MiB/s", 2**-20))
    pattern = r"host\.disk\.(.+)\.read_bytes"
    disk = re.fullmatch(pattern, _busiest(reading, pattern))
    if disk is not None:
        found.append(panel(disk[0], f"Disk {clean(disk[1], 30)} reads", "MiB/s", 2**-20))
    return found


_Spec = tuple[str, str, str, float]
"""Name, title, unit, factor to the unit."""
_Member = tuple[str, _Lane, list[str], str]
"""Name of the line, its lane, the fields it is made of, and the field whose summary is its mean."""


def _host(node: NodeTelemetry, reading: MachineReading) -> str:
    host = clean(node.host, NAME_LENGTH)
    is_unique = sum(clean(other.host, NAME_LENGTH) == host for other in reading.nodes) == 1
    return host if host and is_unique else f"{host} (node {node.node_rank})".strip()


def _busiest(reading: MachineReading, pattern: str) -> str:
    """The counter with the highest rate of all nodes; empty where all were as good as at rest."""
    told = [
        (summary.mean, name)
        for node in reading.nodes
        for name, summary in node.fields.items()
        if re.fullmatch(pattern, name) and summary.mean > _AT_REST
    ]
    return max(told)[1] if told else ""


def _panel(spec: _Spec, members: Sequence[_Member], reading: MachineReading) -> model.Panel | None:
    name, title, unit, factor = spec
    summaries = {node.node_rank: node.fields for node in reading.nodes}
    lines = []
    for label, lane, fields, summary_name in members:
        if not fields or not set(fields) <= lane.samples.columns.keys():
            continue
        points = series(lane.samples, fields, lane.course.measured)
        told = summaries[lane.node]
        summary = told.get(summary_name) or told.get(fields[0])
        if not points or summary is None:
            continue
        lines.append(
            model.Line(
                lane=label,
                points=tuple((_rounded(t), None if v is None else _rounded(v * factor)) for t, v in points),
                mean=summary.mean * factor,
                lowest=summary.lowest * factor,
                highest=summary.highest * factor,
            )
        )
    return model.Panel(name=name, title=title, unit=unit, lines=tuple(lines)) if lines else None


def _rounded(value: float) -> float:
    """Four digits are more than a line shows."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(f"{value:.6g}")
