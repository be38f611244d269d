"""Chart of the overlap of fusions with the backward pass: a step of each on one axis."""

from __future__ import annotations

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, PART_COLOURS, WIDE
from dlbench.report.table import Column
from dlbench.report.wording import figure_text
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange import NO_BOUND, SHARES, ExchangePoint, span, spans, times
from dlbench.views.exchange_bound import CONTRADICTED
from dlbench.views.model import Report
from dlbench.views.sweep.numbers import Sweep, SweepCell
from dlbench.views.view import place_of

_LEAST = "least possible end"
_OVERLAP_KINDS = {
    "backward pass": PART_COLOURS["backward"],
    "message, hidden": SHARES["hidden"],
    "message, exposed": SHARES["exposed"],
    _LEAST: INK,
}
_METHODS = ("no overlap", "wait-free", "merged")


def overlap_charts(sweep: Sweep, cell: SweepCell, report: Report) -> list[Chart]:
    """Returns a step of each fusion on one axis, all else as in the baseline; none if fewer than two were recorded.

    The methods are no overlap, wait-free (Zhang et al., USENIX ATC 2017) and merged gradients (MG-WFBP: Shi, Chu and
    Li, INFOCOM 2019), by what ran; of several settings of one method that of the least exposed time is drawn.
    """
    by_method = _fusions(cell, report)
    points = [(name, point) for fusions in by_method.values() for name, point in fusions]
    drawn = [fusions[0] for fusions in by_method.values()]
    if len(drawn) < 2:
        return []
    # One network and the same gradients: if any of them left less than the model allows, it gives no bound.
    least_exposed_s = min((point.least.value for _, point in points if point.least), default=None)
    bound = NO_BOUND
    if least_exposed_s is not None:
        bound = f"least exposed {format_seconds(least_exposed_s)}"
        if any(point.exposed and point.exposed.value < least_exposed_s for _, point in points):
            bound, least_exposed_s = CONTRADICTED, None
    rows: Rows = []
    for name, point in drawn:
        rows += _overlap_bars(name, point, least_exposed_s)
    exposed = [f"{name}: {figure_text(point.exposed)} exposed" for name, point in points if point.exposed]
    names = {point.run_ids: name for name, point in points}

    def name_of(point: ExchangePoint) -> str:
        return names[point.run_ids]

    chart = finish(
        spans(rows, _OVERLAP_KINDS),
        sweep,
        name=f"{sweep.cells.index(cell) + 1}-overlap",
        title=f"A step of the middle run by fusion at {place_of(cell)}: {bound}",
        alt=f"Backward pass and messages of a step, on one axis; by the model: {bound}. Means over runs: "
        f"{'; '.join(exposed)}.",
        table=times(tuple(point for _, point in points), Column("", "Fusion", name_of)),
        size=(WIDE * 3 // 2, 50 * len(drawn)),
    )
    return [chart]


def _fusions(cell: SweepCell, report: Report) -> dict[int, list[tuple[str, ExchangePoint]]]:
    """Returns names and points of the settings that differ from the baseline in fusion alone and have a timeline.

    By index in `_METHODS`; of each method the least exposed time first.
    """
    points: dict[str, ExchangePoint] = {}
    for group in report.groups:
        for point in group.all_of(ExchangePoint):
            points |= dict.fromkeys(point.run_ids, point)
    base = next((dict(setting.values) for setting in cell.settings if setting.is_baseline), {})
    exposed: dict[tuple[int, float], tuple[str, ExchangePoint]] = {}
    for setting in cell.settings:
        values = dict(setting.values)
        recorded = [points[run_id] for run_id in setting.run_ids if run_id in points]
        if not recorded or values != {**base, "sync.fusion": values.get("sync.fusion")}:
            continue
        point = recorded[0]
        is_timed = point.timeline and all(message.start_s is not None for message in point.timeline)
        if point.exposed is not None and is_timed and not point.is_in_passes:
            method = _METHODS.index("merged")
            if len(point.timeline) == 1:
                method = _METHODS.index("no overlap")
            elif len(point.timeline) == sum(message.num_tensors for message in point.timeline):
                method = _METHODS.index("wait-free")
            exposed[method, point.exposed.value] = (f"{_METHODS[method]}: {setting.label}", point)
    by_method: dict[int, list[tuple[str, ExchangePoint]]] = {}
    for method, exposed_s in sorted(exposed):
        by_method.setdefault(method, []).append(exposed[method, exposed_s])
    return by_method


def _overlap_bars(name: str, point: ExchangePoint, least_exposed_s: float | None) -> Rows:
    """Returns bars of the run in the middle: the backward pass, messages split at its end, the least possible end."""
    end = point.timeline_backward_s or 0.0
    backward, hidden, exposed, _ = _OVERLAP_KINDS
    last_end = max((message.start_s or 0.0) + (message.exchange_s or 0.0) for message in point.timeline)
    line = f"{name.partition(': ')[2]}: {format_seconds(max(0.0, last_end - end))} exposed"
    rows: Rows = [span(name, backward, 0.0, end)]
    for message in point.timeline:
        start = message.start_s or 0.0
        message_end = start + (message.exchange_s or 0.0)
        text = f"{format_bytes(message.num_bytes)}, {message.method}"
        if start < end:
            rows.append(span(line, hidden, start, min(message_end, end), text))
        if message_end > end:
            rows.append(span(line, exposed, max(start, end), message_end, text))
    if least_exposed_s is not None:
        mark = span(line, _LEAST, end + least_exposed_s, end + least_exposed_s + last_end / 300)
        rows.append({**mark, "shown": f"{format_seconds(least_exposed_s)} after the backward pass"})
    return rows
