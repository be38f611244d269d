"""Telemetry: tables, charts and the sections of a group."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlbench.reading.samples.node_means import FieldSummary, NodeTelemetry
from dlbench.report.charts.chart import Chart, tooltips
from dlbench.report.charts.style import MUTED, RANK_COLOURS, STAGE_COLOURS, SUBTITLE_PIXELS, si_label
from dlbench.report.document import Section
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import percent, place_text
from dlbench.units import format_bytes, format_number, format_seconds
from dlbench.views.model import Group
from dlbench.views.next_step import rerun
from dlbench.views.telemetry.numbers import (
    DetailedTelemetry,
    NodeMeans,
    RunTelemetry,
    Telemetry,
    Unavailable,
    detailed_telemetry,
    telemetry,
)
from dlbench.views.telemetry.timeline import Line, Panel, Stretch, Timeline
from dlbench.views.view import GroupSource, GroupView

MAX_SHOWN = 12
"""Nodes of a rank count that people see: those of the run in the middle; the rest are counted."""
MAX_ROWS = 512
"""Nodes in the table for programs."""
MAX_HOST = 64
"""Characters of a host name."""

_ABOUT_GPUS = "Power: sum over a node's GPUs; clock and utilisation: means; memory and temperature: highest sample."


@dataclass(frozen=True)
class _Row:
    """A node, for people or for programs: they get others, in another order."""

    node: NodeMeans
    is_shown: bool


def means_sheet(found: Telemetry) -> Sheet[_Row]:
    """Means by node; for people without columns of which no node knows anything."""
    shown, left_out = _shown(found)

    def title(text: str, of: Callable[[NodeMeans], object]) -> str:
        return text if any(of(node) is not None for node in shown) else ""

    def shaped(
        name: str, text: str, of: Callable[[NodeMeans], float | None], shape: Callable[[float], str]
    ) -> Column[_Row]:
        def cell(row: _Row) -> Cell | None:
            return None if (value := of(row.node)) is None else Cell(shape(value), number=value)

        return Column(name, title(text, lambda node: of(node) or None), lambda row: of(row.node), cell)

    def rate(name: str, text: str, of: Callable[[NodeMeans], float | None]) -> Column[_Row]:
        return shaped(name, text, of, lambda value: f"{format_bytes(value)}/s")

    def host(node: NodeMeans) -> str:
        return node.host[:MAX_HOST] or f"node {node.node_rank}"

    def number(name: str, text: str, of: Callable[[NodeMeans], float | None], unit: str) -> Column[_Row]:
        return Column(name, title(text, of), lambda row: of(row.node), unit=unit)

    columns: tuple[Column[_Row], ...] = (
        Column("", "At", lambda row: f"{place_text(row.node.ranks, row.node.nodes)}, {host(row.node)}"),
        Column("ranks", "", lambda row: row.node.ranks),
        Column("nodes", "", lambda row: row.node.nodes),
        Column("run_id", "", lambda row: row.node.run_id),
        Column("node", "", lambda row: row.node.node_rank),
        Column("host", "", lambda row: row.node.host, limit=MAX_HOST),
        Column("gpus", "", lambda row: row.node.num_gpus),
        Column(
            "gpu_power_w",
            title("Power of its GPUs", lambda node: node.num_power or None),
            lambda row: row.node.gpu_power_w,
            lambda row: _power(row.node),
        ),
        shaped("sm_clock_hz", "SM clock", lambda node: node.sm_clock_hz, lambda hertz: f"{hertz / 1e6:,.0f} MHz"),
        number("gpu_utilisation", "GPU busy", lambda node: node.gpu_utilisation, "fraction"),
        number("sm_active", "SMs busy", lambda node: node.sm_active, "fraction"),
        number("tensor_active", "Tensor cores", lambda node: node.tensor_active, "fraction"),
        number("dram_active", "GPU memory bandwidth", lambda node: node.dram_active, "fraction"),
        number("gpu_memory_bytes", "GPU memory", lambda node: node.gpu_memory_bytes, "bytes"),
        shaped("gpu_temperature_c", "Hottest GPU", lambda node: node.gpu_temperature_c, lambda one: f"{one:.0f} °C"),
        number("throttled_share", "Throttled", lambda node: node.throttled, "fraction"),
        Column("throttled_by", "", lambda row: row.node.throttled_by),
        number("cpu_busy", "CPU busy", lambda node: node.cpu_busy, "fraction"),
        number("host_memory_bytes", "Host memory", lambda node: node.host_memory_bytes, "bytes"),
        rate("network_received_bytes_per_s", "Received", lambda node: node.network_received),
        rate("network_sent_bytes_per_s", "Sent", lambda node: node.network_sent),
        rate("disk_read_bytes_per_s", "Disks read", lambda node: node.disk_read),
        Column("samples", "Samples", lambda row: row.node.num_samples, unit="samples"),
        Column("gaps", title("Gaps", lambda node: node.num_gaps or None), lambda row: row.node.num_gaps),
        Column(
            "missing_share",
            title("Missing", lambda node: node.missing or None),
            lambda row: row.node.missing,
            unit="fraction",
        ),
    )
    told = [f"Samples of {found.num_read} of {found.num_runs} runs; dlbench diagnose reads them all."]
    about = [*(told if found.num_read != found.num_runs else []), *left_out]
    return Sheet(
        name="telemetry",
        title="Means of the measured window",
        columns=columns,
        rows=[*(_Row(node, False) for node in found.nodes[:MAX_ROWS]), *(_Row(node, True) for node in shown)],
        caption=" ".join([*about, *([_ABOUT_GPUS] if any(n.num_gpus for n in shown) else [])]),
        is_data=lambda row: not row.is_shown,
        is_shown=lambda row: row.is_shown and bool(row.node.num_samples),
    )


def _shown(found: Telemetry) -> tuple[list[NodeMeans], list[str]]:
    """Of each point the run in the middle, else the first that was read, most throttled nodes first; who is missing."""
    points: dict[tuple[int, int], dict[str, list[NodeMeans]]] = {}
    for node in found.nodes:
        points.setdefault((node.ranks, node.nodes), {}).setdefault(node.run_id, []).append(node)
    shown: list[NodeMeans] = []
    left_out: list[str] = []
    middle = found.timeline.run_id if found.timeline is not None else ""
    for place, runs in points.items():
        nodes = runs.get(middle) or next(iter(runs.values()))
        shown += sorted(nodes, key=lambda node: (-(node.throttled or 0.0), node.node_rank))[:MAX_SHOWN]
        if len(nodes) > MAX_SHOWN:
            left_out.append(f"At {place_text(*place)}: {MAX_SHOWN} of {len(nodes)} nodes, the most throttled first.")
    return shown, left_out


def _power(node: NodeMeans) -> Cell | None:
    if node.gpu_power_w is not None:
        return Cell(f"{format_number(node.gpu_power_w)} W", number=node.gpu_power_w)
    return Cell(f"of {node.num_power} of {node.num_gpus} GPUs only") if node.num_power else None


def missing_sheet(unavailable: Sequence[Unavailable]) -> Sheet[Unavailable]:
    """What nodes do not report, and why."""
    columns: tuple[Column[Unavailable], ...] = (
        Column("what", "Missing", lambda item: item.what, limit=120),
        Column("reason", "Why", lambda item: item.reason, limit=300),
        Column("nodes", "Nodes", lambda item: item.num_nodes),
    )
    return Sheet(name="telemetry-missing", title="Not sampled", columns=columns, rows=unavailable, is_folded=True)


def fields_sheet(runs: Sequence[RunTelemetry]) -> Sheet[tuple[RunTelemetry, NodeTelemetry, FieldSummary]]:
    """Every field of every node of every run, in the unit of its name, counters as rates; for programs only."""
    columns: tuple[Column[tuple[RunTelemetry, NodeTelemetry, FieldSummary]], ...] = (
        Column("run_id", "", lambda row: row[0].run_id),
        Column("node", "", lambda row: row[1].node_rank),
        Column("host", "", lambda row: row[1].host, limit=MAX_HOST),
        Column("field", "", lambda row: row[2].name),
        Column("is_rate", "", lambda row: row[2].is_rate),
        Column("mean", "", lambda row: row[2].mean),
        Column("median", "", lambda row: row[2].median),
        Column("lowest", "", lambda row: row[2].lowest),
        Column("highest", "", lambda row: row[2].highest),
        Column("samples", "", lambda row: row[2].num_samples),
    )
    return Sheet(
        name="telemetry-fields",
        title="Fields of each node",
        columns=columns,
        rows=[(run, node, field) for run in runs for node in run.nodes for field in node.fields.values()],
        is_shown=lambda row: False,
    )


@dataclass(frozen=True)
class _Drawn:
    """One line of the chart, or one reason that held down the clock of a lane."""

    what: str
    lane: str
    unit: str = ""
    mean: float | None = None
    lowest: float | None = None
    highest: float | None = None
    num_gaps: int | None = None
    share: float | None = None
    """Of the measured window, of a reason (1)."""


def timeline_sheet(found: Timeline) -> Sheet[_Drawn]:
    """Of every line that is drawn: mean, lowest and highest value in the measured window."""
    columns: tuple[Column[_Drawn], ...] = (
        Column("", "What", lambda row: row.what),
        Column("", "Of", lambda row: row.lane),
        Column("", "Mean", lambda row: _with_unit(row.mean, row) if row.share is None else percent(row.share)),
        Column("", "Lowest", lambda row: _with_unit(row.lowest, row)),
        Column("", "Highest", lambda row: _with_unit(row.highest, row)),
        Column("", "Gaps drawn", lambda row: row.num_gaps),
    )
    return Sheet(name="timeline", title="One run over time", columns=columns, rows=list(_drawn(found)))


def _drawn(found: Timeline) -> Iterator[_Drawn]:
    for panel in found.panels:
        for line in panel.lines:
            ends = {"mean": line.mean, "lowest": line.lowest, "highest": line.highest}
            yield _Drawn(panel.title, line.lane, panel.unit, num_gaps=line.num_gaps, **ends)
    for (lane, reason), share in found.throttled_shares().items():
        yield _Drawn(f"throttled: {reason}", lane, share=share)


def _with_unit(value: float | None, row: _Drawn) -> str | None:
    return None if value is None else f"{format_number(value)} {row.unit}"


_WIDTH = 640
_HEIGHT = 58
_BAR = 15

_IN_WORDS = {"power_w": "a GPU's power"}
"""Panels whose title does not read well in a sentence, by name."""

MIN_SAMPLES = 3
"""Samples in the measured window below which there is no series to draw."""

_ALIKE = 0.02
"""Means that differ by less are one number in words."""

_THROTTLED = "#d55e00"


def telemetry_charts(group: Group, found: Telemetry) -> list[Chart]:
    """The run in the middle of the point with most ranks; none without a series of samples."""
    timeline = found.timeline
    if timeline is None or not is_series(timeline):
        return []
    import altair as alt

    ends = _ends(timeline)
    strips = [_strip(alt, "Stages", timeline.stages, ends, _stage_colour(alt, timeline))]
    if timeline.throttled:
        held = alt.value(_THROTTLED)
        strips.append(_strip(alt, "Throttled", timeline.throttled, ends, held))
    lines = [_panel(alt, panel, timeline, ends, is_first=not place) for place, panel in enumerate(timeline.panels)]
    stack = alt.vconcat(*strips, *lines, spacing=6).resolve_scale(color="independent")
    words = finding(timeline)
    place = place_text(timeline.ranks, timeline.nodes)
    spec: dict[str, Any] = stack.properties(description=words).to_dict()
    spec.pop("config", None)
    _label_last(spec)
    title = f"One run over time at {place}"
    spec["title"] = {
        "text": title,
        "subtitle": textwrap.wrap(f"{timeline.run_id}, {group.label}", int(_WIDTH / SUBTITLE_PIXELS), max_lines=3),
    }
    spec["usermeta"] = {"axes": "", "series": None}
    table = timeline_sheet(timeline).to_display()
    return [Chart(id=f"chart-{group.id}-telemetry", title=title, alt=words, spec=spec, table=table)]


def is_series(timeline: Timeline) -> bool:
    """Whether some line has samples enough in the measured window to be drawn over time."""
    return any(
        sum(value is not None and 0 <= t <= timeline.window_s for t, value in line.points) >= MIN_SAMPLES
        for panel in timeline.panels
        for line in panel.lines
    )


def finding(timeline: Timeline) -> str:
    """What the lines show, in words."""
    parts = [text for panel in timeline.panels if (text := _means(panel))]
    held: dict[str, float] = {}
    for (lane, _), share in timeline.throttled_shares().items():
        held[lane] = held.get(lane, 0.0) + share
    clocks = [f"{lane} was throttled in {percent(share)} of it" for lane, share in held.items()]
    has_gaps = any(line.num_gaps for panel in timeline.panels for line in panel.lines)
    broken = ["gaps in the lines are times without samples"] if has_gaps else []
    means = f"Means over {format_seconds(timeline.window_s)}: {'; '.join(parts)}" if parts else ""
    return "".join(f"{text[0].upper()}{text[1:]}. " for text in (means, *clocks, *broken) if text).rstrip()


def _means(panel: Panel) -> str:
    """The mean of a panel's lines, or the lowest and the highest where they differ."""
    means = sorted((line.mean, line.lane) for line in panel.lines if line.mean is not None)
    if not means:
        return ""
    title = _IN_WORDS.get(panel.name, panel.title)
    (low, first), (high, last) = means[0], means[-1]
    if high - low <= _ALIKE * abs(high):
        return f"{title} {format_number(high, 3)} {panel.unit}"
    ends = f"{format_number(low, 3)} {panel.unit} at {first} to {format_number(high, 3)} {panel.unit} at {last}"
    return f"{title} {ends}"


