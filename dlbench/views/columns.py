"""Which columns of a table are worth a reader's time; programs get all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

from dlbench.report.table import Column, Value
from dlbench.stats.estimates import Estimate

R = TypeVar("R")


def drop_empty_columns(
    columns: Iterable[Column[R]], rows: Sequence[R], keep: Sequence[str] = ()
) -> tuple[Column[R], ...]:
    """The columns, for people without those that have zero, nothing or an empty text in every row.

    Those named in `keep` stay: zero may be what tells one row from another.
    """
    return tuple(
        column
        if not column.title or column.name in keep or any(_says(column.value(row)) for row in rows)
        else dataclasses.replace(column, title="")
        for column in columns
    )


def _says(value: Value) -> bool:
    if isinstance(value, Estimate):
        return bool(value.value)
    return isinstance(value, bool) or bool(value)
