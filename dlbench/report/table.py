"""One table for people and for programs: `Column`s over rows make header, cells, CSV columns and records alike.

Text is made last: a sheet holds rows and functions of them; formats ask for `to_display` (cells of text) or `records`
(raw numbers by column name). Text from outside is made harmless here, whatever format asks for it.

A number is named once, where it is a field of a dataclass; JSON has the field's own name::

    @dataclass(frozen=True, kw_only=True)
    class NoisePoint:
        ranks: int
        global_batch: int = field(metadata=column("Global batch", unit="samples", is_brief=True))
        noise_scale: Estimate | None = field(metadata=column("Noise scale, samples", "noise_scale_samples"))
        basis: str = field(metadata=column("From", ""))

    Sheet(columns=columns_of(NoisePoint), rows=points, ...)  # the fields with a column, in their order

`columns_of(NoisePoint, "ranks", "global_batch", "runs=noise_scale.n")` picks columns and their order: `ranks` has no
metadata and so is for programs only; `runs` is an attribute of an attribute, for programs only. A `Column` over the
same class may stand between them. `of=lambda row: row.point` finds the dataclass in a row that holds several;
`titles={"global_batch": ""}` replaces titles that depend on the table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from dlbench.report.wording import DASH, clean, interval_text, number_text, shown, value_text
from dlbench.stats.estimates import Estimate

R = TypeVar("R")

Value = Estimate | str | int | float | bool | None
Datum = str | int | float | bool | None  # One value of a table for programs.

RowKind = Literal["", "sum", "part"]  # `sum` of the rows above, `part` of the row above it.

MAX_TEXT = 2000  # Characters of a cell; longer foreign text is cut.

_COLUMN = "column"  # Key of a field's metadata.


@dataclass(frozen=True)
class Cell:
    """What people see of one value; the interval apart, so that a format may set it smaller or leave it out."""

    text: str
    interval: str = ""  # E.g. ``[81.9, 84.2]``; empty if none.
    items: tuple[str, ...] = ()  # Further lines that a page may fold away behind the text.
    number: float | None = None  # What the cell is sorted by; None: its text.

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()

    @property
    def sorts_by(self) -> float | Literal[""] | None:
        """The number, an empty text for what is missing, None for text."""
        return "" if self.text == DASH else self.number


def cell_of(value: Value | Cell, unit: str = "", limit: int = MAX_TEXT) -> Cell:
    """A value in the form that suits its type and unit; an en dash for what is missing."""
    if isinstance(value, Cell):
        return Cell(
            clean(value.text, limit), clean(value.interval), tuple(clean(item) for item in value.items), value.number
        )
    if isinstance(value, Estimate):
        return Cell(value_text(value), interval_text(value), number=value.value)
    if value is None:
        return Cell(DASH)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, str):
        return Cell(clean(value, limit))
    if isinstance(value, int) and not unit:
        return Cell(str(value), number=value)
    return Cell(number_text(value, unit), number=value)


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column: its name for programs, its title for people, and what a row has there."""

    name: str  # For programs, with the unit (`step_s`): a-z, 0-9 and _; empty: for people only.
    title: str  # For people; empty: for programs only.
    value: Callable[[R], Value]  # Raw: an estimate, a number, a text; None where there is none.
    text: Callable[[R], Value | Cell] | None = None  # What people see, where it is not the value itself.
    unit: str = ""  # Of plain numbers, as `Estimate.unit`.
    has_interval: bool = False  # Whether programs get `NAME_low` and `NAME_high` as well: for columns of estimates.
    is_brief: bool = False  # Whether a narrow format shows it; where no column of a sheet is, all are.
    limit: int = MAX_TEXT  # Characters of a text.

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns for programs."""
        if not self.name:
            return ()
        return (self.name, f"{self.name}_low", f"{self.name}_high") if self.has_interval else (self.name,)

    def cell(self, row: R) -> Cell:
        """For people."""
        return cell_of(self.value(row) if self.text is None else self.text(row), self.unit, self.limit)

    def data(self, row: R) -> tuple[Datum, ...]:
        """For programs, one value for each of `names`."""
        value = self.value(row)
        if isinstance(value, Estimate):
            return (value.value, value.low, value.high) if self.has_interval else (value.value,)
        first = clean(value, self.limit) if isinstance(value, str) else value
        return (first, None, None) if self.has_interval else (first,)


def column(
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
    """Metadata of a dataclass field that is a column, from which `columns_of` makes it.

    `name`: None: the field's own; empty: for people only. `value` and `text` (where it is not None) are of the field's
    value; `missing` is what people see of None. `has_interval`: None: fields annotated as `Estimate` have one.
    """

    def raw(found: Any) -> Value:
        return found if found is None or value is None else value(found)

    def display(found: Any) -> Value | Cell:
        if found is None:
            return Cell(missing) if missing else None
        return raw(found) if text is None else text(found)

    return {_COLUMN: (name, has_interval, Column("", title, raw, display, unit, is_brief=is_brief, limit=limit))}


def columns_of(
    kind: type[Any],
    *picks: str | Column[Any],
    of: Callable[[Any], Any] | None = None,
    titles: Mapping[str, str] | None = None,
) -> tuple[Column[Any], ...]:
    """The columns of a dataclass, as in the example above; without picks of every field that has one.

    Where `of` finds None in a row, every value is None. `titles` are by column name.

    Raises `AttributeError`: the class has no such field, or no column of a title's name.
    """
    known: Mapping[str, Any] = {one.name: one for one in fields(kind)} if is_dataclass(kind) else kind.model_fields

    def taken(pick: str | Column[Any]) -> Column[Any]:
        if isinstance(pick, Column):
            text = None if pick.text is None else _reached(of, "", pick.text)
            return replace(pick, value=_reached(of, "", pick.value), text=text)
        name, _, path = pick.rpartition("=")
        first = path.split(".")[0]
        if first not in known and not hasattr(kind, first):
            raise AttributeError(f"{kind.__name__} has no field {first}")
        is_field = not name and first in known
        is_estimate = is_field and str(getattr(known[first], "type", "")).startswith("Estimate")
        if not is_field or _COLUMN not in known[first].metadata:
            return Column(name or path, "", _reached(of, path), has_interval=is_estimate)
        own, has_interval, made = known[first].metadata[_COLUMN]
        return replace(
            made,
            name=first if own is None else own,
            value=_reached(of, path, made.value),
            text=_reached(of, path, made.text),
            has_interval=is_estimate if has_interval is None else has_interval,
        )

    made = list(map(taken, picks or [name for name, one in known.items() if _COLUMN in one.metadata]))
    titles = titles or {}
    if unknown := titles.keys() - {one.name for one in made}:
        raise AttributeError(f"{kind.__name__} has no column {', '.join(sorted(unknown))}")
    return tuple(replace(one, title=titles.get(one.name, one.title)) for one in made)


def _reached(
    of: Callable[[Any], Any] | None, path: str, then: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """What stands behind attributes of what `of` finds in a row, as `then` turns it; None where one of them is None."""

    def found(row: Any) -> Any:
        value = row if of is None else of(row)
        for name in filter(None, path.split(".")):
            value = None if value is None else getattr(value, name)
        return value if then is None or (value is None and not path) else then(value)

    return found


def drop_empty_columns(
    columns: Iterable[Column[R]], rows: Sequence[R], keep: Sequence[str] = ()
) -> tuple[Column[R], ...]:
    """The columns, for people without those that have zero, nothing or an empty text in every row.

    Those named in `keep` stay: zero may be what distinguishes rows.
    """

    def is_empty(value: Value) -> bool:
        return not value.value if isinstance(value, Estimate) else not (value or isinstance(value, bool))

    return tuple(
        replace(one, title="") if one.name not in keep and all(is_empty(one.value(row)) for row in rows) else one
        for one in columns
    )


@dataclass(frozen=True, kw_only=True)
class Pivot(Generic[R]):
    """How people see long rows as a wide table: one line for each `down`, one column for each `across`."""

    corner: str  # Title of the first column.
    down: Callable[[R], str]
    across: Callable[[R], str]
    cell: Callable[[R], Value | Cell]
    unit: str = ""


@dataclass(frozen=True)
class TextRow:
    """One line."""

    cells: tuple[Cell, ...]
    kind: RowKind = ""


@dataclass(frozen=True)
class TextTable:
    """A table as people see it."""

    header: tuple[str, ...]
    rows: tuple[TextRow, ...]


def _always(row: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Sheet(Generic[R]):
    """One table."""

    name: str  # Stable name for programs (`--table NAME`, `dlbench-NAME.csv`): a-z, 0-9 and -.
    title: str
    columns: tuple[Column[R], ...]
    rows: Sequence[R]
    caption: str = ""  # What the figures are, with baseline, preset, engine, batch and data source where they have any.
    pivot: Pivot[R] | None = None  # Another arrangement for people; the columns then are for programs.
    is_data: Callable[[R], bool] = _always
    """Whether programs get the row; others are for people only, such as lines that say what is missing."""
    is_shown: Callable[[R], bool] = _always  # Whether people get the row.
    order: Callable[[R], float] | None = None  # Sorts the rows for people, smallest first; programs get them unsorted.
    kind: Callable[[R], RowKind] = lambda row: ""
    in_terminal: bool = False  # Whether the terminal's summary prints it.
    is_sortable: bool = False
    is_folded: bool = False  # Whether a page shows it only when it is opened.
    is_drawn: bool = False  # Whether a chart carries these numbers: a page prints them where it is not drawn.
    max_rows: int | None = None  # Rows in a page and in the terminal's summary; the CSV holds all.

    def __post_init__(self) -> None:
        for name in ("title", "caption"):
            object.__setattr__(self, name, clean(getattr(self, name)))

    def to_display(self, *, brief: bool = False) -> TextTable:
        """Header and cells of text; with `brief`, the brief columns alone."""
        rows = [row for row in self.rows if self.is_shown(row)]
        if self.order is not None:
            rows.sort(key=self.order)
        if self.pivot is not None:
            return _pivoted(self.pivot, rows, self.kind)
        shown = [column for column in self.columns if column.title]
        if brief and any(column.is_brief for column in shown):
            shown = [column for column in shown if column.is_brief]
        return TextTable(
            tuple(clean(column.title) for column in shown),
            tuple(TextRow(tuple(column.cell(row) for column in shown), self.kind(row)) for row in rows),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Columns for programs; empty: there is no table for them."""
        return tuple(name for column in self.columns for name in column.names)

    def units(self) -> dict[str, str]:
        """Units of the columns for programs that hold estimates."""
        found: dict[str, str] = {}
        for column in self.columns:
            values = (column.value(row) for row in self.rows if self.is_data(row)) if column.name else ()
            unit = next((value.unit for value in values if isinstance(value, Estimate) and value.unit), "")
            found |= dict.fromkeys(column.names, unit) if unit else {}
        return found

    def records(self) -> Iterator[dict[str, Datum]]:
        """Rows for programs, by column name, made as they are asked for."""
        named = [(column.names, column.data) for column in self.columns if column.name]
        for row in filter(self.is_data, self.rows):
            yield {name: datum for names, data in named for name, datum in zip(names, data(row), strict=True)}


