"""Settings of a sweep as ratios to the baseline, each a dot with its interval."""

from __future__ import annotations

from typing import Any

from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import IDEAL, INK, MEASURED, MUTED, WIDE
from dlbench.report.wording import place_text, times_text
from dlbench.views.sweep.axes import MARGIN
from dlbench.views.sweep.numbers import Sweep, SweepCell
from dlbench.views.sweep.settings import Setting
from dlbench.views.sweep.tables import VERDICT_TITLES, settings_sheet
from dlbench.views.sweep.words import short_keys

MAX_SETTINGS = 40
"""Settings drawn, fastest first; the table has all."""

MARKS = "* changes the arithmetic; ! a requested value had no effect; shaded: within 2 % of the baseline."

_VERDICTS = {"faster": "#009e73", "slower": "#d55e00", "baseline": INK}
_OTHER = IDEAL


def settings_chart(sweep: Sweep, cell: SweepCell) -> list[Chart]:
    """The chart of a rank count; none with fewer than two settings."""
    import altair as alt

    rows = _rows(cell)[:MAX_SETTINGS]
    if len(rows) < 2:
        return []
    words = "; ".join(f"{row['setting']}: {row['shown']}, {row['verdict']}" for row in rows[:8])
    return [
        finish(
            alt.layer(*_layers(alt, sweep, rows)),
            sweep,
            name=f"{sweep.cells.index(cell) + 1}-n{cell.ranks}",
            title=f"Throughput over the baseline at {place_text(cell.ranks, cell.nodes)}",
            alt=f"Ratios of throughput to the baseline ({cell.baseline}) with their intervals, fastest first. {words}.",
            table=settings_sheet(sweep, cell),
            size=(WIDE, max(70, 24 * len(rows))),
        )
    ]


def marked(setting: Setting) -> str:
    """Its label, with the marks that `MARKS` explains."""
    return setting.label + (" *" if setting.changes else "") + (" !" if setting.inert else "")


def _rows(cell: SweepCell) -> Rows:
    rows: Rows = [
        {
            "setting": marked(setting),
            "ratio": setting.ratio.value,
            "low": setting.ratio.low,
            "high": setting.ratio.high,
            "shown": times_text(setting.ratio),
            "verdict": VERDICT_TITLES[setting.verdict],
            "colour": _OTHER if setting.inert else _VERDICTS.get(setting.verdict, _OTHER),
        }
        for setting in cell.settings
        if setting.ratio is not None
    ]
    return sorted(rows, key=lambda row: -row["ratio"])


def _layers(alt: Any, sweep: Sweep, rows: Rows) -> list[Any]:
    ends = [value for row in rows for value in (row["ratio"], row["low"], row["high"]) if value is not None]
    low, high = min(*ends, 1 - MARGIN), max(*ends, 1 + MARGIN)
    room = (high - low) * 0.06

    def x_of(channel: Any) -> Any:
        # Every layer says it: one without would bring zero in. A ratio's natural origin is 1.
        scaled = channel.scale(domain=[low - room, high + room], nice=False, zero=False)
        return scaled.axis(format=".2~f", tickCount=6, title="throughput over the baseline")

    y = alt.Y("setting:N", sort=[row["setting"] for row in rows]).axis(
        labelLimit=220,
        title=" / ".join(short_keys(sweep.keys)),
        titleAnchor="end",
        titleAngle=0,
        titleAlign="left",
        titleY=-8,
        titleX=-220,
    )
    colour = alt.Color("colour:N", scale=None)
    tooltip = [
        alt.Tooltip("setting:N", title="setting"),
        alt.Tooltip("shown:N", title="over the baseline"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(y=y)
    band = alt.Chart(alt.InlineData(values=[{"low": 1 - MARGIN, "high": 1 + MARGIN}]))
    layers = [
        band.mark_rect(color=MEASURED, opacity=0.1).encode(x=x_of(alt.X("low:Q")), x2="high:Q"),
        alt.Chart(alt.InlineData(values=[{"ratio": 1.0}]))
        .mark_rule(color=MUTED, strokeDash=[4, 3], strokeWidth=1.2)
        .encode(x=x_of(alt.X("ratio:Q"))),
    ]
    if any(row["low"] is not None for row in rows):
        layers.append(
            base.mark_rule(strokeWidth=2.5, opacity=0.6).encode(x=x_of(alt.X("low:Q")), x2="high:Q", color=colour)
        )
    layers.append(
        base.mark_point(filled=True, size=70, opacity=1).encode(x=x_of(alt.X("ratio:Q")), color=colour, tooltip=tooltip)
    )
    return layers
