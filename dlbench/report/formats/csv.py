"""Tables of a report as CSV: every sheet with columns for programs, by its name. Raw numbers, units in the names."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence

from dlbench.errors import UserError, nearest
from dlbench.report.document import Document
from dlbench.report.table import Datum
from dlbench.report.wording import harmless


def to_csv(document: Document, table: str) -> str:
    """Returns a table as CSV (RFC 4180, but with plain newlines), text that a spreadsheet would take for a formula
    quoted. Raises `UserError`: there is no such table.
    """
    tables = document.tables()
    if table not in tables:
        hint = f"{nearest(table, tables)} (--table ? lists them all)"
        raise UserError(f"--table {table}: no such table in this report; {hint}")
    return write_table(tables[table].columns, tables[table].records())


def write_table(header: Sequence[str], rows: Iterable[Mapping[str, Datum]], max_characters: float = math.inf) -> str:
    """Returns rows by column name as CSV, missing values empty; ends after the row that passes `max_characters`."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in header])
        if sink.tell() > max_characters:
            break
    return sink.getvalue()


def _cell(value: Datum) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = harmless(value)
        if text.startswith(("=", "+", "-", "@")):
            return f"'{text}"
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return str(value)
