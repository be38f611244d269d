"""Which runs may be compared, and which are repeats: the same once more.

**Comparable** (`group_id`): equal registered keys, and equal work by the plan itself. The registry
(`dlbench.records.registry`) names what a reader must see. Two runs can agree there and still differ in something
`--set` changed (a learning rate, an image size); such runs are kept apart by a digest of everything in the plan that
decides what is computed and how ranks are started. So are runs from which something was taken away on purpose to
compare others with them, and runs that went on after an interruption. Comparable runs may have other software: that is
what gates and trends are for.

**Repeats**: comparable, asked of the system alike (partition, exclusive nodes, modules, Python, ...:
`system_content`) and met by equal software and machines (what their records say of both). Only repeats may be averaged
without a word. A report puts runs that were asked for unlike into groups of their own (`averaged_id`); what only the
records show is a doubt (`dlbench.analysis.repeats`), because a scaling series is not torn apart by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dlbench.analysis.environments import facts
from dlbench.confidential import is_secret_value
from dlbench.records.registry import KEYS
from dlbench.records.scan import Run
from dlbench.specs.plan import LaunchPlan, value_text

# Words about the workload; they change nothing that is computed.
_WORDS = {"title", "about", "notice", "sample_unit"}

_STORAGE = "system.storage."

NOT_SHAPING = frozenset(  # Keys of a system that do not shape how fast its runs are; every other one does.
    {
        # Words, and peak rates that figures are compared with.
        *("system.title", "system.storage.shared_title"),
        *("system.node.peak_tflops", "system.node.peak_source"),
        # Data sheets, which no run reads.
        *("system.device", "system.network", "system.modelled"),
        # What a node knows a container's image again by; its digest and its name say which it is.
        "system.container.as_planned",
        # Who pays, when and how long; which nodes of the kind. Leaving out a slow node keeps runs comparable.
        *("system.slurm.account", "system.slurm.qos", "system.slurm.reservation", "system.slurm.time_limit"),
        *("system.slurm.nodelist", "system.slurm.exclude"),
        *("system.slurm.requeue", "system.slurm.max_requeues", "system.slurm.max_time"),
    }
)

NOT_SHAPING_OPTIONS = frozenset(  # The same for options of `system.slurm.extra`, by sbatch's names.
    {
        *("begin", "comment", "deadline", "hold", "mail-type", "mail-user", "nice", "priority", "time-min"),
        *("wait-all-nodes", "wckey"),
    }
)


AFTER_INTERRUPTION = "after an interruption"  # Of runs that went on from an earlier attempt (`Record.goes_on`).


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One property that all runs of a group share."""

    name: str
    title: str
    value: str


