"""Chart of stragglers at the largest rank count."""

from __future__ import annotations

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, WIDE, si_label
from dlbench.report.wording import number_text, percent
from dlbench.views.causes.numbers import CausePoint
from dlbench.views.causes.view import CAUSE_COLOURS, place, short
from dlbench.views.model import Group
from dlbench.views.stragglers.numbers import Straggler
from dlbench.views.stragglers.tables import MAX_SHOWN, cost, rank_sheet

_LATE_COLOURS = {
    "input": CAUSE_COLOURS["input"],
    "compute": CAUSE_COLOURS["compute"],
    "host": CAUSE_COLOURS["host"],
    "unexplained": CAUSE_COLOURS["rest"],
}


def straggler_charts(group: Group, largest: CausePoint) -> list[Chart]:
    """Stragglers at the largest rank count."""
    return [_stragglers(group, largest)] if largest.waiting_ranks else []


def _stragglers(group: Group, point: CausePoint) -> Chart:
    import altair as alt

    shown = point.waiting_ranks[:MAX_SHOWN]
    rows: Rows = [
        {
            "rank": who(late),
            "seconds": short(cost(point, late)),
            "by": late.late_by,
            "shown": number_text(cost(point, late), "s"),
            "last": percent(late.last_share, 0),
            "share": percent(late.waited_share, 0),
        }
        for late in shown
    ]
    present = [name for name in _LATE_COLOURS if any(row["by"] == name for row in rows)]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("rank:N", title=None, sort=[row["rank"] for row in rows]).axis(labelLimit=200)
    )
    x = alt.X("seconds:Q", title="waiting for it per step").axis(labelExpr=si_label("s"), tickCount=5)
    colour = alt.Color("by:N", title="late by").scale(domain=present, range=[_LATE_COLOURS[name] for name in present])
    tooltip = [
        alt.Tooltip("rank:N", title="rank"),
        alt.Tooltip("shown:N", title="costs per step"),
        alt.Tooltip("share:N", title="of all waiting"),
        alt.Tooltip("last:N", title="last in"),
        alt.Tooltip("by:N", title="late by"),
    ]
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=x, color=colour.legend(orient="bottom", columns=4), tooltip=tooltip
    )
    text = base.mark_text(align="left", dx=4, color=INK, fontSize=11).encode(x=x, text="share:N")
    words = "; ".join(
        f"{row['rank']}: {row['shown']} per step, {row['share']} of all waiting, last in {row['last']} of the steps, "
        f"late by {row['by']}"
        for row in rows[:5]
    )
    return finish(
        alt.layer(bars, text),
        group,
        name="stragglers",
        title=f"Stragglers at {place(point)} (label: share of all waiting)",
        alt=f"Waiting for single ranks, longest first. {words}.",
        table=rank_sheet([point]),
        size=(WIDE - 60, max(60, 24 * len(rows))),
    )


def who(late: Straggler) -> str:
    """A rank and where it ran."""
    return f"rank {late.rank} on {late.host}"
