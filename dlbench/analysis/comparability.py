"""Decides which runs may be compared and which are repeats, and selects runs by `--where KEY=VALUE`.

**Comparable** runs (`group_id`) have equal registered keys (`dlbench.records.registry`) and an equal digest of
everything in the plan that decides what is computed and how ranks are started. **Repeats** are comparable, with equal
settings of the system (`system_content`) and equal recorded software and machines: only they may be averaged without a
warning. Groups of a report have equal settings (`averaged_id`); other differences are a warning.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dlbench.analysis.environments import facts
from dlbench.confidential import is_secret_value
from dlbench.errors import UserError, nearest
from dlbench.records.registry import KEYS, describe
from dlbench.records.scan import LaunchedRun, Run
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import LaunchPlan, RunPlan, value_text
from dlbench.units import first_of

# Texts about the workload, which change nothing that is computed.
_WORDS = {"title", "about", "notice", "sample_unit"}
_STORAGE = "system.storage."
NOT_SHAPING = frozenset(  # Keys of a system that do not affect the speed of runs; all others do.
    {
        # Texts, and peak rates that figures are compared with.
        *("system.title", "system.storage.shared_title"),
        *("system.node.peak_tflops", "system.node.peak_source"),
        # Data sheets, which no run reads.
        *("system.device", "system.network", "system.modelled"),
        # State of a container's image on the node that planned; its digest and name identify it.
        "system.container.as_planned",
        # Account, time limits and choice of nodes. Excluding a slow node keeps runs comparable.
        *("system.slurm.account", "system.slurm.qos", "system.slurm.reservation", "system.slurm.time_limit"),
        *("system.slurm.nodelist", "system.slurm.exclude"),
        *("system.slurm.requeue", "system.slurm.max_requeues", "system.slurm.max_time"),
    }
)
_SECTIONS_NOT_SHAPING = tuple(f"{name}." for name in NOT_SHAPING)
NOT_SHAPING_OPTIONS = frozenset(  # Options of `system.slurm.extra` that do not affect speed, by sbatch's names.
    {
        *("begin", "comment", "deadline", "hold", "mail-type", "mail-user", "nice", "priority", "time-min"),
        *("wait-all-nodes", "wckey"),
    }
)
AFTER_INTERRUPTION = "after an interruption"  # Text for resumed runs (`Record.goes_on`).
RunT = TypeVar("RunT", bound=LaunchedRun)
MAX_VALUES = 12  # Values of a key that an error lists.


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A property that all runs of a group share."""

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
    """Returns the labels of groups; differing conditions, and the id if needed, are added to equal labels."""
    conditions_by_label: dict[str, list[tuple[Condition, ...]]] = {}
    for group in groups:
        conditions_by_label.setdefault(group.label, []).append(group.conditions)
    labels = []
    for group in groups:
        shared = set(group.conditions).intersection(*conditions_by_label[group.label])
        differing = [
            f"{condition.title} {condition.value}" for condition in group.conditions if condition not in shared
        ]
        labels.append(", ".join([group.label, *differing]))
    counts = Counter(labels)
    for i, group in enumerate(groups):
        if counts[labels[i]] > 1:
            labels[i] = f"{labels[i]}, configuration {group.id}"
    return labels


def differing_settings(groups: Sequence[tuple[str, LaunchPlan]]) -> list[tuple[Condition, ...]]:
    """Returns the settings of the system of each group (id, plan) that differ from those of groups with its id."""
    settings_by_subject: dict[str, list[dict[str, str]]] = {}
    for subject, plan in groups:
        settings_by_subject.setdefault(subject, []).append(system_content(plan))
    differing = []
    for subject, plan in groups:
        conditions = []
        for key, value in system_content(plan).items():
            if {settings.get(key) for settings in settings_by_subject[subject]} != {value}:
                conditions.append(Condition(name=key, title=key, value=value))
        differing.append(tuple(conditions))
    return differing


def comparable_values(run: Run) -> dict[str, str]:
    """Returns the registered keys that must match, by name; under strong scaling with the global batch."""
    values = {key.name: key.value(run) for key in KEYS if key.comparable}
    if run.plan.series.scaling == "strong":
        del values["batch_per_rank"]
        values["global_batch"] = str(run.plan.global_batch)
    return values


def group_id(run: Run) -> str:
    """Returns a digest equal for exactly those runs that may be compared; stable over time and machines."""
    return digest_of(comparable_content(run))


def averaged_id(run: Run) -> str:
    """Returns a digest equal for runs of one group of a report: comparable, with equal settings of the system."""
    return digest_of(_averaged_content(run))


def run_facts(run: Run) -> dict[str, str]:
    """Returns the settings of the system and the recorded environment of a run, by key; equal for repeats."""
    if run.record is None:
        return system_content(run.plan)
    return {**system_content(run.plan), **facts(run.record)}


def planned_id(run: Run) -> str:
    """Returns `averaged_id` without the keys of the record, to find runs of a group that have none."""
    content = _averaged_content(run)
    content.pop("resumed", None)
    for name in ("device", "precision", "memory_format"):
        del content["registered"][name]
    return digest_of(content)


def _averaged_content(run: Run) -> dict[str, Any]:
    return {**comparable_content(run), "system": system_content(run.plan)}


