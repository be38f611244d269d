"""A step of each fusion of a sweep on one axis: without overlap, wait-free, and with merged gradients.

Wait-free back-propagation (Zhang et al., USENIX ATC 2017) sends each gradient as soon as it is ready, MG-WFBP (Shi, Chu
& Li, INFOCOM 2019) neighbours together, and one message of all overlaps nothing: what ran says which it was.
"""

from __future__ import annotations

import math

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE
from dlbench.report.table import Column
from dlbench.report.wording import figure_text, value_text
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange import SHARES, ExchangePoint, span, spans, times
from dlbench.views.model import Report
from dlbench.views.sweep.numbers import Sweep, SweepCell
from dlbench.views.view import place_of

_LEAST = "least possible end"
_KINDS = {
    "backward pass": PART_COLOURS["backward"],
    "message, hidden": SHARES["hidden"],
    "message, exposed": SHARES["exposed"],
    _LEAST: INK,
}
_WAYS = ("no overlap", "wait-free", "merged")


def overlap_charts(sweep: Sweep, cell: SweepCell, report: Report) -> list[Chart]:
    """The fusions with all else as in the baseline, a step of each way: of several that of the least exposed time. None
    where fewer than two ways recorded when their messages went.
    """
    points = {run: point for group in report.groups for point in group.all_of(ExchangePoint) for run in point.run_ids}
    base = next((dict(setting.values) for setting in cell.settings if setting.is_baseline), {})
    ways: dict[tuple[int, float], tuple[str, ExchangePoint]] = {}
    for setting in cell.settings:
        point, values = next((points[run] for run in setting.run_ids if run in points), None), dict(setting.values)
        if point is None or values != {**base, "sync.fusion": values.get("sync.fusion")} or point.exposed is None:
            continue
        if point.timeline and not point.is_in_passes and all(one.start_s is not None for one in point.timeline):
            count, tensors = len(point.timeline), sum(one.num_tensors for one in point.timeline)
            way = 0 if count == 1 else 1 if count == tensors else 2
            ways[way, point.exposed.value] = (f"{_WAYS[way]}: {setting.label}", point)
    found = [ways[key] for key in sorted(ways)]
    drawn = [ways[key] for key in sorted({way: (way, left) for way, left in sorted(ways, reverse=True)}.values())]
    if len(drawn) < 2:
        return []
    # One network and the same gradients: where any of them left less than the model allows, it gives no bound.
    least = min((one.least.value for _, one in found if one.least), default=math.inf)
    rows: Rows = [bar for name, point in drawn for bar in _bars(name, point)]
    width, bound = max(row["to"] for row in rows) / 300, ""
    if all(least <= one.exposed.value for _, one in found if one.exposed):
        bound = f" The least possible by the model: {format_seconds(least)}."
        for name, point in drawn:
            end = (point.timeline_backward_s or 0.0) + least
            tick = span(_messages(name, point), _LEAST, end, end + width)
            rows.append({**tick, "shown": f"{format_seconds(least)} after the backward pass"})
    said = "; ".join(f"{name}: {figure_text(one.exposed)} exposed" for name, one in found if one.exposed)
    titles = {one.run_ids: name for name, one in found}
    return [
        finish(
            spans(rows, _KINDS),
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-overlap",
            title=f"A step's messages by fusion at {place_of(cell)}",
            alt=f"Backward pass and messages of one step each, on one axis. {said}.{bound}",
            table=times(tuple(one for _, one in found), Column("", "Fusion", lambda point: titles[point.run_ids])),
            size=(WIDE * 3 // 2, 50 * len(drawn)),
        )
    ]


def _messages(name: str, point: ExchangePoint) -> str:
    """The line of a setting's messages."""
    return f"{name.partition(': ')[2]}: {value_text(point.exposed)} exposed" if point.exposed else name


def _bars(name: str, point: ExchangePoint) -> Rows:
    """Of the run in the middle: the backward pass, and messages cut at its end."""
    end, line = point.timeline_backward_s or 0.0, _messages(name, point)
    backward, hidden, exposed, _ = _KINDS
    rows: Rows = [span(name, backward, 0.0, end)]
    for message in point.timeline:
        begin = message.start_s or 0.0
        to, what = begin + (message.exchange_s or 0.0), f"{format_bytes(message.num_bytes)}, {message.method}"
        rows += [span(line, hidden, begin, min(to, end), what)] if begin < end else []
        rows += [span(line, exposed, max(begin, end), to, what)] if to > end else []
    return rows
