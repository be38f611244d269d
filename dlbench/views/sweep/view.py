"""Sweeps: tables, charts and the sections of a report. Charts show settings side by side: ratios to the baseline, for a
ladder the efficiency and gain of each step, for fusions a step of each on one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from dlbench.report.chart_style import IDEAL, INK, MEASURED, PART_COLOURS, TONE_COLOURS, WIDE
from dlbench.report.charts import Axis, Chart, Rows, Series, channel, figure_row, finish, intervals, layer
from dlbench.report.document import Card, Level, Mark, Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, columns_of, times_cell
from dlbench.report.wording import figure_text, place_text, ranks_text, sentence, times_text, times_value
from dlbench.stats.estimates import Estimate
from dlbench.stats.verdict_words import LADDER_STEP, SETTING, SETTING_MARGIN
from dlbench.units import first_of, format_bytes, format_seconds
from dlbench.views.exchange import NO_BOUND, SHARES, ExchangePoint, span, spans, times
from dlbench.views.exchange_bound import CONTRADICTED
from dlbench.views.model import Report, place_of
from dlbench.views.sweep.choice import loss_text, strategy_words
from dlbench.views.sweep.numbers import SettingLevel, Sweep, SweepCell, SweptAxis
from dlbench.views.sweep.settings import COSTS, SweptSetting, short_keys
from dlbench.views.sweep.updates import update_charts, updates_sheet

MAX_SETTINGS = 40  # Settings drawn, fastest first; the table has all.
_COLOURS = {
    **{SETTING[outcome].word: TONE_COLOURS[SETTING[outcome].tone] for outcome in ("better", "worse")},
    "baseline": INK,
    "": IDEAL,
}
_TOOLTIP = {"setting": "setting", "shown": "over the baseline", "verdict": "verdict"}
_NO_FIGURE = {"value": None, "low": None, "high": None, "shown": "-"}
_LADDER_WIDTH = 250  # Of the ratios of a ladder, pixels; efficiencies and words are next to them.
_LEAST = "least possible end"
_OVERLAP_KINDS = {
    "backward pass": PART_COLOURS["backward"],
    "message, hidden": SHARES["hidden"],
    "message, exposed": SHARES["exposed"],
    _LEAST: INK,
}
_METHODS = ("no overlap", "wait-free", "merged")
MAX_LABELS = 3  # Settings named next to a remark; the others are counted.
MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."


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
    rows: Rows = list(_rows(sweep, cell, figure))
    if len(rows) < 2:
        return []
    width, row_height, order = WIDE, 24, "fastest first"
    if cell.steps:
        width, row_height, order = _LADDER_WIDTH, 38, "each step on top of those before it"
        rows = list(_all_steps(rows, cell))
    else:
        rows = sorted(rows, key=itemgetter("value"), reverse=True)[:MAX_SETTINGS]
    layers, resolve = _ratio_layers(sweep, cell, rows, quantity, width), None
    if cell.steps:
        panels, width = _step_panels(sweep, cell, rows, width)
        layers, resolve = [{"layer": layers}, *panels], {"scale": {"x": "independent"}}
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    name = f"{sweep.cells.index(cell) + 1}-n{cell.ranks}"
    if quantity != "throughput":
        name += "-target"
    drawn = finish(
        layers,
        sweep,
        name=name,
        title=f"{sentence(quantity)[:-1]} over the baseline at {place_text(cell.ranks, cell.nodes)}",
        alt=f"Ratios of {quantity} to the baseline ({cell.baseline}) with their intervals, {order}. {words}.",
        table=table,
        size=(width, max(70, row_height * len(rows))),
        resolve=resolve,
    )
    return [drawn]


def _rows(sweep: Sweep, cell: SweepCell, figure: Callable[[SweptSetting], Estimate | None]) -> Iterator[dict[str, Any]]:
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
        row = {"setting": name, **figure_row(ratio), "shown": times_text(ratio), "verdict": setting.verdict_title}
        if cell.steps:
            row["text"] = _step_text(setting, sweep.sample_unit)
        yield {**row, "colour": colour}


def _ratio_layers(sweep: Sweep, cell: SweepCell, rows: Rows, quantity: str, width: int) -> list[dict[str, Any]]:
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
    band = [{"low": 1 - SETTING_MARGIN, "high": 1 + SETTING_MARGIN}]
    return [layer(band, "rect", {"x": "low:Q", "x2": "high"}, color=MEASURED, opacity=0.1), *drawn]


def _step_panels(sweep: Sweep, cell: SweepCell, rows: Rows, width: int) -> tuple[list[dict[str, Any]], int]:
    panels = []
    shares = {setting.label: figure_row(setting.efficiency) for setting in cell.settings if setting.efficiency}
    if shares:
        scale, ticks = {"zero": False, "range": [width + 40, width + 160]}, {"tickCount": 3, "orient": "bottom"}
        x = Axis(f"efficiency, of {ranks_text(sweep.cells[0].ranks)}", "value", "", ".0%", scale, ticks)
        width += 160
        share_rows = [{**row, **_NO_FIGURE, **shares.get(row["setting"], {})} for row in rows]
        panels += [{"layer": intervals(share_rows, x, Series("colour", _COLOURS, columns=0), _TOOLTIP, y="setting")}]
    y = channel("setting:N", sort=[row["setting"] for row in rows])
    text = {"x": {"value": width + 14}, "y": y, "text": "text:N"}
    panels.append(layer(rows, "text", text, align="left", color=INK))
    return panels, width


def _all_steps(rows: Rows, cell: SweepCell) -> Iterator[dict[str, Any]]:
    by_name = {row["setting"].removesuffix(" !"): row for row in rows}
    for step in cell.steps:
        why = "cannot act here" if step.skipped else "no figure"
        lone = {**_NO_FIGURE, "setting": step.name, "verdict": why, "text": [why], "colour": ""}
        yield by_name.get(step.name, lone)


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


def overlap_charts(sweep: Sweep, cell: SweepCell, report: Report) -> list[Chart]:
    """Returns a step of each fusion on one axis, all else as in the baseline; none if fewer than two were recorded.
    Methods: wait-free (Zhang et al., USENIX ATC 2017), merged (MG-WFBP: Shi, Chu and Li, INFOCOM 2019).
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
        [spans(rows, _OVERLAP_KINDS)],
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
    """Returns names and points of settings with another fusion alone, by index in `_METHODS`, least exposed first."""
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


