"""Charts of settings side by side: ratios to the baseline, and for a ladder the efficiency and gain of each step."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

from dlbench.lazy import alt
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis, Series, figure_row, intervals
from dlbench.report.charts.style import IDEAL, INK, MEASURED, TONE_COLOURS, WIDE
from dlbench.report.table import Sheet
from dlbench.report.wording import figure_text, place_text, ranks_text, sentence, times_text
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import SETTING, SETTING_MARGIN
from dlbench.views.sweep.numbers import Sweep, SweepCell
from dlbench.views.sweep.settings import SweptSetting, short_keys

MAX_SETTINGS = 40  # Settings drawn, fastest first; the table has all.
_COLOURS = {
    **{SETTING[outcome].word: TONE_COLOURS[SETTING[outcome].tone] for outcome in ("better", "worse")},
    "baseline": INK,
    "": IDEAL,
}
_TOOLTIP = {"setting": "setting", "shown": "over the baseline", "verdict": "verdict"}
_NO_FIGURE = {"value": None, "low": None, "high": None, "shown": "-"}
_LADDER_WIDTH = 250  # Of the ratios of a ladder, pixels; efficiencies and words are next to them.


def settings_charts(sweep: Sweep, cell: SweepCell, table: Sheet[SweptSetting]) -> list[Chart]:
    """Returns the charts of a rank count: of throughput, with a target also of the time to it; none of one setting."""
    throughput = _chart(sweep, cell, table, "throughput", attrgetter("ratio"))
    if not cell.to_target:
        return throughput
    return _chart(sweep, cell, table, "speed to the target", attrgetter("sooner")) + throughput


def _chart(
    sweep: Sweep,
    cell: SweepCell,
    table: Sheet[SweptSetting],
    quantity: str,
    figure: Callable[[SweptSetting], Estimate | None],
) -> list[Chart]:
    rows = _rows(sweep, cell, figure)
    if len(rows) < 2:
        return []
    width, row_height, order = WIDE, 24, "fastest first"
    if cell.steps:
        width, row_height, order = _LADDER_WIDTH, 38, "each step on top of those before it"
        rows = _all_steps(rows, cell)
    else:
        rows = sorted(rows, key=itemgetter("value"), reverse=True)[:MAX_SETTINGS]
    chart = alt.layer(*_ratio_layers(sweep, cell, rows, quantity, width))
    if cell.steps:
        panels, width = _step_panels(sweep, cell, rows, width)
        chart = alt.layer(chart, *panels).resolve_scale(x="independent")
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    name = f"{sweep.cells.index(cell) + 1}-n{cell.ranks}"
    if quantity != "throughput":
        name += "-target"
    drawn = finish(
        chart,
        sweep,
        name=name,
        title=f"{sentence(quantity)[:-1]} over the baseline at {place_text(cell.ranks, cell.nodes)}",
        alt=f"Ratios of {quantity} to the baseline ({cell.baseline}) with their intervals, {order}. {words}.",
        table=table,
        size=(width, max(70, row_height * len(rows))),
    )
    return [drawn]


def _rows(sweep: Sweep, cell: SweepCell, figure: Callable[[SweptSetting], Estimate | None]) -> Rows:
    rows: Rows = []
    for setting in cell.settings:
        ratio = figure(setting)
        if ratio is None:
            continue
        name, colour = setting.label, ""
        if setting.changes:
            name += " *"
        if setting.inert:
            name += " !"
        elif setting.verdict in _COLOURS:
            colour = setting.verdict
        row: dict[str, Any] = {
            "setting": name,
            **figure_row(ratio),
            "shown": times_text(ratio),
            "verdict": setting.verdict_title,
        }
        if cell.steps:
            row["text"] = _step_text(setting, sweep.sample_unit)
        rows.append({**row, "colour": colour})
    return rows


def _ratio_layers(sweep: Sweep, cell: SweepCell, rows: Rows, quantity: str, width: int) -> list[Any]:
    low, high = 1 - SETTING_MARGIN, 1 + SETTING_MARGIN
    for row in rows:
        ends = [row[name] for name in ("value", "low", "high") if row[name] is not None]
        low, high = min(low, *ends), max(high, *ends)
    room = (high - low) * 0.06
    # A ratio's natural origin is 1, not zero.
    scale: dict[str, Any] = {"domain": [low - room, high + room], "nice": False, "zero": False}
    names: dict[str, Any] = {}
    if cell.steps:
        scale["range"] = [0, width]
    else:
        names = {"title": " / ".join(short_keys(sweep.keys)), "titleAnchor": "end", "titleAngle": 0}
        names |= {"titleAlign": "left", "titleX": -220, "titleY": -8}
    x = Axis(f"{quantity} over the baseline", format=".2~f", scale=scale, axis={"tickCount": 6})
    colours = Series("colour", _COLOURS, columns=0)
    drawn = intervals(rows, x, colours, _TOOLTIP, y="setting", limit=220, names=names, reference=1.0)
    band = alt.Chart(alt.InlineData(values=[{"low": 1 - SETTING_MARGIN, "high": 1 + SETTING_MARGIN}]))
    return [band.mark_rect(color=MEASURED, opacity=0.1).encode(x=alt.X("low:Q"), x2="high:Q"), *drawn.layer]


def _step_panels(sweep: Sweep, cell: SweepCell, rows: Rows, width: int) -> tuple[list[Any], int]:
    panels = []
    shares = {setting.label: figure_row(setting.efficiency) for setting in cell.settings if setting.efficiency}
    if shares:
        scale, ticks = {"zero": False, "range": [width + 40, width + 160]}, {"tickCount": 3, "orient": "bottom"}
        x = Axis(f"efficiency, of {ranks_text(sweep.cells[0].ranks)}", "value", "", ".0%", scale, ticks)
        width += 160
        share_rows = [{**row, **_NO_FIGURE, **shares.get(row["setting"], {})} for row in rows]
        colours = Series("colour", _COLOURS, columns=0)
        panels.append(intervals(share_rows, x, colours, _TOOLTIP, y="setting", names={}))
    text = alt.Chart(alt.InlineData(values=rows)).mark_text(align="left", color=INK)
    y = alt.Y("setting:N", sort=[row["setting"] for row in rows])
    panels.append(text.encode(x=alt.value(width + 14), y=y, text="text:N"))
    return panels, width


def _all_steps(rows: Rows, cell: SweepCell) -> Rows:
    by_name = {row["setting"].removesuffix(" !"): row for row in rows}
    for step in cell.steps:
        why = "cannot act here" if step.skipped else "no figure"
        row = {**_NO_FIGURE, "setting": step.name, "verdict": why, "text": [why], "colour": ""}
        by_name.setdefault(step.name, row)
    return [by_name[step.name] for step in cell.steps]


def _step_text(setting: SweptSetting, unit: str) -> list[str]:
    parts = []
    if setting.throughput:
        parts.append(f"{figure_text(setting.throughput)} {unit}/s")
    if setting.published:
        parts.append(f"published {setting.published.partition(':')[0]}")
    lines = ["; ".join(parts)]
    if setting.gain:
        lines.append(f"{times_text(setting.gain)} over the step before: {setting.verdict_title}")
    return lines
