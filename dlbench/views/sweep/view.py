"""Sweeps: tables, charts and the sections of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dlbench.analysis.side_by_side import alike
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.shapes import Axis as ChartAxis
from dlbench.report.charts.shapes import Series, figure_row, intervals
from dlbench.report.charts.style import IDEAL, INK, MEASURED, PART_COLOURS, WIDE
from dlbench.report.document import Card, Mark, Section
from dlbench.report.table import Column, Sheet, columns_of, times_cell
from dlbench.report.wording import figure_text, place_text, ranks_text, sentence, times_text, times_value
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes, format_seconds
from dlbench.views.exchange import NO_BOUND, SHARES, ExchangePoint, span, spans, times
from dlbench.views.exchange_bound import CONTRADICTED
from dlbench.views.model import Report
from dlbench.views.sweep.numbers import Sweep, SweepCell, loss_text, short_keys, strategy_words, sweeps
from dlbench.views.sweep.settings import COSTS, MARGIN, PAYS, Axis, Level, Setting
from dlbench.views.sweep.updates import updates_sheet
from dlbench.views.view import ReportSource, ReportView, place_of

MAX_LABELS = 3  # Settings named next to a remark; the others are counted.


def settings_sheet(sweep: Sweep, cell: SweepCell) -> Sheet[Setting]:
    """Every setting with its throughput, its ratio to the baseline, and what must be said of it."""

    def value_column(place: int, title: str) -> Column[Setting]:
        return Column("", title, lambda one: one.values[place][1], is_brief=True, limit=80)

    def verdict(one: Setting) -> str:
        if cell.steps:
            return PAYS.get(one.verdict, one.verdict)
        return one.verdict_title + (", best" if one.label == cell.best else "")

    pays = "Pays" if cell.steps else "Verdict"
    title = "Remarks" if any(map(_remarks, cell.settings)) else ""
    # Where settings do not differ in these, the columns are for programs alone.
    told = {name: [getattr(one, name) for one in cell.settings] for name in COSTS}
    same = {name: "" for name, values in told.items() if len({f"{one or 0.0:.3g}" for one in values}) < 2}

    def of_steps(*names: str) -> list[str]:
        return [name for name in names if any(getattr(one, name) for one in cell.settings)]

    columns = columns_of(
        Setting,
        "label",
        *(value_column(place, key) for place, key in enumerate(short_keys(sweep.keys))),
        *("options", "is_baseline", *of_steps("gain"), "throughput", "ratio", *of_steps("efficiency")),
        Column(
            "reached",
            "Reached" * cell.to_target,
            lambda one: one.num_reached,
            lambda one: f"{one.num_reached} of {one.num_planned}",
        ),
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


def _remarks(setting: Setting) -> list[str]:
    """What must be said of a setting besides its speed."""
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
    said = [(text, setting.label) for setting in cell.settings for text in _remarks(setting)]
    lines = []
    for text, found in alike(said, lambda one: one[0]).items():
        labels = [label for _, label in found]
        more = f"; and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
        lines.append(f"{'; '.join(labels[:MAX_LABELS])}{more}: {text}.")
    return lines


def goal_lines(cell: SweepCell) -> list[str]:
    """With a target the verdict on each setting and its messages, for terminals, whose table has no room for them."""

    def line(one: Setting) -> str:
        parts = {"selecting or casting": one.packing_s, "on the wire": one.carried_s, "merging": one.merging_s}
        told = "".join(
            f"; {format_seconds(found)} of a step {what}" for what, found in parts.items() if found is not None
        )
        return f"{one.label}: {one.verdict_title}{told}."

    return list(map(line, cell.settings)) if cell.to_target else []


AxisRow = tuple[Axis, Level, bool]  # A value of an axis, and whether the others are measured against it.

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

MAX_SETTINGS = 40  # Settings drawn, fastest first; the table has all.

MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."

_COLOURS = {"faster": "#009e73", "slower": "#d55e00", "baseline": INK, "": IDEAL}


def settings_charts(sweep: Sweep, cell: SweepCell) -> list[Chart]:
    """The charts of a rank count: with a target of the time to it, and of throughput; none of one setting alone."""
    throughput = _chart(sweep, cell, "throughput", lambda one: one.ratio)
    return (_chart(sweep, cell, "speed to the target", lambda one: one.sooner) if cell.to_target else []) + throughput


def _chart(sweep: Sweep, cell: SweepCell, what: str, figure: Callable[[Setting], Estimate | None]) -> list[Chart]:
    import altair as alt

    rows: Rows = [
        {
            "setting": setting.label + (" *" if setting.changes else "") + (" !" if setting.inert else ""),
            **figure_row(ratio),
            "shown": times_text(ratio),
            "verdict": setting.verdict_title,
            **({"text": _step_text(setting, sweep.sample_unit)} if cell.steps else {}),
            "colour": setting.verdict if setting.verdict in _COLOURS and not setting.inert else "",
        }
        for setting in cell.settings
        if (ratio := figure(setting)) is not None
    ]
    if len(rows) < 2:
        return []
    rows = sorted(rows, key=lambda row: -row["value"])[:MAX_SETTINGS] if not cell.steps else _all_steps(rows, cell)
    ends = [row[name] for row in rows for name in ("value", "low", "high") if row[name] is not None]
    low, high = min(*ends, 1 - MARGIN), max(*ends, 1 + MARGIN)
    room = (high - low) * 0.06
    width = 250 if cell.steps else WIDE
    # A ratio's natural origin is 1, not zero.
    scale = {
        "domain": [low - room, high + room],
        "nice": False,
        "zero": False,
        **({"range": [0, width]} if cell.steps else {}),
    }
    x = ChartAxis(f"{what} over the baseline", format=".2~f", scale=scale, axis={"tickCount": 6})
    tooltip = {"setting": "setting", "shown": "over the baseline", "verdict": "verdict"}
    colours = Series("colour", _COLOURS, columns=0)
    keys = {"title": " / ".join(short_keys(sweep.keys)), "titleAnchor": "end", "titleAngle": 0, "titleAlign": "left"}
    names = {} if cell.steps else {**keys, "titleX": -220, "titleY": -8}
    drawn = intervals(rows, x, colours, tooltip, y="setting", mark="dot", limit=220, names=names, reference=1.0)
    band = alt.Chart(alt.InlineData(values=[{"low": 1 - MARGIN, "high": 1 + MARGIN}]))
    layers = [band.mark_rect(color=MEASURED, opacity=0.1).encode(x=alt.X("low:Q"), x2="high:Q"), *drawn.layer]
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    chart = alt.layer(*layers)
    if cell.steps:  # beside them efficiencies, and what each reaches and adds
        panels = [chart]
        if shares := {one.label: figure_row(one.efficiency) for one in cell.settings if one.efficiency}:
            scale, ticks = {"zero": False, "range": [width + 40, width + 160]}, {"tickCount": 3, "orient": "bottom"}
            x = ChartAxis(f"efficiency, of {ranks_text(sweep.cells[0].ranks)}", "value", "", ".0%", scale, ticks)
            width += 160
            found = [{**row, **_NO_FIGURE, **shares.get(row["setting"], {})} for row in rows]
            panels.append(intervals(found, x, colours, tooltip, y="setting", mark="dot", names=names))
        text = alt.Chart(alt.InlineData(values=rows)).mark_text(align="left", color=INK)
        place = alt.Y("setting:N", sort=[row["setting"] for row in rows])
        panels.append(text.encode(x=alt.value(width + 14), y=place, text="text:N"))
        chart = alt.layer(*panels).resolve_scale(x="independent")
    order = "each step on top of those before it" if cell.steps else "fastest first"
    return [
        finish(
            chart,
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-n{cell.ranks}" + "-target" * (what != "throughput"),
            title=f"{sentence(what)[:-1]} over the baseline at {place_text(cell.ranks, cell.nodes)}",
            alt=f"Ratios of {what} to the baseline ({cell.baseline}) with their intervals, {order}. {words}.",
            table=settings_sheet(sweep, cell),
            size=(width, max(70, (38 if cell.steps else 24) * len(rows))),
        )
    ]


_NO_FIGURE = {"value": None, "low": None, "high": None, "shown": "-"}


def _all_steps(rows: Rows, cell: SweepCell) -> Rows:
    """Steps without figures in their places, too."""
    found = {row["setting"].removesuffix(" !"): row for row in rows}
    for step in cell.steps:
        why = "cannot act here" if step.skipped else "no figure"
        row = {**_NO_FIGURE, "setting": step.name, "verdict": why, "text": [why], "colour": ""}
        found.setdefault(step.name, row)
    return [found[step.name] for step in cell.steps]


def _step_text(one: Setting, unit: str) -> list[str]:
    """What a step reaches and what was published of it; what it adds."""
    found = [f"{figure_text(one.throughput)} {unit}/s"] if one.throughput else []
    found += [f"published {one.published.partition(':')[0]}"] if one.published else []
    added = [f"{times_text(one.gain)} over the step before: {one.verdict_title}"] if one.gain else []
    return ["; ".join(found), *added]


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
    found: tuple[Sheet[Any], ...] = (settings_sheet(sweep, cell), axes, updates_sheet(cell.updates))
    follows = f"Next: {cell.advice}"
    return Section(
        id=f"{sweep.id}-{sweep.cells.index(cell) + 1}",
        title=place_text(cell.ranks, cell.nodes),
        marks=tuple(Mark(severity="note", text=text) for text in cell.notes),
        caption=f"{cell.conditions}; {sweep.caption}. Baseline: {cell.baseline}.",
        # The card of the series says it of the largest rank count.
        words=(cell.verdict, follows) if cell is not sweep.cells[-1] else (),
        charts=lambda: [*settings_charts(sweep, cell), *overlap_charts(sweep, cell, report)],
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
