"""A chart of the report: a Vega-Lite specification with its data inside, the finding in words, the table behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from dlbench.lazy import alt
from dlbench.report.charts.style import SUBTITLE_PIXELS
from dlbench.report.table import Sheet, TextTable, text_sheet
from dlbench.report.wording import cleaned

Rows = list[dict[str, Any]]


def inline(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns the data of many marks, as a tuple: of lists altair copies each row whenever a chart is changed."""
    return alt.InlineData(values=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, not yet drawn. Nothing in it is loaded from anywhere."""

    id: str
    title: str
    alt: str  # What the chart shows, in words and numbers.
    spec: dict[str, Any]  # Vega-Lite, without the configuration that all charts share (`style.CONFIG`).
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
    """Makes a `Chart` of an altair chart; its subtitle names the subject even if it is cut out of the page.

    `name` is unique among the subject's charts, `alt` the finding in words, `table` the drawn numbers (rows of text
    begin with the header). `size` and `still_width` (if no script fits it into the window) are those of the plot in
    pixels. A reader may switch `axes` between linear and logarithmic: all their values must be above 0.
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
    chart_id = f"chart-{group.id}-{name}"
    return Chart(id=chart_id, title=title, alt=alt, spec=spec, table=table, still_width=still_width)


def tooltips(titles: Mapping[str, str]) -> list[Any]:
    """Returns the tooltip of a mark, of fields (texts, or `step:Q`, or `share:Q:.1%`) and their titles."""
    entries = []
    for field, title in titles.items():
        name, kind, number_format = [*field.split(":", 2), "", ""][:3]
        entries.append(alt.Tooltip(f"{name}:{kind or 'N'}", title=title, format=number_format or alt.Undefined))
    return entries


def short(value: float | None) -> float | None:
    """Returns a number with four digits, enough for a chart."""
    if value is None:
        return None
    return float(f"{value:.4g}")
