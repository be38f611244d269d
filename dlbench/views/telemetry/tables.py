"""Sheets on telemetry: means of the measured window by rank count and node, and what nodes do not tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlbench.report.model import Group
from dlbench.report.tabular import Table
from dlbench.report.view import Sheet
from dlbench.report.wording import DASH, percent, place_text
from dlbench.stats.figure import Cell
from dlbench.units import format_bytes, format_number
from dlbench.views.telemetry.numbers import NodeMeans, Telemetry
from dlbench.views.telemetry.timeline import Panel, Timeline

MAX_SHOWN = 12
"""Nodes of a rank count that are printed: those of the run in the middle; the rest are counted."""
MAX_ROWS = 512
"""Nodes in the table for programs."""

_Text = Callable[[NodeMeans], str]


def telemetry_sheets(group: Group) -> list[Sheet]:
    """Means by node, and what is missing."""
    found = group.telemetry
    if found is None:
        return []
    sheets = [
        Sheet(
            name="telemetry",
            title="Means of the measured window",
            text=_means(found),
            caption=f"{_read_text(found)} Power: all GPUs of a node together; clocks and utilisation: mean over them; "
            "memory and temperature: highest sample. Network and disks: all of a node, so that what goes through two "
            f"of them counts twice. {group.caption}.",
            columns=_COLUMNS,
            rows=tuple(_row(group, node) for node in found.nodes[:MAX_ROWS]),
        )
    ]
    if found.unavailable:
        sheets.append(_missing(group, found))
    return sheets


def _read_text(found: Telemetry) -> str:
    if found.num_read == found.num_runs:
        return f"Samples of all {found.num_runs} runs." if found.num_runs > 1 else "Samples of one run."
    return (
        f"Samples of {found.num_read} of {found.num_runs} runs were read, to keep reports quick: the run in the middle "
        "of each point first; dlbench diagnose reads them all."
    )


def _value(of: Callable[[NodeMeans], float | None], text: Callable[[float], str]) -> _Text:
    def cell(node: NodeMeans) -> str:
        value = of(node)
        return DASH if value is None else text(value)

    return cell


def _power(node: NodeMeans) -> str:
    if node.gpu_power_w is not None:
        return f"{format_number(node.gpu_power_w)} W"
    return f"{node.num_power} of {node.num_gpus} GPUs tell" if node.num_power else DASH


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


_SHOWN: tuple[tuple[str, _Text], ...] = (
    ("Power of its GPUs", _power),
    ("SM clock", _value(lambda node: node.sm_clock_hz, lambda value: f"{value / 1e6:,.0f} MHz")),
    ("GPU busy", _value(lambda node: node.gpu_utilisation, percent)),
    ("GPU memory", _value(lambda node: node.gpu_memory_bytes, format_bytes)),
    ("Hottest GPU", _value(lambda node: node.gpu_temperature_c, lambda value: f"{value:.0f} °C")),
    ("Throttled", _value(lambda node: node.throttled, percent)),
    ("CPU busy", _value(lambda node: node.cpu_busy, percent)),
    ("Host memory", _value(lambda node: node.host_memory_bytes, format_bytes)),
    ("Received", _value(lambda node: node.network_received, _rate)),
    ("Sent", _value(lambda node: node.network_sent, _rate)),
    ("Disks read", _value(lambda node: node.disk_read, _rate)),
)


def _means(found: Telemetry) -> Table:
    """Of each point the run that was read with most nodes, the first of them; most throttled nodes first."""
    points: dict[tuple[int, int], dict[str, list[NodeMeans]]] = {}
    for node in found.nodes:
        points.setdefault((node.ranks, node.nodes), {}).setdefault(node.run_id, []).append(node)
    shown: list[tuple[str, NodeMeans]] = []
    counts: list[tuple[tuple[int, int], int]] = []
    middle = found.timeline.run_id if found.timeline is not None else ""
    for place, runs in points.items():
        nodes = runs.get(middle) or next(iter(runs.values()))
        ordered = sorted(nodes, key=lambda node: (-(node.throttled or 0.0), node.node_rank))
        shown += [(place_text(*place), node) for node in ordered[:MAX_SHOWN]]
        counts.append((place, len(nodes) - MAX_SHOWN))
    columns = [(title, text) for title, text in _SHOWN if any(text(node) != DASH for _, node in shown)]
    rows: Table = [("At", "Node", *(title for title, _ in columns), "Samples", "Gaps", "Missing")]
    for at, node in shown:
        cells = [text(node) for _, text in columns]
        samples = (f"{node.num_samples:,}", str(node.num_gaps), percent(node.missing))
        rows.append((at, node.host or f"node {node.node_rank}", *cells, *samples))
    for place, more in counts:
        if more > 0:
            rows.append((place_text(*place), f"and {more} nodes more", *([DASH] * (len(columns) + 3))))
    return rows


_COLUMNS = (
    *("group", "ranks", "nodes", "run_id", "node", "host", "gpus", "gpu_power_w", "sm_clock_hz", "gpu_utilisation"),
    *("gpu_memory_bytes", "gpu_temperature_c", "throttled_share", "throttled_by", "cpu_busy", "host_memory_bytes"),
    *("network_received_bytes_per_s", "network_sent_bytes_per_s", "disk_read_bytes_per_s"),
    *("samples", "gaps", "missing_share"),
)


def _row(group: Group, node: NodeMeans) -> dict[str, Cell]:
    return {
        "group": group.id,
        "ranks": node.ranks,
        "nodes": node.nodes,
        "run_id": node.run_id,
        "node": node.node_rank,
        "host": node.host,
        "gpus": node.num_gpus,
        "gpu_power_w": node.gpu_power_w,
        "sm_clock_hz": node.sm_clock_hz,
        "gpu_utilisation": node.gpu_utilisation,
        "gpu_memory_bytes": node.gpu_memory_bytes,
        "gpu_temperature_c": node.gpu_temperature_c,
        "throttled_share": node.throttled,
        "throttled_by": node.throttled_by,
        "cpu_busy": node.cpu_busy,
        "host_memory_bytes": node.host_memory_bytes,
        "network_received_bytes_per_s": node.network_received,
        "network_sent_bytes_per_s": node.network_sent,
        "disk_read_bytes_per_s": node.disk_read,
        "samples": node.num_samples,
        "gaps": node.num_gaps,
        "missing_share": node.missing,
    }


def _missing(group: Group, found: Telemetry) -> Sheet:
    rows: Table = [("Not told", "Why", "Nodes")]
    rows += [(item.what, item.reason, str(item.num_nodes)) for item in found.unavailable]
    return Sheet(
        name="telemetry-missing",
        title="What nodes do not tell",
        text=rows,
        caption="Nodes: of all runs whose samples were read, each counted once a run.",
        columns=("group", "what", "reason", "nodes"),
        rows=tuple(
            {"group": group.id, "what": item.what, "reason": item.reason, "nodes": item.num_nodes}
            for item in found.unavailable
        ),
    )


def timeline_table(timeline: Timeline) -> Table:
    """Of every line that is drawn: mean, lowest and highest value in the measured window."""
    rows: Table = [("What", "Of", "Mean", "Lowest", "Highest", "Gaps drawn")]
    for panel in timeline.panels:
        for line in panel.lines:
            values = [_with_unit(value, panel) for value in (line.mean, line.lowest, line.highest)]
            rows.append((panel.title, line.lane, *values, str(line.num_gaps)))
    return [*rows, *_throttled(timeline)]


def _throttled(timeline: Timeline) -> Sequence[tuple[str, ...]]:
    return [
        (f"throttled: {name}", lane, percent(share), DASH, DASH, DASH)
        for (lane, name), share in timeline.throttled_shares().items()
    ]


def _with_unit(value: float | None, panel: Panel) -> str:
    return DASH if value is None else f"{format_number(value)} {panel.unit}"
