"""Charts of the lost percent: the waterfall of efficiency, lost points by cause."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.model import Group
from dlbench.report.wording import figure_text, lost_text, percent, place_text, points
from dlbench.views.causes import diagnosis_tables
from dlbench.views.causes.diagnosis_model import CauseShare, DiagnosedPoint
from dlbench.views.causes.diagnosis_tables import place
from dlbench.views.causes.diagnosis_words import CAUSE_TITLES
from dlbench.views.causes.model import FactoredPoint
from dlbench.views.causes.tables import FACTOR_TITLES, account_of, factors

CAUSE_COLOURS = {
    "exchange": PART_COLOURS["exchange"],
    "straggler": "#a83271",
    "input": PART_COLOURS["input"],
    "host": PART_COLOURS["other"],
    "throttling": "#44aa99",
    "memory": "#117733",
    "compute": PART_COLOURS["backward"],
    "rest": PART_COLOURS["imbalance"],
}
"""What a part of the step shows as well has that part's colour; the others go with them."""

_FACTOR_COLOURS = {
    "balance": CAUSE_COLOURS["straggler"],
    "communication": CAUSE_COLOURS["exchange"],
    "input": CAUSE_COLOURS["input"],
    "compute": CAUSE_COLOURS["compute"],
    "host": CAUSE_COLOURS["host"],
}

_IDEAL, _MEASURED = "#676d76", "#1769ab"
"""Of whole bars: dark enough for white words in either colour scheme, which leaves these two as they are."""

_ROW = 30
_ROOM_FOR_WORDS = 0.45
"""Where a bar begins further left, its words stand at its right end."""


def short(value: float | None) -> float | None:
    """A number as a chart needs it: four digits."""
    return None if value is None else float(f"{value:.4g}")


# Waterfall


def waterfall_charts(group: Group) -> list[Chart]:
    """The point with most ranks, if it is not the baseline."""
    if group.causes is None:
        return []
    largest = group.causes.waterfall[-1]
    return [] if largest.is_baseline or not largest.factors else [_waterfall(group, largest)]


def _waterfall(group: Group, point: FactoredPoint) -> Chart:
    import altair as alt

    rows = _stairs(point)
    at = place_text(point.ranks, point.nodes)
    words = ", ".join(
        f"{FACTOR_TITLES[factor.name]} {figure_text(factor.relative)} ({_change(factor.step)})"
        for factor in point.factors
    )
    return finish(
        alt.layer(*_waterfall_layers(alt, rows)),
        group,
        name="waterfall",
        title=f"From 100 % to {percent(point.efficiency.value)} at {at}",
        alt=f"Efficiency at {at} as a product of factors against the baseline: {words}. Their product is the "
        f"efficiency of means, {figure_text(point.efficiency)}.",
        table=[*_waterfall_table(point)],
        size=(WIDE, _ROW * len(rows)),
    )


def _change(step: float) -> str:
    """Points a factor takes off, or adds."""
    size = points(abs(step))
    return size if size == points(0.0) else f"{'+' if step < 0 else '-'}{size}"


def _waterfall_table(point: FactoredPoint) -> list[tuple[str, ...]]:
    """The factors with what the bars show."""
    first, *middle, last = factors([point])
    rows = [(*first, "Taken off", "Left")]
    rows += [
        (*row, _change(factor.step), percent(factor.level)) for row, factor in zip(middle, point.factors, strict=True)
    ]
    return [*rows, (*last, _change(1 - point.efficiency.value), percent(point.efficiency.value))]


def _stairs(point: FactoredPoint) -> Rows:
    """Bars from the ideal down to the efficiency; all ends in percent."""
    rows: Rows = [_bar("ideal", 0.0, 1.0, _IDEAL, "100 %", "")]
    for factor in point.factors:
        before = factor.level + factor.step
        label = f"x {factor.relative.value:.3f} ({_change(factor.step)})"
        colour = _FACTOR_COLOURS[factor.name]
        rows.append(_bar(FACTOR_TITLES[factor.name], before, factor.level, colour, label, figure_text(factor.relative)))
    whole = figure_text(point.efficiency)
    return [*rows, _bar("efficiency (of means)", 0.0, point.efficiency.value, _MEASURED, whole, whole)]


def _bar(name: str, start: float, end: float, colour: str, label: str, shown: str) -> dict[str, Any]:
    low, high = min(start, end), max(start, end)
    whole = low == 0.0
    right = not whole and low < _ROOM_FOR_WORDS
    return {
        "name": name,
        "from": short(low * 100),
        "to": short(high * 100),
        "colour": colour,
        "label": label,
        "shown": shown or label,
        "left": short((high if right else 0.0 if whole else low) * 100),
        "side": "in" if whole else "right" if right else "left",
    }


def _waterfall_layers(alt: Any, rows: Rows) -> list[Any]:
    names = [row["name"] for row in rows]
    end = max(100.0, *(row["to"] for row in rows))
    y = alt.Y("name:N", title=None, sort=names).axis(labelLimit=200, ticks=False, domain=False)

    def x_of(channel: Any) -> Any:
        axis = channel.scale(domain=[0, end], nice=False).axis(labelExpr="datum.value + ' %'", tickCount=5)
        return axis.title("share of the ideal throughput")

    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    tooltip = [alt.Tooltip("name:N", title="factor"), alt.Tooltip("shown:N", title="value")]
    colour = alt.Color("name:N", legend=None).scale(domain=names, range=[row["colour"] for row in rows])
    bars = base.mark_bar(height={"band": 0.66}).encode(
        x=x_of(alt.X("from:Q")), x2="to:Q", color=colour, tooltip=tooltip
    )
    layers = [bars]
    for side, align, offset, colour in (
        ("in", "left", 6, "#ffffff"),
        ("left", "right", -5, INK),
        ("right", "left", 5, INK),
    ):
        text = base.transform_filter(f"datum.side == '{side}'")
        mark = text.mark_text(align=align, dx=offset, color=colour, fontSize=12)
        layers.append(mark.encode(x=x_of(alt.X("left:Q")), text="label:N"))
    return layers


