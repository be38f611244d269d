"""Merges layers of settings (base, preset, overrides); messages name the layer that set a key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dlbench.errors import UserError, close_names
from dlbench.removed import removed_key
from dlbench.specs.engine import key_for_name
from dlbench.specs.problems import Problem, keys_of, problem_of

ModelT = TypeVar("ModelT", bound=BaseModel)

_DEPTH = "model.stage_blocks, e.g. [3, 4, 23, 3] for 101 layers"


class SettingLayers:
    """Nested settings that are merged layer by layer. `values` is the result; `origin(path)` names who set a key."""

    def __init__(self, base: str, prefix: str = "") -> None:
        """`base` is the origin of keys that no layer set; `prefix` is what options write before a key."""
        self.values: dict[str, Any] = {}
        self.prefix = prefix
        self._base = base
        self._origins: dict[tuple[str, ...], str] = {}

    def add(self, layer: Mapping[str, Any], origin: str) -> None:
        """Merges a nested mapping into the settings; mappings are merged, all other values are replaced."""
        self._merge(self.values, layer, origin, ())

    def set(self, dotted: str, value: Any, origin: str) -> None:
        """Sets one key given as ``train.batch_per_rank``."""
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        self.add(nested, origin)

    def value(self, path: Sequence[str]) -> Any:
        """Returns the value of a key; None if no layer set it."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    def origin(self, path: tuple[str, ...]) -> str:
        """Returns the origin of a key, or of the nearest key above it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self._base

    def _merge(self, target: dict[str, Any], layer: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> None:
        for key, value in layer.items():
            key_path = (*path, str(key))
            self._origins[key_path] = origin
            if isinstance(value, Mapping):
                below = target.get(key)
                if not isinstance(below, dict):
                    below = target[key] = {}
                self._merge(below, value, origin, key_path)
            else:
                target[key] = value


def validate(model: type[ModelT], layers: SettingLayers, elsewhere: Iterable[str] = ()) -> ModelT:
    """Returns the merged settings, checked; `elsewhere`: further keys that a wrong one may resemble."""
    try:
        return model.model_validate(layers.values)
    except ValidationError as error:
        problem = problem_of(model, error)
        path, origin = problem.path, layers.origin(problem.path)
        prefix = ""
        if origin.startswith("--"):
            prefix = layers.prefix
        else:
            # A file cannot set keys of the other files.
            elsewhere = ()
        removed = removed_key(path, layers.value(path))
        if removed is not None:
            problem = replace(problem, what=removed)
        elif problem.known:
            setting_key = None
            if path[-1] == "depth" and "stage_blocks" in problem.known:
                setting_key = _DEPTH
            elif len(path) == 1 or path[0] in ("engine", "sync"):
                setting_key = key_for_name(path[-1])
            remedy = f"use {setting_key}" if setting_key else _suggestion(model, problem, layers, prefix, elsewhere)
            problem = replace(problem, what=f"unknown key; {remedy}")
        if not path:
            prefix = ""
        raise UserError(f"{origin}: {prefix}{problem}") from None


def _suggestion(
    model: type[BaseModel], problem: Problem, layers: SettingLayers, prefix: str, elsewhere: Iterable[str]
) -> str:
    """Returns the valid keys nearest to an unknown one: the same name in another section, or a similar name."""
    *section, wrong_name = problem.path
    all_keys = [prefix + key.name for key in keys_of(model, layers.values)] + [*elsewhere]
    same_name = list(dict.fromkeys(key for key in all_keys if key.rpartition(".")[2] == wrong_name))[:3]
    similar = [prefix + ".".join((*section, name)) for name in close_names(wrong_name, problem.known)]
    suggestions = same_name
    if section:
        suggestions = [*same_name, *similar][:3]
    suggestions = suggestions or similar or close_names(wrong_name, all_keys)
    if suggestions:
        return f"did you mean {' or '.join(suggestions)}?"
    return f"known: {', '.join(problem.known)}"
