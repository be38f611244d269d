"""A report as JSON: its dataclasses as they are, raw numbers, null for a number that is not finite.

`schema_of` makes the JSON schema (draft 2020-12) of the same dataclasses. pydantic cannot, because it knows neither
inline fields nor hidden ones nor that a number may be null. It follows `as_plain` type by type, and fails on a type
that `as_plain` would not take.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel

from dlbench.report.document import Document
from dlbench.report.wording import clean

INLINE = "inline"  # Key of the metadata of a field whose items are printed as fields of its owner.
HIDDEN = "json"  # Key of the metadata of a field: False leaves it out.

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
Inline = Mapping[type, Mapping[str, Any]]  # Keys and types of inline items, by dataclass.


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
    if isinstance(value, BaseModel):
        return {name: as_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {clean(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return clean(value)
    return value


def schema_of(kind: type, inline: Inline | None = None) -> dict[str, Any]:
    """Returns the schema of a dataclass and of all that it holds; `inline` has the contents of its inline fields.

    Raises `TypeError`: a field's type is not plain data.
    """
    maker = _Maker(inline or {})
    reference = maker.of(kind)
    return {"$schema": DRAFT, **reference, "$defs": dict(sorted(maker.defs.items()))}


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
        if origin is typing.Annotated:
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
        hints = typing.get_type_hints(kind)
        if _is_record(kind):
            properties = {name: self.of(hints[name]) for name in kind.model_fields}
        else:
            properties = self._properties(kind, hints)
        shape = {"type": "object", "properties": properties, "required": list(properties)}
        self.defs[name] = {**shape, "additionalProperties": False}
        return name

    def _properties(self, kind: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            if field.metadata.get(INLINE):
                properties |= {key: self.of(inner) for key, inner in self.inline[kind].items()}
            elif field.metadata.get(HIDDEN, True):
                properties[field.name] = self.of(hints[field.name])
        return properties


def _is_record(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
