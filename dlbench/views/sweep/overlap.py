"""How fusions overlap with the backward pass: a step of each on one axis."""

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
_WAYS = ("no overlap", "wait-free", "merged")


def overlap_charts(sweep: Sweep, cell: SweepCell, report: Report) -> list[Chart]:
    """A step of each fusion on one axis, all else as in the baseline: without overlap, wait-free (Zhang et al., USENIX
    ATC 2017) and with merged gradients (MG-WFBP: Shi, Chu and Li, INFOCOM 2019), by what ran; of several of one way
    that of the least exposed time. None where fewer than two ways recorded when their messages went.
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
    least = min((one.least.value for _, one in found if one.least), default=None)
    bound = NO_BOUND
    if least is not None:
        is_bound = all(least <= one.exposed.value for _, one in found if one.exposed)
        bound, least = (f"least exposed {format_seconds(least)}", least) if is_bound else (CONTRADICTED, None)
    rows: Rows = [bar for name, point in drawn for bar in _overlap_bars(name, point, least)]
    said = "; ".join(f"{name}: {figure_text(one.exposed)} exposed" for name, one in found if one.exposed)
    titles = {one.run_ids: name for name, one in found}
    return [
        finish(
            spans(rows, _OVERLAP_KINDS),
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-overlap",
            title=f"A step of the middle run by fusion at {place_of(cell)}: {bound}",
            alt=f"Backward pass and messages of a step, on one axis; by the model: {bound}. Means over runs: {said}.",
            table=times(tuple(one for _, one in found), Column("", "Fusion", lambda point: titles[point.run_ids])),
            size=(WIDE * 3 // 2, 50 * len(drawn)),
        )
    ]


def _overlap_bars(name: str, point: ExchangePoint, least: float | None) -> Rows:
    """Of the run in the middle: the backward pass, messages cut at its end, and where the last could end at least."""
    end = point.timeline_backward_s or 0.0
    backward, hidden, exposed, _ = _OVERLAP_KINDS
    last = max((one.start_s or 0.0) + (one.exchange_s or 0.0) for one in point.timeline)
    line = f"{name.partition(': ')[2]}: {format_seconds(max(0.0, last - end))} exposed"
    rows: Rows = [span(name, backward, 0.0, end)]
    for message in point.timeline:
        begin = message.start_s or 0.0
        to, what = begin + (message.exchange_s or 0.0), f"{format_bytes(message.num_bytes)}, {message.method}"
        rows += [span(line, hidden, begin, min(to, end), what)] if begin < end else []
        rows += [span(line, exposed, max(begin, end), to, what)] if to > end else []
    if least is not None:
        mark = span(line, _LEAST, end + least, end + least + last / 300)
        rows.append({**mark, "shown": f"{format_seconds(least)} after the backward pass"})
    return rows