def _ends(timeline: Timeline) -> list[float]:
    """Begin and end of the axis: a little more than the measured window and the stages around it."""
    begins = [0.0, *(one.begin_s for one in timeline.stages)]
    ends = [timeline.window_s, *(one.end_s for one in timeline.stages)]
    # A long building would leave no room for what is measured.
    first = max(min(begins), -timeline.window_s)
    last = min(max(ends), 2 * timeline.window_s)
    return [round(first, 3), round(last, 3)]


def _x(alt: Any, field: str, ends: list[float]) -> Any:
    return (
        alt.X(field, title=None)
        .scale(domain=ends, nice=False, clamp=True)
        .axis(labels=False, ticks=False, domain=False, grid=False)
    )


def _label_last(spec: dict[str, Any]) -> None:
    """Only the lowest chart says what time it is."""
    for unit in spec["vconcat"][-1]["layer"]:
        encoding = unit.get("encoding", {}).get("x")
        if encoding is not None and "axis" in encoding:
            encoding["axis"] = {"grid": False, "tickCount": 8, "labelExpr": si_label("s")}
            encoding["title"] = "time since the measured steps began"


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
        .properties(width=_WIDTH, height=_BAR * max(1, len(lanes)), title=_chart_title(alt, title))
    )


def _chart_title(alt: Any, text: str) -> Any:
    return alt.TitleParams(text, fontSize=11, fontWeight="normal", color=MUTED, anchor="start", offset=3)


