"""Four shapes of charts: lines over ranks, stacked bars, bars or dots with their intervals, points over an axis.

A shape takes rows (one per mark), axes, colours and tooltips; `finish` makes the `Chart` of it (see `_charts` of
`dlbench.views.energy`). Rows have `value`, and `low` and `high` if they have intervals (`figure_row`); an axis may name
another field. Further layers are added by `alt.layer(*lines(...).layer, ...)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlbench.lazy import alt
from dlbench.report.charts.chart import Rows, inline, tooltips
from dlbench.report.charts.style import IDEAL, si_label
from dlbench.report.wording import basis_text, figure_text
from dlbench.stats.estimates import Estimate

Tooltip = Mapping[str, str]  # Titles by field, see `tooltips`.
_alt: Any = alt  # Untyped: the types of altair's channels are a wall of overloads.


class Axis(NamedTuple):
    """An axis of numbers."""

    title: str
    field: str = "value"
    unit: str = ""  # Of labels with SI prefixes; empty: labels in `format`.
    format: str = ".4~g"  # A format of d3.
    scale: Mapping[str, Any] = {}  # Properties in Vega-Lite's words.
    axis: Mapping[str, Any] = {}  # Properties in Vega-Lite's words.


class Series(NamedTuple):
    """Marks that a field distinguishes by colour."""

    field: str
    colours: Mapping[str, str]  # In the order of the legend; those without a row are left out.
    columns: int = 2
    title: str | None = None
    legend: Mapping[str, Any] = {}  # Properties of the legend in Vega-Lite's words.


def figure_row(figure: Estimate, scale: float = 1.0) -> dict[str, Any]:
    """Returns a figure as a row: `value`, `low` and `high` (times `scale`), `shown` and `basis` in words."""
    row: dict[str, Any] = {"value": figure.value, "low": figure.low, "high": figure.high}
    for name, number in row.items():
        if number is not None:
            row[name] = number * scale
    return {**row, "shown": figure_text(figure), "basis": basis_text(figure)}


def lines(  # noqa: PLR0913  # A chart has that many parts.
    rows: Rows,
    y: Axis,
    series: Series | str,
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
    """Returns lines with points and intervals over a logarithmic axis (base 2) with a tick for each number of the rows.

    `series` has a line for each name; a text is the colour of one line. The axis, unless `x_axis` replaces it,
    contains the numbers of `reach` without a tick, and extends by the factor `room`. `ideal` is a field that is drawn
    as a dashed line. Forecasts have dotted lines and hollow points.
    """
    if x_axis is None:
        counts = sorted({row[x] for row in rows})
        domain = [min([*counts, *reach]) / room, max([*counts, *reach]) * room]
        scale = {"type": "log", "base": 2, "domain": domain, "nice": False}
        x_axis = Axis(title, field=x, format="d", scale=scale, axis={"values": counts, "grid": False})
    base = _data(rows).encode(x=_channel(_alt.X, x_axis), **_colour(rows, series))
    style: dict[str, Any] = {"strokeWidth": 2}
    if is_forecast:
        style["strokeDash"] = [2, 3]
    layers = [base.mark_line(**style, **_constant(series)).encode(y=_channel(_alt.Y, y))]
    if ideal:
        dashed = _data(rows).mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5)
        layers.insert(0, dashed.encode(x=_alt.X(f"{x}:Q"), y=f"{ideal}:Q"))
    if any(row.get("low") is not None for row in rows):
        rule = base.mark_rule(strokeWidth=3, opacity=0.5, **_constant(series))
        layers.append(rule.encode(y=_alt.Y("low:Q"), y2="high:Q"))
    point = base.mark_point(filled=not is_forecast, size=60, opacity=1, **_constant(series))
    return _layer(*layers, point.encode(y=_alt.Y(f"{y.field}:Q"), tooltip=tooltips(tooltip)))


def stacked(rows: Rows, x: Axis, series: Series, tooltip: Tooltip, *, names: Sequence[str] = ()) -> Any:
    """Returns horizontal bars of parts, a bar for each `place`; `order` of the rows says which part comes first.

    `names` are those of all bars in their order; by default that of the rows.
    """
    value = _channel(_alt.X, x).stack("zero")
    name = _names("place", names or list(dict.fromkeys(row["place"] for row in rows)))
    bars = _data(rows).mark_bar(height={"band": 0.72})
    return _layer(bars.encode(y=name, x=value, **_colour(rows, series), order="order:Q", tooltip=tooltips(tooltip)))


def intervals(  # noqa: PLR0913  # A chart has that many parts.
    rows: Rows,
    x: Axis,
    series: Series,
    tooltip: Tooltip,
    *,
    y: str,
    limit: int = 200,
    names: Mapping[str, Any] | None = None,
    reference: float | None = None,
) -> Any:
    """Returns a dot with its interval for each row, from above.

    `limit` is the width of the names in pixels; `names` are further properties of their axis, in Vega-Lite's words.
    """
    base = _data(rows).encode(y=_names(y, [row[y] for row in rows], labelLimit=limit, **(names or {})))
    point = base.mark_point(filled=True, size=80, opacity=1)
    rule = base.mark_rule(strokeWidth=3, opacity=0.55)
    layers = [point.encode(x=_channel(_alt.X, x), tooltip=tooltips(tooltip), **_colour(rows, series))]
    if any(row.get("low") != row.get("high") for row in rows):
        layers.insert(0, rule.encode(x=_alt.X("low:Q"), x2="high:Q", **_colour(rows, series)))
    if reference is not None:
        line = _data([{x.field: reference}]).mark_rule(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5)
        layers.append(line.encode(x=_alt.X(f"{x.field}:Q")))
    return _layer(*layers)


def scatter(  # noqa: PLR0913  # A chart has that many parts.
    rows: Rows,
    x: Axis,
    y: Axis,
    series: Series,
    tooltip: Tooltip,
    *,
    detail: str = "",
    line: float = 0.0,
    size: int = 60,
    opacity: float = 1.0,
) -> Any:
    """Returns points over an axis of numbers, such as steps or time.

    With `line`, a width in pixels, points of one colour and one `detail`, a field, are connected.
    """
    base = _data(rows).encode(
        x=_channel(_alt.X, x), y=_channel(_alt.Y, y), **_colour(rows, series), tooltip=tooltips(tooltip)
    )
    if detail:
        base = base.encode(detail=f"{detail}:N")
    layers = []
    if line:
        layers.append(base.mark_line(strokeWidth=line))
    marks = base.mark_point(filled=True, size=size, opacity=opacity)
    return _layer(*layers, marks.encode(shape=_legend(_alt.Shape, rows, series)))


def _layer(*layers: Any) -> Any:
    """Returns layers that hold their rows themselves, so that they combine with others: altair lifts shared data."""
    chart = _alt.layer(*layers)
    if chart.data is not _alt.Undefined:
        for layer in chart.layer:
            layer.data = chart.data
        chart.data = _alt.Undefined
    return chart


def _data(rows: Rows) -> Any:
    return _alt.Chart(inline(rows))


def _channel(kind: Any, axis: Axis) -> Any:
    # Arguments instead of methods: altair's methods make their help text at every use.
    options: dict[str, Any] = {"tickCount": 5, "format": axis.format}
    if axis.unit:
        options = {"tickCount": 5, "labelExpr": si_label(axis.unit)}
    scale = {}
    if axis.scale:
        scale["scale"] = _alt.Scale(**axis.scale)
    return kind(f"{axis.field}:Q", title=axis.title, axis=_alt.Axis(**{**options, **axis.axis}), **scale)


def _names(field: str, names: Sequence[str], **axis: Any) -> Any:
    return _alt.Y(f"{field}:N", sort=list(names), axis=_alt.Axis(**{"title": None, **axis}))


def _colour(rows: Rows, series: Series | str) -> dict[str, Any]:
    if isinstance(series, str):
        return {}
    return {"color": _legend(_alt.Color, rows, series)}


def _constant(series: Series | str) -> dict[str, Any]:
    if isinstance(series, str):
        return {"color": series}
    return {}


def _legend(kind: Any, rows: Rows, series: Series) -> Any:
    present = {row[series.field] for row in rows}
    names = [name for name in series.colours if name in present]
    scale: dict[str, Any] = {"domain": names}
    if kind is _alt.Color:
        scale["range"] = [series.colours[name] for name in names]
    legend = None
    if series.columns:
        legend = _alt.Legend(**{"orient": "bottom", "columns": series.columns, **series.legend})
    return kind(f"{series.field}:N", title=series.title, scale=_alt.Scale(**scale), legend=legend)
