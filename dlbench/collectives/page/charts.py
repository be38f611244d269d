"""Bus bandwidth, time and predictions over the size of the message: one line per series, libraries dashed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlbench.collectives.page.report import GroupReport
from dlbench.collectives.page.tables import Point, points_of, short_titles
from dlbench.collectives.results.measurements import Measurement
from dlbench.report.charts.chart import Chart, Rows, finish
from dlbench.report.charts.style import IDEAL, MUTED, RANK_COLOURS, WIDE
from dlbench.report.table import Cell, Pivot, Sheet, cell_of
from dlbench.report.wording import basis_text, optional
from dlbench.stats.estimates import Estimate
from dlbench.units import format_bytes

HEIGHT = 260

SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
"""As many as are told apart; one more than there are colours, so that pairs repeat late."""

TOLERANCE = 0.1
"""Half the width of the band around a perfect prediction (fraction)."""


@dataclass(frozen=True)
class _Quantity:
    """What a chart shows over sizes."""

    name: str
    title: str
    axis: str
    value: Callable[[Measurement], Estimate | float | None]
    """None where a measurement has none; a number is predicted over measured."""
    unit: str = ""
    """Behind the value where no header names it."""

    def cell(self, row: Measurement) -> Estimate | Cell | None:
        """What people read."""
        value = self.value(row)
        if not isinstance(value, float):
            return value
        return Cell(f"{value:.2f} ({optional(row.predicted_s, 's')} predicted)")


_RATE = _Quantity("busbw", "Bus bandwidth over size", "busbw, GB/s", lambda row: row.busbw, " GB/s")
_TIME = _Quantity("time", "Time over size", "time", lambda row: row.time)
_PREDICTION = _Quantity(
    "prediction", "Predicted over measured time", "predicted / measured", lambda row: row.predicted_over_measured
)


def group_charts(group: GroupReport) -> list[Chart]:
    """The charts of a group of two sizes or more; none of predictions where there are none."""
    import altair as alt

    charts = []
    for quantity in (_RATE, _TIME, _PREDICTION):
        points = [one for series in group.series for one in points_of(series) if quantity.value(one.at) is not None]
        rows = _rows(group, quantity, points)
        if rows:
            charts.append(
                finish(
                    alt.layer(*_layers(alt, group, rows, quantity)),
                    group,
                    name=quantity.name,
                    title=quantity.title,
                    alt=_words(group, rows, quantity),
                    table=_sheet(quantity, points),
                    size=(WIDE, HEIGHT),
                )
            )
    return charts


def _sheet(quantity: _Quantity, points: list[Point]) -> Sheet[Point]:
    """A line for each size, a column for each series."""
    pivot: Pivot[Point] = Pivot(
        corner="Size",
        down=lambda point: format_bytes(point.at.num_bytes),
        across=lambda point: point.series.title,
        cell=lambda point: quantity.cell(point.at),
    )
    order = operator.attrgetter("at.num_bytes")
    return Sheet(name=quantity.name, title=quantity.axis, columns=(), rows=points, pivot=pivot, order=order)


def _rows(group: GroupReport, quantity: _Quantity, points: list[Point]) -> Rows:
    titles = short_titles(group.series)
    rows: Rows = []
    for series, row in ((point.series, point.at) for point in points):
        value = quantity.value(row)
        rows.append(
            {
                "series": titles[series.title],
                "kind": "library" if series.is_library else "dlbench",
                "bytes": row.num_bytes,
                "size": format_bytes(row.num_bytes),
                "value": value.value if isinstance(value, Estimate) else value,
                "low": value.low if isinstance(value, Estimate) else None,
                "high": value.high if isinstance(value, Estimate) else None,
                "shown": f"{cell_of(quantity.cell(row))}{quantity.unit}",
                "basis": basis_text(row.time),
            }
        )
    return rows


def _layers(alt: Any, group: GroupReport, rows: Rows, quantity: _Quantity) -> list[Any]:
    drawn = {row["series"] for row in rows}
    # Numbered over all series, so that one keeps its colour and shape in every chart.
    looks = [(index, name) for index, name in enumerate(short_titles(group.series).values()) if name in drawn]
    names = [name for _, name in looks]
    kinds = ["dlbench", "library"]
    legend = {"orient": "bottom", "columns": 2, "symbolStrokeWidth": 2, "symbolSize": 60}
    colours = [RANK_COLOURS[index % len(RANK_COLOURS)] for index, _ in looks]
    shapes = [SHAPES[index % len(SHAPES)] for index, _ in looks]
    colour = alt.Color("series:N", title=None, sort=names).scale(domain=names, range=colours).legend(**legend)
    shape = alt.Shape("series:N", title=None, sort=names).scale(domain=names, range=shapes).legend(**legend)
    dash = alt.StrokeDash("kind:N", legend=None).scale(domain=kinds, range=[[1, 0], [6, 4]])
    texts = (("series", "series"), ("size", "size"), ("shown", quantity.axis.partition(",")[0]), ("basis", "interval"))
    tooltip = [alt.Tooltip(f"{field}:N", title=title) for field, title in texts]
    x = _size_axis(alt, rows)
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=x)
    rule = base.mark_rule(strokeWidth=3, opacity=0.35).encode(y=alt.Y("low:Q"), y2="high:Q", color=colour)
    return [
        *(_perfect(alt, rows) if quantity is _PREDICTION else []),
        base.mark_line(strokeWidth=1.5, opacity=0.85).encode(
            y=_value_axis(alt, rows, quantity), color=colour, strokeDash=dash
        ),
        *([rule] if any(row["low"] is not None for row in rows) else []),
        base.mark_point(filled=True, size=42, opacity=1).encode(
            y=alt.Y("value:Q"), color=colour, shape=shape, tooltip=tooltip
        ),
    ]


def _size_axis(alt: Any, rows: Rows) -> Any:
    sizes = sorted({row["bytes"] for row in rows})
    x = alt.X("bytes:Q", title="bytes of each rank's buffer").scale(
        type="log", base=2, domain=[sizes[0] / 1.15, sizes[-1] * 1.15], nice=False
    )
    powers = [2**k for k in range(50) if sizes[0] <= 2**k <= sizes[-1]]
    # At most seven labels, at powers of two that are evenly apart.
    step = max(1, -(-len(powers) // 7))
    label = _label(("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    return x.axis(values=powers[::step] or sizes[:1], grid=False, labelExpr=label)


def _label(*units: tuple[str, float]) -> str:
    """Vega's expression for a label in the largest unit that is not above the value; units descend."""
    *larger, (smallest, size) = units
    cases = "".join(f"datum.value >= {0.9 * s} ? format(datum.value / {s}, '~r') + ' {name}' : " for name, s in larger)
    return f"{cases}format(datum.value / {size}, '~r') + ' {smallest}'"


