"""Settings, tags and properties of the environment in which runs differ, and which groups have which value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dlbench.reading.comparability import averaged_id, comparable_values, is_shaping
from dlbench.reading.environments import compare, order_of
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run

Kind = Literal["registered", "setting", "tag", "environment"]

NOT_SET = "not set"

MAX_VALUES = 12
"""Values of a key that are listed; the rest are counted."""
MAX_DIFFERENCES = 200

_LEFT_OUT = frozenset({"run_id", "created", "format", "version", "overrides", "tags", "series", "layout"})
"""Parts of a plan that name the run, its place in its series or its size, or that are compared elsewhere."""

_APART = (
    *("model.", "data.", "train.", "quality.", "measure.", "engine.", "sync.", "watch.", "fault."),
    *("checkpoint.every_",),
)
"""Settings that keep runs apart, by themselves or through a registered key."""

_SHOWN = frozenset(
    {
        *("workload.name", "workload.preset", "engine.name", "train.precision", "data.source", "train.batch_per_rank"),
        *("train.gradient_accumulation", "model.memory_format", "system.launch.launcher", "system.name"),
        "measure.phases",
        *("data.staging", "data.staging_tier", "data.shuffle", "data.partition", "data.cache"),
    }
)
"""Settings that a registered key shows."""

_SIZES = frozenset({"ranks", "nodes"})
"""Registered keys that a series varies on purpose."""

_SHARE = "batch_per_rank"
"""The registered key that strong scaling varies with the rank count."""


@dataclass(frozen=True, kw_only=True)
class DifferentValue:
    """One value of a key."""

    value: str
    num_runs: int
    groups: tuple[str, ...]
    """Ids of the groups that have it in all or some of their runs."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """A key with more than one value."""

    kind: Kind
    key: str
    expected: bool
    """Whether it differs by nature: host, job, rank count."""
    keeps_apart: bool
    """Whether runs that differ here are not compared."""
    values: tuple[DifferentValue, ...]
    """The most frequent first, at most `MAX_VALUES`."""
    num_values: int

    @property
    def is_within_a_group(self) -> bool:
        """Whether runs that are compared with each other have different values."""
        return _overlap([value.groups for value in self.values])


Values = Sequence[tuple[str, Sequence[str]]]
"""Each value of a key with the ids of its runs, the most frequent first."""


def differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """In what runs differ, the most telling first; at most `MAX_DIFFERENCES`."""
    return run_differences(runs)[:MAX_DIFFERENCES]


def run_differences(runs: Sequence[Run]) -> tuple[RunDifference, ...]:
    """In what runs with a record differ, the most telling first.

    Registered keys come first, then settings of the plan that no registered key shows, tags, the environment, and last
    what differs by nature.
    """
    known = [run for run in runs if run.record is not None]
    groups = {run.plan.run_id: averaged_id(run) for run in known}
    tags = _several_values({run.plan.run_id: dict(run.plan.tags) for run in known})
    found = [
        *_registered(known, groups),
        *_settings(known, groups),
        *(_difference("tag", key, values, groups) for key, values in tags),
        *_environment(known, groups),
    ]
    order: dict[Kind, int] = {"registered": 0, "setting": 1, "tag": 2, "environment": 3}
    # Sorting keeps the order of what is equal: that of the registry, of the plan, of the table above.
    return tuple(sorted(found, key=lambda item: (item.expected, order[item.kind])))


def _difference(
    kind: Kind,
    key: str,
    values: Values,
    groups: Mapping[str, str],
    *,
    expected: bool = False,
    keeps_apart: bool = False,
) -> RunDifference:
    """`groups` holds the group of each run, by run id."""
    of_values = [tuple(dict.fromkeys(groups[run_id] for run_id in run_ids)) for _, run_ids in values]
    listed = zip(values[:MAX_VALUES], of_values, strict=False)
    return RunDifference(
        kind=kind,
        key=key,
        expected=expected,
        # What differs within a group keeps no runs apart: its runs are compared across it.
        keeps_apart=keeps_apart and not _overlap(of_values),
        values=tuple(
            DifferentValue(value=value, num_runs=len(run_ids), groups=own) for (value, run_ids), own in listed
        ),
        num_values=len(values),
    )


def _overlap(of_values: Sequence[tuple[str, ...]]) -> bool:
    """Whether a group has more than one of the values."""
    groups = [group for own in of_values for group in own]
    return len(groups) > len(set(groups))


def _registered(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    comparable = {name for run in runs for name in comparable_values(run)}
    strong = {run.plan.run_id for run in runs if run.plan.series.scaling == "strong"}
    for key, values in _several_values({run.plan.run_id: _registered_values(run) for run in runs}):
        expected, keeps_apart = key in _SIZES, key in comparable
        if key == _SHARE and strong:
            # Under strong scaling a rank's share of the global batch follows from the rank count.
            chosen = [value for value, run_ids in values if not strong.issuperset(run_ids)]
            expected, keeps_apart = len(chosen) < 2, len(chosen) > 1
        yield _difference("registered", key, values, groups, expected=expected, keeps_apart=keeps_apart)


def _registered_values(run: Run) -> dict[str, str]:
    """All registered keys, and the global batch where it has to agree."""
    values = {key.name: key.value(run) for key in KEYS} | comparable_values(run)
    return {name: value or "none" for name, value in values.items()}


def _settings(runs: Sequence[Run], groups: Mapping[str, str]) -> Iterator[RunDifference]:
    found = _several_values({run.plan.run_id: _flat(run) for run in runs})
    # What a system's file says beside the launcher explains least.
    for key, values in sorted(found, key=lambda item: item[0].startswith("system.") and not _keeps_apart(item[0])):
        if key not in _SHOWN:
            yield _difference("setting", key, values, groups, keeps_apart=_keeps_apart(key))


def _keeps_apart(key: str) -> bool:
    """Whether `dlbench.reading.comparability` keeps runs apart that differ in this setting of their plans."""
    if key.startswith("system."):
        return is_shaping(key)
    return key.startswith(_APART) and key != "measure.stall_timeout_s"


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


def _several_values(of_runs: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Values]]:
    """Keys that have several values among the runs (by run id), in the order in which they are first met."""
    for key in dict.fromkeys(key for own in of_runs.values() for key in own):
        by_value: dict[str, list[str]] = {}
        for run_id, own in of_runs.items():
            by_value.setdefault(own.get(key, NOT_SET), []).append(run_id)
        if len(by_value) > 1:
            yield key, sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))


def _environment(runs: Sequence[Run], groups: Mapping[str, str]) -> list[RunDifference]:
    found = compare(runs).differences if runs else ()
    ordered = sorted(found, key=lambda item: order_of(item.key))
    return [_difference("environment", item.key, item.values, groups, expected=item.expected) for item in ordered]
