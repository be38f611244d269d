"""A report for programs: as CSV every sheet with columns for programs, by its name, raw numbers, units in the names; as
JSON its dataclasses, null for a number that is not finite; and the JSON schema of the same dataclasses. pydantic cannot
make that schema: it knows neither inline nor hidden fields, nor that a number may be null.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel

from dlbench.errors import UserError, nearest
from dlbench.lazy import Deferred
from dlbench.report.document import Document
from dlbench.report.table import Datum
from dlbench.report.wording import clean, harmless

INLINE = "inline"  # Key of the metadata of a field whose items are printed as fields of its owner.
HIDDEN = "json"  # Key of the metadata of a field: False leaves it out.
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
Inline = Mapping[type, Mapping[str, Any]]  # Keys and types of inline items, by dataclass.


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


def to_json(document: Document) -> str:
    """Returns the report, keys in the order of the dataclasses; `format` and `version` come first."""
    return dumped(document.data)


def dumped(data: object) -> str:
    """Returns dataclasses as JSON text that ends with a newline."""
    return json.dumps(as_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_plain(value: Any) -> Any:
    """Returns dataclasses, records, tuples and numbers as JSON types; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            if field.metadata.get(HIDDEN, True):
                plain = as_plain(getattr(value, field.name))
                if field.metadata.get(INLINE):
                    fields |= plain
                else:
                    fields[field.name] = plain
        return fields
    if isinstance(value, Deferred):
        return as_plain(value.value)
    if isinstance(value, BaseModel):
        return {name: as_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {clean(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return clean(value) if isinstance(value, str) else value


def schema_of(kind: type, inline: Inline | None = None) -> dict[str, Any]:
    """Returns the schema of a dataclass and all that it holds; raises `TypeError` if a field is not plain data."""
    maker = _Maker(inline or {})
    return {"$schema": DRAFT, **maker.of(kind), "$defs": dict(sorted(maker.defs.items()))}


class _Maker:
    """Makes schemas of types and collects the definitions of dataclasses."""

    def __init__(self, inline: Inline) -> None:
        self.inline = inline
        self.defs: dict[str, Any] = {}
        self.names: dict[type, str] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if kind is float:
            # What is not finite is null.
            return {"type": ["number", "null"]}
        if dataclasses.is_dataclass(kind) or _is_record(kind):
            assert isinstance(kind, type)
            return {"$ref": f"#/$defs/{self._name(kind)}"}
        if kind is object:
            return {}
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Annotated, Deferred):
            return self.of(arguments[0])
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": list(map(self.of, arguments))}
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            return {"type": "array", "prefixItems": list(map(self.of, arguments)), "items": False}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        raise TypeError(f"{kind}: is no plain data")

    def _name(self, kind: type) -> str:
        if kind in self.names:
            return self.names[kind]
        name = kind.__name__
        if name in self.names.values():
            # Two subjects may have a class of one name: the second is named with its folder.
            name = f"{kind.__module__.split('.')[-2]}.{name}"
        self.names[kind] = name
        self.defs[name] = {}  # Keeps its place before the dataclasses of its fields.
        properties = self._properties(kind, typing.get_type_hints(kind))
        shape = {"type": "object", "properties": properties, "required": list(properties)}
        self.defs[name] = {**shape, "additionalProperties": False}
        return name

    def _properties(self, kind: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
        if _is_record(kind):
            return {name: self.of(hints[name]) for name in kind.model_fields}
        properties: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            if field.metadata.get(INLINE):
                properties |= {key: self.of(inner) for key, inner in self.inline[kind].items()}
            elif field.metadata.get(HIDDEN, True):
                properties[field.name] = self.of(hints[field.name])
        return properties


def _is_record(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