def _stage_colour(alt: Any, timeline: Timeline) -> Any:
    present = [stage for stage in STAGE_COLOURS if any(one.name == stage for one in timeline.stages)]
    others = list(dict.fromkeys(one.name for one in timeline.stages if one.name not in STAGE_COLOURS))
    scale = {
        "domain": [*present, *others],
        "range": [*(STAGE_COLOURS[name] for name in present), *[MUTED] * len(others)],
    }
    return alt.Color("what:N", title=None).scale(**scale).legend(orient="top", columns=6, offset=2)


def _panel(alt: Any, panel: Panel, timeline: Timeline, ends: list[float], *, is_first: bool) -> Any:
    window = alt.Chart(alt.InlineData(values=[{"from": 0, "to": round(timeline.window_s, 3)}]))
    colours = _colours(timeline)
    layers = [
        window.mark_rect(color=MUTED, opacity=0.1).encode(x=_x(alt, "from:Q", ends), x2="to:Q"),
        *(layer for line in panel.lines for layer in _line(alt, panel, line, ends, colours[line.lane])),
    ]
    if is_first and len(panel.lines) > 1:
        layers.append(_legend(alt, {line.lane: colours[line.lane] for line in panel.lines}))
    return alt.layer(*layers).properties(
        width=_WIDTH, height=_HEIGHT, title=_chart_title(alt, f"{panel.title}, {panel.unit}")
    )


