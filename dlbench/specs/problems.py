"""Lists every key of a specification by its dotted name, and explains validation errors."""

from __future__ import annotations

import itertools
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

_SHOWN = 80  # Largest number of characters of a wrong value in a message.
_MOST_OTHERS = 8  # Largest number of further problems in a message.


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
        """Returns whether the value is a number of bytes, which may be given with a unit."""
        types = branches(self.field.annotation, tuple(self.field.metadata))
        return any(is_size_reader(annotation) for _, metadata in types for annotation in metadata)


def keys_of(model: type[BaseModel], values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yields the keys of a specification in the order of its fields; `values` select branches of unions."""
    for name, field in model.model_fields.items():
        value = values.get(name)
        below: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        models = chosen(models_in(field.annotation), below)
        # The keys of a mapping such as ``launch.environment`` are not fixed.
        if not models or typing.get_origin(field.annotation) is dict:
            yield Key(path=(*path, name), field=field)
            continue
        for inner in models:
            yield from keys_of(inner, below, (*path, name))


def chosen(models: list[type[BaseModel]], values: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Returns the branches of a union that ``family`` or ``format`` in the values select; all if none does."""
    tags = {values.get("family"), values.get("format")}
    return [model for model in models if not tags.isdisjoint(tags_of(model))] or models


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
        parts = map(models_in, typing.get_args(annotation))
        return list(itertools.chain.from_iterable(parts))
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
        flat: list[object] = []
        for entry in metadata:
            flat += entry.metadata if isinstance(entry, FieldInfo) else [entry]
        yield annotation, tuple(flat)


def is_size_reader(metadata: object) -> bool:
    """Returns whether a validator reads sizes such as 64MiB."""
    return isinstance(metadata, BeforeValidator) and metadata.func is size_in_bytes


@dataclass(frozen=True)
class Problem:
    """The first problem of some settings in parts, and the others as text."""

    path: tuple[str, ...]  # Keys and list indices that lead to the wrong value; empty: the whole.
    what: str  # The problem and its remedy, e.g. ``must be 1 or more``.
    known: tuple[str, ...]  # For an unknown key the valid keys of its section; else empty.
    others: tuple[str, ...]  # Further problems as text.

    def __str__(self) -> str:
        text = "; ".join([_problem_text(self.path, self.what), *self.others[:_MOST_OTHERS]])
        if len(self.others) > _MOST_OTHERS:
            text += f" (and {len(self.others) - _MOST_OTHERS} more)"
        return text


def _problem_text(path: tuple[str, ...], words: str) -> str:
    return ": ".join(filter(None, (".".join(path), words)))


def problem_of(model: type[BaseModel], error: ValidationError) -> Problem:
    """Returns the problems of settings that `model` refused; a misspelt key comes before a missing one."""
    details = error.errors(include_url=False)
    first = min(details, key=lambda item: item["type"] != "extra_forbidden")
    words_by_path: dict[tuple[str, ...], str] = {}
    for item in (first, *details):
        place = _place(model, item)
        keys = _required(place) if item["type"] == "missing" else [place]
        for key in keys:
            words_by_path.setdefault(key.path, _explanation(item, key))
    valid_keys: tuple[str, ...] = ()
    if first["type"] == "extra_forbidden":
        valid_keys = _valid_keys(_place(model, first))
    (path, words), *others = words_by_path.items()
    return Problem(path, words, valid_keys, tuple(itertools.starmap(_problem_text, others)))


def _valid_keys(place: _Place) -> tuple[str, ...]:
    fields = (model.model_fields for model in models_in(place.annotation))
    return tuple(sorted(set(itertools.chain.from_iterable(fields))))


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
    location = error["loc"]
    if error["type"] == "missing" and isinstance(location[-1], int):
        # A list is too short: the problem is that of the list, not of the missing entry.
        location = location[:-1]
    for part in location:
        place = _below(place, part)
    if error["type"] == "extra_forbidden":
        return _Place((*place.path, str(error["loc"][-1])), place.annotation)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _below(place, error["ctx"]["discriminator"].strip("'"))
    return place


def _required(place: _Place) -> Iterator[_Place]:
    """Yields the keys without a default in a missing section (in a union, its tag), or the position itself."""
    models = models_in(place.annotation)
    names: list[str] = []
    if models:
        names = [name for name, field in models[0].model_fields.items() if field.is_required()]
    if len(models) > 1:
        names = names[:1]
    if not names:
        yield place
    for name in names:
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
            if Ellipsis in arguments:
                part = 0
            return _Place(path, arguments[part])
    models = models_in(place.annotation)
    fields = [model.model_fields[str(part)] for model in models if part in model.model_fields]
    if fields:
        # Several fields are the tag of a union, whose value is not known yet.
        types_allowed: object = fields[0].annotation
        if len(fields) > 1:
            types_allowed = typing.Union[*(field.annotation for field in fields)]
        default = fields[0].get_default(call_default_factory=True)
        return _Place(path, types_allowed, tuple(fields[0].metadata), default)
    for model in models:
        if part in tags_of(model):
            return _Place(place.path, model)
    return place


def _explanation(error: ErrorDetails, place: _Place) -> str:
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(place.path[-1], _valid_keys(place))}"
    if kind in ("value_error", "assertion_error"):
        message = error["msg"].partition(", ")[2]
        return message[:1].lower() + message[1:]
    if kind == "json_invalid":
        return "is not JSON"
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
    if isinstance(value, bool | None):
        return json.dumps(value)
    return repr(value)[:_SHOWN]


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
            words.append(_text_words(metadata))
        elif annotation is not type(None):
            words.append(_keys_words(annotation))
    if literals:
        words.append(" or ".join(filter(None, (", ".join(literals[:-1]), literals[-1]))))
    if any(annotation is type(None) for annotation, _ in branches(place.annotation)):
        words.append("null")
    return ", or ".join(dict.fromkeys(words))