class Labelled(Protocol):
    """A group of runs in a report."""

    @property
    def id(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def conditions(self) -> tuple[Condition, ...]: ...


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


def differing_settings(groups: Sequence[tuple[str, LaunchPlan]]) -> list[tuple[Condition, ...]]:
    """What each group was asked for otherwise than others that are comparable with it; empty where none is. Takes what
    is equal for comparable groups, and a plan of each.
    """
    asked = [system_content(plan) for _, plan in groups]
    found = []
    for (subject, _), own in zip(groups, asked, strict=True):
        others = [other for (other_subject, _), other in zip(groups, asked, strict=True) if other_subject == subject]
        keys = [key for key in own if any(other.get(key) != own[key] for other in others)]
        found.append(tuple(Condition(name=key, title=key, value=own[key]) for key in keys))
    return found


def comparable_values(run: Run) -> dict[str, str]:
    """The registered keys that must match, by name; under strong scaling the global batch stands for the rank's."""
    values = {key.name: key.value(run) for key in KEYS if key.comparable}
    if run.plan.series.scaling == "strong":
        del values["batch_per_rank"]
        values["global_batch"] = str(run.plan.global_batch)
    return values


def group_id(run: Run) -> str:
    """A digest equal for exactly those runs that may be compared; stable over time and machines."""
    return digest_of(comparable_content(run))


def averaged_id(run: Run) -> str:
    """The same for runs that a report puts into one group: comparable, and asked of the system alike."""
    return digest_of(_averaged_content(run))


def run_facts(run: Run) -> dict[str, str]:
    """What a run was asked for of the system, and what it met, by key; equal for repeats."""
    return {**system_content(run.plan), **({} if run.record is None else facts(run.record))}


def planned_id(run: Run) -> str:
    """`averaged_id` without what only a record has: finds runs that were to join a group and died."""
    content = _averaged_content(run)
    content.pop("resumed", None)
    for name in ("device", "precision", "memory_format"):
        del content["registered"][name]
    return digest_of(content)


def _averaged_content(run: Run) -> dict[str, Any]:
    return {**comparable_content(run), "system": system_content(run.plan)}


def system_content(plan: LaunchPlan) -> dict[str, str]:
    """What was asked of the system and shapes how fast a run is, by key of the plan, in words.

    What acts in no run of that kind is left out: Slurm's keys where there is no scheduler, a container's
    where there is none, places of storage that nothing is staged to.
    """
    asked = dict(_settings(plan.system.model_dump(mode="json"), "system"))
    asked["system.slurm.extra"] = ", ".join(
        option for option in plan.system.slurm.extra if option.partition("=")[0] not in NOT_SHAPING_OPTIONS
    )
    data = getattr(getattr(plan, "workload", None), "data", None)
    tiers = {"local", "memory"} - ({data.staging_tier} if data is not None and data.staging != "none" else set())
    idle = tuple(f"{_STORAGE}{tier}." for tier in sorted(tiers))
    if plan.system.scheduler == "none":
        idle = (*idle, "system.slurm.")
    if not plan.system.container.is_used:
        idle = (*idle, "system.container.")
    return {key: value for key, value in sorted(asked.items()) if is_shaping(key) and not key.startswith(idle)}


def is_shaping(key: str) -> bool:
    """Whether a key of the system shapes how fast its runs are."""
    return not any(key == name or key.startswith(f"{name}.") for name in NOT_SHAPING)


def _settings(value: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """Keys with their values in words; a list is one value."""
    for key, inner in value.items():
        path = f"{name}.{key}"
        if isinstance(inner, dict):
            yield from _settings(inner, path)
            continue
        text = ", ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
        # A digest looks like a key, and is what distinguishes two images.
        is_secret = not key.endswith("sha256") and is_secret_value(text)
        yield path, "none" if inner in (None, [], "") else "not shown" if is_secret else text


def comparable_content(run: Run) -> dict[str, Any]:
    """All of a run that must be equal for two runs to be comparable, as JSON has it."""
    plan = run.plan
    workload = plan.workload.model_dump(mode="json", exclude=_WORDS)
    measure = plan.measure.model_dump(mode="json", exclude={"stall_timeout_s"})
    if plan.series.scaling == "strong":
        del workload["train"]["batch_per_rank"]
    # What acts in no run of that kind does not distinguish runs.
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
    # It trained on from other weights; to a quality, its times add up over several starts. No repeat of one that ran
    # through.
    if run.record is not None and run.record.goes_on:
        content["resumed"] = AFTER_INTERRUPTION
    return content


def digest_of(content: Mapping[str, object]) -> str:
    """Twelve digits of SHA-256 of a content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def averaged_id_without(run: Run, keys: Collection[str]) -> str:
    """A digest equal for runs that differ in nothing but some keys of `data`, such as `staging`."""
    content = _averaged_content(run)
    data = content["workload"]["data"]
    content["workload"]["data"] = {key: value for key, value in data.items() if key not in keys}
    # In words; all of it is in the keys, too.
    del content["registered"]["data_path"]
    # Places to stage to are asked for by these keys.
    content["system"] = {key: value for key, value in content["system"].items() if not key.startswith(_STORAGE)}
    return digest_of(content)


def chosen_settings(run: Run) -> dict[str, str]:
    """What a person changed for this run, `--set`, swept values and those of its side, as ``--set`` takes them; of a
    ladder's run the step.
    """
    series = run.plan.series
    of_side = series.sides.get(series.side, {}) if series.side else {}
    changed = {**run.plan.overrides, **series.named, **of_side}
    return {key: value_text(key, value) for key, value in sorted(changed.items())}
