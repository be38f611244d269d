"""Layers of settings become one: base, preset, overrides. Remembers which layer set which key.

A wrong key is found in the layer that holds it, a wrong value is traced back to the layer that set
it, so that the message names the file (or the option) a person has to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dlbench.errors import UserError, close_names
from dlbench.specs.engine import key_for_name
from dlbench.specs.keys import keys_of, models_in, tags_of

ModelT = TypeVar("ModelT", bound=BaseModel)


class Layers:
    """Nested settings merged layer by layer.

    `values` is the result so far; `origin(path)` tells who set a key.
    """

    def __init__(self, base: str, prefix: str = "") -> None:
        """`base` is blamed where no layer set a key; `prefix` is what options write before a key."""
        self.values: dict[str, Any] = {}
        self.prefix = prefix
        self._base = base
        self._origins: dict[tuple[str, ...], str] = {}

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        """Merges a nested mapping over what is there; mappings merge, everything else replaces."""
        self._merge(self.values, layer, origin, ())

    def set(self, dotted: str, value: Any, origin: str) -> None:
        """Sets one key given as ``train.batch_per_rank``."""
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        self.add(nested, origin)

    def origin(self, path: tuple[str, ...]) -> str:
        """Who set this key, or the nearest key above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self._base

    def _merge(self, target: dict[str, Any], layer: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> None:
        for key, value in layer.items():
            here = (*path, str(key))
            self._origins[here] = origin
            if isinstance(value, Mapping):
                below = target.get(key)
                if not isinstance(below, dict):
                    below = target[key] = {}
                self._merge(below, value, origin, here)
            else:
                target[key] = value


def validate(model: type[ModelT], layers: Layers, elsewhere: Iterable[str] = ()) -> ModelT:
    """The merged settings as a checked specification.

    Args:
        model: the specification.
        layers: the settings.
        elsewhere: keys that options take beside those of the model; named where a wrong one resembles them.

    Raises:
        UserError: one line, naming the layer, the key and what would be right.
    """
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        # A misspelt key often shows as a missing one too; the misspelling is what a person must mend.
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        path = _real_path(first, layers.values)
        origin = layers.origin(path)
        key = ".".join(path)
        prefix = layers.prefix if origin.startswith("--") else ""
        also = elsewhere if origin.startswith("--") else ()
        if first["type"] == "extra_forbidden":
            own = key_for_name(path[-1]) if len(path) == 1 or path[0] == "engine" else None
            what = f"unknown key; {f'use {own}' if own else _meant(model, first, path, layers, prefix, also)}"
        else:
            what = _explain(first)
        key = f"{prefix}{key}: " if key else ""
        others = len({_real_path(item, layers.values) for item in error.errors()}) - 1
        raise UserError(f"{origin}: {key}{what}{f' (and {others} more)' if others else ''}") from None


def _real_path(error: ErrorDetails, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Location of pydantic's erroration without the tags of discriminated unions, which are no keys of the file."""
    path: list[str] = []
    node: Any = values
    location = list(error["loc"])
    for position, part in enumerate(location):
        last = position == len(location) - 1
        if isinstance(node, Mapping) and part in node:
            node = node[part]
            path.append(str(part))
        elif isinstance(part, int) or (last and error["type"] in ("missing", "extra_forbidden")):
            path.append(str(part))
    if error["type"] == "union_tag_invalid" or error["type"] == "union_tag_not_found":
        path.append(str(error.get("ctx", {}).get("discriminator", "")).strip("'"))
    return tuple(path)


def _meant(
    model: type[BaseModel],
    error: ErrorDetails,
    path: tuple[str, ...],
    layers: Layers,
    prefix: str,
    elsewhere: Iterable[str],
) -> str:
    """The right keys nearest to an unknown one: of that name in any section, else alike at its place."""
    everywhere = [prefix + key.name for key in keys_of(model, layers.values)] + [*elsewhere]
    here = known_keys(model, path[:-1], error["loc"])
    same = [name for name in everywhere if name.rpartition(".")[2] == path[-1]][:3]
    alike = [prefix + ".".join((*path[:-1], name)) for name in close_names(path[-1], here)]
    close = (same if len(path) == 1 else [*same, *alike][:3]) or alike or close_names(path[-1], everywhere)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(here)}"


def _explain(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] in ("tuple_type", "list_type") and not isinstance(error["input"], Mapping):
        return f"must be a list in brackets, e.g. [{error['input']}], got {error['input']!r}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if error["type"] == "value_error" or isinstance(error["input"], Mapping):
        return message
    return f"{message}, got {error['input']!r}"


def known_keys(model: type[BaseModel], path: tuple[str, ...], location: tuple[int | str, ...] = ()) -> list[str]:
    """The keys allowed below a path of a specification.

    `location` is pydantic's own path, whose extra parts choose the branch of a union.
    """
    branches: list[type[BaseModel]] = [model]
    for part in path:
        annotations = [b.model_fields[part].annotation for b in branches if part in b.model_fields]
        # No field of that name: a key of a mapping, whose values are the branches already.
        branches = [m for annotation in annotations for m in models_in(annotation)] if annotations else branches
    chosen = [b for b in branches if any(tag in location for tag in tags_of(b))]
    return sorted({name for branch in chosen or branches for name in branch.model_fields})