def _keys_words(annotation: object) -> str:
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "keys and values"
    keys = list(annotation.model_fields)
    text = f"keys and values: {', '.join(keys[:3])}"
    if len(keys) > 3:
        text += ", ..."
    return text


def _text_words(metadata: tuple[object, ...]) -> str:
    words = "a text"
    if _bound(metadata, "pattern") is not None:
        words += " of the form that `dlbench show` prints"
    if max_length := _bound(metadata, "max_length"):
        words += f" of at most {max_length} characters"
    if _bound(metadata, "min_length"):
        words += " that is not empty"
    return words


def _list_words(arguments: tuple[object, ...], metadata: tuple[object, ...], place: _Place, value: object) -> str:
    """Returns an example of a list, e.g. its default; for a value without brackets, the same in brackets."""
    element = _right(_Place((), arguments[0]))
    words = "a list"
    if Ellipsis not in arguments:
        words += f" of {len(arguments)}"
    if min_length := _bound(metadata, "min_length"):
        words += f" of {min_length} or more"
    words += f" in brackets, each {element}"
    example = ""
    if isinstance(place.default, tuple) and place.default:
        example = _shown(place.default)
    is_number = type(value) is int and value > 0 and Ellipsis in arguments and element.startswith("a whole number")
    if is_number or (isinstance(value, str) and "," in value):
        example = f"[{value}]"
    if example and " e.g. " not in element:
        words += f", e.g. {example}"
    return words


def _number_words(kind: object, metadata: tuple[object, ...], is_too_large: bool) -> str:
    noun = "a whole number" if kind is int else "a number"
    minimum, above, maximum = _bound(metadata, "ge"), _bound(metadata, "gt"), _bound(metadata, "le")
    if kind is int and above is not None:
        minimum, above = above + 1, None
    if kind is int and (below := _bound(metadata, "lt")) is not None:
        maximum = below - 1
    # MAX_COUNT is mentioned only if the value exceeds it.
    is_limited = maximum is not None and (maximum != MAX_COUNT or is_too_large)
    if minimum is not None and is_limited:
        return f"{noun} from {minimum:,} to {maximum:,}"
    if minimum is not None:
        return f"{noun} of {minimum:,} or more"
    if is_limited:
        return f"{noun} above {above:g}, at most {maximum:,}"
    if above is not None:
        return f"{noun} above {above:g}"
    return noun


def _bound(metadata: tuple[object, ...], name: str) -> typing.Any:
    values = [getattr(entry, name, None) for entry in metadata]
    return next((value for value in reversed(values) if value is not None), None)
