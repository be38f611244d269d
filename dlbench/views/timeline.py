"""One run over time: which GPUs and nodes are drawn, and which of their samples."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlbench.analysis.telemetry.integral import counter_curve, joined
from dlbench.analysis.telemetry.node_means import COUNTERS, NodeTelemetry
from dlbench.analysis.telemetry.node_samples import (
    Interval,
    NodeSamples,
    NodeStages,
    every_field,
    node_stages,
    read_node,
)
from dlbench.analysis.telemetry.readings import MachineReading
from dlbench.analysis.telemetry.throttling import computes_on_gpu, gpus_of_ranks
from dlbench.errors import IncompleteDataError
from dlbench.lazy import Array, Flags, Times, alt, np
from dlbench.records.scan import Run
from dlbench.records.throttle_reasons import CLOCK_REASONS, THROTTLING_MASK, throttling_names
from dlbench.report.charts.chart import Chart, inline, tooltips
from dlbench.report.charts.style import MUTED, RANK_COLOURS, STAGE_COLOURS, SUBTITLE_PIXELS, si_label
from dlbench.report.table import text_sheet
from dlbench.report.wording import percent
from dlbench.units import format_number, format_seconds
from dlbench.views.model import Group
from dlbench.views.view import place_of

MAX_POINTS = 200  # Points of a line, those without a value counted.
MAX_STRETCHES = 40  # Of a lane: further ones are joined to their nearest neighbours.


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A time in which a lane was at a stage, or throttled."""

    lane: str  # Name of a GPU or a node.
    begin_s: float
    end_s: float
    name: str  # The stage, or the reasons.


def series(samples: NodeSamples, names: Sequence[str], window: Interval) -> tuple[tuple[float, float | None], ...]:
    """The mean (host.cpu.N.busy) or sum (anything else) of fields over time; of counters the rate, per second.

    Fields are of one kind, and all sampled; second 0 is the begin of the window. None stands within a gap.
    """
    times, values, gap_behind = _values(samples, names)
    if not len(values):
        return ()
    found: list[tuple[float, float | None]] = []
    chosen = thinned(times, values, gap_behind)
    holes = np.concatenate([[0], np.cumsum(gap_behind)])
    for place, index in enumerate(chosen):
        if place and holes[index] != holes[chosen[place - 1]]:
            middle = (int(times[index]) + int(times[chosen[place - 1]])) // 2
            found.append(((middle - window[0]) / 1e9, None))
        found.append(((int(times[index]) - window[0]) / 1e9, float(values[index])))
    return tuple(found)


def _values(samples: NodeSamples, names: Sequence[str]) -> tuple[Times, Array, Flags]:
    """Times, values, and whether nothing is known between a value and the next, shape (n - 1,)."""
    period_s = max(samples.period_of(name) for name in names)
    each = [samples.columns[name] for name in names]
    if COUNTERS.fullmatch(names[0]):
        # The rate between neighbouring samples, in the middle between them; what a gap bridges is not drawn.
        curve = counter_curve(samples.time_ns, np.sum(each, axis=0), period_s)
        drawn = np.flatnonzero(curve.known & ~curve.bridged)
        start, stop = curve.time_ns[:-1][drawn], curve.time_ns[1:][drawn]
        return start + (stop - start) // 2, curve.begin_rate[drawn], np.diff(drawn) != 1
    values = np.mean(each, axis=0) if names[0].endswith("busy") else np.sum(each, axis=0)
    held = np.isfinite(values)
    times = samples.time_ns[held]
    return times, values[held], ~joined(times, period_s)


