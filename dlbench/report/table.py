"""Tables for people and for programs: each `Column` makes cells of text, and raw values for CSV and JSON.

A number is named once, where it is a field of a dataclass::

    global_batch: int = field(metadata=column("Global batch", unit="samples", is_brief=True))
    noise_scale: Estimate | None = field(metadata=column("Noise scale, samples", "noise_scale_samples"))

    Sheet(columns=columns_of(NoisePoint), rows=points, ...)  # the fields with a column, in their order

`columns_of(NoisePoint, "ranks", "global_batch", "runs=noise_scale.n")` picks fields, attributes of attributes and
`Column`s; those without metadata are for programs only.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from dlbench.report.wording import DASH, clean, estimate_parts, interval_text, number_text, value_text
from dlbench.stats.estimates import Estimate

R = TypeVar("R")

Value = Estimate | str | int | float | bool | None
Datum = str | int | float | bool | None  # A value for programs.

RowKind = Literal["", "sum", "part"]  # `sum`: of the rows above; `part`: of the row above it.

MAX_TEXT = 2000  # Characters of a cell; longer foreign text is cut.

_COLUMN = "column"  # Key of a field's metadata.


@dataclass(frozen=True)
class Cell:
    """A value as people see it. The interval is separate, so that a format may print it smaller or leave it out."""

    text: str
    interval: str = ""  # E.g. ``[81.9, 84.2]``; empty if none.
    items: tuple[str, ...] = ()  # Further lines that a page may fold away behind the text.
    number: float | None = None  # Sort key of the cell; None: its text.

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()

    @property
    def sorts_by(self) -> float | Literal[""] | None:
        """The number, an empty text for a missing value, None for text."""
        return "" if self.text == DASH else self.number


def cell_of(value: Value | Cell, unit: str = "", limit: int = MAX_TEXT) -> Cell:
    """Returns a value as text that suits its type and unit; an en dash for None."""
    if isinstance(value, Cell):
        items = tuple(clean(item) for item in value.items)
        return Cell(clean(value.text, limit), clean(value.interval), items, value.number)
    if isinstance(value, Estimate):
        return Cell(value_text(value), interval_text(value), number=value.value)
    if value is None:
        return Cell(DASH)
    if value is True:
        return Cell("yes")
    if value is False:
        return Cell("no")
    if isinstance(value, str):
        return Cell(clean(value, limit))
    if isinstance(value, int) and not unit:
        return Cell(str(value), number=value)
    return Cell(number_text(value, unit), number=value)


def reader(source: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the function that reads a row: the given one, or getattr along a path, e.g. ``point.throughput.n``; None
    if an attribute on the way is None. The empty path is the row itself.
    """
    if not isinstance(source, str):
        return source
    names = [name for name in source.split(".") if name]

    def read(row: Any) -> Any:
        value = row
        for name in names:
            if value is None:
                return None
            value = getattr(value, name)
        return value

    return read


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column; `source` and `text` are functions of a row or paths of attributes, see `reader`."""

    name: str  # For programs, with the unit (`step_s`): a-z, 0-9 and _; empty: for people only.
    title: str  # For people; empty: for programs only.
    source: str | Callable[[R], Value]  # The raw value: an estimate, a number, a text, None if missing.
    text: str | Callable[[R], Value | Cell] | None = None  # The value for people; None: the raw value.
    unit: str = ""  # Unit of plain numbers, as `Estimate.unit`.
    has_interval: bool = False  # Whether programs get `NAME_low` and `NAME_high` as well: for columns of estimates.
    is_brief: bool = False  # Whether a narrow format shows it. If no column of a sheet is brief, all are shown.
    limit: int = MAX_TEXT  # Characters of a text.

    @property
    def names(self) -> tuple[str, ...]:
        if not self.name:
            return ()
        if self.has_interval:
            return self.name, f"{self.name}_low", f"{self.name}_high"
        return (self.name,)

    def value(self, row: R) -> Value:
        value: Value = reader(self.source)(row)
        return value

    def cells(self, rows: Iterable[R]) -> list[Cell]:
        read = reader(self.text or self.source)
        return [cell_of(read(row), self.unit, self.limit) for row in rows]

    def data(self, row: R) -> tuple[Datum, ...]:
        value = self.value(row)
        low = high = None
        if isinstance(value, Estimate):
            low, high = value.low, value.high
            value = value.value
        elif isinstance(value, str):
            value = clean(value, self.limit)
        return (value, low, high) if self.has_interval else (value,)


def column(  # noqa: PLR0913  # Each argument is a property of the column.
    title: str = "",
    name: str | None = None,
    *,
    value: Callable[[Any], Value] | None = None,
    text: Callable[[Any], Value | Cell] | None = None,
    missing: str = "",
    unit: str = "",
    has_interval: bool | None = None,
    is_brief: bool = False,
    limit: int = MAX_TEXT,
) -> dict[str, Any]:
    """Returns metadata of a dataclass field that is a column, for `columns_of`; `value` and `text` are functions of the
    field's value and not called for None, for which people read `missing`.
    """
    text_of_value: Callable[[Any], Value | Cell] = reader(text or value or "")

    def display(field_value: Any) -> Value | Cell:
        if field_value is None:
            return missing or None
        return text_of_value(field_value)

    # The column reads the value of the field, not its object.
    of_value = Column[Any]("", title, value or "", display, unit, is_brief=is_brief, limit=limit)
    chosen = {"name": name, "has_interval": has_interval}
    return {_COLUMN: (of_value, {key: choice for key, choice in chosen.items() if choice is not None})}


def columns_of(
    kind: type[Any],
    *picks: str | Column[Any],
    of: str | Callable[[Any], Any] | None = None,
    titles: Mapping[str, str] | None = None,
) -> tuple[Column[Any], ...]:
    """Returns columns of a dataclass, as in the example above; `of` reads the object of `kind` in a row, `titles` are
    by name. Raises `AttributeError`: the class has no such field, or no column of a title's name.
    """
    if is_dataclass(kind):
        kind_fields: Mapping[str, Any] = {field.name: field for field in fields(kind)}
    else:
        kind_fields = kind.model_fields
    read_object = reader(of or "")
    columns: list[Column[Any]] = []
    for pick in picks or [name for name, field in kind_fields.items() if _COLUMN in field.metadata]:
        if isinstance(pick, Column):
            text = pick.text and _read_part(read_object, pick.text)
            columns.append(replace(pick, source=_read_part(read_object, pick.source), text=text))
        else:
            columns.append(_picked(kind, kind_fields, pick, read_object))
    titles = titles or {}
    unknown = titles.keys() - {table_column.name for table_column in columns}
    if unknown:
        raise AttributeError(f"{kind.__name__} has no column {', '.join(sorted(unknown))}")
    return tuple(
        replace(table_column, title=titles.get(table_column.name, table_column.title)) for table_column in columns
    )


def _picked(
    kind: type[Any], kind_fields: Mapping[str, Any], pick: str, read_object: Callable[[Any], Any]
) -> Column[Any]:
    """Returns the column of a pick: ``FIELD`` or ``NAME=PATH``."""
    name, _, path = pick.rpartition("=")
    first = path.split(".")[0]
    if first not in kind_fields and not hasattr(kind, first):
        raise AttributeError(f"{kind.__name__} has no field {first}")
    read_value = _chain(reader(path), read_object)
    if name or first not in kind_fields:
        return Column(name or path, "", read_value)
    field = kind_fields[first]
    is_estimate = str(getattr(field, "type", "")).startswith("Estimate")
    if _COLUMN not in field.metadata:  # Pydantic has a list there, which is empty.
        return Column(path, "", read_value, has_interval=is_estimate)
    of_value, chosen = field.metadata[_COLUMN]
    source, text = _read_part(read_value, of_value.source), _chain(of_value.text, read_value)
    return replace(of_value, **{"name": first, "has_interval": is_estimate, **chosen}, source=source, text=text)


def _chain(read_value: Callable[[Any], Any], read_object: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(row: Any) -> Any:
        return read_value(read_object(row))

    return read


def _read_part(read_object: Callable[[Any], Any], source: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    read_value = reader(source)

    def read(row: Any) -> Any:
        part = read_object(row)
        return None if part is None else read_value(part)

    return read


def constant(name: str, value: Value) -> Column[Any]:
    """Returns a column for programs that has one value in all rows."""

    def read(row: object) -> Value:
        return value

    return Column(name, "", read)


def drop_empty_columns(
    columns: Iterable[Column[R]], rows: Sequence[R], keep: Sequence[str] = ()
) -> tuple[Column[R], ...]:
    """Hides columns from people that are zero, None or empty in every row, except those named in `keep`."""
    columns = list(columns)
    for position, candidate in enumerate(columns):
        if candidate.name not in keep and all(_is_empty(candidate.value(row)) for row in rows):
            columns[position] = replace(candidate, title="")
    return tuple(columns)


def _is_empty(value: Value) -> bool:
    if isinstance(value, Estimate):
        return not value.value
    return not value and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Pivot(Generic[R]):
    """Shows people long rows as a wide table: a line for each `down`, a column for each `across`; see `reader`."""

    corner: str  # Title of the first column.
    down: str | Callable[[R], str]
    across: str | Callable[[R], str]
    cell: str | Callable[[R], Value | Cell]
    unit: str = ""


@dataclass(frozen=True)
class TextRow:
    """A line of a table for people."""

    cells: tuple[Cell, ...]
    kind: RowKind = ""


@dataclass(frozen=True)
class TextTable:
    """A table for people."""

    header: tuple[str, ...]
    rows: tuple[TextRow, ...]


def always(row: Any) -> bool:
    """Accepts each row."""
    return True


def never(row: Any) -> bool:
    """Accepts no row."""
    return False


def _plain(row: Any) -> RowKind:
    return ""


@dataclass(frozen=True, kw_only=True)
class Sheet(Generic[R]):
    """A table."""

    name: str  # Stable name for programs (`--table NAME`, `dlbench-NAME.csv`): a-z, 0-9 and -.
    title: str
    columns: tuple[Column[R], ...]
    rows: Sequence[R]
    caption: str = ""  # Says what the figures are, with their conditions.
    pivot: Pivot[R] | None = None  # Another arrangement for people; the columns then are for programs.
    is_data: Callable[[R], bool] = always  # Whether programs get the row.
    is_shown: Callable[[R], bool] = always  # Whether people get the row.
    order: Callable[[R], float] | None = None  # Sorts the rows for people, smallest first; programs get them unsorted.
    kind: Callable[[R], RowKind] = _plain
    in_terminal: bool = False  # Whether the terminal's summary prints it.
    is_sortable: bool = False
    is_folded: bool = False  # Whether a page shows it only when it is opened.
    is_drawn: bool = False  # Whether a chart shows these numbers: a page prints them only if it is not drawn.
    max_rows: int | None = None  # Rows in a page and in the terminal's summary; the CSV holds all.

    def __post_init__(self) -> None:
        for name in ("title", "caption"):
            object.__setattr__(self, name, clean(getattr(self, name)))

    def to_display(self, *, brief: bool = False) -> TextTable:
        """Returns header and cells of text; with `brief`, the brief columns alone."""
        rows = [row for row in self.rows if self.is_shown(row)]
        if self.order is not None:
            rows.sort(key=self.order)
        if self.pivot is not None:
            return _pivoted(self.pivot, rows, self.kind)
        columns = [column for column in self.columns if column.title]
        if brief and any(column.is_brief for column in columns):
            columns = [column for column in columns if column.is_brief]
        lines = []
        for row, *cells in zip(rows, *(column.cells(rows) for column in columns), strict=True):
            lines.append(TextRow(tuple(cells), self.kind(row)))
        return TextTable(tuple(clean(column.title) for column in columns), tuple(lines))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns for programs; empty: the sheet is for people only."""
        return tuple(itertools.chain.from_iterable(column.names for column in self.columns))

    def units(self) -> dict[str, str]:
        """Returns the units of the columns for programs that hold estimates."""
        units: dict[str, str] = {}
        rows = [row for row in self.rows if self.is_data(row)]
        for column in self.columns:
            values = map(column.value, rows)
            unit = next((value.unit for value in values if isinstance(value, Estimate) and value.unit), "")
            if unit:
                units |= dict.fromkeys(column.names, unit)
        return units

    def records(self) -> Iterator[dict[str, Datum]]:
        for row in self.rows:
            if not self.is_data(row):
                continue
            record: dict[str, Datum] = {}
            for column in self.columns:
                if column.name:
                    record.update(zip(column.names, column.data(row), strict=True))
            yield record


