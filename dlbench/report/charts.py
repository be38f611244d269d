"""Charts of the report: Vega-Lite specifications with their data inside, the finding in words, the table behind them.
Rows of shapes, one per mark, have `value`, and `low` and `high` for an interval; see `finish`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from dlbench.lazy import alt
from dlbench.report.chart_style import IDEAL, SUBTITLE_PIXELS, si_label
from dlbench.report.table import Sheet, TextTable, text_sheet
from dlbench.report.wording import basis_text, cleaned, figure_text
from dlbench.stats.estimates import Estimate

Rows = list[dict[str, Any]]
Tooltip = Mapping[str, str]  # Titles by field, see `tooltips`.
_alt: Any = alt  # Untyped: the types of altair's channels are a wall of overloads.


def inline(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns the data of many marks, as a tuple: of lists altair copies each row whenever a chart is changed."""
    return alt.InlineData(values=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, not yet drawn. Nothing in it is loaded from anywhere."""

    id: str
    title: str
    alt: str  # What the chart shows, in words and numbers.
    spec: dict[str, Any]  # Vega-Lite, without the configuration that all charts share (`chart_style.CONFIG`).
    table: TextTable  # The numbers it is drawn from.
    still_width: int | None = None  # Plot width where a page draws it without scripts, pixels; None: that of the spec.

    def __post_init__(self) -> None:
        for name in ("title", "alt", "spec"):
            object.__setattr__(self, name, cleaned(getattr(self, name)))


class Subject(Protocol):
    """The subject of a chart, e.g. a group of runs."""

    @property
    def id(self) -> str:
        """Unique in the page."""

    @property
    def label(self) -> str:
        """The subject in words."""


class ReportSubject(NamedTuple):
    """The subject of a chart about the whole report."""

    id: str
    label: str


def finish(  # noqa: PLR0913  # Each argument is a property of the chart.
    chart: Any,
    group: Subject,
    *,
    name: str,
    title: str,
    alt: str,
    table: Sheet[Any] | TextTable | Sequence[Sequence[str]],
    size: tuple[int, int],
    still_width: int | None = None,
    axes: Literal["", "x", "y", "xy"] = "",
) -> Chart:
    """Makes a `Chart` of an altair chart. `size` and `still_width` (without scripts) are those of the plot in pixels,
    `table` has the drawn numbers. A reader may switch `axes` between linear and logarithmic: their values must be above
    0.
    """
    from altair.utils import schemapi

    width, height = size
    sized = chart.properties(width=width, height=height, description=alt)
    spec: dict[str, Any] = sized.to_dict(validate=schemapi.DEBUG_MODE)
    # The page gives all charts one configuration.
    spec.pop("config", None)
    # A longer line would widen the whole chart.
    subtitle = textwrap.wrap(group.label, int(((still_width or width) + 60) / SUBTITLE_PIXELS), max_lines=3)
    spec["title"] = {"text": title, "subtitle": subtitle}
    spec["usermeta"] = {"axes": axes}
    if not isinstance(table, TextTable | Sheet):
        table = text_sheet(name, title, table[0], table[1:])
    if isinstance(table, Sheet):
        table = table.to_display()
    return Chart(id=f"chart-{group.id}-{name}", title=title, alt=alt, spec=spec, table=table, still_width=still_width)


def tooltips(titles: Mapping[str, str]) -> list[Any]:
    """Returns the tooltip of a mark, of fields (texts, or `step:Q`, or `share:Q:.1%`) and their titles."""
    entries = []
    for field, title in titles.items():
        name, kind, number_format = [*field.split(":", 2), "", ""][:3]
        entries.append(alt.Tooltip(f"{name}:{kind or 'N'}", title=title, format=number_format or alt.Undefined))
    return entries


def short(value: float | None) -> float | None:
    """Returns a number with four digits, enough for a chart."""
    return None if value is None else float(f"{value:.4g}")


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
    """Returns lines over a logarithmic axis (base 2) with a tick for each count, extended by `room` and to `reach`.
    `series` may be the colour of a single line, `ideal` is a field drawn dashed; forecasts are dotted and hollow.
    """
    if x_axis is None:
        counts = sorted({row[x] for row in rows})
        domain = [min([*counts, *reach]) / room, max([*counts, *reach]) * room]
        scale = {"type": "log", "base": 2, "domain": domain, "nice": False}
        x_axis = Axis(title, field=x, format="d", scale=scale, axis={"values": counts, "grid": False})
    base = _data(rows).encode(x=_channel(_alt.X, x_axis))
    colour = {}
    if isinstance(series, str):
        colour = {"color": series}
    else:
        base = base.encode(color=_legend(_alt.Color, rows, series))
    style: dict[str, Any] = {"strokeWidth": 2}
    if is_forecast:
        style["strokeDash"] = [2, 3]
    layers = [base.mark_line(**style, **colour).encode(y=_channel(_alt.Y, y))]
    if ideal:
        dashed = _data(rows).mark_line(color=IDEAL, strokeDash=[5, 4], strokeWidth=1.5)
        layers.insert(0, dashed.encode(x=_alt.X(f"{x}:Q"), y=f"{ideal}:Q"))
    if any(row.get("low") is not None for row in rows):
        rule = base.mark_rule(strokeWidth=3, opacity=0.5, **colour)
        layers.append(rule.encode(y=_alt.Y("low:Q"), y2="high:Q"))
    point = base.mark_point(filled=not is_forecast, size=60, opacity=1, **colour)
    return _layer(*layers, point.encode(y=_alt.Y(f"{y.field}:Q"), tooltip=tooltips(tooltip)))


def stacked(rows: Rows, x: Axis, series: Series, tooltip: Tooltip, *, names: Sequence[str] = ()) -> Any:
    """Returns horizontal bars of parts, by `order` of the rows; a bar for each `place`, in the order of `names`."""
    value = _channel(_alt.X, x).stack("zero")
    name = _names("place", names or list(dict.fromkeys(row["place"] for row in rows)))
    bars = _data(rows).mark_bar(height={"band": 0.72})
    colour = _legend(_alt.Color, rows, series)
    return _layer(bars.encode(y=name, x=value, color=colour, order="order:Q", tooltip=tooltips(tooltip)))


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
    """Returns a dot with its interval for each row, from above; `limit` is the width of the names in pixels."""
    base = _data(rows).encode(y=_names(y, [row[y] for row in rows], labelLimit=limit, **(names or {})))
    point = base.mark_point(filled=True, size=80, opacity=1)
    rule = base.mark_rule(strokeWidth=3, opacity=0.55)
    colour = _legend(_alt.Color, rows, series)
    layers = [point.encode(x=_channel(_alt.X, x), tooltip=tooltips(tooltip), color=colour)]
    if any(row.get("low") != row.get("high") for row in rows):
        layers.insert(0, rule.encode(x=_alt.X("low:Q"), x2="high:Q", color=colour))
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
    """Returns points; with `line`, a width in pixels, those of one colour and one `detail`, a field, are connected."""
    base = _data(rows).encode(x=_channel(_alt.X, x), y=_channel(_alt.Y, y), tooltip=tooltips(tooltip))
    base = base.encode(color=_legend(_alt.Color, rows, series))
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
