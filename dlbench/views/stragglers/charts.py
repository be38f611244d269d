"""Charts of who is waited for: late ranks at the largest rank count, slow nodes over all runs."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, Subject, finish
from dlbench.report.charts.style import INK, MEASURED, MUTED, PART_COLOURS, WIDE
from dlbench.report.model import Group
from dlbench.report.wording import percent
from dlbench.units import format_seconds
from dlbench.views.causes import diagnosis_tables
from dlbench.views.causes.charts import CAUSE_COLOURS, short
from dlbench.views.causes.diagnosis_model import DiagnosedPoint, NodeHistory, Straggler
from dlbench.views.causes.diagnosis_tables import place
from dlbench.views.stragglers.tables import MAX_SHOWN

_LATE_COLOURS = {
    "input": CAUSE_COLOURS["input"],
    "compute": CAUSE_COLOURS["compute"],
    "host": CAUSE_COLOURS["host"],
    "unexplained": CAUSE_COLOURS["rest"],
}


def straggler_charts(group: Group) -> list[Chart]:
    """Ranks waited for at the largest rank count."""
    if group.causes is None:
        return []
    largest = group.causes.diagnosed.points[-1]
    return [_stragglers(group, largest)] if largest.waiting_ranks else []


def _stragglers(group: Group, point: DiagnosedPoint) -> Chart:
    import altair as alt

    shown = point.waiting_ranks[:MAX_SHOWN]
    rows: Rows = [
        {
            "rank": _who(late),
            "seconds": short(late.waited_s),
            "by": late.late_by,
            "shown": format_seconds(late.waited_s) if late.waited_s else "0 s",
            "last": percent(late.last_share, 0),
            "share": percent(late.waited_share, 0),
        }
        for late in shown
    ]
    present = [name for name in _LATE_COLOURS if any(row["by"] == name for row in rows)]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("rank:N", title=None, sort=[row["rank"] for row in rows]).axis(labelLimit=200)
    )
    x = alt.X("seconds:Q", title="waiting owed to it, a step, mean over all ranks").axis(
        labelExpr="format(datum.value, '~s') + 's'", tickCount=5
    )
    colour = alt.Color("by:N", title="late by").scale(domain=present, range=[_LATE_COLOURS[name] for name in present])
    tooltip = [
        alt.Tooltip("rank:N", title="rank"),
        alt.Tooltip("shown:N", title="waited a step"),
        alt.Tooltip("share:N", title="of all waiting"),
        alt.Tooltip("last:N", title="last in"),
        alt.Tooltip("by:N", title="late by"),
    ]
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=x, color=colour.legend(orient="bottom", columns=4), tooltip=tooltip
    )
    text = base.mark_text(align="left", dx=4, color=INK, fontSize=11).encode(x=x, text="share:N")
    words = "; ".join(
        f"{row['rank']}: {row['shown']} a step, {row['share']} of all waiting, last in {row['last']} of the steps, "
        f"late by {row['by']}"
        for row in rows[:5]
    )
    return finish(
        alt.layer(bars, text),
        group,
        name="stragglers",
        title=f"Waited for at {place(point)} (label: share of all waiting)",
        alt=f"Waiting that single ranks owe the others, longest first. {words}.",
        table=diagnosis_tables.late_ranks(shown),
        size=(WIDE - 60, max(60, 24 * len(rows))),
    )


def _who(late: Straggler) -> str:
    return f"rank {late.rank} on {late.host}"


class _Folder:
    """All runs of the report."""

    id = "folder"
    label = "all runs of the folder, of any workload"


def slow_node_charts(found: NodeHistory) -> list[Chart]:
    """The slowest hosts over all runs, with their intervals."""
    import altair as alt

    shown = found.hosts[:MAX_SHOWN]
    rows: Rows = [
        {
            "host": one.host,
            "ratio": short(one.ratio.value),
            "low": short(one.ratio.low),
            "high": short(one.ratio.high),
            "shown": diagnosis_tables.ratio_text(one.ratio),
            "verdict": one.verdict,
            "colour": PART_COLOURS["exchange"] if one.verdict == "slow" else MEASURED,
        }
        for one in shown
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("host:N", title=None, sort=[row["host"] for row in rows]).axis(labelLimit=200),
        color=alt.Color("host:N", legend=None).scale(
            domain=[row["host"] for row in rows], range=[row["colour"] for row in rows]
        ),
    )

    def x_of(channel: Any) -> Any:
        return channel.scale(zero=False).axis(tickCount=6, format=".2~f").title("own work over that of the other hosts")

    line = alt.Chart(alt.InlineData(values=[{"ratio": found.threshold}])).mark_rule(color=MUTED, strokeDash=[4, 3])
    layers = [line.encode(x=x_of(alt.X("ratio:Q")))]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(strokeWidth=3, opacity=0.55).encode(x=x_of(alt.X("low:Q")), x2="high:Q"))
    tooltip = [
        alt.Tooltip("host:N", title="host"),
        alt.Tooltip("shown:N", title="own work"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    layers.append(base.mark_point(filled=True, size=80, opacity=1).encode(x=x_of(alt.X("ratio:Q")), tooltip=tooltip))
    words = "; ".join(f"{row['host']} {row['shown']}, {row['verdict']}" for row in rows)
    subject: Subject = _Folder()
    return [
        finish(
            alt.layer(*layers),
            subject,
            name="slow-nodes",
            title=f"Own work by host (dashed: slow is above {found.threshold:g})",
            alt=f"Own work of each host's slowest rank over that of the other hosts, slowest first. {words}.",
            table=diagnosis_tables.slow_hosts(shown),
            size=(WIDE, max(60, 26 * len(rows))),
        )
    ]
