"""What a view of the report is: tables, charts and words about the whole report or about each group.

All formats print the same tables: HTML and Markdown all of them, CSV one by its name, the terminal the short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from dlbench.report.charts.chart import Chart
from dlbench.report.model import Group, Report
from dlbench.report.table import Cell, TextRow, TextTable
from dlbench.report.tabular import Table
from dlbench.report.wording import clean
from dlbench.stats.figure import Cell as Datum


def _parted(text: str) -> tuple[str, str]:
    value, found, rest = text.partition(" [")
    return value, f"[{rest}" if found else ""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, for people and for programs."""

    name: str
    """Stable name of the table for programs (`--table NAME`, `dlbench-NAME.csv`): a-z and -."""
    title: str
    text: Table
    """For people: header first; figures with unit and interval."""
    caption: str
    """What the figures are, with baseline, preset, engine, batch and data source where they have any."""
    columns: tuple[str, ...] = ()
    """Columns of the table for programs, units in their names; empty: there is none."""
    rows: tuple[Mapping[str, Datum], ...] = ()
    in_terminal: bool = False
    """Whether the terminal's summary prints it."""
    is_folded: bool = False
    is_drawn: bool = False
    is_sortable: bool = False
    max_rows: int | None = None
    is_data: Callable[[object], bool] = lambda row: True

    @property
    def names(self) -> tuple[str, ...]:
        """Columns for programs."""
        return self.columns

    def people(self, *, brief: bool = False) -> TextTable:
        """Cells of text."""
        rows = tuple(TextRow(tuple(Cell(*_parted(clean(text))) for text in row)) for row in self.text[1:])
        return TextTable(tuple(self.text[0]), rows)

    def records(self) -> list[dict[str, Datum]]:
        """Rows for programs."""
        return [{name: row.get(name) for name in self.columns} for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class View:
    """One view: about the whole report (before or after the groups), or about each group."""

    id: str
    """Stable: the anchor in the page, and the name of the template `reports/views/<id>.html.j2`, if it has its own."""
    title: str
    place: Literal["opening", "group", "closing"]
    is_shown: Callable[[Report], bool] = lambda report: True
    is_for: Callable[[Group], bool] = lambda group: True
    """Whether a view about groups has anything to say of one; where not, `remedy` stands in its stead."""
    remedy: Callable[[Group], str] = lambda group: ""
    """What would produce the data of a group that has none, in a sentence; empty: not worth a line."""
    report_remedy: Callable[[Report], str] = lambda report: ""
    """The same for a view about the whole report that is not shown."""
    words: Callable[[Group], tuple[str, ...]] = lambda group: ()
    """The finding, in sentences, before the charts."""
    charts: Callable[[Group], list[Chart]] = lambda group: []
    """Charts of a group that the view draws."""
    sheets: Callable[[Group], list[Sheet]] = lambda group: []
    """Tables of a group."""
    report_words: Callable[[Report], tuple[str, ...]] = lambda report: ()
    report_charts: Callable[[Report], list[Chart]] = lambda report: []
    """Charts of the whole report that the view draws."""
    report_sheets: Callable[[Report], list[Sheet]] = lambda report: []
    tables: ModuleType | None = None
    """The module whose tables its template prints, beside those that every template has."""
    template: str = ""
    """Its template in `reports/views/`; empty: `<id>.html.j2`. `sheets.html.j2` prints words, charts, sheets."""
