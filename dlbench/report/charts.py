"""Charts of the report: Vega-Lite specifications with their data inside, the finding in words, the table behind them.
Rows of shapes, one per mark, have `value`, and `low` and `high` for an interval; see `finish`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from dlbench.report.chart_style import IDEAL, SUBTITLE_PIXELS, si_label
from dlbench.report.table import Sheet, TextTable, text_sheet
from dlbench.report.wording import basis_text, cleaned, figure_text
from dlbench.stats.estimates import Estimate

Rows = list[dict[str, Any]]
Tooltip = Mapping[str, str]  # Titles by field, see `tooltips`.
Layer = dict[str, Any]  # Rows, a mark and channels in Vega-Lite's words; or inner layers.
Channel = dict[str, Any]  # The definition of a channel, e.g. the x axis, in Vega-Lite's words.
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"  # Names the language; nothing is loaded from there.
DASHED: dict[str, Any] = {"color": IDEAL, "strokeDash": [5, 4], "strokeWidth": 1.5}
_TYPES = {"Q": "quantitative", "N": "nominal", "O": "ordinal", "T": "temporal"}


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
    layers: Sequence[Layer],
    group: Subject,
    *,
    name: str,
    title: str,
    alt: str,
    table: Sheet[Any] | TextTable | Sequence[Sequence[str]],
    size: tuple[int, int],
    still_width: int | None = None,
    axes: Literal["", "x", "y", "xy"] = "",
    resolve: dict[str, Any] | None = None,
) -> Chart:
    """Makes a `Chart` of layers, the first behind the others; `resolve` says which scales they do not share. `size` and
    `still_width` (without scripts) are those of the plot in pixels, `table` has the drawn numbers. A reader may switch
    `axes` between linear and logarithmic: their values must be above 0.
    """
    width, height = size
    # A longer line would widen the whole chart.
    subtitle = textwrap.wrap(group.label, int(((still_width or width) + 60) / SUBTITLE_PIXELS), max_lines=3)
    datasets: list[Any] = []
    spec: dict[str, Any] = {
        "$schema": _SCHEMA,
        "title": {"text": title, "subtitle": subtitle},
        "description": alt,
        "usermeta": {"axes": axes},
        "width": width,
        "height": height,
        "layer": [_with_named_rows(layer, datasets) for layer in layers],
        "datasets": {f"rows-{number}": rows for number, rows in enumerate(datasets)},
    }
    if resolve is not None:
        spec["resolve"] = resolve
    if not isinstance(table, TextTable | Sheet):
        table = text_sheet(name, title, table[0], table[1:])
    if isinstance(table, Sheet):
        table = table.to_display()
    return Chart(id=f"chart-{group.id}-{name}", title=title, alt=alt, spec=spec, table=table, still_width=still_width)


def _with_named_rows(layer: Layer, datasets: list[Any]) -> Layer:
    """Returns a layer that names its rows, which `datasets` has once for all layers of a chart."""
    if "layer" in layer:
        return {**layer, "layer": [_with_named_rows(inner, datasets) for inner in layer["layer"]]}
    rows = layer["data"]["values"]
    if rows not in datasets:
        datasets.append(rows)
    return {**layer, "data": {"name": f"rows-{datasets.index(rows)}"}}


def layer(rows: Sequence[Mapping[str, Any]], mark: str, encoding: Mapping[str, Any], **style: Any) -> Layer:
    """Returns a layer: a mark for each row (lines join rows), in a style in Vega-Lite's words. `encoding` has a
    definition or the text of `channel` for each channel.
    """
    channels = {}
    for name, definition in encoding.items():
        channels[name] = channel(definition) if isinstance(definition, str) else definition
    return {"data": {"values": rows}, "mark": {"type": mark, **style}, "encoding": channels}


def channel(text: str, **properties: Any) -> Channel:
    """Returns a channel of a field and its type (`value:Q`; an end of an interval has none) with further properties."""
    name, colon, kind = text.partition(":")
    if not colon:
        return {"field": name, **properties}
    return {"field": name, "type": _TYPES[kind], **properties}


def tooltips(titles: Mapping[str, str]) -> list[Channel]:
    """Returns the tooltip of a mark, of fields (texts, or `step:Q`, or `share:Q:.1%`) and their titles."""
    entries = []
    for text, title in titles.items():
        name, kind, number_format = [*text.split(":", 2), "", ""][:3]
        entry = channel(f"{name}:{kind or 'N'}", title=title)
        if number_format:
            entry["format"] = number_format
        entries.append(entry)
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
) -> list[Layer]:
    """Returns lines over a logarithmic axis (base 2) with a tick for each count, extended by `room` and to `reach`.
    `series` may be the colour of a single line, `ideal` is a field drawn dashed; forecasts are dotted and hollow.
    """
    if x_axis is None:
        counts = sorted({row[x] for row in rows})
        domain = [min([*counts, *reach]) / room, max([*counts, *reach]) * room]
        scale = {"type": "log", "base": 2, "domain": domain, "nice": False}
        x_axis = Axis(title, field=x, format="d", scale=scale, axis={"values": counts, "grid": False})
    shared: dict[str, Any] = {"x": _numbers(x_axis)}
    colour = {}
    if isinstance(series, str):
        colour = {"color": series}
    else:
        shared["color"] = palette(rows, series)
    style: dict[str, Any] = {"strokeWidth": 2, **colour}
    if is_forecast:
        style["strokeDash"] = [2, 3]
    layers = [layer(rows, "line", {**shared, "y": _numbers(y)}, **style)]
    if ideal:
        layers.insert(0, layer(rows, "line", {"x": f"{x}:Q", "y": f"{ideal}:Q"}, **DASHED))
    if any(row.get("low") is not None for row in rows):
        ends = {**shared, "y": "low:Q", "y2": "high"}
        layers.append(layer(rows, "rule", ends, strokeWidth=3, opacity=0.5, **colour))
    dots = {**shared, "y": f"{y.field}:Q", "tooltip": tooltips(tooltip)}
    return [*layers, layer(rows, "point", dots, filled=not is_forecast, size=60, opacity=1, **colour)]


def stacked(rows: Rows, x: Axis, series: Series, tooltip: Tooltip, *, names: Sequence[str] = ()) -> list[Layer]:
    """Returns horizontal bars of parts, by `order` of the rows; a bar for each `place`, in the order of `names`."""
    encoding = {
        "y": _names("place", names or list(dict.fromkeys(row["place"] for row in rows))),
        "x": {**_numbers(x), "stack": "zero"},
        "color": palette(rows, series),
        "order": "order:Q",
        "tooltip": tooltips(tooltip),
    }
    return [layer(rows, "bar", encoding, height={"band": 0.72})]


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
) -> list[Layer]:
    """Returns a dot with its interval for each row, from above; `limit` is the width of the names in pixels."""
    shared = {"y": _names(y, [row[y] for row in rows], labelLimit=limit, **(names or {}))}
    shared["color"] = palette(rows, series)
    dots = {**shared, "x": _numbers(x), "tooltip": tooltips(tooltip)}
    layers = [layer(rows, "point", dots, filled=True, size=80, opacity=1)]
    if any(row.get("low") != row.get("high") for row in rows):
        ends = {**shared, "x": "low:Q", "x2": "high"}
        layers.insert(0, layer(rows, "rule", ends, strokeWidth=3, opacity=0.55))
    if reference is not None:
        layers.append(layer([{x.field: reference}], "rule", {"x": f"{x.field}:Q"}, **DASHED))
    return layers


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
) -> list[Layer]:
    """Returns points; with `line`, a width in pixels, those of one colour and one `detail`, a field, are connected."""
    shared = {"x": _numbers(x), "y": _numbers(y), "tooltip": tooltips(tooltip), "color": palette(rows, series)}
    if detail:
        shared["detail"] = channel(f"{detail}:N")
    layers = []
    if line:
        layers.append(layer(rows, "line", shared, strokeWidth=line))
    shape = _legend(rows, series)
    return [*layers, layer(rows, "point", {**shared, "shape": shape}, filled=True, size=size, opacity=opacity)]


def _numbers(axis: Axis) -> Channel:
    options: dict[str, Any] = {"tickCount": 5, "format": axis.format}
    if axis.unit:
        options = {"tickCount": 5, "labelExpr": si_label(axis.unit)}
    numbers = channel(f"{axis.field}:Q", title=axis.title, axis={**options, **axis.axis})
    if axis.scale:
        numbers["scale"] = axis.scale
    return numbers


def _names(name: str, names: Sequence[str], **axis: Any) -> Channel:
    return channel(f"{name}:N", sort=list(names), axis={"title": None, **axis})


def palette(rows: Rows, series: Series) -> Channel:
    """Returns the channel of the colours of a series, with those that the rows have in the legend."""
    legend = _legend(rows, series)
    legend["scale"]["range"] = [series.colours[name] for name in legend["scale"]["domain"]]
    return legend


def _legend(rows: Rows, series: Series) -> Channel:
    present = {row[series.field] for row in rows}
    names = [name for name in series.colours if name in present]
    legend = None
    if series.columns:
        legend = {"orient": "bottom", "columns": series.columns, **series.legend}
    return channel(f"{series.field}:N", title=series.title, scale={"domain": names}, legend=legend)
