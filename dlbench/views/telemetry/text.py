"""What nodes did during the measured steps, in words: the last run of each point, node by node."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from dlbench.errors import IncompleteDataError
from dlbench.reading.comparability import group_id
from dlbench.reading.samples.node_means import FieldSummary, NodeTelemetry, node_telemetry
from dlbench.records.scan import Run
from dlbench.report.wording import clean, percent
from dlbench.units import format_bytes, format_number, format_seconds

WIDTH = 80
MOST_NODES = 8
"""Nodes of a run that get lines; all of them are in the JSON."""
TOLD_MISSING = 0.01
"""Missing at the ends of the window below this share is not worth words: samples never stand on its edges."""

_SHOWN: tuple[tuple[str, str], ...] = (
    # Field, and how it is called; `{}` stands for the name of a GPU, of an interface or of a disk.
    (r"gpu\.(\d+)\.power_w", "GPU {} power"),
    (r"gpu\.(\d+)\.sm_clock_hz", "GPU {} SM clock"),
    (r"gpu\.(\d+)\.utilization", "GPU {} utilisation"),
    (r"gpu\.(\d+)\.memory_used_bytes", "GPU {} memory"),
    (r"gpu\.(\d+)\.temperature_c", "GPU {} temperature"),
    (r"host\.cpu\.busy", "CPU busy"),
    (r"host\.cpu\.mean\.busy", "CPU busy"),
    (r"host\.memory_used_bytes", "host memory"),
    (r"host\.net\.(.+)\.received_bytes", "{} receives"),
    (r"host\.net\.(.+)\.sent_bytes", "{} sends"),
    (r"host\.infiniband\.(.+)\.received_bytes", "{} receives"),
    (r"host\.infiniband\.(.+)\.sent_bytes", "{} sends"),
    (r"host\.disk\.(.+)\.read_bytes", "{} reads"),
)


def telemetry_lines(runs: Iterable[Run]) -> list[str]:
    """Means over the measured steps of the last run of every point, in lines of at most 80 columns.

    Args:
        runs: those with figures, each once: `dlbench.reading.run_table.RunTable.runs`.
    """
    lines: list[str] = []
    for run in _last_runs(runs):
        lines += _wrapped(f"{run.plan.run_id}:", "")
        try:
            nodes, why = node_telemetry(run)
        except IncompleteDataError as error:
            lines += _wrapped(f"not told: {error}", "  ")
            continue
        for node in nodes[:MOST_NODES]:
            lines += _wrapped(_node(node), "  ")
        if len(nodes) > MOST_NODES:
            lines.append(f"  and {len(nodes) - MOST_NODES} nodes more: --format json")
        for place, reason in why.items():
            lines += _wrapped(f"{place}: not measured here: {reason}", "  ")
    return lines or ["No run has figures."]


def telemetry_json(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The same of every run: all fields of all nodes, in the units of their names; counters as rates."""
    found: list[dict[str, Any]] = []
    for run in runs:
        try:
            nodes, why = node_telemetry(run)
        except IncompleteDataError as error:
            nodes, why = [], {"run": str(error)}
        found.append({"run_id": run.plan.run_id, "nodes": [asdict(node) for node in nodes], "not_measured": why})
    return found


def _last_runs(runs: Iterable[Run]) -> list[Run]:
    """The last run of each group and rank count, in the order of the scan."""
    last: dict[tuple[str, int, int], Run] = {}
    for run in runs:
        last[group_id(run), run.plan.layout.ranks, run.plan.layout.nodes] = run
    return list(last.values())


def _node(node: NodeTelemetry) -> str:
    shown = []
    for pattern, title in _SHOWN:
        for name, summary in node.fields.items():
            match = re.fullmatch(pattern, name)
            # A disk or an interface at rest is worth no words.
            if match is not None and not (summary.is_rate and summary.highest == 0):
                shown.append(f"{title.format(*match.groups())} {_value(summary)}")
    held = [
        f"{gpu} held back by {reason} in {percent(share)} of the time"
        for gpu, reasons in node.clock_reasons.items()
        for reason, share in reasons.items()
    ]
    missing = [_counted(node.num_gaps, "gap")] if node.num_gaps else []
    if node.num_gaps or node.missing > TOLD_MISSING:
        missing.append(f"{percent(node.missing)} of the time missing")
    samples = "; ".join(
        [
            f"{_counted(node.num_samples, 'sample')} in {format_seconds(node.window_s)}",
            *filter(None, [", ".join(missing)]),
        ]
    )
    failed = [f"failed on the way: {text}" for text in node.failures]
    return (
        f"{node.host} (node {node.node_rank}, {samples}): {', '.join([*shown, *held, *failed]) or 'nothing was read'}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _value(summary: FieldSummary) -> str:
    name = summary.name
    if name.endswith("_bytes"):
        return format_bytes(summary.mean) + ("/s" if summary.is_rate else "")
    if name.endswith(("busy", "utilization")):
        return percent(summary.mean)
    if name.endswith("_hz"):
        return f"{format_number(summary.mean / 1e6)} MHz"
    unit = {"w": " W", "c": " °C"}.get(name.rsplit("_", 1)[-1], "")
    return f"{format_number(summary.mean)}{unit}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        clean(text), WIDTH, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""),
        break_on_hyphens=False,
    )  # fmt: skip
