"""Sheets on telemetry: means of the measured window by node, what nodes do not report, and the lines of the chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlbench.reading.samples.node_means import FieldSummary, NodeTelemetry
from dlbench.report.table import Cell, Column, Sheet
from dlbench.report.wording import percent, place_text
from dlbench.units import format_bytes, format_number
from dlbench.views.telemetry.numbers import NodeMeans, RunTelemetry, Telemetry, Unavailable
from dlbench.views.telemetry.timeline import Timeline

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

    def rate(name: str, text: str, of: Callable[[NodeMeans], float | None]) -> Column[_Row]:
        return Column(
            name, title(text, lambda node: of(node) or None), lambda row: of(row.node), lambda row: _rate(of(row.node))
        )

    def number(name: str, text: str, of: Callable[[NodeMeans], float | None], unit: str) -> Column[_Row]:
        return Column(name, title(text, of), lambda row: of(row.node), unit=unit)

    columns: tuple[Column[_Row], ...] = (
        Column("", "At", lambda row: f"{place_text(row.node.ranks, row.node.nodes)}, {_host(row.node)}"),
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
        Column(
            "sm_clock_hz",
            title("SM clock", lambda node: node.sm_clock_hz),
            lambda row: row.node.sm_clock_hz,
            lambda row: _clock(row.node.sm_clock_hz),
        ),
        number("gpu_utilisation", "GPU busy", lambda node: node.gpu_utilisation, "fraction"),
        number("sm_active", "SMs busy", lambda node: node.sm_active, "fraction"),
        number("tensor_active", "Tensor cores", lambda node: node.tensor_active, "fraction"),
        number("dram_active", "GPU memory bandwidth", lambda node: node.dram_active, "fraction"),
        number("gpu_memory_bytes", "GPU memory", lambda node: node.gpu_memory_bytes, "bytes"),
        Column(
            "gpu_temperature_c",
            title("Hottest GPU", lambda node: node.gpu_temperature_c),
            lambda row: row.node.gpu_temperature_c,
            lambda row: _degrees(row.node.gpu_temperature_c),
        ),
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
    return Sheet(
        name="telemetry",
        title="Means of the measured window",
        columns=columns,
        rows=[*(_Row(node, False) for node in found.nodes[:MAX_ROWS]), *(_Row(node, True) for node in shown)],
        caption=" ".join([*_read_text(found), *left_out, *([_ABOUT_GPUS] if any(n.num_gpus for n in shown) else [])]),
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


def _read_text(found: Telemetry) -> list[str]:
    if found.num_read == found.num_runs:
        return []
    return [f"Samples of {found.num_read} of {found.num_runs} runs; dlbench diagnose reads them all."]


def _host(node: NodeMeans) -> str:
    return node.host[:MAX_HOST] or f"node {node.node_rank}"


def _power(node: NodeMeans) -> Cell | None:
    if node.gpu_power_w is not None:
        return Cell(f"{format_number(node.gpu_power_w)} W", number=node.gpu_power_w)
    return Cell(f"of {node.num_power} of {node.num_gpus} GPUs only") if node.num_power else None


def _clock(hertz: float | None) -> Cell | None:
    return None if hertz is None else Cell(f"{hertz / 1e6:,.0f} MHz", number=hertz)


def _degrees(celsius: float | None) -> Cell | None:
    return None if celsius is None else Cell(f"{celsius:.0f} °C", number=celsius)


def _rate(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{format_bytes(value)}/s", number=value)


def missing_sheet(unavailable: Sequence[Unavailable]) -> Sheet[Unavailable]:
    """What nodes do not report, and why."""
    columns: tuple[Column[Unavailable], ...] = (
        Column("what", "Missing", lambda item: item.what, limit=120),
        Column("reason", "Why", lambda item: item.reason, limit=300),
        Column("nodes", "Nodes", lambda item: item.num_nodes),
    )
    return Sheet(
        name="telemetry-missing",
        title="Not sampled",
        columns=columns,
        rows=unavailable,
        is_folded=True,
    )


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
