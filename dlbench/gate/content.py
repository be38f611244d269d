"""What two runs must share before they are compared, key by key, so that a difference can be named and allowed.

The same content that `dlbench.reading.comparability` makes one digest of: the registered keys, and everything in the
plan that decides what is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlbench.errors import UserError, nearest
from dlbench.reading.comparability import comparable_content
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run
from dlbench.specs.plan import AxisValue

TITLES = {key.name: key.title for key in KEYS} | {"global_batch": "Global batch"}

MAX_NAMED = 8
"""Differing keys that a refusal names; it counts the others."""

# Keys of the plan (as `--set` writes them) that a registered key speaks of: allowing one allows the other.
_SPEAKS_OF: Mapping[str, tuple[str, ...]] = {
    "workload": ("name",),
    "engine": ("engine.name",),
    "engine_settings": ("engine",),
    "exchange": ("sync",),
    "precision": ("train.precision",),
    "data": ("data",),
    "batch_per_rank": ("train.batch_per_rank",),
    "global_batch": ("train.batch_per_rank",),
    "gradient_accumulation": ("train.gradient_accumulation",),
    "memory_format": ("model.memory_format",),
    "goal": ("measure.until", "quality"),
    "checkpoints": ("checkpoint",),
    "launcher": ("system.launch.launcher",),
    "system": ("system",),
    "cores_per_rank": ("layout.cores_per_rank",),
    "watching": ("watch",),
    "fault": ("fault",),
    "phases": ("measure.phases",),
}

# What a comparison is of: runs that differ here are never put into one ratio.
_NEVER = {"workload", "name"}
# What is in the plan under other names than `--set` has.
_ROOTS = {"workload": "", "measure": "measure.", "launch": "system.launch."}


@dataclass(frozen=True, kw_only=True)
class Content:
    """What decides whether runs may be compared."""

    registered: Mapping[str, str]
    """Registered keys by name, and `global_batch` under strong scaling."""
    plan: Mapping[str, AxisValue]
    """Everything else, by its key in the plan; `variant` and `side` where a run has one."""


@dataclass(frozen=True, kw_only=True)
class KeyDifference:
    """A key on which two sides differ."""

    key: str
    """Its name, as `--allow` takes it."""
    title: str
    a: str
    b: str

    @property
    def text(self) -> str:
        """The key with both values."""
        return f"{self.title}: {self.a or 'none'} against {self.b or 'none'}"


def content_of(run: Run) -> Content:
    """The comparable content of a run."""
    found = comparable_content(run)
    plan: dict[str, AxisValue] = {}
    for root, value in found.items():
        if root != "registered":
            plan.update(_leaves(value, _ROOTS.get(root, f"{root}.")))
    return Content(registered=found["registered"], plan=dict(sorted(plan.items())))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, AxisValue]]:
    """Values with their keys, lists by position."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = ((str(i), item) for i, item in enumerate(value))
    else:
        yield path.removesuffix("."), value
        return
    for name, item in items:
        yield from _leaves(item, f"{path}{name}.")


def parse_allowed(texts: Iterable[str], known: Iterable[Content]) -> frozenset[str]:
    """Keys that may differ, from `--allow KEY[,KEY]`.

    Raises:
        UserError: no run has such a key, or it must never differ.
    """
    keys = {key.strip() for text in texts for key in text.split(",") if key.strip()}
    contents = list(known)
    paths = {path for content in contents for path in content.plan} | {p for ps in _SPEAKS_OF.values() for p in ps}
    for key in sorted(keys):
        if key in _NEVER:
            raise UserError(f"--allow {key}: runs of different workloads are never compared")
        if key not in TITLES and not any(_is_at(path, key) for path in paths):
            raise UserError(f"--allow {key}: no such key; {nearest(key, {*TITLES, *paths} - _NEVER)}")
    return frozenset(keys)


def without(content: Content, allowed: Collection[str]) -> Content:
    """The content less the keys that may differ, and less those that speak of the same."""
    return Content(
        registered={name: value for name, value in content.registered.items() if not _allows_name(name, allowed)},
        plan={path: value for path, value in content.plan.items() if not _allows_path(path, allowed)},
    )


def digest(content: Content) -> str:
    """Equal for equal content."""
    text = json.dumps([dict(content.registered), dict(content.plan)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def differences(a: Content, b: Content) -> list[KeyDifference]:
    """Keys on which both differ: registered ones first, then those of the plan of which no registered one speaks."""
    found = [
        KeyDifference(
            key=name, title=TITLES.get(name, name), a=a.registered.get(name, ""), b=b.registered.get(name, "")
        )
        for name in dict.fromkeys([*a.registered, *b.registered])
        if a.registered.get(name) != b.registered.get(name)
    ]
    told = {one.key for one in found}
    for path in sorted({*a.plan, *b.plan}):
        here, there = (_value(content.plan, path) for content in (a, b))
        if here != there and not _allows_path(path, told):
            found.append(KeyDifference(key=path, title=path, a=here, b=there))
    return found


def _value(plan: Mapping[str, AxisValue], path: str) -> str:
    if path not in plan:
        return "not set"
    value = plan[path]
    return value if isinstance(value, str) else json.dumps(value)


def named(found: Iterable[KeyDifference]) -> str:
    """Differing keys in a sentence, the first of them by name."""
    texts = [one.text for one in found]
    more = f"; and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return "; ".join(texts[:MAX_NAMED]) + more


def _allows_path(path: str, allowed: Collection[str]) -> bool:
    return any(_is_at(path, key) or any(_is_at(path, prefix) for prefix in _SPEAKS_OF.get(key, ())) for key in allowed)


def _allows_name(name: str, allowed: Collection[str]) -> bool:
    prefixes = _SPEAKS_OF.get(name, ())
    return name in allowed or any(_is_at(p, key) or _is_at(key, p) for p in prefixes for key in allowed)


def _is_at(path: str, key: str) -> bool:
    """Whether a key of the plan is this one, or one below it."""
    return path == key or path.startswith(f"{key}.")
