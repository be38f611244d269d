"""Charts of the lost percent: lost points by cause."""

from __future__ import annotations

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, MUTED, PART_COLOURS, WIDE
from dlbench.report.wording import lost_text
from dlbench.views.causes.numbers import CausePoint, CauseShare
from dlbench.views.causes.tables import lost_sheet
from dlbench.views.causes.words import CAUSE_TITLES, place
from dlbench.views.model import Group

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

_ROW = 30


def short(value: float | None) -> float | None:
    """A number as a chart needs it: four digits."""
    return None if value is None else float(f"{value:.4g}")


def cause_charts(group: Group, points: tuple[CausePoint, ...]) -> list[Chart]:
    """Lost points of every rank count but the baseline, and with their intervals at the largest one."""
    found = points[1:]
    return [_lost_by_point(group, found), _lost_at(group, found[-1])] if found else []


def _is_drawn(share: CauseShare) -> bool:
    return share.is_measured and share.lost.value != 0


def _lost_by_point(group: Group, found: tuple[CausePoint, ...]) -> Chart:
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
        if _is_drawn(share)
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
        table=lost_sheet(found),
        size=(WIDE, max(90, 44 * len(found))),
    )


def _most(shares: tuple[CauseShare, ...]) -> str:
    ordered = sorted((share for share in shares if share.is_measured), key=lambda share: -share.lost.value)
    most = [f"{CAUSE_TITLES[share.name]} {lost_text(share.lost)}" for share in ordered[:3] if share.lost.value > 0]
    return f"most of it {', '.join(most)}" if most else "nothing lost to any cause"


def _lost_at(group: Group, point: CausePoint) -> Chart:
    import altair as alt

    shares = sorted(filter(_is_drawn, point.causes), key=lambda share: -share.lost.value)
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
    return finish(
        alt.layer(*layers),
        group,
        name="causes-largest",
        title=f"Lost at {place(point)}, with intervals",
        alt=f"Points of the ideal lost to each cause at {place(point)}, line: interval. {words}.",
        table=lost_sheet([point]),
        size=(WIDE - 90, max(60, _ROW * len(rows))),
    )
