"""Chart on memory: the peak by batch and precision, or by rank count."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import INK, MEASURED, WIDE
from dlbench.report.wording import place_text, value_text
from dlbench.units import format_bytes
from dlbench.views.memory.numbers import Memory
from dlbench.views.memory.tables import batches_sheet, points_sheet
from dlbench.views.model import Group


def memory_charts(group: Group, found: Memory) -> list[Chart]:
    """Peak memory by batch and precision where several ran, else by rank count."""
    batches = [(batch, batch.peak_bytes) for batch in found.batches if batch.peak_bytes]
    if len(batches) > 1:
        what, title, table = "batch and precision", "Peak memory by batch", batches_sheet(found.batches).people()
        rows: Rows = [
            {
                "at": f"batch {batch.batch}, {batch.precision}" + (f", {batch.parts} parts" if batch.parts > 1 else ""),
                "bytes": peak,
                "low": None,
                "high": None,
                "shown": format_bytes(peak),
            }
            for batch, peak in batches
        ]
    else:
        what, title, table = "rank count", "Peak memory of a rank", points_sheet(found).people(brief=True)
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
    if not any(row["bytes"] for row in rows):
        return []
    held = "allocated on a GPU" if found.on_gpu else "resident in a rank"
    words = "; ".join(f"{row['at']}: {row['shown']}" for row in rows)
    return [
        finish(
            _bars(rows, f"GiB {held}"),
            group,
            name="memory",
            title=title,
            alt=f"Peak memory of the rank that held most, {held}, by {what}. {words}.",
            table=table,
            size=(WIDE - 60, max(60, 30 * len(rows))),
        )
    ]


def _bars(rows: Rows, title: str) -> Any:
    """An altair chart of bytes with their intervals."""
    import altair as alt

    for row in rows:
        for key in ("bytes", "low", "high"):
            row[key] = None if row[key] is None else row[key] / 2**30
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("at:N", title=None, sort=[row["at"] for row in rows]).axis(labelLimit=220)
    )
    bars = base.mark_bar(height={"band": 0.72}, color=MEASURED).encode(
        x=alt.X("bytes:Q", title=title).axis(tickCount=5, format=".4~g"),
        tooltip=[alt.Tooltip("at:N", title="at"), alt.Tooltip("shown:N", title="peak")],
    )
    layers = [bars]
    if any(row["low"] is not None and row["low"] != row["high"] for row in rows):
        layers.append(base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    return alt.layer(*layers)
