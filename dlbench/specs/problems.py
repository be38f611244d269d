"""Lists every key of a specification by its dotted name, and explains validation errors."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dlbench.errors import nearest
from dlbench.specs.base import MAX_COUNT, Form, size_in_bytes

_SHOWN = 80  # Characters of a wrong value that are repeated.
_MOST_OTHERS = 8  # Further wrong places that are named with what would be right.


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key that has a value, not further keys."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """The dotted name as in ``--set``, e.g. ``train.batch_per_rank``."""
        return ".".join(self.path)

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes, which may be given with a unit."""
        types = branches(self.field.annotation, tuple(self.field.metadata))
        return any(is_size_reader(annotation) for _, metadata in types for annotation in metadata)


def keys_of(model: type[BaseModel], values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yields the keys of a specification in the order of its fields; `values` select branches of unions."""
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
    """Returns the branches of a union that ``family`` or ``format`` in the values select; all if none does."""
    matching = [m for m in models if any(values.get(name) in tags_of(m) for name in ("family", "format"))]
    return matching or models


def tags_of(model: type[BaseModel]) -> tuple[object, ...]:
    """Returns the literals that select a union's branch (``family: resnet``); none for other models."""
    for name in ("family", "format"):
        field = model.model_fields.get(name)
        if field is not None and typing.get_origin(field.annotation) is typing.Literal:
            return typing.get_args(field.annotation)
    return ()


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Returns the specification classes in an annotation, through unions, mappings and `Annotated`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, dict):
        return [m for part in typing.get_args(annotation) for m in models_in(part)]
    return []