def _value_axis(alt: Any, rows: Rows, quantity: _Quantity) -> Any:
    values = [end for row in rows for end in (row["value"], row["low"], row["high"]) if end]
    y = alt.Y("value:Q", title=quantity.axis)
    if quantity is _PREDICTION:
        edge = max(1.3, *(value * 1.05 for value in values), *(1.05 / value for value in values))
        steps = [tick for tick in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10) if 1 / edge <= tick <= edge]
        return y.scale(type="log", domain=[1 / edge, edge], nice=False).axis(values=steps, format="~r")
    if quantity is _TIME:
        domain = [min(values) / 1.3, max(values) * 1.3]
        label = _label(("s", 1), ("ms", 1e-3), ("µs", 1e-6))
        return y.scale(type="log", domain=domain, nice=False).axis(values=_decades(domain), labelExpr=label)
    return y.scale(domain=[0, max(values) * 1.08], nice=False).axis(format=".4~g", tickCount=6)


def _decades(domain: list[float]) -> list[float]:
    """Powers of ten within, and 2 and 5 times these where there are few."""
    powers = range(math.floor(math.log10(domain[0])), math.ceil(math.log10(domain[1])) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [tick for tick in ticks if domain[0] <= tick <= domain[1]]
    tens = [tick for tick in inside if math.isclose(tick, 10.0 ** round(math.log10(tick)))]
    return tens if len(tens) > 2 else inside


def _perfect(alt: Any, rows: Rows) -> list[Any]:
    """A band and a line where a prediction is right; drawn first, so that points lie above."""
    sizes = sorted({row["bytes"] for row in rows})
    ends = [{"bytes": size, "low": 1 - TOLERANCE, "high": 1 + TOLERANCE, "one": 1.0} for size in (sizes[0], sizes[-1])]
    data = alt.Chart(alt.InlineData(values=ends)).encode(x=alt.X("bytes:Q"))
    label = alt.Chart(alt.InlineData(values=ends[:1])).encode(x=alt.X("bytes:Q"))
    return [
        data.mark_area(color=IDEAL, opacity=0.18).encode(y=alt.Y("low:Q"), y2="high:Q"),
        data.mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5).encode(y=alt.Y("one:Q")),
        label.mark_text(color=MUTED, align="left", baseline="bottom", dx=2, dy=-2, fontSize=11, text="± 10 %").encode(
            y=alt.Y("high:Q")
        ),
    ]


def _words(group: GroupReport, rows: Rows, quantity: _Quantity) -> str:
    """At the largest size of each series: enough to hear what the chart shows; the table holds all."""
    last = {row["series"]: row for row in rows}
    found = "; ".join(f"{name} at {row['size']}: {row['shown']}" for name, row in last.items())
    return f"{quantity.title} of {group.label}. {found}."