def _colours(timeline: Timeline) -> dict[str, str]:
    """One colour for one lane; a node has that of its first GPU."""
    found: dict[str, str] = {}
    for lane in timeline.lanes:
        of_node = [colour for other, colour in found.items() if other.endswith(f" of {lane}")]
        found[lane] = of_node[0] if of_node else RANK_COLOURS[len(set(found.values())) % len(RANK_COLOURS)]
    return found


def _legend(alt: Any, colours: dict[str, str]) -> Any:
    """Nothing is drawn: lines have colours of their own, so that their data need not name them in each row."""
    legend = alt.Legend(
        orient="top", columns=3, title=None, offset=2, symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=2
    )
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    rows = alt.InlineData(values=[{"lane": lane} for lane in colours])
    return alt.Chart(rows).mark_point(opacity=0).encode(color=alt.Color("lane:N", legend=legend, scale=scale))


def _line(alt: Any, panel: Panel, line: Line, ends: list[float], colour: str) -> list[Any]:
    drawn = [(t, value) for t, value in line.points if ends[0] <= t <= ends[1]]
    data = alt.InlineData(values=[{"t": t, "v": value} for t, value in drawn])
    y = alt.Y("v:Q", title=None).scale(**_domain(panel)).axis(tickCount=3, labelExpr="format(datum.value, ',.4~g')")
    tooltip = [alt.Tooltip("t:Q", title="second", format=".4~g"), alt.Tooltip("v:Q", title=panel.title, format=".4~g")]
    x = _x(alt, "t:Q", ends)
    layers = [alt.Chart(data).mark_line(strokeWidth=1.3, color=colour).encode(x=x, y=y, tooltip=tooltip)]
    lonely = _lonely(drawn)
    if lonely:
        rows = alt.InlineData(values=[{"t": t, "v": value} for t, value in lonely])
        layers.append(alt.Chart(rows).mark_point(filled=True, size=9, opacity=1, color=colour).encode(x=x, y=y))
    return layers


