"""Sweeps: tables and the sections of a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dlbench.report.document import Card, Mark, Section
from dlbench.report.table import Column, Sheet, columns_of, times_cell
from dlbench.report.wording import place_text, ranks_text, times_value
from dlbench.stats.verdict_words import LADDER_STEP
from dlbench.units import first_of, format_seconds
from dlbench.views.model import Report
from dlbench.views.sweep.charts import settings_charts
from dlbench.views.sweep.choice import loss_text, strategy_words
from dlbench.views.sweep.numbers import SettingLevel, Sweep, SweepCell, SweptAxis, sweeps
from dlbench.views.sweep.overlap import overlap_charts
from dlbench.views.sweep.settings import COSTS, SweptSetting, short_keys
from dlbench.views.sweep.updates import updates_sheet
from dlbench.views.view import ReportSource, ReportView

MAX_LABELS = 3  # Settings named next to a remark; the others are counted.

AxisRow = tuple[SweptAxis, SettingLevel, bool]  # A value of an axis, and whether the others are measured against it.
AXIS_COLUMNS: tuple[Column[AxisRow], ...] = (
    Column("axis", "Axis", lambda row: row[0].key),
    Column("value", "Value", lambda row: row[1].value, limit=80),
    Column(
        "effect",
        "Effect on throughput",
        lambda row: row[1].effect,
        lambda row: "the reference" if row[2] else times_cell(row[1].effect),
        has_interval=True,
    ),
    Column("verdict", "Verdict", lambda row: row[0].verdict, lambda row: row[0].words if row[2] else ""),
)
MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."


def settings_sheet(sweep: Sweep, cell: SweepCell) -> Sheet[SweptSetting]:
    """Every setting with its throughput, its ratio to the baseline, and what must be said of it."""

    def value_column(place: int, title: str) -> Column[SweptSetting]:
        return Column("", title, lambda one: one.values[place][1], is_brief=True, limit=80)

    def verdict(one: SweptSetting) -> str:
        if cell.steps:
            return LADDER_STEP[one.outcome].in_cell
        return one.verdict_title + (", best" if one.label == cell.best else "")

    def reached(one: SweptSetting) -> str:
        return f"{one.num_reached} of {one.num_planned}"

    pays = "Pays" if cell.steps else "Verdict"
    title = "Remarks" if any(map(_remarks, cell.settings)) else ""
    # Where settings do not differ in these, the columns are for programs alone.
    told = {name: [getattr(one, name) for one in cell.settings] for name in COSTS}
    same = {name: "" for name, values in told.items() if len({f"{one or 0.0:.3g}" for one in values}) < 2}

    def of_steps(*names: str) -> list[str]:
        return [name for name in names if any(getattr(one, name) for one in cell.settings)]

    columns = columns_of(
        SweptSetting,
        "label",
        *(value_column(place, key) for place, key in enumerate(short_keys(sweep.keys))),
        *("options", "is_baseline", *of_steps("gain"), "throughput", "ratio", *of_steps("efficiency")),
        Column("reached", "Reached" * cell.to_target, lambda one: one.num_reached, reached),
        *("time", "sooner", *told),
        Column("verdict", pays, lambda one: one.verdict, verdict, is_brief=not cell.to_target),
        *("adjusted_p", "num_runs", "num_planned", "inert", "changes", "why", *of_steps("published")),
        Column("", title, lambda one: "; ".join(_remarks(one))),
        titles={
            "throughput_per_s": "Throughput, " * (not cell.steps) + f"{sweep.sample_unit}/s",
            **({} if cell.to_target else {"time_to_quality_s": "", "time_speedup": ""}),
            **({"ratio": "In all"} if cell.steps else {}),
            **{name: f"Efficiency, of {ranks_text(sweep.cells[0].ranks)}" for name in of_steps("efficiency")},
            **same,
        },
    )
    if cell.steps:
        brief = ("gain", "verdict", "throughput_per_s", "ratio", "published")
        columns = tuple(replace(one, is_brief=one.name in brief or one.title == "step") for one in columns)
    return Sheet(name="sweep", title="Settings", columns=columns, rows=cell.settings, in_terminal=True)


def _remarks(setting: SweptSetting) -> list[str]:
    found = [f"a setting had no effect: {text}" for text in setting.inert]
    found += [f"published {setting.published}"] * bool(setting.published)
    if setting.changes:
        found.append(f"changes the arithmetic ({', '.join(setting.changes)}){loss_text(setting)}")
    elif setting.losses is not None:
        found.append(strategy_words(setting))
    if setting.num_runs < setting.num_planned:
        why = f" ({setting.why})" if setting.why else ""
        found.append(f"{setting.num_runs} of {setting.num_planned} runs have figures{why}")
    if setting.autotune is not None:
        found.append(f"autotuner: {setting.autotune.words}")
    return found


def remark_lines(cell: SweepCell) -> list[str]:
    """The same for a terminal, whose table has no room for them: equal remarks once, with their settings."""
    labels: dict[str, list[str]] = {}
    for setting in cell.settings:
        for text in _remarks(setting):
            labels.setdefault(text, []).append(setting.label)
    return [f"{first_of(names, MAX_LABELS, '; ')}: {text}." for text, names in labels.items()]


def goal_lines(cell: SweepCell) -> list[str]:
    """With a target the verdict on each setting and its messages, for terminals, whose table has no room for them."""

    def line(one: SweptSetting) -> str:
        parts = {"selecting or casting": one.packing_s, "on the wire": one.carried_s, "merging": one.merging_s}
        told = "".join(
            f"; {format_seconds(found)} of a step {what}" for what, found in parts.items() if found is not None
        )
        return f"{one.label}: {one.verdict_title}{told}."

    return list(map(line, cell.settings)) if cell.to_target else []


class SweepView(ReportView):
    """Settings compared."""

    id = "sweep"
    title = "Settings compared"
    key = "sweeps"
    after = "summary"

    def numbers(self, source: ReportSource) -> tuple[Sweep, ...]:
        return sweeps(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        return tuple(self._section(sweep, report) for sweep in report.all_of(Sweep))

    def _section(self, sweep: Sweep, report: Report) -> Section:
        last = sweep.cells[-1] if sweep.cells else None
        card = Card(
            title=sweep.label,
            big=sweep.headline[0],
            small=(sweep.headline[1],),
            words=(sweep.verdict,),
            next_step=last.advice if last else "",
        )
        headline = "no figures"
        if last and last.steps:
            headline = " ".join(sweep.headline)
        elif last:
            best, goal, place = last.best_setting, " to the target" * last.to_target, place_text(last.ranks, last.nodes)
            headline = f"no setting is faster{goal} than the baseline for certain, at {place}"
            if best is not None and best.decides is not None:
                gain = times_value(best.decides)
                headline = f"fastest{goal} at {place}: {best.label[:50]}, {gain} the baseline"
        return Section(
            id=sweep.id,
            title=f"{self.title}: {sweep.label}",
            level="answer" if last and last.steps else "evidence",
            headline=headline,
            cards=(card,),
            sections=tuple(_cell(sweep, cell, report) for cell in sweep.cells),
            notes=sweep.idle,
            brief=sweep.idle,
            where={"series": sweep.series, "sample_unit": sweep.sample_unit},
        )

    def remedy(self, report: Report) -> str:
        return "no series was swept: --sweep KEY=A,B with five repeats or more sets settings side by side."


def _cell(sweep: Sweep, cell: SweepCell, report: Report) -> Section:
    axes = Sheet(
        name="sweep-axes",
        title="Which axes matter" + " for the time to the target (not throughput)" * cell.to_target,
        columns=AXIS_COLUMNS,
        rows=[(axis, level, number == 0) for axis in cell.axes for number, level in enumerate(axis.levels)],
        # Of a single axis the table of settings says the same.
        is_shown=lambda row: len(cell.axes) > 1,
        caption="Matters: the interval leaves 1 out, also after Holm. No effect: all within 2 %.",
    )
    sheet = settings_sheet(sweep, cell)
    found: tuple[Sheet[Any], ...] = (sheet, axes, updates_sheet(cell.updates))
    follows = f"Next: {cell.advice}"
    return Section(
        id=f"{sweep.id}-{sweep.cells.index(cell) + 1}",
        title=place_text(cell.ranks, cell.nodes),
        marks=tuple(Mark(severity="note", text=text) for text in cell.notes),
        caption=f"{cell.conditions}; {sweep.caption}. Baseline: {cell.baseline}.",
        # The card of the series says it of the largest rank count.
        words=(cell.verdict, follows) if cell is not sweep.cells[-1] else (),
        charts=lambda: [*settings_charts(sweep, cell, sheet), *overlap_charts(sweep, cell, report)],
        charts_per_row=1,
        sheets=tuple(sheet for sheet in found if sheet.rows),
        notes=() if cell.steps else (MARKS,),
        brief=(
            *[f"Baseline: {cell.baseline}."] * (not cell.steps),
            cell.verdict,
            *goal_lines(cell),
            *remark_lines(cell),
            follows,
        ),
        where={"ranks": cell.ranks, "nodes": cell.nodes},
    )