def thinned(time_ns: Times, values: Array, gap_behind: Flags, max_points: int = MAX_POINTS) -> list[int]:
    """Which points stand for all: the smallest and largest of equal spans of time, both sides of the longest gaps.

    With a point in every gap between two chosen ones there are at most `max_points`.

    `time_ns` grows and `values` are finite, both of shape (n,); `gap_behind`, of shape (n - 1,), says whether nothing
    is known between a point and the next. `max_points`: at least 50.
    """
    count = len(time_ns)
    gaps = np.flatnonzero(gap_behind)
    if count + len(gaps) <= max_points:
        return list(range(count))
    longest = gaps[np.argsort(np.diff(time_ns)[gaps], kind="stable")[::-1][:10]]
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
    found = [stretches[begin:end] for begin, end in itertools.pairwise(edges) if begin < end]
    names = [", ".join(dict.fromkeys(one.name for one in together)) for together in found]
    return tuple(
        together[0] if len(together) == 1 else replace(together[0], end_s=together[-1].end_s, name=f"{name} (at times)")
        for together, name in zip(found, names, strict=True)
    )


MAX_LANES = 3  # GPUs, or nodes without any, that are drawn over time.

_THROTTLING = {reason.name for reason in CLOCK_REASONS if reason.is_throttling}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel."""

    lane: str
    points: tuple[tuple[float, float | None], ...]
    """Seconds from the begin of the measured window, and a value in the panel's unit; None within a gap."""
    mean: float | None  # Over the measured window, in the panel's unit; None where nothing is known.
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
    unit: str  # `W`, `MHz`, `%`, `GiB`, `MiB/s`.
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run over time, on the clock of each node; second 0 is the begin of the measured window."""

    run_id: str
    ranks: int
    nodes: int
    window_s: float
    lanes: tuple[str, ...]  # `GPU 0 of n0`, `n0`.
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
    host: str  # Unique among the nodes of the run.

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
    panels = tuple(_panels(lanes, by_node, reading))
    if not panels:
        return None
    window = lanes[0].stages.measured
    return Timeline(
        run_id=run.plan.run_id,
        ranks=run.plan.layout.ranks,
        nodes=run.plan.layout.nodes,
        window_s=(window[1] - window[0]) / 1e9,
        lanes=tuple(dict.fromkeys(line.lane for panel in panels for line in panel.lines)),
        panels=panels,
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

    def throttled(node: NodeTelemetry) -> float:
        worst = worst_throttled(node, [int(name.removeprefix("gpu.")) for name in node.clock_reasons])
        return worst[0] if worst else 0.0

    ranked = sorted(reading.nodes, key=lambda node: (-throttled(node), node.node_rank))
    spread = [node.node_rank for node in reading.nodes][:: -(-len(reading.nodes) // MAX_LANES)]
    summaries = {node.node_rank: node for node in reading.nodes}
    lanes: list[_Lane] = []
    spare: list[_Lane] = []
    for node in list(dict.fromkeys([ranked[0].node_rank, *spread]))[:MAX_LANES]:
        samples, stages = read_node(run, node, every_field), node_stages(run, node)
        gpus = gpus_of_ranks(run, samples).gpus if computes_on_gpu(run, node) else ()
        worst = worst_throttled(summaries[node], gpus)
        first = worst[1] if worst is not None and worst[0] > 0 else next(iter(gpus), None)
        host = summaries[node].host
        if not host or sum(other.host == host for other in reading.nodes) > 1:
            host = f"{host} (node {node})".strip()
        lanes.append(_Lane(node=node, gpu=first, samples=samples, stages=stages, host=host))
        spare += [replace(lanes[-1], gpu=gpu) for gpu in gpus if gpu != first]
    return [*lanes, *spare][:MAX_LANES]


def _panels(lanes: Sequence[_Lane], by_node: Mapping[int, _Lane], reading: MachineReading) -> Iterator[Panel]:
    """Of GPUs, then of nodes; those that no lane has samples of are missing."""
    summaries = {node.node_rank: node.fields for node in reading.nodes}

    def panel(title: str, unit: str, factor: float, name: str, *, is_gpu: bool = False) -> Iterator[Panel]:
        lines = []
        for lane in lanes if is_gpu else by_node.values():
            whole = f"gpu.{lane.gpu}.{name}" if is_gpu else name
            fields = _cpu_fields(lane) if name == "host.cpu.busy" else [whole]
            if (is_gpu and lane.gpu is None) or not fields or not set(fields) <= lane.samples.columns.keys():
                continue
            points = series(lane.samples, fields, lane.stages.measured)
            of_node = summaries[lane.node]
            summary = of_node.get(whole) or of_node.get(fields[0])
            if points and summary is not None:
                line = Line(
                    lane=lane.name if is_gpu else lane.host,
                    points=tuple((_rounded(t), None if v is None else _rounded(v * factor)) for t, v in points),
                    mean=summary.mean * factor,
                    lowest=summary.lowest * factor,
                    highest=summary.highest * factor,
                )
                lines.append(line)
        if lines:
            yield Panel(name=name, title=title, unit=unit, lines=tuple(lines))

    yield from panel("Power of a GPU", "W", 1.0, "power_w", is_gpu=True)
    yield from panel("SM clock", "MHz", 1e-6, "sm_clock_hz", is_gpu=True)
    yield from panel("GPU utilisation", "%", 100.0, "utilization", is_gpu=True)
    yield from panel("Tensor cores active", "%", 100.0, "tensor_active", is_gpu=True)
    yield from panel("GPU memory bandwidth used", "%", 100.0, "dram_active", is_gpu=True)
    yield from panel("CPU busy", "%", 100.0, "host.cpu.busy")
    yield from panel("Host memory", "GiB", 2**-30, "host.memory_used_bytes")
    for pattern, title in (
        (r"host\.(?:net|infiniband)\.(.+)\.received_bytes", "{} receives"),
        (r"host\.(?:net|infiniband)\.(.+)\.sent_bytes", "{} sends"),
        (r"host\.disk\.(.+)\.read_bytes", "Disk {} reads"),
    ):
        # The counter with the highest rate of all nodes; below 10 kB/s it is at rest.
        fields = [summary for node in reading.nodes for summary in node.fields.items()]
        known = [(one.mean, name) for name, one in fields if re.fullmatch(pattern, name) and one.mean > 1e4]
        if known and (found := re.fullmatch(pattern, max(known)[1])):
            yield from panel(title.format(found[1]), "MiB/s", 2**-20, found[0])


def _cpu_fields(lane: _Lane) -> list[str]:
    """The fields whose mean is how busy the node's cores were; none where they were not sampled."""
    cores = [name for name in lane.samples.columns if re.fullmatch(r"host\.cpu\.\d+\.busy", name)]
    return cores or [name for name in ("host.cpu.mean.busy",) if name in lane.samples.columns]


