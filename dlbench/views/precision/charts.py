"""Charts of compared precisions: what a lower precision gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import IDEAL, INK, WIDE
from dlbench.report.wording import basis_text, place_text, times_text
from dlbench.views.precision.numbers import PrecisionComparison
from dlbench.views.precision.tables import precision_sheet

MAX_CHARTS = 4

PRECISION_COLOURS = {"fp32": "#8a8f98", "tf32": "#009e73", "bf16": "#0072b2", "fp16": "#d55e00"}


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A chart of the whole report; see `dlbench.report.charts.chart.Subject`."""

    id: str
    label: str


def precision_charts(found: Sequence[PrecisionComparison]) -> list[Chart]:
    """Throughput over the reference's by rank count, for the first comparisons."""
    return [_chart(comparison, place) for place, comparison in enumerate(found[:MAX_CHARTS])]


def _chart(found: PrecisionComparison, place: int) -> Chart:
    import altair as alt

    rows: Rows = [
        {
            "at": f"{place_text(row.ranks, row.nodes)}, {row.precision}",
            "precision": row.precision,
            "ratio": row.ratio.value,
            "low": row.ratio.low,
            "high": row.ratio.high,
            "shown": times_text(row.ratio),
            "basis": basis_text(row.ratio),
        }
        for row in found.rows
        if row.ratio is not None
    ]
    present = list(dict.fromkeys(row["precision"] for row in rows))
    colour = alt.Color("precision:N", title=None).scale(
        domain=present, range=[PRECISION_COLOURS.get(name, INK) for name in present]
    )
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        y=alt.Y("at:N", title=None, sort=[row["at"] for row in rows]).axis(labelLimit=200)
    )
    tooltip = [
        alt.Tooltip("at:N", title="at"),
        alt.Tooltip("shown:N", title=f"throughput over {found.reference}"),
        alt.Tooltip("basis:N", title="interval"),
    ]
    x = alt.X("ratio:Q", title=f"throughput over {found.reference}").scale(domainMin=0).axis(tickCount=6, format=".4~g")
    bars = base.mark_bar(height={"band": 0.6}).encode(
        x=x, color=colour.legend(orient="bottom", columns=3), tooltip=tooltip
    )
    one = alt.Chart(alt.InlineData(values=[{"one": 1}]))
    layers = [bars]
    if any(row["low"] is not None for row in rows):
        layers.append(base.mark_rule(color=INK, strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q"))
    layers.append(one.mark_rule(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(x=alt.X("one:Q")))
    words = "; ".join(f"{row['at']}: {row['shown']}" for row in rows)
    return finish(
        alt.layer(*layers),
        _Subject(id=f"report-{place}", label=found.label),
        name="precision",
        title=f"Throughput over {found.reference}",
        alt=f"Throughput of each precision over that of {found.reference}, which is the dashed line. {words}.",
        table=precision_sheet(found),
        size=(WIDE - 40, max(60, 26 * len(rows))),
    )