def times_cell(factor: Estimate | None, decimals: int = 2) -> Cell:
    """A factor, e.g. ``1.80x [1.75, 1.86]``; an en dash for none. `decimals`: where no interval says."""
    if factor is None:
        return Cell(DASH)
    number, ends, _ = shown(factor, decimals)
    return Cell(f"{number}x", ends, number=factor.value)


def unit_cell(figure: Estimate | None, *, with_interval: bool = True) -> Cell:
    """A figure with its unit, even where the numbers alone have none, e.g. ``24.3 [24.1, 24.5] J``."""
    if figure is None:
        return Cell(DASH)
    unit = "" if figure.unit in ("s", "fraction") else f" {figure.unit}"
    interval = interval_text(figure) if with_interval else ""
    text = value_text(figure) + ("" if interval else unit)
    return Cell(text, interval + (unit if interval else ""), number=figure.value)


def text_sheet(name: str, title: str, header: Sequence[str], rows: Iterable[Sequence[Value]]) -> Sheet[Any]:
    """A table of ready texts, for people only."""
    columns: tuple[Column[Any], ...] = tuple(
        Column("", head, operator.itemgetter(place)) for place, head in enumerate(header)
    )
    return Sheet(name=name, title=title, columns=columns, rows=tuple(map(tuple, rows)))