def _rounded(value: float) -> float:
    """Four digits are more than a line shows."""
    return float(f"{value:.4g}") if abs(value) < 1000 else float(f"{value:.6g}")


_WIDTH = 640

MIN_SAMPLES = 3  # Samples in the measured window below which there is no series to draw.


def timeline_chart(group: Group, found: Timeline) -> Chart:
    """Stages and throttling as bars, then a panel for each quantity."""
    # A little more than the measured window and the stages around it; a long building would leave it no room.
    first = max(min([0.0, *(one.begin_s for one in found.stages)]), -found.window_s)
    last = min(max([found.window_s, *(one.end_s for one in found.stages)]), 2 * found.window_s)
    ends = [round(first, 3), round(last, 3)]
    stages = dict.fromkeys(one.name for one in found.stages)
    colours = {stage: colour for stage, colour in STAGE_COLOURS.items() if stage in stages} | {
        stage: MUTED for stage in stages if stage not in STAGE_COLOURS
    }
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    legend = alt.Legend(orient="top", columns=6, offset=2)
    stage_colour = alt.Color("what:N", title=None, scale=scale, legend=legend)
    strips = [_strip(alt, "Stages", found.stages, ends, stage_colour)]
    if found.throttled:
        strips.append(_strip(alt, "Throttled", found.throttled, ends, alt.value("#d55e00")))
    panels = [_drawn(alt, panel, found, ends, is_first=not place) for place, panel in enumerate(found.panels)]
    stack = alt.vconcat(*strips, *panels, spacing=6).resolve_scale(color="independent")
    words, title = finding(found), f"One run over time at {place_of(found)}"
    spec: dict[str, Any] = stack.properties(description=words).to_dict()
    spec.pop("config", None)
    # Only the lowest chart says what time it is.
    for unit in spec["vconcat"][-1]["layer"]:
        encoding = unit.get("encoding", {}).get("x")
        if encoding is not None and "axis" in encoding:
            encoding["axis"] = {"grid": False, "tickCount": 8, "labelExpr": si_label("s")}
            encoding["title"] = "time since the measured steps began"
    subtitle = textwrap.wrap(f"{found.run_id}, {group.label}", int(_WIDTH / SUBTITLE_PIXELS), max_lines=3)
    spec["title"] = {"text": title, "subtitle": subtitle}
    spec["usermeta"] = {"axes": "", "series": None}
    lines = [(panel, line) for panel in found.panels for line in panel.lines]
    rows: list[tuple[str | int | None, ...]] = [
        (
            panel.title,
            line.lane,
            *(
                None if value is None else f"{format_number(value)} {panel.unit}"
                for value in (line.mean, line.lowest, line.highest)
            ),
            line.num_gaps,
        )
        for panel, line in lines
    ]
    for (lane, reason), share in found.throttled_shares().items():
        rows.append((f"throttled: {reason}", lane, percent(share), None, None, None))
    header = ("What", "Of", "Mean", "Lowest", "Highest", "Gaps drawn")
    table = text_sheet("timeline", "One run over time", header, rows).to_display()
    return Chart(id=f"chart-{group.id}-telemetry", title=title, alt=words, spec=spec, table=table)


