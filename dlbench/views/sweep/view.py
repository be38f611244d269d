"""Sweeps: tables and the sections of a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from dlbench.report.charts import Chart
from dlbench.report.document import Card, Level, Mark, Section, with_rows
from dlbench.report.table import Cell, Column, Sheet, columns_of, times_cell
from dlbench.report.wording import place_text, ranks_text, times_value
from dlbench.stats.verdict_words import LADDER_STEP
from dlbench.units import first_of, format_seconds
from dlbench.views.model import Report
from dlbench.views.sweep.charts import overlap_charts, settings_charts
from dlbench.views.sweep.choice import loss_text, strategy_words
from dlbench.views.sweep.numbers import SettingLevel, Sweep, SweepCell, SweptAxis
from dlbench.views.sweep.settings import COSTS, SweptSetting, short_keys
from dlbench.views.sweep.updates import update_charts, updates_sheet

MAX_LABELS = 3  # Settings named next to a remark; the others are counted.


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
MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."


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
