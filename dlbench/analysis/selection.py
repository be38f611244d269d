"""Selects runs by their properties, for `--where KEY=VALUE` of all commands that read runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from dlbench.analysis.comparability import system_content
from dlbench.errors import UserError, nearest
from dlbench.records.registry import describe
from dlbench.records.scan import LaunchedRun, Run
from dlbench.specs.comm import CommPlan
from dlbench.specs.plan import RunPlan
from dlbench.units import first_of

RunT = TypeVar("RunT", bound=LaunchedRun)

MAX_VALUES = 12  # Values of a key that an error lists.


def properties(run: LaunchedRun) -> dict[str, str]:
    """Returns the properties of a run by which it can be selected, except tags.

    They are `series`, `state`, `ranks`, `nodes`, `system` and `launcher`; of training runs also `side`, `variant`,
    every name of the registry, and keys of the system that affect speed (`system.modules`).
    """
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

    `where`: values as text by key of `properties`, or `tag.NAME` for a tag. `name` and `option`: names of the runs and
    of the option, for errors. Raises UserError: no run has such a key, or none has these values.
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