@dataclass(frozen=True)
class AxisRow:
    """A value of an axis."""

    axis: SweptAxis
    level: SettingLevel
    is_reference: bool  # Whether the other values of the axis are measured against it.

    @property
    def effect_cell(self) -> Cell:
        return Cell("the reference") if self.is_reference else times_cell(self.level.effect)

    @property
    def words(self) -> str:
        return self.axis.words if self.is_reference else ""


AXIS_COLUMNS: tuple[Column[AxisRow], ...] = (
    Column("axis", "Axis", "axis.key"),
    Column("value", "Value", "level.value", limit=80),
    Column("effect", "Effect on throughput", "level.effect", "effect_cell", has_interval=True),
    Column("verdict", "Verdict", "axis.verdict", "words"),
)


def settings_sheet(sweep: Sweep, cell: SweepCell) -> Sheet[SweptSetting]:
    """Returns every setting with its throughput, its ratio to the baseline, and remarks."""

    def verdict(setting: SweptSetting) -> str:
        if cell.steps:
            return LADDER_STEP[setting.outcome].in_cell
        if setting.label == cell.best:
            return f"{setting.verdict_title}, best"
        return setting.verdict_title

    def value(setting: SweptSetting, *, index: int) -> str:
        return setting.values[index][1]

    def reached(setting: SweptSetting) -> str:
        return f"{setting.num_reached} of {setting.num_planned}"

    def remarks(setting: SweptSetting) -> str:
        return "; ".join(_remarks(setting))

    def of_steps(name: str) -> list[str]:
        return [name] if any(getattr(setting, name) for setting in cell.settings) else []

    has_remarks = any(map(_remarks, cell.settings))
    value_columns = []
    for index, key in enumerate(short_keys(sweep.keys)):
        value_columns.append(Column[SweptSetting]("", key, partial(value, index=index), is_brief=True, limit=80))
    columns = columns_of(
        SweptSetting,
        "label",
        *value_columns,
        *("options", "is_baseline", *of_steps("gain"), "throughput", "ratio", *of_steps("efficiency")),
        Column("reached", "Reached", "num_reached", reached),
        *("time", "sooner", *COSTS),
        Column("verdict", "Verdict", "verdict", verdict, is_brief=not cell.to_target),
        *("adjusted_p", "num_runs", "num_planned", "inert", "changes", "why", *of_steps("published")),
        Column("", "Remarks" if has_remarks else "", remarks),
        titles=_titles(sweep, cell),
    )
    if cell.steps:
        brief = ("gain", "verdict", "throughput_per_s", "ratio", "published")
        columns = tuple(replace(item, is_brief=item.name in brief or item.title == "step") for item in columns)
    return Sheet(name="sweep", title="Settings", columns=columns, rows=cell.settings, in_terminal=True)


def _titles(sweep: Sweep, cell: SweepCell) -> dict[str, str]:
    titles = {"throughput_per_s": f"Throughput, {sweep.sample_unit}/s"}
    if cell.steps:
        titles = {"throughput_per_s": f"{sweep.sample_unit}/s", "ratio": "In all", "verdict": "Pays"}
    if not cell.to_target:
        titles |= {"time_to_quality_s": "", "time_speedup": "", "reached": ""}
    if any(setting.efficiency for setting in cell.settings):
        titles["efficiency"] = f"Efficiency, of {ranks_text(sweep.cells[0].ranks)}"
    for name in COSTS:
        # Settings do not differ in this cost.
        if len({f"{getattr(setting, name) or 0.0:.3g}" for setting in cell.settings}) < 2:
            titles[name] = ""
    return titles