def _pivoted(pivot: Pivot[R], rows: Sequence[R], kind: Callable[[R], RowKind]) -> TextTable:
    """Lines and columns in the order in which they first come."""
    across = list(dict.fromkeys(pivot.across(row) for row in rows))
    lines: dict[str, dict[str, Cell]] = {}
    kinds: dict[str, RowKind] = {}
    for row in rows:
        line = pivot.down(row)
        lines.setdefault(line, {})[pivot.across(row)] = cell_of(pivot.cell(row), pivot.unit)
        kinds.setdefault(line, kind(row))
    missing = Cell(DASH)
    return TextTable(
        (clean(pivot.corner), *map(clean, across)),
        tuple(
            TextRow((Cell(clean(line)), *(cells.get(name, missing) for name in across)), kinds[line])
            for line, cells in lines.items()
        ),
    )


@dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table for programs over a whole document: the sheets of one name below each other."""

    name: str
    title: str
    columns: tuple[str, ...] = ()
    parts: tuple[tuple[Mapping[str, Datum], Sheet[Any]], ...] = ()  # Sheets, with what their sections put in front.

    def records(self) -> Iterator[dict[str, Datum]]:
        """Its rows, made as they are asked for."""
        for before, sheet in self.parts:
            for row in sheet.records():
                yield {**before, **row}

    @property
    def rows(self) -> tuple[dict[str, Datum], ...]:
        return tuple(self.records())


def named_table(name: str, title: str, columns: Iterable[Column[Any]], before: Sequence[str] = ()) -> NamedTable:
    """A table without rows: `before` are the columns that a section puts in front."""
    names = (name for column in columns for name in column.names)
    return NamedTable(name=name, title=title, columns=tuple(dict.fromkeys((*before, *names))))
