"""A report as JSON: its dataclasses as they are, raw numbers, null where a number is not finite.

What each report holds is said by its JSON schema (draft 2020-12), made of the same dataclasses by `schema_of`: by hand,
because pydantic knows neither fields that stand inline or are left out nor that a number may be null; it follows
`as_plain` type by type, and fails on a type that `as_plain` would not take.
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

INLINE = "inline"  # Key of the metadata of a field whose mapping stands among the fields of its owner.
HIDDEN = "json"  # Key of the metadata of a field: False leaves it out.

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
Inline = Mapping[type, Mapping[str, Any]]  # Keys and types of what stands inline, by dataclass.


def to_json(document: Document) -> str:
    """The report, keys in the order of the dataclasses; `format` and `version` come first."""
    return dumped(document.data)


def dumped(data: object) -> str:
    """Dataclasses as JSON text that ends with a newline."""
    return json.dumps(as_plain(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_plain(value: Any) -> Any:
    """Dataclasses, records, tuples and numbers as JSON has them; a number that is not finite becomes None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            if field.metadata.get(HIDDEN, True):
                plain = as_plain(getattr(value, field.name))
                fields |= plain if field.metadata.get(INLINE) else {field.name: plain}
        return fields
    if isinstance(value, BaseModel):
        return {name: as_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {clean(str(key)): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return clean(value) if isinstance(value, str) else value


def schema_of(kind: type, inline: Inline | None = None) -> dict[str, Any]:
    """The schema of a dataclass and of all that it holds; `inline` has what stands in its fields that are marked so.

    Raises `TypeError`: a field's type is not plain data.
    """
    maker = _Maker(inline or {})
    found = maker.of(kind)
    return {"$schema": DRAFT, **found, "$defs": dict(sorted(maker.defs.items()))}


class _Maker:
    """Collects the definitions of dataclasses on the way."""

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
            return {"anyOf": [self.of(one) for one in arguments]}
        if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
            return {"type": "array", "prefixItems": [self.of(one) for one in arguments], "items": False}
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
        self.defs[name] = {}  # its place among the others, which its fields may lead to
        hints = typing.get_type_hints(kind)
        properties: dict[str, Any] = {}
        if _is_record(kind):
            properties = {name: self.of(hints[name]) for name in kind.model_fields}
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            if field.metadata.get(INLINE):
                properties |= {key: self.of(inner) for key, inner in self.inline[kind].items()}
            elif field.metadata.get(HIDDEN, True):
                properties[field.name] = self.of(hints[field.name])
        shape = {"type": "object", "properties": properties, "required": list(properties)}
        self.defs[name] = {**shape, "additionalProperties": False}
        return name


def _is_record(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
