"""Every decided key of a workload or system, explained: value with unit, meaning, and who set what is no default."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dlbench.specs.keys import Key, chosen, keys_of, models_in
from dlbench.specs.merge import Layers
from dlbench.units import exact_bytes

_UNITS = {"_s": "s", "_ms": "ms", "_steps": "steps", "_epochs": "epochs", "_samples": "samples", "_tflops": "TFLOP/s"}
"""Units by the end of a key's name."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key with what was decided."""

    section: str
    """Dotted name of the keys above it; empty for the first level."""
    name: str
    value: str
    """With its unit, e.g. ``128 MiB``."""
    meaning: str
    """One sentence; of a choice that of the value, and the other values."""
    default: str | None
    """The default where the value is another one; None where it is the default, or the default is nothing or zero."""
    origin: str | None
    """Who set what is no default (a file, a preset of it, an option); None for a default."""


def settings_of(model: type[BaseModel], content: Mapping[str, Any], layers: Layers) -> Iterator[Setting]:
    """The keys of a decided specification in their order.

    Args:
        model: the specification.
        content: its values, as in JSON.
        layers: which say who set what.
    """
    told: set[tuple[str, ...]] = set()
    for key in keys_of(model, content):
        path = key.path
        value: Any = content
        for depth, part in enumerate(path):
            value = value[part]
            if value is None and depth + 1 < len(path):  # a section that is left out
                path = path[: depth + 1]
                break
        if path in told:
            continue
        told.add(path)
        yield _left_out(model, path) if path != key.path else _setting(key, value, layers)


def _left_out(model: type[BaseModel], path: tuple[str, ...]) -> Setting:
    *above, name = path
    return Setting(
        section=".".join(above),
        name=name,
        value="none",
        meaning=section_meaning(model, path),
        default=None,
        origin=None,
    )


def section_meaning(model: type[BaseModel], path: tuple[str, ...], content: Mapping[str, Any] | None = None) -> str:
    """What a section holds, in a sentence."""
    models, values = [model], content or {}
    for part in path:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        values = values.get(part) or {}
        models = [m for field in fields for m in models_in(field.annotation)]
        models = chosen(models, values)
    return _sentences(models[0].__doc__ or "")[0] if models else ""


def _setting(key: Key, value: Any, layers: Layers) -> Setting:
    default = key.field.get_default(call_default_factory=True)
    required = default is PydanticUndefined
    plain = list(default) if isinstance(default, tuple) else default
    differs = required or value != plain
    return Setting(
        section=".".join(key.path[:-1]),
        name=key.path[-1],
        value=_value(key, value),
        meaning=_meaning(key, value),
        default=_value(key, plain) if differs and not required and plain else None,
        origin=layers.origin(key.path) if differs else None,
    )


def _row(row: dict[str, Any]) -> str:
    """A row of a table by what it says, e.g. ``(batch 4096, learning_rate 10)``."""
    parts = (f"{name} {part:g}" if isinstance(part, float) else f"{name} {part}" for name, part in row.items() if part)
    return f"({', '.join(parts)})"


def _value(key: Key, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_row(part) if isinstance(part, dict) else str(part) for part in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {part}" for name, part in value.items()) or "none"
    if isinstance(value, int) and key.is_size:
        return exact_bytes(value)
    if isinstance(value, int | float):
        unit = next((unit for end, unit in _UNITS.items() if key.path[-1].endswith(end)), "")
        return f"{value:.12g} {unit}".rstrip()
    return str(value) or "none"


def _meaning(key: Key, value: Any) -> str:
    sentences = _sentences(key.field.description or "")
    # Descriptions of choices say `value: meaning.` in turn.
    own = [sentence for sentence in sentences if sentence.startswith(f"{value}: ")]
    said = (own or sentences or [""])[0]
    others = [str(one) for one in typing.get_args(key.field.annotation) if isinstance(one, str)]
    unsaid = [one for one in others if one != value and not re.search(rf"\b{re.escape(one)}\b", said)]
    return f"{said} Or: {', '.join(unsaid)}." if unsaid and said else said


def _sentences(text: str) -> list[str]:
    """Sentences of one paragraph; ``e.g. 50%`` ends none."""
    return re.split(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)\s+", " ".join(text.split()))