def is_series(timeline: Timeline) -> bool:
    """Whether some line has samples enough in the measured window to be drawn over time."""
    return any(
        sum(value is not None and 0 <= t <= timeline.window_s for t, value in line.points) >= MIN_SAMPLES
        for panel in timeline.panels
        for line in panel.lines
    )


def finding(timeline: Timeline) -> str:
    """What the lines show, in words: the mean of a panel's lines, or the lowest and the highest where they differ."""
    parts = []
    for panel in timeline.panels:
        means = sorted((line.mean, line.lane) for line in panel.lines if line.mean is not None)
        if means:
            (low, first), (high, last) = means[0], means[-1]
            text = f"{format_number(high, 3)} {panel.unit}"
            if high - low > 0.02 * abs(high):
                text = f"{format_number(low, 3)} {panel.unit} at {first} to {text} at {last}"
            title = "a GPU's power" if panel.name == "power_w" else panel.title
            parts.append(f"{title} {text}")
    held: dict[str, float] = {}
    for (lane, _), share in timeline.throttled_shares().items():
        held[lane] = held.get(lane, 0.0) + share
    clocks = [f"{lane} was throttled in {percent(share)} of it" for lane, share in held.items()]
    has_gaps = any(line.num_gaps for panel in timeline.panels for line in panel.lines)
    broken = ["gaps in the lines are times without samples"] if has_gaps else []
    means_text = f"Means over {format_seconds(timeline.window_s)}: {'; '.join(parts)}" if parts else ""
    return "".join(f"{text[0].upper()}{text[1:]}. " for text in (means_text, *clocks, *broken) if text).rstrip()


def _x(alt: Any, field: str, ends: list[float]) -> Any:
    return (
        alt.X(field, title=None)
        .scale(domain=ends, nice=False, clamp=True)
        .axis(labels=False, ticks=False, domain=False, grid=False)
    )


