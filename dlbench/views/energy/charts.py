"""Charts on energy: joules per sample over ranks, and joules of a run by stage."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, NARROW, STAGE_COLOURS, WIDE, si_label
from dlbench.report.wording import basis_text, figure_text, percent, place_text
from dlbench.units import format_number
from dlbench.views.energy.numbers import Energy, KindEnergy
from dlbench.views.energy.tables import energy_sheet, stages_sheet
from dlbench.views.model import Group

KIND_COLOURS = {"GPUs": "#0072b2", "processors": "#e69f00"}
_STAGE_COLOURS = {**STAGE_COLOURS, "idle": "#d8dee4"}


def energy_charts(group: Group, found: Energy) -> list[Chart]:
    """Joules per sample over ranks, and joules by stage."""
    charts = [_joules_chart(group, found)] if len(found.points) > 1 else []
    return [chart for chart in (*charts, _stages(group, found)) if chart is not None]


def _kinds_by_place(found: Energy) -> list[tuple[str, int, KindEnergy]]:
    return [(place_text(point.ranks, point.nodes), point.ranks, kind) for point in found.points for kind in point.kinds]


def _joules_chart(group: Group, found: Energy) -> Chart | None:
    import altair as alt

    rows: Rows = [
        {
            "ranks": ranks,
            "place": place,
            "kind": kind.kind,
            "value": figure.value,
            "low": figure.low,
            "high": figure.high,
            "shown": figure_text(figure),
            "basis": basis_text(figure),
        }
        for place, ranks, kind in _kinds_by_place(found)
        if (figure := kind.energy_per_sample) is not None
    ]
    if not rows:
        return None
    words = "; ".join(f"{row['place']}: {row['kind']} {row['shown']} J" for row in rows)
    present = [kind for kind in KIND_COLOURS if any(row["kind"] == kind for row in rows)]
    counts = sorted({row["ranks"] for row in rows})
    x = alt.X("ranks:Q", title="ranks").scale(
        type="log", base=2, domain=[counts[0] / 1.2, counts[-1] * 1.2], nice=False
    )
    colour = alt.Color("kind:N", title=None).scale(domain=present, range=[KIND_COLOURS[kind] for kind in present])
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("kind:N", title="of"),
        alt.Tooltip("shown:N", title="J per sample"),
        alt.Tooltip("basis:N", title="interval"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=x.axis(values=counts, grid=False, format="d"), color=colour.legend(orient="bottom", columns=2)
    )
    y = alt.Y("value:Q", title="J per sample").scale(domainMin=0, nice=True).axis(tickCount=5, labelExpr=si_label("J"))
    layers: list[Any] = [base.mark_line(strokeWidth=2).encode(y=y)]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.5).encode(y=alt.Y("low:Q"), y2="high:Q"))
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(y=alt.Y("value:Q"), tooltip=tooltip))
    return finish(
        alt.layer(*layers),
        group,
        name="energy",
        title="Energy per sample",
        alt=f"Joules per sample over ranks, in the measured window. {words}.",
        table=energy_sheet(found.points).people(brief=True),
        size=(NARROW, HEIGHT),
    )


def _stages(group: Group, found: Energy) -> Chart | None:
    import altair as alt

    rows: Rows = [
        {
            "place": f"{place}, {kind.kind}",
            "stage": stage,
            "order": number,
            "joules": figure.value,
            "shown": f"{figure_text(figure)} J",
        }
        for place, _, kind in _kinds_by_place(found)
        for number, (stage, figure) in enumerate(kind.stages)
        if figure.value > 0
    ]
    if not rows:
        return None
    places = list(dict.fromkeys(row["place"] for row in rows))
    present = [stage for stage in _STAGE_COLOURS if any(row["stage"] == stage for row in rows)]
    colour = alt.Color("stage:N", title=None).scale(domain=present, range=[_STAGE_COLOURS[stage] for stage in present])
    label = si_label("J")
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=alt.Y("place:N", title=None, sort=places).axis(labelLimit=220),
            x=alt.X("joules:Q", title="energy of a run").stack("zero").axis(tickCount=5, labelExpr=label),
            color=colour.legend(orient="bottom", columns=3),
            order="order:Q",
            tooltip=[
                alt.Tooltip("place:N", title="at"),
                alt.Tooltip("stage:N", title="stage"),
                alt.Tooltip("shown:N", title="energy"),
            ],
        )
    )
    words = []
    for place, _, kind in _kinds_by_place(found):
        measured = dict(kind.stages).get("measured")
        if measured is not None and kind.stages_j > 0:
            share = percent(measured.value / kind.stages_j, 0)
            words.append(f"{place}, {kind.kind}: {format_number(kind.stages_j)} J, {share} of it measured steps")
    return finish(
        alt.layer(bars),
        group,
        name="energy-stages",
        title="Energy of a run by stage",
        alt=f"Joules of a run by stage. {'; '.join(words)}.",
        table=stages_sheet(found.points),
        size=(WIDE - 60, max(60, 30 * len(places))),
    )
