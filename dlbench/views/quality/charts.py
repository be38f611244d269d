"""The metric over samples and over time: every run a line, every rank count a colour, target and no skill as rules."""

from __future__ import annotations

from typing import Any, Literal

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, IDEAL, INK, MUTED, RANK_COLOURS, WIDE
from dlbench.report.table import Sheet
from dlbench.report.wording import number_text, place_text, reached_text, value_text
from dlbench.views.model import Group
from dlbench.views.quality.numbers import Quality, QualityPoint

MAX_RUNS = 8
"""Runs drawn at each rank count."""
MAX_MARKS = 60
"""Evaluations drawn of a run; the first, the last and evenly spaced ones between."""

Axis = Literal["samples", "wall_s"]


def quality_charts(group: Group, found: Quality, table: Sheet[QualityPoint]) -> list[Chart]:
    """The metric over samples (statistical efficiency) and over time (both); `table`: what was reached."""
    if not any(one.value is not None for curve in found.curves for one in curve.evaluations):
        return []
    name = found.metric_title[0].upper() + found.metric_title[1:]
    return [
        _chart(group, found, table, "samples", f"{name} over samples", f"{group.sample_unit} trained"),
        _chart(group, found, table, "wall_s", f"{name} over time", "time since the start of training, s"),
    ]


def _chart(group: Group, found: Quality, table: Sheet[QualityPoint], axis: Axis, title: str, axis_title: str) -> Chart:
    import altair as alt

    rows = _rows(found)
    return finish(
        alt.layer(*_rules(alt, found), *_lines(alt, found, rows, axis, axis_title)),
        group,
        name=f"quality-{'samples' if axis == 'samples' else 'time'}",
        title=title,
        alt=_words(found, axis),
        table=table,
        size=(WIDE, HEIGHT),
    )


def _rows(found: Quality) -> Rows:
    drawn: dict[tuple[int, int], int] = {}
    rows: Rows = []
    for curve in found.curves:
        place = (curve.ranks, curve.nodes)
        drawn[place] = drawn.get(place, 0) + 1
        if drawn[place] > MAX_RUNS:
            continue
        known = [one for one in curve.evaluations if one.value is not None]
        step = max(1, -(-len(known) // MAX_MARKS))
        kept = known[::-step][::-1] if known else []
        rows += [
            {
                "run": curve.run_id,
                "place": place_text(*place),
                "samples": one.samples,
                "wall_s": one.wall_s,
                "value": one.value,
                "shown": number_text(one.value or 0.0, found.unit),
                "epoch": one.epoch,
            }
            for one in kept
        ]
    return rows


def _lines(alt: Any, found: Quality, rows: Rows, axis: Axis, axis_title: str) -> list[Any]:
    places = list(dict.fromkeys(place_text(point.ranks, point.nodes) for point in found.points))
    values = [row["value"] for row in rows] + [found.target, found.predictor_value]
    low, high = min(values), max(values)
    margin = (high - low or 1.0) * 0.08
    floor = 0.0 if found.unit == "fraction" else max(0.0, low - margin)
    y = (
        alt.Y("value:Q", title=found.metric_title)
        .scale(domain=[floor, high + margin], nice=False, zero=False)
        .axis(format=".0%" if found.unit == "fraction" else "~g", tickCount=6)
    )
    x = alt.X(f"{axis}:Q", title=axis_title).axis(labelExpr="format(datum.value, '~s')", tickCount=5)
    colour = alt.Color("place:N", title=None, sort=places).scale(domain=places, range=_colours(len(places)))
    shape = alt.Shape("place:N", title=None, sort=places).scale(domain=places)
    legend = {"orient": "bottom", "columns": 3, "symbolStrokeWidth": 2}
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("shown:N", title=found.metric_title),
        alt.Tooltip("samples:Q", title="samples", format=","),
        alt.Tooltip("epoch:Q", title="epochs", format=".3~g"),
        alt.Tooltip("wall_s:Q", title="seconds", format=",.4~g"),
        alt.Tooltip("run:N", title="run"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, detail="run:N")
    return [
        base.mark_line(strokeWidth=1.5, opacity=0.75).encode(color=colour.legend(**legend)),
        base.mark_point(filled=True, size=34, opacity=0.9).encode(
            color=colour.legend(**legend), shape=shape.legend(**legend), tooltip=tooltip
        ),
    ]


def _colours(count: int) -> list[str]:
    return [RANK_COLOURS[index % len(RANK_COLOURS)] for index in range(count)]


def _rules(alt: Any, found: Quality) -> list[Any]:
    """Target and no skill, each named at its line."""
    layers: list[Any] = []
    marks = (
        (found.target, f"target {number_text(found.target, found.unit)}", INK, [6, 3]),
        (found.predictor_value, f"no skill {number_text(found.predictor_value, found.unit)}", IDEAL, [2, 3]),
    )
    for number, label, colour, dash in marks:
        data = alt.Chart(alt.InlineData(values=[{"value": number, "label": label}])).encode(y=alt.Y("value:Q"))
        layers.append(data.mark_rule(color=colour, strokeDash=dash, strokeWidth=1.5))
        words = data.mark_text(color=MUTED, align="left", baseline="bottom", dx=4, dy=-2, fontSize=11)
        layers.append(words.encode(x=alt.value(0), text=alt.Text("label:N")))
    return layers


def _words(found: Quality, axis: Axis) -> str:
    points = []
    for point in found.points:
        count = reached_text(point.num_reached, point.num_runs)
        figure = point.samples if axis == "samples" else point.time
        unit = " samples" if axis == "samples" else ""
        after = "" if figure is None else f" after {value_text(figure)}{unit}"
        points.append(f"{place_text(point.ranks, point.nodes)}: {count} reached it{after}")
    goal = number_text(found.target, found.unit)
    skill = number_text(found.predictor_value, found.unit)
    return f"{found.metric_title} of every run; the target is {goal}, no skill {skill}. {'; '.join(points)}."
