"""The JSON schema (draft 2020-12) of what `dlbench.report.formats.json` writes of a dataclass.

Made by hand because pydantic's does not know the fields that stand inline or are left out; it follows `as_plain` type
by type, and fails on a type that `as_plain` would not take.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from pydantic import BaseModel

from dlbench.report.formats.json import HIDDEN, INLINE

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}

Inline = Mapping[type, Mapping[str, Any]]
"""Keys and types of what stands inline, by dataclass."""


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
        """The schema of any type."""
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
        if kind not in self.names:
            taken = set(self.names.values())
            # Two subjects may have a class of one name: the second is named with its folder.
            name = kind.__name__ if kind.__name__ not in taken else f"{kind.__module__.split('.')[-2]}.{kind.__name__}"
            self.names[kind] = name
            self.defs[name] = {}
            self.defs[name] = self._object(kind)
        return self.names[kind]

    def _object(self, kind: type) -> dict[str, Any]:
        hints = typing.get_type_hints(kind)
        properties: dict[str, Any] = {}
        if _is_record(kind):
            properties = {name: self.of(hints[name]) for name in kind.model_fields}
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            if field.metadata.get(INLINE):
                properties |= {key: self.of(inner) for key, inner in self.inline[kind].items()}
            elif field.metadata.get(HIDDEN, True):
                properties[field.name] = self.of(hints[field.name])
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _is_record(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