# Causes


def cause_charts(group: Group) -> list[Chart]:
    """Lost points of every rank count, and with their intervals at the largest one."""
    if group.causes is None:
        return []
    found = group.causes.diagnosed.points[1:]
    return [_lost_by_point(group, found), _lost_at(group, found[-1])] if found else []


def _told(share: CauseShare) -> bool:
    return share.is_measured and share.lost.value != 0


def _lost_by_point(group: Group, found: tuple[DiagnosedPoint, ...]) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "place": place(point),
            "cause": CAUSE_TITLES[share.name],
            "order": order,
            "points": short(share.lost.value * 100),
            "shown": lost_text(share.lost),
        }
        for point in found
        for order, share in enumerate(point.causes)
        if _told(share)
    ]
    sums: Rows = [{"place": place(point), "points": short(point.whole.lost.value * 100)} for point in found]
    y = alt.Y("place:N", title=None, sort=[place(point) for point in found])
    names = [name for name, title in CAUSE_TITLES.items() if any(row["cause"] == title for row in rows)]
    colour = alt.Color("cause:N", title=None).scale(
        domain=[CAUSE_TITLES[name] for name in names], range=[CAUSE_COLOURS[name] for name in names]
    )
    tooltip = [
        alt.Tooltip("place:N", title="at"),
        alt.Tooltip("cause:N", title="cause"),
        alt.Tooltip("shown:N", title="lost"),
    ]
    x = alt.X("points:Q", title="points of the ideal").axis(tickCount=5, format=".4~g").stack("zero")
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar(height={"band": 0.72})
    tick = alt.Chart(alt.InlineData(values=sums)).mark_tick(color=INK, thickness=2, size=34)
    words = "; ".join(f"{place(point)}: {lost_text(point.whole.lost)} in all, {_most(point.causes)}" for point in found)
    return finish(
        alt.layer(
            bars.encode(y=y, x=x, color=colour.legend(orient="bottom", columns=2), order="order:Q", tooltip=tooltip),
            tick.encode(y=y, x=alt.X("points:Q"), tooltip=[alt.Tooltip("points:Q", title="lost in all, points")]),
        ),
        group,
        name="causes",
        title="Points lost by cause (tick: in all)",
        alt=f"Points of the ideal lost to each cause by rank count; what was gained stands left of 0. {words}.",
        table=diagnosis_tables.lost(account_of(group).diagnosed),
        size=(WIDE, max(90, 44 * len(found))),
    )


def _most(shares: tuple[CauseShare, ...]) -> str:
    ordered = sorted((share for share in shares if share.is_measured), key=lambda share: -share.lost.value)
    told = [f"{CAUSE_TITLES[share.name]} {lost_text(share.lost)}" for share in ordered[:3] if share.lost.value > 0]
    return f"most of it {', '.join(told)}" if told else "nothing lost to any cause"


def _lost_at(group: Group, point: DiagnosedPoint) -> Chart:
    import altair as alt

    shares = sorted(filter(_told, point.causes), key=lambda share: -share.lost.value)
    names = [CAUSE_TITLES[share.name] for share in shares]
    rows: Rows = [
        {
            "cause": CAUSE_TITLES[share.name],
            "points": short(share.lost.value * 100),
            "low": None if share.lost.low is None else short(share.lost.low * 100),
            "high": None if share.lost.high is None else short(share.lost.high * 100),
            "shown": lost_text(share.lost),
        }
        for share in shares
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("cause:N", title=None, sort=names).axis(labelLimit=200),
        color=alt.Color("cause:N", legend=None).scale(
            domain=names, range=[CAUSE_COLOURS[share.name] for share in shares]
        ),
    )
    zero = alt.Chart(alt.InlineData(values=[{"points": 0}])).mark_rule(color=MUTED, strokeDash=[4, 3])
    layers = [zero.encode(x=alt.X("points:Q"))]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.55).encode(x=alt.X("low:Q"), x2="high:Q"))
    tooltip = [alt.Tooltip("cause:N", title="cause"), alt.Tooltip("shown:N", title="lost")]
    x = alt.X("points:Q", title="points of the ideal").axis(tickCount=5, format=".4~g")
    layers.append(base.mark_point(filled=True, size=90, opacity=1).encode(x=x, tooltip=tooltip))
    words = "; ".join(f"{row['cause']} {row['shown']}" for row in rows) or "nothing"
    header, *body = diagnosis_tables.lost(account_of(group).diagnosed)
    return finish(
        alt.layer(*layers),
        group,
        name="causes-largest",
        title=f"Lost at {place(point)}, with intervals",
        alt=f"Points of the ideal lost to each cause at {place(point)}, line: interval. {words}.",
        table=[(header[0], header[-1]), *((row[0], row[-1]) for row in body)],
        size=(WIDE - 90, max(60, _ROW * len(rows))),
    )
