"""Chart of slow nodes, over all runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from dlbench.reading.hosts.slow_nodes import ACCUSED, SlowNodes
from dlbench.report.charts.chart import Chart, Rows, Subject, finish
from dlbench.report.charts.style import MEASURED, MUTED, PART_COLOURS, WIDE
from dlbench.views.causes.charts import short
from dlbench.views.slow_nodes.tables import MAX_SHOWN, host_sheet, ratio_text, verdict_text


class _Folder:
    """All runs of the report."""

    id = "folder"
    label = "all runs of the folder, of any workload"


def slow_node_charts(found: SlowNodes) -> list[Chart]:
    """The slowest hosts over all runs, with their intervals."""
    import altair as alt

    shown = found.hosts[:MAX_SHOWN]
    rows: Rows = [
        {
            "host": one.host,
            "ratio": short(one.ratio.value),
            "low": short(one.ratio.low),
            "high": short(one.ratio.high),
            "shown": ratio_text(one.ratio),
            "verdict": verdict_text(one),
            "colour": PART_COLOURS["exchange"] if one.verdict in ACCUSED else MEASURED,
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
            table=host_sheet(dataclasses.replace(found, hosts=shown)),
            size=(WIDE, max(60, 26 * len(rows))),
        )
    ]
