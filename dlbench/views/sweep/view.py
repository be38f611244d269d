"""Sweeps: tables, charts and the sections of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish, tooltips
from dlbench.report.charts.style import IDEAL, INK, MEASURED, MUTED, WIDE
from dlbench.report.document import Card, Mark, Section
from dlbench.report.table import Column, Sheet, times_cell
from dlbench.report.wording import place_text, times_text, times_value
from dlbench.stats.estimates import Estimate
from dlbench.views.model import Report
from dlbench.views.sweep.numbers import Sweep, SweepCell, short_keys, sweeps
from dlbench.views.sweep.settings import MARGIN, MARGIN_TEXT, Axis, Level, Losses, Setting, SettingVerdict
from dlbench.views.view import ReportSource, ReportView

MAX_LABELS = 3
"""Settings named beside a remark; the others are counted."""

AXES_CAPTION = "Matters: the interval leaves 1 out, also after Holm. No effect: all within 2 %."
LOSSES_CAPTION = "Last loss of a run, medians over runs."


def verdict_title(verdict: SettingVerdict) -> str:
    """`equal` names its margin; the others are words as they are."""
    return f"equal within {MARGIN_TEXT}" if verdict == "equal" else verdict


def settings_sheet(sweep: Sweep, cell: SweepCell) -> Sheet[Setting]:
    """Every setting with its throughput, its ratio to the baseline, and what must be said of it."""
    columns: tuple[Column[Setting], ...] = (
        Column("setting", "", lambda one: one.label),
        *(_value_column(place, title) for place, title in enumerate(short_keys(sweep.keys))),
        Column("options", "", lambda one: one.options),
        Column("is_baseline", "", lambda one: one.is_baseline),
        Column("throughput_per_s", f"Throughput, {sweep.sample_unit}/s", lambda one: one.throughput, has_interval=True),
        Column(
            "ratio",
            "Over the baseline",
            lambda one: one.ratio,
            lambda one: times_cell(one.ratio),
            has_interval=True,
            is_brief=True,
        ),
        Column(
            "verdict",
            "Verdict",
            lambda one: one.verdict,
            lambda one: verdict_title(one.verdict) + (", best" if one.label == cell.best else ""),
            is_brief=True,
        ),
        Column("adjusted_p", "", lambda one: one.adjusted_p),
        Column("runs", "Runs", lambda one: one.num_runs, is_brief=True),
        Column("planned_runs", "", lambda one: one.num_planned),
        Column("inert", "", lambda one: " | ".join(one.inert)),
        Column("changes", "", lambda one: " | ".join(one.changes)),
        Column("why", "", lambda one: one.why),
        Column("", "Remarks" if any(map(_remarks, cell.settings)) else "", lambda one: "; ".join(_remarks(one))),
    )
    return Sheet(name="sweep", title="Settings", columns=columns, rows=cell.settings, in_terminal=True)


def _value_column(place: int, title: str) -> Column[Setting]:
    """The value of one swept key."""
    return Column("", title, lambda one: one.values[place][1], is_brief=True, limit=80)


def _remarks(setting: Setting) -> list[str]:
    """What must be said of a setting beside its speed."""
    found = [f"a setting had no effect: {text}" for text in setting.inert]
    if setting.changes:
        found.append(f"changes the arithmetic ({', '.join(setting.changes)})")
    if setting.num_runs < setting.num_planned:
        why = f" ({setting.why})" if setting.why else ""
        found.append(f"{setting.num_runs} of {setting.num_planned} runs have figures{why}")
    if setting.autotune is not None:
        found.append(f"autotuner: {setting.autotune.words}")
    return found


def remark_lines(cell: SweepCell) -> list[str]:
    """The same for a terminal, whose table has no room for them: equal remarks once, with their settings."""
    found: dict[str, list[str]] = {}
    for setting in cell.settings:
        for text in _remarks(setting):
            found.setdefault(text, []).append(setting.label)
    more = {text: len(labels) - MAX_LABELS for text, labels in found.items()}
    return [
        f"{'; '.join(labels[:MAX_LABELS])}{f'; and {more[text]} more' if more[text] > 0 else ''}: {text}."
        for text, labels in found.items()
    ]


@dataclass(frozen=True)
class _AxisRow:
    """A value of an axis."""

    axis: Axis
    level: Level

    @property
    def is_first(self) -> bool:
        return self.level is self.axis.levels[0]


AXIS_COLUMNS: tuple[Column[_AxisRow], ...] = (
    Column("axis", "Axis", lambda row: row.axis.key),
    Column("value", "Value", lambda row: row.level.value, limit=80),
    Column(
        "effect",
        "Effect on throughput",
        lambda row: row.level.effect,
        lambda row: "compared with" if row.is_first else times_cell(row.level.effect),
        has_interval=True,
    ),
    Column("verdict", "Verdict", lambda row: row.axis.verdict, lambda row: row.axis.words if row.is_first else ""),
)


def axes_sheet(cell: SweepCell) -> Sheet[_AxisRow]:
    """The effect of every value of every axis, and the verdict."""
    return Sheet(
        name="sweep-axes",
        title="Which axes matter",
        columns=AXIS_COLUMNS,
        rows=[_AxisRow(axis, level) for axis in cell.axes for level in axis.levels],
        caption=AXES_CAPTION,
    )


LOSS_COLUMNS: tuple[Column[tuple[Setting, Losses]], ...] = (
    Column("setting", "Setting", lambda row: row[0].label),
    Column(
        "loss",
        "Loss after equal steps",
        lambda row: row[1].own,
        lambda row: row[1].own or "not finite",
        has_interval=True,
    ),
    Column(
        "reference_loss",
        "With fp32 on the wire",
        lambda row: row[1].reference,
        lambda row: _reference(row[1]),
        has_interval=True,
    ),
    Column("reference", "That is", lambda row: row[1].reference_label or None),
    Column("loss_difference", "Difference", lambda row: row[1].difference, has_interval=True),
)


def _reference(found: Losses) -> Estimate | str:
    return found.reference or (f"not compared: {found.why}" if found.why else "not finite")


def losses_sheet(cell: SweepCell) -> Sheet[tuple[Setting, Losses]]:
    """The loss of settings that change the arithmetic beside that with fp32 on the wire."""
    return Sheet(
        name="sweep-losses",
        title="What the changed arithmetic does to the loss",
        columns=LOSS_COLUMNS,
        rows=[(setting, setting.losses) for setting in cell.settings if setting.losses],
        caption=LOSSES_CAPTION,
    )


MAX_SETTINGS = 40
"""Settings drawn, fastest first; the table has all."""

MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."

_VERDICTS = {"faster": "#009e73", "slower": "#d55e00", "baseline": INK}
_OTHER = IDEAL


def settings_chart(sweep: Sweep, cell: SweepCell) -> list[Chart]:
    """The chart of a rank count; none with fewer than two settings."""
    import altair as alt

    rows = _rows(cell)[:MAX_SETTINGS]
    if len(rows) < 2:
        return []
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    return [
        finish(
            alt.layer(*_layers(alt, sweep, rows)),
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-n{cell.ranks}",
            title=f"Throughput over the baseline at {place_text(cell.ranks, cell.nodes)}",
            alt=f"Ratios of throughput to the baseline ({cell.baseline}) with their intervals, fastest first. {words}.",
            table=settings_sheet(sweep, cell),
            size=(WIDE, max(70, 24 * len(rows))),
        )
    ]


def marked(setting: Setting) -> str:
    """Its label, with the marks that `MARKS` explains."""
    return setting.label + (" *" if setting.changes else "") + (" !" if setting.inert else "")


def _rows(cell: SweepCell) -> Rows:
    rows: Rows = [
        {
            "setting": marked(setting),
            "ratio": setting.ratio.value,
            "low": setting.ratio.low,
            "high": setting.ratio.high,
            "shown": times_text(setting.ratio),
            "verdict": verdict_title(setting.verdict),
            "colour": _OTHER if setting.inert else _VERDICTS.get(setting.verdict, _OTHER),
        }
        for setting in cell.settings
        if setting.ratio is not None
    ]
    return sorted(rows, key=lambda row: -row["ratio"])


def _layers(alt: Any, sweep: Sweep, rows: Rows) -> list[Any]:
    ends = [value for row in rows for value in (row["ratio"], row["low"], row["high"]) if value is not None]
    low, high = min(*ends, 1 - MARGIN), max(*ends, 1 + MARGIN)
    room = (high - low) * 0.06

    def x_of(channel: Any) -> Any:
        # Every layer says it: one without would bring zero in. A ratio's natural origin is 1.
        scaled = channel.scale(domain=[low - room, high + room], nice=False, zero=False)
        return scaled.axis(format=".2~f", tickCount=6, title="throughput over the baseline")

    y = alt.Y("setting:N", sort=[row["setting"] for row in rows]).axis(
        labelLimit=220,
        title=" / ".join(short_keys(sweep.keys)),
        titleAnchor="end",
        titleAngle=0,
        titleAlign="left",
        titleY=-8,
        titleX=-220,
    )
    colour = alt.Color("colour:N", scale=None)
    tooltip = tooltips({"setting:N": "setting", "shown:N": "over the baseline", "verdict:N": "verdict"})
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    band = alt.Chart(alt.InlineData(values=[{"low": 1 - MARGIN, "high": 1 + MARGIN}]))
    layers = [
        band.mark_rect(color=MEASURED, opacity=0.1).encode(x=x_of(alt.X("low:Q")), x2="high:Q"),
        alt.Chart(alt.InlineData(values=[{"ratio": 1.0}]))
        .mark_rule(color=MUTED, strokeDash=[4, 3], strokeWidth=1.2)
        .encode(x=x_of(alt.X("ratio:Q"))),
    ]
    if any(row["low"] is not None for row in rows):
        layers.append(
            base.mark_rule(strokeWidth=2.5, opacity=0.6).encode(x=x_of(alt.X("low:Q")), x2="high:Q", color=colour)
        )
    layers.append(
        base.mark_point(filled=True, size=70, opacity=1).encode(x=x_of(alt.X("ratio:Q")), color=colour, tooltip=tooltip)
    )
    return layers


class SweepView(ReportView):
    """Settings compared."""

    id = "sweep"
    title = "Settings compared"
    key = "sweeps"

    def numbers(self, source: ReportSource) -> tuple[Sweep, ...]:
        return sweeps(source.table)

    def sections(self, report: Report) -> tuple[Section, ...]:
        return tuple(self._section(sweep) for sweep in report.all_of(Sweep))

    def _section(self, sweep: Sweep) -> Section:
        last = sweep.cells[-1] if sweep.cells else None
        card = Card(
            title=sweep.label,
            big=sweep.headline[0],
            small=(sweep.headline[1],),
            words=(sweep.verdict,),
            next_step=last.advice if last else "",
        )
        return Section(
            id=sweep.id,
            title=f"{self.title}: {sweep.label}",
            headline=_headline(sweep),
            cards=(card,),
            sections=tuple(_cell(sweep, cell) for cell in sweep.cells),
            notes=sweep.idle,
            brief=sweep.idle,
            where={"series": sweep.series},
        )

    def remedy(self, report: Report) -> str:
        return "no series was swept: --sweep KEY=A,B with five repeats or more sets settings side by side."


def _headline(sweep: Sweep) -> str:
    if not sweep.cells:
        return "no figures"
    last = sweep.cells[-1]
    place = place_text(last.ranks, last.nodes)
    best = last.best_setting
    if best is None or best.ratio is None:
        return f"no setting is faster than the baseline for certain, at {place}"
    return f"fastest at {place}: {best.label[:50]}, {times_value(best.ratio)} the baseline"


def _cell(sweep: Sweep, cell: SweepCell) -> Section:
    place = place_text(cell.ranks, cell.nodes)
    return Section(
        id=f"{sweep.id}-{sweep.cells.index(cell) + 1}",
        title=place,
        marks=tuple(Mark(severity="note", text=text) for text in cell.notes),
        caption=f"{cell.conditions}; {sweep.caption}. Baseline: {cell.baseline}.",
        # The card of the series says it of the largest rank count.
        words=(cell.verdict, f"Next: {cell.advice}") if cell is not sweep.cells[-1] else (),
        charts=lambda: settings_chart(sweep, cell),
        charts_per_row=1,
        sheets=tuple(
            sheet for sheet in (settings_sheet(sweep, cell), axes_sheet(cell), losses_sheet(cell)) if sheet.rows
        ),
        notes=(cell.interaction, MARKS),
        brief=(
            f"Baseline: {cell.baseline}.",
            cell.verdict,
            cell.interaction,
            *remark_lines(cell),
            f"Next: {cell.advice}",
        ),
        where={"ranks": cell.ranks, "nodes": cell.nodes},
    )
