"""Four shapes of charts: lines over ranks, stacked bars, bars or dots with their intervals, points over an axis.

A shape takes rows (one a mark), axes, who has which colour, and what a mark says under the pointer; `finish` makes the
`Chart` of it (see `_charts` of `dlbench.views.energy`).

Rows have `value`, and `low` and `high` where they have intervals (`figure_row`); other names of a value stand in its
axis. What a chart has besides are layers more: `alt.layer(*lines(...).layer, ...)` or `reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlbench.lazy import alt
from dlbench.report.charts.chart import Rows, inline, tooltips
from dlbench.report.charts.style import IDEAL, si_label
from dlbench.report.wording import basis_text, figure_text
from dlbench.stats.estimates import Estimate

Tooltip = Mapping[str, str]  # As of `tooltips`.
_alt: Any = alt  # Untyped: the types of altair's channels are a wall of overloads.


class Axis(NamedTuple):
    """An axis of numbers."""

    title: str
    field: str = "value"
    unit: str = ""  # Labels with SI prefixes at this unit; otherwise `format` (of d3) says how they look.
    format: str = ".4~g"
    scale: Mapping[str, Any] = {}  # As Vega-Lite has it, like `axis`.
    axis: Mapping[str, Any] = {}


class Series(NamedTuple):
    """Marks that a field distinguishes by colour."""

    field: str
    colours: Mapping[str, str]  # In the order of the legend; those without a row are left out.
    columns: int = 2
    title: str | None = None
    legend: Mapping[str, Any] = {}  # Further words of the legend, as Vega-Lite has it.


def figure_row(figure: Estimate, scale: float = 1.0) -> dict[str, Any]:
    """A figure in a row: `value`, `low` and `high` (times `scale`), `shown` and `basis` in words."""
    ends = {"value": figure.value, "low": figure.low, "high": figure.high}
    scaled = {name: None if end is None else end * scale for name, end in ends.items()}
    return {**scaled, "shown": figure_text(figure), "basis": basis_text(figure)}


def lines(
    rows: Rows,
    y: Axis,
    by: Series | str,
    tooltip: Tooltip,
    *,
    x: str = "ranks",
    title: str = "ranks",
    room: float = 1.2,
    reach: Sequence[float] = (),
    x_axis: Axis | None = None,
    ideal: str = "",
    is_forecast: bool = False,
) -> Any:
    """Lines with points and intervals over a logarithmic axis (base 2), whose ticks are the numbers of the rows.

    `by`: a line for each, or the one colour. `room`: how far the axis goes beyond its ends, as a factor; `reach`:
    further numbers that it holds, without a tick; `x_axis`: another axis. With `is_forecast` nobody measured this:
    lines are dotted, points hollow.
    """
    if x_axis is None:
        counts = sorted({row[x] for row in rows})
        ends = min([*counts, *reach]), max([*counts, *reach])
        scale = {"type": "log", "base": 2, "domain": [ends[0] / room, ends[1] * room], "nice": False}
        x_axis = Axis(title, field=x, format="d", scale=scale, axis={"values": counts, "grid": False})
    base = _data(rows).encode(x=_channel(_alt.X, x_axis), **_colour(rows, by))
    value = f"{y.field}:Q"
    dash = {"strokeDash": [2, 3]} if is_forecast else {}
    line = base.mark_line(strokeWidth=2, **dash, **_constant(by)).encode(y=_channel(_alt.Y, y))
    rule = base.mark_rule(strokeWidth=3, opacity=0.5, **_constant(by)).encode(y=_alt.Y("low:Q"), y2="high:Q")
    point = base.mark_point(filled=not is_forecast, size=60, opacity=1, **_constant(by))
    marks = point.encode(y=_alt.Y(value), tooltip=tooltips(tooltip))
    has_intervals = any(row.get("low") is not None for row in rows)
    dashed = _data(rows).mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5)
    dashed = dashed.encode(x=_alt.X(f"{x}:Q"), y=f"{ideal}:Q")
    return _layer(*([dashed] if ideal else []), line, *([rule] if has_intervals else []), marks)


def stacked(rows: Rows, x: Axis, by: Series, tooltip: Tooltip, *, names: Sequence[str] = ()) -> Any:
    """Horizontal bars of parts, a bar for each `place`; rows say by `order` which part comes first.

    `names`: of all bars in their order; empty: as they first come.
    """
    value = _channel(_alt.X, x).stack("zero")
    name = _names("place", names or list(dict.fromkeys(row["place"] for row in rows)))
    bars = _data(rows).mark_bar(height={"band": 0.72})
    return _layer(bars.encode(y=name, x=value, **_colour(rows, by), order="order:Q", tooltip=tooltips(tooltip)))


def intervals(
    rows: Rows,
    x: Axis,
    by: Series,
    tooltip: Tooltip,
    *,
    y: str,
    limit: int = 200,
    names: Mapping[str, Any] | None = None,
    reference: float | None = None,
) -> Any:
    """A dot with its interval in each row, from above.

    `limit`: width of the names, pixels; `names`: more of their axis, as Vega-Lite has it.
    """
    base = _data(rows).encode(y=_names(y, [row[y] for row in rows], labelLimit=limit, **(names or {})))
    point = base.mark_point(filled=True, size=80, opacity=1)
    rule = base.mark_rule(strokeWidth=3, opacity=0.55)
    layers = [point.encode(x=_channel(_alt.X, x), tooltip=tooltips(tooltip), **_colour(rows, by))]
    if any(row.get("low") != row.get("high") for row in rows):
        layers.insert(0, rule.encode(x=_alt.X("low:Q"), x2="high:Q", **_colour(rows, by)))
    if reference is not None:
        line = _data([{x.field: reference}]).mark_rule(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5)
        layers.append(line.encode(x=_alt.X(f"{x.field}:Q")))
    return _layer(*layers)


def scatter(
    rows: Rows,
    x: Axis,
    y: Axis,
    by: Series,
    tooltip: Tooltip,
    *,
    detail: str = "",
    line: float = 0.0,
    size: int = 60,
    opacity: float = 1.0,
) -> Any:
    """Points over an axis of numbers, such as steps or time.

    With `line` (a width) there are lines between those of one colour and one `detail`, a field.
    """
    base = _data(rows).encode(
        x=_channel(_alt.X, x), y=_channel(_alt.Y, y), **_colour(rows, by), tooltip=tooltips(tooltip)
    )
    if detail:
        base = base.encode(detail=f"{detail}:N")
    marks = base.mark_point(filled=True, size=size, opacity=opacity).encode(shape=_legend(_alt.Shape, rows, by))
    return _layer(*([base.mark_line(strokeWidth=line)] if line else []), marks)


def _layer(*layers: Any) -> Any:
    """Layers that hold their rows themselves, to stand among others as well: altair lifts data that all share."""
    chart = _alt.layer(*layers)
    if chart.data is not _alt.Undefined:
        for one in chart.layer:
            one.data = chart.data
        chart.data = _alt.Undefined
    return chart


def _data(rows: Rows) -> Any:
    return _alt.Chart(inline(rows))


def _channel(kind: Any, axis: Axis) -> Any:
    # Arguments instead of methods: altair's methods make their help text anew at every use.
    labels = {"labelExpr": si_label(axis.unit)} if axis.unit else {"format": axis.format}
    scale = {"scale": _alt.Scale(**axis.scale)} if axis.scale else {}
    return kind(f"{axis.field}:Q", title=axis.title, axis=_alt.Axis(**{"tickCount": 5, **labels, **axis.axis}), **scale)


def _names(field: str, names: Sequence[str], **axis: Any) -> Any:
    return _alt.Y(f"{field}:N", sort=list(names), axis=_alt.Axis(**{"title": None, **axis}))


def _colour(rows: Rows, by: Series | str) -> dict[str, Any]:
    return {} if isinstance(by, str) else {"color": _legend(_alt.Color, rows, by)}


def _constant(by: Series | str) -> dict[str, Any]:
    return {"color": by} if isinstance(by, str) else {}


def _legend(kind: Any, rows: Rows, by: Series) -> Any:
    """The colour or the shape of a series; without a legend where it has no columns."""
    present = [name for name in by.colours if any(row[by.field] == name for row in rows)]
    ends = {"domain": present} | ({"range": [by.colours[name] for name in present]} if kind is _alt.Color else {})
    legend = _alt.Legend(**{"orient": "bottom", "columns": by.columns, **by.legend}) if by.columns else None
    return kind(f"{by.field}:N", title=by.title, scale=_alt.Scale(**ends), legend=legend)