def _remarks(setting: SweptSetting) -> list[str]:
    remarks = [f"a setting had no effect: {text}" for text in setting.inert]
    if setting.published:
        remarks.append(f"published {setting.published}")
    if setting.changes:
        remarks.append(f"changes the arithmetic ({', '.join(setting.changes)}){loss_text(setting)}")
    elif setting.losses is not None:
        remarks.append(strategy_words(setting))
    if setting.num_runs < setting.num_planned:
        why = f" ({setting.why})" if setting.why else ""
        remarks.append(f"{setting.num_runs} of {setting.num_planned} runs have figures{why}")
    if setting.autotune is not None:
        remarks.append(f"autotuner: {setting.autotune.words}")
    return remarks


def remark_lines(cell: SweepCell) -> list[str]:
    """Returns remarks for a terminal, whose table has no room for them: equal ones once, with their settings."""
    labels: dict[str, list[str]] = {}
    for setting in cell.settings:
        for text in _remarks(setting):
            labels.setdefault(text, []).append(setting.label)
    return [f"{first_of(names, MAX_LABELS, '; ')}: {text}." for text, names in labels.items()]


def goal_lines(cell: SweepCell) -> list[str]:
    """Returns the verdict on each setting of runs to a target, for terminals, whose table has no room for it."""
    if not cell.to_target:
        return []
    lines = []
    for setting in cell.settings:
        parts = [setting.verdict_title]
        times_s = {
            "selecting or casting": setting.packing_s,
            "on the wire": setting.carried_s,
            "merging": setting.merging_s,
        }
        parts += [f"{format_seconds(time)} of a step {title}" for title, time in times_s.items() if time is not None]
        lines.append(f"{setting.label}: {'; '.join(parts)}.")
    return lines


def sweep_section(sweep: Sweep, report: Report, title: str) -> Section:
    """Returns the section of a sweep: its verdict, and its cells."""
    level: Level = "evidence"
    headline, advice = "no figures", ""
    if sweep.cells:
        headline, advice = _headline(sweep, sweep.cells[-1]), sweep.cells[-1].advice
        if sweep.cells[-1].steps:
            level = "answer"
    big, small = sweep.headline
    card = Card(title=sweep.label, big=big, small=(small,), words=(sweep.verdict,), next_step=advice)
    return Section(
        id=sweep.id,
        title=f"{title}: {sweep.label}",
        level=level,
        headline=headline,
        cards=(card,),
        sections=tuple(_cell(sweep, cell, report) for cell in sweep.cells),
        notes=sweep.idle,
        brief=sweep.idle,
        where={"series": sweep.series, "sample_unit": sweep.sample_unit},
    )


def _headline(sweep: Sweep, last: SweepCell) -> str:
    if last.steps:
        return " ".join(sweep.headline)
    best, place = last.best_setting, place_text(last.ranks, last.nodes)
    goal = " to the target" if last.to_target else ""
    if best is None or best.decides is None:
        return f"no setting is faster{goal} than the baseline for certain, at {place}"
    return f"fastest{goal} at {place}: {best.label[:50]}, {times_value(best.decides)} the baseline"


def _cell(sweep: Sweep, cell: SweepCell, report: Report) -> Section:
    axis_rows = [AxisRow(axis, level, level is axis.levels[0]) for axis in cell.axes for level in axis.levels]
    title = "Which axes matter"
    if cell.to_target:
        title += " for the time to the target (not throughput)"
    axes = Sheet(
        name="sweep-axes",
        title=title,
        columns=AXIS_COLUMNS,
        rows=axis_rows,
        # Of a single axis the table of settings says the same.
        is_shown=lambda row: len(cell.axes) > 1,
        caption="Matters: the interval leaves 1 out, also after Holm. No effect: all within 2 %.",
    )
    settings = settings_sheet(sweep, cell)
    advice = f"Next: {cell.advice}"
    brief = [cell.verdict, *goal_lines(cell), *remark_lines(cell), advice]
    notes: tuple[str, ...] = ()
    if not cell.steps:
        brief.insert(0, f"Baseline: {cell.baseline}.")
        notes = (MARKS,)
    words: tuple[str, ...] = ()
    if cell is not sweep.cells[-1]:  # The card of the series has the words of the largest rank count.
        words = (cell.verdict, advice)

    def charts() -> list[Chart]:
        updates = update_charts(sweep, sweep.cells.index(cell) + 1, place_text(cell.ranks, cell.nodes), cell.updates)
        return [*settings_charts(sweep, cell, settings), *updates, *overlap_charts(sweep, cell, report)]

    return Section(
        id=f"{sweep.id}-{sweep.cells.index(cell) + 1}",
        title=place_text(cell.ranks, cell.nodes),
        marks=tuple(Mark(severity="note", text=text) for text in cell.notes),
        caption=f"{cell.conditions}; {sweep.caption}. Baseline: {cell.baseline}.",
        words=words,
        charts=charts,
        charts_per_row=1,
        sheets=with_rows(settings, axes, updates_sheet(cell.updates)),
        notes=notes,
        brief=tuple(brief),
        where={"ranks": cell.ranks, "nodes": cell.nodes},
    )
