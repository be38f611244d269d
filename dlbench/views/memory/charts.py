"""Chart on memory: the peak by batch and precision, or by rank count."""

from __future__ import annotations

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, MEASURED, WIDE
from dlbench.report.model import Group
from dlbench.report.wording import place_text, value_text
from dlbench.units import format_bytes
from dlbench.views.memory.tables import memory_sheets


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