def _strip(alt: Any, title: str, stretches: tuple[Stretch, ...], ends: list[float], colour: Any) -> Any:
    lanes = list(dict.fromkeys(one.lane for one in stretches))
    rows = [
        {
            "lane": one.lane,
            "from": max(ends[0], round(one.begin_s, 3)),
            "to": min(ends[1], round(one.end_s, 3)),
            "what": one.name,
            "for": format_seconds(one.end_s - one.begin_s),
        }
        for one in stretches
        if one.end_s > ends[0] and one.begin_s < ends[1]
    ]
    tooltip = tooltips({"lane:N": "at", "what:N": title.lower(), "for:N": "for"})
    y = alt.Y("lane:N", title=None, sort=lanes).axis(ticks=False, domain=False, labelLimit=150)
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.8})
        .encode(x=_x(alt, "from:Q", ends), x2="to:Q", y=y, color=colour, tooltip=tooltip)
        .properties(width=_WIDTH, height=15 * max(1, len(lanes)), title=_chart_title(alt, title))
    )


def _chart_title(alt: Any, text: str) -> Any:
    return alt.TitleParams(text, fontSize=11, fontWeight="normal", color=MUTED, anchor="start", offset=3)


def _drawn(alt: Any, panel: Panel, timeline: Timeline, ends: list[float], *, is_first: bool) -> Any:
    window = alt.Chart(alt.InlineData(values=[{"from": 0, "to": round(timeline.window_s, 3)}]))
    # One for one lane; a node has that of its first GPU.
    found: dict[str, str] = {}
    for lane in timeline.lanes:
        of_node = [colour for other, colour in found.items() if other.endswith(f" of {lane}")]
        found[lane] = of_node[0] if of_node else RANK_COLOURS[len(set(found.values())) % len(RANK_COLOURS)]
    colours = found
    layers = [window.mark_rect(color=MUTED, opacity=0.1).encode(x=_x(alt, "from:Q", ends), x2="to:Q")]
    y = alt.Y("v:Q", title=None).scale(**_domain(panel)).axis(tickCount=3, labelExpr="format(datum.value, ',.4~g')")
    tooltip = tooltips({"t:Q:.4~g": "second", "v:Q:.4~g": panel.title})
    x = _x(alt, "t:Q", ends)
    for line in panel.lines:
        shown = [(t, value) for t, value in line.points if ends[0] <= t <= ends[1]]
        data = inline({"t": t, "v": value} for t, value in shown)
        drawn = alt.Chart(data).mark_line(strokeWidth=1.3, color=colours[line.lane])
        layers.append(drawn.encode(x=x, y=y, tooltip=tooltip))
        # Samples with a gap on either side: no line would show them.
        values = [None, *(value for _, value in shown), None]
        alone = [
            {"t": t, "v": value}
            for (t, value), before, after in zip(shown, values, values[2:], strict=False)
            if value is not None and before is None and after is None
        ]
        if alone:
            marks = alt.Chart(alt.InlineData(values=alone))
            layers.append(marks.mark_point(filled=True, size=9, opacity=1, color=colours[line.lane]).encode(x=x, y=y))
    if is_first and len(panel.lines) > 1:
        layers.append(_legend(alt, {line.lane: colours[line.lane] for line in panel.lines}))
    return alt.layer(*layers).properties(
        width=_WIDTH, height=58, title=_chart_title(alt, f"{panel.title}, {panel.unit}")
    )


def _legend(alt: Any, colours: dict[str, str]) -> Any:
    """Nothing is drawn: lines have colours of their own, so that their data need not name them in each row."""
    legend = alt.Legend(
        orient="top", columns=3, title=None, offset=2, symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=2
    )
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    rows = alt.InlineData(values=[{"lane": lane} for lane in colours])
    return alt.Chart(rows).mark_point(opacity=0).encode(color=alt.Color("lane:N", legend=legend, scale=scale))


def _domain(panel: Panel) -> dict[str, Any]:
    """From zero, but for clocks, whose changes are a small part of them."""
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    if panel.unit == "%":
        return {"domain": [0, 100], "nice": False}
    top = max(values, default=0.0) or 1.0
    if panel.unit == "MHz":
        return {"domain": [min(values, default=0.0) * 0.98, top * 1.03], "nice": False, "zero": False}
    return {"domain": [0, top * 1.1], "nice": False}
