"""Settings side by side in a chart: ratios to the baseline, and of a ladder what each step reaches and adds."""

from __future__ import annotations

from collections.abc import Callable
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
_LADDER_WIDTH = 250  # Of the ratios of a ladder, pixels; next to them stand efficiencies and words.


def settings_charts(sweep: Sweep, cell: SweepCell, table: Sheet[SweptSetting]) -> list[Chart]:
    """Returns the charts of a rank count: with a target of the time to it, and of throughput; none of one setting."""
    throughput = _chart(sweep, cell, table, "throughput", lambda one: one.ratio)
    if not cell.to_target:
        return throughput
    return _chart(sweep, cell, table, "speed to the target", lambda one: one.sooner) + throughput


def _chart(
    sweep: Sweep,
    cell: SweepCell,
    table: Sheet[SweptSetting],
    what: str,
    figure: Callable[[SweptSetting], Estimate | None],
) -> list[Chart]:
    rows = _rows(sweep, cell, figure)
    if len(rows) < 2:
        return []
    rows = _all_steps(rows, cell) if cell.steps else sorted(rows, key=lambda row: -row["value"])[:MAX_SETTINGS]
    width = _LADDER_WIDTH if cell.steps else WIDE
    chart = alt.layer(*_ratio_layers(sweep, cell, rows, what, width))
    if cell.steps:
        panels, width = _step_panels(sweep, cell, rows, width)
        chart = alt.layer(chart, *panels).resolve_scale(x="independent")
    order = "each step on top of those before it" if cell.steps else "fastest first"
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    return [
        finish(
            chart,
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-n{cell.ranks}" + ("" if what == "throughput" else "-target"),
            title=f"{sentence(what)[:-1]} over the baseline at {place_text(cell.ranks, cell.nodes)}",
            alt=f"Ratios of {what} to the baseline ({cell.baseline}) with their intervals, {order}. {words}.",
            table=table,
            size=(width, max(70, (38 if cell.steps else 24) * len(rows))),
        )
    ]


def _rows(sweep: Sweep, cell: SweepCell, figure: Callable[[SweptSetting], Estimate | None]) -> Rows:
    rows: Rows = []
    for setting in cell.settings:
        ratio = figure(setting)
        if ratio is None:
            continue
        row: dict[str, Any] = {
            "setting": setting.label + (" *" if setting.changes else "") + (" !" if setting.inert else ""),
            **figure_row(ratio),
            "shown": times_text(ratio),
            "verdict": setting.verdict_title,
        }
        if cell.steps:
            row["text"] = _step_text(setting, sweep.sample_unit)
        row["colour"] = setting.verdict if setting.verdict in _COLOURS and not setting.inert else ""
        rows.append(row)
    return rows


def _ratio_layers(sweep: Sweep, cell: SweepCell, rows: Rows, what: str, width: int) -> list[Any]:
    ends = [row[name] for row in rows for name in ("value", "low", "high") if row[name] is not None]
    low, high = min(*ends, 1 - SETTING_MARGIN), max(*ends, 1 + SETTING_MARGIN)
    room = (high - low) * 0.06
    # A ratio's natural origin is 1, not zero.
    scale: dict[str, Any] = {"domain": [low - room, high + room], "nice": False, "zero": False}
    names: dict[str, Any] = {}
    if cell.steps:
        scale["range"] = [0, width]
    else:
        names = {"title": " / ".join(short_keys(sweep.keys)), "titleAnchor": "end", "titleAngle": 0}
        names |= {"titleAlign": "left", "titleX": -220, "titleY": -8}
    x = Axis(f"{what} over the baseline", format=".2~f", scale=scale, axis={"tickCount": 6})
    colours = Series("colour", _COLOURS, columns=0)
    drawn = intervals(rows, x, colours, _TOOLTIP, y="setting", limit=220, names=names, reference=1.0)
    band = alt.Chart(alt.InlineData(values=[{"low": 1 - SETTING_MARGIN, "high": 1 + SETTING_MARGIN}]))
    return [band.mark_rect(color=MEASURED, opacity=0.1).encode(x=alt.X("low:Q"), x2="high:Q"), *drawn.layer]


def _step_panels(sweep: Sweep, cell: SweepCell, rows: Rows, width: int) -> tuple[list[Any], int]:
    """Returns the panels beside the ratios, and the width with them."""
    panels = []
    if shares := {one.label: figure_row(one.efficiency) for one in cell.settings if one.efficiency}:
        scale, ticks = {"zero": False, "range": [width + 40, width + 160]}, {"tickCount": 3, "orient": "bottom"}
        x = Axis(f"efficiency, of {ranks_text(sweep.cells[0].ranks)}", "value", "", ".0%", scale, ticks)
        width += 160
        found = [{**row, **_NO_FIGURE, **shares.get(row["setting"], {})} for row in rows]
        colours = Series("colour", _COLOURS, columns=0)
        panels.append(intervals(found, x, colours, _TOOLTIP, y="setting", names={}))
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


def _step_text(one: SweptSetting, unit: str) -> list[str]:
    parts = []
    if one.throughput:
        parts.append(f"{figure_text(one.throughput)} {unit}/s")
    if one.published:
        parts.append(f"published {one.published.partition(':')[0]}")
    lines = ["; ".join(parts)]
    if one.gain:
        lines.append(f"{times_text(one.gain)} over the step before: {one.verdict_title}")
    return lines
