"""Every key of a specification by its dotted name, with the field that says what it means."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from dlbench.specs.base import size_in_bytes


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key that holds a value, not further keys."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """As ``--set`` takes it, e.g. ``train.batch_per_rank``."""
        return ".".join(self.path)

    @property
    def is_size(self) -> bool:
        """Whether its value is a number of bytes, which may be given with a unit."""
        said = branches(self.field.annotation, tuple(self.field.metadata))
        return any(is_size_reader(one) for _, metadata in said for one in metadata)


def keys_of(model: type[BaseModel], values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """The keys of a specification in the order of its fields; of a union those of the branch that `values` choose.

    `values`: nested settings, as far as they are known. `path`: what the names begin with.
    """
    for name, field in model.model_fields.items():
        value = values.get(name)
        below = value if isinstance(value, Mapping) else {}
        # A mapping has keys of the site's own choice (``launch.environment``).
        models = [] if typing.get_origin(field.annotation) is dict else chosen(models_in(field.annotation), below)
        if not models:
            yield Key(path=(*path, name), field=field)
        for inner in models:
            yield from keys_of(inner, below, (*path, name))


def chosen(models: list[type[BaseModel]], values: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Those branches of a union that the values' ``family`` or ``format`` chooses; all where it chooses none."""
    found = [m for m in models if any(values.get(name) in tags_of(m) for name in ("family", "format"))]
    return found or models


def tags_of(model: type[BaseModel]) -> tuple[object, ...]:
    """The literals that choose a union's branch (``family: resnet``); none for other models."""
    for name in ("family", "format"):
        field = model.model_fields.get(name)
        if field is not None and typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def models_in(annotation: object) -> list[type[BaseModel]]:
    """The specification classes an annotation names, through unions, mappings and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, dict):
        return [m for part in typing.get_args(annotation) for m in models_in(part)]
    return []


def branches(annotation: object, metadata: tuple[object, ...] = ()) -> Iterator[tuple[object, tuple[object, ...]]]:
    """What an annotation allows, one by one, each with what `Annotated` says of it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from branches(arguments[0], (*metadata, *arguments[1:]))
    elif origin in (typing.Union, types.UnionType):
        for one in arguments:
            yield from branches(one, metadata)
    else:
        flat = (part for one in metadata for part in (one.metadata if isinstance(one, FieldInfo) else (one,)))
        yield annotation, tuple(flat)


def is_size_reader(metadata: object) -> bool:
    """Whether it is what makes a number of bytes of 64MiB."""
    return isinstance(metadata, BeforeValidator) and metadata.func is size_in_bytes
