"""In which settings, tags and properties of the environment runs differ, and which runs have which value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dlbench.reading.comparability import comparable_values, group_id
from dlbench.reading.environments import compare
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run

Kind = Literal["registered", "setting", "tag", "environment"]

NOT_SET = "not set"

_TELLING = ("dlbench.commit", "package.", "gpu.", "cpu.", "kernel", "os", "python", "libc", "memory.", "variable.")
"""Keys of the environment that explain differences of speed, the likeliest first."""

_LEFT_OUT = frozenset({"run_id", "created", "format", "version", "overrides", "tags", "series", "layout"})
"""Parts of a plan that name the run, its place in its series or its size, or that stand elsewhere."""

_APART = (
    *("model.", "data.", "train.", "quality.", "measure.", "engine.", "sync.", "watch.", "fault."),
    *("checkpoint.every_", "system.launch."),
)
"""Settings that keep runs apart, by themselves or through a registered key."""

_SIZES = frozenset({"ranks", "nodes"})
"""Registered keys that a series varies on purpose."""

_SHARE = "batch_per_rank"
"""The registered key that strong scaling varies with the rank count."""


@dataclass(frozen=True, kw_only=True)
class KeyDifference:
    """A key with more than one value."""

    kind: Kind
    key: str
    expected: bool
    """Whether it differs by nature: host, job, rank count."""
    keeps_apart: bool
    """Whether runs that differ here are not compared."""
    values: tuple[tuple[str, tuple[str, ...]], ...]
    """Each value with the ids of its runs, the most frequent first."""


def run_differences(runs: Sequence[Run]) -> tuple[KeyDifference, ...]:
    """What differs among runs with a record, the most telling first.

    Registered keys come first, then settings of the plan that no registered key shows, tags, the environment, and last
    what differs by nature.
    """
    known = [run for run in runs if run.record is not None]
    groups = {run.plan.run_id: group_id(run) for run in known}
    found = [
        *(_within_groups(item, groups) for item in (*_registered(known), *_settings(known))),
        *_of_each("tag", {run.plan.run_id: dict(run.plan.tags) for run in known}),
        *_environment(known),
    ]
    order: dict[Kind, int] = {"registered": 0, "setting": 1, "tag": 2, "environment": 3}
    # Sorting keeps the order of what is equal: that of the registry, of the plan, of the table above.
    return tuple(sorted(found, key=lambda item: (item.expected, order[item.kind])))


def _within_groups(item: KeyDifference, groups: Mapping[str, str]) -> KeyDifference:
    """What differs within a group keeps no runs apart: its runs are compared across it."""
    of_values = [{groups[run_id] for run_id in run_ids} for _, run_ids in item.values]
    is_within = sum(map(len, of_values)) > len(set().union(*of_values))
    return replace(item, keeps_apart=False) if is_within else item


def _registered(runs: Sequence[Run]) -> Iterator[KeyDifference]:
    values = {run.plan.run_id: _registered_values(run) for run in runs}
    comparable = {name for run in runs for name in comparable_values(run)}
    shared_out = {run.plan.run_id for run in runs if run.plan.series.scaling == "strong"}
    for item in _of_each("registered", values):
        expected, keeps_apart = item.key in _SIZES, item.key in comparable
        if item.key == _SHARE and shared_out:
            # Where the global batch is shared out, a rank's part of it follows from the rank count.
            chosen = [value for value, run_ids in item.values if not shared_out.issuperset(run_ids)]
            expected, keeps_apart = len(chosen) < 2, len(chosen) > 1
        yield replace(item, expected=expected, keeps_apart=keeps_apart)


def _registered_values(run: Run) -> dict[str, str]:
    """All registered keys, and the global batch where that one has to agree."""
    values = {key.name: key.value(run) for key in KEYS} | comparable_values(run)
    return {name: value or "none" for name, value in values.items()}


def _settings(runs: Sequence[Run]) -> Iterator[KeyDifference]:
    shown = {_plan_key(key.name) for key in KEYS}
    found = _of_each("setting", {run.plan.run_id: _flat(run) for run in runs})
    # What a system's file says beside the launcher tells least.
    for item in sorted(found, key=lambda item: item.key.startswith("system.") and not _keeps_apart(item.key)):
        if item.key in shown:
            continue
        yield KeyDifference(
            kind="setting", key=item.key, expected=False, keeps_apart=_keeps_apart(item.key), values=item.values
        )


def _keeps_apart(key: str) -> bool:
    """Whether `dlbench.reading.comparability` keeps runs apart that differ in this setting of their plans."""
    return key.startswith(_APART) and key != "measure.stall_timeout_s"


def _plan_key(name: str) -> str:
    """The key of the plan that a registered key shows, where it is one."""
    return {
        "workload": "workload.name",
        "preset": "workload.preset",
        "engine": "engine.name",
        "precision": "train.precision",
        "data": "data.source",
        "batch_per_rank": "train.batch_per_rank",
        "gradient_accumulation": "train.gradient_accumulation",
        "memory_format": "model.memory_format",
        "launcher": "system.launch.launcher",
        "system": "system.name",
        "phases": "measure.phases",
    }.get(name, "")


def _flat(run: Run) -> dict[str, str]:
    """Settings of a plan as `--set` names them."""
    content = run.plan.model_dump(mode="json", exclude=set(_LEFT_OUT))
    workload = content.pop("workload")
    nested = {key: value for key, value in workload.items() if isinstance(value, dict)}
    plain = {key: value for key, value in workload.items() if not isinstance(value, dict)}
    return dict(_leaves({**content, "workload": plain, **nested}, ""))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, "none" if value is None else str(value)


def _of_each(kind: Kind, values: Mapping[str, Mapping[str, str]]) -> Iterator[KeyDifference]:
    """Keys that have several values, in the order in which they are first met."""
    for key in dict.fromkeys(key for own in values.values() for key in own):
        by_value: dict[str, list[str]] = {}
        for run_id, own in values.items():
            by_value.setdefault(own.get(key, NOT_SET), []).append(run_id)
        if len(by_value) > 1:
            ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
            told = tuple((value, tuple(run_ids)) for value, run_ids in ordered)
            yield KeyDifference(kind=kind, key=key, expected=False, keeps_apart=False, values=told)


def _environment(runs: Sequence[Run]) -> list[KeyDifference]:
    found = compare(runs).differences if runs else ()
    differences = [
        KeyDifference(kind="environment", key=item.key, expected=item.expected, keeps_apart=False, values=item.values)
        for item in found
    ]
    return sorted(differences, key=lambda item: (_rank(item.key), item.key))


def _rank(key: str) -> int:
    return next((number for number, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING))
