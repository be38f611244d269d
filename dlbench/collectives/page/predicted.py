"""Predictions of collectives as text of 80 columns, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from dlbench.collectives.page.tabular import FASTEST
from dlbench.collectives.page.wording import COLLECTIVE_TITLES, about, seconds_text, size_text
from dlbench.collectives.results.choice import RATE_SHARE
from dlbench.collectives.results.prediction import Prediction, Wanted
from dlbench.report.model import as_plain
from dlbench.report.tabular import Table, aligned
from dlbench.report.wording import clean, percent
from dlbench.specs.collectives.network import NetworkModel

WIDTH = 80
FORMAT = "dlbench.comm-prediction"
VERSION = 1


def to_json(network: NetworkModel, wanted: Wanted, found: Sequence[Prediction]) -> str:
    """Everything, raw; seconds and bytes."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "system": network.system,
        "transport": network.transport,
        "collective": wanted.collective,
        "dtype": wanted.dtype,
        "sizes": list(wanted.sizes),
        "workload_bytes": wanted.workload_bytes,
        "predictions": [{**as_plain(one), "is_extrapolated": one.is_extrapolated} for one in found],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_text(network: NetworkModel, wanted: Wanted, found: Sequence[Prediction], width: int = WIDTH) -> str:
    """A table for each layout, where the best changes, and how large messages should be."""
    error = network.median_error
    lines = [
        f"predicted by the fitted costs of {clean(network.system)}, {clean(network.transport)} "
        f"({network.num_points} points; "
        + ("no point held out)" if error is None else f"held-out median error {percent(error)})")
    ]
    lines = [line for text in lines for line in textwrap.wrap(text, width)]
    for one in found:
        lines += ["", *_layout(one, wanted, width)]
    return "\n".join(lines) + "\n"


def _layout(one: Prediction, wanted: Wanted, width: int) -> Iterator[str]:
    groups = one.ranks // one.group_size
    where = f" in {groups} groups of {one.group_size}" if groups > 1 else ""
    title = f"{COLLECTIVE_TITLES[wanted.collective]} {wanted.dtype}, {one.ranks} ranks{where}"
    yield from textwrap.wrap(title, width)
    if one.is_extrapolated:
        yield from textwrap.wrap(f"Extrapolated: measured up to {one.measured_ranks} ranks only.", width)
    for block in _blocks(_times(one, wanted), width):
        yield from aligned(block)
        yield ""
    yield f"{FASTEST.strip()} fastest" + ("; (line): through sizes measured at this rank count" * _has_lines(one))
    for size, before, after in one.crossovers:
        yield from textwrap.wrap(f"from {about(size)}: {after} instead of {before}", width)
    yield from textwrap.wrap(_fusion(one, wanted), width)


def _has_lines(one: Prediction) -> bool:
    return any(series.is_line for series in one.series)


def _times(one: Prediction, wanted: Wanted) -> Table:
    rows: Table = [("size", *(series.name + " (line)" * series.is_line for series in one.series))]
    for index, size in enumerate(wanted.sizes):
        cells = (
            seconds_text(series.seconds[index]) + (FASTEST if series.name == one.best[index] else "")
            for series in one.series
        )
        rows.append((size_text(size), *cells))
    if wanted.workload_bytes is not None:
        fastest = min(series.workload_s or 0.0 for series in one.series)
        cells = (
            seconds_text(series.workload_s) + (FASTEST if series.workload_s == fastest else "") for series in one.series
        )
        rows.append((f"gradients, {about(wanted.workload_bytes)}", *cells))
    return rows


def _blocks(rows: Table, width: int) -> Iterator[Table]:
    """Columns in as many tables as the width needs, each with the sizes."""
    start = 1
    while start < len(rows[0]):
        end = start + 1
        while end < len(rows[0]) and max(map(len, aligned(_columns(rows, start, end + 1)))) <= width:
            end += 1
        yield _columns(rows, start, end)
        start = end


def _columns(rows: Table, start: int, end: int) -> Table:
    return [(row[0], *row[start:end]) for row in rows]


def _fusion(one: Prediction, wanted: Wanted) -> str:
    if one.fusion_bytes is None:
        return ""
    told = (
        f"recommended fusion size: {about(one.fusion_bytes)}, the smallest message that reaches "
        f"{percent(RATE_SHARE, 0)} of the asymptotic rate of {one.fusion_of} (9 x start-up / time per byte of a line "
        "through its sizes)"
    )
    if one.fusion_messages is None or one.fusion_workload_s is None:
        return told + "."
    return (
        f"{told}: {one.fusion_messages:,} messages for {about(wanted.workload_bytes or 0)} of gradients, together "
        f"{seconds_text(one.fusion_workload_s)} without overlap."
    )