def branches(annotation: object, metadata: tuple[object, ...] = ()) -> Iterator[tuple[object, tuple[object, ...]]]:
    """Yields the types that an annotation allows, each with its metadata from `Annotated`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from branches(arguments[0], (*metadata, *arguments[1:]))
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from branches(argument, metadata)
    else:
        flat = (part for entry in metadata for part in (entry.metadata if isinstance(entry, FieldInfo) else (entry,)))
        yield annotation, tuple(flat)


def is_size_reader(metadata: object) -> bool:
    """Whether a validator reads sizes such as 64MiB."""
    return isinstance(metadata, BeforeValidator) and metadata.func is size_in_bytes


@dataclass(frozen=True)
class Problem:
    """The first problem of some settings in parts, and the others as text."""

    path: tuple[str, ...]  # Keys that lead to it, and numbers of entries of a list; empty: the whole.
    what: str  # What would be right.
    known: tuple[str, ...]  # Of an unknown key: those that may stand there; else empty.
    others: tuple[str, ...]  # Further places where something is wrong, each with what would be right.

    def __str__(self) -> str:
        places = [_said(self.path, self.what), *self.others[:_MOST_OTHERS]]
        num_hidden = len(self.others) - _MOST_OTHERS
        return "; ".join(places) + (f" (and {num_hidden} more)" if num_hidden > 0 else "")


def _said(path: tuple[str, ...], words: str) -> str:
    return f"{'.'.join(path)}: {words}" if path else words


def problem_of(model: type[BaseModel], error: ValidationError) -> Problem:
    """Returns the problems of settings that `model` refused; a misspelt key comes before a missing one."""
    details = error.errors(include_url=False)
    first = min(details, key=lambda item: item["type"] != "extra_forbidden")
    words_by_path: dict[tuple[str, ...], str] = {}
    for item in (first, *details):
        place = _place(model, item)
        for key in _required(place) if item["type"] == "missing" else [place]:
            words_by_path.setdefault(key.path, _what(item, key))
    path, *others = words_by_path
    valid_keys = _known(_place(model, first)) if first["type"] == "extra_forbidden" else ()
    return Problem(
        path,
        words_by_path[path],
        valid_keys,
        tuple(_said(other_path, words_by_path[other_path]) for other_path in others),
    )


def _known(place: _Place) -> tuple[str, ...]:
    return tuple(sorted({name for model in models_in(place.annotation) for name in model.model_fields}))


@dataclass(frozen=True)
class _Place:
    """A position in a specification: the keys that lead there, and the types allowed there."""

    path: tuple[str, ...]
    annotation: object
    metadata: tuple[object, ...] = ()
    default: object = None


def _place(model: type[BaseModel], error: ErrorDetails) -> _Place:
    """Returns the position of an error, without the tags of unions, which pydantic inserts between keys."""
    place = _Place((), model)
    # A list that is too short lacks an entry: what is wrong is the list.
    in_list = error["type"] == "missing" and isinstance(error["loc"][-1], int)
    for part in error["loc"][:-1] if in_list else error["loc"]:
        place = _below(place, part)
    if error["type"] == "extra_forbidden":
        return _Place((*place.path, str(error["loc"][-1])), place.annotation)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _below(place, error["ctx"]["discriminator"].strip("'"))
    return place


def _required(place: _Place) -> Iterator[_Place]:
    """Yields the keys without a default in a missing section (in a union, its tag), or the position itself."""
    models = models_in(place.annotation)
    names = [
        name for model_type in models[:1] for name, field in model_type.model_fields.items() if field.is_required()
    ]
    if not names:
        yield place
    for name in names if len(models) == 1 else names[:1]:
        yield from _required(_below(place, name))


def _below(place: _Place, part: int | str) -> _Place:
    path = (*place.path, str(part))
    for annotation, _ in branches(place.annotation):
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is dict and part == "[key]":
            return _Place(place.path, arguments[0])
        if origin is dict:
            return _Place(path, arguments[1])
        if origin is tuple and isinstance(part, int):
            return _Place(path, arguments[0 if Ellipsis in arguments else part])
    fields = [
        model_type.model_fields[str(part)]
        for model_type in models_in(place.annotation)
        if part in model_type.model_fields
    ]
    if fields:
        # Of a union before its tag is known: the tag's own values of all branches.
        annotation = fields[0].annotation if len(fields) == 1 else typing.Union[*(field.annotation for field in fields)]
        default = fields[0].get_default(call_default_factory=True)
        return _Place(path, annotation, tuple(fields[0].metadata), default)
    tagged = [model_type for model_type in models_in(place.annotation) if part in tags_of(model_type)]
    return _Place(place.path, tagged[0]) if tagged else place


def _what(error: ErrorDetails, place: _Place) -> str:
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(place.path[-1], _known(place))}"
    if kind in ("value_error", "assertion_error"):
        message = error["msg"].partition(", ")[2]
        return message[:1].lower() + message[1:]
    if kind == "json_invalid":
        return "is no JSON"
    if kind == "union_tag_invalid":
        value = value[place.path[-1]] if isinstance(value, Mapping) else getattr(value, place.path[-1])
    right = _right(place, value, is_too_large=kind.startswith("less_than"))
    if kind == "union_tag_not_found" or (kind == "missing" and isinstance(error["loc"][-1], str)):
        return f"is missing: must be {right}"
    return f"must be {right}, got {_shown(value)}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"[:_SHOWN]
    return json.dumps(value) if isinstance(value, bool | None) else repr(value)[:_SHOWN]


def _right(place: _Place, value: object = None, *, is_too_large: bool = False) -> str:
    """Returns the end of the sentence `must be ...`; `value` is the present value."""
    words: list[str] = []
    literals: list[str] = []
    for annotation, metadata in branches(place.annotation, place.metadata):
        form = next((entry.words for entry in metadata if isinstance(entry, Form)), "")
        arguments = typing.get_args(annotation)
        if form or any(map(is_size_reader, metadata)):
            words.append(form or "a number of bytes such as 67108864 or 64MiB")
        elif typing.get_origin(annotation) is typing.Literal:
            literals += map(str, arguments)
        elif typing.get_origin(annotation) is tuple:
            words.append(_list_words(arguments, metadata, place, value))
        elif annotation is bool:
            words.append("true or false")
        elif annotation in (int, float):
            words.append(_number_words(annotation, metadata, is_too_large))
        elif annotation is str:
            max_length, min_length = _bound(metadata, "max_length"), _bound(metadata, "min_length")
            form = " of the form that `dlbench show` gives" if _bound(metadata, "pattern") is not None else ""
            form += f" of at most {max_length} characters" if max_length else ""
            words.append(f"a text{form}{' that is not empty' if min_length else ''}")
        elif annotation is not type(None):
            keys = [
                name
                for model_type in models_in(annotation)
                if model_type is annotation
                for name in model_type.model_fields
            ]
            words.append(f"keys and values{': ' if keys else ''}{', '.join(keys[:3])}{', ...' if keys[3:] else ''}")
    chosen = " or ".join(filter(None, (", ".join(literals[:-1]), *literals[-1:])))
    null = "null" if any(annotation is type(None) for annotation, _ in branches(place.annotation)) else ""
    return ", or ".join(dict.fromkeys(filter(None, (*words, chosen, null))))


def _list_words(arguments: tuple[object, ...], metadata: tuple[object, ...], place: _Place, value: object) -> str:
    """Returns an example of a list, e.g. its default; for a value without brackets, the same in brackets."""
    count = "" if Ellipsis in arguments else f" of {len(arguments)}"
    min_length = _bound(metadata, "min_length")
    element = _right(_Place((), arguments[0]))
    example = _shown(place.default) if isinstance(place.default, tuple) and place.default else ""
    is_number = type(value) is int and value > 0 and Ellipsis in arguments and element.startswith("a whole number")
    if is_number or (isinstance(value, str) and "," in value):
        example = f"[{value}]"
    hint = f", e.g. {example}" if example and " e.g. " not in element else ""
    return f"a list{count}{f' of {min_length} or more' if min_length else ''} in brackets, each {element}{hint}"


def _number_words(kind: object, metadata: tuple[object, ...], is_too_large: bool) -> str:
    noun = "a whole number" if kind is int else "a number"
    minimum, above, maximum = _bound(metadata, "ge"), _bound(metadata, "gt"), _bound(metadata, "le")
    if kind is int and above is not None:
        minimum, above = above + 1, None
    if kind is int and (below := _bound(metadata, "lt")) is not None:
        maximum = below - 1
    if maximum is None or (maximum == MAX_COUNT and not is_too_large):  # which nobody comes near to
        if minimum is not None:
            return f"{noun} of {minimum:,} or more"
        return noun if above is None else f"{noun} above {above:g}"
    return (
        f"{noun} above {above:g}, at most {maximum:,}" if minimum is None else f"{noun} from {minimum:,} to {maximum:,}"
    )


def _bound(metadata: tuple[object, ...], name: str) -> typing.Any:
    values = [value for entry in metadata if (value := getattr(entry, name, None)) is not None]
    return values[-1] if values else None
