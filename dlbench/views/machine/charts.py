"""Charts on energy, the data path and memory."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import HEIGHT, INK, MEASURED, NARROW, PART_COLOURS, WIDE
from dlbench.report.model import Group
from dlbench.report.wording import PART_TITLES, basis_text, figure_text, percent, place_text, value_text
from dlbench.units import format_bytes, format_number
from dlbench.views.energy.tables import energy_sheets
from dlbench.views.machine.model import KindEnergy
from dlbench.views.machine.tables import memory_sheets
from dlbench.views.telemetry.charts import STAGE_COLOURS

KIND_COLOURS = {"GPUs": "#0072b2", "processors": "#e69f00"}
_STAGE_COLOURS = {**STAGE_COLOURS, "idle": "#d8dee4"}


def energy_charts(group: Group) -> list[Chart]:
    """Joules of a sample over ranks, and joules by stage."""
    if group.energy is None:
        return []
    charts = [_joules(group)] if len(group.energy.points) > 1 else []
    return [chart for chart in (*charts, _stages(group)) if chart is not None]


def _kinds(group: Group) -> list[tuple[str, int, KindEnergy]]:
    assert group.energy is not None
    return [
        (place_text(point.ranks, point.nodes), point.ranks, kind)
        for point in group.energy.points
        for kind in point.kinds
    ]


def _joules(group: Group) -> Chart | None:
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
        for place, ranks, kind in _kinds(group)
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
    y = alt.Y("value:Q", title="J per sample").scale(domainMin=0, nice=True).axis(tickCount=5, format="~s")
    layers: list[Any] = [base.mark_line(strokeWidth=2).encode(y=y)]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.5).encode(y=alt.Y("low:Q"), y2="high:Q"))
    layers.append(base.mark_point(filled=True, size=60, opacity=1).encode(y=alt.Y("value:Q"), tooltip=tooltip))
    return finish(
        alt.layer(*layers),
        group,
        name="energy",
        title="Energy per sample",
        alt=f"Joules of a sample over ranks, in the measured window. {words}.",
        table=energy_sheets(group)[0].text,
        size=(NARROW, HEIGHT),
    )


def _stages(group: Group) -> Chart | None:
    import altair as alt

    rows: Rows = [
        {
            "place": f"{place}, {kind.kind}",
            "stage": stage,
            "order": number,
            "joules": figure.value,
            "shown": f"{figure_text(figure)} J",
        }
        for place, _, kind in _kinds(group)
        for number, (stage, figure) in enumerate(kind.stages)
        if figure.value > 0
    ]
    if not rows:
        return None
    places = list(dict.fromkeys(row["place"] for row in rows))
    present = [stage for stage in _STAGE_COLOURS if any(row["stage"] == stage for row in rows)]
    colour = alt.Color("stage:N", title=None).scale(domain=present, range=[_STAGE_COLOURS[stage] for stage in present])
    label = "format(datum.value, '~s') + 'J'"
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
    for place, _, kind in _kinds(group):
        measured = dict(kind.stages).get("measured")
        total = sum(figure.value for _, figure in kind.stages)
        if measured is not None and total > 0:
            share = percent(measured.value / total, 0)
            words.append(f"{place}, {kind.kind}: {format_number(total)} J, {share} of it measured steps")
    return finish(
        alt.layer(bars),
        group,
        name="energy-stages",
        title="Energy of a run by stage",
        alt=f"Joules of a run by stage. {'; '.join(words)}.",
        table=energy_sheets(group)[1].text,
        size=(WIDE - 60, max(60, 30 * len(places))),
    )


def data_charts(group: Group) -> list[Chart]:
    """Input wait and copy as shares of the step; none where ranks never wait."""
    found = group.data_path
    if found is None:
        return []
    import altair as alt

    steps = {(point.ranks, point.nodes): point.whole.seconds.value for point in group.points}
    rows: Rows = [
        {
            "place": place_text(point.ranks, point.nodes),
            "part": PART_TITLES[part],
            "order": number,
            "share": figure.value / steps[point.ranks, point.nodes],
            "shown": figure_text(figure),
        }
        for point in found.points
        for number, (part, figure) in enumerate((("input", point.wait), ("h2d", point.copy)))
        if figure.value > 0
    ]
    if not rows:
        return []
    places = [place_text(point.ranks, point.nodes) for point in found.points]
    present = [part for part in ("input", "h2d") if any(row["part"] == PART_TITLES[part] for row in rows)]
    colour = alt.Color("part:N", title=None).scale(
        domain=[PART_TITLES[part] for part in present], range=[PART_COLOURS[part] for part in present]
    )
    bars = (
        alt.Chart(alt.InlineData(values=rows))
        .mark_bar(height={"band": 0.72})
        .encode(
            y=alt.Y("place:N", title=None, sort=places),
            x=alt.X("share:Q", title="share of the mean step").stack("zero").axis(format="~%", tickCount=5),
            color=colour.legend(orient="bottom", columns=2),
            order="order:Q",
            tooltip=[
                alt.Tooltip("place:N", title="at"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("shown:N", title="a step"),
                alt.Tooltip("share:Q", title="of the step", format=".1%"),
            ],
        )
    )
    words = "; ".join(
        f"{place}: waits {figure_text(point.wait)}, utilisation {figure_text(point.utilisation)}"
        for place, point in zip(places, found.points, strict=True)
    )
    header = ("At", "Input wait", "Copy to the device", "Accelerator utilisation")
    table = [
        (place, figure_text(point.wait), figure_text(point.copy), figure_text(point.utilisation))
        for place, point in zip(places, found.points, strict=True)
    ]
    return [
        finish(
            alt.layer(bars),
            group,
            name="data-path",
            title="Waiting for samples",
            alt=f"Input wait and copy as shares of the mean step by rank count. {words}.",
            table=[header, *table],
            size=(WIDE - 60, max(60, 34 * len(places))),
        )
    ]


def memory_charts(group: Group) -> list[Chart]:
    """Peak memory by batch and precision where several ran, else by rank count."""
    found = group.memory
    if found is None:
        return []
    batches = [batch for batch in found.batches if batch.peak_bytes]
    if len(batches) > 1:
        what, title = "batch and precision", "Peak memory by batch"
        pairs = [
            (f"batch {batch.batch}, {batch.precision}" + (f", {batch.parts} parts" if batch.parts > 1 else ""), peak)
            for batch in batches
            if (peak := batch.peak_bytes) is not None
        ]
        rows: Rows = [
            {"at": at, "bytes": peak, "low": None, "high": None, "shown": format_bytes(peak)} for at, peak in pairs
        ]
    else:
        what, title = "rank count", "Peak memory of a rank"
        rows = [
            {
                "at": place_text(point.ranks, point.nodes),
                "bytes": point.peak.value,
                "low": point.peak.low,
                "high": point.peak.high,
                "shown": value_text(point.peak),
            }
            for point in found.points
        ]
    return [_memory(group, rows, what, title)] if any(row["bytes"] for row in rows) else []


def _memory(group: Group, rows: Rows, what: str, title: str) -> Chart:
    import altair as alt

    for row in rows:
        for key in ("bytes", "low", "high"):
            row[key] = None if row[key] is None else row[key] / 2**30
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("at:N", title=None, sort=[row["at"] for row in rows]).axis(labelLimit=220)
    )
    held = "allocated on a GPU" if group.memory is not None and group.memory.on_gpu else "resident in a rank"
    bars = base.mark_bar(height={"band": 0.72}, color=MEASURED).encode(
        x=alt.X("bytes:Q", title=f"GiB {held}").axis(tickCount=5, format=".4~g"),
        tooltip=[alt.Tooltip("at:N", title="at"), alt.Tooltip("shown:N", title="peak")],
    )
    layers = [bars]
    if any(row["low"] is not None and row["low"] != row["high"] for row in rows):
        layers.append(base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    words = "; ".join(f"{row['at']}: {row['shown']}" for row in rows)
    sheets = memory_sheets(group)
    return finish(
        alt.layer(*layers),
        group,
        name="memory",
        title=title,
        alt=f"Peak memory of the rank that held most, {held}, by {what}. {words}.",
        table=sheets[1].text if what.startswith("batch") and len(sheets) > 1 else sheets[0].text,
        size=(WIDE - 60, max(60, 30 * len(rows))),
    )