def _domain(panel: Panel) -> dict[str, Any]:
    """From zero, but for clocks, whose changes are a small part of them."""
    values = [value for line in panel.lines for _, value in line.points if value is not None]
    if panel.unit == "%":
        return {"domain": [0, 100], "nice": False}
    top = max(values, default=0.0) or 1.0
    if panel.unit == "MHz":
        return {"domain": [min(values, default=0.0) * 0.98, top * 1.03], "nice": False, "zero": False}
    return {"domain": [0, top * 1.1], "nice": False}


def _lonely(points: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Samples with a gap on either side: no line would show them."""
    found = []
    for place, (t, value) in enumerate(points):
        before = points[place - 1][1] if place else None
        after = points[place + 1][1] if place + 1 < len(points) else None
        if value is not None and before is None and after is None:
            found.append((t, value))
    return found


class TelemetryView(GroupView):
    """Power, clocks, utilisation, memory and traffic of the nodes."""

    id = "telemetry"
    title = "Telemetry"
    key = "telemetry"

    def numbers(self, source: GroupSource) -> Telemetry | None:
        return telemetry(source.group, source.table)

    def section(self, group: Group) -> Section | None:
        found = group.of(Telemetry)
        if found is None:
            return None
        sheets: list[Sheet[Any]] = [means_sheet(found), missing_sheet(found.unavailable)]
        if isinstance(found, DetailedTelemetry):
            sheets.append(fields_sheet(found.runs))
        return Section(
            id=self.id,
            title=self.title,
            headline=_headline(found, on_gpu=group.on_gpu),
            words=tuple(_words(found)),
            charts=lambda: telemetry_charts(group, found),
            sheets=tuple(sheet for sheet in sheets if sheet.rows),
        )

    def remedy(self, group: Group) -> str:
        return not_sampled(group)


class DetailedTelemetryView(TelemetryView):
    """The same over the samples of all runs, with every field of every node."""

    def numbers(self, source: GroupSource) -> DetailedTelemetry:
        return detailed_telemetry(source.group, source.table)


def not_sampled(group: Group) -> str:
    """What makes runs with samples."""
    return (
        "No node was sampled, or no sample could be read. Samplers run unless a plan switches them off: "
        f"{rerun(group, '--set watch.sampler=true')}."
    )


def _words(found: Telemetry) -> Iterator[str]:
    sampling = found.sampling
    if sampling is not None:
        if sampling.late_max_s > sampling.period_s:
            yield (
                f"Samples came up to {format_seconds(sampling.late_max_s)} late (one every "
                f"{format_seconds(sampling.period_s)} was asked for)."
            )
        if sampling.dropped:
            yield f"{sampling.dropped:,} samples did not fit into their share of bytes."
    yield from found.notes


def _headline(found: Telemetry, *, on_gpu: bool) -> str:
    """How busy the nodes of the largest rank count are, and whether a clock was throttled."""
    last = (found.nodes[-1].ranks, found.nodes[-1].nodes) if found.nodes else (0, 0)
    own = [node for node in found.nodes if (node.ranks, node.nodes) == last]
    throttling = _throttling(found, on_gpu=on_gpu)
    if sum(node.num_samples for node in own) < MIN_SAMPLES:
        few = f"fewer than {MIN_SAMPLES} samples in the measured steps: too short a run"
        return throttling if any(node.throttled for node in found.nodes) else few
    gpus = [node.gpu_utilisation for node in own if node.gpu_utilisation is not None]
    cpus = [node.cpu_busy for node in own if node.cpu_busy is not None]
    means = (("GPUs", gpus), ("CPU", cpus))
    busy = (f"{name} busy {percent(statistics.fmean(shares), 0)}" for name, shares in means if shares)
    return ", ".join([*busy, throttling])


def _throttling(found: Telemetry, *, on_gpu: bool) -> str:
    known = [node for node in found.nodes if node.throttled is not None]
    worst = max(found.nodes, key=lambda node: (node.throttled or 0.0, node.ranks), default=None)
    if worst is not None and worst.throttled:
        return f"throttled {percent(worst.throttled)} of the time: {worst.host[:20]}, {worst.throttled_by}"
    if known:
        return "no throttling seen"
    return "clock throttling unknown: no GPU was sampled" if on_gpu else "no GPU whose clocks could be read"
