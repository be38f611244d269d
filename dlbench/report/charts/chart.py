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
    """The data of many marks. A tuple: of lists altair copies each row whenever a chart is changed or layered."""
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
    """What a chart is about."""

    @property
    def id(self) -> str:
        """Unique in the page."""

    @property
    def label(self) -> str:
        """In words."""


class ReportSubject(NamedTuple):
    """What a chart of the whole report is about."""

    id: str
    label: str


def finish(
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
    """An altair chart becomes a `Chart`; its subtitle says what it is about even where it is cut out of the page.

    `name` is unique among the group's charts; `alt` is its finding in words; `table` has the numbers it is drawn
    from, as rows of text header first; `size` is that of the plot, pixels; `still_width` its width where no script
    fits it into the window, if less. A reader may switch `axes` between linear and logarithmic: all their values must
    be above 0.
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
    if not isinstance(table, TextTable):
        table = (table if isinstance(table, Sheet) else text_sheet(name, title, table[0], table[1:])).to_display()
    own_id = f"chart-{group.id}-{name}"
    return Chart(id=own_id, title=title, alt=alt, spec=spec, table=table, still_width=still_width)


def tooltips(titles: Mapping[str, str]) -> list[Any]:
    """What a mark says under the pointer: fields, which are texts, or `step:Q`, or `share:Q:.1%`, and their titles."""
    found = []
    for field, title in titles.items():
        name, _, rest = field.partition(":")
        kind, _, form = rest.partition(":")
        found.append(alt.Tooltip(f"{name}:{kind or 'N'}", title=title, format=form or alt.Undefined))
    return found


def short(value: float | None) -> float | None:
    """A number as a chart needs it: four digits."""
    return None if value is None else float(f"{value:.4g}")