def times_cell(factor: Estimate | None, decimals: int = 2) -> Cell:
    """Returns a factor, e.g. ``1.80x [1.75, 1.86]``; `decimals` are those of a factor without an interval."""
    if factor is None:
        return Cell(DASH)
    number, interval, _ = estimate_parts(factor, decimals)
    return Cell(f"{number}x", interval, number=factor.value)


def unit_cell(figure: Estimate | None, *, with_interval: bool = True) -> Cell:
    """Returns a figure with its unit, even if the numbers alone have none, e.g. ``24.3 [24.1, 24.5] J``."""
    if figure is None:
        return Cell(DASH)
    unit = f" {figure.unit}"
    if figure.unit in ("s", "fraction"):
        unit = ""
    interval = interval_text(figure) if with_interval else ""
    if interval:
        return Cell(value_text(figure), interval + unit, number=figure.value)
    return Cell(value_text(figure) + unit, number=figure.value)


def text_sheet(name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[Value]]) -> Sheet[Any]:
    """Returns a table of ready texts, for people only."""
    columns = [Column[Any]("", heading, operator.itemgetter(index)) for index, heading in enumerate(header)]
    return Sheet(name=name, title=title, columns=tuple(columns), rows=tuple(map(tuple, rows)))


def _pivoted(pivot: Pivot[R], rows: Sequence[R], kind: Callable[[R], RowKind]) -> TextTable:
    read_line, read_column, read_cell = reader(pivot.down), reader(pivot.across), reader(pivot.cell)
    headings = list(dict.fromkeys(map(read_column, rows)))
    lines: dict[str, dict[str, Cell]] = {}
    kinds: dict[str, RowKind] = {}
    for row in rows:
        line = read_line(row)
        lines.setdefault(line, {})[read_column(row)] = cell_of(read_cell(row), pivot.unit)
        kinds.setdefault(line, kind(row))
    text_rows = []
    for line, cells in lines.items():
        row_cells = [cells.get(heading, Cell(DASH)) for heading in headings]
        text_rows.append(TextRow((Cell(clean(line)), *row_cells), kinds[line]))
    return TextTable((clean(pivot.corner), *map(clean, headings)), tuple(text_rows))


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table for programs of a whole document: the sheets of one name below each other."""

    name: str
    title: str
    columns: tuple[str, ...] = ()
    parts: tuple[tuple[Mapping[str, Datum], Sheet[Any]], ...] = ()  # Sheets, each with its section's columns in front.

    def records(self) -> Iterator[dict[str, Datum]]:
        for before, sheet in self.parts:
            for row in sheet.records():
                yield {**before, **row}

    @property
    def rows(self) -> tuple[dict[str, Datum], ...]:
        return tuple(self.records())


def named_table(name: str, title: str, columns: Iterable[Column[Any]], before: Sequence[str] = ()) -> NamedTable:
    """Returns a table without rows; `before` names the columns that a section puts in front."""
    names = itertools.chain(before, *(sheet_column.names for sheet_column in columns))
    return NamedTable(name=name, title=title, columns=tuple(dict.fromkeys(names)))