def system_content(plan: LaunchPlan) -> dict[str, str]:
    """Returns the settings of the system that affect the speed of a run, by key; not those without effect in it."""
    # The plan is dumped, not its sections, for which pydantic would build further serializers.
    settings = dict(_settings(plan.model_dump(mode="json", include={"system"})["system"], "system"))
    settings["system.slurm.extra"] = ", ".join(
        option for option in plan.system.slurm.extra if option.partition("=")[0] not in NOT_SHAPING_OPTIONS
    )
    tiers = {"local", "memory"}
    data = getattr(getattr(plan, "workload", None), "data", None)
    if data is not None and data.staging != "none":
        tiers.discard(data.staging_tier)
    idle = tuple(f"{_STORAGE}{tier}." for tier in sorted(tiers))
    if plan.system.scheduler == "none":
        idle = (*idle, "system.slurm.")
    if not plan.system.container.is_used:
        idle = (*idle, "system.container.")
    return {key: value for key, value in sorted(settings.items()) if is_shaping(key) and not key.startswith(idle)}


def is_shaping(key: str) -> bool:
    """Returns whether a key of the system affects the speed of its runs."""
    return key not in NOT_SHAPING and not key.startswith(_SECTIONS_NOT_SHAPING)


def _settings(value: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        path = f"{name}.{key}"
        if isinstance(inner, dict):
            yield from _settings(inner, path)
            continue
        text = str(inner)
        if isinstance(inner, list):
            text = ", ".join(map(str, inner))
        if inner in (None, [], ""):
            text = "none"
        # A digest looks like a secret key, but distinguishes two images.
        elif not key.endswith("sha256") and is_secret_value(text):
            text = "not shown"
        yield path, text


def comparable_content(run: Run) -> dict[str, Any]:
    """Returns everything that must be equal for two runs to be comparable, as JSON objects."""
    plan = run.plan
    not_compared = {"workload": _WORDS, "measure": {"stall_timeout_s"}}
    sections = plan.model_dump(mode="json", include={"workload", "measure"}, exclude=not_compared)
    workload, measure = sections["workload"], sections["measure"]
    if plan.series.scaling == "strong":
        del workload["train"]["batch_per_rank"]
    # Keys without effect in such runs are left out.
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
    # A control run is no repeat of a plain run, even with equal settings.
    if plan.series.variant != "plain":
        content["variant"] = plan.series.variant
    # Sides of a paired comparison are different groups even with equal settings (an A/A comparison).
    if plan.series.side:
        content["side"] = plan.series.side
    # A resumed run starts from other weights, and its times to a quality are over several starts.
    if run.record is not None and run.record.goes_on:
        content["resumed"] = AFTER_INTERRUPTION
    return content


def digest_of(content: Mapping[str, object]) -> str:
    """Returns twelve digits of the SHA-256 of a content as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def averaged_id_without(run: Run, keys: Collection[str]) -> str:
    """Returns a digest equal for runs that differ only in some keys of `data`, such as `staging`."""
    content = _averaged_content(run)
    data = content["workload"]["data"]
    content["workload"]["data"] = {key: value for key, value in data.items() if key not in keys}
    # The registered key is a text of the same keys.
    del content["registered"]["data_path"]
    # Storage tiers are settings of staging.
    content["system"] = {key: value for key, value in content["system"].items() if not key.startswith(_STORAGE)}
    return digest_of(content)


def chosen_settings(run: Run) -> dict[str, str]:
    """Returns the settings of `--set`, sweeps and the run's side, as ``--set`` takes them; for a ladder the step."""
    series = run.plan.series
    changed = {**run.plan.overrides, **series.named}
    if series.side:
        changed |= series.sides.get(series.side, {})
    return {key: value_text(key, value) for key, value in sorted(changed.items())}


def properties(run: LaunchedRun) -> dict[str, str]:
    """Returns the properties of a run by which it can be selected, except tags; more of them for training runs."""
    plan = run.plan
    assert isinstance(plan, RunPlan | CommPlan)
    values = {
        "series": plan.series.id,
        "state": run.state,
        "ranks": str(plan.layout.ranks),
        "nodes": str(plan.layout.nodes),
        "system": plan.system.name,
        "launcher": plan.system.launch.launcher,
    }
    if isinstance(run, Run):
        series = run.plan.series
        values |= {"side": series.side, "variant": series.variant, **describe(run), **system_content(plan)}
    return values


def select(runs: Sequence[RunT], name: str, where: Mapping[str, str], option: str) -> list[RunT]:
    """Returns the runs with all these properties, in their order.

    `where`: values as text by key of `properties`, or `tag.NAME`; `name`, `option`: of the runs and the option, for
    errors. Raises UserError: no run has such a key, or none has these values.
    """
    if not where:
        return list(runs)
    selected = [(run, properties(run)) for run in runs]
    applied: list[str] = []
    for key, expected in where.items():
        values = [_value(run, run_properties, key) for run, run_properties in selected]
        if selected and all(value is None for value in values):
            names = set[str]().union(*(run_properties for _, run_properties in selected))
            raise UserError(f"{option} {key}: no such property of runs; {nearest(key, [*names, 'tag.NAME'])}")
        if expected not in values:
            runs_text = f"run of {name}"
            if applied:
                runs_text += f" with {', '.join(applied)}"
            existing = sorted({value for value in values if value})
            hint = "none has any value of it"
            if existing:
                hint = f"existing values: {first_of(existing, MAX_VALUES)}"
            for close in difflib.get_close_matches(expected, existing, n=1):
                hint += f"; did you mean {close}?"
            raise UserError(f"{option} {key}={expected}: no {runs_text} has it; {hint}")
        selected = [pair for pair, value in zip(selected, values, strict=True) if value == expected]
        applied.append(f"{key}={expected}")
    return [run for run, _ in selected]


def _value(run: LaunchedRun, run_properties: Mapping[str, str], key: str) -> str | None:
    if not key.startswith("tag."):
        return run_properties.get(key)
    if not isinstance(run.plan, RunPlan):
        return ""
    return run.plan.tags.get(key.removeprefix("tag."), "")
