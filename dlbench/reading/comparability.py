"""Which runs may be compared: equal registered keys, and equal work by the plan itself.

The registry (`dlbench.records.registry`) names what a reader must see. Two runs can agree there and
still differ in something `--set` changed (a learning rate, an image size); such runs are kept apart
by a digest of everything in the plan that decides what is computed and how ranks are started. So are
runs from which something was taken away on purpose to compare others with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlbench.records.registry import KEYS
from dlbench.records.scan import Run

# Words about the workload; they change nothing that is computed.
_WORDS = {"title", "about", "notice", "sample_unit"}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One property that all runs of a group share."""

    name: str
    title: str
    value: str


class Labelled(Protocol):
    """A group of runs in a report."""

    @property
    def id(self) -> str:
        """Its digest."""

    @property
    def label(self) -> str:
        """It in a few words."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What its runs share."""


def unique_labels(groups: Sequence[Labelled]) -> list[str]:
    """Labels of groups: behind equal ones stand the conditions that differ, and the id where that is not enough."""
    labels = []
    for group in groups:
        twins = [other for other in groups if other.label == group.label]
        differing = [
            f"{one.title} {one.value}" for one in group.conditions if any(one not in twin.conditions for twin in twins)
        ]
        labels.append(", ".join([group.label, *differing]))
    return [
        label if labels.count(label) == 1 else f"{label}, configuration {group.id}"
        for group, label in zip(groups, labels, strict=True)
    ]


def comparable_values(run: Run) -> dict[str, str]:
    """The registered keys that must match, by name; under strong scaling the global batch stands for the rank's."""
    values = {key.name: key.value(run) for key in KEYS if key.comparable}
    if run.plan.series.scaling == "strong":
        del values["batch_per_rank"]
        values["global_batch"] = str(run.plan.global_batch)
    return values


def group_id(run: Run) -> str:
    """A digest equal for exactly those runs that may be compared or averaged; stable over time and machines."""
    return _digest(comparable_content(run))


def planned_id(run: Run) -> str:
    """The same without the device, which only a record tells: finds runs that were to join a group and died."""
    content = comparable_content(run)
    del content["registered"]["device"]
    return _digest(content)


def comparable_content(run: Run) -> dict[str, Any]:
    """All of a run that must be equal for two runs to be comparable, as JSON has it."""
    plan = run.plan
    workload = plan.workload.model_dump(mode="json", exclude=_WORDS)
    measure = plan.measure.model_dump(mode="json", exclude={"stall_timeout_s"})
    if plan.series.scaling == "strong":
        del workload["train"]["batch_per_rank"]
    # What acts in no run of that kind does not tell runs apart.
    if plan.measure.until == "quality":
        del measure["measured_steps"]
    else:
        del workload["quality"], workload["data"]["validation"]
    content: dict[str, Any] = {
        "registered": comparable_values(run),
        "workload": workload,
        "measure": measure,
        "launch": plan.system.launch.model_dump(mode="json"),
    }
    # A twin is no repeat of a plain run that happens to have its settings: it ran to be subtracted.
    if plan.series.variant != "plain":
        content["variant"] = plan.series.variant
    # Sides of a paired comparison are kept apart even where both set the same (an A/A comparison).
    if plan.series.side:
        content["side"] = plan.series.side
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def group_id_without(run: Run, keys: Collection[str]) -> str:
    """A digest equal for runs that differ in nothing but some keys of `data`, such as `staging`."""
    content = comparable_content(run)
    data = content["workload"]["data"]
    content["workload"]["data"] = {key: value for key, value in data.items() if key not in keys}
    # In words; all of it is in the keys, too.
    del content["registered"]["data_path"]
    return _digest(content)


def chosen_settings(run: Run) -> dict[str, str]:
    """What a person changed for this run, `--set`, swept values and those of its side, key by key."""
    series = run.plan.series
    of_side = series.sides.get(series.side, {}) if series.side else {}
    return {key: str(value) for key, value in sorted({**run.plan.overrides, **series.axes, **of_side}.items())}
